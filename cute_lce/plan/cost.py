"""The cost model: what a plan is predicted to take. Integers and floats only.

Plans of a call are compared in clocks of an SM, whole ones, so that a sum is the same in every order.
`*_seconds` convert them at the rate that the SMs keep up in a call of its size.

A GEMM takes its rounds, one tile after another, or its share of DRAM's rate. A tile takes its MMAs' clocks or
those of what it loads from L2 and stores, a little more where these are alike, and in a forward of what L2
misses, and clocks between tiles; its epilogue hides behind the next tile's MMAs, and where it is
longer, tile and epilogue alternate between two warpgroups.

The constants were fitted to h200_kernels.json, h200_passes.json, h100_kernels.json, h100_cool.json,
h100_passes.json, h100_dweight.json, h100_forwards.json, h200_gradients.json, h200_sums.json and
h200_wide.json of bench/results/tuning (tests/host/test_cost.py) and are used for every architecture, relative
to a GPU's data sheet, which has what differs from GPU to GPU (data_sheets.py). The first four are of kernels
whose clusters were farther apart; so are most constants of backwards. A keeping forward's epilogue is that of
h100_forwards.json.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from ..arch import Gpu, KernelConfig
from .epilogues import (
    DLOGITS,
    DWEIGHT,
    EXPONENTIALS,
    STATISTICS,
    Epilogue,
    dinput_epilogue,
)
from .gemm import cluster_count, is_high, loads_much
from .plans import BackwardConfigs, BackwardPlan, ForwardPlan
from .problem import Problem, ceil_div

CLOCK_SHARE = 0.81
"""Of the data sheet's clock: SMs in short GEMMs."""
SHORT, LONG = 2.0e10, 2.4e13
"""n d V up to which calls are short, and from which they are long; between them the clock falls with its
logarithm."""
MMA_CLOCKS = 1.077
"""Clocks of MMAs, in those of the data sheet's rate."""
EASED, EASY_BYTES = 0.98, 32
"""Of those, where an SM loads no more bytes from L2 in a clock of theirs: dinput of five shapes took 0.967 to
1.00 times as long as with 48 bytes (docs/measurements.md)."""
READ_SHARE = 0.82
"""Of the data sheet's DRAM rate, that reads reach."""
IDLE = 0.13
"""By what share of itself DRAM's time in a forward grows with the share of SMs that are idle: 20 to 35 tokens
took 1.01 to 1.07 times as long with 70 to 104 SMs of an H200 as with 126 to 132; 114 to 120 took 0.98 to
1.01, which the model does not have (bench/results/tuning/h200_windows.json)."""
START_CLOCKS = 8300
"""Of a GEMM: its first loads and its last epilogue."""
LAUNCH_CLOCKS = 9400
"""Of every kernel of a call but the first."""
LEAST_GROUP = 2
"""Columns of tiles that share a forward's window even if they do not fit L2: one would share it with none."""
MANY_GROUPS = 5
"""With more than so many a last group may be of any size (bench/results/tuning/h200_tries.json)."""
SCATTERED, SCATTERED_GROUPS, SCATTERED_SHARE = 1.5, 2, 0.75
"""Times a forward's tiles take where more columns than those of so many groups, or than this share of L2
holds (a guess), are computed at once. Of h200_kernels.json's forwards, those with 66 columns of 192 tokens
at once, 182 MB, took 1.53 times the prediction without this factor, those with up to 36 MB 0.96 to 1.05."""
SPREAD = 1.03
"""The same where more than a group is, but for tiles of 128 classes side by side, whose groups are small: an
H200's 17 columns of 192 tokens at once instead of 11 took 1.04 times as long at (25047, 5120, 131072), and 22
of 208 instead of 6 1.03 times at (31709, 4096, 128256)."""
PARTIAL_CLOCKS, PARTIAL_SHARE = 18, 1.4
"""What the combine kernel takes for a partial of up to 8192 rows. Partials, many of which stay in L2, are
written and read at PARTIAL_SHARE times the rate at which DRAM is read."""
SUMMED_PER_CLOCK = 160
"""Elements of the fp32 sum of dinput that a stripe reads and writes in a clock: 8 bytes each at half of
DRAM's rate. An H100's estimate."""
SUMS_SHARE = 0.7
"""Of the rate at which DRAM is read, that of the short kernel which adds up the sums of splits."""
TOGETHER = 40
"""The power in which a tile's clocks of MMAs and of L2 are added. Where both are nearly equal, each waits for
the other now and then, up to 2% of them."""
STREAMED = 12
"""The same of a GEMM's tiles and DRAM, up to 6%."""


def _longer(one: float, other: float, power: int = TOGETHER) -> float:
    """Clocks of what takes these clocks alone, both at once."""
    most = max(one, other)
    return most * (1 + (min(one, other) / most) ** power) ** (1 / power)


@functools.lru_cache(maxsize=1024)
def grouped(columns: int, most: int, clusters: int) -> int:
    """Columns of a group: all, if these are at most `most`. Else, from half of that on, the largest divisor
    of the clusters, which then are at the same rows of the weight all the time, if there are more groups
    than MANY_GROUPS, or what is left over for the last is none or at least half of one; and without such a
    divisor, groups are equal."""
    if columns <= most:
        return max(1, columns)
    for each in range(most, max(1, (most - 1) // 2), -1):
        left = columns % each
        if clusters % each == 0 and (not left or 2 * left >= each or columns > MANY_GROUPS * each):
            return each
    return ceil_div(columns, ceil_div(columns, most))


def scattering(columns: int, windows: int, tiles: int, clusters: int, free: int, most: int) -> float:
    """Times a forward's tiles take longer because clusters compute more than `free` columns at once, or more
    than `most`, and read each column's tokens again for every tile of a window. columns, tiles: of the call;
    windows: of a column."""
    computed = min(columns, -(-clusters // windows))
    if computed <= free or windows >= tiles:
        return 1.0
    return SPREAD if computed <= most else SCATTERED


RESUMED_CLOCKS = 2500
"""The most clocks that MMAs lose behind an epilogue that does not hide, while the ring fills again: k tiles
that it holds lose none."""
FEW_TOKENS, SOME_TOKENS, MANY_TOKENS = 512, 900, 2400
"""Of dlinear_weight's tiles in turns, in clusters of two rows of tiles: up to FEW_TOKENS they save nothing of
L2's clocks, between the other two DataSheet.few, and beyond less and less. An H100's tiles of 128 x 128 took
0.82 to 0.95 of what is predicted without it with 800 to 2500 tokens, 0.95 with 3900 and 1.00 with 8192."""
SOME_FEATURES = 2048
"""The fewest features with which they save that."""
FEW_FEATURES, NARROW = 1024, 0.1
"""The share by which they take more of L2's clocks with up to FEW_FEATURES features, in GEMMs of several
rounds; it falls to 0 at 1.5 times as many, a guess. With 768 and 1024 an H100's took 1.04 to 1.12 of what is
predicted without it; an H200's took 1.06 to 1.08, and others there 0.91 to 1.00."""
DELAYED_TOKENS = 1024
"""Tokens below which dlinear_weight's clusters with tiles of 128 x 128, which pace (gemm.loads_much) but in
stripes that fit L2, wait for one another: DataSheet.delay clocks a tile at 0 tokens, falling linearly."""
WARM, LOADED, HEATING_TOKENS = 0.6, 42, 4000
"""`heat` from which on DataSheet.load_heat counts in full, below in proportion; bytes that an SM loads from
L2 in a clock of MMAs with which it counts nothing (tuning/h200_wide.json); and the fewest tokens with which
it counts: of 450 to 1600, tiles that load less took up to 2% longer in turn with cuBLAS."""


def heat(macs: int) -> float:
    """0 of a short call, 1 of a long one. macs: n d V."""
    share = (math.log(max(macs, 1)) - math.log(SHORT)) / (math.log(LONG) - math.log(SHORT))
    return min(max(share, 0.0), 1.0)


ALONE = "l2_bytes_per_clock", "alone"
"""The DataSheet's fields for single tiles: of a backward's GEMMs, and of a forward's."""
BESIDE = "beside", "beside_keeping", "beside_dlogits", "beside_sliced"


class Rates:
    """What a GPU keeps up in calls of one size. clock: of SMs, in Hz. read, write: bytes of DRAM a clock; l2:
    bytes that an SM loads from L2 and stores in a clock, by the sheet's fields.

    macs: n d V of the call, whose GEMMs follow one another. cool: below the power limit.
    """

    def __init__(self, gpu: Gpu, macs: int, cool: bool = False):
        row, sheet = gpu.row, gpu.sheet
        short = CLOCK_SHARE * sheet.flops / (sheet.sms * row.dense_flops_per_clock)
        relative = sheet.boost / short if cool else 1 - (1 - sheet.sustained) * heat(macs)
        self.clock = relative * short
        self.read = READ_SHARE * sheet.memory / self.clock
        self.write = sheet.write_share * sheet.memory / self.clock
        self.l2 = {name: getattr(sheet, name) / relative for name in (*ALONE, *BESIDE)}

    def dlogits(self, n: int, columns: int) -> int:
        """Clocks in which so many columns of kept logits become dlogits."""
        return int(2 * n * columns * (1 / self.read + 1 / self.write))


class Gemm:
    """The GEMMs of one configuration in calls of one size: (m, k) x (n, k). Built once for all that are
    compared, by the thousand."""

    def __init__(self, gpu: Gpu, config: KernelConfig, macs: int, cool: bool = False):
        """macs: n d V of the call. cool: as in Rates."""
        self.config, self.partials = config, config.partials_per_window
        self.rows, self.columns = config.cluster_rows, config.cluster_columns
        self.clusters, self.rates = cluster_count(config, gpu.sms), Rates(gpu, macs, cool)
        own_m, own_n = config.tile_m // config.pair, config.tile_n
        multiplied = 2 * own_m * own_n / config.row.dense_flops_per_clock
        loaded = 2 * (own_m // config.cluster_n + own_n // config.cluster_m)
        self._mma = multiplied * MMA_CLOCKS * (EASED if loaded <= EASY_BYTES * multiplied else 1.0)
        # Whether tiles are side by side in small groups, which get more from L2.
        self._beside = config.cluster_n > 1 and not is_high(config)
        self._loaded, self._stored = (
            {name: moved / self.rates.l2[name] for name in (BESIDE if self._beside else ALONE)}
            for moved in (loaded, own_m * own_n)
        )
        sheet, beside = gpu.sheet, self._beside
        self._panel = sheet.panel_beside if beside else sheet.panel
        self._panel_of_all = sheet.panel_beside if beside else sheet.panel_of_all
        self._again, self._held = sheet.again, int(SCATTERED_SHARE * sheet.l2)
        self._between_tiles, self._waits = sheet.between, sheet.waits
        # Of what a k tile loads, the weight's part.
        self._missed = gpu.sheet.missed * 2 * (own_m // config.cluster_n) / loaded
        # Whether epilogues do not hide: tensor memory holds two tiles, registers one.
        self._exposes = config.turns == 1 and not config.row.tmem_columns
        self._in_turns_of_rows = config.turns > 1 and config.cluster_m > 1
        self._few = sheet.few if self._in_turns_of_rows else 0.0
        self._delay = sheet.delay if config.turns > 1 and loads_much(config) else 0.0
        # Of its MMAs' clocks, what loads add in a forward that keeps nothing.
        self._load_heat = sheet.load_heat * min(heat(macs) / WARM, 1.0) * (loaded / multiplied - LOADED)
        self._tiles: dict[tuple[int, Epilogue, int, float, bool], float] = {}

    def clocks(self, m: int, n: int, k: int, epilogue: Epilogue, splits: int = 1) -> int:
        """Clocks of a GEMM on the busiest cluster, without its launch. splits: of k."""
        tiles = -(-m // self.rows) * -(-n // self.columns) * splits
        rounds, depth = -(-tiles // self.clusters), -(-k // splits)
        computed = rounds * self.tile(depth, epilogue, share=self._share(n, depth, epilogue, rounds))
        return START_CLOCKS + int(_longer(computed, self._moved(m, n, k, epilogue.stored), STREAMED))

    def bound(self, m: int, n: int, k: int, epilogue: Epilogue, splits: int = 1) -> str:
        """What a GEMM's time is that of, and how full its rounds are."""
        tiles = -(-m // self.rows) * -(-n // self.columns) * splits
        rounds = -(-tiles // self.clusters)
        depth = -(-k // splits)
        share = self._share(n, depth, epilogue, rounds)
        tile, depth = self.tile(depth, epilogue, share=share), self._depth(depth)
        mma, l2 = depth * self._mma, self._l2(depth, epilogue) * share
        bound = "MMAs" if mma >= l2 else "L2"
        if tile > _longer(mma, l2) + self._between(depth, epilogue) and not self._exposes:
            bound = "epilogues"
        if self._moved(m, n, k, epilogue.stored) > rounds * tile:
            bound = "DRAM"
        return f"{bound}; {tiles} tiles fill {tiles / (rounds * self.clusters):.0%} of {rounds} rounds"

    def least(self, macs: int) -> float:
        """Clocks that no GEMM of as many multiply-adds, or part of one, is below."""
        per_tile = self.rows * self.columns * self.clusters
        loaded = min(self._loaded.values()) * (1 - self._few)
        return macs * max(self._mma * min(1 + self._load_heat, 1.0), loaded) / per_tile

    def tile(
        self, depth: int, epilogue: Epilogue, sharing: int = 0, share: float = 1.0, *, heats: bool = False
    ) -> float:
        """Clocks between a cluster's tiles of this depth. sharing: of a forward's, columns of tiles that read
        a row of the weight before it leaves L2; 0: L2 has all. share: of L2's clocks. heats: by load_heat."""
        key = depth, epilogue, sharing, share, heats
        found = self._tiles.get(key)
        if found is None:
            found = self._tiles[key] = self._tile(*key)
        return found

    def _share(self, n: int, depth: int, epilogue: Epilogue, rounds: int) -> float:
        """What dlinear_weight's tiles take of L2's clocks: less with few tokens, more with few features. n:
        features; depth: tokens."""
        if not self._in_turns_of_rows or epilogue is not DWEIGHT:
            return 1.0
        if n < SOME_FEATURES:
            narrow = min(max(3 - 2 * n / FEW_FEATURES, 0.0), 1.0) if rounds > 1 else 0.0
            return 1 + NARROW * narrow
        rises = max(depth - FEW_TOKENS, 0) / (SOME_TOKENS - FEW_TOKENS)
        return 1 - self._few * min(rises, (MANY_TOKENS / depth) ** 2, 1.0)

    def of_forward(self, d: int, epilogue: Epilogue, columns: int) -> float:
        """Clocks between a forward's tiles. columns: of tiles."""
        heats = epilogue is STATISTICS and columns * self.columns >= HEATING_TOKENS
        return self.tile(d, epilogue, self.group(d, columns), heats=heats)

    def _tile(self, depth: int, epilogue: Epilogue, sharing: int, share: float, heats: bool) -> float:
        config, depth = self.config, self._depth(depth)
        l2 = self._l2(depth, epilogue) * share
        if sharing:
            l2 += depth * self._loaded[self._rate_of(epilogue)] * self._missed / sharing
        tile = _longer(depth * self._mma * (1 + self._load_heat * heats), l2)
        scarce = config.accumulator_registers > epilogue.registers
        # In turns: for each logit of a thread, one a column in tiles of 128 rows.
        own = config.accumulator_registers if config.turns > 1 else config.tile_n
        own *= epilogue.scarce if scarce else epilogue.clocks
        tile += self._between(depth, epilogue)
        if config.turns > 1:
            return max(tile, (tile + own) / 2)
        return tile + self._exposed(depth, epilogue) if self._exposes else max(tile, own)

    def _between(self, depth: int, epilogue: Epilogue) -> float:
        """Clocks of a tile in turns of a forward, or of dlinear_weight, in which no MMA runs."""
        if epilogue is DWEIGHT:
            return self._delay * max(1 - depth / DELAYED_TOKENS, 0.0)
        if not epilogue.of_forward or self.config.turns == 1:
            return 0.0
        waits = 0.0 if epilogue.stored or self.config.cluster_n == 1 else self._waits
        return self._between_tiles + waits

    def _l2(self, depth: int, epilogue: Epilogue) -> float:
        """Clocks in which L2 moves what a tile loads and stores. depth: whole k tiles."""
        name = self._rate_of(epilogue)
        return depth * self._loaded[name] + epilogue.stored * self._stored[name]

    def _rate_of(self, epilogue: Epilogue) -> str:
        return epilogue.beside if self._beside else ALONE[epilogue.of_forward]

    def _exposed(self, depth: int, epilogue: Epilogue) -> float:
        """Clocks of a tile's epilogue in which no MMA runs. depth: of the tile, whole k tiles."""
        if not self._exposes:
            return 0.0
        held = (self.config.stages - 1) * self.config.tile_k
        resumed = min(max(depth - held, 0) * self._mma, RESUMED_CLOCKS)
        exposed = epilogue.exposed if self.config.tile_m == 128 else epilogue.exposed_high
        return self.config.tile_n * exposed + resumed

    def group(self, d: int, columns: int) -> int:
        """Of a forward's columns of tiles those of a group."""
        return grouped(columns, self._fitting(d, columns), self.clusters)

    def _fitting(self, d: int, columns: int) -> int:
        """Of a forward's columns of tiles those whose tokens stay in L2 while the vocabulary streams past, at
        least LEAST_GROUP."""
        if 2 * d * self.columns * columns <= self._panel_of_all:
            return max(1, columns)
        return max(LEAST_GROUP, self._panel // (2 * d * self.columns))

    def at_once(self, d: int, columns: int) -> tuple[int, int]:
        """Columns of a forward's tiles that may be computed at once: those that cost no more than one group,
        and the most: SCATTERED_GROUPS groups, or what SCATTERED_SHARE of L2 holds. If there are fewer windows
        than clusters for each column of a group, other clusters are in the next groups already."""
        held = self._held // (2 * d * self.columns)
        group = self.group(d, columns)
        most = max(group, min(SCATTERED_GROUPS * group, held))
        return most if self._beside else group, most

    def scattering(self, d: int, columns: int, windows: int, tiles: int) -> float:
        """The function's, of a forward with so many windows."""
        return scattering(columns, windows, tiles, self.clusters, *self.at_once(d, columns))

    def forward(self, rounds: int, n: int, d: int, vocab: int, partials: int, kept: int) -> int:
        """Clocks of a forward. rounds: of tiles. partials: of a token. kept: columns that it keeps."""
        combined = LAUNCH_CLOCKS + PARTIAL_CLOCKS * partials * ceil_div(n, 8192)
        combined += int(16 * n * partials / (PARTIAL_SHARE * self.rates.read))
        if kept:
            # The references, which read a row of each operand for every token, and the completion.
            combined += 2 * LAUNCH_CLOCKS + int(4 * n * d / self.rates.read)
        share = kept / vocab
        columns, windows, tiles = -(-n // self.columns), partials // self.partials, -(-vocab // self.rows)
        tile = self.of_forward(d, STATISTICS, columns) * (1 - share)
        tile += self.of_forward(d, EXPONENTIALS, columns) * share
        tile *= self.scattering(d, columns, windows, tiles)
        idle = 1 - columns * tiles / (self.clusters * rounds)
        moved = 2 * (n + vocab) * d / self.rates.read * (1 + IDLE * idle) + 2 * n * kept / self.rates.write
        computed = _longer(rounds * tile, moved, STREAMED) + self.read_again(d, vocab, columns)
        return START_CLOCKS + combined + int(computed)

    def read_again(self, d: int, vocab: int, columns: int) -> float:
        """Clocks that a forward's groups of columns cost beside the first, each of which reads the weight."""
        return self._again * (-(-columns // self.group(d, columns)) - 1) * 2 * vocab * d / self.rates.read

    def sums(self, n: int, d: int, stripes: int, splits: int) -> int:
        """Clocks of dinput's fp32 sums: of every stripe's pass over them, and of adding up the splits, which
        are read from DRAM, and written while MMAs wait if epilogues do not hide."""
        passes = (stripes - 1) * splits * n * d // SUMMED_PER_CLOCK
        if splits == 1:
            return passes
        summed = 4 * splits * n * d
        moved = summed / (SUMS_SHARE * self.rates.read)
        if self._exposes:
            moved += summed / self.rates.write
        return passes + LAUNCH_CLOCKS + int(moved)

    def _depth(self, k: int) -> int:
        """A k rounded up to whole k tiles."""
        return -(-k // self.config.tile_k) * self.config.tile_k

    def _moved(self, m: int, n: int, k: int, stored: int) -> float:
        """Clocks in which DRAM moves operands and product."""
        return 2 * k * (m + n) / self.rates.read + stored * m * n / self.rates.write


gemm_of = functools.lru_cache(maxsize=1024)(Gemm)
"""A Gemm, built once."""


def split_clocks(gemm: Gemm, m: int, n: int, k: int, splits: int) -> int:
    """Clocks of an (m, n) GEMM of dinput in `splits` of k, which are then added up."""
    return gemm.clocks(m, n, k, dinput_epilogue(splits), splits) + gemm.sums(n, m, 1, splits)


def forward_seconds(gpu: Gpu, problem: Problem, plan: ForwardPlan) -> float:
    """Predicted seconds of a forward."""
    n, d, vocab = problem.n, problem.d, problem.vocab
    gemm = gemm_of(gpu, plan.config, n * d * vocab)
    clocks = gemm.forward(plan.rounds, n, d, vocab, plan.gemm.windows * gemm.partials, plan.kept)
    return clocks / gemm.rates.clock


def backward_seconds(gpu: Gpu, problem: Problem, plan: BackwardPlan) -> float:
    """Predicted seconds of a backward, whatever its forward kept."""
    macs = problem.n * problem.d * problem.vocab
    gemms = Gemms(*(gemm_of(gpu, config, macs) for config in plan.configs))
    total = sum(chunk_clocks(gemms, problem, chunk.tokens, plan.splits) for chunk in plan.chunks)
    if plan.chunks:
        problem = problem._replace(need_dinput=False)
    total += sum(
        stripe_clocks(gemms, problem, stripe.columns, plan.splits, stripe.first < plan.kept)
        for stripe in plan.stripes
    )
    if problem.need_dinput:
        total += gemms.dhidden.sums(problem.n, problem.d, len(plan.stripes), plan.splits)
    return total / gemms.tokens.rates.clock


class Gemms(NamedTuple):
    """A backward's: of the logits, and of the gradients."""

    tokens: Gemm
    dhidden: Gemm
    dweight: Gemm

    @property
    def configs(self) -> BackwardConfigs:
        return self.tokens.config, self.dhidden.config, self.dweight.config


def stripe_clocks(gemms: Gemms, problem: Problem, columns: int, splits: int, is_kept: bool = False) -> int:
    """Clocks of a stripe: its logits' GEMM, or the factors and scaled rows of one that was kept, or its
    dlogits from kept logits, and those of the gradients."""
    n, d, total = problem.n, problem.d, LAUNCH_CLOCKS
    if not is_kept:
        total += gemms.tokens.clocks(columns, n, d, DLOGITS)
    elif problem.keeps_logits:
        total += gemms.tokens.rates.dlogits(n, columns)
    elif problem.need_dweight:
        total += int(4 * n * d / gemms.tokens.rates.read)
    if problem.need_dinput:
        total += LAUNCH_CLOCKS + gemms.dhidden.clocks(d, n, columns, dinput_epilogue(splits), splits)
    if problem.need_dweight:
        total += LAUNCH_CLOCKS + gemms.dweight.clocks(columns, d, n, DWEIGHT)
    return total


def chunk_clocks(gemms: Gemms, problem: Problem, chunk: int, splits: int) -> int:
    """Clocks of dinput of a chunk of tokens, with the GEMM of their logits."""
    d, vocab = problem.d, problem.vocab
    logits = gemms.tokens.clocks(vocab, chunk, d, DLOGITS)
    return 2 * LAUNCH_CLOCKS + logits + split_clocks(gemms.dhidden, d, chunk, vocab, splits)


def floor_clocks(gpu: Gpu, problem: Problem) -> float:
    """Clocks of the GEMMs alone: of the logits, and of each gradient that is needed, which no library beats
    by much. Each takes its multiply-adds' time at the rate that tensor cores keep up, or DRAM's time for its
    operands and its product, whichever is longer."""
    n, d, vocab = problem.n, problem.d, problem.vocab
    rates = Rates(gpu, n * d * vocab)
    multiplied = MMA_CLOCKS * 2 * n * d * vocab / (gpu.sms * gpu.row.dense_flops_per_clock)
    moved = 2 * (n * d + vocab * d + n * vocab) / rates.read
    gemms = 1 + problem.need_dinput + problem.need_dweight
    return gemms * (START_CLOCKS + max(multiplied, moved))


def floor_seconds(gpu: Gpu, problem: Problem) -> float:
    """Seconds of `floor_clocks`."""
    return floor_clocks(gpu, problem) / Rates(gpu, problem.n * problem.d * problem.vocab).clock
