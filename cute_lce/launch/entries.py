"""What a backward writes over a few entries of what was kept (kernels/entries.py): those of targets and given
ids, whose coefficients over the softmax's a forward does not know."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import maths
from ..implementation import StatsOperands, StatsOptions, StatsSaved
from ..streaming.token_stats import Coefficients
from .token_terms import Gradient, Tensors, slopes

MOST_IDS = 256
"""Of a token: each is compared with all of them. Of more ids logits are kept."""
DIFFERENTIABLE = {"logprob", "lse", "topk_logprob"}


def forms_entries(operands: StatsOperands, options: StatsOptions) -> bool:
    """Whether the gradients of these numbers are exponentials' but for such entries, which bf16's range holds
    whatever their coefficients are."""
    ids = operands.topk_ids
    if operands.hidden.dtype is not torch.bfloat16 or (ids is not None and ids.shape[1] > MOST_IDS):
        return False
    return not options.z_loss and set(options.outputs) <= DIFFERENTIABLE | beside_exponentials(options)


def beside_exponentials(options: StatsOptions) -> set[str]:
    """The numbers without a gradient that a forward gives which keeps exponentials."""
    return {"mean_logit", "argmax", "is_top1", *("entropy",) * (not options.entropy_grad)}


class Entries(NamedTuple):
    """softmax (n,): its coefficients in the gradient by z, 0 in ignored rows. numbers: of the
    loss, by their names. tensors: whose addresses these are."""

    softmax: Tensor
    numbers: dict[str, Any]
    tensors: list[Tensor | None]

    @classmethod
    def of(
        cls,
        operands: StatsOperands,
        saved: StatsSaved,
        options: StatsOptions,
        tensors: Tensors,
        coefficients: Coefficients,
        *,
        restores: bool,
    ) -> Entries:
        target, ids = coefficients.target, operands.topk_ids
        at_target, at_ids = saved.target_logit, saved.topk_logit
        topk = None if coefficients.topk is None else coefficients.topk.contiguous()
        count = 0 if ids is None else ids.shape[1]
        softmax = _at_least(coefficients.softmax, target, topk if count else None)
        found: dict[str, Tensor | None] = {
            "target_logits": at_target,
            "target_values": target,
            "target_slopes": slopes(at_target, options, tensors),
            "entry_softmax": softmax,
            "entry_row_sum": saved.row_sum,
        }
        if ids is not None and count:
            # An int64 id beyond int32 would wrap.
            found |= {
                "entry_ids": ids.clamp(-1, operands.weight.shape[0]).int().contiguous(),
                "entry_logits": at_ids,
                "entry_values": topk,
                "entry_slopes": slopes(at_ids, options, tensors),
            }
        if restores:
            found["entries_before"] = operands.hidden.new_empty((len(softmax), count + 1))
        addresses = {name: 0 if each is None else each.data_ptr() for name, each in found.items()}
        return cls(softmax, {"entries": count, **addresses}, [*found.values()])

    def added_to(self, gradient: Gradient) -> Gradient:
        loss = gradient.loss.with_terms("entries", **self.numbers)
        return gradient._replace(loss=loss, others=(*gradient.others, *self.tensors))


def _at_least(softmax: Tensor, target: Tensor | None, topk: Tensor | None) -> Tensor:
    """The softmax's coefficients, raised to maths.LEAST_SOFTMAX of the row's largest one of a onehot: the
    kernel divides by them."""
    largest = None if target is None else target.abs()
    if topk is not None:
        others = torch.linalg.vector_norm(topk, torch.inf, dim=1)
        largest = others if largest is None else torch.maximum(largest, others)
    if largest is None:
        return softmax
    least = largest * maths.LEAST_SOFTMAX
    return torch.where(softmax.abs() < least, least, softmax)
