"""The public op, and the op that makes a tensor of a number beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import Operands
from ..options import check_positive, split_options
from ..symbolic import as_tensor, is_symbolic
from . import heads, inner, schemas, terms
from .call import linear_cross_entropy
from .checks import know_shardings
from .plain import is_distributed, is_plain_eager


def _fused_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    denominator: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The body of the public op; cute_lce.linear_cross_entropy documents the arguments."""
    if heads.has_heads(linear_weight):
        options = {
            "linear_bias": linear_bias,
            "weight": weight,
            "token_weight": token_weight,
            "denominator": denominator,
            **options,
        }
        return heads.linear_cross_entropy(_fused_linear_cross_entropy, input, linear_weight, target, options)
    watched = not is_plain_eager(input, linear_weight, target)
    distributed = watched and is_distributed(input, linear_weight, target)
    if distributed:
        know_shardings()
    loss, numbers, compute = split_options(options)
    tensors = terms.TermTensors(linear_bias, weight, token_weight, denominator)
    if tensors.any or numbers.any or distributed:
        operands = Operands(input, linear_weight, target)
        return terms.linear_cross_entropy(operands, tensors, loss, numbers, compute)
    return linear_cross_entropy(input, linear_weight, target, loss, compute, watched=watched)


def _denominator(number: float, like: Tensor) -> Tensor:
    """A denominator as a tensor () on like's device."""
    check_positive("denominator", number, or_zero=True)
    if not is_symbolic(number):
        return like.new_full((), number, dtype=torch.float64)
    if isinstance(number, torch.SymInt):
        torch._check(number >= 0)
    return as_tensor(number, like.device)


inner.library.define("denominator(Scalar number, Tensor like) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
inner.library.impl("denominator", _denominator, "CompositeImplicitAutograd")
inner.library.define(schemas.PUBLIC, tags=(torch.Tag.pt2_compliant_tag,))
inner.library.impl("fused_linear_cross_entropy", _fused_linear_cross_entropy, "CompositeImplicitAutograd")
