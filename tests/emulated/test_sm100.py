"""The Blackwell forward, executed: its PTX on the emulator, launched by the host code, against float64.

python -m tests.emulated.test_sm100        prints the instruction counts that docs/kernels.md quotes
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from cute_lce.arch import KernelConfig, architecture
from cute_lce.plan.kernels import ForwardKey
from tests import emulator
from tests.emulated.forward import (
    BF16,
    FP16,
    Run,
    check,
    emulated,
    forward,
    ignoring,
    last_column,
    offset,
    reference,
    rows,
    rows_of,
    scaled,
)
from tests.emulator import forward_kernels, mutate
from tests.numerics import assert_close, random_case

NARROWEST, THREE_SLABS, *_, PAIR = architecture("sm_100a").token_configs
SINGLE = replace(PAIR, tile_m=128, cluster_m=1, stages=4)
CONFIGS = {
    "pair": PAIR,
    "single": SINGLE,
    "two pairs share B": replace(PAIR, cluster_m=4, stages=2),
    "pairs share A and B": replace(PAIR, cluster_m=4, cluster_n=2, stages=2),
    "singles share A and B": replace(SINGLE, cluster_m=2, cluster_n=2, stages=2),
    "tiles of 64 tokens": NARROWEST,
    "tiles of 96 tokens": THREE_SLABS,
    "two accumulators of 192 columns": replace(PAIR, tile_n=192, stages=3),
    "tiles of 224 tokens": replace(PAIR, tile_n=224),
}
HOPPER = architecture("sm_90a").token_configs[-1]
# Windows of a multiple of a tile, which differ in nothing but their number.
LONG = [("pair", 512), ("single", 256), ("single", 768)]


@pytest.fixture(autouse=True)
def _poison(poisoned_empty):
    pass


CORNERS = {
    "ragged": lambda: random_case(300, 72, 601, BF16),
    "ragged, fp16": lambda: random_case(300, 72, 601, FP16),
    "whole tiles": lambda: random_case(256, 64, 512, BF16),
    "one token": lambda: random_case(1, 64, 257, BF16),
    "one token above a tile": lambda: random_case(257, 64, 40, BF16),
    "one class": lambda: random_case(130, 64, 1, BF16),
    "V below a tile": lambda: random_case(129, 40, 7, BF16),
    "V one above a tile": lambda: random_case(40, 64, 257, BF16),
    "d of one 16-byte row": lambda: random_case(64, 8, 300, BF16),
    "d padded": lambda: random_case(64, 37, 300, BF16),
    "d of many k tiles": lambda: random_case(64, 1000, 300, BF16),
    "ignored rows": lambda: ignoring(random_case(140, 64, 300, BF16)),
    "all ignored": lambda: replace(random_case(140, 64, 300, BF16), target=torch.full((140,), -100)),
    "targets in the last column": lambda: last_column(random_case(140, 64, 513, BF16)),
    "int32 targets": lambda: replace(
        random_case(40, 64, 300, BF16), target=random_case(40, 64, 300, BF16).target.int()
    ),
    "logits of +-1e4": lambda: scaled(random_case(140, 64, 600, BF16), 1e4),
    "logits of +-1e4, fp16": lambda: scaled(random_case(140, 64, 600, FP16, scale=8), 1e4),
    "logits of +-60": lambda: scaled(random_case(140, 64, 600, BF16), 60),
    "common offset of 300": lambda: offset(random_case(140, 64, 600, BF16), 300),
    "common offset of -10000, fp16": lambda: offset(random_case(140, 64, 600, FP16), -10000),
}


@functools.cache
def corner_of(corner: str, config: str) -> Run:
    return forward(CORNERS[corner](), CONFIGS[config], seed=len(corner))


@pytest.mark.parametrize("config", ["pair", pytest.param("single", marks=pytest.mark.emulator_full)])
@pytest.mark.parametrize("corner", CORNERS)
def test_corner(corner: str, config: str):
    check(CORNERS[corner](), corner_of(corner, config))


# Not chosen by plans, and with no multicast that "pairs share A and B" has not.
SHARED = ("two pairs share B", "singles share A and B")


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(name, marks=pytest.mark.emulator_full if name in SHARED else [])
        for name in CONFIGS
        if name not in ("pair", "single")
    ],
)
def test_cluster(config: str):
    case = ignoring(random_case(530, 72, 600, BF16))
    check(case, forward(case, CONFIGS[config], sms=8, seed=1))


@pytest.mark.parametrize(
    ("config", "window"),
    [
        pytest.param(config, window, marks=pytest.mark.emulator_full if (config, window) in LONG else [])
        for config in ("pair", "single")
        for window in (256, 512, 768, 100_000)
    ],
)
def test_windows(config: str, window: int):
    case = random_case(260, 64, 1100, BF16)
    check(case, forward(case, CONFIGS[config], window=window, seed=window % 7))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reduction(reduction: str):
    case = ignoring(random_case(140, 64, 300, BF16))
    run = forward(case, PAIR, reduction=reduction)
    losses, baseline = (getattr(reference(case, t)[0], reduction)() for t in (torch.float64, torch.float32))
    share = 140 / int(run.num_valid) if reduction == "mean" else 1
    assert_close("loss", run.loss, losses * share, baseline * share)


@pytest.mark.parametrize("config", ["pair", "single"])
def test_minus_infinity_and_nan(config: str):
    """Columns of -inf count as nothing; a nan stays in its row."""
    case = random_case(140, 64, 600, BF16)
    hidden, weight = case.input.clone(), case.linear_weight.clone()
    hidden[:, 0] = 1
    weight[3::2, 0] = -torch.inf
    weight[256:512, 0] = -torch.inf  # a whole tile
    target = (case.target // 64) * 2 % 3  # columns 0 and 2, which are finite
    clean = replace(case, input=hidden, linear_weight=weight, target=target)
    poisoned = hidden.clone()
    poisoned[[5, 77, 139], 7] = torch.nan
    run = forward(replace(clean, input=poisoned), CONFIGS[config], seed=3)
    sick = torch.zeros(140, dtype=torch.bool)
    sick[[5, 77, 139]] = True
    assert run.loss[sick].isnan().all()
    check(rows(clean, ~sick), rows_of(run, ~sick))


def test_out_of_range_target_is_nan_and_touches_nothing():
    case = random_case(140, 64, 300, BF16)
    target = case.target.clone()
    target[[0, 139]] = torch.tensor([300, -1])
    run = forward(replace(case, target=target), PAIR)
    assert run.loss[[0, 139]].isnan().all()
    assert run.loss[1:139].isfinite().all()


@pytest.mark.parametrize("name", ["pair", "single"])
def test_launch(name: str):
    config = CONFIGS[name]
    launched = forward(random_case(1, 64, 300, BF16), config).counts.launches[0]
    assert launched.block == (192, 1, 1)
    assert launched.cluster == (config.cluster_m, config.cluster_n, 1)
    assert launched.shared <= config.shared_memory <= config.row.shared_memory


SEEDED = {
    "pair": PAIR,
    "pair, narrow and shallow": replace(PAIR, tile_n=64, stages=2),
    "single, narrow and shallow": replace(SINGLE, tile_n=64, stages=2),
}


@pytest.mark.parametrize("name", SEEDED)
@pytest.mark.parametrize(
    "seed",
    [*range(2), *(pytest.param(seed, marks=pytest.mark.emulator_full) for seed in range(2, 20))],
)
def test_schedules(name: str, seed: int):
    """20 orders of warps and engines, each with 3 tiles or more, so that both rings wrap."""
    config = SEEDED[name]
    case = ignoring(random_case(140, 136, 2 * config.tile_m + 8, BF16, seed))
    check(case, forward(case, config, sms=2, window=100_000, paced=seed % 2 == 1, seed=seed))


@pytest.mark.emulator_full
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(40))
def test_many_schedules(config: str, seed: int):
    case = ignoring(random_case(700, 200 + 8 * seed, 1100 + 31 * seed, (BF16, FP16)[seed % 2], seed))
    window = (0, 512, 100_000)[seed % 3]
    check(case, forward(case, CONFIGS[config], sms=8, window=window, paced=seed % 4 > 1, seed=seed))


# The others in the long sweep: with float64 both architectures' are compared in each.
LIKE_HOPPER = (
    "ragged",
    "ragged, fp16",
    "one token",
    "ignored rows",
    "logits of +-1e4",
    "common offset of 300",
)


@pytest.mark.parametrize(
    "corner",
    [pytest.param(c, marks=[] if c in LIKE_HOPPER else pytest.mark.emulator_full) for c in CORNERS],
)
def test_statistics_equal_hopper(corner: str):
    """Two mainloops, one mathematics: what they give differs by the order of summation alone."""
    case = CORNERS[corner]()
    ours, hopper = corner_of(corner, "pair"), forward(case, HOPPER)
    # Under an offset, of two roundings or so of the logits, by which sums of their exponentials differ.
    rounding = float(hopper.row_max.abs().max()) * 2**-23 if "offset" in corner else 0
    tolerance = max(1e-5, rounding)
    for name in ("row_max", "row_sum", "loss"):
        a, b = getattr(ours, name), getattr(hopper, name)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()), msg=name)
    assert torch.equal(ours.num_valid, hopper.num_valid)


# ----------------------------------------------------------------------------------------------------------
# Mutations; all of them are in tests/emulator/test_mutations.py

NARROW = forward_kernels.configs()


def test_mutations():
    """Those of a tile's path from TMA to the epilogue, each found by the first schedule."""
    subject = next(s for s in forward_kernels.subjects() if s.name.endswith("single"))
    bound = emulated(ForwardKey(NARROW["single"]))
    assert subject.check(bound, 0), "the kernel itself fails"
    mine = subject.mutates(bound.ptx)
    lines = bound.ptx.split("\n")
    mma, load = (next(i for i, t in enumerate(lines, 1) if op in t) for op in ("tcgen05.mma", "tcgen05.ld"))

    def on_the_path(m: mutate.Mutation) -> bool:
        wait = "try_wait" in m.before and (mma - 60 < m.line < mma or load - 30 < m.line < load)
        return (
            mine(m)
            and not subject.reason(m)
            and (
                wait or any(op in m.before for op in ("wait::ld", "tcgen05.commit", "expect_tx", "bar.sync"))
            )
        )

    verdicts = mutate.survey(bound, subject.check, [0], on_the_path)
    assert len(verdicts) >= 10
    assert not [v.mutation for v in verdicts if not v.found]


def test_barriers_are_published_before_the_other_cta_uses_them():
    """One of the two fences behind the barriers' initialisation may go, but not both."""
    config = NARROW["pair"]
    bound = emulated(ForwardKey(config))
    original = bound.ptx
    fence = "fence.mbarrier_init.release.cluster;"
    assert original.count(fence) == 2
    try:
        bound.replace_ptx(original.replace(fence, ""))
        with pytest.raises(emulator.Fault) as fault:
            forward(random_case(140, 136, 136, BF16), config, sms=2, program=bound)
    finally:
        bound.replace_ptx(original)
    assert fault.value.code == "mbarrier-init"


def budget(config: KernelConfig, d: int = 128) -> dict[str, tuple[Counter, int]]:
    """Instructions of a warp by role, of one tile for the epilogue and of one k tile for the others.

    (opcode -> executed, sum), from the difference of runs over 2 and 4 tiles of 256 columns.
    """
    few, many = (
        forward(
            replace(random_case(256, d, V, BF16), target=torch.full((256,), -100)),
            config,
            sms=config.cluster_m,
            window=100_000,
        ).counts.by_warp_opcode
        for V in (512, 1024)
    )
    result = {}
    # Counts are sums over CTAs: two of the pair, of which one issues MMAs, or one with twice the tiles.
    issuing = 1 if config.tile_m == 256 else 2
    for role, warp, parts in (
        ("epilogue", 0, 4),
        ("mma", 4, 2 * issuing * d // 64),
        ("load", 5, 4 * d // 64),
    ):
        counts = Counter({k: (v - few[warp][k]) / parts for k, v in many[warp].items() if v != few[warp][k]})
        result[role] = counts, sum(counts.values())
    return result


@pytest.mark.parametrize("name", ["pair", "single"])
def test_epilogue_hides_behind_the_mmas(name: str):
    """As docs/kernels.md has it, at d = 1024: even if no two of a warp's instructions overlapped.

    Four warps on four schedulers: an ex2 takes 8 clocks (16 a clock and SM), others at most 2, a load of 64
    columns of 16 rows 72 (57 bytes a clock and warp).
    """
    counts, total = budget(CONFIGS[name])["epilogue"]
    ex2 = counts["ex2.approx.ftz.f32"]
    loads = sum(v for k, v in counts.items() if k.startswith("tcgen05.ld"))
    assert ex2 == 256  # a lane's logits; merging what 8 lanes have of a column needs no more
    assert loads == 2 * 256 / 64
    mma = 128 * 256 * 1024 * 2 / 8192
    assert 8 * ex2 + 72 * loads + 2 * (total - ex2) < 0.7 * mma


if __name__ == "__main__":
    for name in ("pair", "single"):
        for role, (counts, total) in budget(CONFIGS[name]).items():
            print(name, role, total, dict(counts.most_common()))
