"""The definition: linear cross entropy in plain torch, for every dtype, with the logits in full.

Tests and documents refer to it. It is differentiable by autograd and optimised for neither memory nor time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .options import LossOptions


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int | None = -100,
) -> Tensor:
    """Cross entropy of ``input @ linear_weight.T`` against class indices.

    With z = input @ linear_weight.T, a row's loss is log(sum_v exp(z_v)) - z_target, in nats, and 0 where
    target is ignore_index. "mean" divides the sum of the rows' losses by the number of rows not ignored; with
    none left the loss and its gradients are 0 (torch gives nan).

    input (..., d), linear_weight (V, d), one floating dtype; target (...), int64 or int32.
    Returns the loss in that dtype: target's shape for "none", else a scalar.
    Raises ValueError if a target is outside [0, V) and not ignore_index. Allocates several (..., V) tensors.
    """
    options = LossOptions(reduction, ignore_index)
    num_classes = linear_weight.shape[0]
    ignored = target.long() == options.ignore_index
    if bool((~ignored & ((target < 0) | (target >= num_classes))).any()):
        raise ValueError(f"target: found a class outside [0, {num_classes}) that is not ignore_index")
    logits = input @ linear_weight.mT
    row_max = logits.detach().amax(-1, keepdim=True)
    safe_target = target.long().masked_fill(ignored, 0).unsqueeze(-1)
    # Subtracting the maximum from both terms removes a common offset of the logits before the difference.
    shifted = logits - row_max
    loss = shifted.exp().sum(-1).log() - shifted.gather(-1, safe_target).squeeze(-1)
    loss = loss.masked_fill(ignored, 0)
    if options.reduction == "none":
        return loss
    total = loss.sum()
    if options.reduction == "sum":
        return total
    num_valid = (~ignored).sum().clamp(min=1)
    return total / num_valid.to(total.dtype)


def gradients(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    dloss: Tensor | float = 1.0,
    *,
    reduction: str = "mean",
    ignore_index: int | None = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients by autograd: (loss, dinput, dlinear_weight), detached.

    dloss: the upstream gradient, broadcast to the loss's shape. Dtypes and errors as in linear_cross_entropy.
    """
    with torch.enable_grad():
        hidden = input.detach().requires_grad_()
        weight = linear_weight.detach().requires_grad_()
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, ignore_index=ignore_index)
        upstream = torch.as_tensor(dloss, dtype=loss.dtype, device=loss.device).expand_as(loss)
        dinput, dweight = torch.autograd.grad(loss, (hidden, weight), upstream)
    return loss.detach(), dinput, dweight
