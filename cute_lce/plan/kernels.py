"""Which kernels calls need: the keys of `compile`'s cache. A key is everything that a compile depends on."""

from __future__ import annotations

from typing import NamedTuple

from ..arch import KernelConfig, architecture


class ForwardKey(NamedTuple):
    """The key of a kernels.entry.forward.Forward.

    dtype: "bfloat16" or "float16", of both operands. target_dtype: "int32" or "int64".
    """

    config: KernelConfig
    dtype: str = "bfloat16"
    target_dtype: str = "int64"
    keeps: bool = False


class BackwardKey(NamedTuple):
    """The key of a kernels.entry.backward.Backward: its GEMMs' configurations, types as in ForwardKey."""

    logits: KernelConfig
    dhidden: KernelConfig
    dweight: KernelConfig
    dtype: str = "bfloat16"
    target_dtype: str = "int64"


Key = ForwardKey | BackwardKey


def kernels(arch: str, dtype: str, target_dtype: str) -> list[Key]:
    """The keys of all kernels that calls with these types may need; float16 keeps nothing."""
    row = architecture(arch)
    forwards = [ForwardKey(config, dtype, target_dtype) for config in row.configs]
    if dtype != "float16":
        forwards.append(ForwardKey(row.keep_config, dtype, target_dtype, keeps=True))
    gradients = row.gradient_config
    return [*forwards, BackwardKey(row.keep_config, gradients, gradients, dtype, target_dtype)]
