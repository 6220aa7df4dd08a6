"""GPU architectures: one frozen row each, from the compute capability to the kernels' configurations.

Integers only: no torch, no cutlass. What depends on an architecture looks it up here by its name; a name
without a row raises ValueError, and a GPU without a row has no kernels (`of_capability` gives None).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from . import data_sheets, widths
from .data_sheets import DataSheet
from .widths import Limits, Widths

KIB, WARPGROUP = 1024, 128
WARPS = 4
"""Warps of a warpgroup that runs a tile's epilogue."""
BOX_ROWS, BOX_COLUMNS = 16, 64
BOX_BYTES = 2 * BOX_ROWS * BOX_COLUMNS
"""What an epilogue's warp hands to TMA at once: lines of 128 bytes of a 16-bit result."""
BOXES = 2
"""Boxes of such a warp in shared memory, of which one is filled while TMA reads the other."""
EVICT_FIRST = 0x12F0000000000000
"""L2 policy of TMA's copies of what streams past: CUTLASS's CacheHintSm90::EVICT_FIRST, and Sm100's."""
MOST_STAGES = 12
ACCUMULATOR_STAGES = 2
"""Tiles in tensor memory: one is filled while the other is read (Blackwell)."""
SLABS = (64, 32)
"""Columns of a tile in tensor memory that an epilogue warp holds at once, in as many registers a thread."""

WARPGROUP_REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
"""Consumer warpgroups -> registers of a thread of the load warpgroup, and of a consumer (Hopper)."""

SPARE_REGISTERS = 152, 176
"""The same of two consumer warpgroups where the load warpgroup's other warps need as many."""

EPILOGUE_REGISTERS = 32
"""What a consumer thread needs beside its accumulators, at least."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a GEMM kernel cuts its work, whatever the architecture.

    tile_m, tile_n, tile_k: rows of A, rows of B and depth that a CTA takes at once; where accumulators are in
        tensor memory, a tile_m of 256 is taken by a pair of CTAs.
    warpgroups: consumer warpgroups of 128 threads, which hold the accumulators (Hopper; Blackwell: 1).
    pingpong: two consumer warpgroups take turns at whole tiles, so that the epilogue of one hides behind
        the MMAs of the other; otherwise the warpgroups share each tile, side by side along tile_m (Hopper).
    cluster_m, cluster_n: CTAs of a cluster; B is multicast along m, A along n.
    stages: slots of the ring of operand tiles in shared memory; in an Architecture's row the most of them.
    pace: k tiles between two steps of a cluster's progress, by which clusters keep together; 0: they do not.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    warpgroups: int
    pingpong: bool
    cluster_m: int
    cluster_n: int
    stages: int
    pace: int


@dataclass(frozen=True, kw_only=True)
class KernelConfig(Tiling):
    """What a GEMM kernel is compiled for: a tiling on an architecture.

    Raises ValueError when it is built, for an unknown architecture, for a number of warpgroups without a
    division of registers, and for more shared memory, tensor memory or registers than a CTA there has.
    """

    arch: str

    def __post_init__(self) -> None:
        row = architecture(self.arch)
        if not row.tmem_columns and self.warpgroups not in WARPGROUP_REGISTERS:
            want = ", ".join(map(str, WARPGROUP_REGISTERS))
            raise ValueError(f"config: got {self.warpgroups} warpgroups, want one of {want} on {self.arch}")
        for what, used, most in (
            ("bytes of shared memory", self.shared_memory, row.shared_memory),
            ("columns of tensor memory", self.tmem_columns, row.tmem_columns),
            ("registers a thread", self.accumulator_registers + EPILOGUE_REGISTERS, self.thread_registers),
        ):
            if used > most:
                raise ValueError(f"config: got {used} {what}, want at most {most} on {self.arch}: {self}")

    @property
    def row(self) -> Architecture:
        return architecture(self.arch)

    @property
    def turns(self) -> int:
        """Warpgroups (or groups of them) that take turns at a CTA's tiles."""
        return self.warpgroups if self.pingpong else 1

    @property
    def tile_warps(self) -> int:
        """Warps of a CTA that share a tile, each with rows of its own."""
        return WARPS * self.warpgroups // self.turns

    @property
    def pair(self) -> int:
        """CTAs that share a tile, each with a part of its operands."""
        return 2 if self.row.tmem_columns and self.tile_m == 256 else 1

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def cluster_rows(self) -> int:
        """Rows of A that a cluster takes at once."""
        return self.tile_m * self.cluster_m // self.pair

    @property
    def cluster_columns(self) -> int:
        """Rows of B that a cluster takes at once."""
        return self.tile_n * self.cluster_n

    @property
    def partials_per_window(self) -> int:
        """Partials of one token and window: one for each group of four warps."""
        return self.cluster_m * self.warpgroups

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory: the ring of operand tiles, its barriers, boxes, alignment."""
        return self.stages * self.stage_bytes + self.box_bytes + KIB

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of the ring, with its two barriers."""
        return (self.tile_m + self.tile_n) * self.tile_k * 2 // self.pair + 16

    @property
    def box_bytes(self) -> int:
        """Bytes of the epilogue's boxes."""
        return BOXES * WARPS * self.warpgroups * BOX_BYTES

    @property
    def stages_that_fit(self) -> int:
        """The most stages that shared memory holds."""
        return (self.row.shared_memory - KIB - self.box_bytes) // self.stage_bytes

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory, of which a power of two is allocated: the accumulators."""
        return 1 << (ACCUMULATOR_STAGES * self.tile_n - 1).bit_length() if self.row.tmem_columns else 0

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread that hold accumulators throughout; 0 where tensor memory holds them."""
        if self.row.tmem_columns:
            return 0
        return self.tile_m * self.tile_n * self.turns // (WARPGROUP * self.warpgroups)

    @property
    def has_spare_warps(self) -> bool:
        """Whether warps without a role have registers to work with (Hopper: SPARE_REGISTERS)."""
        if self.row.tmem_columns:
            return True
        return self.warpgroups == 2 and self.accumulator_registers + EPILOGUE_REGISTERS <= SPARE_REGISTERS[1]

    @property
    def thread_registers(self) -> int:
        """Registers that a thread of the epilogue may have."""
        return 255 if self.row.tmem_columns else WARPGROUP_REGISTERS[self.warpgroups][1]


@dataclass(frozen=True, kw_only=True)
class Tilings:
    """The tilings of calls with few tokens, or with many.

    tokens: of GEMMs whose B are tokens: of logits, and the gradient by hidden; narrow ones of a kind first.
    dweight: of the gradient by weight's GEMM.
    dhidden: more of the gradient by hidden's, whose k is so long that an epilogue need not hide. Each is
        compiled beside one of `tokens` (Configs.pairs), which is launched only if it is as wide.
    forward: more of a forward's; one that keeps has none of 192 rows.
    """

    tokens: tuple[Tiling, ...]
    dweight: tuple[Tiling, ...]
    dhidden: tuple[Tiling, ...] = ()
    forward: tuple[Tiling, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A row.

    name: what code is compiled for. capability: the compute capability of its GPUs. least_driver: the CUDA
        version whose drivers are the first that load its code (docs/kernels.md).
    mainloop: the module of cute_lce.kernels with its GEMM class.
    sms: of a whole GPU. shared_memory: bytes that a CTA may have. tmem_columns: of tensor memory, 0: none.
    dense_flops_per_clock: of an SM's tensor cores, 16-bit operands.
    data_sheets: of its GPUs. Plans are made for the first where none is named.
    widths: of tiles of tokens, by epilogues and terms.
    tilings: for few tokens first.
    """

    name: str
    capability: tuple[int, int]
    least_driver: tuple[int, int]
    mainloop: str
    sms: int
    shared_memory: int
    tmem_columns: int
    dense_flops_per_clock: int
    data_sheets: tuple[DataSheet, ...]
    widths: Limits
    tilings: tuple[Tilings, ...]

    @functools.cached_property
    def configs(self) -> tuple[Configs, ...]:
        """The configurations that go with `tilings`."""
        kinds = [(each.tokens, each.dweight, each.dhidden, each.forward) for each in self.tilings]
        return tuple(Configs(*(tuple(map(self._configure, some)) for some in each)) for each in kinds)

    @functools.cached_property
    def token_configs(self) -> tuple[KernelConfig, ...]:
        """All configurations of GEMMs whose B are tokens, but for those of forwards alone."""
        return tuple(dict.fromkeys(config for configs in self.configs for config in configs.tokens))

    @functools.cached_property
    def forward_configs(self) -> tuple[KernelConfig, ...]:
        """All configurations of forwards that keep nothing."""
        return tuple(dict.fromkeys(config for configs in self.configs for config in configs.forwards(False)))

    @functools.cached_property
    def dweight_configs(self) -> tuple[KernelConfig, ...]:
        """All configurations of the gradient by weight's GEMM."""
        return tuple(dict.fromkeys(config for configs in self.configs for config in configs.dweight))

    def configs_for(self, tokens: int, window: int, widths: Widths | None = None) -> Configs:
        """The configurations that a call of so many tokens chooses from: the first whose widest tile holds
        all of them, or the last. An explicit window takes the first: nothing that orders a row's additions
        may then depend on the number of tokens. widths: as in Gpu."""
        configs = self.configs if widths is None else tuple(each.within(widths) for each in self.configs)
        fit = (each for each in configs if window or each.tokens[-1].tile_n >= tokens)
        return next(fit, configs[-1])

    def _configure(self, tiling: Tiling) -> KernelConfig:
        fields = {name: getattr(tiling, name) for name in _TILING}
        most = functools.partial(KernelConfig, arch=self.name, **{**fields, "stages": 2})
        fields["stages"] = min(tiling.stages, most().stages_that_fit)
        return KernelConfig(arch=self.name, **fields)


_TILING = tuple(Tiling.__dataclass_fields__)


class Configs(NamedTuple):
    """What a call chooses from: configurations of GEMMs whose B are tokens, narrow tiles first, of the
    gradient by weight's, and more of the gradient by hidden's and of a forward's."""

    tokens: tuple[KernelConfig, ...]
    dweight: tuple[KernelConfig, ...]
    dhidden: tuple[KernelConfig, ...] = ()
    forward: tuple[KernelConfig, ...] = ()

    def forwards(self, keeps: bool) -> tuple[KernelConfig, ...]:
        """Those of a forward. One that keeps has none of 192 rows."""
        more = (each for each in self.forward if each.tile_m != 192) if keeps else self.forward
        return *self.tokens, *more

    @property
    def dweight_of_parts(self) -> tuple[KernelConfig, ...]:
        """Those of the gradient by weight's GEMM of stripes, or of chunks of tokens: the lowest."""
        height = min(each.tile_m for each in self.dweight)
        return tuple(each for each in self.dweight if each.tile_m == height)

    def pairs_for(self, tokens: int) -> list[tuple[KernelConfig, KernelConfig]]:
        """Of `pairs` those for so many tokens: the narrowest that holds all of them, or all."""
        return [pair for pair in self.pairs if pair[0].cluster_columns >= tokens][:1] or self.pairs

    @property
    def pairs(self) -> list[tuple[KernelConfig, KernelConfig]]:
        """Those of the backward's GEMMs whose B are tokens: of the logits, and of the gradient by hidden."""
        return _pairs(self)

    def within(self, widths: Widths | None) -> Configs:
        """Without tiles of tokens of other widths; None: all."""
        if widths is None:
            return self
        tokens, forward = (
            tuple(each for each in some if widths.holds(each.tile_m, each.tile_n))
            for some in (self.tokens, self.forward)
        )
        return self._replace(tokens=tokens, forward=forward)


@functools.cache
def _pairs(configs: Configs) -> list[tuple[KernelConfig, KernelConfig]]:
    """One of dhidden's own is beside the narrowest that takes as many tokens at once, or the widest."""
    found = {tokens: [tokens] for tokens in configs.tokens}
    for own in configs.dhidden:
        alike = [each for each in configs.tokens if each.cluster_n == own.cluster_n]
        wide = (each for each in alike if each.cluster_columns >= own.cluster_columns)
        found[next(wide, alike[-1])].append(own)
    return [(tokens, own) for tokens, beside in found.items() for own in beside]


class Gpu(NamedTuple):
    """What a plan is made for: the name of an architecture, and how many SMs there are. widths: of the tiles
    of tokens that the plan may have; None: any. model: which of the architecture's data sheets is its own."""

    arch: str
    sms: int
    widths: Widths | None = None
    model: int = 0

    @property
    def row(self) -> Architecture:
        return architecture(self.arch)

    @property
    def sheet(self) -> DataSheet:
        return self.row.data_sheets[self.model]

    def serving(self, terms: tuple[str, ...], step: str) -> Gpu:
        """The same for kernels that are compiled for these terms. step: "forward", "keep", a forward that
        keeps, or "backward"."""
        if step == "keep" and "kept_logits" in terms:
            step = "keep_logits"
        found = widths.widths_of(getattr(self.row.widths, step), terms)
        return self if found is None else self._replace(widths=found.both(self.widths))


def architecture(name: str) -> Architecture:
    """The row of an architecture. Raises ValueError for a name that has none."""
    row = ARCHITECTURES.get(name)
    if row is None:
        raise ValueError(f"arch: got {name!r}, want one of {', '.join(map(repr, ARCHITECTURES))}")
    return row


def of_capability(capability: tuple[int, int]) -> Architecture | None:
    """The row of the GPUs of a compute capability; None where there are no kernels for them."""
    return next((row for row in ARCHITECTURES.values() if row.capability == capability), None)


_HOPPER = Tiling(
    tile_m=128,
    tile_n=192,
    tile_k=64,
    warpgroups=2,
    pingpong=True,
    cluster_m=2,
    cluster_n=1,
    stages=MOST_STAGES,
    pace=8,
)


def _widths(tiling: Tiling, *columns: int) -> tuple[Tiling, ...]:
    return tuple(replace(tiling, tile_n=each) for each in columns)


_HOPPER_PAIR = replace(_HOPPER, cluster_m=1, cluster_n=2)
_HOPPER_WIDE = replace(_HOPPER, tile_n=256, pingpong=False, cluster_m=1)
"""Asks the least of shared memory, for a short k, where clusters would hold up stores. No epilogue hides."""
_HOPPER_SHARED = replace(_HOPPER_WIDE, cluster_m=2)
_HOPPER_TALL = replace(_HOPPER_PAIR, tile_m=256, tile_n=128, pingpong=False)
"""_HOPPER_SHARED and _HOPPER_TALL ask the least of L2: 32 bytes a clock, with other widths 36 to 27. Their
epilogues do not hide either."""
_HOPPER_HIGH = replace(_HOPPER_PAIR, tile_m=192)
_HOPPER_LARGE = tuple(replace(each, tile_m=256, tile_n=192) for each in (_HOPPER_TALL, _HOPPER_SHARED))
_BLACKWELL = Tiling(
    tile_m=256,
    tile_n=256,
    tile_k=64,
    warpgroups=1,
    pingpong=False,
    cluster_m=2,
    cluster_n=1,
    stages=MOST_STAGES,
    pace=8,
)

_SM_90A = Architecture(
    name="sm_90a",
    capability=(9, 0),
    least_driver=(12, 0),
    mainloop="gemm_sm90",
    sms=132,
    shared_memory=227 * KIB,
    tmem_columns=0,
    dense_flops_per_clock=4096,
    data_sheets=(data_sheets.H200, data_sheets.H100),
    widths=widths.HOPPER,
    tilings=(
        # One tile holds all tokens, and is shared by the CTAs of a cluster.
        Tilings(
            tokens=_widths(_HOPPER, 32, 64, 96, 112, 128, 144, 160, 176, 192),
            dweight=(_HOPPER_WIDE, replace(_HOPPER_PAIR, tile_n=192)),
        ),
        # Two tiles of tokens side by side read the weight once.
        Tilings(
            tokens=(
                *_widths(_HOPPER_PAIR, 96, 112, 128, 144, 160, 176),
                # For odd numbers of columns of tiles; narrower ones would read the weight too fast.
                *_widths(_HOPPER, 144, 160, 176),
            ),
            dweight=(
                replace(_HOPPER_PAIR, tile_n=128),
                replace(_HOPPER_PAIR, tile_n=192),
                replace(_HOPPER, tile_n=128),
                _HOPPER_SHARED,
                *_HOPPER_LARGE,
            ),
            # In steps of 8, so that some width divides nearly any number of tokens well.
            dhidden=_widths(_HOPPER_TALL, *range(104, 193, 8)),
            # Widths between, and wider or higher tiles, which ask less of L2.
            forward=(
                *_widths(_HOPPER_PAIR, 120, 136, 152, 168, 184, 200),
                *_widths(_HOPPER, 192, 208),
                *_widths(_HOPPER_HIGH, 120, 128),
            ),
        ),
    ),
)
_SM_100A = Architecture(
    name="sm_100a",
    capability=(10, 0),
    least_driver=(12, 8),
    mainloop="gemm_sm100",
    sms=148,
    shared_memory=227 * KIB,
    tmem_columns=512,
    dense_flops_per_clock=8192,
    data_sheets=(data_sheets.B200,),
    widths=widths.BLACKWELL,
    tilings=(Tilings(tokens=_widths(_BLACKWELL, 64, 96, 128, 160, 192, 224, 256), dweight=(_BLACKWELL,)),),
)
_SM_103A = replace(
    _SM_100A,
    name="sm_103a",
    capability=(10, 3),
    least_driver=(12, 9),
    data_sheets=(replace(data_sheets.B200, gpu="B300"),),
)

ARCHITECTURES = {row.name: row for row in (_SM_90A, _SM_100A, _SM_103A)}
"""Name -> row. A new architecture is a row here and a mainloop; a new tile is a line in its row."""
