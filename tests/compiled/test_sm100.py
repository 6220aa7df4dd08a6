"""What the compiler made of the Blackwell forward: PTX, registers, memory. No GPU, no driver.

python -m tests.compiled.test_sm100     prints registers and what the epilogue issues for a tile
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from cute_lce.arch import ARCHITECTURES, architecture
from cute_lce.plan.kernels import ForwardKey
from tests.compiled import cubin

EVICT_FIRST = 0x12F0000000000000  # CUTLASS's CacheHintSm100::EVICT_FIRST
SHARED_MEMORY = 227 * 1024  # what a block can have on compute capability 10.0 and 10.3
TOKEN_CONFIGS = architecture("sm_100a").token_configs
PAIR = TOKEN_CONFIGS[-1]
SINGLE = replace(PAIR, tile_m=128, cluster_m=1, stages=4)
CONFIGS = {
    **{f"pair, {config.tile_n} tokens": config for config in TOKEN_CONFIGS[:-1]},
    "pair": PAIR,
    "single": SINGLE,
    "two pairs": replace(PAIR, cluster_m=4),
}
TARGETS = ("sm_100a", "sm_103a", "sm_100f")


def gemm(name: str, arch: str = "sm_100a", dtype: str = "bfloat16") -> cubin.Kernel:
    return cubin.kernel(ForwardKey(replace(CONFIGS[name], arch=arch), dtype), "GemmSm100")


# float16's registers are bfloat16's: its widest tile stands for the others.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bfloat16") for name in CONFIGS),
        *(
            pytest.param(name, "float16", marks=[] if name == "pair" else [pytest.mark.emulator_full])
            for name in CONFIGS
        ),
    ],
)
def test_no_spill_and_no_local_memory(name: str, dtype: str):
    kernel = gemm(name, dtype=dtype)
    assert kernel.usage["STACK"] == kernel.usage["LOCAL"] == 0
    assert not kernel.local_accesses
    assert kernel.usage["REG"] <= 255  # the most that 256 threads may have
    assert ".local" not in kernel.ptx


@pytest.mark.parametrize("arch", TARGETS)
def test_every_target_compiles(arch: str, monkeypatch):
    if arch not in ARCHITECTURES:
        monkeypatch.setitem(ARCHITECTURES, arch, replace(architecture("sm_100a"), name=arch))
    kernel = gemm("pair", arch)
    assert kernel.target == arch
    assert kernel.usage["STACK"] == kernel.usage["LOCAL"] == 0
    assert "UTCHMMA.2CTA" in kernel.sass


@pytest.mark.parametrize(("name", "group"), [("pair", 2), ("two pairs", 2), ("single", 1)])
def test_tcgen05(name: str, group: int):
    ptx = gemm(name).ptx
    mma = re.findall(r"tcgen05\.mma\.cta_group::(\d)\.kind::(\w+)", ptx)
    assert mma == [(str(group), "f16")] * 4  # a k tile of 64 is four MMAs of 16
    alloc = re.findall(r"tcgen05\.alloc\.cta_group::(\d)\S*\s+\[[^\]]*\], (\S+);", ptx)
    assert alloc, "no tcgen05.alloc"
    columns = re.search(rf"mov\.\w+\s+{re.escape(alloc[0][1])}, (\d+);", ptx)
    assert int(columns[1] if columns else alloc[0][1]) == 512
    assert ptx.count("tcgen05.dealloc") == ptx.count("tcgen05.relinquish_alloc_permit") == 1
    commits = re.findall(r"tcgen05\.commit\S*", ptx)
    assert len(commits) == 2
    assert all(("multicast::cluster" in c) == (name != "single") for c in commits)


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_comes_between_the_loads_of_a_slab_and_their_wait(name: str):
    config = CONFIGS[name]
    columns = 32 if config.tile_n % 64 else 64
    lines = [line.strip() for line in gemm(name).ptx.split("\n")]
    loads = [i for i, line in enumerate(lines) if line.startswith("tcgen05.ld")]
    # Two halves of a warp's lanes, of each slab.
    assert len(loads) == 2 * config.tile_n // columns
    for first, second in zip(loads[::2], loads[1::2], strict=True):
        assert f".16x256b.x{columns // 8}." in lines[first]
        assert second == first + 1
        assert lines[second + 1].startswith("tcgen05.wait::ld")
    release = next(i for i, line in enumerate(lines) if "fence::before_thread_sync" in line)
    assert release > max(loads)


def test_loads_are_multicast_where_ctas_share():
    assert ".multicast::cluster" not in "".join(re.findall(r"cp\.async\.bulk\.tensor\S*", gemm("single").ptx))
    assert ".cta_group::2" in "".join(re.findall(r"cp\.async\.bulk\.tensor\S*", gemm("pair").ptx))
    shared = re.findall(r"cp\.async\.bulk\.tensor\S*", gemm("two pairs").ptx)
    assert any(".multicast::cluster" in load for load in shared)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_streams_past_leaves_l2_first(name: str):
    """The loads' L2 policies, in order: evict-first of A, and none of B, the caller's or the compacted, which
    stays."""
    ptx = gemm(name).ptx
    registers = re.findall(r"cp\.async\.bulk\.tensor\S* .*, (%rd\d+);", ptx)
    policies = [re.findall(rf"mov\.b64 \s*{register}, (\d+);", ptx) for register in registers]
    assert policies == [[str(EVICT_FIRST)], *2 * [["0"]]]


PACED = r"\s(red\.\S+)"


@pytest.mark.parametrize("name", CONFIGS)
def test_only_the_load_warp_keeps_pace(name: str):
    """A step and the steps that a cluster does not make, and no more atomics."""
    assert gemm(name).ptx_of(PACED) == ["red.relaxed.gpu.global.add.s32"] * 2


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "pair" else [pytest.mark.emulator_full]) for n in CONFIGS]
)
def test_without_a_pace_there_are_no_atomics(name: str):
    unpaced = ForwardKey(replace(CONFIGS[name], pace=0))
    assert not cubin.kernel(unpaced, "GemmSm100").ptx_of(PACED)


def test_stages_fill_shared_memory():
    """The stages of each configuration are the most that fit."""
    for config in (*TOKEN_CONFIGS, SINGLE):
        stage = (config.tile_m + config.tile_n) * config.tile_k * 2 // (config.tile_m // 128)
        boxes = 2 * 4 * 16 * 128  # of each of the epilogue's warps two of 16 lines
        others = boxes + 2048  # barriers, the address of tensor memory, and the alignment of the ring
        assert config.stages * stage + others <= SHARED_MEMORY < (config.stages + 1) * stage + others


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tile_m": 192, "stages": 2}, "192 x 256"),
        ({"tile_n": 80}, "256 x 80"),
        ({"cluster_m": 1}, "cluster_m 1"),
    ],
)
def test_configs_that_no_kernel_has_are_refused(change: dict, named: str):
    from cute_lce.kernels.epilogues.statistics import ForwardEpilogue
    from cute_lce.kernels.gemm_sm100 import GemmSm100

    with pytest.raises(ValueError, match=named):
        GemmSm100(replace(PAIR, **change), ForwardEpilogue(GemmSm100.fragment(PAIR), 4))


def tile_loop(sass: str) -> Counter:
    """(opcode -> instructions) of the epilogue's loop over tiles, without the blocks that it jumps over where
    no row lies beyond the vocabulary and no token's target is in the slab."""
    found = (
        re.match(r"\s+/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ )?\s*(\S+)(.*)", line) for line in sass.split("\n")
    )
    lines = [(int(m[1], 16), m[2], m[3]) for m in found if m]
    loads = [at for at, op, _ in lines if op.startswith("LDTM")]
    jumps = [
        (at, int(to[1], 16))
        for at, op, rest in lines
        if op in ("BRA", "BRA.U")
        if (to := re.search(r"0x(\w+)", rest))
    ]
    start, end = min(
        ((to, at) for at, to in jumps if to < loads[0] and loads[-1] < at), key=lambda x: x[1] - x[0]
    )
    skipped = [(at, to) for at, to in jumps if start <= at < to <= end]
    body = [
        op for at, op, _ in lines if start <= at <= end and not any(jump < at < to for jump, to in skipped)
    ]
    return Counter(op.split(".")[0] for op in body)


def test_exponentials_of_a_tile():
    counts = tile_loop(gemm("pair").sass)
    assert counts["LDTM"] == 2 * 256 // 64
    # 32 rows of a warp, 256 columns; merging what lanes have of a column needs no more.
    assert counts["MUFU"] == 256
    assert not counts["STG"]
    assert sum(counts.values()) < 8 * counts["MUFU"]  # the scheduler issues them in an exponential's shadow


if __name__ == "__main__":
    for name in CONFIGS:
        kernel = gemm(name)
        counts = tile_loop(kernel.sass)
        print(name, kernel.usage, f"tile: {sum(counts.values())} instructions")
        print("   ", dict(counts.most_common()))
