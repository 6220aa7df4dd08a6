"""What the compiler made of the backward and of the forward that keeps: PTX, registers, memory. No GPU.

Each test has a few of the tiles that a plan may choose; `emulator_full` has all of Hopper's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from cute_lce.arch import ARCHITECTURES, EVICT_FIRST, Gpu, KernelConfig, architecture
from cute_lce.plan.kernels import BackwardKey, ForwardKey, Key
from tests.compiled import cubin

DTYPES = {"bfloat16": "bf16", "float16": "f16"}
KINDS = ("backward", "keep")
# tile_n and cluster_n: the narrowest, the widest, and for Hopper some that are no multiple of the 32 columns
# that lanes share, and two side by side; with them some configurations of dweight's GEMM, the widest too.
TILES = {"sm_90a": ((32, 1), (112, 1), (144, 2), (176, 2), (192, 1)), "sm_100a": ((64, 1), (256, 1))}


class Pass(NamedTuple):
    """A backward or a forward that keeps."""

    arch: str
    tile: tuple[int, int]
    dtype: str = "bfloat16"
    which: str = "backward"

    @property
    def config(self) -> KernelConfig:
        configs = architecture(self.arch).token_configs
        (config,) = {each for each in configs if (each.tile_n, each.cluster_n) == self.tile}
        return config

    @property
    def keeps(self) -> bool:
        """Whether forwards that keep have these tiles."""
        widths = Gpu(self.arch, 1).serving((), "keep").widths
        return widths is None or widths.holds(self.config.tile_m, self.config.tile_n)

    @property
    def dweight(self) -> KernelConfig:
        """One of those that go with `config`, another for each."""
        of_row = architecture(self.arch).configs
        configs = next(each for each in of_row if self.config in each.tokens)
        return configs.dweight[configs.tokens.index(self.config) % len(configs.dweight)]

    @property
    def key(self) -> Key:
        """The key of what launch/ asks for."""
        if self.which == "keep":
            return ForwardKey(self.config, self.dtype, keeps=True)
        return BackwardKey(self.config, self.config, self.dweight, self.dtype)

    @property
    def name(self) -> str:
        columns, side_by_side = self.tile
        return f"{self.arch}-{side_by_side}x{columns}-{self.dtype}-{self.which}"

    @property
    def gemms(self) -> list[cubin.Kernel]:
        """The GEMMs in the order in which the host function launches them: logits, dhidden, dweight."""
        return cubin.gemms(self.key)


def passes(arch: str, tiles: Iterable[tuple[int, int]]) -> list[Pass]:
    every = [Pass(arch, tile, dtype, which) for tile in tiles for dtype in DTYPES for which in KINDS]
    return [each for each in every if each.which == "backward" or each.keeps]


def named(chosen: Iterable[Pass], spills: dict[Pass, str] | None = None) -> Any:
    """Parametrize a test by passes; those in `spills` are expected to fail for the given reason."""
    spills = spills or {}

    def marks(each: Pass) -> list[pytest.MarkDecorator]:
        long = [pytest.mark.emulator_full] if each in LONG_PASSES else []
        return [*long, *([pytest.mark.xfail(reason=spills[each])] if each in spills else [])]

    return pytest.mark.parametrize(
        "each", [pytest.param(each, id=each.name, marks=marks(each)) for each in chosen]
    )


# float16's registers are bfloat16's: its widest tile stands for the others.
PASSES = [
    each
    for arch, tiles in TILES.items()
    for each in passes(arch, tiles)
    if each.dtype == "bfloat16" or each.tile == tiles[-1]
]
# Of these in the long sweep, as each takes seconds to compile: what keeps in tiles between the others, which
# has no GEMM of dweight, and Blackwell's float16.
LONG_PASSES = [
    each
    for each in PASSES
    if (each.which == "keep" and each.tile in ((112, 1), (144, 2)))
    or (each.arch == "sm_100a" and each.dtype == "float16")
]
ALL = passes(
    "sm_90a",
    dict.fromkeys((config.tile_n, config.cluster_n) for config in architecture("sm_90a").token_configs),
)
SPILLS = {
    **{
        Pass("sm_90a", (columns, side_by_side), dtype): "dhidden: 8 bytes, 2 accesses"
        for columns, side_by_side in ((128, 1), (128, 2), (144, 1), (144, 2), (192, 1))
        for dtype in DTYPES
    },
    **{Pass("sm_90a", (160, 1), dtype): "dhidden: 24 bytes, 12 accesses" for dtype in DTYPES},
    **{Pass("sm_90a", (160, 2), dtype): "dhidden: 32 bytes, 18 accesses" for dtype in DTYPES},
    **{
        Pass("sm_90a", (176, side_by_side), dtype): "dhidden: 16 bytes, 8 accesses"
        for side_by_side in (1, 2)
        for dtype in DTYPES
    },
}
every_pass = named(PASSES)
hoppers_backwards = named(each for each in PASSES if (each.arch, each.which) == ("sm_90a", "backward"))


@named(PASSES, SPILLS)
def test_no_spill_and_no_local_memory(each: Pass):
    cubin.check_no_local_memory(each.key)


@every_pass
def test_the_weight_streams_only_where_stores_do(each: Pass):
    """A's loads have the L2 policy evict-first beside stores that have it, dweight's; beside plain stores its
    lines would leave L2 before all clusters that share them have read them."""
    for kernel, is_dweight in zip(each.gemms, (False, False, True), strict=False):
        policies = kernel.ptx_of(r"cp\.async\.bulk\.tensor[^;]*mbarrier[^;]*, (%rd\d+);")
        # In order: A's slices, then B's.
        found = [each for policy in policies for each in kernel.ptx_of(rf"mov\.b64 \s*{policy}, (\d+);")]
        assert len(found) == len(policies) > 1
        assert (found[0], found[-1]) == (str(EVICT_FIRST) if is_dweight else "0", "0"), kernel.name
        assert is_dweight or set(found) == {"0"}, kernel.name


@pytest.mark.emulator_full
@named(ALL, SPILLS)
def test_no_tile_spills(each: Pass):
    check_registers(each)
    cubin.check_no_local_memory(each.key)


# Of forwards alone: `token_configs` has none of them.
OF_FORWARDS = [
    config
    for config in architecture("sm_90a")
    .configs[-1]
    .within(Gpu("sm_90a", 1).serving((), "keep").widths)
    .forwards(True)
    if config not in architecture("sm_90a").token_configs
]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            config,
            id=f"{config.cluster_n}x{config.tile_n}",
            marks=[] if config.tile_n == 184 else [pytest.mark.emulator_full],
        )
        for config in OF_FORWARDS
    ],
)
def test_what_keeps_in_tiles_of_forwards_alone_does_not_spill(config: KernelConfig):
    cubin.check_no_local_memory(ForwardKey(config, keeps=True))


# Every configuration of dweight's GEMM and what it may add to; the long sweep has those that are left.
DWEIGHTS = [
    (arch, config, added)
    for arch in TILES
    for config in architecture(arch).dweight_configs
    for added in ("", "float32", "bfloat16")
]
SHORT = {("sm_90a", 256, 192, "float32"), ("sm_100a", 256, 256, "bfloat16")}
ADDING_SPILLS = {
    ("sm_90a", 128, 192, "bfloat16"): "8 bytes, 6 accesses",
    ("sm_90a", 256, 192, "bfloat16"): "8 bytes, 2 accesses",
}


def _of_dweight(arch: str, config: KernelConfig, added: str) -> Any:
    kind = arch, config.tile_m, config.tile_n, added
    marks = [] if kind in SHORT else [pytest.mark.emulator_full]
    if kind in ADDING_SPILLS:
        marks.append(pytest.mark.xfail(reason=ADDING_SPILLS[kind]))
    tile = f"{config.tile_m}x{config.tile_n}-{config.cluster_m}x{config.cluster_n}"
    return pytest.param(arch, config, added, id=f"{arch}-{tile}-{added or 'written'}", marks=marks)


@pytest.mark.parametrize(("arch", "config", "added"), [_of_dweight(*each) for each in DWEIGHTS])
def test_no_dweight_spills(arch: str, config: KernelConfig, added: str):
    tokens = next(each for each in architecture(arch).configs if config in each.dweight).tokens[0]
    cubin.check_no_local_memory(BackwardKey(tokens, tokens, config, added=added), ("dweight",))


@pytest.mark.parametrize(
    ("tile_n", "accesses"),
    [
        (136, 2),
        (192, 6),
        pytest.param(104, 0, marks=pytest.mark.emulator_full),
        pytest.param(112, 0, marks=pytest.mark.emulator_full),
        pytest.param(120, 4, marks=pytest.mark.emulator_full),
        pytest.param(128, 2, marks=pytest.mark.emulator_full),
        pytest.param(144, 2, marks=pytest.mark.emulator_full),
        pytest.param(152, 4, marks=pytest.mark.emulator_full),
        pytest.param(160, 14, marks=pytest.mark.emulator_full),
        pytest.param(168, 19, marks=pytest.mark.emulator_full),
        pytest.param(176, 19, marks=pytest.mark.emulator_full),
        pytest.param(184, 8, marks=pytest.mark.emulator_full),
    ],
)
def test_tall_tiles_of_dhidden(tile_n: int, accesses: int):
    configs = architecture("sm_90a").configs[-1]
    (pair,) = [pair for pair in configs.pairs if pair[0] != pair[1] and pair[1].tile_n == tile_n]
    dhidden, dweight = cubin.gemms(BackwardKey(*pair, configs.dweight[-1]), ("dhidden", "dweight"))
    # Of 128 rows for each warpgroup; those of SPILLS spill about as much.
    assert dhidden.ptx.count(f"wgmma.mma_async.sync.aligned.m64n{tile_n}k16") == 8
    assert len(dhidden.local_accesses) <= accesses
    # dweight's, shared tiles of 256 x 192.
    assert dweight.ptx.count("wgmma.mma_async.sync.aligned.m64n192k16") == 8
    assert not dweight.local_accesses


@every_pass
def test_kernels(each: Pass):
    """Three GEMMs, the compaction, the scaling of rows, three kernels in float16, and what takes dhidden to
    its place: in fp32 and rounded, from sums, and 16-bit rows; or the forward's, references and finish."""
    kernels = cubin.kernels(each.key)
    names = list(kernels)
    assert {kernel.target for kernel in kernels.values()} == {each.arch}
    if each.which == "backward":
        wanted = {"Gather": 1, "ScaleRows": 3 if each.dtype == "float16" else 1, "Reduce": 3}
    else:
        wanted = {"rowsGather": 1, "rowsCopy": 1, "References": 1, "Combine": 1, "Finish": 1}
    for want, count in wanted.items():
        assert sum(want in name for name in names) == count, (want, names)
    assert len(each.gemms) == (3 if each.which == "backward" else 1)


@every_pass
def test_registers(each: Pass):
    check_registers(each)


def check_registers(each: Pass) -> None:
    for kernel in cubin.kernels(each.key).values():
        if "GemmSm90" in kernel.name:
            # At launch all warps have the same; then the load warpgroup gives up what the consumers take.
            assert kernel.usage["REG"] <= 168, kernel.name
            (least,), (most,) = (kernel.ptx_of(rf"setmaxnreg\.{way}\S*\s+(\d+)") for way in ("dec", "inc"))
            assert 128 * (int(least) + 2 * int(most)) <= 65536
        elif "GemmSm100" in kernel.name:
            assert kernel.usage["REG"] <= 255, kernel.name
        else:
            # Small kernels live by how many of them fit: 128 threads, at least 8 blocks to an SM, or 6 of
            # float16's References, which also reads the classes that it samples.
            samples = each.dtype == "float16" and "References" in kernel.name
            assert kernel.usage["REG"] <= (80 if samples else 64), kernel.name


@hoppers_backwards
def test_wgmma(each: Pass):
    configs = each.config, each.config, each.dweight
    # The first k tile of logits is apart (`scarce_registers`), those of gradients are in the loop.
    for kernel, config, groups in zip(each.gemms, configs, (2, 1, 1), strict=True):
        shape = f"m64n{config.tile_n}k16.f32.{DTYPES[each.dtype]}.{DTYPES[each.dtype]}"
        rows_of_64 = config.tile_m * config.turns // (64 * config.warpgroups)
        wanted = 4 * rows_of_64 * groups
        assert kernel.ptx_of(r"wgmma\.mma_async\.sync\.aligned\.(\S+)") == [shape] * wanted
        assert kernel.sass.count("HGMMA") == wanted
        assert kernel.sass.count("WARPGROUP.DEPBAR") == 2
        assert sorted(kernel.ptx_of(r"wgmma\.wait_group\S*\s+(\d)")) == ["0", "1"]


@hoppers_backwards
def test_wgmma_reads_operands_where_they_lie(each: Pass):
    """dhidden takes weight as it is stored, dweight both of its operands; no copy is made for it.

    The last two numbers of wgmma say which operand is transposed.
    """
    transposed = []
    for kernel in each.gemms:
        numbers = {
            tuple(int(x) for x in line.split(",")[-2:])
            for line in re.findall(r"wgmma\.mma_async[^;]*?((?:, *-?\d+)+);", kernel.ptx)
        }
        assert len(numbers) == 1, numbers
        transposed += numbers
    assert transposed == [(0, 0), (1, 0), (1, 1)]


@named(Pass("sm_100a", (256, 1), dtype) for dtype in DTYPES)
def test_tcgen05(each: Pass):
    for kernel in each.gemms:
        mma = re.findall(r"tcgen05\.mma\.cta_group::(\d)\.kind::(\w+)", kernel.ptx)
        assert mma == [("2", "f16")] * 4  # a k tile of 64 is four MMAs of 16
        lines = [line.strip() for line in kernel.ptx.split("\n")]
        loads = [i for i, line in enumerate(lines) if line.startswith("tcgen05.ld")]
        assert loads
        # A slab is two loads of 16 lanes; what follows the second is the wait.
        assert len(loads) % 2 == 0
        assert all(second == first + 1 for first, second in zip(loads[::2], loads[1::2], strict=True))
        assert all(lines[i + 1].startswith("tcgen05.wait::ld") for i in loads[1::2])
        assert "UTCHMMA.2CTA" in kernel.sass


@named(each for each in PASSES if each.which == "keep")
def test_what_is_kept_costs_one_exponential_an_element(each: Pass):
    """The exponential that is stored serves the statistics, and columns that are not kept the same code."""
    from cute_lce.kernels.mainloop import mainloop

    (kernel,) = each.gemms
    fragment = mainloop(each.config).fragment(each.config)
    elements = len(fragment.rows) * fragment.count
    exponentials = len(kernel.ptx_of(r"ex2\.\S+"))
    # And two for each 32 columns, of which a lane owns one, a new base and the end of a run, and three where
    # warps' statistics are merged.
    least = elements * fragment.slabs
    assert least <= exponentials <= least + 2 * fragment.owned * fragment.slabs + 3


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_configurations_that_keep_have_the_same_units(arch: str):
    """A backward whose tiles have another width than its forward's finds what that kept by its units."""
    from cute_lce.kernels.mainloop import mainloop

    assert len({mainloop(each).fragment(each).rows for each in architecture(arch).token_configs}) == 1


def meetings_of_what_keeps(config: KernelConfig) -> int:
    """How often the four warps of a group meet to store a tile that is kept: for 64 columns each time."""
    from cute_lce.kernels.mainloop import mainloop

    fragment = mainloop(config).fragment(config)
    return -(-fragment.owned // 2) * fragment.slabs


def elements_of_a_lane(config: KernelConfig) -> int:
    """Of a tile that its epilogue's warps share."""
    rows = config.tile_m // config.pair
    return rows * config.tile_n * config.turns // (128 * config.warpgroups)


@every_pass
def test_16_bit_numbers_are_stored_by_tma(each: Pass):
    """Gradients, dlogits and what is kept, each number once: through shared memory, transposed on the way
    there where tokens are an MMA's columns; sums are in fp32."""
    configs = (each.config, each.config, each.dweight)[: len(each.gemms)]
    for kernel, config, transposed in zip(each.gemms, configs, (True, True, False), strict=False):
        # Four 8 x 8 matrices of two numbers a lane.
        form = f"stmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16"
        assert kernel.ptx_of(r"stmatrix\S*") == [form] * (elements_of_a_lane(config) // 8)
        copies = kernel.ptx_of(r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\S*")
        assert copies
        keeps = each.which == "keep"
        meetings = meetings_of_what_keeps(config) if keeps else len(copies)
        # What was stored is made visible to TMA, and copied; shared memory is written again, and left, when
        # it has been read, and where statistics are merged there.
        assert len(kernel.ptx_of(r"fence\.proxy\.async\.shared::cta")) == meetings
        assert len(kernel.ptx_of(r"cp\.async\.bulk\.commit_group")) == meetings
        waits = kernel.ptx_of(r"cp\.async\.bulk\.wait_group(\S*)\s+\d")
        assert waits == [".read"] * (meetings + 1 + keeps)
        stores = kernel.ptx_of(r"\bst\.global\S*")
        narrow = [store for store in stores if store.endswith((".b16", ".u16", ".b8", ".u8"))]
        # Each warp's note of a column.
        assert len(narrow) == (-(-config.tile_n // 32) if keeps else 0)


@pytest.mark.parametrize("columns", [64, pytest.param(256, marks=pytest.mark.emulator_full)])
@pytest.mark.parametrize("arch", ["sm_103a"])
def test_other_targets_compile(arch: str, columns: int):
    for kernel in Pass(arch, (columns, 1)).gemms:
        assert kernel.target == arch
        assert kernel.usage["STACK"] == kernel.usage["LOCAL"] == 0
