"""What is planned: one forward, and one backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..arch import KernelConfig
from ..arguments import COMBINE_ROWS, GemmPlan, Stripe
from .problem import ceil_div


@dataclass(frozen=True)
class ForwardPlan:
    """One forward call.

    kept: columns that it keeps. gemm: the grid, whose windows are those of the vocabulary. rounds:
    tiles that the busiest cluster computes, one after another; ideal_rounds: the average of all clusters.
    """

    config: KernelConfig
    n: int
    d: int
    vocab: int
    kept: int
    gemm: GemmPlan
    rounds: int
    ideal_rounds: float

    @property
    def window(self) -> int:
        """Classes of a window."""
        return self.gemm.tiles_per_window * self.config.cluster_rows

    @property
    def workspace_floats(self) -> int:
        """fp32 numbers: 2 counters, partials, target logits, and two per block of the combine kernel."""
        partials = self.gemm.windows * self.config.partials_per_window
        return 2 + self.n * (2 * partials + 1) + 2 * ceil_div(self.n, COMBINE_ROWS)


class Chunk(NamedTuple):
    """The tokens `first` to first + tokens, whose dinput is computed from all columns, one stripe."""

    first: int
    tokens: int
    stripe: Stripe


BackwardConfigs = tuple[KernelConfig, KernelConfig, KernelConfig]
"""Of a backward's GEMMs: of the logits, of dhidden and of dweight."""


@dataclass(frozen=True)
class BackwardPlan:
    """One backward call.

    tokens: the configuration of the logits' GEMM. dhidden, dweight: of the gradients'. kept: columns that the
    forward kept, the first stripe if there are any, or stripes of their own where logits are kept.
    columns: of each recomputed stripe, or stripe of kept logits, except the last. pitch: elements of a row of
    a stripe's dlogits. splits: of dhidden's k, each with a sum of its own.
    stripes: of the vocabulary, one after another. chunks: of the tokens, where dinput has a sweep of its own
    before the stripes, which are then dweight's alone. workspace: bytes of what is kept, dlogits, sums,
    scaled rows and factors.
    """

    tokens: KernelConfig
    dhidden: KernelConfig
    dweight: KernelConfig
    kept: int
    columns: int
    pitch: int
    splits: int
    stripes: tuple[Stripe, ...]
    chunks: tuple[Chunk, ...]
    workspace: int

    @property
    def configs(self) -> BackwardConfigs:
        return self.tokens, self.dhidden, self.dweight
