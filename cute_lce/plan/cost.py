"""The cost model: what a plan is predicted to take. Integers and floats only.

Plans are compared in clocks of an SM, whole ones, so that a sum is the same in every order. `*_seconds`
convert them at the rate of a GPU whose tensor cores are busy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..arch import Gpu, KernelConfig
from .gemm import cluster_count
from .problem import Problem, ceil_div

if TYPE_CHECKING:
    from .backward import BackwardPlan
    from .forward import ForwardPlan

# Estimates for an H100, used for every architecture unless they are shares of its data sheet.
CLOCK_SHARE = 0.75
"""Of the data sheet's clock: what a power-limited GPU sustains under GEMMs."""
MEMORY_SHARE = 0.85
"""Of the data sheet's DRAM rate: what a kernel reaches."""
SUSTAINED = 8 * 10**11
"""Multiply-adds of a GEMM from which the clock of tensor cores falls (H200: from 1.8 to 1.3 GHz, after some
2 ms) but not that of L2, which then serves narrower tiles."""
SUSTAINED_L2 = 1.22
"""By how much more, in an SM's clocks: measured with tiles of 128 and 176 columns."""
EPILOGUE_CLOCKS, EPILOGUE_CLOCKS_SCARCE = 62, 84
"""Clocks of a tile's epilogue for each of its columns, on an H100; the second where more than
SCARCE_REGISTERS of a thread hold accumulators, so that few are left to hide latencies with."""
SCARCE_REGISTERS = 176
PARTIAL_CLOCKS = 48
"""What the combine kernel takes for a partial of up to 8192 rows: measured on an H100."""
LAUNCH_CLOCKS = 6000
"""Of a kernel: its start, its first loads and its last epilogue."""
SUMMED_PER_CLOCK = 160
"""Elements of the fp32 sum of dinput that a stripe reads and writes in a clock: 8 bytes each at half of
DRAM's rate."""
SUM_BYTES_PER_CLOCK = 2000
"""Bytes of the partial sums of splits that a GPU writes or reads in a clock: DRAM's rate, since others use
L2."""


def clock(gpu: Gpu) -> float:
    """Clocks a second of an SM whose tensor cores are busy."""
    sheet = gpu.row.data_sheet
    return CLOCK_SHARE * sheet.flops / (sheet.sms * gpu.row.dense_flops_per_clock)


def memory_rate(gpu: Gpu) -> float:
    """Bytes of DRAM that a GPU reads or writes in a clock."""
    return MEMORY_SHARE * gpu.row.data_sheet.memory / clock(gpu)


def tile_clocks(config: KernelConfig, k: int, macs: int = 0) -> float:
    """Clocks of a CTA's tile of depth k: of its MMAs or, where tiles are narrow, of its loads from L2.

    macs: multiply-adds of the whole GEMM.
    """
    row = config.row
    mma = 2 * config.tile_m * config.tile_n / config.pair / row.dense_flops_per_clock
    loaded = 2 * (config.tile_m // config.pair + config.tile_n // config.cluster_m)
    rate = row.l2_bytes_per_clock * (SUSTAINED_L2 if macs >= SUSTAINED else 1)
    return k * max(mma, loaded / rate)


def epilogue_clocks(config: KernelConfig) -> int:
    """Clocks of a tile's epilogue."""
    scarce = config.accumulator_registers > SCARCE_REGISTERS
    return config.tile_n * (EPILOGUE_CLOCKS_SCARCE if scarce else EPILOGUE_CLOCKS)


class Gemm:
    """The GEMMs of one configuration on one GPU: (m, k) x (n, k). Built once for all that are compared."""

    def __init__(self, gpu: Gpu, config: KernelConfig):
        self.config = config
        self.rows, self.columns = config.cluster_rows, config.cluster_columns
        self.clusters = cluster_count(config, gpu.sms)
        self._tile = tile_clocks(config, 1)
        self._sustained_tile = tile_clocks(config, 1, SUSTAINED)
        self._memory_rate = memory_rate(gpu)

    def clocks(self, m: int, n: int, k: int, splits: int = 1, written: int = 2) -> int:
        """Clocks of a GEMM on the busiest cluster, without its launch.

        A tile takes its MMAs' time, its loads' from L2, or its share of DRAM's with as much of the rate as
        each of all clusters has, whichever is the longest.
        splits: of k. written: bytes of an element of the product that go to memory.
        """
        runs = ceil_div(m, self.rows) * ceil_div(n, self.columns) * splits
        rounds = ceil_div(runs, self.clusters)
        tile = self._sustained_tile if m * n * k >= SUSTAINED else self._tile
        memory = (2 * k * (m + n) + written * m * n) / self._memory_rate
        return int(rounds * max(ceil_div(k, splits) * tile, memory * self.clusters / max(runs, 1)))


def forward_clocks(gemm: Gemm, n: int, d: int, vocab: int, tiles_per_window: int) -> int:
    """Clocks of a forward whose windows are of `tiles_per_window` tiles."""
    tiles, columns = ceil_div(vocab, gemm.rows), ceil_div(n, gemm.columns)
    windows = ceil_div(tiles, tiles_per_window)
    rounds = ceil_div(columns * windows, gemm.clusters) * tiles_per_window
    partials = windows * gemm.config.partials_per_window * ceil_div(n, 8192)
    tile = tile_clocks(gemm.config, d)
    return 2 * LAUNCH_CLOCKS + int(rounds * tile) + PARTIAL_CLOCKS * partials


def sum_clocks(n: int, d: int, stripes: int, splits: int) -> int:
    """Clocks of the fp32 sums of dinput: of every stripe's pass over them, and of adding up the splits."""
    passes = (stripes - 1) * splits * n * d // SUMMED_PER_CLOCK
    return passes + (8 * splits * n * d // SUM_BYTES_PER_CLOCK if splits > 1 else 0)


def forward_seconds(gpu: Gpu, problem: Problem, plan: ForwardPlan) -> float:
    """Predicted seconds of a forward."""
    gemm = Gemm(gpu, plan.config)
    return forward_clocks(gemm, plan.n, plan.d, plan.vocab, plan.sweep.tiles_per_window) / clock(gpu)


def backward_seconds(gpu: Gpu, problem: Problem, plan: BackwardPlan) -> float:
    """Predicted seconds of a backward, whatever its forward kept."""
    return backward_clocks(gpu, problem, plan) / clock(gpu)


def backward_clocks(gpu: Gpu, problem: Problem, plan: BackwardPlan) -> int:
    """Clocks of a backward."""
    n, d = problem.n, problem.d
    tokens, dweight = Gemm(gpu, plan.tokens), Gemm(gpu, plan.dweight)
    total = sum(
        stripe_clocks(tokens, dweight, problem, stripe.columns, plan.splits, plan.kept > 0 and i == 0)
        for i, stripe in enumerate(plan.stripes)
    )
    return total + (sum_clocks(n, d, len(plan.stripes), plan.splits) if problem.need_dinput else 0)


def stripe_clocks(
    tokens: Gemm, dweight: Gemm, problem: Problem, columns: int, splits: int, is_kept: bool = False
) -> int:
    """Clocks of a stripe: its logits' GEMM unless it was kept, and those of the gradients."""
    n, d = problem.n, problem.d
    total = LAUNCH_CLOCKS + (0 if is_kept else tokens.clocks(columns, n, d))
    if problem.need_dinput:
        total += LAUNCH_CLOCKS + tokens.clocks(d, n, columns, splits)
    if problem.need_dweight:
        total += LAUNCH_CLOCKS + dweight.clocks(columns, d, n)
    return total


def floor_seconds(gpu: Gpu, problem: Problem) -> float:
    """Seconds of the GEMMs alone: of the logits, and of each gradient that is needed, which no library beats
    by much. Each takes its multiply-adds' time at the tensor cores' sustained rate, or DRAM's time for its
    operands and its product, whichever is longer."""
    n, d, vocab = problem.n, problem.d, problem.vocab
    multiplied = 2 * n * d * vocab / (gpu.sms * gpu.row.dense_flops_per_clock)
    moved = 2 * (n * d + vocab * d + n * vocab) / memory_rate(gpu)
    gemms = 1 + problem.need_dinput + problem.need_dweight
    return gemms * (LAUNCH_CLOCKS + max(multiplied, moved)) / clock(gpu)
