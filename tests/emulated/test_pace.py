"""Pacing, which both mainloops share: it changes speed alone, with clusters that cannot run as well."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_lce.arch import architecture
from cute_lce.kernels.gemm import PATIENCE
from tests.emulated.forward import BF16, check, forward
from tests.numerics import random_case

pytestmark = pytest.mark.usefixtures("poisoned_empty")

HOPPER, PAIR = (
    replace(architecture(name).token_configs[0], tile_n=64, stages=2, pace=1)
    for name in ("sm_90a", "sm_100a")
)
# With narrow tiles, two stages and a step each k tile, or every other or fourth.
CONFIGS = {
    "sm_90a, pingpong": HOPPER,
    "sm_90a, side by side": replace(HOPPER, cluster_m=1, cluster_n=2),
    "sm_90a, every other k tile": replace(HOPPER, pace=2),
    "sm_90a, every fourth k tile": replace(HOPPER, pace=4),
    "sm_90a, shared": replace(HOPPER, pingpong=False),
    "sm_100a, pair": PAIR,
    "sm_100a, two pairs": replace(PAIR, cluster_m=4),
    "sm_100a, single": replace(PAIR, tile_m=128, cluster_m=1),
}
# Also tested without pacing here; the others in the long sweep.
NOT_PACED = "sm_90a, pingpong", "sm_100a, pair"


@pytest.mark.parametrize(
    ("name", "paced"),
    [
        pytest.param(name, paced, marks=[] if paced or name in NOT_PACED else pytest.mark.emulator_full)
        for name in CONFIGS
        for paced in (False, True)
    ],
)
def test_pace(paced: bool, name: str):
    """Clusters of different loads; those with fewer runs count the steps that they do not make."""
    case = random_case(140, 200, 5 * 256, BF16)
    config = CONFIGS[name]
    run = forward(case, config, sms=4 * config.cluster_size, window=256, paced=paced, seed=3)
    assert run.plan.gemm.clusters == 4
    check(case, run)
    counted = sum(count for opcode, count in run.counts.instructions.items() if opcode.startswith("red."))
    assert bool(counted) == paced


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "sm_90a, pingpong"])
def test_clusters_that_are_not_resident_do_not_stop_the_others(name: str):
    """Another kernel may hold their SMs: clusters wait a bounded time for progress that cannot come."""
    case = random_case(140, 72, 4 * 256, BF16)
    config = CONFIGS[name]
    sms = 4 * config.cluster_size
    run = forward(case, config, sms=sms, window=256, paced=True, resident=config.cluster_size)
    assert run.plan.gemm.clusters == 4
    check(case, run)
    # Even of tiles of two k tiles.
    looks = sum(count for opcode, count in run.counts.instructions.items() if "ld.relaxed" in opcode)
    assert looks > PATIENCE
