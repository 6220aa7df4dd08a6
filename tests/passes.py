"""A case's forward and backward by one implementation, without the ops: what ops/ asks of it."""

from __future__ import annotations

from torch import Tensor

from cute_lce.arguments import Operands
from cute_lce.implementation import Accumulated, Implementation, Request, Results, Saved
from cute_lce.ops.prepared import Prepared
from cute_lce.options import LossOptions
from cute_lce.plan.problem import Limits
from tests.numerics import Case


def operands_of(case: Case) -> Operands:
    return Operands(case.input, case.linear_weight, case.target)


def loss_of(case: Case, reduction: str) -> LossOptions:
    return LossOptions(reduction, case.ignore_index, case.logit_scale)


def statistics_of(results: Results) -> tuple[Tensor, Tensor, Tensor]:
    """(row_max, row_sum, num_valid)."""
    _, row_max, row_sum, num_valid, *_ = results
    assert row_max is not None
    assert row_sum is not None
    assert num_valid is not None
    return row_max, row_sum, num_valid


def saved_of(case: Case, results: Results) -> Saved:
    """What a backward of the case has from its forward."""
    return Saved(*operands_of(case), *statistics_of(results), results.kept, results.kept_scale)


def forward(
    implementation: Implementation,
    case: Case,
    *,
    reduction: str = "none",
    kept_columns: int = 0,
    window: int = 0,
    workspace: int = 0,
    statistics: bool = True,
) -> Results:
    """Both phases, for a backward of both gradients; input (n, d), target (n,)."""
    operands, loss = operands_of(case), loss_of(case, reduction)
    request = Request(Limits(window, workspace), kept_columns, statistics=statistics)
    return Prepared(implementation, request).forward(operands, loss)


def backward(
    implementation: Implementation,
    case: Case,
    dloss: Tensor,
    results: Results,
    *,
    reduction: str = "none",
    window: int = 0,
    workspace: int = 0,
    need_dinput: bool = True,
    need_dweight: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """(dinput, dweight). results: of a forward of the same case, its loss unused. out: what dweight is added
    to instead."""
    kept_columns = 0 if results.kept is None else min(results.kept.shape[1], case.linear_weight.shape[0])
    prepared = Prepared(implementation, Request(Limits(window, workspace), kept_columns))
    needed = need_dinput, need_dweight
    return prepared.backward(dloss, saved_of(case, results), loss_of(case, reduction), needed, out)


def grad_in_forward(
    implementation: Implementation,
    case: Case,
    *,
    reduction: str = "mean",
    window: int = 0,
    workspace: int = 0,
    need_dinput: bool = True,
    need_dweight: bool = True,
) -> Accumulated:
    request = Request(Limits(window, workspace), 0, need_dinput, need_dweight)
    return implementation.grad_in_forward(operands_of(case), loss_of(case, reduction), request)
