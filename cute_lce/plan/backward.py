"""The backward's stripes and grids."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..arch import Gpu, KernelConfig
from ..arguments import Stripe
from . import gemm
from .cost import Gemm, stripe_clocks, sum_clocks
from .forward import choose_config
from .memory import backward_bytes, usable, workspace_of
from .problem import Limits, Problem, ceil_div, round_up
from .schedule import LEAST_STRIPE, STRIPE_MULTIPLE, stripe_columns

LEAST_HIDING = 576
"""Tokens from which narrow tiles of dweight are faster: on an H200 they took 3.7% more at 512 tokens and 8%
less at 1024."""


@dataclass(frozen=True)
class BackwardPlan:
    """One backward call, stripe by stripe over the vocabulary.

    tokens: the configuration of the GEMMs of the logits and of dhidden. dweight: of dweight's. kept: columns
    that the forward kept, the first stripe if there are any. columns: of each recomputed stripe except the
    last. pitch: elements of a row of dlogits. splits: of dhidden's k, each with a sum of its own. workspace:
    bytes of what is kept, dlogits, sums, scaled rows and factors.
    """

    tokens: KernelConfig
    dweight: KernelConfig
    kept: int
    columns: int
    pitch: int
    splits: int
    stripes: tuple[Stripe, ...]
    workspace: int


@functools.lru_cache(maxsize=4096)
def plan(gpu: Gpu, problem: Problem, kept: int, limits: Limits) -> BackwardPlan:
    """Plan a backward whose first `kept` columns the forward kept.

    limits.window: columns of a stripe; 0: chosen. limits.workspace: bytes; 0: the default.
    """
    vocab = problem.vocab
    columns = stripe_columns(problem, kept, limits)
    gradients = _dweight_config(gpu, problem.n)
    if not limits.window:
        config = choose_config(gpu, problem.n, problem.d, columns)
        gemms = Gemm(gpu, config), Gemm(gpu, gradients)
        passes = sum_clocks(problem.n, problem.d, 2, 1) if problem.need_dinput else 0
        columns = _even_stripe(
            lambda width: passes + stripe_clocks(*gemms, problem, width, 1), vocab - kept, columns
        )
    ranges = [(0, kept)] if kept else []
    ranges += [(first, min(columns, vocab - first)) for first in range(kept, vocab, columns or vocab)]
    n, d = problem.n, problem.d
    widest = max((width for _, width in ranges), default=0)
    workspace = backward_bytes(problem, columns, kept)
    # An explicit window fixes the order of a row's additions: no other splits than its stripes.
    most = 1
    if problem.need_dinput and not limits.window:
        spare = usable(workspace_of(problem, limits)) - workspace
        most += max(spare, 0) // max(4 * n * d, 1) - (len(ranges) == 1)
    tokens, splits = _split(gpu, gpu.row.token_configs, d, n, widest, most)
    if splits > 1:
        workspace += 4 * n * d * (splits - (len(ranges) > 1))
    # Thousands of stripes have at most three widths.
    grids = {
        width: {
            "logits": gemm.plan(gpu, tokens, width, n, d),
            "dhidden": gemm.plan(gpu, tokens, d, n, width, splits),
            "dweight": gemm.plan(gpu, gradients, width, d, n),
        }
        for width in {width for _, width in ranges}
    }
    return BackwardPlan(
        tokens=tokens,
        dweight=gradients,
        kept=kept,
        columns=columns,
        pitch=round_up(columns, 8),
        splits=splits,
        stripes=tuple(
            Stripe(
                first=first,
                columns=width,
                is_first=int(i == 0),
                is_last=int(i == len(ranges) - 1),
                **grids[width],
            )
            for i, (first, width) in enumerate(ranges)
        ),
        workspace=workspace,
    )


def _dweight_config(gpu: Gpu, n: int) -> KernelConfig:
    """The tiles of dweight's GEMM, whose depth is n: wide ones where loads and stores take longest, and ones
    whose epilogue hides where MMAs do."""
    wide, *hiding = gpu.row.gradient_configs
    return hiding[0] if hiding and n >= LEAST_HIDING else wide


def _split(
    gpu: Gpu, configs: Iterable[KernelConfig], m: int, n: int, k: int, most: int
) -> tuple[KernelConfig, int]:
    """The fastest of the configurations and of up to `most` splits of k, whose sums are added afterwards."""

    def clocks(candidate: tuple[Gemm, int]) -> tuple[int, bool, int]:
        gemm, splits = candidate
        total = gemm.clocks(m, n, k, splits) + sum_clocks(m, n, 1, splits)
        # Of equally fast ones the narrowest of those that hold all tokens, else the widest.
        several = n > gemm.columns
        return total, several, -gemm.columns if several else gemm.columns

    # With as many splits as clusters all have equally many runs: more save nothing.
    most = max(1, min(most, ceil_div(k, 1024)))
    gemms = [Gemm(gpu, config) for config in configs]
    gemm, splits = min(
        ((gemm, splits) for gemm in gemms for splits in range(1, min(most, gemm.clusters) + 1)), key=clocks
    )
    return gemm.config, splits


def _even_stripe(clocks: Callable[[int], float], left: int, most: int) -> int:
    """Columns of a stripe, at most `most`, with which `left` columns take the fewest clocks.

    The last round of a stripe's GEMMs is only partly full, so neither the widest stripes nor stripes of equal
    width are always best.
    """
    if most >= left or most <= STRIPE_MULTIPLE:
        return most
    step = max(most // 4096, 1) * LEAST_STRIPE

    def total(columns: int) -> float:
        rest = left % columns
        return left // columns * clocks(columns) + (clocks(rest) if rest else 0)

    return min(range(most, most // 2, -step), key=total)
