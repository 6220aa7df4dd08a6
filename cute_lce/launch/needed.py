"""Which kernels a call's kind is likely to need next, for `cache.get` of one that is missing."""

from __future__ import annotations

from collections.abc import Iterator

from ..arguments import Operands
from ..implementation import Request, StatsOperands, StatsOptions
from ..logit_term import term_of
from ..options import LossOptions
from ..plan.kernels import Flags, Key, Kind, Terms, needed, terms_of
from .device import dtype_name, gpu_of


def of_loss(operands: Operands, loss: LossOptions, request: Request) -> list[Key]:
    """Of a loss without terms, but for a logit_scale."""
    accumulates = not request.shard and request.added is None
    terms = Terms(loss.terms, loss.terms, (loss.terms,))
    return needed(_kind(operands, terms, request, accumulates), operands.hidden.shape[0])


def of_stats(operands: StatsOperands, options: StatsOptions, request: Request) -> Iterator[Key]:
    """Of numbers of each token."""
    given = Operands(*operands[:3])
    outputs = options.outputs
    flags = Flags(
        logit_scale=options.logit_scale != options.temperature,
        softcap=options.softcap is not None,
        z_loss=bool(options.z_loss),
        linear_bias=operands.linear_bias is not None,
        label_smoothing=bool(options.label_smoothing),
        class_weights=operands.class_weight is not None,
        entropy="entropy" in outputs,
        lse="lse" in outputs and not options.z_loss,
        log_sum_sq_probs="log_sum_sq_probs" in outputs,
        mean_logit="mean_logit" in outputs,
        argmax="argmax" in outputs or "is_top1" in outputs,
        topk=operands.topk_ids is not None,
        temperatures=operands.temperature is not None,
    )
    # A LogitTerm's kernels are compiled where they are needed.
    if term_of(options.softcap) is None:
        kind = _kind(given, terms_of(flags, dtype_name(given.hidden.dtype)), request, accumulates=False)
        yield from needed(kind, given.hidden.shape[0])


def _kind(operands: Operands, terms: Terms, request: Request, accumulates: bool) -> Kind:
    return Kind(
        gpu_of(operands.hidden.device).arch,
        dtype_name(operands.hidden.dtype),
        dtype_name(operands.target.dtype),
        terms,
        added="" if request.added is None else dtype_name(request.added),
        group=request.shard,
        gradient=request.need_dinput or request.need_dweight,
        accumulates=accumulates,
    )
