"""Plans of grad_in_forward: chunks, workspace, and what launch/ allocates and asks for."""

from __future__ import annotations

import random

import pytest
import torch

from cute_lce.arch import Gpu
from cute_lce.arguments import Operands
from cute_lce.implementation import Request
from cute_lce.launch import KERNELS
from cute_lce.options import LossOptions
from cute_lce.plan import grad_in_forward as plans
from cute_lce.plan import schedule
from cute_lce.plan.kernels import BackwardKey, kernels
from cute_lce.plan.problem import MIB, Limits, Problem
from tests.device import planned_for
from tests.host.test_plan_backward import Allocations, Asked

GPU = Gpu("sm_90a", 132)
NEEDS = ((True, True), (True, False), (False, True))


def problems(count: int, seed: int) -> list[Problem]:
    draw = random.Random(seed)
    sizes = ((0, 15.5), (3, 9.5), (7, 18))
    return [
        Problem(
            n=int(2 ** draw.uniform(*sizes[0])),
            d=8 * int(2 ** draw.uniform(*sizes[1])),
            vocab=int(2 ** draw.uniform(*sizes[2])),
            half=draw.random() < 0.3,
            need_dinput=needs[0],
            need_dweight=needs[1],
            adds=needs[1] and draw.random() < 0.3,
        )
        for needs in (draw.choice(NEEDS) for _ in range(count))
    ]


def least(problem: Problem) -> int:
    """The workspace that a refusal names, in bytes."""
    with pytest.raises(ValueError, match=r"workspace_mb: got .*schedule='grad_in_forward'") as raised:
        plans.check_workspace(GPU, problem, Limits(workspace=1))
    named = next(word for word in str(raised.value).split("want at least ")[1].split())
    return int(float(named) * MIB) + 1


@pytest.mark.parametrize("problem", problems(40, 5), ids=lambda p: f"{p.n}-{p.d}-{p.vocab}")
def test_the_workspace_is_kept(problem: Problem):
    """From the least on, which is accepted, what is allocated fits it, and more of it is not slower."""
    fewest, before = least(problem), None
    for workspace in (fewest, 2 * fewest, 8 * fewest, 0):
        limits = Limits(workspace=workspace)
        plans.check_workspace(GPU, problem, limits)
        plan = plans.plan(GPU, problem, limits)
        assert sum(plan.tokens) == problem.n
        assert set(plan.tokens) == set(plan.chunks)
        assert len(set(plan.tokens)) <= 2
        if workspace:
            assert before is None or plan.clocks <= before
            before = plan.clocks
        peak = allocated(problem, limits)
        assert peak <= plan.bytes
        if workspace:
            assert peak <= workspace


def allocated(problem: Problem, limits: Limits, reduction: str = "sum", asked: Asked | None = None) -> int:
    """The peak bytes of launch's forward and backward beyond the gradients, no kernel launched."""
    dtype = torch.float16 if problem.half else torch.bfloat16
    hidden, weight = (
        torch.empty(rows, problem.d, dtype=dtype, device="meta") for rows in (problem.n, problem.vocab)
    )
    operands = Operands(hidden, weight, torch.empty(problem.n, dtype=torch.int64, device="meta"))
    out = torch.empty(weight.shape, device="meta") if problem.adds else None
    added = None if out is None else out.dtype
    request = Request(limits, 0, problem.need_dinput, problem.need_dweight, added=added)
    loss, dloss = LossOptions(reduction), torch.empty((), device="meta")
    with planned_for(GPU, asked if asked is not None else Asked()), Allocations(*operands, dloss) as counted:
        found = KERNELS.grad_in_forward(operands, loss, request)
        gradients = KERNELS.scale_gradients(dloss, operands.target, found, loss, dtype, out)
    assert (found.dinput is not None) == problem.need_dinput
    assert (found.dweight is not None) == problem.need_dweight
    wanted = problem.need_dinput, problem.need_dweight and not problem.adds
    assert tuple(each is not None for each in gradients) == wanted
    return counted.peak - sum(each.nbytes for each in gradients if each is not None)


def test_every_kernel_is_one_that_compile_compiles():
    """With grad_in_forward's float32 sums: `cute-lce compile --grad-weight-out float32`."""
    for half, dtype in ((False, "bfloat16"), (True, "float16")):
        asked = Asked()
        for problem in problems(60, 6):
            allocated(problem._replace(half=half), Limits(), "mean", asked)
        # The products' kernel is that of a result or that of an addition.
        assert asked <= {*kernels("sm_90a", dtype, "int64"), *kernels("sm_90a", dtype, "int64", "float32")}
        assert {key.added for key in asked if isinstance(key, BackwardKey)} == {"float32"}
        assert len(asked) > 20


def test_a_default_is_enough_to_come_near_the_best():
    """With what the accumulators take, although they exceed the documented default."""
    problem = Problem(32768, 4096, 262144)
    plan, best = (plans.plan(GPU, problem, Limits(workspace=w)) for w in (0, 1 << 60))
    assert plan.bytes > 4 * (problem.n + problem.vocab) * problem.d
    assert plan.clocks <= 1.11 * best.clocks


def test_chunks_are_as_even_as_tiles_allow():
    problem = Problem(32768, 4096, 262144, adds=True)
    plan = plans.plan(GPU, problem, Limits(workspace=int(5.7 * 1024) * MIB))
    assert len(plan.tokens) > 8
    assert plan.tokens[-1] > plan.tokens[0] // 2


@pytest.mark.parametrize(
    ("problem", "mb", "tokens", "rows"),
    [
        (Problem(32768, 4096, 262144), 5837, (6720,) * 4 + (5888,), 256),
        (Problem(32768, 4096, 262144), 8909, (11088, 11088, 10592), 256),
        # Chunks have less memory where dweight is added elsewhere, and is no result.
        (Problem(32768, 4096, 262144, adds=True), 5837, (2560,) * 12 + (2048,), 256),
        (Problem(20480, 3584, 152064), 3072, (5120,) * 4, 256),
        # A row of dinput's tiles is more than a round.
        (Problem(8192, 40960, 32768, adds=True), 6500, (4160, 4032), 256),
    ],
)
def test_chunks_fill_the_rounds_of_wide_tiles(problem: Problem, mb: int, tokens: tuple[int, ...], rows: int):
    """rows: of dinput's tiles in a whole chunk."""
    plan = plans.plan(GPU, problem, Limits(workspace=mb * MIB))
    assert plan.tokens == tokens
    assert plan.chunks[tokens[0]].backward.dhidden.tile_m == rows


def test_large_chunks_have_no_narrow_tiles():
    """Though they would fill the rounds of 6656 tokens."""
    problem = Problem(6656, 4096, 262144)
    plan = plans.plan(GPU, problem, Limits(workspace=1 << 60))
    assert [chunk.backward.dhidden.tile_n >= 128 for chunk in plan.chunks.values()] == [True] * len(
        plan.chunks
    )
    # Few tokens have them.
    few = plans.plan(GPU, problem._replace(n=96), Limits(workspace=1 << 60))
    assert all(chunk.backward.dhidden.tile_n < 128 for chunk in few.chunks.values())


@pytest.mark.parametrize("model", range(2))
def test_autos_time_never_rises_with_the_workspace(model: int):
    """Where keeping takes over from it and it from keeping, too."""
    gpu, taken = GPU._replace(model=model), 0
    shapes = [(32768, 4096, 131072), (16384, 3584, 152064), (8192, 768, 128256), (32768, 3584, 262208)]
    for shape in shapes:
        problem, before = Problem(*shape), None
        for mb in range(1000, 18001, 700):
            limits = Limits(workspace=mb * MIB)
            seconds = schedule.predict(gpu, problem, "auto", limits).seconds
            found = plans.predict_auto(gpu, problem, limits)
            taken_s = seconds
            if found is not None:
                assert found.seconds < seconds
                seconds, taken = found.seconds, taken + 1
                taken_s = plans.predict(gpu, problem, limits).seconds
            if before is not None:
                assert seconds <= before[0], (problem, mb)
                # What it stands for may be faster than is expected of it, but not by much.
                assert taken_s <= 1.02 * before[1], (problem, mb)
            before = seconds, taken_s
    assert taken > 20


@pytest.mark.parametrize("problem", problems(20, 9), ids=lambda p: f"{p.n}-{p.d}-{p.vocab}")
def test_the_least_is_within_the_same_bounds_as_other_schedules(problem: Problem):
    limits = Limits(workspace=plans.least_workspace(GPU, problem))
    found = plans.predict(GPU, problem, limits)
    assert found.seconds <= max(1.8 * found.floor, 1.5 * found.best)
    assert found.seconds <= 1.8 * found.floor or found.best > 1.8 * found.floor
    helps = plans.helpful_workspace(GPU, problem, "grad_in_forward", limits, found.best)
    near = plans.predict(GPU, problem, Limits(workspace=helps))
    assert near.seconds <= 1.1 * near.best
