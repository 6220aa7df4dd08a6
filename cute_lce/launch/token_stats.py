"""Numbers of each token by the kernels, and the gradients by them: a forward and a backward that are compiled
for the terms (arguments.TERMS). What is of each token is made of the row statistics in torch, but for
logprob and total_nll, which the kernels give of a whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import maths
from ..arguments import MORE_PARTS, Operands
from ..exchange import Merge, RowSums, Sum
from ..implementation import (
    AllGradients,
    Halfway,
    Request,
    RowLoss,
    Saved,
    Stats,
    StatsOperands,
    StatsOptions,
    StatsSaved,
    StatsUpstream,
)
from ..logit_term import term_of
from ..plan.forward import spare_bytes
from ..plan.memory import forward_compaction_bytes
from ..plan.problem import Limits, Problem
from ..streaming import STATISTICS
from ..streaming.rows import is_ignored, is_valid
from ..streaming.token_stats import coefficients_of
from . import choose as schedules
from .backward import KernelBackward
from .backward import backward as backward_of
from .forward import KernelForward, empty_kept_logits
from .forward import empty_kept as empty_kept_of
from .forward import forward as forward_of
from .token_terms import Gradient, Tensors, kept_gradient, loss_of
from .topk import Topk, fits

STATISTICS_OF = {
    "entropy": "entropy",
    "log_sum_sq_probs": "squares",
    "total_nll": "total",
    "mean_logit": "logits",
    "argmax": "argmax",
    "is_top1": "argmax",
}
"""The numbers that need more than row_max and row_sum, and the terms of a forward that give it."""
SERVED = ("logprob", "lse", "topk_logprob", *STATISTICS_OF)
"""The numbers that kernels compute."""

LEAST_KEPT_CAP = 2.0**-12
"""Of kept logits: steps of fp16, of 2^-24 there, would be more than 2^-12 of a lesser softcap, and the slopes
of logits near it not those of the logits."""

T = TypeVar("T")

_prepared: dict[tuple, Any] = {}
MOST_PREPARED = 1024


def serves(operands: StatsOperands, options: StatsOptions) -> bool:
    """Whether the kernels compute these numbers, of operands whose device and dtype they serve."""
    cap, own = options.softcap, term_of(options.softcap)
    capped = cap is not None and own is None
    if capped and not maths.softcap_fits(cap, options.logit_scale, options.temperature):
        return False
    ids = operands.topk_ids
    if ids is not None and not fits(ids.shape, operands.weight.shape[0]):
        return False
    return set(options.outputs) <= set(SERVED)


def keeps(operands: StatsOperands, options: StatsOptions) -> bool:
    """Whether the gradients of the numbers that `serves` accepts can be had from what a forward keeps."""
    return keeps_exponentials(operands, options) or keeps_logits(operands, options)


def keeps_logits(operands: StatsOperands, options: StatsOptions) -> bool:
    """Whether a forward keeps logits: where exponentials would not do, and the rounding of logits
    (kernels/kept_logits.py) is less than that of dlogits."""
    if keeps_exponentials(operands, options) or operands.hidden.dtype is not torch.bfloat16:
        return False
    cap = options.softcap
    if cap is not None and term_of(cap) is None and cap / options.temperature < LEAST_KEPT_CAP:
        return False
    return not (options.label_smoothing and cap is not None)


def keeps_exponentials(operands: StatsOperands, options: StatsOptions) -> bool:
    """Whether a forward keeps exponentials: where it knows the onehot's share, which it subtracts from them.
    A LogitTerm's slope may be beyond fp16's range."""
    if term_of(options.softcap) is not None and operands.hidden.dtype is torch.float16:
        return False
    known = {"logprob", *("lse",) * bool(options.z_loss)}
    if "logprob" in options.outputs:
        # Without a gradient.
        known |= {"mean_logit", "argmax", "is_top1", *("entropy",) * (not options.entropy_grad)}
    return set(options.outputs) <= known


def choose(
    problem: Problem,
    operands: StatsOperands,
    options: StatsOptions,
    schedule: str,
    reduction: str,
    limits: Limits,
) -> tuple[str, int]:
    """See implementation.Statistics. "auto" recomputes what the kernels do not keep."""
    if schedule == "auto" and not keeps(operands, options):
        schedule = "recompute"
    of_logits = keeps_logits(operands, options)
    problem = problem._replace(
        keeps_logits=of_logits,
        overwrites=of_logits and problem.overwrites,
    )
    given = problem, operands.hidden.dtype, operands.hidden.device, schedule, reduction, limits
    if any(isinstance(each, torch.SymInt) for each in (*problem, *limits)):
        return schedules.choose(*given)
    return _remembered(("choose", *given), schedules.choose, *given)


def _beside_more_partials(operands: Operands, request: Request, parts: int, terms: tuple[str, ...]) -> Limits:
    """A part of what is for partials is for those of terms, which have so many numbers for each's two."""
    limits, kept, (n, d) = request.limits, request.kept_columns, operands.hidden.shape
    if not kept:
        return limits._replace(workspace=limits.workspace * 2 // (2 + parts))
    if not limits.workspace:
        return limits
    half = operands.hidden.dtype is torch.float16
    problem = Problem(n, d, operands.weight.shape[0], half, keeps_logits="kept_logits" in terms)
    spare = spare_bytes(n, kept, limits, forward_compaction_bytes(problem, kept))
    return limits._replace(workspace=limits.workspace - max(spare, 0) * parts // (2 + parts))


def empty_kept(operands: StatsOperands, options: StatsOptions, kept_columns: int) -> dict[str, Tensor]:
    """See implementation.Statistics."""
    if not keeps(operands, options):
        return STATISTICS.empty_kept(operands, options, kept_columns)
    if keeps_logits(operands, options):
        kept, notes = empty_kept_logits(operands.hidden, kept_columns)
        return {"kept": kept, "kept_scale": notes}
    kept, kept_scale = empty_kept_of(operands.hidden, kept_columns)
    found = {"kept": kept, "kept_scale": kept_scale}
    if options.z_loss:
        found["onehot_ratio"] = torch.empty_like(kept_scale)
    return found


def forward(
    operands: StatsOperands, options: StatsOptions, request: Request, merge: Merge | None = None
) -> Stats:
    given = Operands(*operands[:3])
    n, device = given.hidden.shape[0], given.hidden.device
    if n == 0:
        return STATISTICS.forward(operands, options, request, merge)
    asked = _Asked.of(operands, options, request.kept_columns)
    loss, more = asked.loss, asked.more
    parts = sum(MORE_PARTS[term] for term in more)
    limits = _beside_more_partials(given, request, parts, loss.terms)
    request = request._replace(statistics=True, limits=limits)
    key = "forward", *_kind(given), loss.terms, request.limits, request.kept_columns, request.shard
    prepared = _remembered(key, forward_of, given, loss, request)
    assert isinstance(prepared, KernelForward)
    sums = {term: torch.empty((n,), dtype=_DTYPES.get(term, torch.float32), device=device) for term in more}
    if more:
        partials = torch.empty((prepared.partials * n * parts,), dtype=torch.float32, device=device)
        outputs = {_OUTPUTS[name]: each.data_ptr() for name, each in sums.items()}
        loss = loss._replace(more_partials=partials.data_ptr(), **outputs)
    topk = topk_values = None
    classes = given.weight.shape[0]
    if operands.topk_ids is not None:
        valid = is_valid(given.target, options.ignore_index)
        topk = Topk.of(operands.topk_ids, valid, classes, compacted=prepared.compaction is not None)
    if topk is not None:
        topk_values = torch.empty((topk.shape.numel(),), dtype=torch.float32, device=device)
        loss = topk.added_to(loss, topk_values)
    target_logit = None
    if merge is not None or options.softcap is not None:
        target_logit = torch.empty((n,), dtype=torch.float32, device=device)
    found = prepared.run(given, loss, target_logit)
    row_max, row_sum = found.row_max, found.row_sum
    assert row_max is not None
    assert row_sum is not None
    # Of a whole vocabulary without slopes nothing is read of the logit that logprob does not say.
    target_logit = found.loss if target_logit is None else target_logit
    own = RowSums(row_max, row_sum, target_logit, **_sums_of(operands, sums))
    total = sums.get("total")
    if topk is not None and topk_values is not None:
        own = own._replace(topk_logit=topk.as_given(topk_values), topk_known=topk.known)
    elif operands.topk_ids is not None:
        none = row_max.new_zeros(operands.topk_ids.shape)
        own = own._replace(topk_logit=none, topk_known=none.bool())
    given_numbers = {"logprob": found.loss, "total_nll": total}
    if merge is not None:
        if total is not None:
            own = own._replace(total_gap=total, weight=_weight_of(operands))
        own, given_numbers = merge(own), {}
        found = prepared.finish(given, loss, found._replace(row_max=own.row_max, row_sum=own.row_sum))
    return _stats_of(own, given_numbers, options, given.target)._replace(
        kept=found.kept,
        kept_scale=found.kept_scale,
        onehot_ratio=asked.onehot_ratio,
        sorted_ids=None if topk is None else topk.packed,
    )


class _Asked(NamedTuple):
    """What a forward is asked for. loss: with its terms, but for what a call allocates. more: the terms among
    MORE_PARTS. onehot_ratio (n,): written where the onehot's share is not 1. tensors: whose addresses the
    loss has."""

    loss: Any
    more: list[str]
    onehot_ratio: Tensor | None
    tensors: Tensors

    @classmethod
    def of(cls, operands: StatsOperands, options: StatsOptions, kept_columns: int) -> _Asked:
        tensors, ratio = Tensors.of(operands), None
        loss = loss_of(options, tensors)
        found = {STATISTICS_OF[name] for name in options.outputs if name in STATISTICS_OF}
        more = [term for term in MORE_PARTS if term in found]
        if "total" in more and tensors.class_weight is not None:
            loss = loss.with_terms("class_weight", class_weight=tensors.class_weight.data_ptr())
        loss = loss.with_terms(*more)
        if kept_columns and keeps_logits(operands, options):
            loss = loss.with_terms("kept_logits")
        elif kept_columns and options.z_loss:
            tensors = tensors.with_target_weight(operands.target)
            ratio = torch.empty(operands.target.shape, dtype=torch.float32, device=operands.target.device)
            own = tensors.target_weight
            loss = loss.with_terms(
                "proportion",
                target_weight=0 if own is None else own.data_ptr(),
                lse_slope=2.0 * options.z_loss,
                onehot_ratio=ratio.data_ptr(),
            )
        if operands.topk_ids is not None and operands.topk_ids.shape[1]:
            loss = loss.with_terms("topk")
        return cls(loss, more, ratio, tensors)


def _stats_of(own: RowSums, given: dict[str, Tensor | None], options: StatsOptions, target: Tensor) -> Stats:
    """The numbers that are asked for, and what a backward reads, but for what is kept. own: of the whole
    vocabulary. given: numbers that kernels gave, 0 in ignored rows."""
    saved = {"row_max": own.row_max, "row_sum": own.row_sum, "mean_gap": own.mean_gap}
    logprob = given.get("logprob")
    if options.saves_logits:
        saved |= {"target_logit": own.target_logit, "topk_logit": own.topk_logit}
    done = {name: given[name] for name in options.outputs if given.get(name) is not None}
    if len(done) == len(options.outputs):
        return Stats(**done, **saved)
    log_row_sum = own.row_sum.log()
    if logprob is None:
        logprob = maths.logprob(log_row_sum, own.row_max, own.target_logit)
    numbers = {"logprob": logprob}
    if "lse" in options.outputs:
        numbers["lse"] = maths.lse(log_row_sum, own.row_max)
    if own.mean_gap is not None:
        numbers["entropy"] = maths.entropy(log_row_sum, own.mean_gap)
    if own.total_gap is not None and own.weight is not None:
        numbers["total_nll"] = own.total_gap + log_row_sum * own.weight
    if own.square_sum is not None:
        numbers["log_sum_sq_probs"] = maths.log_sum_sq_probs(log_row_sum, own.square_sum.log())
    for name in ("mean_logit", "argmax", "is_top1"):
        value = getattr(own, name)
        if value is not None:
            numbers[name] = value
    ignored = is_ignored(target, options.ignore_index)
    for name in options.outputs:
        if name not in done and name != "topk_logprob":
            # The tensors are new.
            done[name] = numbers[name].masked_fill_(ignored, 0)
    if own.topk_logit is not None and own.topk_known is not None:
        each = maths.logprob(log_row_sum.unsqueeze(1), own.row_max.unsqueeze(1), own.topk_logit)
        done["topk_logprob"] = each.masked_fill_(ignored.unsqueeze(1) | ~own.topk_known, 0)
    return Stats(**done, **saved)


_OUTPUTS = {
    "entropy": "mean_gap",
    "squares": "square_sum",
    "total": "total",
    "logits": "logit_sum",
    "argmax": "argmax",
}
"""A forward's terms, and the number of Loss that says where what they give is written."""
_DTYPES = {"argmax": torch.int32}
"""Of those that are not float32."""


def _sums_of(operands: StatsOperands, sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fields of RowSums, of what a forward's terms gave."""
    found: dict[str, Tensor] = {}
    if "entropy" in sums:
        found["mean_gap"] = sums["entropy"]
    if "squares" in sums:
        found["square_sum"] = sums["squares"]
    V = operands.weight.shape[0]
    if "logits" in sums:
        found["mean_logit"] = sums["logits"] / V
    if "argmax" in sums:
        found["argmax"] = sums["argmax"].long()
        found["is_top1"] = found["argmax"] == operands.target
    return found


def _weight_of(operands: StatsOperands) -> Tensor:
    """RowSums.weight of these classes."""
    if operands.class_weight is not None:
        return operands.class_weight.float().sum()
    return operands.weight.new_full((), operands.weight.shape[0], dtype=torch.float32)


def backward(
    upstream: StatsUpstream,
    operands: StatsOperands,
    saved: StatsSaved,
    options: StatsOptions,
    request: Request,
    out: Tensor | None = None,
    add_up: Sum | None = None,
) -> AllGradients:
    given = Operands(*operands[:3])
    if given.hidden.shape[0] == 0 or not (request.need_dinput or request.need_dweight):
        # What kernels kept is not what the streaming path does.
        saved, request = saved._replace(kept=None), request._replace(kept_columns=0)
        return STATISTICS.backward(upstream, operands, saved, options, request, out, add_up)
    tensors, classes = Tensors.of(operands), given.weight.shape[0]
    of_logits = saved.kept is not None and keeps_logits(operands, options)
    gradient = _gradient_of(upstream, operands, saved, options, request, tensors)
    loss = gradient.loss.with_terms("kept_logits") if of_logits else gradient.loss
    request = request._replace(added=None if out is None else out.dtype)
    if request.need_dbias:
        loss = loss.with_terms("bias_gradient", with_dhidden=int(request.need_dinput))
    key = "backward", *_kind(given), loss.terms, request
    prepared = _remembered(key, backward_of, given, loss, request)
    assert isinstance(prepared, KernelBackward)
    topk = topk_values = None
    if gradient.topk is not None and operands.topk_ids is not None:
        compacted = prepared.compaction is not None
        topk = Topk.again(saved.sorted_ids, operands.topk_ids, classes, compacted=compacted)
        which = is_valid(given.target, options.ignore_index)
        topk = topk or Topk.of(operands.topk_ids, which, classes, compacted=compacted)
    if topk is not None and gradient.topk is not None:
        topk_values = topk.ordered(gradient.topk)
        loss = topk.added_to(loss, topk_values)
    dbias = None
    if request.need_dbias:
        dbias = saved.row_max.new_empty((classes,))
        column_sums = saved.row_max.new_empty((prepared.column_sums,))
        loss = loss._replace(dbias=dbias.data_ptr(), column_sums=column_sums.data_ptr())
    # num_valid is not read.
    both = Saved(*given, saved.row_max, gradient.row_sum, saved.row_max, saved.kept, saved.kept_scale)
    first = prepared.dinput(gradient.dloss, both, loss, out)
    wait = None
    if add_up is not None and isinstance(first, Halfway) and first.dinput is not None:
        wait = add_up(first.dinput)
        first = first._replace(join=wait)
    dinput, dweight = prepared.dweight(gradient.dloss, both, loss, first, out)
    if wait is not None:
        dinput = wait()
    if of_logits and request.overwrites and saved.kept is not None:
        saved.kept.untyped_storage().resize_(0)
    return dinput, dweight, None if dbias is None else dbias.to(given.hidden.dtype)


def _gradient_of(
    upstream: StatsUpstream,
    operands: StatsOperands,
    saved: StatsSaved,
    options: StatsOptions,
    request: Request,
    tensors: Tensors,
) -> Gradient:
    """What a backward reads."""
    ignored = is_ignored(operands.target, options.ignore_index)
    coefficients = coefficients_of(upstream, operands, saved, ignored)
    if saved.kept is None or keeps_logits(operands, options):
        return Gradient.of(operands, saved, options, tensors, coefficients, ignored)
    return kept_gradient(operands, saved, options, request, tensors, coefficients, ignored)


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
