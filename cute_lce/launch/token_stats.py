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
from .backward import KernelBackward
from .backward import backward as backward_of
from .forward import KernelForward
from .forward import forward as forward_of

SERVED = ("logprob", "lse", "entropy", "total_nll")
"""The numbers that kernels compute."""
STATISTICS_OF = {"entropy": "entropy", "total_nll": "total"}
"""Of these the ones that need more than a row's maximum and sum, and the terms of a forward that give it."""

T = TypeVar("T")

_prepared: dict[tuple, Any] = {}
MOST_PREPARED = 1024


class _Loss(NamedTuple):
    """What the passes read of LossOptions, for a loss of each row, with the numbers of arguments.TERMS.
    logit_scale: of the gradient by products too."""

    ignore_index: int
    terms: tuple[str, ...]
    logit_scale: float
    linear_bias: int = 0
    inverse_cap: float = 0.0
    cap: float = 0.0
    row_scale: int = 0
    class_weight: int = 0
    more_partials: int = 0
    mean_gap: int = 0
    total_gap: int = 0
    row_factor: int = 0
    gap: int = 0
    uniform: int = 0
    dbias: int = 0
    column_sums: int = 0
    with_dhidden: int = 0

    reduction = "none"

    def with_terms(self, *terms: str, **changes: Any) -> Any:
        return self._replace(terms=(*self.terms, *terms), **changes)


class _Tensors(NamedTuple):
    """What a pass reads besides the operands, in fp32 and contiguous; kept alive for it."""

    linear_bias: Tensor | None
    class_weight: Tensor | None
    row_scale: Tensor | None

    @classmethod
    def of(cls, operands: StatsOperands) -> _Tensors:
        temperature = operands.temperature
        return cls(
            _vector(operands.linear_bias),
            _vector(operands.class_weight),
            None if temperature is None else temperature.float().reciprocal().contiguous(),
        )


def _vector(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().float().contiguous()


def _loss_of(options: StatsOptions, tensors: _Tensors) -> Any:
    """With the terms of the logits."""
    scale = options.logit_scale / options.temperature
    loss = _Loss(options.ignore_index, (), scale)
    if tensors.linear_bias is not None:
        loss = loss.with_terms("linear_bias", linear_bias=tensors.linear_bias.data_ptr())
    if options.softcap is not None:
        cap = options.softcap / options.temperature
        loss = loss.with_terms("softcap", inverse_cap=options.logit_scale / options.softcap, cap=cap)
    elif scale != 1:
        loss = loss.with_terms("logit_scale")
    if tensors.row_scale is not None:
        loss = loss.with_terms("row_scale", row_scale=tensors.row_scale.data_ptr())
    return loss


def serves(operands: StatsOperands, options: StatsOptions) -> bool:
    """Whether the kernels compute these numbers, of operands whose device and dtype they serve."""
    return operands.topk_ids is None and set(options.outputs) <= set(SERVED)


def choose(
    problem: Problem, dtype: torch.dtype, device: torch.device, schedule: str, reduction: str, limits: Limits
) -> tuple[str, int]:
    """See implementation.Statistics: the kernels recompute."""
    if schedule not in ("auto", "recompute"):
        raise ValueError(f"schedule: got {schedule!r}, want 'recompute' or 'auto'")
    return schedules.choose(problem, dtype, device, "recompute", reduction, limits)


def forward(operands: StatsOperands, options: StatsOptions, request: Request) -> Stats:
    given = Operands(*operands[:3])
    n, device = given.hidden.shape[0], given.hidden.device
    if n == 0:
        return STATISTICS.forward(operands, options, request)
    tensors = _Tensors.of(operands)
    loss = _loss_of(options, tensors)
    more = [term for name, term in STATISTICS_OF.items() if name in options.outputs]
    if "total" in more and tensors.class_weight is not None:
        loss = loss.with_terms("class_weight", class_weight=tensors.class_weight.data_ptr())
    loss = loss.with_terms(*more)
    parts = sum(_PARTS[term] for term in more)
    workspace = request.limits.workspace * 2 // (2 + parts)
    request = request._replace(statistics=True, limits=request.limits._replace(workspace=workspace))
    key = "forward", *_kind(given), loss.terms, request.limits
    prepared = _remembered(key, forward_of, given, loss, request)
    assert isinstance(prepared, KernelForward)
    sums = {name: torch.empty((n,), dtype=torch.float32, device=device) for name in more}
    if more:
        partials = torch.empty((prepared.partials * n * parts,), dtype=torch.float32, device=device)
        outputs = {_OUTPUTS[name]: each.data_ptr() for name, each in sums.items()}
        loss = loss._replace(more_partials=partials.data_ptr(), **outputs)
    found = prepared.statistics(given, loss)
    row_max, row_sum = found.row_max, found.row_sum
    assert row_max is not None
    assert row_sum is not None
    log_row_sum = row_sum.log()
    logprob, lse = -found.loss, maths.lse(log_row_sum, row_max)
    numbers = {"logprob": logprob, "lse": lse}
    if "entropy" in sums:
        numbers["entropy"] = maths.entropy(log_row_sum, sums["entropy"])
    if "total" in sums:
        count = given.weight.shape[0] if tensors.class_weight is None else tensors.class_weight.sum()
        numbers["total_nll"] = log_row_sum * count + sums["total"]
    valid = ~is_ignored(given.target, options.ignore_index)
    return Stats(
        **{name: torch.where(valid, numbers[name], 0) for name in options.outputs},
        row_max=row_max,
        row_sum=row_sum,
        mean_gap=sums.get("entropy"),
        target_logit=lse + logprob if loss.cap else None,
    )


_PARTS = {"entropy": 1, "total": 2}
"""A forward's terms, and how many numbers a partial of a row has of each."""
_OUTPUTS = {"entropy": "mean_gap", "total": "total_gap"}
"""A forward's terms, and the number of _Loss that says where what they give is written."""


def backward(
    upstream: StatsUpstream,
    operands: StatsOperands,
    saved: StatsSaved,
    options: StatsOptions,
    request: Request,
    out: Tensor | None = None,
) -> AllGradients:
    given = Operands(*operands[:3])
    if given.hidden.shape[0] == 0 or not (request.need_dinput or request.need_dweight):
        return STATISTICS.backward(upstream, operands, saved, options, request, out)
    tensors = _Tensors.of(operands)
    loss, half = _loss_of(options, tensors), given.hidden.dtype is torch.float16
    valid = ~is_ignored(given.target, options.ignore_index)
    coefficients = coefficients_of(upstream, operands, saved, valid)
    factor: Tensor | float = loss.logit_scale
    if tensors.row_scale is not None:
        factor = torch.where(valid, tensors.row_scale * factor, 0)
    row_factor = None
    if half:
        # Its range is too small for upstream / n: the rows' factors are applied in float32.
        size = coefficients.size()
        coefficients = coefficients.times(torch.where(size == 0, 0, maths.HALF_SCALE / size))
        row_factor, factor = size * factor, 1.0
    softmax = maths.softmax_factor(coefficients.softmax * factor, saved.row_sum)
    target = torch.zeros_like(softmax) if coefficients.target is None else coefficients.target * -factor
    if loss.cap and saved.target_logit is not None:
        cap = loss.cap if tensors.row_scale is None else loss.cap * tensors.row_scale
        target *= maths.cap_slope(saved.target_logit / cap)
    gap, uniform = coefficients.gap_factor, coefficients.uniform
    loss = loss.with_terms("coefficients")
    if row_factor is not None:
        loss = loss._replace(row_factor=row_factor.data_ptr())
    if gap is not None:
        gap = maths.softmax_factor(gap * factor, saved.row_sum)
        loss = loss.with_terms("gap", gap=gap.data_ptr())
    if uniform is not None:
        uniform = uniform * factor
        loss = loss.with_terms("uniform", uniform=uniform.data_ptr())
        if tensors.class_weight is not None:
            loss = loss.with_terms("class_weight", class_weight=tensors.class_weight.data_ptr())
    request = request._replace(added=None if out is None else out.dtype)
    if request.need_dbias:
        # A part of the workspace is for column_sums.
        workspace = request.limits.workspace * 15 // 16
        request = request._replace(limits=request.limits._replace(workspace=workspace))
        loss = loss.with_terms("bias_gradient", with_dhidden=int(request.need_dinput))
    needs = request.limits, request.need_dinput, request.need_dweight, request.added
    prepared = _remembered(("backward", *_kind(given), loss.terms, needs), backward_of, given, loss, request)
    assert isinstance(prepared, KernelBackward)
    dbias = None
    if request.need_dbias:
        dbias = softmax.new_empty((given.weight.shape[0],))
        column_sums = softmax.new_empty((prepared.column_sums,))
        loss = loss._replace(dbias=dbias.data_ptr(), column_sums=column_sums.data_ptr())
    # Where else row_sum and dloss are; num_valid is not read.
    both = Saved(*given, saved.row_max, softmax, saved.row_max)
    first = prepared.dinput(target, both, loss, out)
    dinput, dweight = prepared.dweight(target, both, loss, first, out)
    return dinput, dweight, None if dbias is None else dbias.to(given.hidden.dtype)


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
