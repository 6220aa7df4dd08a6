"""Pacing, which both mainloops share: it changes speed alone, with clusters that cannot run as well."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_lce.arch import architecture
from tests.emulated.forward import BF16, check, forward
from tests.numerics import random_case

pytestmark = pytest.mark.usefixtures("poisoned_empty")

PINGPONG, _ = architecture("sm_90a").configs
SHARED = replace(PINGPONG, tile_m=256, pingpong=False, stages=4)
PAIR, SINGLE = architecture("sm_100a").configs
# With narrow tiles, two stages and a step each k tile.
CONFIGS = {
    "sm_90a, pingpong": replace(PINGPONG, tile_n=64, stages=2, pace=1),
    "sm_90a, shared": replace(SHARED, tile_m=128, tile_n=64, stages=2, pace=1),
    "sm_100a, pair": replace(PAIR, tile_n=64, stages=2, pace=1),
    "sm_100a, two pairs": replace(PAIR, cluster_m=4, tile_n=64, stages=2, pace=1),
    "sm_100a, single": replace(SINGLE, tile_n=64, stages=2, pace=1),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("paced", [False, True])
def test_pace(paced: bool, name: str):
    """Clusters of different loads; those with fewer runs count the steps that they do not make."""
    case = random_case(300, 200, 5 * 64, BF16)
    config = CONFIGS[name]
    run = forward(case, config, sms=4 * config.cluster_m, window=64, paced=paced, seed=3)
    assert run.plan.sweep.gemm.clusters == 4
    check(case, run)
    counted = sum(count for opcode, count in run.counts.instructions.items() if opcode.startswith("red."))
    assert bool(counted) == paced


@pytest.mark.parametrize("name", [name for name in CONFIGS if "pingpong" not in name])
def test_clusters_that_are_not_resident_do_not_stop_the_others(name: str):
    """Another kernel may hold their SMs: clusters wait a bounded time for progress that cannot come."""
    case = random_case(300, 72, 4 * 64, BF16)
    config = CONFIGS[name]
    sms = 4 * config.cluster_m
    run = forward(case, config, sms=sms, window=64, paced=True, resident=config.cluster_m)
    assert run.plan.sweep.gemm.clusters == 4
    check(case, run)
