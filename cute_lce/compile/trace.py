"""Compile a key with the DSL, for an architecture that need not be this machine's."""

from __future__ import annotations

from typing import Any

from ..plan.kernels import BackwardKey, ForwardKey, Key, MergeKey, MultiplyKey
from .baseline import set_baseline


def compile_options(arch: str) -> str:
    return f"--enable-tvm-ffi --gpu-arch {arch}"


def trace(key: Key, extra_options: str = "") -> Any:
    """Compile a key without a cache, its host part for any CPU. The DSL is imported here and nowhere earlier.

    extra_options: of cute.compile; with "--keep-ptx --keep-cubin --dump-dir DIR" the result has __ptx__ and
    __cubin__. Raises TypeError for anything but a key.
    """
    compiled = _compile(key, f"{{}} {extra_options}".strip())
    set_baseline(compiled)
    return compiled


def _compile(key: Key, options: str) -> Any:
    """options: with a place for the architecture's."""
    if isinstance(key, ForwardKey):
        from ..kernels.entry.forward import compile_forward

        return compile_forward(*key, options=options.format(compile_options(key.config.arch)))
    if isinstance(key, BackwardKey):
        from ..kernels.entry.backward import compile_backward

        return compile_backward(*key, options=options.format(compile_options(key.tokens.arch)))
    if isinstance(key, MultiplyKey):
        from ..kernels.entry.multiply import compile_multiply

        return compile_multiply(key.dtype, key.added, options=options.format(compile_options(key.arch)))
    if isinstance(key, MergeKey):
        from ..kernels.entry.merge import compile_merge

        return compile_merge(key.target_dtype, options=options.format(compile_options(key.arch)))
    raise TypeError(f"key: got {type(key).__name__}, want a key of plan/kernels")
