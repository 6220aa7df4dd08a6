"""Which kernels calls need: the keys of `compile`'s cache. A key is everything that a compile depends on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from ..arch import ARCHITECTURES, Gpu, KernelConfig, architecture


class ForwardKey(NamedTuple):
    """The key of a kernels.entry.forward.Forward.

    dtype: "bfloat16" or "float16", of both operands. target_dtype: "int32" or "int64". terms: names of
    arguments.TERMS, whose numbers are arguments.
    """

    config: KernelConfig
    dtype: str = "bfloat16"
    target_dtype: str = "int64"
    keeps: bool = False
    terms: tuple[str, ...] = ()


class BackwardKey(NamedTuple):
    """The key of a kernels.entry.backward.Backward: its GEMMs' configurations, types as in ForwardKey.

    tokens: of the logits. dhidden, dweight: of the gradients. added: the dtype of a matrix to which dweight
    is added, "float32", "bfloat16" or "float16"; "": dweight is written, in the operands' dtype.
    """

    tokens: KernelConfig
    dhidden: KernelConfig
    dweight: KernelConfig
    dtype: str = "bfloat16"
    target_dtype: str = "int64"
    added: str = ""
    terms: tuple[str, ...] = ()


class MultiplyKey(NamedTuple):
    """The key of a kernels.entry.multiply.Multiplying. dtype: the gradients'. added: as in BackwardKey."""

    arch: str
    dtype: str = "bfloat16"
    added: str = ""


class MergeKey(NamedTuple):
    """The key of a kernels.entry.merge.Merging."""

    arch: str
    target_dtype: str = "int64"


Key = ForwardKey | BackwardKey | MultiplyKey | MergeKey


class Terms(NamedTuple):
    """The terms (arguments.TERMS) of the kernels of a job.

    forward: of one that keeps nothing. keeps: of one that keeps; None: none does. backwards: of those that
    recompute all columns, some, and none.
    """

    forward: tuple[str, ...] = ()
    keeps: tuple[str, ...] | None = ()
    backwards: tuple[tuple[str, ...], ...] = ((),)


def kernels(
    arch: str,
    dtype: str,
    target_dtype: str,
    added: str = "",
    terms: Terms | None = None,
) -> list[Key]:
    """The keys of all kernels that calls with these types may need; added: see BackwardKey. terms: None:
    none."""
    row, keys = architecture(arch), dict[Key, None]()
    forward, keeps, backwards = terms or Terms()
    for configs in row.configs:
        for names, keep in ((forward, False), *(((keeps, True),) if keeps is not None else ())):
            widths = Gpu(arch, 1).serving(names, "keep" if keep else "forward").widths
            for config in configs.within(widths).forwards(keep):
                keys[ForwardKey(config, dtype, target_dtype, keep, names)] = None
        for names in backwards:
            pairs = configs.within(Gpu(arch, 1).serving(names, "backward").widths).pairs
            for pair, dweight in product(pairs, configs.dweight):
                keys[BackwardKey(*pair, dweight, dtype, target_dtype, added, names)] = None
    keys[MultiplyKey(arch, dtype, added)] = None
    return list(keys)


def carried(dtypes: Sequence[str] = ("bfloat16",)) -> list[Key]:
    """The keys of all kernels that a wheel carries, compiled: of every architecture, for int64 targets and no
    terms, those that add to a float32 buffer (grad_in_forward's too), and those of groups."""
    keys: dict[Key, None] = {}
    for arch in ARCHITECTURES:
        for dtype in dtypes:
            for added in ("", "float32"):
                keys.update(dict.fromkeys(kernels(arch, dtype, "int64", added)))
        keys[MergeKey(arch)] = None
    return list(keys)
