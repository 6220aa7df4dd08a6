"""The cost model: what a plan is predicted to take. Integers and floats only.

Plans are compared in clocks of an SM, whole ones, so that a sum is the same in every order. `*_seconds`
convert them at the rate of a GPU whose tensor cores are busy.
"""

from __future__ import annotations

from ..arch import Gpu, KernelConfig
from .gemm import cluster_count
from .plans import BackwardPlan, ForwardPlan
from .problem import Problem, ceil_div

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
KEEPING_CLOCKS = 36000
"""What keeping takes besides its bytes: three more launches and a slower epilogue. On an H100 keeping the
columns of 2^33 multiply-adds took as long as computing their logits again."""
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

    macs: multiply-adds of the call's GEMM of logits.
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
    """The GEMMs of one configuration in calls of one size: (m, k) x (n, k). Built once for all that are
    compared, by the thousand."""

    def __init__(self, gpu: Gpu, config: KernelConfig, macs: int):
        """macs: n d V of the call, whose GEMMs follow one another: the clock falls with their total."""
        self.config, self.partials = config, config.partials_per_window
        self.rows, self.columns = config.cluster_rows, config.cluster_columns
        self.clusters = cluster_count(config, gpu.sms)
        self._depth = tile_clocks(config, 1, macs)
        self._share = self.clusters / memory_rate(gpu)

    def clocks(self, m: int, n: int, k: int, splits: int = 1) -> int:
        """Clocks of a GEMM on the busiest cluster, without its launch. splits: of k."""
        tiles = -(-m // self.rows) * -(-n // self.columns) * splits
        return int(-(-tiles // self.clusters) * self._tile(tiles, -(-k // splits), 2 * (k * (m + n) + m * n)))

    def bound(self, m: int, n: int, k: int, splits: int = 1) -> str:
        """What a GEMM's time is that of, and how full its rounds are."""
        tiles = -(-m // self.rows) * -(-n // self.columns) * splits
        rounds = -(-tiles // self.clusters)
        depth = -(-k // splits)
        row, config = self.config.row, self.config
        multiplied = 2 * config.tile_m * config.tile_n / config.pair / row.dense_flops_per_clock
        bound = "MMAs" if self._depth <= multiplied else "loads from L2"
        if self._tile(tiles, depth, 2 * (k * (m + n) + m * n)) > depth * self._depth:
            bound = "DRAM"
        return f"{bound}; {tiles} tiles fill {tiles / (rounds * self.clusters):.0%} of {rounds} rounds"

    def least(self, macs: int) -> float:
        """Clocks that no GEMM of as many multiply-adds, or part of one, is below."""
        return macs * self._depth / (self.rows * self.columns * self.clusters)

    def forward_tile(self, n: int, d: int, vocab: int, kept: int) -> float:
        """Clocks of a tile of a forward."""
        tiles = -(-vocab // self.rows) * -(-n // self.columns)
        return self._tile(tiles, d, 2 * ((n + vocab) * d + n * kept))

    def _tile(self, tiles: int, depth: int, moved: int) -> float:
        """Clocks of one of a GEMM's tiles: of its MMAs or its loads from L2, or of its share of what DRAM
        moves, if each cluster has an equal part of the rate; whichever takes longer."""
        computed, loaded = depth * self._depth, moved * self._share / max(tiles, 1)
        return computed if computed > loaded else loaded


def forward_clocks(rounds: int, tile: float, n: int, partials: int, kept: int) -> int:
    """Clocks of a forward. tile: Gemm.forward_tile. partials: of a token. kept: columns that it keeps."""
    combined = PARTIAL_CLOCKS * partials * ceil_div(n, 8192)
    return 2 * LAUNCH_CLOCKS + (KEEPING_CLOCKS if kept else 0) + combined + int(rounds * tile)


def sum_clocks(n: int, d: int, stripes: int, splits: int) -> int:
    """Clocks of the fp32 sums of dinput: of every stripe's pass over them, and of adding up the splits."""
    passes = (stripes - 1) * splits * n * d // SUMMED_PER_CLOCK
    return passes + (8 * splits * n * d // SUM_BYTES_PER_CLOCK if splits > 1 else 0)


def forward_seconds(gpu: Gpu, problem: Problem, plan: ForwardPlan) -> float:
    """Predicted seconds of a forward."""
    n, d, vocab = problem.n, problem.d, problem.vocab
    gemm = Gemm(gpu, plan.config, n * d * vocab)
    tile = gemm.forward_tile(n, d, vocab, plan.kept)
    clocks = forward_clocks(plan.rounds, tile, n, plan.gemm.windows * gemm.partials, plan.kept)
    return clocks / clock(gpu)


def backward_seconds(gpu: Gpu, problem: Problem, plan: BackwardPlan) -> float:
    """Predicted seconds of a backward, whatever its forward kept."""
    return backward_clocks(gpu, problem, plan) / clock(gpu)


def backward_clocks(gpu: Gpu, problem: Problem, plan: BackwardPlan) -> int:
    """Clocks of a backward."""
    macs = problem.n * problem.d * problem.vocab
    tokens, dweight = Gemm(gpu, plan.tokens, macs), Gemm(gpu, plan.dweight, macs)
    total = sum(chunk_clocks(tokens, problem, chunk.tokens, plan.splits) for chunk in plan.chunks)
    if plan.chunks:
        problem = problem._replace(need_dinput=False)
    total += sum(
        stripe_clocks(tokens, dweight, problem, stripe.columns, plan.splits, i == 0 < plan.kept)
        for i, stripe in enumerate(plan.stripes)
    )
    sums = sum_clocks(problem.n, problem.d, len(plan.stripes), plan.splits) if problem.need_dinput else 0
    return total + sums


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


def chunk_clocks(tokens: Gemm, problem: Problem, chunk: int, splits: int) -> int:
    """Clocks of dinput of a chunk of tokens, with the GEMM of their logits."""
    d, vocab = problem.d, problem.vocab
    gemms = tokens.clocks(vocab, chunk, d) + tokens.clocks(d, chunk, vocab, splits)
    return 2 * LAUNCH_CLOCKS + gemms + sum_clocks(chunk, d, 1, splits)


def floor_seconds(gpu: Gpu, problem: Problem) -> float:
    """Seconds of the GEMMs alone: of the logits, and of each gradient that is needed, which no library beats
    by much. Each takes its multiply-adds' time at the tensor cores' sustained rate, or DRAM's time for its
    operands and its product, whichever is longer."""
    n, d, vocab = problem.n, problem.d, problem.vocab
    multiplied = 2 * n * d * vocab / (gpu.sms * gpu.row.dense_flops_per_clock)
    moved = 2 * (n * d + vocab * d + n * vocab) / memory_rate(gpu)
    gemms = 1 + problem.need_dinput + problem.need_dweight
    return gemms * (LAUNCH_CLOCKS + max(multiplied, moved)) / clock(gpu)
