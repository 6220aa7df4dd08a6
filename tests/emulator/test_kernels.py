"""Kernels of our own, compiled by CuTe DSL for sm_90a and sm_100a, run on the emulator over schedules and
compared with float64."""

from __future__ import annotations

import time
from collections.abc import Iterable

import cutlass  # pyright: ignore[reportMissingImports]
import pytest
import torch

from tests import emulator
from tests.emulator import kernels_sm100, mutate
from tests.emulator.hardware import kernels_sm90
from tests.emulator.mutation_kernels import KERNELS

SEEDS = range(4)
BF16, F16 = cutlass.BFloat16, cutlass.Float16
E4M3, E5M2 = cutlass.Float8E4M3FN, cutlass.Float8E5M2
TORCH = {
    BF16: torch.bfloat16,
    F16: torch.float16,
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    cutlass.Float32: torch.float32,
}


def operand(rows: int, k: int, dtype, major: str) -> torch.Tensor:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows + k)).to(TORCH[dtype])
    return x if major == "k" else x.T.contiguous().T


def check_gemm(compiled, shape, dtype=BF16, majors="kk", seeds: Iterable[int] = SEEDS):
    bound = emulator.build(compiled)
    m, n, k = shape
    a, b = operand(m, k, dtype, majors[0]), operand(n, k, dtype, majors[1])
    reference = a.double() @ b.double().T
    for seed in seeds:
        c = torch.full((m, n), float("nan"))
        result = emulator.run(bound, a, b, c, seed=seed)
        # The products are exact in fp32; only the sums of k of them round.
        error = (c.double() - reference).norm() / reference.norm()
        assert error < 4e-7, f"seed {seed}: relative error {error}"
        assert not result.warnings
    return result


@pytest.mark.parametrize(
    ("tile", "cluster", "majors", "shape"),
    [
        ((64, 64, 64), (1, 1), "kk", (128, 128, 120)),
        ((64, 64, 32), (1, 1), "kk", (64, 64, 120)),
        ((64, 64, 16), (1, 1), "kk", (64, 64, 56)),
        ((64, 64, 64), (1, 1), "mk", (64, 64, 72)),
        ((64, 64, 64), (1, 1), "km", (64, 64, 72)),
        ((64, 128, 64), (1, 1), "mm", (64, 128, 72)),
        ((64, 32, 64), (1, 1), "km", (64, 32, 72)),
        ((64, 16, 64), (1, 1), "km", (64, 16, 72)),
        ((64, 256, 64), (1, 1), "kk", (64, 256, 64)),
        ((64, 64, 64), (2, 1), "kk", (128, 64, 264)),
        ((64, 64, 64), (2, 2), "km", (128, 128, 264)),
        ((64, 48, 64), (2, 1), "kk", (128, 96, 136)),
        ((64, 176, 64), (2, 1), "kk", (128, 176, 136)),
        ((64, 112, 64), (2, 1), "km", (128, 112, 72)),
        ((64, 80, 64), (2, 1), "mm", (128, 80, 72)),
    ],
    ids=str,
)
def test_wgmma_gemm(tile, cluster, majors, shape, tmp_path):
    compiled = kernels_sm90.compile_gemm(BF16, tile, cluster, majors[0], majors[1], str(tmp_path))
    check_gemm(compiled, shape, BF16, majors)


@pytest.mark.parametrize(
    ("config", "majors", "shape"),
    [
        ({}, "kk", (256, 192, 136)),
        ({"tile_n": 256, "repeat": 128}, "kk", (128, 512, 64)),
        ({"tile_n": 16, "repeat": 16}, "kk", (128, 64, 64)),
        ({}, "mk", (128, 128, 72)),
        ({}, "km", (128, 128, 72)),
        ({}, "mm", (128, 128, 72)),
        ({"cluster_n": 2}, "kk", (128, 384, 136)),
        ({"pair": True}, "kk", (512, 192, 136)),
        ({"pair": True, "tile_n": 256, "repeat": 64}, "kk", (256, 512, 64)),
        ({"pair": True, "tile_n": 128}, "mk", (256, 128, 72)),
        ({"pair": True, "tile_n": 128}, "km", (256, 128, 72)),
        ({"pair": True, "tile_n": 128}, "mm", (256, 128, 72)),
        ({"pair": True, "cluster_n": 2}, "kk", (256, 384, 136)),
        ({"tile_n": 144, "repeat": 16}, "kk", (128, 288, 72)),
        ({"pair": True, "tile_n": 224}, "mm", (256, 448, 72)),
        ({"pair": True, "tile_n": 160, "cluster_n": 2}, "kk", (256, 320, 72)),
        ({"tile_n": 48, "repeat": 1, "halves": True}, "kk", (128, 144, 72)),
        ({"tile_n": 80, "repeat": 2, "halves": True}, "mm", (128, 160, 72)),
        ({"pair": True, "tile_n": 96, "repeat": 4, "halves": True}, "kk", (256, 192, 136)),
        ({"tile_n": 256, "repeat": 16, "halves": True}, "kk", (128, 256, 64)),
    ],
    ids=str,
)
def test_tcgen05_gemm(config, majors, shape, tmp_path):
    compiled = kernels_sm100.compile_gemm(
        BF16, a_major=majors[0], b_major=majors[1], folder=str(tmp_path), **config
    )
    check_gemm(compiled, shape, BF16, majors)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("pair", [False, True])
def test_tcgen05_gemm_of_8_bits(dtype, pair, tmp_path):
    compiled = kernels_sm100.compile_gemm(dtype, tile_k=128, pair=pair, folder=str(tmp_path))
    check_gemm(compiled, (256, 128, 272), dtype, seeds=range(3))


@pytest.mark.parametrize("pair", [False, True])
def test_without_relinquish_two_ctas_of_an_sm_take_turns(pair, tmp_path):
    """A permit that is kept until the CTA ends costs the overlap of an SM's CTAs and nothing else."""
    bound = emulator.build(kernels_sm100.compile_gemm(BF16, pair=pair, folder=str(tmp_path)))
    a, b = operand(512, 72, BF16, "k"), operand(128, 72, BF16, "k")
    reference = a.double() @ b.double().T
    (removed,) = [m for m in mutate.mutations(bound.ptx) if "relinquish" in m.before]
    original = bound.ptx
    for ptx in (original, mutate.apply(original, removed)):
        bound.replace_ptx(ptx)
        for seed in SEEDS:
            c = torch.full((512, 128), float("nan"))
            emulator.run(bound, a, b, c, seed=seed, per_sm=2)
            assert (c.double() - reference).norm() < 4e-7 * reference.norm()


@pytest.mark.parametrize("repeat", [1, 2, 4, 8, 16, 32, 64, 128])
def test_tmem_load_of_every_repeat(repeat, tmp_path):
    compiled = kernels_sm100.compile_gemm(F16, tile_n=128, repeat=repeat, folder=str(tmp_path))
    result = check_gemm(compiled, (128, 128, 64), F16, seeds=(0,))
    assert result.instructions[f"tcgen05.ld.sync.aligned.32x32b.x{repeat}.b32"] == 4 * 128 // repeat


@pytest.mark.parametrize(
    ("dtype", "tile"), [(BF16, (32, 64)), (BF16, (64, 32)), (cutlass.Float32, (32, 32))], ids=str
)
@pytest.mark.parametrize("reduce", [False, True])
def test_tma_store_and_reduce_add(dtype, tile, reduce, tmp_path):
    compiled = emulator.build(kernels_sm90.compile_scale(dtype, tile, reduce, str(tmp_path)))
    torch.manual_seed(0)
    x, before = (torch.randn(70, 104).to(TORCH[dtype]) for _ in range(2))
    for seed in SEEDS:
        out = before.clone()
        result = emulator.run(compiled, x, out, seed=seed)
        assert torch.equal(out, (before.float() + 2 * x.float()).to(x.dtype) if reduce else 2 * x)
        assert result.counters["bytes stored by bulk copies"] == x.numel() * x.element_size()


def test_strided_tensors_keep_their_gaps(tmp_path):
    compiled = emulator.build(kernels_sm90.compile_scale(BF16, (32, 64), False, str(tmp_path)))
    x = torch.randn(40, 160).bfloat16()
    whole = torch.full((40, 192), float("nan"), dtype=torch.bfloat16)
    emulator.run(compiled, x[:, :104], whole[:, 64:168])
    assert torch.equal(whole[:, 64:168], 2 * x[:, :104])
    assert whole[:, :64].isnan().all()
    assert whole[:, 168:].isnan().all()


def test_a_seed_reproduces_its_run(tmp_path):
    compiled = emulator.build(kernels_sm90.compile_row_sum(str(tmp_path)))
    x = torch.randn(6, 256)
    counts = []
    for seed in (5, 5):
        out = torch.full((6,), float("nan"))
        counts.append(emulator.run(compiled, x, out, seed=seed).by_warp_opcode)
        assert torch.allclose(out, x.sum(1), atol=1e-4)
    assert counts[0] == counts[1]


def test_launches_and_counts_are_reported(tmp_path):
    compiled = kernels_sm90.compile_gemm(BF16, (64, 64, 64), (2, 1), folder=str(tmp_path))
    a, b, c = operand(128, 64, BF16, "k"), operand(64, 64, BF16, "k"), torch.empty(128, 64)
    result = emulator.run(compiled, a, b, c, seed=1)
    (launch,) = result.launches
    assert (launch.grid, launch.block, launch.cluster) == ((2, 1, 1), (160, 1, 1), (2, 1, 1))
    # Each CTA loads its A and half of B, and receives both halves.
    assert result.counters["bytes loaded by bulk copies"] == 2 * 64 * 64 * 2 + 64 * 64 * 2
    assert result.counters["bytes written to shared memory by bulk copies"] == 2 * 2 * 64 * 64 * 2
    assert result.instructions["wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"] == 2 * 4 * 4
    assert result.counters["mbarrier waits"] > 0


@pytest.mark.timing
def test_speed(tmp_path):
    """At least 25,000 warp instructions a second on one core; the best of three, since machines are
    shared."""
    compiled = emulator.build(kernels_sm90.compile_scale(cutlass.Float32, (32, 32), False, str(tmp_path)))
    x = torch.randn(320, 104)
    rates = []
    for seed in SEEDS[:3]:
        out = torch.empty_like(x)
        start = time.process_time()
        rates.append(emulator.run(compiled, x, out, seed=seed).total / (time.process_time() - start))
    assert max(rates) > 25_000, rates


def test_memory_behind_addresses():
    """Tensors that torch created under known_allocations may be reached through their addresses."""
    text = """.version 8.7
    .target sm_90a
    .address_size 64
    .visible .entry k(.param .u64 out) { .reg .b64 %d<2>; .reg .b32 %r<2>;
    ld.param.u64 %d0, [out]; mov.u32 %r0, 7; st.global.b32 [%d0], %r0; ret; }"""
    with emulator.known_allocations():
        out = torch.zeros(4, dtype=torch.int32)
        emulator.run_ptx(text, out.data_ptr())
    assert out.tolist() == [7, 0, 0, 0]
    with pytest.raises(emulator.Fault, match="global-bounds"):
        emulator.run_ptx(text, out.data_ptr())


def test_a_function_without_ptx_is_refused():
    with pytest.raises(emulator.EmulatorError, match="--keep-ptx"):
        emulator.build(kernels_sm90.compile_row_sum())


@pytest.mark.emulator_full
@pytest.mark.parametrize("seed", range(4, 64, 3))
@pytest.mark.parametrize("subject", KERNELS, ids=lambda s: s.name)
def test_many_schedules(subject, seed, tmp_path):
    """The kernels that are mutated, unmutated: no schedule finds fault with them."""
    emulated = subject.build(str(tmp_path))
    for s in range(seed, seed + 3):
        assert subject.check(emulated, s)
