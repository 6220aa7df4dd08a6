"""The backward's stripes and grids."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ..arch import Gpu, KernelConfig
from ..arguments import Stripe
from . import gemm
from .memory import backward_bytes
from .problem import Limits, Problem, round_up
from .schedule import LEAST_STRIPE, STRIPE_MULTIPLE, stripe_columns

# What a stripe costs besides its GEMMs, in clocks: the accumulator, 8 bytes per element read and written at
# half of DRAM's rate, and three launches. An H100's estimates, used for every architecture.
ACCUMULATED_PER_CLOCK = 160  # elements
LAUNCH_CLOCKS = 3 * 6000


@dataclass(frozen=True)
class BackwardPlan:
    """One backward call, stripe by stripe over the vocabulary.

    logits, dhidden, dweight: the configurations of the three GEMMs. kept: columns that the forward kept, the
    first stripe if there are any. columns: of each recomputed stripe except the last. pitch: elements of a
    row of dlogits. workspace: bytes of what is kept, dlogits, accumulator, scaled rows and factors.
    """

    logits: KernelConfig
    dhidden: KernelConfig
    dweight: KernelConfig
    kept: int
    columns: int
    pitch: int
    stripes: tuple[Stripe, ...]
    workspace: int


@functools.lru_cache(maxsize=4096)
def plan(gpu: Gpu, problem: Problem, kept: int, limits: Limits) -> BackwardPlan:
    """Plan a backward whose first `kept` columns the forward kept.

    limits.window: columns of a stripe; 0: chosen. limits.workspace: bytes; 0: the default.
    """
    vocab = problem.vocab
    columns = stripe_columns(problem, kept, limits)
    if not limits.window:
        columns = _even_stripe(lambda width: _clocks(gpu, problem, width), vocab - kept, columns)
    ranges = [(0, kept)] if kept else []
    ranges += [(first, min(columns, vocab - first)) for first in range(kept, vocab, columns or vocab)]
    logits, gradients = gpu.row.keep_config, gpu.row.gradient_config
    n, d = problem.n, problem.d
    return BackwardPlan(
        logits=logits,
        dhidden=gradients,
        dweight=gradients,
        kept=kept,
        columns=columns,
        pitch=round_up(columns, 8),
        stripes=tuple(
            Stripe(
                first=first,
                columns=width,
                is_first=int(i == 0),
                is_last=int(i == len(ranges) - 1),
                logits=gemm.plan(gpu, logits, n, width, d),
                dhidden=gemm.plan(gpu, gradients, n, d, width),
                dweight=gemm.plan(gpu, gradients, width, d, n),
            )
            for i, (first, width) in enumerate(ranges)
        ),
        workspace=backward_bytes(problem, columns, kept),
    )


def _clocks(gpu: Gpu, problem: Problem, columns: int) -> int:
    """Clocks of a recomputed stripe."""
    n, d = problem.n, problem.d
    logits, gradients = gpu.row.keep_config, gpu.row.gradient_config
    total = LAUNCH_CLOCKS + gemm.clocks(logits, gemm.plan(gpu, logits, n, columns, d), n, d)
    if problem.need_dinput:
        total += gemm.clocks(gradients, gemm.plan(gpu, gradients, n, d, columns), n, columns)
        total += n * d // ACCUMULATED_PER_CLOCK
    if problem.need_dweight:
        total += gemm.clocks(gradients, gemm.plan(gpu, gradients, columns, d, n), columns, n)
    return total


def _even_stripe(clocks: Callable[[int], int], left: int, most: int) -> int:
    """Columns of a stripe, at most `most`, with which `left` columns take the fewest clocks.

    The last round of a stripe's GEMMs is only partly full, so neither the widest stripes nor stripes of equal
    width are always best.
    """
    if most >= left or most <= STRIPE_MULTIPLE:
        return most
    step = max(most // 4096, 1) * LEAST_STRIPE

    def total(columns: int) -> int:
        rest = left % columns
        return left // columns * clocks(columns) + (clocks(rest) if rest else 0)

    return min(range(most, most // 2, -step), key=total)
