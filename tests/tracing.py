"""Compiles a key as the package does, without the text that the DSL makes of every module for its log."""

from __future__ import annotations

import functools
from typing import Any

from cute_lce.compile import trace as compiler
from cute_lce.plan.kernels import Key


def trace(key: Key, extra_options: str = "") -> Any:
    """cute_lce.compile.trace.trace."""
    _print_no_modules()
    return compiler.trace(key, extra_options)


@functools.cache
def _print_no_modules() -> None:
    """With each kernel that the DSL adds to a module it formats all of it for a log that is off."""
    from cutlass._mlir.dialects import gpu  # pyright: ignore[reportMissingImports]

    gpu.GPUModuleOp.__str__ = object.__repr__
