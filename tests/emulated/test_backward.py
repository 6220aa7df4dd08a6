"""The backward, executed: launch/'s own host side, both architectures' PTX emulated, against float64.

python -m tests.emulated.test_backward      prints the instruction counts that docs/kernels.md quotes
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch

from cute_lce import arch as architectures
from cute_lce import linear_cross_entropy
from cute_lce.arch import BOX_BYTES, Gpu, architecture
from cute_lce.arguments import COMPUTED_ROWS, Gradients
from cute_lce.launch import KERNELS, Kernels
from cute_lce.launch.backward import KernelBackward
from cute_lce.launch.steps import COUNTERS
from cute_lce.ops import plain, select
from cute_lce.plan import candidates
from cute_lce.plan import forward as forward_plans
from cute_lce.plan.cost import Gemm
from cute_lce.plan.kernels import BackwardKey, ForwardKey, Key
from cute_lce.plan.memory import compacts
from cute_lce.plan.problem import NO_LIMITS, Limits, Problem, round_up
from tests import passes
from tests.device import forget_plans, two_sweeps
from tests.emulated.backward import Run, check, device, half_boxes, narrow_plans, train
from tests.emulated.forward import Emulator, ignoring, minus_infinity, rows, scaled
from tests.emulator import known_allocations
from tests.gpu import sanitize
from tests.numerics import (
    FLOORS,
    Case,
    assert_close,
    check_bad_rows,
    jumping,
    make,
    negated,
    random_case,
    relative_error,
    with_bad_ignored_rows,
    with_bad_rows,
    with_probability,
)

BF16, FP16 = torch.bfloat16, torch.float16
ARCHITECTURES = ("sm_90a", "sm_100a")

pytestmark = pytest.mark.usefixtures("poisoned_empty")
both = pytest.mark.parametrize("arch", ARCHITECTURES)
full = pytest.mark.emulator_full
# Blackwell in the long sweep: what is tested is in code that the two share.
hopper_first = pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=full)])
# The others of twenty seeds are in the long sweep.
seeds = pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=full) for seed in range(2, 20))]
)
dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
# float16 on Blackwell in the long sweep.
both_and_dtypes = pytest.mark.parametrize(
    ("dtype", "arch"),
    [
        pytest.param(
            dtype,
            arch,
            id=f"{str(dtype).removeprefix('torch.')}-{arch}",
            marks=[full] if dtype is FP16 and arch != "sm_90a" else [],
        )
        for dtype in (BF16, FP16)
        for arch in ARCHITECTURES
    ],
)


@pytest.fixture(autouse=True)
def _narrow(monkeypatch, request):
    """Narrow tiles, and few stages so that rings wrap: an emulated tile costs by its columns."""
    if "as_planned" not in request.fixturenames:
        narrow_plans(monkeypatch)


@pytest.fixture
def as_planned():
    """The configurations that plans choose, instead of narrow ones."""


@pytest.fixture(autouse=True)
def _plans_are_not_kept():
    yield
    forget_plans()


# ----------------------------------------------------------------------------------------------------------
# Stripes and what is kept


@both_and_dtypes
@pytest.mark.parametrize("window", [0, 128, 200], ids=["one stripe", "whole tiles", "ragged stripes"])
def test_recompute(arch: str, dtype: torch.dtype, window: int):
    case = ignoring(random_case(140 if window == 0 else 40, 72, 330, dtype, seed=window))
    run = train(case, arch, window=window, seed=window % 5)
    check(case, run)
    gemms = sum("Gemm" in name for name in run.emulator.launched)
    assert gemms == 1 + 3 * (-(-330 // window) if window else 1)


@both_and_dtypes
@pytest.mark.parametrize(
    ("kept", "window"),
    [(128, 0), (128, 70), (256, 0), (330, 0)],
    ids=["some", "some, stripes", "most", "all"],
)
def test_keep(arch: str, dtype: torch.dtype, kept: int, window: int):
    case = ignoring(random_case(40, 72, 330, dtype, seed=kept))
    run = train(case, arch, kept_columns=kept, window=window, seed=kept % 7)
    check(case, run)
    stripes = -(-(330 - kept) // (window or 330))
    # What is kept needs no second GEMM of logits.
    assert sum("Gemm" in name for name in run.emulator.launched) == 1 + 2 + 3 * stripes


@both_and_dtypes
@pytest.mark.parametrize("kept", [0, 128, 330])
def test_rows_that_jump(arch: str, dtype: torch.dtype, kept: int):
    """Above the references by 50, 100 and 300, in what is kept and beyond it."""
    case = jumping(random_case(40, 64, 330, dtype), {20: 50.0, 100: 100.0, 329: 300.0})
    # Probabilities are 0 and 1: what dlogits are rounded from is the upstream, which bf16 holds here.
    dloss = case.upstream("none").bfloat16().double()
    run = train(case, arch, kept_columns=kept, dloss=dloss, seed=kept)
    check(case, run, dloss=dloss)


# The first column stays just below the step that raises a tile, the second is just above a step: of what is
# behind by one step nearly half of the probability, and by two as much were it not set to 0.
# By one step behind are all eight columns that a thread rescales at once.
NEIGHBOURS = ({**dict.fromkeys(range(16, 24), 42.2), 150: 45.0}, {20: 44.2, 150: 133.5})
# In fp16 K is 1, 6 below what logits of 0 sum to, and the second has 0.3% of the probability of the first
# in what is behind by two steps.
FP16_NEIGHBOURS = ({**dict.fromkeys(range(16, 24), 9.4), 150: 11.6}, {20: 11.3, 150: 17.2})
neighbours = pytest.mark.parametrize(
    ("dtype", "heights"),
    [*((BF16, each) for each in NEIGHBOURS), *((FP16, each) for each in FP16_NEIGHBOURS)],
    ids=["bf16, one step", "bf16, two steps", "fp16, one step", "fp16, two steps"],
)


@both
@neighbours
def test_rows_on_either_side_of_a_step(arch: str, dtype: torch.dtype, heights: dict[int, float]):
    case = jumping(random_case(40, 64, 200, dtype, scale=0.1), heights, slice(0, None, 2))
    dloss = torch.linspace(1, 2, 40).double()
    check(case, train(case, arch, kept_columns=200, dloss=dloss), dloss=dloss)


def misleading(V: int = 1000) -> Case:
    """Logits of nearly 0 but where float16's references look, at 125, 375 and so on: the sum of 1000 exceeds
    what the target's logit lets expect by 2^10."""
    case = random_case(40, 64, V, FP16, scale=0.1)
    hidden, weight = case.input.clone(), case.linear_weight.clone()
    hidden[:, 0], weight[:, 0] = 1, 0
    weight[V // 8 :: V // 4, 0] = -20
    return ignoring(replace(case, input=hidden, linear_weight=weight))


@both
# 1024 columns are what a block's threads rescale at once: none is left for a second time.
@pytest.mark.parametrize(("kept", "V"), [(128, 1000), (1000, 1000), (1024, 1024)])
def test_flat_rows_whose_samples_mislead(arch: str, kept: int, V: int):
    """Every row is rescaled, as far as it is kept."""
    case = misleading(V)
    dloss = torch.linspace(1, 2, 40).double()
    run = train(case, arch, kept_columns=kept, dloss=dloss)
    check(case, run, dloss=dloss)
    valid = case.target != case.ignore_index
    # 2^9 at most is what the steps leave of the sum; 2^16 were too much for the targets' entries.
    assert run.kept_scale is not None
    assert bool((run.kept_scale[valid] < 2.0**-7).all())
    assert bool((run.kept_scale[valid] > 2.0**-10).all())


@hopper_first
@pytest.mark.parametrize("dtype", [pytest.param(BF16, marks=full), FP16], ids=["bf16", "fp16"])
def test_rows_are_rescaled_in_all_columns(arch: str, dtype: torch.dtype):
    """A block of Finish has 16384 columns of 8 rows; targets are in all of them."""
    # By a step, beside which what is not rescaled has a large share of the sum.
    height = 16.0 if dtype is FP16 else 45.0
    case = jumping(random_case(11, 8, 16500, dtype), {16498: height}, slice(0, None, 2))
    case.target[3], case.target[10] = 16499, 16383
    dloss = torch.linspace(1, 2, 11).double()
    check(case, train(case, arch, kept_columns=16500, dloss=dloss), dloss=dloss)


@hopper_first
@pytest.mark.parametrize(
    ("probability", "kept"),
    [
        # With 128 columns some are kept and others are not.
        pytest.param(probability, kept, marks=[full] if kept != 128 and probability in (0.3, 1e-6) else [])
        for probability in (0.9999, 0.3, 1e-6, 1e-12)
        for kept in (0, 128, 330)
    ],
)
def test_float16_rows_of_any_confidence(arch: str, probability: float, kept: int):
    """Probabilities of the target from which the range of what is kept has to be guessed."""
    case = with_probability(random_case(24, 64, 330, FP16), probability)
    dloss = torch.linspace(1, 2, 24).double()
    check(case, train(case, arch, kept_columns=kept, dloss=dloss), dloss=dloss)


@both
@pytest.mark.parametrize("V", [200, 3000])
def test_float16_keeps_sums_of_flat_rows_in_its_range(arch: str, V: int):
    """The sum of equal logits, of any number, is guessed: it lies 2^6 above K, and nothing is rescaled."""
    case = replace(random_case(24, 64, V, FP16), linear_weight=torch.zeros(V, 64, dtype=FP16))
    dloss = torch.linspace(1, 2, 24).double()
    run = train(case, arch, kept_columns=V, dloss=dloss)
    check(case, run, dloss=dloss)
    assert run.kept_scale is not None
    assert bool((run.kept_scale <= 2.0**-6).all())
    assert bool((run.kept_scale > 2.0**-7).all())


@hopper_first
@dtypes
@pytest.mark.parametrize("height", [50.0, 300.0])
@pytest.mark.parametrize(("V", "column", "kept"), [(200, 150, 128), (64, 20, 64)])
def test_some_rows_jump(arch: str, dtype: torch.dtype, height: float, V: int, column: int, kept: int):
    """Every other row, in columns that are not kept; and where a tile has fewer than a block's threads."""
    case = jumping(random_case(40, 64, V, dtype), {column: height}, slice(0, None, 2))
    dloss = torch.linspace(1, 2, 40).double()
    check(case, train(case, arch, kept_columns=kept, dloss=dloss), dloss=dloss)


# Steps of 2^8 take 8 bits at 1,415 nats, and their sign bit is set from 182 thousand nats, whose logits
# are 3 times what float16 can hold.
BF16_HEIGHTS = [-300.0, 50.0, 100.0, 300.0, 1000.0, 23040.0, 30000.0, 200000.0]
FP16_HEIGHTS = [-300.0, 5.0, 12.0, 50.0, 300.0, 1500.0, 60000.0, 190000.0]


@pytest.mark.parametrize(
    ("dtype", "height", "arch"),
    [
        pytest.param(
            dtype, height, arch, marks=[full] if arch != "sm_90a" and height not in (-300.0, 300.0) else []
        )
        for dtype, heights in ((BF16, BF16_HEIGHTS), (FP16, FP16_HEIGHTS))
        for height in heights
        for arch in ARCHITECTURES
    ],
    ids=str,
)
def test_one_row_jumps(arch: str, dtype: torch.dtype, height: float):
    """One row lies so far above its reference (or its reference above it), in one tile; the others do not."""
    case = random_case(20, 64, 330, dtype, seed=3)
    hidden, weight, target = case.input.clone(), case.linear_weight.clone(), case.target.clone()
    hidden[:, 0] = 0
    # A factor in either operand: with a large weight fp16's errors would be those of a few roundings of E,
    # where the baseline's may be none.
    high = 16384 if dtype is FP16 else 1
    hidden[7, 0] = high
    weight[:, 0] = 0
    weight[260, 0] = height / high
    target[7] = 10 if height > 0 else 260
    case = replace(case, input=hidden, linear_weight=weight, target=target)
    # One gradient that outweighs the others would hide theirs.
    dloss = torch.ones(20, dtype=torch.float64)
    dloss[7] = 1 / high
    run = train(case, arch, kept_columns=330, dloss=dloss)
    check(case, run, dloss=dloss)
    others = [row for row in range(20) if row != 7]
    assert run.dinput is not None
    expected, plain = (
        g[1][others]
        for g in (case.expected(dloss, "none"), case.baseline(dloss, "none", rounded_dlogits=True))
    )
    assert_close("dinput of the others", run.dinput[others], expected, plain)


# ----------------------------------------------------------------------------------------------------------
# Corners


def _all_ignored(dtype):
    return replace(random_case(40, 64, 200, dtype), target=torch.full((40,), -100))


def _one_valid(dtype):
    case = _all_ignored(dtype)
    case.target[17] = 199
    return case


def _last_column(dtype):
    return replace(random_case(40, 64, 193, dtype), target=torch.full((40,), 192))


def _int32(dtype):
    case = ignoring(random_case(40, 64, 130, dtype))
    return replace(case, target=case.target.int())


def all_features(dtype):
    """Logits of about -1200, to which every feature gives its share; a lane of a warp has several."""
    case = random_case(40, 600, 200, dtype, scale=0.5)
    return replace(case, input=case.input / 4 + 8, linear_weight=case.linear_weight - 0.25)


CORNERS = {
    "ragged": lambda dtype: random_case(139, 72, 201, dtype),
    "whole tiles": lambda dtype: random_case(128, 64, 256, dtype),
    "one token": lambda dtype: random_case(1, 64, 257, dtype),
    "V below a tile": lambda dtype: random_case(40, 40, 7, dtype),
    "V one above a tile": lambda dtype: random_case(40, 64, 129, dtype),
    "two classes": lambda dtype: random_case(40, 64, 2, dtype),
    "d of one 16-byte row": lambda dtype: random_case(40, 8, 200, dtype),
    "d padded": lambda dtype: random_case(40, 37, 200, dtype),
    "d of many k tiles": lambda dtype: random_case(20, 1000, 150, dtype),
    "ignored rows": lambda dtype: ignoring(random_case(140, 64, 200, dtype)),
    "all ignored": _all_ignored,
    "one valid row": _one_valid,
    "targets in the last column": _last_column,
    "int32 targets": _int32,
    "logits of +-60": lambda dtype: scaled(random_case(40, 64, 200, dtype), 60),
    "logits of +-1e4": lambda dtype: scaled(random_case(40, 64, 200, dtype, scale=8), 1e4),
    "common offset of 300": lambda dtype: make("offset_300", dtype),
    "common offset of 10000": lambda dtype: make("offset_10000", dtype),
    "common offset by all features": all_features,
    "targets in the first column": lambda dtype: replace(
        random_case(40, 64, 200, dtype), target=torch.zeros(40, dtype=torch.int64)
    ),
    "confident rows": lambda dtype: make("confident", dtype),
}
# How much of the vocabulary is kept (None: all), and the columns of a stripe of the rest.
HOW = {
    "recompute": (BF16, 0, 0),
    "stripes": (BF16, 0, 70),
    "keep": (BF16, None, 0),
    "keep, stripes": (BF16, 128, 70),
    "fp16": (FP16, 0, 0),
    "fp16, stripes": (FP16, 0, 70),
    "fp16 keep": (FP16, None, 0),
    "fp16 keep, stripes": (FP16, 128, 70),
}
hows = pytest.mark.parametrize("how", HOW)
# What is a mainloop's matter: Blackwell recomputes these and keeps the others, the rest in the long sweep.
SIZES = ("ragged", "whole tiles", "one token", "V below a tile", "d of one 16-byte row", "d padded")
SIZES = (*SIZES, "d of many k tiles", "ignored rows", "V one above a tile")
# Stripes and float16 on Blackwell, and stripes of float16, in the long sweep: they are launch/'s and the
# epilogues', for both.
ways = pytest.mark.parametrize(
    ("arch", "how"),
    [
        pytest.param(
            arch, how, marks=[full] if (arch != "sm_90a") + ("stripes" in how) + ("fp16" in how) > 1 else []
        )
        for arch in ARCHITECTURES
        for how in HOW
    ],
)
ways_without_stripes = pytest.mark.parametrize(
    ("arch", "how"),
    [
        pytest.param(arch, how, marks=[full] if arch != "sm_90a" and "fp16" in how else [])
        for arch in ARCHITECTURES
        for how in ("recompute", "keep", "fp16", "fp16 keep")
    ],
)


def run_how(how: str, make_case, arch: str, **options) -> tuple[Case, Run]:
    """A case trained in one of the ways of HOW."""
    dtype, kept, window = HOW[how]
    case = make_case(dtype)
    V = case.linear_weight.shape[0]
    return case, train(case, arch, kept_columns=V if kept is None else kept, window=window, **options)


def _ways() -> Iterator:
    """(corner, how, architecture); in the long sweep several stripes, where the corner has columns for them,
    and float16 on Blackwell, kept or of a size, by code that the architectures and the types share."""
    for corner, make_case in CORNERS.items():
        V = make_case(BF16).linear_weight.shape[0]
        for how, (dtype, kept, window) in HOW.items():
            for arch in ARCHITECTURES if window + (kept or 0) < V else ():
                long = window or (dtype is FP16 and (arch != "sm_90a" or kept is None or corner in SIZES))
                long = long or (arch != "sm_90a" and (kept == 0) != (corner in SIZES))
                # The kernels of another target type are compiled for it alone.
                long = long or (corner == "int32 targets" and (dtype is FP16 or arch != "sm_90a"))
                yield pytest.param(corner, how, arch, marks=[full] if long else [])


@pytest.mark.parametrize(("corner", "how", "arch"), list(_ways()))
def test_corner(corner: str, how: str, arch: str):
    # As in tests/gpu/test_backward.py: rows of like weight, no rounding of which is a happy one.
    n = CORNERS[corner](BF16).target.numel()
    dloss = torch.linspace(1, 2, n).double()
    case, run = run_how(how, CORNERS[corner], arch, dloss=dloss, seed=len(corner) + len(how))
    check(case, run, dloss=dloss)


@ways
def test_minus_infinity(how: str, arch: str):
    """Columns and whole tiles of -inf count as nothing; what they make of dinput stays in its feature."""
    case, run = run_how(how, lambda dtype: minus_infinity(random_case(40, 64, 300, dtype), 128), arch)
    dloss = case.upstream("none")
    expected = case.expected(dloss, "none")
    baseline = case.baseline(dloss, "none", rounded_dlogits=True)
    assert run.dinput is not None
    assert run.dweight is not None
    assert_close("loss", run.loss, expected[0], baseline[0])
    assert_close("dweight", run.dweight, expected[2], baseline[2])
    assert_close("dinput", run.dinput[:, 1:], expected[1][:, 1:], baseline[1][:, 1:])
    # 0 times -inf, as in torch.
    assert expected[1][:, 0].isnan().all()
    assert run.dinput[:, 0].isnan().all()


@ways
@pytest.mark.parametrize("sick", [(), (0, 5, 39)], ids=["finite gradients", "rows of nan"])
def test_bad_rows_change_no_other(how: str, arch: str, sick: tuple[int, ...]):
    impossible = (3, 17, 38)
    case, run = run_how(
        how, lambda dtype: with_bad_rows(random_case(40, 64, 200, dtype), sick, impossible), arch
    )
    found = run.loss, run.dinput, run.dweight
    check_bad_rows(case, sick, impossible, found, case.upstream("none"), rounded_dlogits=True)


@ways
def test_what_ignored_rows_hold_does_not_matter(how: str, arch: str):
    case, plain = with_bad_ignored_rows(random_case(40, 64, 200, HOW[how][0]))
    _, run = run_how(how, lambda _: case, arch)
    assert run.dinput is not None
    assert run.dweight is not None
    check(plain, run)
    assert not run.dinput[case.target == case.ignore_index].any()


@pytest.mark.parametrize("kept", [0, 200])
def test_lazily_negated_operands_are_read_as_what_they_stand_for(kept: int):
    case = random_case(40, 64, 200, BF16)
    strange = Case(negated(case.input), negated(case.linear_weight), negated(case.target))
    dloss = case.upstream("none").float()
    check(case, train(strange, "sm_90a", kept_columns=kept, dloss=negated(dloss)), dloss=dloss)


@both
@pytest.mark.parametrize("kept", [0, 1])
def test_one_class(arch: str, kept: int):
    """Nothing to learn: exactly where dlogits are computed, to fp32's precision where exponentials
    relative to another number than the maximum were kept."""
    case = random_case(40, 64, 1, BF16)
    run = train(case, arch, kept_columns=kept)
    largest = float((case.upstream("none").abs().max() * case.linear_weight.abs().max()).float())
    assert run.dinput is not None
    assert not run.loss.any()
    assert run.dinput.abs().max() <= kept * 2**-21 * largest


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("kept", [0, 128, 256])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_losses_of_sure_rows_keep_their_digits(arch: str, kept: int, dtype: torch.dtype):
    """Of targets with all but 1e-3 to 1e-10 of the probability: none is negative, and all are near."""
    case = random_case(48, 64, 256, dtype)
    own = case.linear_weight[case.target].double()
    height = torch.linspace(12, 36, 48).double() / own.square().sum(1)
    case = replace(case, input=(height.unsqueeze(1) * own).to(dtype))
    z = case.input.double() @ case.linear_weight.double().T
    others = z.masked_fill(torch.nn.functional.one_hot(case.target, 256).bool(), -torch.inf)
    expected = (others - z.gather(1, case.target.unsqueeze(1))).exp().sum(1).log1p()
    assert expected.min() < 1e-9 < 1e-5 < expected.max()
    loss = train(case, arch, kept_columns=kept).loss.double()
    assert loss.min() >= 0
    # What a float32 sum of 1 and more rounds to.
    assert bool(((loss - expected).abs() <= 2**-21 + 2e-6 * expected).all())
    assert not loss[expected < 2e-9].any()


@pytest.mark.parametrize("kept", [128, 256])
@pytest.mark.parametrize("height", [-1e4, -1e6, -torch.inf])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_targets_far_below_all_logits(arch: str, height: float, kept: int):
    """What is kept relative to them keeps its digits: all probabilities, and so the gradients."""
    case = random_case(40, 64, 256, BF16)
    hidden, weight = (each.clone() for each in (case.input, case.linear_weight))
    hidden[:, 0], weight[:, 0] = 1, 0
    weight[77] = 0
    weight[77, 0] = max(height, -3e38)
    case = replace(case, input=hidden, linear_weight=weight, target=torch.full_like(case.target, 77))
    run = train(case, arch, kept_columns=kept)
    expected = case.expected(case.upstream("none"), "none")[1]
    assert run.dinput is not None
    assert relative_error(run.dinput[:, 1:], expected[:, 1:]) < 4e-3


@ways
@pytest.mark.parametrize("gradient", [1.0, 0.0])
def test_bad_targets_stay_in_their_rows(arch: str, how: str, gradient: float):
    """All dinput of a target that is no class is nan, and dweight with it, whatever the row's upstream
    gradient; nothing outside is touched."""
    bad = [0, 3, 39]
    dloss = torch.ones(40)
    dloss[bad] = gradient
    case = random_case(40, 64, 200, HOW[how][0])
    case.target[bad] = torch.tensor([200, 2**40, -1])
    _, run = run_how(how, lambda _: case, arch, dloss=dloss)
    sick = torch.zeros(40, dtype=torch.bool)
    sick[bad] = True
    assert torch.equal(run.loss.isnan(), sick)
    assert run.dinput is not None
    assert run.dweight is not None
    assert torch.equal(run.dinput.isnan().all(1), sick)
    assert torch.equal(run.dinput.isnan().any(1), sick)
    assert run.dweight.isnan().all()


# ----------------------------------------------------------------------------------------------------------
# Tiles, splits of dhidden's k, pacing


# n, V, d, tile_n, how: ends of n and V in every part of a tile, tiles in whose last 32 columns not every lane
# owns one, d padded and in several tiles of dhidden's rows.
SHAPES = [
    (1, 129, 24, 64, "recompute"),
    (1, 257, 24, 48, "keep"),
    (1, 200, 24, 64, "fp16, stripes"),
    (16, 1, 24, 48, "recompute"),
    (16, 7, 40, 48, "keep"),
    (17, 257, 264, 48, "keep, stripes"),
    (33, 127, 136, 32, "keep"),
    (33, 129, 37, 48, "keep"),
    (41, 200, 129, 112, "keep, stripes"),
    (47, 127, 200, 48, "recompute"),
    (129, 129, 24, 64, "keep"),
    (192, 130, 24, 64, "stripes"),
    (193, 129, 24, 64, "keep, stripes"),
]
# What others have, compiled for these alone.
RARE_SHAPES = [
    (129, 7, 300, 64, "fp16"),
    (193, 1, 24, 48, "keep"),
    (193, 127, 16, 112, "keep"),
    (300, 130, 24, 112, "stripes"),
    (1, 200, 24, 48, "fp16, stripes"),
    (16, 1, 24, 32, "recompute"),
    (129, 7, 300, 48, "fp16"),
    (300, 129, 8, 112, "keep"),
    (300, 131, 24, 48, "fp16, stripes"),
]
# A size of models in one dimension, the others small: many tiles of tokens, features or classes, and as many
# k tiles. Where they are tested by default: those that take less than 12 s and compile nothing of their own.
LARGE_SHAPES = {
    (640, 190, 24, 64, "keep, stripes"): ("sm_90a",),
    (640, 260, 40, 64, "keep"): ("sm_100a",),
    (640, 260, 40, 64, "recompute"): (),
    (1100, 260, 40, 64, "keep"): (),
    (1100, 260, 40, 64, "recompute"): (),
    (7, 130, 2880, 64, "keep"): ARCHITECTURES,
    (7, 130, 2880, 64, "recompute"): (),
    (20, 300, 3584, 64, "keep"): (),
    (7, 130, 3584, 64, "recompute"): ARCHITECTURES,
    (3, 50257, 8, 64, "keep"): (),
    (3, 50257, 8, 64, "recompute"): (),
}


def _shapes() -> Iterator:
    """(shape, architecture); Blackwell in the long sweep but for large ones."""
    often = dict.fromkeys(SHAPES, ("sm_90a",)) | dict.fromkeys(RARE_SHAPES, ()) | LARGE_SHAPES
    for shape, by_default in often.items():
        for arch in ARCHITECTURES:
            name = "-".join(map(str, (*shape, arch)))
            yield pytest.param(shape, arch, id=name, marks=[] if arch in by_default else [full])


@pytest.mark.parametrize(("shape", "arch"), list(_shapes()))
def test_shapes(arch: str, shape: tuple[int, int, int, int, str], monkeypatch):
    n, V, d, tile_n, how = shape
    if arch != "sm_90a" and tile_n not in {config.tile_n for config in architecture(arch).token_configs}:
        tile_n = 64
    narrow_plans(monkeypatch, tile_n=tile_n)
    dloss = torch.linspace(1, 2, n).double()
    make = random_case if V == 1 else lambda *sizes: ignoring(random_case(*sizes))
    case, run = run_how(how, lambda dtype: make(n, d, V, dtype), arch, dloss=dloss, seed=n + V)
    if V > 1:
        check(case, run, dloss=dloss)
    else:
        assert run.dinput is not None
        assert run.dweight is not None
        # Nothing to learn; what is kept is relative to another number than the maximum.
        for found in (run.loss, run.dinput, run.dweight):
            assert found.abs().max() <= run.kept_columns * 2**-12


# Ends of n and d in each half of a warpgroup's rows, and in a second tile.
@pytest.mark.parametrize(
    ("shape", "how", "splits"),
    [
        ((193, 130, 264), "keep", 0),
        ((40, 300, 72), "keep", 2),
        pytest.param((70, 129, 136), "recompute", 0, marks=full),
        pytest.param((129, 200, 520), "keep, stripes", 0, marks=full),
        pytest.param((65, 129, 192), "fp16", 0, marks=full),
        pytest.param((1, 260, 24), "fp16, stripes", 3, marks=full),
    ],
)
def test_tall_tiles_of_dhidden(shape: tuple[int, int, int], how: str, splits: int, monkeypatch):
    n, V, d = shape
    narrow_plans(monkeypatch, splits=splits, tall=True)
    dloss = torch.linspace(1, 2, n).double()
    case, run = run_how(
        how, lambda dtype: ignoring(random_case(n, d, V, dtype)), "sm_90a", dloss=dloss, seed=n + V
    )
    check(case, run, dloss=dloss)


@pytest.mark.parametrize(
    ("tile_n", "dweight", "how"),
    [
        (104, (256, 192, 2), "keep"),
        (160, (256, 192, 1), "recompute"),
        pytest.param(120, (128, 256, 1), "keep", marks=full),
        pytest.param(136, (256, 192, 1), "keep", marks=full),
        pytest.param(136, (128, 256, 1), "fp16 keep", marks=full),
        pytest.param(152, (256, 192, 2), "fp16 keep", marks=full),
        pytest.param(160, (128, 256, 1), "keep", marks=full),
        pytest.param(176, (256, 192, 2), "keep", marks=full),
        pytest.param(176, (256, 192, 1), "fp16", marks=full),
        pytest.param(192, (128, 256, 1), "keep", marks=full),
    ],
)
def test_tiles_that_ask_little_of_l2(
    tile_n: int, dweight: tuple[int, int, int], how: str, as_planned, monkeypatch
):
    """At their widths, of which some end with half a box: dhidden in tiles of 256 rows, dweight in such or in
    128 x 256, which share an operand with another CTA. dweight: rows, columns, tiles side by side."""
    row = architecture("sm_90a")
    many = row.tilings[-1]
    (own,) = (each for each in many.dweight if (each.tile_m, each.tile_n, each.cluster_n) == dweight)
    # Of tiles side by side the logits' GEMM, and the forward here, have no wider ones.
    pair = replace(many.tokens[0], tile_n=min(round_up(tile_n, 16), 176))
    only = replace(
        many,
        tokens=(pair,),
        dweight=(own,),
        dhidden=tuple(each for each in many.dhidden if each.tile_n == tile_n),
        forward=(),
    )
    forget_plans()
    monkeypatch.setitem(architectures.ARCHITECTURES, "sm_90a", replace(row, tilings=(only, only)))

    def tall(gpu: Gpu, problem: Problem, window: int, **kept: bool) -> tuple[Gemm, Gemm, list[int]]:
        configs = gpu.row.configs_for(problem.n, window)
        return Gemm(gpu, configs.tokens[0], 10**9), Gemm(gpu, configs.dhidden[0], 10**9), [1]

    monkeypatch.setattr(candidates, "_tokens", tall)
    dloss = torch.linspace(1, 2, 199).double()
    case, run = run_how(how, lambda dtype: ignoring(random_case(199, 264, 300, dtype)), "sm_90a", dloss=dloss)
    used = [key for key in run.emulator.keys if isinstance(key, BackwardKey)]
    assert {key.dhidden.tile_n for key in used} == {tile_n}
    assert {(key.dweight.tile_m, key.dweight.tile_n, key.dweight.cluster_n) for key in used} == {dweight}
    check(case, run, dloss=dloss)


@pytest.mark.parametrize(
    ("tile_n", "how"),
    [
        (40, "keep"),
        (56, "keep"),
        pytest.param(40, "fp16 keep", marks=full),
        pytest.param(56, "keep, stripes", marks=full),
    ],
)
def test_what_is_kept_in_tiles_that_end_with_half_a_box(tile_n: int, how: str, monkeypatch):
    half_boxes(monkeypatch, tile_n)
    dloss = torch.linspace(1, 2, 187).double()
    case, run = run_how(how, lambda dtype: ignoring(random_case(187, 72, 300, dtype)), "sm_90a", dloss=dloss)
    assert run.kept_columns > 0
    assert tile_n in {key.config.tile_n for key in run.emulator.keys if isinstance(key, ForwardKey)}
    check(case, run, dloss=dloss)


# Of Hopper's forwards that keep, by the tokens of a tile, and how many tiles are side by side; as planned.
KEEPING = {
    (config.tile_n, config.cluster_n): config for config in architecture("sm_90a").configs[-1].forwards(True)
}


@pytest.mark.parametrize(
    ("tiles", "dtype", "kept"),
    [
        # Ends with half a box. Rows in what is kept and beyond it.
        ((184, 2), BF16, 384),
        # In CTAs that share tokens, up to the last column that a lane owns.
        ((192, 1), FP16, 600),
        pytest.param((184, 2), FP16, 600, marks=full),
        pytest.param((192, 1), BF16, 384, marks=full),
    ],
    ids=str,
)
def test_what_is_kept_where_statistics_are_in_shared_memory(
    tiles: tuple[int, int], dtype: torch.dtype, kept: int, monkeypatch
):
    """Two runs of one cluster, of several tiles of a warpgroup, after the first of which some rows rise over
    their references and their bases."""
    config = replace(KEEPING[tiles], stages=3)
    monkeypatch.setattr(forward_plans, "choose_config", lambda *_: config)
    n, V = 3 * (config.cluster_columns + 43) // 2, 600  # two thirds are valid
    case = ignoring(jumping(random_case(n, 72, V, dtype), {300: 100.0, 590: 300.0}, slice(3, None, 7)))
    dloss = torch.linspace(1, 2, n).double()
    grid = forward_plans.plan(Gpu("sm_90a", 2), n, 72, V, kept=kept).gemm
    assert (grid.clusters, grid.windows) == (1, 1)
    run = train(case, "sm_90a", kept_columns=kept, dloss=dloss, sms=2, seed=1)
    assert config in {key.config for key in run.emulator.keys if isinstance(key, ForwardKey)}
    check(case, run, dloss=dloss)
    check_kept(case, run)


def check_kept(case: Case, run: Run) -> None:
    """Times its factors what is kept of a valid row is softmax - onehot, and 0 of an ignored one."""
    assert run.kept is not None
    assert run.kept_scale is not None
    n, (V, d) = len(case.target), case.linear_weight.shape
    valid = case.target != case.ignore_index
    wanted = (case.input.double() @ case.linear_weight.double().mT).softmax(1)
    wanted[torch.arange(n), case.target.where(valid, 0)] -= 1
    wanted = wanted.where(valid.unsqueeze(1), 0)[:, : run.kept_columns]
    if compacts(Problem(n, d, V, half=case.input.dtype is FP16), run.kept_columns):
        order = torch.cat((valid.nonzero()[:, 0], (~valid).nonzero()[:, 0]))
        wanted = wanted[order[: round_up(int(valid.sum()), COMPUTED_ROWS)]]
    found = run.kept[: len(wanted), : run.kept_columns].float()
    found *= run.kept_scale[: len(wanted)].unsqueeze(1)
    # Of the exponentials' rounding, which the baseline's need not resemble.
    assert_close("kept", found, wanted, wanted.to(run.kept.dtype), rounding=FLOORS[run.kept.dtype])


# Two columns of a row, of which the second is raised and the first is not, unless they are of one unit (a
# warp's 16 rows of both halves of a tile of 128). Their probabilities are alike.
UNITS = [(0, 15), (0, 16), (0, 64), (0, 79), (15, 80), (63, 64), (64, 48), (127, 128), (129, 1), (200, 140)]


@hopper_first
@pytest.mark.parametrize("tile_n", [pytest.param(48, marks=full), 64])
@pytest.mark.parametrize("columns", UNITS, ids=str)
def test_raises_in_single_units(arch: str, columns: tuple[int, int], tile_n: int, monkeypatch):
    if arch == "sm_90a":
        narrow_plans(monkeypatch, tile_n=tile_n)
    low, high = columns
    rows = slice(3, None, 7)
    case = jumping(random_case(53, 64, 201, BF16, scale=0.1), {low: 44.2, high: 45.0}, rows)
    dloss = torch.linspace(1, 2, 53).double()
    check(case, train(case, arch, kept_columns=201, dloss=dloss, seed=low % 3), dloss=dloss)


# Of the same rows of tiles that one warp sees in turn, in either order, and so of one sum.
TILES_APART = [(5, 261), (5, 517), (517, 5)]


@hopper_first
@pytest.mark.parametrize("columns", TILES_APART, ids=str)
def test_raises_between_tiles_of_a_warp(arch: str, columns: tuple[int, int], monkeypatch):
    """A sum's part that is not raised is half of it."""
    if arch == "sm_90a":
        narrow_plans(monkeypatch, tile_n=64)
    low, high = columns
    case = jumping(random_case(21, 64, 700, BF16, scale=0.1), {low: 44.2, high: 45.0}, slice(3, None, 7))
    dloss = torch.linspace(1, 2, 21).double()
    check(case, train(case, arch, kept_columns=700, dloss=dloss, sms=2), dloss=dloss)


# splits, kept, columns of a stripe, of a vocabulary of 330 (6 k tiles): of 4 splits the last one lies wholly
# beyond k, of 5 the last two.
SPLITS = [
    pytest.param(2, 0, 0, marks=full),
    pytest.param(3, 0, 0, marks=full),
    (4, 0, 0),
    (5, 0, 0),
    (2, 0, 130),
    pytest.param(3, 0, 70, marks=full),
    (5, 0, 130),
    (3, 330, 0),
    (2, 128, 130),
    pytest.param(3, 128, 0, marks=full),
]


@hopper_first
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=full)], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("splits", "kept", "window"), SPLITS)
def test_splits(arch: str, dtype: torch.dtype, splits: int, kept: int, window: int, monkeypatch):
    """Splits of dhidden's k, in several stripes too; ignored rows of nan."""
    narrow_plans(monkeypatch, splits=splits)
    case, clean = with_bad_ignored_rows(random_case(69, 136, 330, dtype))
    dloss = torch.linspace(1, 2, 69).double()
    run = train(case, arch, kept_columns=kept, window=window, dloss=dloss, seed=splits + window)
    check(clean, run, dloss=dloss)
    assert sum("Reduce" in name for name in run.emulator.launched) == 1
    # Not where dweight's GEMM reads hidden states where dinput will be.
    assert bool(early(run)[-1]) == (kept == 330)


def early(run: Run) -> list[int]:
    """Accesses before the end of the launch before, of each call."""
    return [result.counters["accesses before griddepcontrol.wait"] for result in run.emulator.results]


@both
@pytest.mark.parametrize("how", ["keep", "recompute"])
def test_combine_and_finish_load_early(arch: str, how: str):
    case = random_case(37, 64, 200, BF16)
    run = train(case, arch, kept_columns=200 if how == "keep" else 0, reduction="mean")
    check(case, run, reduction="mean")
    assert early(run)[0] > 0


@hopper_first
def test_losses_of_many_blocks_are_added_up(arch: str):
    """A thread of Finish has those of several blocks of Combine."""
    case = ignoring(random_case(1100, 8, 40, BF16))
    check(case, train(case, arch, kept_columns=40, reduction="mean"), reduction="mean")


@both
@pytest.mark.parametrize("window", [0, 130], ids=["one stripe", "stripes"])
def test_splits_without_dweight(arch: str, window: int, monkeypatch):
    narrow_plans(monkeypatch, splits=3)
    case = random_case(37, 72, 200, BF16)
    check(case, train(case, arch, window=window, need_dweight=False))


@both
def test_splits_are_added_in_their_order(arch: str, monkeypatch):
    """Whatever the schedule. Of three splits the second cancels the first, so that another order gives other
    bits: of the third what the first leaves room for."""
    narrow_plans(monkeypatch, splits=3)
    n, d, V = 40, 72, 192
    weight = torch.randn(3, V // 3, d, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[0] *= 2**20
    weight[1] = -weight[0]
    # Every class has the same probability, and the targets are in the third split.
    case = Case(torch.zeros(n, d, dtype=BF16), weight.view(V, d), torch.arange(128, 128 + n))
    dloss = torch.linspace(1, 2, n)
    found = []
    for seed in range(4):
        with device(arch, 4, seed) as emulator:
            sums = _record_sums(emulator, (3, n, d))
            results = passes.forward(KERNELS, case)
            dinput, _ = passes.backward(KERNELS, case, dloss.clone(), results, need_dweight=False)
        assert dinput is not None
        found.append(dinput)
    (first, second, third), *_ = sums
    ordered, *others = (
        ((a + b) + c).bfloat16()
        for a, b, c in ((first, second, third), (third, second, first), (first, third, second))
    )
    assert ordered.any()
    assert all(torch.equal(each, ordered) for each in found)
    assert not any(torch.equal(other, ordered) for other in others)


def _record_sums(emulator: Emulator, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Gets what is in Gradients.sums after each launch of a backward."""
    sums: list[torch.Tensor] = []
    get = emulator.get

    def recording(key: Key):
        function = get(key)

        def call(*arguments) -> None:
            function(*arguments)
            for group in arguments:
                if isinstance(group, Gradients):
                    floats = ctypes.c_float * math.prod(shape)
                    there = torch.frombuffer(floats.from_address(group.sums), dtype=torch.float32)
                    sums.append(there.clone().view(shape))

        return call

    emulator.get = recording
    return sums


@hopper_first
@pytest.mark.parametrize("resident", [16, pytest.param(2, marks=full)])
@pytest.mark.parametrize("splits", [0, pytest.param(3, marks=full)])
@pytest.mark.parametrize("how", ["recompute", "keep, stripes", pytest.param("fp16, stripes", marks=full)])
def test_paced(arch: str, how: str, splits: int, resident: int, monkeypatch):
    """All GEMMs of both passes, with several clusters of which all or only one runs at a time."""
    narrow_plans(monkeypatch, splits=splits, paced=True)
    case, run = run_how(
        how,
        lambda dtype: ignoring(random_case(150, 264, 330, dtype)),
        arch,
        sms=8,
        seed=splits,
        resident=resident,
    )
    check(case, run)
    gemms = [
        (launched, counts)
        for result in run.emulator.results
        for launched, counts in zip(result.launches, result.by_launch, strict=True)
        if "Gemm" in launched.kernel
    ]
    assert len(gemms) >= 4
    for launched, counts in gemms:
        assert launched.grid[0] * launched.grid[1] >= 4, launched.kernel
        assert any(op.startswith("red.") for warp in counts.values() for op in warp), launched.kernel


@pytest.mark.parametrize("need_dinput", [True, False])
def test_dweight_alone_waits_for_its_sms(need_dinput: bool, monkeypatch):
    """Its GEMM begins early only behind dinput's: what sums that over shards takes SMs first."""
    narrow_plans(monkeypatch)
    run = train(random_case(70, 72, 260, BF16), "sm_90a", need_dinput=need_dinput)
    gemms = [
        launch for result in run.emulator.results for launch in result.launches if "Gemm" in launch.kernel
    ]
    assert [launch.by_pdl for launch in gemms] == [True, True, *([True] if need_dinput else []), need_dinput]


@hopper_first
@pytest.mark.parametrize(
    ("dtype", "kept", "window"),
    [(BF16, 0, 0), (BF16, 128, 130), pytest.param(FP16, 0, 130, marks=full)],
    ids=["recompute", "keep, stripes", "fp16, stripes"],
)
def test_counters_start_at_zero(arch: str, dtype: torch.dtype, kept: int, window: int, monkeypatch):
    """Whichever kernel comes first: those of the launches behind a backward's first are 0 still, and that of
    a GEMM which the first lacks."""
    narrow_plans(monkeypatch, paced=True)
    check_counters(arch, random_case(70, 72, 330, dtype), kept, window)


def check_counters(arch: str, case: Case, kept: int, window: int) -> None:
    """Of plans that pace."""
    with device(arch, 8) as emulator:
        forwards, backwards = _record_counters(emulator)
        results = passes.forward(KERNELS, case, kept_columns=kept, window=window)
        passes.backward(KERNELS, case, case.upstream("none").float(), results, window=window)
    (forward,), (first, *_) = forwards, backwards
    assert forward > 0
    assert [counter > 0 for counter in first[:COUNTERS]] == [not kept, True, True]
    assert bool(first[COUNTERS:]) == bool(window)
    assert not any(first[COUNTERS:])


def _record_counters(emulator: Emulator) -> tuple[list[int], list[list[int]]]:
    """Gets the counter of each forward, and those that each launch of a backward zeroes, behind it; before,
    they are not 0."""
    forwards: list[int] = []
    backwards: list[list[int]] = []
    get = emulator.get

    def recording(key: Key):
        function = get(key)

        def call(*arguments) -> None:
            if isinstance(key, BackwardKey):
                address, count = arguments[-1]
            else:
                address, count = arguments[4].workspace, 1
            counters = (ctypes.c_int32 * count).from_address(address)
            counters[:] = [-1000] * count
            function(*arguments)
            if isinstance(key, BackwardKey):
                backwards.append(counters[:])
            else:
                forwards.append(counters[0])

        return call

    emulator.get = recording
    return forwards, backwards


# ----------------------------------------------------------------------------------------------------------
# Two sweeps


# Tokens of a chunk, columns of a stripe, splits of dhidden's k: ragged ends of each, and one of either.
SWEEPS = [(64, 128, 1), (32, 200, 3), (128, 330, 1), (192, 70, 2)]


@hopper_first
@pytest.mark.parametrize(
    ("dtype", "chunk", "columns", "splits"),
    [
        pytest.param(dtype, *sweep, marks=[full] if dtype is FP16 and i in (1, 2) else [])
        for dtype in (BF16, FP16)
        for i, sweep in enumerate(SWEEPS)
    ],
    ids=str,
)
def test_two_sweeps(arch: str, dtype: torch.dtype, chunk: int, columns: int, splits: int, monkeypatch):
    """Ignored rows of nan; and in every chunk rows whose gradients are unlike the others'."""
    two_sweeps(monkeypatch, chunk, columns, splits)
    n, V = 150, 330
    case, clean = with_bad_ignored_rows(random_case(n, 72, V, dtype, seed=chunk))
    dloss = torch.linspace(1, 2, n).double()
    run = train(case, arch, dloss=dloss, seed=splits)
    check(clean, run, dloss=dloss)
    launched = run.emulator.launched
    chunks, stripes = -(-n // chunk), -(-V // columns)
    assert sum("Gemm" in name for name in launched) == 1 + 2 * chunks + 2 * stripes
    assert sum("Reduce" in name for name in launched) == (chunks if splits > 1 or dtype is BF16 else 0)


@both_and_dtypes
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_upstreams_in_two_sweeps(arch: str, dtype: torch.dtype, reduction: str, monkeypatch):
    """A number for all chunks; and one for each token, with a stride."""
    two_sweeps(monkeypatch, 64, 128)
    case = ignoring(random_case(100, 37, 200, dtype))
    dloss = _upstreams(100)["strided"] if reduction == "none" else torch.tensor(-1.5)
    run = train(case, arch, reduction=reduction, dloss=dloss)
    check(case, run, reduction=reduction, dloss=dloss)


@hopper_first
@pytest.mark.parametrize("frozen", ["", "weight"])
def test_two_sweeps_give_the_same_bits_again(arch: str, frozen: str, monkeypatch):
    """Whatever the schedule of warps; and no stripes where the weight is frozen."""
    two_sweeps(monkeypatch, 32, 128, 2)
    case = ignoring(random_case(80, 72, 200, BF16))
    runs = [train(case, arch, need_dweight=not frozen, seed=seed, sms=4) for seed in range(3)]
    check(case, runs[0])
    assert (runs[0].dweight is None) == bool(frozen)
    assert sum("Gemm" in name for name in runs[0].emulator.launched) == 1 + 2 * 3 + (0 if frozen else 2 * 2)
    for gradients in ([run.dinput for run in runs], [run.dweight for run in runs]):
        first, *others = [gradient for gradient in gradients if gradient is not None] or [torch.empty(0)]
        assert all(torch.equal(other, first) for other in others)


@hopper_first
def test_paced_sweeps(arch: str, monkeypatch):
    """Every launch of either sweep has counters of its own."""
    narrow_plans(monkeypatch, paced=True)
    two_sweeps(monkeypatch, 64, 128)
    case = ignoring(random_case(100, 264, 200, BF16))
    check(case, train(case, arch, sms=8, resident=2))


# ----------------------------------------------------------------------------------------------------------
# Upstream gradients, and what is frozen


def _upstreams(n: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    wide = torch.randn(n, 3, generator=generator)
    large = torch.randn(n, generator=generator)
    large[::4] = 0
    large[1::4] *= 1e4
    return {"expanded": torch.tensor(-1.5).expand(n), "strided": wide[:, 1], "zeros and 1e4": large}


@ways_without_stripes
def test_upstream(arch: str, how: str):
    name = {"recompute": "strided", "fp16": "expanded"}.get(how, "zeros and 1e4")
    dloss = _upstreams(37)[name]
    case, run = run_how(how, lambda dtype: ignoring(random_case(37, 64, 130, dtype)), arch, dloss=dloss)
    check(case, run, dloss=dloss)


@hopper_first
@pytest.mark.parametrize("how", ["fp16", "fp16 keep, stripes"])
@pytest.mark.parametrize("size", [0.0, 2.0**-40, 2.0**16])
def test_float16_scales_rows_of_any_upstream_into_its_range(arch: str, how: str, size: float):
    """The copy of the hidden rows holds the upstream gradient; results that float16 can hold are there."""
    dloss = torch.linspace(1, 2, 37).double() * size
    # Small operands: results for the largest upstream are less than 65504.
    case = ignoring(random_case(37, 64, 200, FP16))
    case = replace(case, input=case.input / 64, linear_weight=case.linear_weight / 8)
    _, run = run_how(how, lambda _: case, arch, dloss=dloss)
    if 0 < size < 1:
        # Too small for float16.
        assert run.dinput is not None
        assert run.dweight is not None
        assert not run.dinput.any()
        assert not run.dweight.any()
    else:
        check(case, run, dloss=dloss)


@hopper_first
def test_an_ignore_index_beyond_int32_scales_every_float16_row(arch: str):
    """No int32 target is it, nor has its low half."""
    case = random_case(37, 64, 200, FP16)
    case = replace(case, target=case.target.int(), ignore_index=2**32 + int(case.target[0]))
    dloss = torch.linspace(1, 2, 37).double()
    check(case, train(case, arch, dloss=dloss), dloss=dloss)


@ways_without_stripes
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions(arch: str, how: str, reduction: str):
    case, run = run_how(
        how, lambda dtype: ignoring(random_case(37, 64, 130, dtype)), arch, reduction=reduction
    )
    check(case, run, reduction=reduction)


@both
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=full)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("frozen", ["input", "weight"])
@pytest.mark.parametrize("kept", [0, 128])
def test_frozen(arch: str, frozen: str, dtype: torch.dtype, kept: int):
    """No GEMM and no result for what needs no gradient."""
    case = random_case(37, 64, 200, dtype)
    run = train(case, arch, kept_columns=kept, need_dinput=frozen != "input", need_dweight=frozen != "weight")
    check(case, run)
    assert (run.dinput is None) == (frozen == "input")
    assert (run.dweight is None) == (frozen == "weight")
    gemms = sum("Gemm" in name for name in run.emulator.launched)
    assert gemms == 1 + 2 * (2 if kept else 1) - (1 if kept else 0)


@pytest.mark.parametrize(
    ("arch", "how"),
    [
        pytest.param(arch, how, marks=[full] if arch != "sm_90a" and how != "keep, stripes" else [])
        for arch in ARCHITECTURES
        for how in ("recompute", "keep, stripes", "keep", "fp16", "fp16 keep, stripes")
    ],
)
def test_retained_backwards(arch: str, how: str):
    """Two gradients of one forward, then the first again with the same bits: nothing saved is written to."""
    dtype, kept, window = HOW[how]
    case = ignoring(random_case(37, 64, 200, dtype))
    columns = 200 if kept is None else kept
    with device(arch, 2) as emulator:
        results = passes.forward(KERNELS, case, kept_columns=columns, window=window)
        found = []
        for factor in (1.0, -3.0, 1.0):
            dloss = factor * case.upstream("none").float()
            dinput, dweight = passes.backward(KERNELS, case, dloss, results, window=window)
            run = Run(results.loss, dinput, dweight, columns, emulator)
            check(case, run, dloss=dloss)
            found.append(run)
    assert torch.equal(found[0].dinput, found[2].dinput)
    assert torch.equal(found[0].dweight, found[2].dweight)


class KnownBackward(KernelBackward):
    """Autograd leaves the mode by which the emulator learns of memory; what launch/ keeps was made in it."""

    def dinput(self, dloss, saved, loss, out=None):
        with known_allocations():
            return super().dinput(dloss.clone(), saved, loss, out)


class KnownKernels(Kernels):
    backward = staticmethod(KnownBackward)


@both
@pytest.mark.parametrize("schedule", ["recompute", "keep"])
def test_the_public_call(arch: str, schedule: str, monkeypatch):
    """From linear_cross_entropy to the gradients, by the eager path that a GPU's tensors take."""
    case = ignoring(random_case(37, 64, 200, BF16))
    hidden, weight = case.input.clone().requires_grad_(), case.linear_weight.clone().requires_grad_()
    monkeypatch.setitem(select._picked, (hidden.device, BF16), KnownKernels())
    # The emulator's own mode, which learns of memory, is one that the dispatcher would have to be told of.
    monkeypatch.setattr(plain, "is_in_torch_dispatch_mode", lambda: False)
    monkeypatch.setattr(Case, "multiplies_narrow", property(lambda case: True))
    with device(arch, 2) as emulator:
        loss = linear_cross_entropy(hidden, weight, case.target, reduction="sum", schedule=schedule)
        for dloss in (torch.tensor(1.5), torch.tensor(-0.3)):
            dinput, dweight = torch.autograd.grad(loss, (hidden, weight), dloss, retain_graph=True)
            run = Run(loss.detach(), dinput, dweight, 0, emulator)
            check(case, run, reduction="sum", dloss=dloss)
    gemms = sum("Gemm" in name for name in emulator.launched)
    assert gemms == 1 + 2 * (2 if schedule == "keep" else 3)


@both
def test_without_gradients_there_is_one_gemm_and_nothing_kept(arch: str):
    case = random_case(37, 64, 200, BF16)
    for schedule in ("auto", "keep", "recompute", "grad_in_forward"):
        problem = Problem(37, 64, 200, need_dinput=False, need_dweight=False)
        with device(arch, 2):
            chosen = KERNELS.choose(problem, BF16, torch.device("cuda"), schedule, "mean", NO_LIMITS)
        assert chosen == ("recompute", 0)
    with device(arch, 2) as emulator:
        loss = passes.forward(KERNELS, case, reduction="mean", statistics=False).loss
    assert_close("loss", loss, case.expected()[0], case.baseline()[0])
    assert sum("Gemm" in name for name in emulator.launched) == 1
    assert not any(name in kernel for name in ("References", "Finish") for kernel in emulator.launched)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "grad_in_forward", "reduction": "none"}, "schedule: got 'grad_in_forward' with"),
        ({"schedule": "keep", "workspace": 1000}, "workspace_mb: "),
        ({"schedule": "recompute", "workspace": 1000}, "workspace_mb: "),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(change: dict, message: str):
    options = {"dtype": BF16, "schedule": "auto", "reduction": "mean", "workspace": 0, **change}
    dtype, schedule, reduction, workspace = options.values()
    problem = Problem(4096, 512, 32768, half=dtype is FP16)
    limits = Limits(workspace=workspace)
    with device("sm_90a", 4), pytest.raises(ValueError, match=message):
        KERNELS.choose(problem, dtype, torch.device("cuda"), schedule, reduction, limits)


# ----------------------------------------------------------------------------------------------------------
# Schedules of warps and engines


@both
@pytest.mark.parametrize("how", ["stripes", "keep, stripes"])
@seeds
def test_schedules(arch: str, how: str, seed: int):
    """Orders of warps and engines: all tiles and k tiles of every GEMM for one cluster, or shared by two; the
    second stripe, or the first after what is kept, adds to the sum of dinput."""
    dtype, kept, _ = HOW[how]
    case = ignoring(random_case(70, 136, 260, dtype, seed))
    kept_columns = 260 if kept is None else kept
    check(case, train(case, arch, kept_columns=kept_columns, window=130, sms=2 + 2 * (seed % 2), seed=seed))


@both
def test_the_same_bits_in_every_schedule(arch: str):
    case = random_case(37, 72, 200, BF16)
    first, second = (train(case, arch, kept_columns=128, seed=seed) for seed in (0, 2))
    for name in ("loss", "dinput", "dweight"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


def check_rows_bits(arch: str, case: Case, batches: Iterable[torch.Tensor], **options) -> None:
    """Of each row in batches, given by their rows, the loss and the gradient that the whole case gives it."""
    dloss = torch.linspace(1, 2, case.target.numel())
    options = {"sms": 2, "need_dweight": False, **options}
    whole = train(case, arch, dloss=dloss, **options)
    check(case, whole, dloss=dloss)
    for which in batches:
        part = train(rows(case, which), arch, dloss=dloss[which], seed=1, **options)
        assert torch.equal(part.loss, whole.loss[which]), which
        if whole.dinput is not None:
            assert part.dinput is not None
            assert torch.equal(part.dinput, whole.dinput[which]), which


def cancelling(n: int, d: int, V: int, dtype: torch.dtype) -> Case:
    """In half of the features a third of the classes adds to dinput what another takes away, far more than
    the rest: the bits depend on the order of the additions."""
    case = random_case(n, d, V, dtype)
    hidden, weight = case.input.clone(), case.linear_weight.clone()
    third, half = V // 3, d // 2
    hidden[:, :half] = 0
    weight[:third, :half] *= 2.0 ** (14 if dtype is FP16 else 20)
    weight[third : 2 * third] = weight[:third]
    weight[third : 2 * third, :half] *= -1
    target = 2 * third + case.target % (V - 2 * third)
    return replace(case, input=hidden, linear_weight=weight, target=target)


def batches_of(n: int) -> tuple[torch.Tensor, ...]:
    """All rows in another order, one alone, and some."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    return order, torch.tensor([n // 3]), torch.arange(n // 8, n * 2 // 3)


@both
def test_a_rows_loss_does_not_depend_on_its_batch(arch: str):
    """With windows of an odd number of tiles, several runs a cluster: turns begin with either warpgroup."""
    batches = torch.arange(280, 300), torch.arange(100, 101), torch.arange(37, 180)
    check_rows_bits(arch, random_case(300, 32, 1100, BF16), batches, window=768, need_dinput=False)


@both
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=full)], ids=["bf16", "fp16"])
def test_a_rows_gradient_does_not_depend_on_its_batch(arch: str, dtype: torch.dtype):
    """With two stripes, the second of which adds to the sum of dinput."""
    check_rows_bits(arch, cancelling(150, 32, 400, dtype), batches_of(150), window=256)


@pytest.mark.emulator_full
@both
@dtypes
def test_a_rows_gradient_as_planned_does_not_depend_on_its_batch(arch: str, dtype: torch.dtype, as_planned):
    """Plans choose other tiles for other numbers of rows."""
    check_rows_bits(arch, cancelling(300, 32, 600, dtype), batches_of(300), window=300)


@pytest.mark.emulator_full
@pytest.mark.parametrize("step", sanitize.STEPS, ids=str)
def test_what_the_sanitizer_runs(step: sanitize.Step, as_planned, monkeypatch):
    """What needs a GPU and its tool to be of use, and is right before it gets there."""
    monkeypatch.setattr(Case, "multiplies_narrow", property(lambda case: True))
    with device("sm_90a", sanitize.FEW):
        step.run(step.case())


# ----------------------------------------------------------------------------------------------------------
# What an epilogue of Blackwell's costs


def launched_gemms(d: int, V: int, stripe: int, kept: int = 0, gradients: bool = True) -> list[dict]:
    """Instructions (warp -> opcode -> executed) of each GEMM of a forward and a backward, in the order of the
    launches, for 256 tokens whose target is in the first tile: one column of tiles for one pair of CTAs."""
    case = random_case(256, d, V, BF16)
    case = replace(case, target=torch.zeros_like(case.target))
    run = train(
        case,
        "sm_100a",
        window=stripe,
        kept_columns=kept,
        sms=2,
        need_dinput=gradients,
        need_dweight=gradients,
    )
    results = run.emulator.results
    return [
        counts
        for result in results
        for launched, counts in zip(result.launches, result.by_launch, strict=True)
        if "Gemm" in launched.kernel
    ]


def per_tile(few: dict, many: dict, warp: int = 0, parts: int = 4) -> Counter:
    """What a warp executes for one tile, from two runs that differ by two tiles of both CTAs, or for one of
    `parts`."""
    return Counter({op: (n - few[warp][op]) / parts for op, n in many[warp].items() if n != few[warp][op]})


def epilogues() -> dict[str, Counter]:
    """Opcode -> executed by a warp for its 32 rows of a tile of 256 columns, of every epilogue but those of
    several stripes; of the backward's, whose runs have one tile, with what begins a run."""
    (_, few), (_, many) = (launched_gemms(64, V, 0, gradients=False) for V in (512, 1024))
    found = {"dlogits": per_tile(few, many)}
    few, many = (launched_gemms(d, 256, 0) for d in (512, 1024))
    found["dinput, one stripe"], found["dweight"] = (per_tile(few[i], many[i]) for i in (2, 3))
    few, many = (launched_gemms(64, V, 0, kept=V, gradients=False)[0] for V in (512, 1024))
    found["keeping forward"] = per_tile(few, many)
    return found


def epilogues_of_stripes() -> dict[str, Counter]:
    """As `epilogues`."""
    few, many = (launched_gemms(d, 384, 128) for d in (512, 1024))
    return {
        f"dinput, {which} stripe": per_tile(few[2 + 3 * i], many[2 + 3 * i])
        for i, which in enumerate(("first", "middle", "last"))
    }


def cycles(counts: Counter) -> tuple[float, float]:
    """Clocks of an SM for a tile's epilogue, if everything overlaps and if nothing does.

    Four warps on four schedulers: an ex2 takes 8 clocks (16 a clock and SM), other instructions at most 2, a
    load of 64 columns of 16 rows from tensor memory 72 (57 bytes a clock and warp). The four share the path
    to global memory, taken to serve one line of 128 bytes a clock, of which an access of single numbers has
    at most 4; and shared memory, 128 bytes a clock, where stmatrix writes 512 bytes and TMA reads a box.
    """
    ex2 = counts["ex2.approx.ftz.f32"]
    loads = executed(counts, "tcgen05.ld")
    lines = 4 * 4 * (counts["ld.global.b32"] + counts["st.global.b32"])
    shared = 4 * (4 * executed(counts, "stmatrix") + BOX_BYTES // 128 * executed(counts, TMA_STORE))
    total = sum(counts.values())
    return max(8 * ex2, lines, shared, total), 8 * ex2 + 72 * loads + 2 * (total - ex2) + lines + shared


TMA_STORE = "cp.async.bulk.tensor.2d.global"


def executed(counts: Counter, prefix: str) -> float:
    return sum(n for op, n in counts.items() if op.startswith(prefix))


def test_epilogues_hide_behind_the_mmas(as_planned):
    """As docs/kernels.md has it. A tile's MMAs take 8 k clocks: features, columns of a stripe, or tokens."""
    found = epilogues()
    # A lane's logits.
    assert found["dlogits"]["ex2.approx.ftz.f32"] == found["keeping forward"]["ex2.approx.ftz.f32"] == 256
    for name, counts in found.items():
        # 256 numbers of a lane, 16-bit ones, eight at once, through boxes.
        assert executed(counts, "stmatrix") * 8 == 256, name
        assert executed(counts, TMA_STORE) * BOX_BYTES == 32 * 256 * 2, name
        assert counts["st.global.b32"] == 0, name
    # Whatever overlaps, from the k that the document names.
    least = {"dlogits": 950, "keeping forward": 1050, "dinput, one stripe": 400, "dweight": 400}
    assert set(found) == set(least)
    for name, k in least.items():
        assert cycles(found[name])[1] < 8 * k, name


@pytest.mark.emulator_full
def test_epilogues_of_stripes_hide_behind_the_mmas(as_planned):
    found = epilogues_of_stripes()
    for name, counts in found.items():
        # 256 numbers of a lane, of the fp32 sum, one by one: also after the last stripe, since tokens are
        # compacted.
        assert executed(counts, "stmatrix") == executed(counts, TMA_STORE) == 0, name
        assert counts["st.global.b32"] == 256, name
    least = {"dinput, first stripe": 1105, "dinput, middle stripe": 2050, "dinput, last stripe": 2050}
    assert set(found) == set(least)
    for name, k in least.items():
        assert cycles(found[name])[1] < 8 * k, name


# ----------------------------------------------------------------------------------------------------------
# Long


@pytest.mark.emulator_full
@both
@dtypes
@pytest.mark.parametrize("keeps", [False, True])
def test_configs_as_planned(arch: str, dtype: torch.dtype, keeps: bool, as_planned):
    case = ignoring(random_case(140, 136, 1000, dtype))
    check(case, train(case, arch, kept_columns=768 if keeps else 0, window=0 if keeps else 400))


@pytest.mark.emulator_full
@both
@pytest.mark.parametrize("seed", range(20))
def test_many_schedules(arch: str, seed: int):
    """Ragged sizes; recomputed, partly kept, all kept, and every fourth in fp16."""
    dtype = FP16 if seed % 4 == 3 else BF16
    V = 200 + 21 * seed
    case = ignoring(random_case(37 + 8 * seed, 64 + 8 * (seed % 10), V, dtype, seed))
    kept = (0, 128, V)[seed % 3]
    window = (0, 100, 128)[seed % 3]
    check(case, train(case, arch, kept_columns=kept, window=window, sms=2 + 2 * (seed % 3), seed=seed))


@pytest.mark.emulator_full
@both
@hows
@pytest.mark.parametrize("seed", range(20))
def test_schedules_as_planned(arch: str, how: str, seed: int, as_planned):
    """The configurations of a GPU: several tiles of columns of each GEMM, and rings that wrap."""
    V = 900 if how.endswith("keep, stripes") else 600
    dtype, kept, window = HOW[how]
    kept = V if kept is None else 768 if kept else 0
    case = ignoring(random_case(60 + 10 * seed, 328, V, dtype, seed))
    window = (V - kept) // 2 + 6 if window else 0
    check(case, train(case, arch, kept_columns=kept, window=window, sms=2 + 2 * (seed % 2), seed=seed))


if __name__ == "__main__":
    for name, counts in (epilogues() | epilogues_of_stripes()).items():
        least, most = cycles(counts)
        print(f"{name}: {sum(counts.values()):.0f} instructions, {least:.0f} to {most:.0f} clocks a tile")
        for k in (1024, 4096, 8192):
            print(f"    k {k}: {least / (8 * k):.0%} to {most / (8 * k):.0%} of the MMAs")
        print("    ", dict(counts.most_common(16)))
