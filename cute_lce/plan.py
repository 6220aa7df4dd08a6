"""Decide first: a kernel's frozen configuration and a call's plan. Integers only: no torch, no cutlass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

KIB = 1024
ACCUMULATORS = 2
"""Tiles in tensor memory: one is filled while the other is read."""


@dataclass(frozen=True)
class KernelConfig:
    """What a GEMM kernel is compiled for. What else a compile depends on is an argument of `compiled`.

    arch: "sm_90a", "sm_100a" or "sm_103a".
    tile_m, tile_n, tile_k: rows of A, rows of B and depth that a CTA takes at once; on Blackwell a tile_m
        of 256 is taken by a pair of CTAs.
    warpgroups: consumer warpgroups of 128 threads (Hopper).
    pingpong: two consumer warpgroups take turns at whole tiles, so that the epilogue of one hides behind
        the MMAs of the other; otherwise the warpgroups share each tile, side by side along tile_m (Hopper).
    cluster_m, cluster_n: CTAs of a cluster; B is multicast along m, A along n.
    stages: slots of the ring of operand tiles in shared memory.
    pace: k tiles between two steps of a cluster's progress, by which clusters keep together; 0: they do not.
    """

    arch: str
    tile_m: int = 128
    tile_n: int = 192
    tile_k: int = 64
    warpgroups: int = 2
    pingpong: bool = True
    cluster_m: int = 2
    cluster_n: int = 1
    stages: int = 5
    pace: int = 8

    @property
    def turns(self) -> int:
        """Warpgroups (or groups of them) that take turns at a CTA's tiles."""
        return self.warpgroups if self.pingpong else 1

    @property
    def pair(self) -> int:
        """CTAs that share a tile, each with a part of its operands."""
        return 2 if is_blackwell(self.arch) and self.tile_m == 256 else 1

    @property
    def cluster_rows(self) -> int:
        """Rows of A that a cluster takes at once."""
        return self.tile_m * self.cluster_m // self.pair

    @property
    def cluster_columns(self) -> int:
        """Columns of the vocabulary that a cluster takes at once."""
        return self.tile_n * self.cluster_n

    @property
    def partials_per_window(self) -> int:
        """Partials of one row and window: one for each warpgroup and CTA that sees columns of its own."""
        return self.cluster_n * self.turns

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory: the ring of 16-bit operand tiles, its barriers, and alignment."""
        return self.stages * ((self.tile_m + self.tile_n) * self.tile_k * 2 // self.pair + 16) + KIB

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory, of which a power of two is allocated: the accumulators (Blackwell)."""
        return 1 << (ACCUMULATORS * self.tile_n - 1).bit_length() if is_blackwell(self.arch) else 0


@dataclass(frozen=True)
class Device:
    """Budgets of an architecture. clusters of 2 come in pairs of neighbouring SMs, so all SMs serve.

    panel: bytes of rows of H that stay in L2 while the vocabulary streams past: half of an H100's L2 serves
        each half of its SMs, and the windows in flight want the rest of it. Blackwell's is the same share
        of its L2.
    """

    sms: int
    shared_memory: int
    l2: int
    panel: int
    dense_flops_per_clock: int
    tmem_columns: int = 0


_HOPPER = Device(sms=132, shared_memory=227 * KIB, l2=50 << 20, panel=22 << 20, dense_flops_per_clock=4096)
_BLACKWELL = Device(
    sms=148,
    shared_memory=227 * KIB,
    l2=126 << 20,
    panel=55 << 20,
    dense_flops_per_clock=8192,
    tmem_columns=512,
)
DEVICES = {"sm_90a": _HOPPER, "sm_100a": _BLACKWELL, "sm_103a": _BLACKWELL}

MAX_TILES_PER_WINDOW = 16
# Partials that a plan allows itself; more make no plan better by much.
PARTIAL_BYTES = 64 << 20


# What a partial of up to 8192 rows costs the combine kernel; measured on an H100.
PARTIAL_NS = 32


@dataclass(frozen=True)
class Plan:
    """One forward call.

    tiles_per_window: tiles of cluster_columns that a window has; windows: windows of the vocabulary.
    group_m: rows of clusters whose rows of H share L2. clusters: clusters launched.
    paced: whether clusters keep together; where the operands fit L2 they need not.
    rounds: tiles that the busiest cluster computes, one after another; ideal_rounds: their number were it
    divisible.
    """

    config: KernelConfig
    n: int
    d: int
    vocab: int
    tiles_per_window: int
    windows: int
    group_m: int
    clusters: int
    paced: bool
    rounds: int
    ideal_rounds: float

    @property
    def window(self) -> int:
        """Columns of a window."""
        return self.tiles_per_window * self.config.cluster_columns

    @property
    def workspace_floats(self) -> int:
        """fp32 numbers: 2 counters, partials, target logits, and two a block of the combine kernel."""
        return (
            2 + self.n * (2 * self.windows * self.config.partials_per_window + 1) + 2 * ceil_div(self.n, 32)
        )


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def is_blackwell(arch: str) -> bool:
    return arch.startswith("sm_10")


def configs(arch: str) -> tuple[KernelConfig, ...]:
    """The configurations among which `forward` chooses."""
    if is_blackwell(arch):
        pair = KernelConfig(arch, tile_m=256, tile_n=256, pingpong=False, cluster_m=2, stages=7)
        return pair, replace(pair, tile_m=128, cluster_m=1, stages=4)
    return KernelConfig(arch), KernelConfig(arch, cluster_m=1)


def keep_config(arch: str) -> KernelConfig:
    """The configuration of a forward that keeps, which stores between MMAs: its epilogue hides best."""
    return configs(arch)[0]


def _clusters(config: KernelConfig, sms: int) -> int:
    """Clusters that run at once."""
    size = config.cluster_m * config.cluster_n
    if sms < size:
        raise ValueError(f"sms: got {sms}, want at least the {size} of a cluster")
    return sms // size


def _round_ns(config: KernelConfig, d: int) -> int:
    """About how long a CTA's tile takes, at 1.5 GHz."""
    cycles = 2 * config.tile_m * config.tile_n * d // DEVICES[config.arch].dense_flops_per_clock
    return cycles * 2 // 3


def _rounds(
    config: KernelConfig, n: int, vocab: int, clusters: int, tiles_per_window: int
) -> tuple[int, int]:
    """(windows, tiles that the busiest cluster computes)."""
    windows = ceil_div(ceil_div(vocab, config.cluster_columns), tiles_per_window)
    return windows, ceil_div(ceil_div(n, config.cluster_rows) * windows, clusters) * tiles_per_window


@functools.lru_cache(maxsize=4096)
def forward(
    arch: str,
    n: int,
    d: int,
    vocab: int,
    sms: int,
    window: int = 0,
    workspace: int = 0,
    config: KernelConfig | None = None,
) -> Plan:
    """Plan a forward of (n, d) x (vocab, d) on `sms` SMs.

    window: columns of a window, rounded up to whole tiles; 0: chosen so that the clusters finish together.
    workspace: bytes that may be allocated, at least `forward_bytes`; 0: PARTIAL_BYTES of partials, where it
    matters.
    config: the kernel's configuration; None: chosen.
    Raises ValueError where the SMs do not make one cluster.
    """
    if config is None:
        config = _choose_config(arch, n)
    clusters = _clusters(config, sms)
    tiles = ceil_div(vocab, config.cluster_columns)
    rows = ceil_div(n, config.cluster_rows)
    if window:
        tiles_per_window = min(ceil_div(window, config.cluster_columns), tiles)
    else:
        # The fewest rounds, but partials cost too.
        spare = min(PARTIAL_BYTES, (workspace or 2 * PARTIAL_BYTES) - forward_bytes(n) // 2)
        shortest = ceil_div(8 * n * config.partials_per_window * tiles, max(spare, 1))
        candidates = range(max(1, min(shortest, tiles)), min(max(MAX_TILES_PER_WINDOW, shortest), tiles) + 1)
        costs = {}
        for tiles_in_window in candidates:
            windows, rounds = _rounds(config, n, vocab, clusters, tiles_in_window)
            partials = windows * config.partials_per_window * ceil_div(n, 8192)
            costs[tiles_in_window] = rounds * _round_ns(config, d) + partials * PARTIAL_NS
        tiles_per_window = min(costs, key=costs.__getitem__)
    windows, rounds = _rounds(config, n, vocab, clusters, tiles_per_window)
    group_m = max(1, min(rows, DEVICES[arch].panel // (2 * d * config.cluster_rows)))
    return Plan(
        config=config,
        n=n,
        d=d,
        vocab=vocab,
        tiles_per_window=tiles_per_window,
        windows=windows,
        group_m=group_m,
        clusters=max(1, min(clusters, rows * windows)),
        paced=config.pace > 0 and 2 * d * (n + vocab) > DEVICES[arch].l2 // 2 and rows > 1,
        rounds=rounds,
        ideal_rounds=rows * tiles / clusters,
    )


def forward_bytes(n: int) -> int:
    """The least bytes of workspace and statistics that every forward gets by with: one window."""
    return 128 * n + 4 * KIB


def _choose_config(arch: str, n: int) -> KernelConfig:
    # A CTA alone asks half as much again of L2; it is for what would leave half a pair idle.
    pair, single = configs(arch)
    return single if n <= single.cluster_rows else pair


@dataclass(frozen=True)
class GemmPlan:
    """One plain GEMM: tiles along n, rows of clusters that share L2, clusters launched, whether paced."""

    windows: int
    group_m: int
    clusters: int
    paced: bool

    @property
    def ints(self) -> tuple[int, int, int, int]:
        return self.windows, self.group_m, self.clusters, int(self.paced)


@dataclass(frozen=True)
class BackwardPlan:
    """One backward call, stripe by stripe over the vocabulary.

    kept: columns that the forward kept, the first stripe if there are any. stripe: columns of every other
    stripe but the last. pitch: elements of a row of dlogits. stripes: (first column, columns, the three
    GEMMs' ints) of each.
    workspace: bytes of what is kept, dlogits, accumulator, scaled rows and factors.
    """

    logits: KernelConfig
    dhidden: KernelConfig
    dweight: KernelConfig
    kept: int
    stripe: int
    pitch: int
    stripes: tuple[tuple[int, int, tuple[int, ...]], ...]
    workspace: int


DEFAULT_WORKSPACE = 1 << 30
"""What workspace_mb=None means, in bytes, where the least needs no more."""
STRIPE_MULTIPLE = 768  # whole tiles of all three GEMMs
LEAST_STRIPE = 64
# What a stripe costs beside its GEMMs, the accumulator read and written, in columns of a logits GEMM: on an
# H100, 8 n d bytes at 2 TB/s take as long as n d times this many columns at 700 TFLOP/s.
STRIPE_COLUMNS = 1400
LEAST_UNIT = 64  # columns that share one note of how far their row was raised, at least
NOTE_BYTES = 2


def backward_configs(arch: str) -> tuple[KernelConfig, KernelConfig, KernelConfig]:
    """The configurations of the logits', dinput's and dlinear_weight's GEMM."""
    gradients = gradient_config(arch)
    return configs(arch)[0], gradients, gradients


def gradient_config(arch: str) -> KernelConfig:
    """The configuration of both gradients' GEMMs."""
    if is_blackwell(arch):
        return configs(arch)[0]
    # Operands whose rows are not along k come in slices of 64 columns, of which a multicast wants whole
    # halves; and 256 columns ask the least of shared memory.
    return KernelConfig(arch, tile_n=256, pingpong=False, stages=4)


def forward_key(
    config: KernelConfig, dtype: str = "bfloat16", target_dtype: str = "int64", keeps: bool = False
) -> tuple:
    """The key of a kernels.forward.Forward in `compiled`.

    dtype: "bfloat16" or "float16", of both operands. target_dtype: "int32" or "int64".
    """
    return "forward", config, dtype, target_dtype, keeps


def backward_key(
    logits: KernelConfig,
    dhidden: KernelConfig,
    dweight: KernelConfig,
    dtype: str = "bfloat16",
    target_dtype: str = "int64",
) -> tuple:
    """The key of a kernels.backward.Backward; the types as in `forward_key`."""
    return "backward", logits, dhidden, dweight, dtype, target_dtype


def kernels(arch: str, dtype: str, target_dtype: str) -> list[tuple]:
    """The keys of all that calls with these types may ask `compiled` for; float16 keeps nothing."""
    forwards = [(config, False) for config in configs(arch)]
    if dtype != "float16":
        forwards.append((keep_config(arch), True))
    return [
        *(forward_key(config, dtype, target_dtype, keeps) for config, keeps in forwards),
        backward_key(*backward_configs(arch), dtype, target_dtype),
    ]


def gemm(config: KernelConfig, m: int, n: int, k: int, sms: int) -> GemmPlan:
    """Plan an (m, k) x (n, k) product."""
    rows, windows = ceil_div(m, config.cluster_rows), ceil_div(n, config.cluster_columns)
    clusters = max(1, min(_clusters(config, sms), rows * windows))
    side = max(1, int((clusters * config.cluster_columns / config.cluster_rows) ** 0.5))
    paced = 2 * k * (m + n) > DEVICES[config.arch].l2 // 2 and rows > 1
    return GemmPlan(windows, min(rows, side), clusters, paced)


def usable(workspace: int) -> int:
    """What of a workspace a plan may fill.

    torch's allocator takes up to 1 MiB more for each of a few large blocks.
    """
    return workspace - min(workspace // 8, 4 * KIB * KIB)


def backward_bytes(
    n: int, d: int, V: int, columns: int, half: bool, need_dinput: bool, need_dweight: bool, kept: int = 0
) -> int:
    """Bytes that a backward allocates, or finds kept, beyond its results.

    columns: of a stripe of dlogits; 0 where everything is kept. half: whether the operands are float16, whose
    grad_scale is applied outside of dlogits. kept: columns that the forward kept.
    """
    total = 64 * n + 4 * KIB + 2 * n * (ceil_div(columns, 8) * 8)
    if need_dinput and (columns + kept < V or 0 < kept < V):
        total += 4 * n * d
    if half:
        total += 6 * n * d
    if kept:
        # The operand, a note a unit of columns, and the scaled copy of the hidden rows.
        total += (
            2 * n * (ceil_div(kept, 8) * 8)
            + NOTE_BYTES * n * ceil_div(kept, LEAST_UNIT)
            + (2 * n * d if need_dweight else 0)
        )
    return total


def stripe_columns(
    n: int,
    d: int,
    V: int,
    half: bool,
    need_dinput: bool,
    need_dweight: bool,
    kept: int,
    window: int,
    workspace: int,
) -> int:
    """Columns of a stripe that is not kept: what the workspace holds beside the rest, or as `window` says;
    not below LEAST_STRIPE, whatever it holds."""
    left = V - kept
    if window or not left:
        return min(window, left)
    workspace = usable(workspace or DEFAULT_WORKSPACE)
    if backward_bytes(n, d, V, left, half, need_dinput, need_dweight, kept) <= workspace:
        return left
    columns = (workspace - backward_bytes(n, d, V, 0, half, need_dinput, need_dweight, kept)) // (
        2 * max(n, 1)
    )
    multiple = STRIPE_MULTIPLE if columns >= STRIPE_MULTIPLE else LEAST_STRIPE
    return min(max(columns // multiple * multiple, LEAST_STRIPE), left)


def kept_columns(
    n: int, d: int, V: int, need_dinput: bool, need_dweight: bool, window: int, workspace: int
) -> int:
    """Columns that a forward keeps: all of them if the workspace holds them, else as many whole tiles as
    leave room for stripes of the rest."""
    workspace = usable(workspace or DEFAULT_WORKSPACE)
    if backward_bytes(n, d, V, 0, False, need_dinput, need_dweight, V) + forward_bytes(n) <= workspace:
        return V
    rest = backward_bytes(n, d, V, 0, False, need_dinput, need_dweight, LEAST_UNIT) + forward_bytes(n)
    # Columns that fit: two bytes a row, and a share of a note.
    fit = max((workspace - rest) * LEAST_UNIT // ((2 * LEAST_UNIT + NOTE_BYTES) * max(n, 1)), 0)
    # Against keeping nothing, whose stripes have all the room.
    recomputed = stripe_columns(n, d, V, False, need_dinput, need_dweight, 0, window, workspace)
    best, least = 0, V + ceil_div(V, recomputed) * STRIPE_COLUMNS
    # A stripe takes room from what is kept, but many of them take passes over the accumulator.
    for tiles in (1, 2, 4, 8, 16, 32, 64):
        stripe = window or tiles * STRIPE_MULTIPLE
        kept = min(max(fit - stripe, 0), V - 1) // STRIPE_MULTIPLE * STRIPE_MULTIPLE
        cost = V - kept + ceil_div(V - kept, stripe) * STRIPE_COLUMNS
        if kept > 0 and cost < least:
            best, least = kept, cost
    return best


# What a stripe costs beside its GEMMs on an H100, in clocks: the accumulator's 8 bytes an element, read and
# written at half of DRAM's rate, and three launches.
ACCUMULATED_PER_CLOCK = 160  # elements
LAUNCH_CLOCKS = 3 * 6000


def _clocks(config: KernelConfig, plan: GemmPlan, m: int, k: int) -> int:
    """Clocks of a GEMM's MMAs on the busiest cluster."""
    rounds = ceil_div(ceil_div(m, config.cluster_rows) * plan.windows, plan.clusters)
    macs = config.tile_m * config.tile_n // config.pair * k
    return rounds * macs * 2 // DEVICES[config.arch].dense_flops_per_clock


def _even_stripe(clocks: Callable[[int], int], left: int, most: int) -> int:
    """Columns of a stripe, at most `most`: those with which `left` columns take the fewest clocks.

    The GEMMs of a stripe end in a round that is not full, so that neither the longest stripes nor stripes
    of one length are always best.
    """
    if most >= left or most <= STRIPE_MULTIPLE:
        return most
    step = max(most // 4096, 1) * LEAST_STRIPE

    def total(columns: int) -> int:
        rest = left % columns
        return left // columns * clocks(columns) + (clocks(rest) if rest else 0)

    return min(range(most, most // 2, -step), key=total)


@functools.lru_cache(maxsize=4096)
def backward(
    arch: str,
    n: int,
    d: int,
    V: int,
    sms: int,
    half: bool,
    need_dinput: bool,
    need_dweight: bool,
    kept: int,
    window: int,
    workspace: int,
) -> BackwardPlan:
    """Plan a backward of (n, d) x (V, d) whose first `kept` columns the forward kept.

    window: a stripe's columns, 0: chosen. workspace: bytes, 0: the default.
    """
    logits, dhidden, dweight = backward_configs(arch)
    stripe = stripe_columns(n, d, V, half, need_dinput, need_dweight, kept, window, workspace)
    if not window:

        def clocks(columns: int) -> int:
            total = LAUNCH_CLOCKS + _clocks(logits, gemm(logits, n, columns, d, sms), n, d)
            if need_dinput:
                total += _clocks(dhidden, gemm(dhidden, n, d, columns, sms), n, columns)
                total += n * d // ACCUMULATED_PER_CLOCK
            if need_dweight:
                total += _clocks(dweight, gemm(dweight, columns, d, n, sms), columns, n)
            return total

        stripe = _even_stripe(clocks, V - kept, stripe)
    ranges = [(0, kept)] if kept else []
    ranges += [(first, min(stripe, V - first)) for first in range(kept, V, stripe or V)]
    stripes = []
    for first, columns in ranges:
        plans = (
            gemm(logits, n, columns, d, sms),
            gemm(dhidden, n, d, columns, sms),
            gemm(dweight, columns, d, n, sms),
        )
        stripes.append((first, columns, tuple(number for plan in plans for number in plan.ints)))
    return BackwardPlan(
        logits=logits,
        dhidden=dhidden,
        dweight=dweight,
        kept=kept,
        stripe=stripe,
        pitch=ceil_div(stripe, 8) * 8,
        stripes=tuple(stripes),
        workspace=backward_bytes(n, d, V, stripe, half, need_dinput, need_dweight, kept),
    )
