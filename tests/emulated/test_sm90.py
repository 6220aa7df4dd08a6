"""The Hopper forward, executed: its PTX on the emulator, launched by the host code, against float64.

docs/emulator-mutations.md has what happens when its synchronisation is removed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_lce.arch import architecture
from cute_lce.kernels.epilogues.logits import IN_REGISTERS
from tests.device import tile_of
from tests.emulated.forward import (
    BF16,
    CORNERS,
    FP16,
    check,
    forward,
    ignoring,
    minus_infinity,
    reference,
    rows,
    rows_of,
    sick_rows,
    sloped,
)
from tests.numerics import Case, assert_close, jumping, random_case

pytestmark = pytest.mark.usefixtures("poisoned_empty")

FEW, MANY = architecture("sm_90a").configs
CHOSEN = {tile_of(config): config for config in (*FEW.tokens, *MANY.forwards(False))}
WIDEST = FEW.tokens[-1]
# The form of the gradients' GEMMs.
SHARED = replace(WIDEST, tile_n=128, pingpong=False)
# With narrow tiles and two stages: an emulated tile costs by its columns, and rings wrap soon.
NARROW = {
    "pingpong": replace(WIDEST, tile_n=64, stages=2),
    "shared": replace(SHARED, tile_n=32, stages=2),
    "side by side": replace(MANY.tokens[0], tile_n=64, stages=2),
    "single": replace(WIDEST, tile_n=64, cluster_m=1, stages=2),
}
# Not chosen by plans, but the kernel takes them.
MORE = {
    "A multicast": replace(NARROW["shared"], cluster_m=1, cluster_n=2),
    "A and B multicast": replace(NARROW["pingpong"], cluster_m=2, cluster_n=2),
    "one warpgroup": replace(SHARED, tile_m=64, tile_n=64, warpgroups=1, cluster_m=1, stages=2),
    "two blocks of a warpgroup": replace(NARROW["shared"], tile_m=256),
    "three warpgroups": replace(NARROW["shared"], tile_m=192, warpgroups=3),
    "three blocks in turns": replace(NARROW["side by side"], tile_m=192),
    "turns of 64 rows": replace(NARROW["pingpong"], tile_m=64),
    "no pace": replace(NARROW["shared"], pace=0),
}


# Corners of the sizes, which a form of the mainloop may treat as no other does.
SIZES = ("ragged", "whole tiles", "one token", "V below a tile", "V one above a tile", "d of many k tiles")


@pytest.mark.parametrize(
    ("corner", "config"),
    [
        pytest.param(
            corner,
            config,
            marks=pytest.mark.emulator_full if config == "side by side" and corner not in SIZES else [],
        )
        for corner in CORNERS
        for config in ("pingpong", "side by side", "shared")
    ],
)
def test_corner(corner: str, config: str):
    case = CORNERS[corner]()
    check(case, forward(case, NARROW[config], seed=len(corner)))


# By default with tiles of 48 all, and with others those that end in the last 32 columns of a tile of 112, and
# beyond it.
SOME_TOKENS = (1, 33, 129, 193, 300)


@pytest.mark.parametrize(
    ("tile_n", "n"),
    [
        pytest.param(
            tile_n,
            n,
            marks=[]
            if tile_n == 48 or (tile_n in (32, 112) and n in SOME_TOKENS)
            else pytest.mark.emulator_full,
        )
        for tile_n in (16, 32, 48, 64, 112)
        for n in (1, 8, 16, 31, 33, 47, 49, 129, 192, 193, 300)
    ],
)
def test_tokens_and_tiles(tile_n: int, n: int):
    """Ends of n in every part of a tile, and tiles in whose last 32 columns not every lane owns one."""
    case = ignoring(random_case(n, 24, 150, BF16, seed=n))
    check(case, forward(case, replace(NARROW["pingpong"], tile_n=tile_n), sms=2, seed=n))


@pytest.mark.parametrize("V", [1, 2, 7, 63, 65, 127, 129, 255, 257])
def test_classes(V: int):
    """Ends of V in every part of a tile of classes; also where the last CTA of a cluster has none."""
    case = random_case(33, 24, V, BF16, seed=V)
    check(case, forward(case, replace(NARROW["pingpong"], tile_n=48), seed=V))


BETWEEN = [
    tiles for tiles in CHOSEN if tiles not in ((32, 1), (112, 1), (176, 1), (208, 1), (152, 2), (176, 2))
]
# Whose maxima, sums and bases are in shared memory, a thread's in words of its own.
WORDS = [tiles for tiles in CHOSEN if tiles[0] > IN_REGISTERS]


@pytest.mark.parametrize(
    ("tiles", "dtype"),
    [
        *(
            pytest.param(tiles, BF16, marks=[pytest.mark.emulator_full] if tiles in BETWEEN else [])
            for tiles in CHOSEN
        ),
        ((64, 1), FP16),
    ],
)
def test_chosen_config(tiles: tuple[int, ...], dtype: torch.dtype):
    """The configurations that plans choose, their ring wrapped, with more runs than clusters."""
    config = replace(CHOSEN[tiles], stages=min(CHOSEN[tiles].stages, 3))
    case = ignoring(random_case(config.cluster_columns + 11, 136, 400, dtype))
    run = forward(case, config, sms=config.cluster_size, seed=2)
    assert run.plan.gemm.clusters == 1
    check(case, run)


@pytest.mark.parametrize(
    ("tiles", "window"),
    [
        pytest.param(tiles, window, marks=[] if tiles == (208, 1) else [pytest.mark.emulator_full])
        for tiles in WORDS
        for window in (600, 100_000)
    ],
)
def test_statistics_in_shared_memory(tiles: tuple[int, ...], window: int):
    """Several runs of one cluster, of several tiles for either warpgroup, after the first of which some rows
    rise above their base. Some lanes own one column less, and most of the last tile lies beyond n."""
    config = replace(CHOSEN[tiles], stages=3)
    V = 11 * config.cluster_rows // 2 - 9
    case = random_case(config.cluster_columns + 43, 136, V, BF16)
    case = ignoring(jumping(case, {V // 2: 150.0, V - 5: 310.0}, slice(0, None, 4)))
    run = forward(case, config, sms=config.cluster_size, window=window, seed=window % 7)
    assert run.plan.gemm.clusters == 1
    assert run.plan.gemm.tiles_per_window == min(-(-window // config.cluster_rows), 6)
    check(case, run)


@pytest.mark.parametrize(
    "tiles",
    [
        pytest.param(tiles, marks=[] if tiles in ((32, 1), (208, 1)) else [pytest.mark.emulator_full])
        for tiles in CHOSEN
    ],
    ids=str,
)
def test_shared_memory_is_what_the_plan_says(tiles: tuple[int, ...]):
    """And the words beside it."""
    config = CHOSEN[tiles]
    run = forward(random_case(3, 8, 5, BF16), config)
    (gemm,) = (launch for launch in run.counts.launches if "Gemm" in launch.kernel)
    assert gemm.cluster == (config.cluster_m, config.cluster_n, 1)
    assert gemm.block == (128 * (config.warpgroups + 1), 1, 1)
    ring = config.stages * (config.tile_m + config.tile_n) * config.tile_k * 2
    # Three of each column that a thread owns.
    words = 3 * -(-config.tile_n // 32) * 4 * 128 * config.warpgroups * (tiles in WORDS)
    assert ring + words < gemm.shared - config.box_bytes
    assert gemm.shared <= config.shared_memory + words <= config.row.shared_memory


# Some have what others have: compiling each takes as long as running it.
SOME_OF_MORE = ("A and B multicast", "one warpgroup", "three warpgroups", "three blocks in turns")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SOME_OF_MORE else pytest.mark.emulator_full) for name in MORE],
)
def test_other_configs(name: str):
    case = ignoring(random_case(300, 72, 330, BF16))
    check(case, forward(case, MORE[name], sms=8, seed=1))


@pytest.mark.parametrize("config", ["pingpong", "shared"])
@pytest.mark.parametrize("window", [256, 512, 600, 100_000])
def test_windows(config: str, window: int):
    case = random_case(70, 64, 1100, BF16)
    run = forward(case, NARROW[config], window=window, seed=window % 7)
    assert run.plan.gemm.tiles_per_window == min(-(-window // 256), 5)
    assert run.plan.gemm.windows == -(-5 // run.plan.gemm.tiles_per_window)
    check(case, run)


@pytest.mark.parametrize("tiles", [1, 2, 3, 5])
def test_turns(tiles: int):
    """Odd and even numbers of tiles a run, several runs a cluster: turns go on across runs."""
    case = ignoring(random_case(300, 72, 5 * 128 - 9, BF16))
    run = forward(case, NARROW["single"], sms=2, window=128 * tiles, seed=tiles)
    assert run.plan.gemm.tiles_per_window == tiles
    assert run.plan.gemm.clusters == 2
    check(case, run)


@pytest.mark.parametrize(("sms", "group"), [(2, 2), (4, 1), (4, 3), (6, 2)])
def test_fewer_clusters_than_runs(sms: int, group: int):
    """5 columns of tiles in groups, the last one narrower, and 3 windows: 15 runs for 1 to 3 clusters."""
    config = replace(NARROW["shared"], tile_m=64, warpgroups=1)
    case = random_case(5 * 32 - 3, 24, 3 * 128 - 1, BF16)
    run = forward(case, config, sms=sms, window=128, group=group, seed=sms)
    assert (run.plan.gemm.clusters, run.plan.gemm.windows) == (sms // 2, 3)
    check(case, run)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reduction(reduction: str):
    case = ignoring(random_case(140, 64, 200, BF16))
    run = forward(case, NARROW["pingpong"], reduction=reduction)
    losses, baseline = (getattr(reference(case, t)[0], reduction)() for t in (torch.float64, torch.float32))
    share = 140 / int(run.num_valid) if reduction == "mean" else 1
    assert_close("loss", run.loss, losses * share, baseline * share)


@pytest.mark.parametrize("config", ["pingpong", "shared"])
def test_minus_infinity_and_nan(config: str):
    """Columns of -inf count as nothing, the first tile among them; a nan stays in its row."""
    sick = [5, 77, 139]
    clean = minus_infinity(random_case(140, 64, 500, BF16), 140)
    run = forward(sick_rows(clean, sick), NARROW[config], seed=3)
    well = torch.ones(140, dtype=torch.bool)
    well[sick] = False
    assert run.loss[~well].isnan().all()
    check(rows(clean, well), rows_of(run, well))


def with_logits(logits: torch.Tensor, target: torch.Tensor) -> Case:
    """Of such products, each class along a feature of its own."""
    return Case(logits.bfloat16(), torch.eye(logits.shape[1], dtype=BF16), target)


def test_lse_beside_an_improbable_target():
    """Of two classes that have all probability; lse is small."""
    logits = torch.full((60, 64), -70.0)
    logits[:, 3:5] = -0.7
    logits[:, 9] = -torch.arange(60.0)
    case = with_logits(logits, torch.full((60,), 9))
    check(case, forward(case, NARROW["pingpong"]))


@pytest.mark.parametrize("huge", [3e9, 1e10, 1e30])
def test_huge_logits(huge: float):
    """Low ones count as -inf, of classes that are masked; beside high ones a row is nan or right."""
    logits = torch.randn(48, 264, generator=torch.Generator().manual_seed(0))
    logits[:16, 128:] = -huge
    logits[16:32, 70] = huge
    logits[32:, :] = -huge
    target = torch.arange(48) % 120
    target[24:32] = 70
    run = forward(with_logits(logits, target), NARROW["pingpong"], window=128)
    check(with_logits(logits[:16], target[:16]), rows_of(run, torch.arange(48) < 16))
    assert run.loss[16:24].isnan().all()
    assert not run.loss[24:32].any()
    assert run.loss[32:].isnan().all()


def test_out_of_range_target_is_nan_and_touches_nothing():
    case = random_case(140, 64, 200, BF16)
    target = case.target.clone()
    bad = {0: 200, 3: 255, 77: 2**40, 139: -1}
    for row, value in bad.items():
        target[row] = value
    run = forward(replace(case, target=target), NARROW["pingpong"])
    well = torch.ones(140, dtype=torch.bool)
    well[list(bad)] = False
    assert run.loss[~well].isnan().all()
    assert run.row_sum[~well].isnan().all()
    assert run.loss[well].isfinite().all()


def test_strided_operands_are_read_where_they_are():
    """Rows of larger matrices: no copy, and what lies between rows is not read."""
    case = random_case(70, 64, 130, BF16)
    hidden, weight = torch.full((70, 80), torch.nan, dtype=BF16), torch.full((130, 72), torch.nan, dtype=BF16)
    hidden[:, 8:72], weight[:, :64] = case.input, case.linear_weight
    strided = replace(case, input=hidden[:, 8:72], linear_weight=weight[:, :64])
    check(case, forward(strided, NARROW["pingpong"], seed=1))


SCHEDULES = {
    "pingpong": NARROW["pingpong"],
    "shared": NARROW["shared"],
    "A and B multicast": MORE["A and B multicast"],
}


# The long sweep has twenty of each configuration.
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(2))
def test_schedules(name: str, seed: int):
    """Orders of warps and engines, each with several tiles of several k tiles, so that the ring wraps."""
    case = ignoring(random_case(140, 136, 3 * 128 - 7, BF16, seed))
    run = forward(case, SCHEDULES[name], sms=4, window=100_000, paced=seed % 2 == 1, seed=seed)
    check(case, run)


def test_the_same_bits_in_every_schedule():
    case = random_case(140, 72, 600, BF16)
    first, *others = (forward(case, NARROW["pingpong"], window=256, seed=seed) for seed in range(3))
    for other in others:
        for name in ("loss", "row_max", "row_sum"):
            assert torch.equal(getattr(first, name), getattr(other, name)), name


@pytest.mark.parametrize("logits", ["alike", "sloped"])
def test_the_same_bits_in_every_order_of_rows(logits: str):
    """A row's result depends on the row and the plan, not on the other rows or where it lies in a tile."""
    case = random_case(140, 72, 600, BF16)
    if logits == "sloped":
        case = sloped(case, -200, 100)
    order = torch.randperm(140, generator=torch.Generator().manual_seed(3))
    straight = forward(case, NARROW["pingpong"], window=256)
    permuted = forward(rows(case, order), NARROW["pingpong"], window=256, seed=1)
    for name in ("loss", "row_max", "row_sum"):
        assert torch.equal(getattr(straight, name)[order], getattr(permuted, name)), name


# By its tiles: a configuration that plans choose; by its name: one of MORE.
ALL = {**CHOSEN, **MORE}


@pytest.mark.emulator_full
@pytest.mark.parametrize("name", ALL, ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_many_schedules(name: tuple[int, int] | str, seed: int):
    dtype = (BF16, FP16)[seed % 2]
    case = ignoring(random_case(200 + 37 * seed, 8 + 24 * seed, 300 + 31 * seed, dtype, seed))
    window = (0, 192, 400, 100_000)[seed % 4]
    run = forward(case, ALL[name], sms=4 + 2 * (seed % 4), window=window, paced=seed % 3 == 0, seed=seed)
    check(case, run)


@pytest.mark.emulator_full
@pytest.mark.parametrize("tiles", CHOSEN, ids=str)
@pytest.mark.parametrize("corner", CORNERS)
def test_every_corner_in_every_config(corner: str, tiles: tuple[int, ...]):
    case = CORNERS[corner]()
    check(case, forward(case, CHOSEN[tiles], sms=4, seed=len(corner)))
