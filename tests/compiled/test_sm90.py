"""What the compiler made of the Hopper forward: PTX, registers, memory. No GPU, no driver."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from cute_lce.arch import KernelConfig, architecture
from cute_lce.compile.trace import trace
from cute_lce.plan.kernels import ForwardKey
from tests.compiled import cubin
from tests.device import tile_of

TILES = {tile_of(config): config for config in architecture("sm_90a").forward_configs}
WIDEST = TILES[192, 1]
# The narrowest, one whose columns are no multiple of the 32 among which lanes share them, two side by side,
# the widest whose statistics are in registers, the widest of all, whose are in shared memory, and one of 192
# classes.
CONFIGS = {
    "narrowest": TILES[32, 1],
    "ragged": TILES[112, 1],
    "two": TILES[176, 2],
    "widest": WIDEST,
    "words": TILES[208, 1],
    "high": TILES[128, 2, 192],
}
# Not chosen by any plan, but a caller's: A multicast as well, and other tiles.
MORE = {
    "shared": replace(WIDEST, tile_m=256, pingpong=False, stages=3),
    "cluster of 2 x 2": replace(WIDEST, cluster_n=2),
    "one warpgroup": replace(TILES[128, 1], tile_m=64, warpgroups=1, pingpong=False, cluster_m=1),
}
EVERY = {**CONFIGS, **MORE}
DTYPES = {"bfloat16": "bf16", "float16": "f16"}
EVICT_FIRST = 0x12F0000000000000  # CUTLASS's CacheHintSm90::EVICT_FIRST


def gemm(
    name: str, dtype: str = "bfloat16", target_dtype: str = "int64", terms: tuple[str, ...] = ()
) -> cubin.Kernel:
    return cubin.kernel(ForwardKey(EVERY[name], dtype, target_dtype, terms=terms), "GemmSm90")


def with_dtypes(names: Iterable[str]) -> Any:
    """Parametrize a test by name and dtype. float16's registers are bfloat16's: its widest tile stands for
    the others, which the long sweep has."""
    return pytest.mark.parametrize(
        ("name", "dtype"),
        [
            pytest.param(
                name,
                dtype,
                marks=[pytest.mark.emulator_full] if dtype == "float16" and name != "widest" else [],
            )
            for name in names
            for dtype in DTYPES
        ],
    )


@with_dtypes(CONFIGS)
def test_no_spill_and_no_local_memory(name: str, dtype: str):
    cubin.check_no_local_memory(ForwardKey(CONFIGS[name], dtype))


@pytest.mark.emulator_full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_no_tile_spills(tile: tuple[int, ...], dtype: str):
    cubin.check_no_local_memory(ForwardKey(TILES[tile], dtype))
    check_registers(TILES[tile], cubin.kernel(ForwardKey(TILES[tile], dtype), "GemmSm90"))


@with_dtypes(CONFIGS)
def test_registers(name: str, dtype: str):
    check_registers(CONFIGS[name], gemm(name, dtype))


def check_registers(config: KernelConfig, kernel: cubin.Kernel) -> None:
    """At launch all warps have the same; then the load warpgroup gives up what the consumers take."""
    assert kernel.target == "sm_90a"
    threads = 128 * (config.warpgroups + 1)
    assert kernel.usage["REG"] <= 65536 // threads // 8 * 8 == 168
    (least,), (most,) = (kernel.ptx_of(rf"setmaxnreg\.{way}\S*\s+(\d+)") for way in ("dec", "inc"))
    assert 128 * (int(least) + config.warpgroups * int(most)) <= 65536
    assert int(least) < kernel.usage["REG"] < int(most)
    # The accumulators, the statistics and the addresses fit what the consumers have.
    assert config.tile_m * config.tile_n * config.turns // (128 * config.warpgroups) + 32 <= int(most)


@with_dtypes(EVERY)
def test_wgmma(name: str, dtype: str):
    config, kernel = EVERY[name], gemm(name, dtype)
    shape = f"m64n{config.tile_n}k16.f32.{DTYPES[dtype]}.{DTYPES[dtype]}"
    rows_of_64 = config.tile_m * config.turns // (64 * config.warpgroups)
    # A k tile of 64 is four blocks of 16, for each 64 rows of a warpgroup; a tile's first is apart.
    assert kernel.ptx_of(r"wgmma\.mma_async\.sync\.aligned\.(\S+)") == [shape] * (2 * 4 * rows_of_64)
    assert len(kernel.ptx_of(r"wgmma\.fence")) == len(kernel.ptx_of(r"wgmma\.commit_group")) == 2
    # One k tile's MMAs stay in flight, and none at a tile's end.
    assert sorted(kernel.ptx_of(r"wgmma\.wait_group\S*\s+(\d)")) == ["0", "1"]
    assert kernel.sass.count("HGMMA") == 2 * 4 * rows_of_64, (
        "the compiler has unrolled or serialised the loop"
    )
    # It needs nothing of what the accumulators were, and the others add whatever their number.
    overwrite = re.findall(r"HGMMA\S* R\d+, gdesc\[\w+\], RZ, !UPT", kernel.sass)
    assert len(overwrite) == rows_of_64
    assert len(re.findall(r"HGMMA[^;]*\bUP\d", kernel.sass)) == 0
    assert kernel.sass.count("WARPGROUP.DEPBAR") == 2


@pytest.mark.parametrize("name", EVERY)
def test_loads_are_multicast_where_ctas_share(name: str):
    config = EVERY[name]
    loads = gemm(name).ptx_of(r"cp\.async\.bulk\.tensor\S*")
    # In order: A, whose slices the CTAs along n fetch for one another, then B, along m, the caller's or the
    # compacted.
    shared = [config.cluster_n > 1, *2 * [config.cluster_m > 1]]
    assert ["multicast" in load for load in loads] == shared
    assert all(".2d." in load and "mbarrier::complete_tx::bytes" in load for load in loads)
    # A streams past B.
    policies = gemm(name).ptx_of(r"cp\.async\.bulk\.tensor[^;]*, (%rd\d+);")
    assert [gemm(name).ptx_of(rf"mov\.b64 \s*{policy}, (\d+);") for policy in policies] == [
        [str(EVICT_FIRST)],
        *2 * [["0"]],
    ]


@pytest.mark.parametrize("name", EVERY)
def test_barriers(name: str):
    config, kernel = EVERY[name], gemm(name)
    assert len(kernel.ptx_of(r"mbarrier\.init")) == 2 * config.stages
    # Turns are taken through two named barriers of both warpgroups, an arrival before the first turn.
    assert bool(kernel.ptx_of(r"bar\.arrive")) == config.pingpong
    cluster = config.cluster_m * config.cluster_n > 1
    assert bool(kernel.ptx_of(r"barrier\.cluster\.wait")) == cluster
    # What a consumer releases, it releases to every CTA that filled the slot.
    assert bool(kernel.ptx_of(r"mbarrier\.arrive\.shared::cluster")) == cluster


# How often exponentials of a tile are computed: without terms once where bases stay, and once behind a branch
# where one changes; with maxima, which an argmax asks for, once.
ASKED = {(): 2, ("argmax",): 1}


@pytest.mark.parametrize("terms", ASKED)
@pytest.mark.parametrize("name", CONFIGS)
def test_exponentials_are_single_instructions(name: str, terms: tuple[str, ...]):
    """No call: log2(e) is folded into an ex2's argument."""
    config, kernel = CONFIGS[name], gemm(name, terms=terms)
    found = kernel.ptx_of(r"ex2\.\S+")
    assert found == ["ex2.approx.ftz.f32"] * len(found)
    elements = ASKED[terms] * config.accumulator_registers
    # And to merge two statistics: of the eight lanes that share a column, each 4, 2 and 1 of its eight, then
    # with those of the tiles before; or to change a base, and to merge those of four warps.
    folds = -(-config.tile_n // 32)
    assert elements + folds <= len(found) <= elements + folds * (4 + 2 + 1 + 1)
    assert "call" not in kernel.ptx


def test_a_tile_whose_bases_stay_has_one_exponential_an_element():
    """On the path on which no branch is taken to change a base, and no maximum is found."""
    kernel = gemm("widest")
    elements = CONFIGS["widest"].accumulator_registers
    branches = [each.start() for each in re.finditer(r"vote\.sync\.any", kernel.ptx)]
    exponentials = [each.start() for each in re.finditer(r"ex2\.", kernel.ptx)]
    maxima = [each.start() for each in re.finditer(r"max\S*\.f32", kernel.ptx)]
    first = exponentials[0]
    change = next(at for at in branches if at > first)
    assert sum(at < change for at in exponentials) == elements
    assert not [at for at in maxima if at < change]


@pytest.mark.parametrize("terms", [(), ("entropy",)])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_reduced_by_shuffles(name: str, terms: tuple[str, ...]):
    """A token lies in eight lanes, which halve their columns three times: of two numbers, and with a maximum
    where a base changes, or of a maximum and two sums."""
    folds = -(-CONFIGS[name].tile_n // 32)
    found = gemm(name, terms=terms).ptx_of(r"shfl\.sync\.bfly")
    assert 2 * folds < len(found) <= folds * (4 + 2 + 1) * 3


@pytest.mark.parametrize("name", CONFIGS)
def test_statistics_are_in_shared_memory_where_registers_are_scarce(name: str):
    """A thread's words of its columns: three at a run's beginning, one of each tile and two at a new base.
    At a run's end every tile's exponents and sums are in shared memory."""
    folds = -(-CONFIGS[name].tile_n // 32)
    stores = gemm(name).ptx_of(r"st\.shared\S*")
    assert stores == ["st.shared.b32"] * ((6 if name == "words" else 0) + 2) * folds


@pytest.mark.parametrize("target_dtype", ["int64", "int32"])
def test_target_dtypes(target_dtype: str):
    wide = len(gemm("widest", target_dtype=target_dtype).ptx_of(r"ld\.global\S*\.[bsu]64"))
    assert bool(wide) == (target_dtype == "int64")


def test_combine():
    kernel = cubin.kernel(ForwardKey(WIDEST), "Combine")
    assert kernel.usage["REG"] <= 40, "less than six blocks of 256 threads fit an SM"
    assert re.search(r"atom\.global\.acq_rel\.add", kernel.ptx)
    assert kernel.ptx.count("bar.sync") == 4
    # Finish adds up the blocks where exponentials are kept.
    kept = cubin.kernel(ForwardKey(TILES[176, 1], keeps=True), "Combine")
    assert kept.usage["REG"] <= 40
    assert "atom." not in kept.ptx
    assert kept.ptx.count("bar.sync") == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tile_n": 88}, "128 x 88"),
        ({"tile_m": 64, "tile_n": 288}, "64 x 288"),
        ({"tile_m": 96}, "96 x 192"),
        ({"tile_m": 192, "pingpong": False, "stages": 4}, "192 x 192.*want 128 or 256 rows"),
        ({"stages": 1}, "1 stages"),
        ({"warpgroups": 4}, "4 warpgroups"),
        ({"warpgroups": 3, "tile_n": 64}, "2 with pingpong"),
    ],
)
def test_configs_that_no_kernel_has_are_refused(change: dict, named: str):
    from cute_lce.kernels.epilogues.statistics import ForwardEpilogue
    from cute_lce.kernels.gemm_sm90 import GemmSm90

    with pytest.raises(ValueError, match=named):
        GemmSm90(replace(WIDEST, **change), ForwardEpilogue(GemmSm90.fragment(WIDEST), 4))


def test_words_that_exceed_shared_memory_are_refused():
    """28 KiB of 7 columns of a thread with totals, beside a ring that would fit, and does with 21."""
    from cute_lce.kernels.epilogues.statistics import ForwardEpilogue
    from cute_lce.kernels.gemm_sm90 import GemmSm90

    config = TILES[208, 1]
    fragment, most = GemmSm90.fragment(config), config.row.shared_memory
    GemmSm90(config, ForwardEpilogue(fragment, 4))
    used = config.shared_memory + 28 * 1024
    assert config.shared_memory <= most < used
    with pytest.raises(
        ValueError, match=rf"^config: got {used} bytes of shared memory, want at most {most}: "
    ):
        GemmSm90(config, ForwardEpilogue(fragment, 4, total=True))


def test_what_is_no_key_is_refused():
    with pytest.raises(TypeError, match="key: got tuple, want a key of plan/kernels"):
        trace(tuple(ForwardKey(WIDEST)))  # pyright: ignore[reportArgumentType]
