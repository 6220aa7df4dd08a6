"""The forward's windows and grid."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..arch import Gpu, KernelConfig
from ..arguments import GemmPlan
from .cost import Gemm, epilogue_clocks, forward_clocks, tile_clocks
from .gemm import cluster_count, is_paced
from .memory import DEFAULT_WORKSPACE, forward_bytes
from .problem import MIB, NO_LIMITS, Limits, ceil_div

MAX_TILES_PER_WINDOW = 64
PARTIAL_BYTES = 64 * MIB
"""The most bytes of partials in a plan; more would save no plan more than 2% of its rounds."""
COMBINE_ROWS = 8
"""Rows that a block of the combine kernel processes."""


@dataclass(frozen=True)
class ForwardPlan:
    """One forward call.

    sweep: the GEMM's grid, whose windows are those of the vocabulary. rounds: tiles that the busiest cluster
    computes, one after another; ideal_rounds: the average of all clusters.
    """

    config: KernelConfig
    n: int
    d: int
    vocab: int
    sweep: GemmPlan
    rounds: int
    ideal_rounds: float

    @property
    def window(self) -> int:
        """Classes of a window."""
        return self.sweep.tiles_per_window * self.config.cluster_rows

    @property
    def workspace_floats(self) -> int:
        """fp32 numbers: 2 counters, partials, target logits, and two per block of the combine kernel."""
        partials = self.sweep.windows * self.config.partials_per_window
        return 2 + self.n * (2 * partials + 1) + 2 * ceil_div(self.n, COMBINE_ROWS)


@functools.lru_cache(maxsize=4096)
def plan(
    gpu: Gpu, n: int, d: int, vocab: int, limits: Limits = NO_LIMITS, config: KernelConfig | None = None
) -> ForwardPlan:
    """Plan a forward of (n, d) x (vocab, d).

    limits.window: classes of a window, rounded up to whole tiles and to what limits.workspace holds the
    partials of; 0: chosen so that the clusters finish together, with at most PARTIAL_BYTES of partials.
    limits.workspace: bytes that may be allocated, at least `memory.forward_bytes`; 0: none given. config:
    the kernel's configuration; None: chosen.
    Raises ValueError if there are fewer SMs than one cluster needs.
    """
    config = config or choose_config(gpu, n, d, vocab)
    clusters = cluster_count(config, gpu.sms)
    tiles = ceil_div(vocab, config.cluster_rows)
    columns = ceil_div(n, config.cluster_columns)
    # Shorter windows take fewer rounds, but write more partials.
    spare = (limits.workspace or DEFAULT_WORKSPACE) - forward_bytes(n) // 2
    if not limits.window:
        spare = min(PARTIAL_BYTES, spare)
    shortest = ceil_div(tiles, max(spare // max(8 * n * config.partials_per_window, 1), 1))
    if limits.window and not limits.workspace:
        # Nothing that orders a row's additions may depend on n.
        shortest = 1
    if limits.window:
        tiles_per_window = min(max(ceil_div(limits.window, config.cluster_rows), shortest), tiles)
    else:
        longest = min(max(MAX_TILES_PER_WINDOW, 2 * shortest), tiles)
        gemm = Gemm(gpu, config)
        tiles_per_window = min(
            range(shortest, longest + 1), key=lambda tiles: forward_clocks(gemm, n, d, vocab, tiles)
        )
    windows, rounds = _rounds(tiles, columns, clusters, tiles_per_window)
    return ForwardPlan(
        config=config,
        n=n,
        d=d,
        vocab=vocab,
        sweep=GemmPlan(
            windows=windows,
            tiles_per_window=tiles_per_window,
            splits=1,
            group=max(1, min(columns, gpu.row.panel // (2 * d * config.cluster_columns))),
            clusters=max(1, min(clusters, columns * windows)),
            paced=int(is_paced(gpu, config, vocab, n, d)),
        ),
        rounds=rounds,
        ideal_rounds=columns * tiles / clusters,
    )


def choose_config(gpu: Gpu, n: int, d: int, vocab: int) -> KernelConfig:
    """The tiles with which a GEMM of logits takes the fewest clocks. Of equally fast ones the widest, or the
    narrowest of those that hold all tokens."""

    def cost(config: KernelConfig) -> tuple[float, int]:
        columns = ceil_div(n, config.cluster_columns)
        clocks = tile_clocks(config, d, n * d * vocab)
        if config.turns > 1:
            # Two warpgroups in turn: a tile's MMAs and its epilogue take at least two tiles' time.
            clocks = max(clocks, (clocks + epilogue_clocks(config)) / 2)
        return columns * clocks, config.tile_n if columns == 1 else -config.tile_n

    return min(gpu.row.token_configs, key=cost)


def _rounds(tiles: int, columns: int, clusters: int, tiles_per_window: int) -> tuple[int, int]:
    """(windows, tiles that the busiest cluster computes)."""
    windows = ceil_div(tiles, tiles_per_window)
    return windows, ceil_div(columns * windows, clusters) * tiles_per_window
