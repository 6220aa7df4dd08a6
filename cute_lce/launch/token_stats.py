"""Numbers of each token by the kernels, and the gradients by them: a forward and a backward that are compiled
for the terms (arguments.TERMS). What is of each token is made of the row statistics in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import maths
from ..arguments import Operands
from ..implementation import (
    AllGradients,
    Request,
    RowLoss,
    Saved,
    Stats,
    StatsOperands,
    StatsOptions,
    StatsSaved,
    StatsUpstream,
)
from ..plan.problem import Limits, Problem
from ..streaming import STATISTICS
from ..streaming.rows import is_ignored
from ..streaming.token_stats import coefficients_of
from . import choose as schedules
from .backward import backward as backward_of
from .forward import forward as forward_of

SERVED = ("logprob", "lse")
"""The numbers that kernels compute."""

T = TypeVar("T")

_prepared: dict[tuple, Any] = {}
MOST_PREPARED = 1024


class _Loss(NamedTuple):
    """What the passes read of LossOptions, for a loss of each row, with the numbers of arguments.TERMS."""

    ignore_index: int
    terms: tuple[str, ...]
    logit_scale: float
    inverse_cap: float = 0.0
    cap: float = 0.0
    row_factor: int = 0

    reduction = "none"

    @classmethod
    def of(cls, options: StatsOptions) -> Any:
        scale = options.logit_scale / options.temperature
        if options.softcap is None:
            return cls(options.ignore_index, ("logit_scale",) if scale != 1 else (), scale)
        cap = options.softcap / options.temperature
        return cls(options.ignore_index, ("softcap",), scale, options.logit_scale / options.softcap, cap)


def serves(operands: StatsOperands, options: StatsOptions) -> bool:
    """Whether the kernels compute these numbers, of operands whose device and dtype they serve."""
    given = operands.linear_bias, operands.class_weight, operands.temperature, operands.topk_ids
    return all(each is None for each in given) and set(options.outputs) <= set(SERVED)


def choose(
    problem: Problem, dtype: torch.dtype, device: torch.device, schedule: str, reduction: str, limits: Limits
) -> tuple[str, int]:
    """See implementation.Statistics: the kernels recompute."""
    assert schedule in ("auto", "recompute")
    return schedules.choose(problem, dtype, device, "recompute", reduction, limits)


def forward(operands: StatsOperands, options: StatsOptions, request: Request) -> Stats:
    given = Operands(*operands[:3])
    n = given.hidden.shape[0]
    if n == 0:
        return STATISTICS.forward(operands, options, request)
    loss = _Loss.of(options)
    request = request._replace(statistics=True)
    prepared = _remembered(
        ("forward", *_kind(given), loss.terms, request.limits), forward_of, given, loss, request
    )
    found = prepared.statistics(given, loss)
    row_max, row_sum = found.row_max, found.row_sum
    assert row_max is not None
    assert row_sum is not None
    valid = ~is_ignored(given.target, options.ignore_index)
    logprob, lse = -found.loss, maths.lse(row_sum.log(), row_max)
    return Stats(
        logprob=logprob if "logprob" in options.outputs else None,
        lse=torch.where(valid, lse, 0) if "lse" in options.outputs else None,
        row_max=row_max,
        row_sum=row_sum,
        target_logit=lse + logprob if loss.cap else None,
    )


def backward(
    upstream: StatsUpstream,
    operands: StatsOperands,
    saved: StatsSaved,
    options: StatsOptions,
    request: Request,
    out: Tensor | None = None,
) -> AllGradients:
    given = Operands(*operands[:3])
    if given.hidden.shape[0] == 0:
        return STATISTICS.backward(upstream, operands, saved, options, request, out)
    loss, half = _Loss.of(options), given.hidden.dtype is torch.float16
    valid = ~is_ignored(given.target, options.ignore_index)
    coefficients, factor = coefficients_of(upstream, operands, saved, valid), loss.logit_scale
    row_factor = None
    if half:
        # Its range is too small for upstream / n: the rows' factors are applied in float32.
        row_factor = coefficients.size()
        inverse = torch.where(row_factor == 0, 0, maths.HALF_SCALE / row_factor)
        coefficients, row_factor, factor = coefficients.times(inverse), row_factor * factor, 1.0
    softmax = maths.softmax_factor(coefficients.softmax * factor, saved.row_sum)
    target = torch.zeros_like(softmax) if coefficients.target is None else coefficients.target * -factor
    if loss.cap and saved.target_logit is not None:
        target *= maths.cap_slope(saved.target_logit / loss.cap)
    loss = loss._replace(
        terms=(*loss.terms, "coefficients"), row_factor=0 if row_factor is None else row_factor.data_ptr()
    )
    request = request._replace(added=None if out is None else out.dtype)
    needs = request.limits, request.need_dinput, request.need_dweight, request.added
    prepared = _remembered(("backward", *_kind(given), loss.terms, needs), backward_of, given, loss, request)
    # Where else row_sum and dloss are; num_valid is not read.
    both = Saved(*given, saved.row_max, softmax, saved.row_max)
    first = prepared.dinput(target, both, loss, out)
    return *prepared.dweight(target, both, loss, first, out), None


def grad_in_forward(
    operands: StatsOperands, options: StatsOptions, row_loss: RowLoss, request: Request
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The streaming path's."""
    return STATISTICS.grad_in_forward(operands, options, row_loss, request)


def forget() -> None:
    """What was prepared."""
    _prepared.clear()


def _kind(operands: Operands) -> tuple:
    """What a pass is prepared for, but its terms and limits."""
    return tuple((each.device, each.dtype, each.shape, each.stride()) for each in operands)


def _remembered(key: tuple, prepare: Callable[..., T], *arguments: Any) -> T:
    found = _prepared.get(key)
    if found is None:
        if len(_prepared) >= MOST_PREPARED:
            _prepared.clear()
        found = _prepared[key] = prepare(*arguments)
    return found
