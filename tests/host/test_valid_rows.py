"""The streaming path on a CPU computes the rows that are not ignored alone: counted in multiplications."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_lce import linear_cross_entropy, linear_logprob, sampled_linear_cross_entropy
from cute_lce.arguments import IGNORED, Operands
from cute_lce.implementation import (
    Request,
    RowLoss,
    Saved,
    StatsOperands,
    StatsOptions,
    StatsSaved,
    StatsUpstream,
)
from cute_lce.options import LossOptions, TermOptions
from cute_lce.plan.problem import Limits
from cute_lce.streaming import STATISTICS, STREAMING, memory, sampled
from cute_lce.streaming.token_rows import forward as forward_with_terms
from tests.host.test_memory_streaming import LOGITS, d, measure, n, operands, results
from tests.numerics import assert_close, random_case

SCHEDULES = ("recompute", "keep", "grad_in_forward")
N, D, V = 40, 12, 300


class _Products(TorchDispatchMode):
    """Counts multiplications."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # torch.utils.flop_counter does not count addmm_.
        kinds = {torch.ops.aten.mm: 0, torch.ops.aten.addmm: 1, torch.ops.aten.addmm_: 1}
        if func.overloadpacket in kinds:
            first = kinds[func.overloadpacket]
            self.total += args[first].numel() * args[first + 1].shape[1]
        return func(*args, **(kwargs or {}))


def products(function: Any) -> float:
    """Multiplications of function's matrix products, as products of N rows, D and V."""
    with _Products() as counter:
        function()
    return counter.total / (N * D * V)


def case_of(ignored: int, dtype: torch.dtype = torch.float32):
    """So many rows ignored, which hold nan and inf, at random places."""
    case = random_case(N, D, V, dtype)
    rows = torch.randperm(N, generator=torch.Generator().manual_seed(ignored))[:ignored]
    case.target[rows] = -100
    case.input[rows] = torch.tensor([torch.nan, torch.inf]).to(dtype).repeat(D // 2)
    return case


@pytest.mark.parametrize("ignored", [0, 10, 30, 39, 40])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_multiplications_follow_the_valid_rows(schedule, ignored):
    case, share = case_of(ignored), (N - ignored) / N
    tensors, loss = Operands(case.input, case.linear_weight, case.target), LossOptions("sum")
    if schedule == "grad_in_forward":
        assert products(lambda: STREAMING.grad_in_forward(tensors, loss, Request())) == pytest.approx(
            3 * share
        )
        return
    request = Request(Limits(64), 128 if schedule == "keep" else 0)
    forward = STREAMING.forward(tensors, loss, request)
    found = forward.statistics(tensors, loss)
    assert products(lambda: forward.statistics(tensors, loss)) == pytest.approx(share)
    assert found.row_max is not None
    assert found.row_sum is not None
    assert found.num_valid is not None
    saved = Saved(*tensors, found.row_max, found.row_sum, found.num_valid, found.kept, found.kept_scale)
    backward, one = STREAMING.backward(tensors, loss, request), torch.ones(())
    # The logits again, but for what was kept, and both gradients.
    want = (3 - request.kept_columns / V) * share
    assert products(lambda: backward.dinput(one, saved, loss)) == pytest.approx(want)


@pytest.mark.parametrize("ignored", [0, 30, 40])
@pytest.mark.parametrize("kept", [0, 128])
def test_those_of_token_stats_too(kept, ignored):
    case, share = case_of(ignored), (N - ignored) / N
    temperature = torch.rand(N) + 0.5
    topk_ids = torch.randint(V, (N, 3))
    given = StatsOperands(
        case.input,
        case.linear_weight,
        case.target,
        torch.randn(V),
        temperature=temperature,
        topk_ids=topk_ids,
    )
    names = "logprob", "entropy", "lse", "topk_logprob", "argmax", "is_top1"
    options = StatsOptions(-100, 1.0, 5.0, 1.0, names)
    request = Request(Limits(64), kept, need_dbias=True)
    found = STATISTICS.forward(given, options, request)
    assert products(lambda: STATISTICS.forward(given, options, request)) == pytest.approx(share)
    assert found.row_max is not None
    assert found.row_sum is not None
    saved = StatsSaved(found.row_max, found.row_sum, found.mean_gap, found.kept, found.target_logit)
    upstream = StatsUpstream(logprob=torch.ones(N), entropy=torch.ones(N), topk_logprob=torch.ones(N, 3))
    run = products(lambda: STATISTICS.backward(upstream, given, saved, options, request))
    assert run == pytest.approx((3 - kept / V) * share)
    row_loss = RowLoss(TermOptions(z_loss=0.1), torch.ones(N), torch.ones(N))
    plain = options._replace(outputs=("logprob", "lse"))
    alone = given._replace(topk_ids=None)
    run = products(lambda: STATISTICS.grad_in_forward(alone, plain, row_loss, request))
    assert run == pytest.approx(3 * share)


def test_those_of_shards():
    """Targets of other shards are no ignored ones; merges see all rows."""
    case = case_of(30)
    target = torch.where(case.target == -100, IGNORED, torch.where(case.target < 150, case.target, -1))
    tensors = Operands(case.input, case.linear_weight[:150], target)
    loss, request = LossOptions("none", IGNORED), Request(shard=True)
    forward = STREAMING.forward(tensors, loss, request)
    found = forward.statistics(tensors, loss)
    assert found.loss.shape == (N,)
    assert torch.equal(found.loss.isnan(), (target == -1) | (target == IGNORED))
    assert products(lambda: forward.statistics(tensors, loss)) == pytest.approx(0.5 * 0.25)
    assert found.row_max is not None
    assert found.row_sum is not None
    saved = Saved(*tensors, found.row_max, found.row_sum, torch.tensor(10))
    backward = STREAMING.backward(tensors, loss, request)
    halfway = backward.dinput(torch.ones(N), saved, loss)
    dinput = halfway[0]
    assert dinput is not None
    assert dinput.dtype is torch.float32
    assert not dinput[target == IGNORED].any()
    assert products(lambda: backward.dinput(torch.ones(N), saved, loss)) == pytest.approx(1.5 * 0.25)

    seen = []

    def merge(own):
        seen.append(own)
        return own._replace(target_logit=own.target_logit.nan_to_num())

    given, options = StatsOperands(*tensors), StatsOptions(IGNORED, 1.0, None, 1.0, ("logprob", "entropy"))
    stats = forward_with_terms(given, options, Request(), merge)
    assert all(each is None or each.shape == (N,) for each in seen[0])
    assert seen[0].mean_gap is not None
    assert torch.equal(seen[0].target_logit.isnan(), found.loss.isnan())
    assert stats.logprob is not None
    assert not stats.logprob[target == IGNORED].any()


def test_those_of_a_sample():
    case, ids = case_of(30), torch.arange(100)
    given = sampled.SampledOperands(case.input, case.linear_weight, case.target, ids)
    options = sampled.SampledOptions(-100, 1.0, True, 0)
    losses, stats = sampled.forward(given, options)
    assert products(lambda: sampled.forward(given, options)) == pytest.approx(0.25 / 3)
    needed = True, True, False
    run = products(lambda: sampled.backward(given, options, stats, losses, needed))
    assert run == pytest.approx(0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_values(reduction, schedule, dtype):
    """Of few valid rows, with what is kept of them; and of none."""
    for ignored in (30, 39, 40):
        case = case_of(ignored, dtype)
        needs_weight = schedule != "grad_in_forward" or reduction != "none"
        hidden = case.input.detach().requires_grad_()
        weight = case.linear_weight.detach().requires_grad_(needs_weight)
        leaves = [hidden, weight][: 1 + needs_weight]
        upstream = case.upstream(reduction)
        clean = replace(case, input=case.input.masked_fill((case.target == -100).unsqueeze(1), 0))
        expected, baseline = clean.expected(upstream, reduction), clean.baseline(upstream, reduction)
        every: list[dict[str, Any]] = [{}, {"window": 64}, {"workspace_mb": 0.2}]
        for options in every:
            loss = linear_cross_entropy(
                hidden, weight, case.target, reduction=reduction, schedule=schedule, **options
            )
            found = loss.detach(), *torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))
            for name, actual, want, base in zip(
                ("loss", "dinput", "dweight"), found, expected, baseline, strict=False
            ):
                assert_close(name, actual, want, base.to(actual.dtype))


def test_a_compiled_call_has_no_shape_that_depends_on_targets():
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    for schedule in SCHEDULES[1:]:
        for ignored in (0, 17, 40):
            case = case_of(ignored)
            losses = []
            for call in (compiled, linear_cross_entropy):
                leaf = case.input.detach().requires_grad_()
                loss = call(leaf, case.linear_weight, case.target, schedule=schedule)
                losses.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
            assert torch.equal(losses[0][0], losses[1][0])
            torch.testing.assert_close(losses[0][1], losses[1][1])


def test_an_error_counts_all_rows():
    case = case_of(20)
    valid = torch.nonzero(case.target != -100).squeeze(1)
    row = int(valid[10])
    assert row > 10
    case.target[row] = V
    given = case.input, case.linear_weight.requires_grad_(), case.target
    message = f"target: got {V} at token {row},"
    for schedule in SCHEDULES:
        every: list[dict[str, Any]] = [{}, {"z_loss": 0.1}]
        for terms in every:
            with pytest.raises(ValueError, match=message):
                linear_cross_entropy(*given, schedule=schedule, **terms)
    with pytest.raises(ValueError, match=message):
        linear_logprob(*given, outputs=("entropy",))
    with pytest.raises(ValueError, match=message):
        sampled_linear_cross_entropy(*given, torch.arange(4))


@pytest.mark.parametrize(
    ("schedule", "workspace_mb"), [("recompute", 1.2), ("keep", 8.5), ("grad_in_forward", 24)]
)
@pytest.mark.parametrize(("share", "dtype"), [(0.002, torch.float32), (0.5, torch.bfloat16)])
def test_a_workspace_holds(share, dtype, schedule, workspace_mb):
    """With one ignored row, and half of them; terms too."""
    hidden, weight, target = operands(dtype)
    target[: int(n * share)] = -100

    def step(**terms: Any) -> None:
        options = {"schedule": schedule, "workspace_mb": workspace_mb, **terms}
        linear_cross_entropy(hidden, weight, target, reduction="sum", **options).backward()
        hidden.grad = weight.grad = None

    for terms in ({}, {"z_loss": 0.1}) if schedule == "keep" else ({},):
        peak, largest = measure(lambda terms=terms: step(**terms))
        assert peak - results(dtype) <= workspace_mb * (1 << 20)
        assert largest < LOGITS


@pytest.mark.parametrize("terms", [{}, {"z_loss": 0.1}], ids=["plain", "terms"])
@pytest.mark.parametrize("schedule", ["recompute", "grad_in_forward"])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_least_workspace_holds_copies_of_rows(frozen, schedule, terms):
    """Where they are what takes memory, and all but one row are valid."""
    rows, width, classes = 3000, 256, 64
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(classes, width, requires_grad=not frozen)
    target = torch.randint(classes, (rows,))
    target[5] = -100
    options = {"schedule": schedule, "reduction": "sum", **terms}
    with pytest.raises(ValueError, match="workspace_mb: got") as refused:
        linear_cross_entropy(hidden, weight, target, workspace_mb=0.01, **options)
    least = float(str(refused.value).split("at least ")[1].split()[0])

    def step() -> None:
        linear_cross_entropy(hidden, weight, target, workspace_mb=least, **options).backward()
        hidden.grad = weight.grad = None

    peak, _ = measure(step)
    assert peak - (rows + (not frozen) * classes) * width * 4 <= least * (1 << 20)


def test_chunks_follow_the_valid_rows():
    """As many as those alone have."""
    hidden, weight, target = (each.detach() for each in operands(torch.float32))
    limits, seen = Limits(0, (n + 2 * weight.shape[0]) * d * 8), []
    real = memory.chunks

    def chunks(given, request, terms=False):
        seen.append(real(given, request, terms))
        return seen[-1]

    target[::4] = -100
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cute_lce.streaming.grad_in_forward.chunks", chunks)
        STREAMING.grad_in_forward(Operands(hidden, weight, target), LossOptions(), Request(limits))
    assert seen[0][0][-1][1] == n - n // 4
    assert len(seen[0][0]) > 1
