"""What the compiler made of the Blackwell forward: PTX, registers, memory. No GPU, no driver.

python -m tests.compiled.test_sm100     prints registers and what a slab of the epilogue issues
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
PAIR, SINGLE = architecture("sm_100a").configs
CONFIGS = {"pair": PAIR, "single": SINGLE, "two pairs": replace(PAIR, cluster_m=4)}
TARGETS = ("sm_100a", "sm_103a", "sm_100f")


def gemm(name: str, arch: str = "sm_100a", dtype: str = "bfloat16") -> cubin.Kernel:
    return cubin.kernel(ForwardKey(replace(CONFIGS[name], arch=arch), dtype), "GemmSm100")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_spill_and_no_local_memory(name: str, dtype: str):
    kernel = gemm(name, dtype=dtype)
    assert kernel.usage["STACK"] == kernel.usage["LOCAL"] == 0
    assert not kernel.local_accesses
    assert kernel.usage["REG"] <= 128
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
def test_nothing_comes_between_a_load_from_tensor_memory_and_its_wait(name: str):
    lines = [line.strip() for line in gemm(name).ptx.split("\n")]
    loads = [i for i, line in enumerate(lines) if line.startswith("tcgen05.ld")]
    assert loads
    for i in loads:
        assert lines[i + 1].startswith("tcgen05.wait::ld")
        # A row of the slab for each lane, and what is released is released behind the wait.
        assert ".32x32b.x64." in lines[i]
    release = next(i for i, line in enumerate(lines) if "fence::before_thread_sync" in line)
    assert release > max(loads)


def test_loads_are_multicast_where_ctas_share():
    assert ".multicast::cluster" not in "".join(re.findall(r"cp\.async\.bulk\.tensor\S*", gemm("single").ptx))
    assert ".cta_group::2" in "".join(re.findall(r"cp\.async\.bulk\.tensor\S*", gemm("pair").ptx))
    shared = re.findall(r"cp\.async\.bulk\.tensor\S*", gemm("two pairs").ptx)
    assert any(".multicast::cluster" in load for load in shared)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_streams_past_leaves_l2_first(name: str):
    """The loads' L2 policies, in order: none of A, which stays, and evict-first of B."""
    ptx = gemm(name).ptx
    registers = re.findall(r"cp\.async\.bulk\.tensor\S* .*, (%rd\d+);", ptx)
    policies = [re.findall(rf"mov\.b64 \s*{register}, (\d+);", ptx) for register in registers]
    assert policies == [["0"], [str(EVICT_FIRST)]]


@pytest.mark.parametrize("name", CONFIGS)
def test_only_the_load_warp_keeps_pace(name: str):
    """A step and the steps that a cluster does not make, and no more atomics."""
    counted = r"\s(red\.\S+)"
    assert gemm(name).ptx_of(counted) == ["red.relaxed.gpu.global.add.s32"] * 2
    unpaced = ForwardKey(replace(CONFIGS[name], pace=0))
    assert not cubin.kernel(unpaced, "GemmSm100").ptx_of(counted)


def test_stages_fill_shared_memory():
    """The stages that CONFIGS have are the most that fit."""
    for config, pair in ((PAIR, 2), (SINGLE, 1)):
        stage = (config.tile_m + config.tile_n) * config.tile_k * 2 // pair
        barriers = 2048  # barriers, the address of tensor memory, and the alignment of the ring
        assert config.stages * stage + barriers <= SHARED_MEMORY < (config.stages + 1) * stage + barriers


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tile_m": 192, "stages": 2}, "192 x 256"),
        ({"tile_n": 96}, "256 x 96"),
        ({"cluster_m": 1}, "cluster_m 1"),
    ],
)
def test_configs_that_no_kernel_has_are_refused(change: dict, named: str):
    from cute_lce.kernels.epilogues.statistics import ForwardEpilogue
    from cute_lce.kernels.gemm_sm100 import GemmSm100

    with pytest.raises(ValueError, match=named):
        GemmSm100(replace(PAIR, **change), ForwardEpilogue(256, 1))


def slab_loop(sass: str) -> tuple[Counter, int]:
    """(opcode -> instructions, those under the mask's predicate) of the epilogue's loop over slabs.

    Without the block that the loop jumps over where no lane's target is in the tile.
    """
    found = (
        re.match(r"\s+/\*([0-9a-f]{4,5})\*/\s+(@!?U?P\d )?\s*(\S+)(.*)", line) for line in sass.split("\n")
    )
    lines = [(int(m[1], 16), m[2], m[3], m[4]) for m in found if m]
    load = next(at for at, _, op, _ in lines if op.startswith("LDTM"))
    jumps = [
        (at, int(t[1], 16))
        for at, _, op, rest in lines
        if op == "BRA" or op == "BRA.U"
        if (t := re.search(r"0x(\w+)", rest))
    ]
    start, end = next((to, at) for at, to in jumps if at > load and to <= load)
    store = next(at for at, _, op, _ in lines if op.startswith("STG") and at > load)
    skip = max((at, to) for at, to in jumps if load < at < store < to)
    body = [line for line in lines if start <= line[0] <= end and not skip[0] < line[0] < skip[1]]
    mask = {guard for at, guard, op, _ in body if op == "FSEL" and guard}
    return Counter(op.split(".")[0] for _, _, op, _ in body), sum(guard in mask for _, guard, _, _ in body)


def test_exponentials_of_a_slab():
    counts, _ = slab_loop(gemm("pair").sass)
    assert counts["LDTM"] == 1
    assert counts["MUFU"] == 64 + 1  # the columns, and a rescaling
    assert counts["FADD2"] >= 32  # packed
    assert sum(counts.values()) < 8 * counts["MUFU"]  # the scheduler issues them in an exponential's shadow


if __name__ == "__main__":
    for name in CONFIGS:
        kernel = gemm(name)
        counts, masked = slab_loop(kernel.sass)
        print(name, kernel.usage, f"slab: {sum(counts.values())} instructions, {masked} of them mask,")
        print("   ", dict(counts.most_common()))
