"""Whole calls over a group as ops, for torch.compile: composites, whose inner ops make the collectives.

sharded_linear_cross_entropy    the loss, with all its terms
sharded_linear_logprob          numbers of each token, in the order of outputs
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import Operands
from ..implementation import StatsOperands
from ..ops import Destination, TermTensors, inner, schemas
from ..ops import logprob as whole_logprob
from ..ops.logprob import Wanted
from ..ops.plain import is_plain_eager
from ..options import ComputeOptions, LossOptions, TermOptions, split_options
from . import call, logprob, terms
from .call import Spread, spread_of
from .collectives import group_of

_SPREAD = (
    "str group, SymInt? vocab_start=None, int? sequence_dim=None, str grad_input='reduced', "
    "int? sm_margin=None"
)


def _sharded(schema: str) -> str:
    """The schema of a call on one device, with the arguments about a group."""
    return schema.replace("fused_linear", "sharded_linear", 1).replace(", *, ", f", *, {_SPREAD}, ", 1)


def _named(spread: Spread) -> dict[str, Any]:
    """As the ops take it."""
    group, *where = spread
    return {"group": group.group_name, **dict(zip(Spread._fields[1:], where, strict=True))}


def linear_cross_entropy(
    operands: Operands,
    tensors: TermTensors,
    loss: LossOptions,
    numbers: tuple,
    compute: ComputeOptions,
    spread: Spread,
    plain: bool,
    destination: Destination | None = None,
) -> Tensor:
    """The loss with terms; numbers: TermOptions' fields. plain: ops.is_plain_eager of the operands, or that
    there is a destination."""
    if plain:
        given = TermOptions(*numbers)
        return terms.linear_cross_entropy(operands, tensors, loss, given, compute, spread, destination)
    # Numbers are not looked at here: torch.compile would trace that.
    named = dict(zip(TermOptions._fields, numbers, strict=True))
    options = {**tensors._asdict(), **loss._asdict(), **named, **compute._asdict()}
    return _op(*operands, **_named(spread), **options)


def linear_logprob(
    given: StatsOperands,
    wanted: Wanted,
    loss: LossOptions,
    softcap: float | None,
    compute: ComputeOptions,
    spread: Spread,
    plain: bool,
) -> list[Tensor]:
    """The numbers that wanted.outputs names; plain: ops.is_plain_eager of the operands."""
    if plain:
        return logprob.linear_logprob(given, wanted, loss, TermOptions(softcap=softcap), compute, spread)
    return _logprob_op(
        *given[:3],
        **_named(spread),
        linear_bias=given.linear_bias,
        temperature=given.temperature,
        topk_ids=given.topk_ids,
        **wanted._asdict(),
        ignore_index=loss.ignore_index,
        logit_scale=loss.logit_scale,
        softcap=softcap,
        **compute._asdict(),
    )


def _spread(
    group: str,
    vocab_start: int | None = None,
    sequence_dim: int | None = None,
    grad_input: str = "reduced",
    sm_margin: int | None = None,
) -> Spread:
    return spread_of(group_of(group), vocab_start, sequence_dim, grad_input, sm_margin)


def _split(options: dict[str, Any]) -> tuple[Spread, dict[str, Any]]:
    """The arguments about a group, and the others."""
    names = "group", *Spread._fields[1:]
    own = {name: options[name] for name in names if name in options}
    return _spread(**own), {name: value for name, value in options.items() if name not in names}


def _sharded_linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any
) -> Tensor:
    spread, options = _split(options)
    tensors = TermTensors(*(options.pop(name, None) for name in TermTensors._fields))
    loss, numbers, compute = split_options(options)
    if tensors.any or numbers.any:
        operands = Operands(input, linear_weight, target)
        return terms.linear_cross_entropy(operands, tensors, loss, numbers, compute, spread)
    watched = not is_plain_eager(input, linear_weight, target)
    return call.linear_cross_entropy(input, linear_weight, target, loss, compute, spread, watched=watched)


def _sharded_linear_logprob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: Tensor | None = None,
    topk_ids: Tensor | None = None,
    temperature_number: float = 1.0,
    outputs: tuple[str, ...] = ("logprob",),
    entropy_grad: bool = True,
    **options: Any,
) -> list[Tensor]:
    spread, options = _split(options)
    loss, numbers, compute = split_options({"reduction": "none", **options})
    given = StatsOperands(
        input, linear_weight, target, linear_bias, temperature=temperature, topk_ids=topk_ids
    )
    wanted = Wanted(outputs, entropy_grad, temperature_number)
    return logprob.linear_logprob(given, wanted, loss, numbers, compute, spread)


for _schema, _body in (
    (_sharded(schemas.PUBLIC), _sharded_linear_cross_entropy),
    (_sharded(whole_logprob.SCHEMA), _sharded_linear_logprob),
):
    inner.library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    inner.library.impl(_schema.partition("(")[0], _body, "CompositeImplicitAutograd")
_op = torch.ops.cute_lce.sharded_linear_cross_entropy.default
_logprob_op = torch.ops.cute_lce.sharded_linear_logprob.default
