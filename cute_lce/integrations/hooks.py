"""Hooks of a head whose forward returns a loss where others expect logits."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as modules

UNHARMED = "torch.distributed.fsdp", "torch.utils.module_tracker"
"""Where the hooks are from that may have a loss for logits."""


def check_hooks(head: nn.Module, name: str) -> None:
    """Raise ValueError for what sees the head's output, a loss, or its gradient, but for UNHARMED."""
    if type(head).__call__ is not nn.Module.__call__:
        kind = type(head)
        raise ValueError(f"{name}: got {kind.__qualname__}, which has its own __call__, want nn.Module's")
    for what, hooks in (
        ("forward hook", head._forward_hooks),
        ("backward hook", head._backward_hooks),
        ("backward pre-hook", head._backward_pre_hooks),
        ("global forward hook", modules._global_forward_hooks),
        ("global backward hook", modules._global_backward_hooks),
        ("global backward pre-hook", modules._global_backward_pre_hooks),
    ):
        for hook in hooks.values():
            if not getattr(hook, "__module__", "").startswith(UNHARMED):
                raise ValueError(
                    f"{name}: got a {what}, {hook!r}, want none: it would get the loss as logits"
                )


def check_no_hooks(module: nn.Module, name: str) -> None:
    """Raise ValueError for any hook of a module whose parameters are read instead of calling it."""
    for hooks in (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ):
        for hook in hooks.values():
            raise ValueError(f"{name}: got a hook, {hook!r}, want none: the module is not called")
