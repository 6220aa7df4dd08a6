"""Numbers of each token over the ranks of a group, as ops for torch.compile: each takes the group's name, and
its body makes the collectives.

    sharded_token_stats            token_stats.Found
    sharded_token_stats_backward   the gradients

An eager call applies the same autograd.Function to the passes directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..implementation import (
    AllGradients,
    Request,
    Statistics,
    Stats,
    StatsOperands,
    StatsOptions,
    StatsSaved,
    StatsUpstream,
)
from ..ops import Destination, inner
from ..ops import token_stats as whole
from ..ops.autograd import (
    NO_DOUBLE_BACKWARD,
    GradientFunction,
    add_to_destination,
    apply_of,
    as_given,
    kind_of,
    no_options,
    register,
)
from ..ops.plain import is_plain_eager
from ..ops.schemas import LIMITS
from ..ops.select import statistics
from ..ops.terms import decide
from ..options import ComputeOptions, LossOptions
from ..plan.problem import Limits
from ..streaming.products import accumulate_dtype
from . import ranks, token_stats
from .call import Spread, shard_of
from .collectives import group_of
from .tensor import Shard
from .token_stats import Found


class Numbers(NamedTuple):
    """What a call's options name; weight: Found's."""

    stats: Stats
    weight: Tensor | None


def numbers_of(
    operands: StatsOperands,
    options: StatsOptions,
    loss: LossOptions,
    compute: ComputeOptions,
    spread: Spread,
    destination: Destination | None = None,
) -> Numbers:
    """Of operands in two dimensions: linear_weight, linear_bias and class_weight are this rank's rows, hidden
    perhaps its slice of the tokens, and what else is of each token of all tokens, rank by rank."""
    serving = statistics(operands, options.example, compute.schedule)
    _, (_, request, destination, _) = decide(
        operands, options, compute, loss.reduction, destination, serving, shard=True
    )
    if destination is not None or is_plain_eager(*operands):
        if ranks.are_checked(*operands[:3]):
            _check_ranks(operands, options, request, loss, compute, spread)
        how = _How(options, request, spread, _Eager(shard_of(spread, operands.weight), serving), destination)
        *found, weight = apply_of(_ShardedStats)(functools.partial(_run, how), how, *operands)[: _STATS + 1]
    else:
        where = spread.tp_group.group_name, *spread[1:]
        arguments = *whole.listed(options), *request.limits, request.kept_columns
        *found, weight = inner.call(sharded_token_stats, *operands, *arguments, *where)[: _STATS + 1]
    named = zip(Stats._fields, found, strict=True)
    stats = Stats(**{name: each for name, each in named if name in options.outputs})
    return Numbers(stats, weight if "total_nll" in options.outputs else None)


def _check_ranks(
    operands: StatsOperands,
    options: StatsOptions,
    request: Request,
    loss: LossOptions,
    compute: ComputeOptions,
    spread: Spread,
) -> None:
    others = {
        name: None if each is None else str(each.dtype)
        for name, each in operands._asdict().items()
        if name in ("linear_bias", "class_weight")
    }
    values = {
        f"{name}'s values": None if each is None else ranks.digest(each)
        for name, each in (("temperature", operands.temperature), ("topk_ids", operands.topk_ids))
    }
    needs = request.need_dinput, request.need_dweight
    ranks.check(
        *(operands[:3], needs, loss, compute, spread),
        options=tuple(options),
        **others,
        **values,
        need_dbias=request.need_dbias,
    )


# ----------------------------------------------------------------------------------------------------------
# Autograd


class _Eager(NamedTuple):
    """What an eager call has decided."""

    shard: Shard
    serving: Statistics


class _How(NamedTuple):
    """What the Function runs with; eager: None: its backward is the op."""

    options: StatsOptions
    request: Request
    spread: Spread
    eager: _Eager | None
    destination: Destination | None = None


def _run(how: _How, operands: StatsOperands) -> Found:
    assert how.eager is not None
    return token_stats.forward(operands, how.options, how.request, *how.eager)


class _ShardedStats(torch.autograd.Function):
    """Found's fields, those of its stats first. run: of the operands, gives Found; its tensors may be empty
    for what there is none of."""

    @staticmethod
    def forward(ctx, run, how, *tensors):  # pyright: ignore[reportIncompatibleMethodOverride]
        operands = StatsOperands(*tensors)
        found = run(operands)
        stats, weight, hidden, target, topk_ids, *elsewhere = found
        ctx.how = how
        ctx.set_materialize_grads(False)
        if hidden is not None and hidden.dim() == 2:
            operands = operands._replace(hidden=hidden)
        ids = None if operands.topk_ids is None else topk_ids
        operands = operands._replace(target=target, topk_ids=ids)
        saved = (getattr(stats, name) for name in StatsSaved._fields)
        ctx.save_for_backward(*operands, *saved, *elsewhere)
        if how.destination is not None:
            ctx.destination, ctx.kind = how.destination, kind_of(how.destination.out)
            ctx.dtype = operands.weight.dtype
        results = *stats, weight, hidden, target, topk_ids, *elsewhere
        if how.eager is not None:
            # Others are not wrapped.
            wanted = (getattr(stats, name) if name in how.options.outputs else None for name in Stats._fields)
            results = *wanted, weight
        differentiable = len(StatsUpstream._fields)
        ctx.mark_non_differentiable(*(each for each in results[differentiable:] if each is not None))
        return results

    @staticmethod
    def backward(ctx, *dresults):  # pyright: ignore[reportIncompatibleMethodOverride]
        upstream = StatsUpstream(*dresults[: len(StatsUpstream._fields)])
        given = next((each for each in upstream if each is not None), None)
        if given is None:
            return None, *_by_operands(None, None, None)
        how, (*tensors, elsewhere, ids_elsewhere) = ctx.how, ctx.saved_tensors
        others = *upstream, *tensors, elsewhere, ids_elsewhere
        count = len(StatsOperands._fields)
        operands, saved = StatsOperands._make(tensors[:count]), StatsSaved._make(tensors[count:])
        _, _, need_dinput, need_dweight, _, need_dbias, *_ = ctx.needs_input_grad

        def run(needed: tuple[bool, bool], out: Tensor | None) -> AllGradients:
            request = how.request._replace(
                need_dinput=needed[0], need_dweight=needed[1], need_dbias=need_dbias
            )
            shard, serving = how.eager
            return token_stats.backward(
                *(upstream, operands, saved, elsewhere, ids_elsewhere),
                *(how.options, request, shard, serving, out),
            )

        if how.destination is not None:
            found = add_to_destination(ctx, given, others, run)
            return None, *_by_operands(*found)
        needed = need_dinput, need_dweight, need_dbias
        if how.eager is not None and is_plain_eager(*others):
            if torch.is_grad_enabled():
                raise RuntimeError(NO_DOUBLE_BACKWARD)
            return None, *_by_operands(*run(needed[:2], None))
        request, spread = how.request, how.spread
        found = inner.call(
            sharded_token_stats_backward,
            *(*upstream, *operands, *saved, elsewhere, ids_elsewhere),
            *(*whole.listed(how.options), *request.limits, request.kept_columns),
            *(spread.tp_group.group_name, *spread[1:], *needed),
        )
        found = (each if need else None for each, need in zip(found, needed, strict=True))
        return None, *_by_operands(*found)


def _by_operands(dinput: Tensor | None, dweight: Tensor | None, dbias: Tensor | None):
    """By the Function's arguments behind `run`: how, and the operands."""
    return None, dinput, dweight, None, dbias, None, None, None


# ----------------------------------------------------------------------------------------------------------
# Ops

_SPREAD = "str group, SymInt? vocab_start, int? sequence_dim, str grad_input, int? sm_margin"
_STATS = len(Stats._fields)
_OPERANDS = len(StatsOperands._fields)
_NUMBERS = len(StatsOptions._fields)
_OTHERS = ", ".join(f"Tensor {name}" for name in Found._fields[1:])
SHARDED_STATS = (
    f"sharded_token_stats({whole.OPERANDS}, {whole.OPTIONS}, {LIMITS}, SymInt kept_columns, {_SPREAD})"
    f" -> ({whole.RESULTS}, {_OTHERS.replace('hidden', 'every_input').replace('weight', 'total_weight')})"
)
SHARDED_STATS_BACKWARD = (
    f"sharded_token_stats_backward({whole.UPSTREAM}, {whole.OPERANDS}, {whole.SAVED}, Tensor? elsewhere, "
    f"Tensor? ids_elsewhere, {whole.OPTIONS}, {LIMITS}, SymInt kept_columns, {_SPREAD}, {whole.NEEDED})"
    " -> (Tensor dinput, Tensor dlinear_weight, Tensor dlinear_bias)"
)


def _how_of(arguments: tuple) -> tuple[_How, tuple]:
    """What an op is called with behind its tensors, and the rest."""
    options, (window, workspace, kept_columns, *rest) = whole.options_of(arguments)
    (name, *where), rest = rest[: len(Spread._fields)], rest[len(Spread._fields) :]
    request = Request(Limits(window, workspace), kept_columns)
    return _How(options, request, Spread(group_of(name), *where), None), tuple(rest)


def _fake_forward(*arguments):
    operands = StatsOperands(*arguments[:_OPERANDS])
    how, _ = _how_of(arguments[_OPERANDS:])
    hidden, target, ids = operands.hidden, operands.target, operands.topk_ids
    every = hidden.new_empty((target.shape[0], hidden.shape[1]))
    limits = *how.request.limits, how.request.kept_columns
    stats = whole.fake_token_stats(*operands._replace(hidden=every), *whole.listed(how.options), *limits)
    row_max = stats[Stats._fields.index("row_max")]
    total = () if "total_nll" in how.options.outputs else (0,)
    no_ids = hidden.new_empty((0, 0), dtype=torch.int64)
    return (
        *stats,
        row_max.new_empty(total),
        every if how.spread.sequence_dim is not None else hidden.new_empty((0,)),
        torch.empty_like(target, memory_format=torch.contiguous_format),
        torch.empty_like(no_ids if ids is None else ids, memory_format=torch.contiguous_format),
        row_max.new_empty(total),
        torch.empty_like(no_ids if ids is None else ids, dtype=torch.bool),
    )


@inner.define(SHARDED_STATS, _fake_forward, whole.check_format)
def sharded_token_stats(*arguments):
    operands = StatsOperands(*arguments[:_OPERANDS])
    how, _ = _how_of(arguments[_OPERANDS:])
    eager = _eager_of(how, operands)
    stats, *others = token_stats.forward(operands, how.options, how.request, *eager)
    hidden, acc = operands.hidden, accumulate_dtype(operands.hidden.dtype)
    weight, every, target, ids, elsewhere, ids_elsewhere = others
    stats = whole.all_present(
        stats._replace(sorted_ids=None),
        operands if every is None else operands._replace(hidden=every),
        how.options,
    )
    return (
        *stats,
        hidden.new_empty((0,), dtype=acc) if weight is None else weight,
        hidden.new_empty((0,)) if every is None else every,
        target,
        hidden.new_empty((0, 0), dtype=torch.int64) if ids is None else ids,
        hidden.new_empty((0,), dtype=acc) if elsewhere is None else elsewhere,
        hidden.new_empty((0, 0), dtype=torch.bool) if ids_elsewhere is None else ids_elsewhere,
    )


def _eager_of(how: _How, operands: StatsOperands) -> _Eager:
    serving = statistics(operands, how.options, "keep" if how.request.kept_columns else "recompute")
    return _Eager(shard_of(how.spread, operands.weight), serving)


def _fake_backward(*arguments):
    operands = StatsOperands(*arguments[len(StatsUpstream._fields) :][:_OPERANDS])
    count = len(StatsUpstream._fields) + _OPERANDS + len(StatsSaved._fields) + 2
    how, needed = _how_of(arguments[count:])
    hidden = operands.hidden
    if how.spread.sequence_dim is not None:
        rows = hidden.shape[0] // how.spread.tp_group.size()
        hidden = hidden.new_empty((rows, hidden.shape[1]))
    return whole.fake_gradients(needed, hidden.dtype, hidden, operands.weight, operands.linear_bias)


@inner.define(SHARDED_STATS_BACKWARD, _fake_backward)
def sharded_token_stats_backward(*arguments):
    count = len(StatsUpstream._fields)
    upstream, arguments = StatsUpstream(*arguments[:count]), arguments[count:]
    operands, arguments = StatsOperands(*arguments[:_OPERANDS]), arguments[_OPERANDS:]
    count = len(StatsSaved._fields)
    saved, arguments = StatsSaved(*arguments[:count]), arguments[count:]
    (elsewhere, ids_elsewhere), arguments = arguments[:2], arguments[2:]
    how, needed = _how_of(arguments)
    if not how.request.kept_columns:
        saved = saved._replace(kept=None, kept_scale=None)
    request = how.request._replace(need_dinput=needed[0], need_dweight=needed[1], need_dbias=needed[2])
    others = elsewhere, ids_elsewhere, how.options, request
    found = token_stats.backward(upstream, operands, saved, *others, *_eager_of(how, operands))
    return inner.present(found, operands.hidden, operands.hidden.dtype)


def _found(*results: Tensor) -> Found:
    return Found(Stats(*results[:_STATS]), *results[_STATS:])


def _how(arguments: tuple) -> tuple[_How]:
    return (_how_of(arguments)[0],)


_results: Callable[..., Any] = _found
register(sharded_token_stats, _ShardedStats, _results, _how)
register(sharded_token_stats_backward, GradientFunction, as_given, no_options)
