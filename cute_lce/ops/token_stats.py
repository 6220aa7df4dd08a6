"""The inner ops of numbers of each token, and their autograd.

    token_stats                what implementation.Stats holds; what was not asked for is empty
    token_stats_backward       the gradients by the first five of them
    token_loss_gradients       the rows' losses or their sum, and all gradients for an upstream of 1

Their bodies call what `select.statistics` picks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import environment
from ..arguments import Operands
from ..implementation import (
    Accumulated,
    AllGradients,
    Request,
    RowLoss,
    Statistics,
    Stats,
    StatsOperands,
    StatsOptions,
    StatsSaved,
    StatsUpstream,
)
from ..options import LossOptions, TermOptions, fields
from ..plan.problem import Limits
from ..streaming.products import accumulate_dtype
from ..streaming.rows import is_valid
from . import inner
from .autograd import (
    NO_DOUBLE_BACKWARD,
    Destination,
    GradientFunction,
    GradInForwardFunction,
    add_to_destination,
    as_given,
    kind_of,
    no_options,
    register,
)
from .plain import is_plain_eager, placed_as
from .prepared import check_targets
from .schemas import LIMITS
from .select import implementation, statistics

OPERANDS = (
    "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? class_weight, "
    "Tensor? temperature, Tensor? topk_ids"
)
OPTIONS = (
    "SymInt ignore_index, float logit_scale, float? softcap, float temperature_number, str[] outputs, "
    "float z_loss, float label_smoothing, bool entropy_grad"
)
NEEDED = "bool need_dinput, bool need_dweight, bool need_dbias"
RESULTS = ", ".join(f"Tensor {name}" for name in Stats._fields)
UPSTREAM = ", ".join(f"Tensor? d{name}" for name in StatsUpstream._fields)
SAVED = ", ".join(
    f"Tensor{'' if name in ('row_max', 'row_sum') else '?'} {name}" for name in StatsSaved._fields
)

TOKEN_STATS = f"token_stats({OPERANDS}, {OPTIONS}, {LIMITS}, SymInt kept_columns) -> ({RESULTS})"
TOKEN_STATS_BACKWARD = (
    f"token_stats_backward({UPSTREAM}, {OPERANDS}, {SAVED}, {OPTIONS}, {LIMITS}, {NEEDED})"
    " -> (Tensor dinput, Tensor dlinear_weight, Tensor dlinear_bias)"
)
_TERMS = ", ".join(f"{field.inner} {name}" for name, field in fields(TermOptions).items())
TOKEN_LOSS_GRADIENTS = (
    f"token_loss_gradients({OPERANDS}, Tensor? target_weight, Tensor? token_weight, SymInt ignore_index, "
    f"float logit_scale, {_TERMS}, {LIMITS}, {NEEDED}, bool total)"
    " -> (Tensor loss, Tensor num_valid, Tensor dinput_accumulator, Tensor dweight_accumulator, "
    "Tensor dbias_accumulator)"
)

_TENSORS = len(StatsOperands._fields)
_NUMBERS = len(StatsOptions._fields)
_DTYPES = {"argmax": torch.int64, "is_top1": torch.bool, "sorted_ids": torch.int32}


def options_of(arguments: tuple) -> tuple[StatsOptions, tuple]:
    """The options that begin the arguments, and the rest."""
    options = StatsOptions._make(arguments[:_NUMBERS])
    return options._replace(outputs=tuple(options.outputs)), arguments[_NUMBERS:]


def listed(options: StatsOptions) -> StatsOptions:
    """As the ops take them."""
    return options._replace(outputs=list(options.outputs))  # pyright: ignore[reportArgumentType]


def _terms_of(arguments: tuple) -> tuple[StatsOptions, TermOptions, tuple]:
    """Those of token_loss_gradients behind its tensors, and the rest."""
    end = 2 + len(TermOptions._fields)
    loss, terms = LossOptions._make(("none", *arguments[:2])), TermOptions._make(arguments[2:end])
    return StatsOptions.of(loss, terms), terms, arguments[end:]


# ----------------------------------------------------------------------------------------------------------
# Fakes


def fake_token_stats(*arguments):
    operands = StatsOperands(*arguments[:_TENSORS])
    options, (_, _, kept_columns) = options_of(arguments[_TENSORS:])
    input, ids = operands.hidden, operands.topk_ids
    n, acc = input.shape[0], accumulate_dtype(input.dtype)
    shapes: dict[str, tuple[int, ...]] = {name: (n,) for name in (*options.outputs, "row_max", "row_sum")}
    if "entropy" in options.outputs:
        shapes["mean_gap"] = (n,)
    if options.saves_logits:
        shapes["target_logit"] = (n,)
    if ids is not None:
        shapes["topk_logprob"] = tuple(ids.shape)
        if options.saves_logits:
            shapes["topk_logit"] = tuple(ids.shape)
    kept = _empty_kept(operands, options, kept_columns)
    return tuple(
        kept[name] if name in kept else input.new_empty(shapes.get(name, (0,)), dtype=_DTYPES.get(name, acc))
        for name in Stats._fields
    )


def fake_gradients(needed, dtype, input, linear_weight, linear_bias) -> tuple[Tensor, ...]:
    return tuple(
        input.new_empty(like.shape if need else (0,), dtype=dtype)
        for need, like in zip(needed, (input, linear_weight, linear_bias), strict=True)
    )


def _fake_backward(*arguments):
    operands = StatsOperands(*arguments[len(StatsUpstream._fields) :][:_TENSORS])
    hidden = operands.hidden
    return fake_gradients(arguments[-3:], hidden.dtype, hidden, operands.weight, operands.linear_bias)


def _fake_loss_gradients(*arguments):
    operands, (*needed, total) = StatsOperands(*arguments[:_TENSORS]), arguments[-4:]
    hidden, acc = operands.hidden, accumulate_dtype(operands.hidden.dtype)
    return (
        hidden.new_empty(() if total else hidden.shape[:1], dtype=acc),
        hidden.new_empty((), dtype=torch.int64),
        *fake_gradients(needed, acc, hidden, operands.weight, operands.linear_bias),
    )


# ----------------------------------------------------------------------------------------------------------
# Ops


def _statistics(operands: StatsOperands, options: StatsOptions, kept_columns: int) -> Statistics:
    return statistics(operands, options, "keep" if kept_columns else "recompute")


def _empty_kept(operands: StatsOperands, options: StatsOptions, kept_columns: int) -> dict[str, Tensor]:
    """Of whatever keeps, where a symbolic number of columns may come to 0."""
    return statistics(operands, options, "auto").empty_kept(operands, options, kept_columns)


def _check(operands: StatsOperands, ignore_index: int) -> None:
    if environment.CHECK_TARGETS:
        check_targets(Operands(*operands[:3]), LossOptions("none", ignore_index))


def check_format(example: tuple, arguments: tuple) -> None:
    """Raise ValueError for numbers of which another path keeps, in a format of its own, than of those that a
    graph was traced with. Both: the arguments of token_stats, or of that over a group."""
    operands, traced = StatsOperands(*arguments[:_TENSORS]), options_of(example[_TENSORS:])[0]
    given, (_, _, kept_columns, *_) = options_of(arguments[_TENSORS:])
    if not kept_columns:
        return
    if statistics(operands, traced, "keep") is not statistics(operands, given, "keep"):
        raise ValueError(
            f"softcap: got {given.softcap} with logit_scale={given.logit_scale} and temperature="
            f"{given.temperature} in a graph that was compiled for numbers of which kernels keep, want "
            "schedule 'recompute', or numbers whose quotients are ordinary ones in float32"
        )


@inner.define(TOKEN_STATS, fake_token_stats, check_format)
def token_stats(*arguments):
    operands = StatsOperands(*arguments[:_TENSORS])
    options, (window, workspace, kept_columns) = options_of(arguments[_TENSORS:])
    found = _forward(operands, options, Request(Limits(window, workspace), kept_columns))
    return all_present(found._replace(sorted_ids=None), operands, options)


def eager_token_stats(options: StatsOptions, request: Request, operands: tuple) -> Stats:
    """token_stats of a call that nothing intercepts: None instead of empty tensors, which take the host time,
    and the ids' order for the backward."""
    return _forward(StatsOperands(*operands), options, request)


def _forward(operands: StatsOperands, options: StatsOptions, request: Request) -> Stats:
    _check(operands, options.ignore_index)
    return _statistics(operands, options, request.kept_columns).forward(operands, options, request)


def all_present(found: Stats, operands: StatsOperands, options: StatsOptions) -> tuple[Tensor, ...]:
    """With empty tensors for what there is none of: a schema has no optional results. An op's have no
    sorted_ids, whose size depends on what serves the call: a graph's backward sorts them again."""
    if found.kept is None:
        found = found._replace(**_empty_kept(operands, options, 0))
    acc = accumulate_dtype(operands.hidden.dtype)
    return tuple(
        operands.hidden.new_empty((0,), dtype=_DTYPES.get(name, acc)) if value is None else value
        for name, value in found._asdict().items()
    )


def _run_backward(
    upstream: StatsUpstream,
    operands: StatsOperands,
    saved: StatsSaved,
    options: StatsOptions,
    request: Request,
    out: Tensor | None = None,
) -> AllGradients:
    kept = saved.kept
    # A backward has freed what it overwrote: the next one of a retained graph recomputes.
    if kept is not None and (kept.shape[1] == 0 or kept.untyped_storage().nbytes() == 0):
        saved = saved._replace(kept=None)
    # The rows of what is kept are padded to 16 bytes.
    columns = 0 if saved.kept is None else min(saved.kept.shape[1], operands.weight.shape[0])
    request = request._replace(kept_columns=columns)
    serving = _statistics(operands, options, request.kept_columns)
    return serving.backward(upstream, operands, saved, options, request, out)


@inner.define(TOKEN_STATS_BACKWARD, _fake_backward)
def token_stats_backward(*arguments):
    count = len(StatsUpstream._fields)
    upstream, arguments = StatsUpstream(*arguments[:count]), arguments[count:]
    operands, arguments = StatsOperands(*arguments[:_TENSORS]), arguments[_TENSORS:]
    count = len(StatsSaved._fields)
    saved, arguments = StatsSaved(*arguments[:count]), arguments[count:]
    options, (window, workspace, need_dinput, need_dweight, need_dbias) = options_of(arguments)
    request = Request(Limits(window, workspace), 0, need_dinput, need_dweight, need_dbias=need_dbias)
    found = _run_backward(upstream, operands, saved, options, request)
    return inner.present(found, operands.hidden, operands.hidden.dtype)


@inner.define(TOKEN_LOSS_GRADIENTS, _fake_loss_gradients)
def token_loss_gradients(*arguments):
    operands, arguments = StatsOperands(*arguments[:_TENSORS]), arguments[_TENSORS:]
    (target_weight, token_weight), arguments = arguments[:2], arguments[2:]
    options, terms, (window, workspace, *needed, total) = _terms_of(arguments)
    _check(operands, options.ignore_index)
    hidden = operands.hidden
    request = Request(Limits(window, workspace), 0, *needed[:2], need_dbias=needed[2])
    losses, *gradients = statistics(operands, options, "grad_in_forward").grad_in_forward(
        operands, options, RowLoss(terms, target_weight, token_weight), request
    )
    num_valid = is_valid(operands.target, options.ignore_index).sum()
    loss = losses.sum() if total else losses
    return loss, num_valid, *inner.present(tuple(gradients), hidden, losses.dtype)


# ----------------------------------------------------------------------------------------------------------
# Autograd


class StatsHow(NamedTuple):
    """What a Function runs with besides tensors: options, and Request apart from the gradients needed.

    destination: of an eager call. is_plain: whether nothing intercepts the dispatcher, which the call then
    does not use: it takes longer than all else that the host does.
    """

    options: StatsOptions
    request: Request
    destination: Destination | None = None
    is_plain: bool = False


class StatsFunction(torch.autograd.Function):
    """token_stats. run: of the operands, gives Stats' fields, empty or None for what there is none of."""

    @staticmethod
    def forward(ctx, run, how, *operands):
        results = run(operands)
        ctx.how = how
        ctx.set_materialize_grads(False)
        saved = results[Stats._fields.index("row_max") :]
        ctx.save_for_backward(*operands, *saved)
        others = results[len(StatsUpstream._fields) :]
        ctx.mark_non_differentiable(*(each for each in others if each is not None))
        if how.destination is not None:
            _keep_destination(ctx, how.destination, operands[1].dtype)
        return tuple(results)

    @staticmethod
    def backward(ctx, *dresults):  # pyright: ignore[reportIncompatibleMethodOverride]
        upstream = StatsUpstream(*dresults[: len(StatsUpstream._fields)])
        given = next((each for each in upstream if each is not None), None)
        if given is None:
            return _by_operands(None, None, None)
        # Activation checkpointing lets them be read once.
        tensors, how = ctx.saved_tensors, ctx.how
        operands, saved = StatsOperands(*tensors[:_TENSORS]), StatsSaved(*tensors[_TENSORS:])
        needs = ctx.needs_input_grad[2:]
        needed = needs[0], needs[1], needs[3]

        def run(wanted: tuple[bool, bool], out: Tensor | None) -> AllGradients:
            request = how.request._replace(
                need_dinput=wanted[0], need_dweight=wanted[1], need_dbias=needed[2]
            )
            return _run_backward(upstream, operands, saved, how.options, request, out)

        others = *upstream, *tensors
        if how.destination is None and _is_plain(how, others):
            return _by_operands(*run(needed[:2], None))
        if how.destination is None:
            found = inner.call(
                token_stats_backward,
                *(placed_as(each, saved.row_max) for each in upstream),
                *operands,
                *saved,
                *listed(how.options),
                *how.request.limits,
                *needed,
            )
            return _by_operands(*(each if need else None for each, need in zip(found, needed, strict=True)))
        return _by_operands(*add_to_destination(ctx, given, others, run))


def _is_plain(how: StatsHow, tensors: Sequence[Tensor | None]) -> bool:
    """Whether nothing intercepts a backward either. It may then overwrite what was kept: nothing else will
    read that. tensors: upstream gradients, and saved tensors, which may be subclasses after hooks."""
    return how.is_plain and not torch.is_grad_enabled() and is_plain_eager(*tensors)


def _keep_destination(ctx, destination: Destination, dtype: torch.dtype) -> None:
    ctx.destination, ctx.kind, ctx.dtype = destination, kind_of(destination.out), dtype


def _by_operands(dinput: Tensor | None, dweight: Tensor | None, dbias: Tensor | None):
    """By the arguments of a Function: run, how, and the operands."""
    return None, None, dinput, dweight, None, dbias, None, None, None


class LossGradientsFunction(GradInForwardFunction):
    """token_loss_gradients, whose backward is scale_gradients. run: of the op's tensors."""

    @staticmethod
    def forward(ctx, run, how, *operands):  # pyright: ignore[reportIncompatibleMethodOverride]
        results = run(operands)
        ctx.how, ctx.dtype = how, operands[0].dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(operands[2], *results[1:])
        ctx.mark_non_differentiable(*results[1:])
        if how.destination is not None:
            _keep_destination(ctx, how.destination, operands[1].dtype)
        return tuple(results)

    @staticmethod
    def backward(ctx, *dresults):  # pyright: ignore[reportIncompatibleMethodOverride]
        dloss = dresults[0]
        if dloss is None:
            return *_by_operands(None, None, None), None, None
        if torch.is_grad_enabled():
            raise RuntimeError(NO_DOUBLE_BACKWARD)
        target, num_valid, dinput, dweight, dbias = ctx.saved_tensors
        request, dtype = ctx.how.request, ctx.dtype
        reduction = "none" if dloss.dim() else "sum"
        loss = LossOptions(reduction, ctx.how.options.ignore_index)
        dbias = (torch.where(num_valid > 0, dloss, 0) * dbias).to(dtype) if request.need_dbias else None
        needed = request.need_dinput, request.need_dweight
        if ctx.how.destination is None:
            accumulators = num_valid, dinput, dweight, None
            found = inner.scale_gradients(dloss, target, *accumulators, *loss, dtype, *needed)
            found = *(each if need else None for each, need in zip(found, needed, strict=True)), dbias
        else:

            def run(wanted: tuple[bool, bool], out: Tensor | None) -> AllGradients:
                present = (
                    each if need else None for each, need in zip((dinput, dweight), wanted, strict=True)
                )
                accumulated = Accumulated(dloss, num_valid, *present)
                scaling = implementation(dloss.device, dtype)
                return *scaling.scale_gradients(dloss, target, accumulated, loss, dtype, out), dbias

            found = add_to_destination(ctx, dloss, (target, num_valid, dinput, dweight, dbias), run)
        return *_by_operands(*found), None, None


def _stats_how(arguments: tuple) -> tuple[StatsHow]:
    options, (window, workspace, *_) = options_of(arguments)
    return (StatsHow(options, Request(Limits(window, workspace))),)


def _loss_gradients_how(arguments: tuple) -> tuple[StatsHow]:
    options, _, (window, workspace, need_dinput, need_dweight, need_dbias, _) = _terms_of(arguments)
    request = Request(Limits(window, workspace), 0, need_dinput, need_dweight, need_dbias=need_dbias)
    return (StatsHow(options, request),)


register(token_stats, StatsFunction, as_given, _stats_how)
register(token_stats_backward, GradientFunction, as_given, no_options)
register(token_loss_gradients, LossGradientsFunction, as_given, _loss_gradients_how)
