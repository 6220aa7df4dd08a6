"""Compiles a key as the package does, without the text that the DSL makes of every module for its log."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

from cute_lce.compile import trace as compiler
from cute_lce.plan.kernels import Key


def trace(key: Key, extra_options: str = "") -> Any:
    """cute_lce.compile.trace.trace."""
    _print_no_modules()
    with not_collecting():
        return compiler.trace(key, extra_options)


@contextlib.contextmanager
def not_collecting() -> Iterator[None]:
    """Of the objects that a compilation makes few are garbage before its end, and each collection visits
    all of them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def _print_no_modules() -> None:
    """With each kernel that the DSL adds to a module it formats all of it for a log that is off."""
    from cutlass._mlir.dialects import gpu  # pyright: ignore[reportMissingImports]

    gpu.GPUModuleOp.__str__ = object.__repr__
