"""Whether anything intercepts the dispatcher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_PLAIN = (torch.Tensor, torch.nn.Parameter)

innermost_transform = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
_is_tracing = torch._C._is_tracing  # pyright: ignore[reportAttributeAccessIssue]
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
# torch.autograd.grad(is_grads_batched=True) uses a vmap that is not one of torch.func's transforms.
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]


def is_plain_eager(*tensors: Tensor | None) -> bool:
    """Whether nothing intercepts the dispatcher: no tracing, mode, transform, subclass or meta tensor.

    Such a call may run an op's body directly. A dispatch to Python takes about 5 us, and it would need four.
    tensors: all that a pass reads; None: one that there is not.
    """
    return (
        not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and innermost_transform() is None
        and not _is_tracing()
        and forward_ad._current_level < 0
        and all(map(_is_plain, tensors))
    )


def _is_plain(tensor: Tensor | None) -> bool:
    return tensor is None or (type(tensor) in _PLAIN and not tensor.is_meta and not _is_batched(tensor))


def has_saved_tensors_hooks() -> bool:
    """Whether hooks pack what autograd saves, as those of activation checkpointing and offloading do."""
    return bool(_saved_tensors_hooks(False))


def is_distributed(*operands: Any) -> bool:
    """Whether one of them is a DTensor, whose class this does not import."""
    return any(hasattr(tensor, "device_mesh") for tensor in operands)


def placed_as(upstream: Any, like: Any) -> Any:
    """A gradient (n, ...) by DTensors where `like`, what a forward saved of each token, is: what it kept must
    stay there, and DTensor would spread it as the gradient is. None, and any other, as it is."""
    if upstream is None or upstream.dim() == 0 or not is_distributed(upstream):
        return upstream
    return upstream.redistribute(like.device_mesh, like.placements)
