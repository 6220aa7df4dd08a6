"""The backward's stripes, chunks and grids."""

from __future__ import annotations

import functools

from ..arch import Gpu
from ..arguments import Stripe
from . import gemm
from .candidates import Candidate
from .plans import BackwardConfigs, BackwardPlan, Chunk
from .problem import Limits, Problem, round_up
from .schedule import backward_within


@functools.lru_cache(maxsize=4096)
def plan(gpu: Gpu, problem: Problem, kept: int, limits: Limits) -> BackwardPlan:
    """Plan a backward whose first `kept` columns the forward kept.

    limits.window: columns of a stripe; 0: chosen. limits.workspace: bytes; 0: the default.
    """
    candidates, chosen = backward_within(gpu, problem, kept, limits)
    return build(gpu, problem, kept, candidates.gemms(kept).configs, chosen)


def build(
    gpu: Gpu,
    problem: Problem,
    kept: int,
    configs: BackwardConfigs,
    chosen: Candidate,
) -> BackwardPlan:
    """The plan of a candidate with these configurations."""
    tokens, dhidden, dweight = configs
    n, d, vocab = problem.n, problem.d, problem.vocab
    columns, chunk = chosen.columns, chosen.chunk
    if kept and problem.has_stripes_of_logits:
        ranges = [(first, min(columns, kept - first)) for first in range(0, kept, columns)]
    else:
        ranges = [(0, kept)] if kept else []
    if columns:
        ranges += [(first, min(columns, vocab - first)) for first in range(kept, vocab, columns)]

    def stripe(first: int, width: int, rows: int, splits: int) -> Stripe:
        return Stripe(
            first=first,
            columns=width,
            is_first=int(first == 0),
            is_last=int(first + width == vocab),
            logits=gemm.plan(gpu, tokens, width, rows, d, short=gemm.SHORT_FEATURES),
            dhidden=gemm.plan(gpu, dhidden, d, rows, width, splits),
            dweight=gemm.plan_dweight(gpu, dweight, width, d, rows),
        )

    # Thousands of stripes have at most three widths, and chunks two heights.
    splits = 1 if chunk else chosen.splits
    stripes = {width: stripe(0, width, n, splits) for width in {width for _, width in ranges}}
    heights = [min(chunk, n - first) for first in range(0, n, chunk)] if chunk else []
    whole = {rows: stripe(0, vocab, rows, chosen.splits) for rows in set(heights)}
    return BackwardPlan(
        tokens=tokens,
        dhidden=dhidden,
        dweight=dweight,
        kept=kept,
        columns=columns,
        pitch=round_up(columns, 8),
        splits=chosen.splits,
        stripes=tuple(
            stripes[width]._replace(
                first=first, is_first=int(first == 0), is_last=int(first + width == vocab)
            )
            for first, width in ranges
        ),
        chunks=tuple(Chunk(i * chunk, rows, whole[rows]) for i, rows in enumerate(heights)),
        workspace=chosen.bytes,
    )
