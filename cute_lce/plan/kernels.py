"""Which kernels calls need: the keys of `compile`'s cache. A key is everything that a compile depends on."""

from __future__ import annotations

from collections.abc import Sequence
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

    tokens: of the logits and of dhidden. dweight: of dweight. added: the dtype of a matrix to which dweight
    is added, "float32", "bfloat16" or "float16"; "": dweight is written, in the operands' dtype.
    """

    tokens: KernelConfig
    dweight: KernelConfig
    dtype: str = "bfloat16"
    target_dtype: str = "int64"
    added: str = ""
    terms: tuple[str, ...] = ()


class MergeKey(NamedTuple):
    """The key of a kernels.entry.merge.Merging."""

    arch: str
    target_dtype: str = "int64"


Key = ForwardKey | BackwardKey | MergeKey


def kernels(
    arch: str,
    dtype: str,
    target_dtype: str,
    added: str = "",
    forward: tuple[str, ...] = (),
    backward: tuple[str, ...] | None = None,
) -> list[Key]:
    """The keys of all kernels that calls with these types may need; added: see BackwardKey. forward,
    backward: the terms of either; None: the same. Calls whose backward has coefficients keep nothing."""
    row, keys = architecture(arch), dict[Key, None]()
    backward = forward if backward is None else backward
    for configs in row.configs:
        for config in configs.within(Gpu(arch, 1).serving(forward).columns).tokens:
            for keeps in (False,) if "coefficients" in backward else (False, True):
                keys[ForwardKey(config, dtype, target_dtype, keeps, forward)] = None
        for config in configs.within(Gpu(arch, 1).serving(backward).columns).tokens:
            for dweight in configs.dweight:
                keys[BackwardKey(config, dweight, dtype, target_dtype, added, backward)] = None
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
