"""What the ops cost: formulas for torch.utils.flop_counter, which counts matrix products, two operations for
each multiplication and addition.

What is executed is counted: the logits that a backward computes again, not those that a forward kept; and of
the gradients those that are needed. Ignored tokens count as others do, since shapes alone are known.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import Any

import torch

from . import inner

MODULE = "torch.utils.flop_counter"
NEEDED = "need_dinput", "need_dweight"
_FORWARDS = "forward", "forward_keep", "token_stats", "sharded_forward", "sharded_token_stats", "sampled"
_BACKWARDS = (
    *("backward", "token_stats_backward", "sharded_backward", "sharded_token_stats_backward"),
    "sampled_backward",
)
_BOTH = "grad_in_forward", "token_loss_gradients"


def flops(name: str, values: dict[str, Any]) -> int:
    """Of an op, of its arguments by name, shapes for tensors."""
    (n,), (classes, d) = values["target"], values["linear_weight"]
    if "sampled_ids" in values:
        (classes,) = values["sampled_ids"]
    gradients = sum(bool(values.get(need)) for need in NEEDED)
    logits = classes
    if name in _BACKWARDS:
        kept = values.get("kept")
        # The rows of what is kept are padded to 16 bytes.
        logits -= 0 if kept is None else min(kept[1], classes)
        if not gradients and not values.get("need_dbias"):
            return 0
    return 2 * n * d * (logits + gradients * classes)


def _register() -> None:
    """For the ops that this process has: those over a group come with their import."""
    counter = sys.modules[MODULE]
    for name in (*_FORWARDS, *_BACKWARDS, *_BOTH):
        op = getattr(torch.ops.cute_lce, name, None)
        if op is None or op in counter.flop_registry:
            continue
        names = [argument.name for argument in op.default._schema.arguments]
        counter.register_flop_formula(op)(_formula(name, names))
        twin = inner.twins.get(op.default)
        if twin is not None:
            packet = getattr(torch.ops.cute_lce, f"{name}_with_numbers")
            counter.register_flop_formula(packet)(_formula(name, names, len(twin.positions)))


def _formula(name: str, names: list[str], numbers: int = 0):
    def formula(*arguments, out_shape=None, **_):
        return flops(name, dict(zip(names, arguments[numbers:], strict=True)))

    return formula


class _Finder(importlib.abc.MetaPathFinder):
    """Registers the formulas when the counter's module is imported, which is as slow as this package."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register()

        spec.loader.exec_module = exec_module
        return spec


def register() -> None:
    """Now, or when the counter is imported; again once there are more ops."""
    if MODULE in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
