"""How dweight's GEMM makes room for what runs beside it: a collective, or the pass that makes dlogits.

A kernel of NCCL takes whole SMs, and CTAs of a persistent GEMM that find no SM begin when it ends, with all
of their tiles before them: the collective would cost its whole time. So the GEMM is launched twice: over as
many columns as take the collective's time on the SMs that it leaves, then over the others on all. The second
launch waits for the collective, whose next kernel might find no SM, and then those of all ranks would wait.

The pass that makes dlogits of kept logits runs in warps of the GEMM itself, a piece of the classes ahead.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..arch import Gpu, KernelConfig
from ..arguments import GemmPlan, Stripe
from . import gemm
from .cost import LAUNCH_CLOCKS, START_CLOCKS, Gemm, gemm_of
from .epilogues import DWEIGHT
from .problem import Collective, Problem, ceil_div

WIRE = 210e9
"""Bytes a second that a GPU sends in a collective: over NVLink without multicast, beside a GEMM (four H200s:
205 in the sum, 200 in the gather, their starts included)."""
WIRE_BETWEEN = 40e9
"""The same between hosts: of 400 Gbit/s a GPU, an estimate. Hosts of one NVLink domain send faster, and their
SMs are left idle for longer."""
SENT = 8.5e9
"""Of them what a CTA of NCCL's sends: two H200s with 8 CTAs 66 to 94 GB/s, four with 24 what WIRE says."""
MOVED = 60e9
"""Bytes a second that an SM reads and writes in torch's cast on few of them."""
START = 15e-6
"""Seconds in which each kernel beside the GEMM moves nothing. An estimate: too much leaves a few SMs idle,
too little all."""
SEARCHED = 8
"""Rows of tiles."""


def sum_bytes(n: int, d: int, width: int, ranks: int, *, scatters: bool) -> int:
    """Bytes that a rank sends, in a ring, for the sum of (n, d) fp32 of which it has a part, and, unless it
    scatters, for the gather of the parts in numbers of `width` bytes."""
    return (4 if scatters else 4 + width) * n * d * (ranks - 1) // ranks


def sum_seconds(
    n: int, d: int, width: int, ranks: int, sms: int, *, scatters: bool, is_local: bool = True
) -> float:
    """Predicted seconds of that beside a GEMM which leaves so many SMs: the sum of a part on each rank, its
    rounding, its gather. is_local: whether all ranks are on one host."""
    wire = WIRE if is_local else WIRE_BETWEEN
    sent = sum_bytes(n, d, width, ranks, scatters=scatters) / min(wire, sms * SENT)
    rounded = (4 + width) * n * d / ranks / (sms * MOVED)
    return sent + rounded + (2 if scatters else 3) * START


def divide(
    gpu: Gpu, config: KernelConfig, problem: Problem, stripe: Stripe, beside: Collective
) -> tuple[Stripe, Stripe | None] | None:
    """A stripe's dweight as two: beside a collective, and after it, if anything is left. None: it is
    predicted to be no faster than one. problem: of the shard; config: of dweight's GEMM."""
    n, d, columns = problem.n, problem.d, stripe.columns
    model = Gemm(gpu, config, n * d * problem.vocab)
    clusters = (gpu.sms - beside.sms) // config.cluster_size
    if not beside.seconds or not beside.sms or clusters < 1:
        return None
    tile = model.tile(n, DWEIGHT)
    across, down = ceil_div(d, config.cluster_columns), ceil_div(columns, config.cluster_rows)
    # Rounds of tiles on what the collective leaves, and the rows of tiles that these fill.
    rounds = math.ceil(beside.seconds * model.rates.clock / tile)
    least = min(max(rounds * clusters // across, 1), down)

    def clocks(first: int) -> float:
        rest = (down - first) * across
        apart = (ceil_div(first * across, clusters) + ceil_div(rest, model.clusters)) * tile
        return apart + START_CLOCKS + LAUNCH_CLOCKS if rest else apart

    # Of a few more the one that fills the rounds best.
    first = min(range(least, min(least + SEARCHED, down) + 1), key=clocks)
    if clocks(first) >= (ceil_div(down * across, model.clusters) + rounds) * tile:
        return None
    width = min(first * config.cluster_rows, columns)
    grid = gemm.plan_dweight(gpu, config, width, d, n)
    early = stripe._replace(columns=width, dweight=grid._replace(clusters=min(grid.clusters, clusters)))
    if width == columns:
        return early, None
    late = stripe._replace(
        first=stripe.first + width,
        columns=columns - width,
        dweight=gemm.plan_dweight(gpu, config, columns - width, d, n),
    )
    return early, late


MOST_PIECES = 8
"""More save little of the first one's time, and each is a launch."""
PASSED = 5.5e9
"""Bytes a second that an SM's spare warps read and write beside dweight's GEMM, making dlogits: an H100,
with the entropy's terms; with given ids 4.6."""


class Piece(NamedTuple):
    """Columns of a stripe of kept logits: the first of them, how many, and dweight's GEMM of theirs."""

    first: int
    columns: int
    dweight: GemmPlan


def pieces(gpu: Gpu, config: KernelConfig, problem: Problem, columns: int) -> tuple[Piece, ...]:
    """How to make dlogits of so many kept columns beside dweight's GEMM of `config`, those of a piece beside
    that of the piece before. Empty: that is predicted to be no faster than before it."""
    n, d = problem.n, problem.d
    if not config.has_spare_warps:
        return ()
    model = gemm_of(gpu, config, n * d * problem.vocab)
    alone = model.rates.dlogits(n, columns)
    across, down = ceil_div(d, config.cluster_columns), ceil_div(columns, config.cluster_rows)
    tile = model.tile(n, DWEIGHT)
    sms = min(model.clusters, down * across) * config.cluster_size
    beside = 4 * n * config.cluster_rows / (PASSED * sms) * model.rates.clock  # a row of tiles
    best, chosen = alone + ceil_div(down * across, model.clusters) * tile, 0
    for count in range(2, MOST_PIECES + 1):
        # Whole rounds of tiles.
        rounds = ceil_div(ceil_div(down, count) * across, model.clusters)
        rows = max(rounds * model.clusters // across, 1)
        taken, left = alone * rows / down, down
        while left > 0:
            own, left = min(rows, left), left - rows
            multiplied = ceil_div(own * across, model.clusters) * tile
            taken += START_CLOCKS + LAUNCH_CLOCKS + max(multiplied, beside * min(rows, max(left, 0)))
        if taken < best:
            best, chosen = taken, rows * config.cluster_rows
    widths = [(first, min(chosen, columns - first)) for first in range(0, columns, chosen)] if chosen else []
    return tuple(Piece(*each, gemm.plan_dweight(gpu, config, each[1], d, n)) for each in widths)
