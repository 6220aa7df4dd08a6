"""The forward's windows and grid."""

from __future__ import annotations

import functools
from bisect import bisect_right
from operator import itemgetter

from ..arch import Gpu, KernelConfig
from ..arguments import GemmPlan
from .cost import Gemm, gemm_of, scattering
from .epilogues import EXPONENTIALS, STATISTICS
from .gemm import SHORT_FEATURES, is_high, is_paced
from .memory import DEFAULT_WORKSPACE, keeping_bytes, window_bytes
from .plans import ForwardPlan
from .problem import MIB, NO_LIMITS, Limits, ceil_div, steps

WINDOW_STEPS = 64
"""Lengths of windows that are considered: every one up to as many tiles, then as many until they double."""
COMPARED = 6
"""Of the ranked tiles, those whose windows are planned before one is chosen: as good as all of them over the
shapes of tests/host/test_cost.py, and a new number of tokens is planned no slower than without windows."""
PARTIAL_BYTES = 64 * MIB
"""The most bytes of partials in a plan; more would save no plan more than 2% of its rounds."""


@functools.lru_cache(maxsize=4096)
def plan(
    gpu: Gpu,
    n: int,
    d: int,
    vocab: int,
    limits: Limits = NO_LIMITS,
    config: KernelConfig | None = None,
    kept: int = 0,
    reserved: int = 0,
) -> ForwardPlan:
    """Plan a forward of (n, d) x (vocab, d).

    limits.window: classes of a window, rounded up to whole tiles and to what limits.workspace holds the
    partials of; 0: chosen so that the clusters finish together, with at most PARTIAL_BYTES of partials.
    limits.workspace: bytes that may be allocated, at least `memory.forward_bytes`; 0: none given. config:
    the kernel's configuration; None: chosen. kept: columns that it keeps, within the same limit.
    reserved: bytes of it that a compaction takes.
    Raises ValueError if there are fewer SMs than one cluster needs.
    """
    config = config or choose_config(gpu, n, d, vocab, kept > 0, limits.window)
    gemm = gemm_of(gpu, config, n * d * vocab)
    tiles = ceil_div(vocab, config.cluster_rows)
    columns = ceil_div(n, config.cluster_columns)
    spare = spare_bytes(n, kept, limits, reserved)
    if not limits.window:
        _, tiles_per_window = fastest(choices(gemm, n, d, vocab, kept), spare)
    else:
        # Nothing that orders a row's additions may depend on n, unless a workspace is given.
        most = max(spare // max(8 * n * config.partials_per_window, 1), 1) if limits.workspace else tiles
        tiles_per_window = max(ceil_div(limits.window, config.cluster_rows), ceil_div(tiles, most))
        tiles_per_window = min(tiles_per_window, tiles)
    windows = ceil_div(tiles, tiles_per_window)
    return ForwardPlan(
        config=config,
        n=n,
        d=d,
        vocab=vocab,
        kept=kept,
        gemm=GemmPlan(
            windows=windows,
            tiles_per_window=tiles_per_window,
            splits=1,
            group=gemm.group(d, columns),
            clusters=max(1, min(gemm.clusters, columns * windows)),
            paced=int(is_paced(gpu, config, vocab, n, d, SHORT_FEATURES if kept else 0)),
        ),
        rounds=ceil_div(columns * windows, gemm.clusters) * tiles_per_window,
        ideal_rounds=columns * tiles / gemm.clusters,
    )


def spare_bytes(n: int, kept: int, limits: Limits, reserved: int) -> int:
    """Bytes that the limits leave for partials beside the rest of a forward and the columns that it keeps."""
    spare = (limits.workspace or DEFAULT_WORKSPACE) - window_bytes(n) // 2
    if limits.workspace:
        spare -= keeping_bytes(n, kept) + reserved
    return spare if limits.window else min(PARTIAL_BYTES, spare)


def choices(gemm: Gemm, n: int, d: int, vocab: int, kept: int) -> list[tuple[int, int, int]]:
    """(bytes of partials, clocks of the forward, tiles of a window) of the windows to choose from, by rising
    bytes, whatever the workspace."""
    return [
        (8 * n * partials, gemm.forward(rounds, n, d, vocab, partials, kept), length)
        for partials, rounds, length in _windows(
            gemm.clusters,
            ceil_div(vocab, gemm.rows),
            ceil_div(n, gemm.columns),
            gemm.partials,
            *gemm.at_once(d, ceil_div(n, gemm.columns)),
        )
        if 8 * n * partials <= PARTIAL_BYTES or length * gemm.rows >= vocab
    ]


def fastest(found: list[tuple[int, int, int]], spare: int) -> tuple[int, int]:
    """(clocks, tiles of a window) of the fastest of the choices whose partials take at most `spare` bytes."""
    count = max(bisect_right(found, spare, key=itemgetter(0)), 1)
    return min(choice[1:] for choice in found[:count])


@functools.lru_cache(maxsize=1024)
def _windows(
    clusters: int, tiles: int, columns: int, partials: int, free: int, most: int
) -> list[tuple[int, int, int]]:
    """(partials of a token, rounds, tiles of a window), fewest partials first: each takes fewer rounds than
    all before it that are scattered as it is. free, most: Gemm.at_once."""
    # Of equally many windows the shortest.
    shortest = {-(-tiles // length): length for length in reversed([*steps(tiles, WINDOW_STEPS)])}
    found, least = [], {}
    for windows, length in shortest.items():
        rounds = -(-columns * windows // clusters) * length
        scattered = scattering(columns, windows, tiles, clusters, free, most)
        if rounds < least.get(scattered, rounds + 1):
            found.append((windows * partials, rounds, length))
            least[scattered] = rounds
    return found


def choose_config(gpu: Gpu, n: int, d: int, vocab: int, keeps: bool, window: int) -> KernelConfig:
    """The tiles with which a forward takes the fewest clocks with its windows, of the first of `ranked`,
    whatever the workspace; one that keeps is taken to keep all columns. With windows that the caller gives,
    or tokens of one column, the first. window: as in Limits."""
    found = ranked(gpu, n, d, vocab, keeps, window)[:COMPARED]
    if window or n <= found[0].cluster_columns:
        return found[0]
    return min(found, key=lambda config: clocks(gpu, n, d, vocab, vocab if keeps else 0, config))


def clocks(gpu: Gpu, n: int, d: int, vocab: int, kept: int, config: KernelConfig) -> int:
    """Of a forward in these tiles with its fastest windows, whatever the workspace."""
    gemm = gemm_of(gpu, config, n * d * vocab)
    return fastest(choices(gemm, n, d, vocab, kept), spare_bytes(n, kept, NO_LIMITS, 0))[0]


def ranked(gpu: Gpu, n: int, d: int, vocab: int, keeps: bool, window: int) -> list[KernelConfig]:
    """The tiles of a forward, those first with which its GEMM takes the fewest clocks if no cluster is idle.
    Of equally fast ones two side by side, which read the weight once, then the widest, or the narrowest of
    those that hold all tokens. window: as in Limits."""
    epilogue = EXPONENTIALS if keeps else STATISTICS

    def cost(config: KernelConfig) -> tuple[float, int, int]:
        gemm = gemm_of(gpu, config, n * d * vocab)
        columns = ceil_div(n, gemm.columns)
        clocks = columns * gemm.of_forward(d, epilogue, columns) / gemm.rows
        tiles = ceil_div(vocab, gemm.rows)
        windows = min(tiles, max(1, PARTIAL_BYTES // max(8 * n * gemm.partials, 1)))
        clocks *= gemm.scattering(d, columns, windows, tiles)
        clocks += gemm.read_again(d, vocab, columns) * gemm.clusters / vocab
        return clocks, -config.cluster_n, config.tile_n if columns == 1 else -config.tile_n

    return sorted(configs_for(gpu, n, keeps, window), key=cost)


def configs_for(gpu: Gpu, n: int, keeps: bool, window: int) -> tuple[KernelConfig, ...]:
    """The tiles that a forward of so many tokens chooses from. window: as in Limits.

    Where one column holds all tokens, tiles of 192 rows are left out: lower ones divide the classes more
    evenly among clusters, and 256 tokens took 5% less time in them on an H100.
    """
    widths = gpu.serving((), "keep" if keeps else "forward").widths
    configs = gpu.row.configs_for(n, window, widths).forwards(keeps)
    return tuple(each for each in configs if n > each.cluster_columns or not is_high(each))
