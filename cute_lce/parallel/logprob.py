"""linear_logprob over the ranks of a group."""

from __future__ import annotations

from torch import Tensor

from ..implementation import StatsOperands
from ..ops.call import needs_gradient
from ..ops.logprob import Call, Wanted, checked_call
from ..ops.plain import is_plain_eager
from ..options import ComputeOptions, LossOptions, TermOptions
from . import call as plain_call
from . import ranks
from .call import Spread
from .numbers import numbers_of
from .tokens import tokens_of


def linear_logprob(
    given: StatsOperands,
    wanted: Wanted,
    loss: LossOptions,
    terms: TermOptions,
    compute: ComputeOptions,
    spread: Spread,
) -> list[Tensor]:
    """The numbers that wanted.outputs names, in its order; see cute_lce.linear_logprob. given: as the caller
    has them, linear_weight and linear_bias this rank's rows."""
    group = spread.tp_group
    tokens = tokens_of(given.hidden, given.target, spread.sequence_dim, group)
    as_input = plain_call.as_inputs(given.target, tokens, group)
    operands, options = checked_call(given, wanted, loss, terms, compute, as_input)
    if ranks.are_checked(*operands[:3]):
        _check_ranks(operands, wanted, loss, terms, compute, spread)

    def flat(each: Tensor | None) -> Tensor | None:
        return None if each is None else plain_call.flatten_watched(each, tokens, group)

    hidden, target = operands.hidden, flat(operands.target)
    assert target is not None
    rows = operands._replace(
        hidden=hidden.reshape(-1, hidden.shape[-1]),
        target=target,
        temperature=flat(operands.temperature),
        topk_ids=flat(operands.topk_ids),
    )
    call = Call(rows, options, compute)
    spread = spread._replace(sequence_dim=None if tokens.dim is None else 0)
    if call.is_plain:
        plain = is_plain_eager(*call.plain_operands)
        found = [-plain_call.call(*call.plain_operands, call.plain_loss, compute, spread, plain)]
    else:
        found = call.named(numbers_of(rows, options, loss, compute, spread).stats)
    return [plain_call.of_target(each, tokens, group) for each in found]


def _check_ranks(
    operands: StatsOperands,
    wanted: Wanted,
    loss: LossOptions,
    terms: TermOptions,
    compute: ComputeOptions,
    spread: Spread,
) -> None:
    """Before the first collective: what is of each token is gathered if it is a slice."""
    given = tuple(name for name, each in operands._asdict().items() if each is not None)
    needs = needs_gradient(operands.hidden, operands.weight)
    others = {"outputs, entropy_grad and temperature": tuple(wanted), "terms": (given, tuple(terms))}
    for name in ("temperature", "topk_ids"):
        others[f"{name}'s shape and dtype"] = ranks.kind(getattr(operands, name))
    ranks.check(operands[:3], needs, loss, compute, spread, **others)
