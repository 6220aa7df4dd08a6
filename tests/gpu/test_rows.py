"""On a GPU that has kernels: ignored rows are compacted away, at any size."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from cute_lce import linear_cross_entropy
from cute_lce.ops import prepared
from cute_lce.plan import memory
from cute_lce.plan.problem import MIB
from tests.device import accepted, forget_plans
from tests.gpu.test_accumulate import dtypes, train
from tests.gpu.test_forward import device_case, needs_kernels, poisoned
from tests.numerics import Case, assert_close

BF16, FP16 = torch.bfloat16, torch.float16

pytestmark = [*needs_kernels, poisoned]
# Schedules, and what makes them keep some columns, take stripes, and take chunks of tokens.
SCHEDULES = {
    "keep": {"schedule": "keep"},
    "recompute": {"schedule": "recompute"},
    "stripes": {"schedule": "recompute", "window": 1280},
    "grad_in_forward": {"schedule": "grad_in_forward"},
}
schedules = pytest.mark.parametrize("schedule", SCHEDULES)
N, D, V = 515, 264, 5003
VALID = {
    "all": lambda i: i >= 0,
    "none": lambda i: i < 0,
    "one": lambda i: i == 77,
    "the last": lambda i: i == N - 1,
    "the end": lambda i: i >= 300,
    "the beginning": lambda i: i < 200,
    "random": lambda i: torch.rand(N, generator=torch.Generator().manual_seed(3)) < 0.4,
    "64": lambda i: i % 8 == 0,
    "a k tile more one": lambda i: i < 65,
    "two tiles": lambda i: i >= N - 256,
    "all but one": lambda i: i != 3,
}


@pytest.fixture(autouse=True)
def _at_any_size(monkeypatch):
    monkeypatch.setattr(memory, "LEAST_COMPACTED", 0)
    monkeypatch.setattr(memory, "LEAST_VOCAB", 0)
    forget_plans()
    prepared.cache.clear()
    yield
    forget_plans()
    prepared.cache.clear()
    torch.cuda.empty_cache()


def some_valid(which: str, dtype: torch.dtype) -> tuple[Case, Case]:
    """A case whose ignored rows are nan and inf, and the same with zeros there."""
    case = device_case(N, D, V, dtype)
    valid = VALID[which](torch.arange(N)).to("cuda")
    target = case.target.where(valid, case.ignore_index)
    bad = torch.where(torch.arange(N, device="cuda") % 2 == 0, torch.nan, torch.inf).to(dtype)
    return (
        replace(case, input=case.input.where(valid[:, None], bad[:, None]), target=target),
        replace(case, input=case.input.where(valid[:, None], 0), target=target),
    )


def check(found, clean: Case, dloss: torch.Tensor, reduction: str) -> None:
    expected, plain = clean.expected(dloss.double(), reduction), clean.baseline(dloss.double(), reduction)
    for name, mine, want, base in zip(("loss", "dinput", "dweight"), found, expected, plain, strict=True):
        # A single row's target has a single rounding, which may be small in one of the two by chance.
        assert_close(name, mine, want, base, rounding=torch.finfo(clean.input.dtype).eps / 4)
    ignored = clean.target == clean.ignore_index
    assert not found[1][ignored].any()
    if reduction == "none":
        assert not found[0][ignored].any()


@dtypes
@schedules
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("which", VALID)
def test_which_are_valid(which, reduction, schedule, dtype):
    if schedule == "grad_in_forward" and reduction == "none":
        reduction = "sum"
    case, clean = some_valid(which, dtype)
    dloss = clean.upstream(reduction).float()
    given = dloss
    if reduction == "none":
        # What belongs to ignored rows is not read.
        given = dloss.masked_fill(clean.target == clean.ignore_index, torch.nan)
    check(train(case, given, reduction=reduction, **SCHEDULES[schedule]), clean, dloss, reduction)


@dtypes
@pytest.mark.parametrize("which", VALID)
def test_the_least_workspace(which, dtype):
    """Columns kept in part, chunks, stripes; and no more memory than allowed."""
    case, clean = some_valid(which, dtype)
    dloss = torch.ones((), device="cuda")
    for schedule in ("auto", "keep", "recompute", "grad_in_forward"):
        call = functools.partial(train, case, dloss, schedule=schedule)
        least = accepted(lambda mib, call=call: call(workspace_mb=mib))
        for workspace in (least, least * 1.4):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            found = train(case, dloss, schedule=schedule, workspace_mb=workspace)
            results = sum(tensor.nbytes for tensor in found)
            assert torch.cuda.max_memory_allocated() - before <= workspace * MIB + results + MIB
            check(found, clean, dloss, "mean")


@dtypes
def test_a_frozen_weight(dtype):
    case, clean = some_valid("random", dtype)
    dloss = clean.upstream("none")
    for schedule in ("keep", "recompute", "grad_in_forward"):
        hidden = case.input.detach().requires_grad_()
        loss = linear_cross_entropy(
            hidden, case.linear_weight, case.target, reduction="none", schedule=schedule
        )
        (dinput,) = torch.autograd.grad(loss, hidden, dloss.float())
        want, base = (f(dloss, "none")[1] for f in (clean.expected, clean.baseline))
        assert_close("dinput", dinput, want, base)


@dtypes
@pytest.mark.parametrize("schedule", ["keep", "stripes"])
def test_a_rows_bits_do_not_depend_on_the_others(schedule, dtype):
    """With a window the order of a row's additions is the window's."""
    case = device_case(N, D, V, dtype)
    dloss = torch.ones(N, device="cuda")
    options = {**SCHEDULES[schedule], "window": 1280, "reduction": "none"}
    loss, dinput, _ = train(case, dloss, **options)
    for which in ("random", "one", "the end"):
        valid = VALID[which](torch.arange(N)).to("cuda")
        some = replace(case, target=case.target.where(valid, case.ignore_index))
        some_loss, some_dinput, _ = train(some, dloss, **options)
        assert torch.equal(some_loss[valid], loss[valid])
        assert torch.equal(some_dinput[valid], dinput[valid])


@schedules
def test_a_captured_graph_is_replayed_with_other_targets(schedule):
    case, clean = some_valid("random", BF16)
    hidden, weight = (t.detach().clone().requires_grad_() for t in (case.input, case.linear_weight))
    target = case.target.clone()

    def step() -> tuple[torch.Tensor, ...]:
        loss = linear_cross_entropy(hidden, weight, target, **SCHEDULES[schedule])
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for which in ("one", "all but one", "none", "the end", "random"):
        case, clean = some_valid(which, BF16)
        with torch.no_grad():
            hidden.copy_(case.input)
        target.copy_(case.target)
        graph.replay()
        check(found, clean, torch.ones((), device="cuda"), "mean")


def test_a_target_out_of_range_makes_its_row_nan():
    case, _ = some_valid("random", BF16)
    target = case.target.clone()
    target[[5, 500]] = torch.tensor([V, -1], device="cuda")
    sick = torch.zeros(N, dtype=torch.bool, device="cuda")
    sick[[5, 500]] = True
    for schedule in ("keep", "stripes"):
        loss, dinput, dweight = train(
            replace(case, target=target),
            torch.ones(N, device="cuda"),
            reduction="none",
            **SCHEDULES[schedule],
        )
        assert torch.equal(loss.isnan(), sick)
        assert torch.equal(dinput.isnan().any(1), sick)
        assert dweight.isnan().all()
