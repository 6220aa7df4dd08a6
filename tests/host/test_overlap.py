"""dweight's GEMM beside a collective: which part leaves SMs, and when that is no faster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cute_lce.arch import Gpu
from cute_lce.arguments import KEPT_TILE
from cute_lce.parallel.collectives import DEFAULT_CTAS, ctas_of, is_local
from cute_lce.plan import backward, overlap
from cute_lce.plan.problem import MIB, Collective, Limits, Problem

GPU = Gpu("sm_90a", 132)


def divided(n: int, d: int, columns: int, seconds: float, sms: int):
    problem = Problem(n, d, columns, False, True, True)
    plan = backward.plan(GPU, problem, columns, Limits(0, 4096 * MIB))
    stripe = plan.stripes[-1]
    return stripe, overlap.divide(GPU, plan.dweight, problem, stripe, Collective(seconds, sms))


@pytest.mark.parametrize(("n", "d", "V"), [(8192, 4096, 131072), (2048, 2880, 201088), (1100, 3584, 152064)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("sms", [16, 24, 33])
def test_the_parts_are_the_whole(n: int, d: int, V: int, ranks: int, sms: int):
    seconds = overlap.sum_seconds(n, d, 2, ranks, sms, scatters=False)
    stripe, parts = divided(n, d, V // ranks, seconds, sms)
    assert parts is not None
    early, late = parts
    assert late is not None
    assert (early.first, late.first) == (stripe.first, stripe.first + early.columns)
    assert early.columns + late.columns == stripe.columns
    # Operands begin at multiples of 16 bytes.
    assert early.columns % 8 == 0
    assert 2 * early.dweight.clusters <= GPU.sms - sms
    assert late.dweight.clusters == stripe.dweight.clusters
    # What a longer collective takes leaves less behind it.
    _, longer = divided(n, d, V // ranks, 2 * seconds, sms)
    assert longer is not None
    assert longer[0].columns > early.columns


def test_a_collective_longer_than_the_gemm():
    stripe, parts = divided(2048, 4096, 16384, 0.04, 24)
    assert parts is not None
    assert parts[0].columns == stripe.columns
    assert parts[1] is None


@pytest.mark.parametrize(
    ("gpu", "n", "d", "V"),
    [
        (GPU, 8192, 4096, 131072),
        (GPU, 2048, 2048, 50257),
        (GPU, 9817, 3584, 152064),
        # Where larger tiles, without registers for spare warps, would take the fewest clocks by themselves.
        (GPU._replace(model=1), 8192, 3072, 128256),
        (GPU._replace(model=1), 4096, 2304, 256000),
    ],
)
def test_pieces_are_the_whole(gpu: Gpu, n: int, d: int, V: int):
    """Each begins at whole units and tiles, and all but the last fill rounds of clusters."""
    problem = Problem(n, d, V, keeps_logits=True, overwrites=True)
    plan = backward.plan(gpu, problem, V, Limits(0, 1 << 40))
    found = overlap.pieces(gpu, plan.dweight, problem, V)
    assert 2 <= len(found) <= overlap.MOST_PIECES
    assert [piece.first for piece in found] == [
        sum(each.columns for each in found[:i]) for i in range(len(found))
    ]
    assert sum(piece.columns for piece in found) == V
    assert all(piece.first % KEPT_TILE == 0 for piece in found)
    clusters = GPU.sms // plan.dweight.cluster_size
    across = -(-d // plan.dweight.cluster_columns)
    for piece in found[:-1]:
        tiles = -(-piece.columns // plan.dweight.cluster_rows) * across
        assert piece.dweight.clusters == min(clusters, tiles)
        assert tiles % clusters == 0 or tiles + across > -(-tiles // clusters) * clusters


@pytest.mark.parametrize(("n", "d", "V"), [(16, 4096, 8192), (300, 512, 2000), (1, 64, 128)])
def test_short_calls_have_no_pieces(n: int, d: int, V: int):
    problem = Problem(n, d, V, keeps_logits=True, overwrites=True)
    plan = backward.plan(GPU, problem, V, Limits(0, 1 << 40))
    assert not overlap.pieces(GPU, plan.dweight, problem, V)


def test_tiles_without_spare_registers_have_no_pieces():
    problem = Problem(8192, 2048, 131072, keeps_logits=True, overwrites=True)
    for config in GPU.row.dweight_configs:
        assert bool(overlap.pieces(GPU, config, problem, 131072)) == config.has_spare_warps
        assert config.has_spare_warps == (config.accumulator_registers <= 128)


@pytest.mark.parametrize(
    ("seconds", "sms"),
    [(0.0, 24), (4e-4, 0), (4e-4, 131), (4e-4, 1000)],
    ids=["none", "no SM", "all", "more"],
)
def test_what_cannot_be_divided(seconds: float, sms: int):
    assert divided(2048, 4096, 65536, seconds, sms)[1] is None


def test_a_gemm_of_few_tiles_stays_whole():
    stripe, parts = divided(64, 256, 1000, 4e-7, 24)
    assert parts == (stripe, None)


def test_bytes_of_a_ring():
    assert overlap.sum_bytes(8192, 4096, 2, 2, scatters=False) == 8192 * 4096 * 3
    assert overlap.sum_bytes(8192, 4096, 2, 4, scatters=True) == 8192 * 4096 * 3
    # Of float32 as many as an all-reduce.
    assert overlap.sum_bytes(8192, 4096, 4, 2, scatters=False) == 8192 * 4096 * 4
    assert overlap.sum_bytes(8192, 4096, 2, 1, scatters=False) == 0
    # The sum of a part, its rounding and its gather follow one another.
    seconds = overlap.sum_seconds(8192, 4096, 2, 4, 24, scatters=False)
    sent = overlap.sum_bytes(8192, 4096, 2, 4, scatters=False) / overlap.WIRE
    assert sent + 3 * overlap.START < seconds < 1.2 * sent
    assert overlap.sum_seconds(8192, 4096, 2, 4, 24, scatters=True) < seconds
    # Few SMs send less.
    assert overlap.sum_seconds(8192, 4096, 2, 4, 8, scatters=False) > 1.6 * seconds


def group_of(name: str, max_ctas: int) -> Any:
    backend = SimpleNamespace(
        name=lambda: name, options=SimpleNamespace(config=SimpleNamespace(max_ctas=max_ctas))
    )
    return SimpleNamespace(_get_backend=lambda device: backend)


def test_sms_of_a_collective(monkeypatch):
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    gpu = torch.device("cuda", 0)
    # What was not given is negative.
    assert ctas_of(group_of("nccl", -(2**31)), gpu) == DEFAULT_CTAS
    assert ctas_of(group_of("nccl", 8), gpu) == 8
    assert ctas_of(group_of("gloo", 8), gpu) == 0
    assert ctas_of(group_of("nccl", 8), torch.device("cpu")) == 0
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    assert ctas_of(group_of("nccl", 8), gpu) == 4


@pytest.mark.parametrize(
    ("per_host", "ranks", "local"),
    [
        ("", [0, 9], True),
        ("8", [0, 7], True),
        ("8", [8, 12], True),
        ("8", [4, 8], False),
        ("no", [0, 9], True),
    ],
)
def test_hosts_of_a_group(per_host: str, ranks: list[int], local: bool, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", per_host)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: ranks)
    group: Any = None
    assert is_local(group) == local


def test_hosts_send_less_to_each_other():
    near, far = (
        overlap.sum_seconds(8192, 4096, 2, 4, 24, scatters=False, is_local=local) for local in (True, False)
    )
    assert far > 4 * near
