"""The definition: linear cross entropy in plain torch, for every dtype, with the logits in full.

Tests and documents refer to it. It is differentiable by autograd and optimised for neither memory nor time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .logit_term import LogitTerm, as_number, term_of
from .options import LossOptions, TokenStats
from .torch_ops import logit_of


def logits(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | LogitTerm | None = None,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """z = softcap((input @ linear_weight.T + linear_bias) logit_scale) / temperature, (..., V)."""
    z = input @ linear_weight.mT
    if linear_bias is not None:
        z = z + linear_bias
    z = z * logit_scale
    cap = as_number(softcap)
    term = term_of(cap)
    if term is not None:
        z = logit_of(term, z)
    elif cap is not None:
        z = cap * (z / cap).tanh()
    return z / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)


def _divided(total: Tensor, denominator: Tensor | float) -> Tensor:
    """total / denominator; 0 where both are."""
    denominator = torch.as_tensor(denominator, dtype=total.dtype, device=total.device)
    of_nothing = (denominator == 0) & (total == 0)
    return torch.where(of_nothing, 0, total / torch.where(of_nothing, 1, denominator))


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | LogitTerm | None = None,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """Cross entropy of the logits z (see `logits`) against class indices.

    With lse = log(sum_v exp(z_v)), w = weight (ones where there is none) and e = label_smoothing, a row's
    loss is

        token_weight ((1 - e) w_target (lse - z_target) + e / V sum_v w_v (lse - z_v) + z_loss lse^2)

    in nats, and 0 where target is ignore_index. "mean" divides the sum of the rows' losses by the number of
    rows not ignored, with class weights by the sum of w_target over these, and the loss and its gradients are
    0 where that is 0 (torch gives nan); or by denominator, 0 where both are 0.

    input (..., d), linear_weight (V, d), linear_bias, weight (V,), one floating dtype; target (...), int64 or
    int32; token_weight: target's shape.
    Returns the loss in that dtype: target's shape for "none", else a scalar.
    Raises ValueError if a target is outside [0, V) and not ignore_index. Allocates several (..., V) tensors.
    """
    options = LossOptions(reduction, ignore_index)
    num_classes = linear_weight.shape[0]
    ignored = target.long() == options.ignore_index
    if bool((~ignored & ((target < 0) | (target >= num_classes))).any()):
        raise ValueError(f"target: found a class outside [0, {num_classes}) that is not ignore_index")
    z = logits(input, linear_weight, linear_bias, logit_scale=logit_scale, softcap=softcap)
    row_max = z.detach().amax(-1, keepdim=True)
    safe_target = target.long().masked_fill(ignored, 0)
    # Subtracting the maximum from both terms removes a common offset of the logits before the difference.
    shifted = z - row_max
    log_sum = shifted.exp().sum(-1, keepdim=True).log()
    nll = log_sum - shifted
    loss = nll.gather(-1, safe_target.unsqueeze(-1)).squeeze(-1)
    target_weight = None if weight is None else weight[safe_target].masked_fill(ignored, 0)
    if target_weight is not None:
        loss = loss * target_weight
    if label_smoothing:
        total = (nll if weight is None else nll * weight).sum(-1)
        loss = loss * (1 - label_smoothing) + total * (label_smoothing / num_classes)
    if z_loss:
        loss = loss + z_loss * (row_max + log_sum).squeeze(-1).square()
    if token_weight is not None:
        loss = loss * token_weight.masked_fill(ignored, 0)
    loss = loss.masked_fill(ignored, 0)
    if options.reduction == "none":
        return loss
    total = loss.sum()
    if options.reduction == "sum":
        return total
    if denominator is not None:
        return _divided(total, denominator)
    count = (~ignored).sum() if target_weight is None else target_weight.sum()
    return torch.where(count != 0, total / torch.where(count != 0, count, 1), 0).to(total.dtype)


def linear_logprob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    topk_ids: Tensor | None = None,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = -100,
    logit_scale: float = 1.0,
    softcap: float | LogitTerm | None = None,
) -> TokenStats:
    """All numbers of each token that linear_logprob gives, from the logits in full.

    Shapes and dtypes as there; the results have the operands' dtype, and topk_logprob is None without ids.
    """
    V, options = linear_weight.shape[0], LossOptions("none", ignore_index)
    ignored = target.long() == options.ignore_index
    if isinstance(temperature, Tensor):
        temperature = temperature.masked_fill(ignored, 1)
    z = logits(
        input,
        linear_weight,
        linear_bias,
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=temperature,
    )
    row_max = z.detach().amax(-1, keepdim=True)
    shifted = z - row_max
    log_sum = shifted.exp().sum(-1, keepdim=True).log()
    each = shifted - log_sum
    p = each.exp()
    topk = None
    if topk_ids is not None:
        known = (topk_ids >= 0) & (topk_ids < V)
        topk = each.gather(-1, topk_ids.long().clamp(0, V - 1))
        topk = topk.masked_fill(~known | ignored.unsqueeze(-1), 0)
    own = target.long().masked_fill(ignored, 0)
    top = z.argmax(-1)
    return TokenStats(
        logprob=each.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(ignored, 0),
        entropy=-(p * each.masked_fill(p == 0, 0)).sum(-1).masked_fill(ignored, 0),
        lse=(row_max + log_sum).squeeze(-1).masked_fill(ignored, 0),
        topk_logprob=topk,
        argmax=top.masked_fill(ignored, 0),
        is_top1=(top == own) & ~ignored,
        log_sum_sq_probs=p.square().sum(-1).log().masked_fill(ignored, 0),
        mean_logit=z.mean(-1).masked_fill(ignored, 0),
    )


def sampled_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    sampled_ids: Tensor,
    *,
    sampled_log_q: Tensor | None = None,
    target_log_q: Tensor | None = None,
    remove_accidental_hits: bool = True,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """Cross entropy of each token's target, the first of its 1 + m columns, against the sampled classes.

    Shapes and dtypes as there; the result has the operands' dtype.
    """
    options = LossOptions(reduction, ignore_index)
    ignored = target.long() == options.ignore_index
    own = target.long().masked_fill(ignored, 0)
    z = logits(input, linear_weight, linear_bias, logit_scale=logit_scale)
    first, others = z.gather(-1, own.unsqueeze(-1)), z[..., sampled_ids.long()]
    if target_log_q is not None:
        first = first - target_log_q.unsqueeze(-1)
    if sampled_log_q is not None:
        others = others - sampled_log_q
    if remove_accidental_hits:
        others = others.masked_fill(sampled_ids == own.unsqueeze(-1), -torch.inf)
    columns = torch.cat((first, others), -1)
    loss = columns.logsumexp(-1) - columns[..., 0]
    if token_weight is not None:
        loss = loss * token_weight
    loss = loss.masked_fill(ignored, 0)
    if options.reduction == "none":
        return loss
    total = loss.sum()
    if options.reduction == "sum":
        return total
    return _divided(total, (~ignored).sum().clamp(min=1) if denominator is None else denominator)


def gradients(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    dloss: Tensor | float = 1.0,
    *,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    **terms: Any,
) -> tuple[Tensor, ...]:
    """The loss and its gradients by autograd: (loss, dinput, dlinear_weight), and dlinear_bias if there is a
    linear_bias; detached.

    dloss: the upstream gradient, broadcast to the loss's shape. Dtypes, terms and errors as in
    linear_cross_entropy.
    """
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in (input, linear_weight)]
        if terms.get("linear_bias") is not None:
            leaves.append(terms["linear_bias"].detach().requires_grad_())
            terms = {**terms, "linear_bias": leaves[2]}
        loss = linear_cross_entropy(
            leaves[0], leaves[1], target, reduction=reduction, ignore_index=ignore_index, **terms
        )
        upstream = torch.as_tensor(dloss, dtype=loss.dtype, device=loss.device).expand_as(loss)
        found = torch.autograd.grad(loss, leaves, upstream)
    return loss.detach(), *found
