"""Compiles a key as the package does, without the text that the DSL makes of every module for its log."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

from cute_lce.compile import trace as compiler
from cute_lce.plan.kernels import Key


def trace(key: Key, extra_options: str = "", launches: tuple[str, ...] = ()) -> Any:
    """cute_lce.compile.trace.trace. launches: what a Backward launches, by its attributes' names; (): all."""
    _print_no_modules()
    with not_collecting(), _launching(launches):
        return compiler.trace(key, extra_options)


class _Silent:
    """A launcher that launches nothing, and so compiles nothing."""

    def __init__(self, launcher: Any):
        self._launcher = launcher

    def __call__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)


@contextlib.contextmanager
def _launching(names: tuple[str, ...]) -> Iterator[None]:
    """Within, host functions of backwards launch only these; (): all."""
    if not names:
        yield
        return
    from cute_lce.kernels.entry import backward

    class Some(backward.Backward):
        def __init__(self, *arguments: Any, **named: Any):
            super().__init__(*arguments, **named)
            assert set(names) <= set(vars(self)), (names, list(vars(self)))
            for name, launcher in list(vars(self).items()):
                if callable(launcher) and not isinstance(launcher, type) and name not in names:
                    setattr(self, name, _Silent(launcher))

    with mock.patch.object(backward, "Backward", Some):
        yield


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
