"""The portable implementation by itself: its statistics, its plan, and what only a GPU does with it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_lce import linear_cross_entropy, reference, streaming
from cute_lce.arguments import Operands
from cute_lce.implementation import Request
from cute_lce.ops import prepared
from cute_lce.options import LossOptions
from cute_lce.plan.problem import Limits, Problem
from cute_lce.streaming import STREAMING, memory, products
from cute_lce.streaming import rows as row_functions
from tests import numerics, passes
from tests.numerics import (
    CASES,
    assert_close,
    check_bad_rows,
    random_case,
    with_bad_ignored_rows,
    with_bad_rows,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def statistics(case, window=0, reduction="mean"):
    """(loss, row_max, row_sum, num_valid)."""
    flat = replace(case, input=case.input.reshape(-1, case.input.shape[-1]), target=case.target.reshape(-1))
    with torch.no_grad():
        results = passes.forward(STREAMING, flat, reduction=reduction, window=window)
    assert results.kept is None
    assert results.kept_scale is None
    return results.loss, *passes.statistics_of(results)


@pytest.mark.parametrize("window", [0, 1, 50, 64, 4096])
@pytest.mark.parametrize("name", ["ragged", "jumps", "ignored", "sharp"])
def test_statistics(name, window):
    case = numerics.make(name, torch.float64)
    _, row_max, row_sum, num_valid = statistics(case, window)
    logits = case.input @ case.linear_weight.mT
    valid = case.target != case.ignore_index
    torch.testing.assert_close(row_max[valid], logits.amax(1)[valid])
    sums = (logits - logits.amax(1, keepdim=True)).exp().sum(1)
    torch.testing.assert_close(row_sum[valid], sums[valid])
    assert bool((row_max + row_sum).isfinite().all())
    assert num_valid.dtype is torch.int64
    assert int(num_valid) == int((case.target != case.ignore_index).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_statistics_are_float32(dtype):
    loss, row_max, row_sum, _ = statistics(numerics.make("ragged", dtype), reduction="none")
    assert loss.dtype is row_max.dtype is row_sum.dtype is torch.float32


@pytest.mark.parametrize(
    ("n", "V", "window", "kept"),
    [
        (1, 1, 0, 0),
        (5, 1000, 0, 0),
        (5, 1000, 7, 0),
        (2048, 50257, 0, 0),
        (9, 1000, 64, 320),
        (3, 100, 64, 100),
    ],
)
def test_windows_cover_the_vocabulary_once(n, V, window, kept):
    operands = Operands(torch.empty(n, 4), torch.empty(V, 4), torch.zeros(n, dtype=torch.int64))
    ranges = memory.windows(operands, Request(Limits(window), kept))
    assert [column for low, high in ranges for column in range(low, high)] == list(range(V))
    assert not any(low < kept < high for low, high in ranges)
    assert all(high - low <= window for low, high in ranges) or not window


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "V", "window"), [(1, 1, 0), (100, 1000, 0), (100, 1000, 33), (5000, 50257, 0)])
def test_chunks_cover_the_tokens_once(n, V, window, dtype):
    operands = Operands(
        torch.empty(n, 4, dtype=dtype), torch.empty(V, 4, dtype=dtype), torch.zeros(n, dtype=torch.int64)
    )
    chunks, ranges = memory.chunks(operands, Request(Limits(window)))
    assert [token for start, stop in chunks for token in range(start, stop)] == list(range(n))
    assert [column for low, high in ranges for column in range(low, high)] == list(range(V))


CPU = torch.device("cpu")


def choose(schedule="auto", reduction="mean", needed=(True, True), workspace=0, n=128):
    need_dinput, need_dweight = needed
    problem = Problem(n, 64, 5000, need_dinput=need_dinput, need_dweight=need_dweight)
    return STREAMING.choose(
        problem, torch.float32, CPU, schedule, reduction, Limits(window=0, workspace=workspace)
    )


def test_choose():
    assert choose() == ("recompute", 0)
    assert choose("recompute", "none") == ("recompute", 0)
    assert choose("keep") == ("keep", 5000)
    assert choose("auto", workspace=10_000_000) == ("keep", 5000)
    assert choose("auto", workspace=200_000)[1] < 5000
    assert choose("recompute", workspace=10_000_000) == ("recompute", 0)
    assert choose("keep", n=0) == ("recompute", 0)
    assert choose("grad_in_forward") == ("grad_in_forward", 0)
    for schedule in ("auto", "recompute", "keep", "grad_in_forward"):
        assert choose(schedule, needed=(False, False)) == ("recompute", 0)
        assert choose(schedule, "none", needed=(True, False))[0] != "auto"


@pytest.mark.parametrize("V", [1, 63, 64, 65, 200, 5000])
def test_choose_keeps_whole_windows_or_everything(V):
    """What the expression without branches comes to, by branches."""
    problem, seen = Problem(10, 4, V), set()
    fixed, column = memory._costs(problem, torch.float32, "cpu")
    least = fixed + column * min(64, V)
    for workspace in range(least, least + (V + 2) * 40, 8):
        limits = Limits(0, workspace)
        schedule, kept = STREAMING.choose(problem, torch.float32, CPU, "keep", "mean", limits)
        fit = (workspace - least) // (10 * 4)
        wanted = V if fit >= V else fit // 64 * 64
        assert (schedule, kept) == (("keep", wanted) if wanted else ("recompute", 0))
        seen.add(kept)
    assert {0, V} <= seen


def test_choose_keeps_in_proportion_to_the_workspace():
    kept = [choose("keep", workspace=workspace)[1] for workspace in range(200_000, 3_000_000, 100_000)]
    assert kept == sorted(kept)
    assert kept[0] < 200
    assert kept[-1] == 5000
    steps = [b - a for a, b in itertools.pairwise(kept) if b < 5000]
    assert max(steps) <= 100_000 // (128 * 4) + 64


# ----------------------------------------------------------------------------------------------------------
# What a GPU does: narrow operands are multiplied as they are, and a bad target is not refused


@pytest.fixture
def narrow_products(monkeypatch):
    """The path of CUDA's bf16 and float16 on a CPU: operands are rounded, products summed in float32."""

    def mm(a, b, out):
        return out.copy_(a.to(torch.float32) @ b.to(torch.float32))

    def add_mm(accumulator, a, b):
        accumulator += a.to(torch.float32) @ b.to(torch.float32)

    original = torch.mm

    def rounding_mm(a, b, out):
        assert a.dtype is b.dtype is out.dtype
        if a.dtype is torch.float32:
            return original(a, b, out=out)
        return out.copy_(a.to(torch.float32) @ b.to(torch.float32))

    for module in (memory, products):
        monkeypatch.setattr(module, "multiplies_narrow", lambda device_type: True)
    for module in (streaming.forward, streaming.backward, streaming.grad_in_forward, streaming.token_stats):
        monkeypatch.setattr(module, "mm", mm)
    for module in (streaming.backward, streaming.grad_in_forward, streaming.token_stats):
        monkeypatch.setattr(module, "add_mm", add_mm)
    monkeypatch.setattr(torch, "mm", rounding_mm)
    # What was prepared for this device's products is not for those.
    monkeypatch.setattr(prepared, "cache", {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in CASES if name != "gpt2"])
def test_narrow_products(narrow_products, name, dtype):
    case = numerics.make(name, dtype)
    for schedule in ("recompute", "keep", "grad_in_forward"):
        case.check(linear_cross_entropy, schedule=schedule, window=100, rounded_dlogits=True)
    case.check(linear_cross_entropy, reduction="none", window=100, rounded_dlogits=True)


@pytest.mark.parametrize("name", [name for name in CASES if name != "gpt2"])
def test_a_cpu_that_multiplies_bfloat16(monkeypatch, name):
    """All rounded dlogits are held where they fit, and each gradient is one product."""
    monkeypatch.setattr(memory, "sums_narrow", lambda device_type, dtype: dtype is torch.bfloat16)
    monkeypatch.setattr(prepared, "cache", {})
    held = []
    holds = memory.holds_dlogits
    monkeypatch.setattr(
        streaming.backward, "holds_dlogits", lambda *request: held.append(holds(*request)) or held[-1]
    )
    case = numerics.make(name, torch.bfloat16)
    for schedule in ("auto", "keep", "grad_in_forward"):
        case.check(linear_cross_entropy, schedule=schedule, rounded_dlogits=True)
    case.check(linear_cross_entropy, reduction="none", rounded_dlogits=True)
    assert held == [True] * 4
    case.check(linear_cross_entropy, schedule="recompute", rounded_dlogits=True)
    assert held == [True] * 4 + [False]
    leaves = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    with pytest.raises(ValueError, match="schedule: got 'grad_in_forward' with reduction='none'"):
        linear_cross_entropy(*leaves, case.target, reduction="none", schedule="grad_in_forward")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
def test_narrow_products_of_terms(narrow_products, schedule, dtype):
    """The errors of dlogits, rounded before the products, beside those of float32 logits."""
    case = random_case(40, 16, 90, dtype, scale=2.0)
    case.target[3::4] = -100
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(90, generator=generator).to(dtype)
    terms: dict[str, Any] = {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.01, "logit_scale": 0.7}
    leaves = [each.detach().requires_grad_() for each in (case.input, case.linear_weight, bias)]
    for upstream in (1.0, 1e-5):
        loss = linear_cross_entropy(
            leaves[0], leaves[1], case.target, linear_bias=leaves[2], schedule=schedule, window=50, **terms
        )
        found = torch.autograd.grad(loss, leaves, torch.tensor(upstream))
        wide = case.input.double(), case.linear_weight.double(), case.target, upstream
        expected = reference.gradients(*wide, linear_bias=bias.double(), **terms)[1:]
        for one, want in zip(found, expected, strict=True):
            # Below float16's normal numbers the result itself is coarse.
            floor = 2.0**-24 / float(want.abs().mean()) if dtype is torch.float16 else 0.0
            assert numerics.relative_error(one, want) < 2 * 2.0**-8 + floor


def test_narrow_float16_mean_of_many_tokens(narrow_products):
    """upstream / n is under float16's range: nothing may be flushed to zero."""
    case = random_case(65536, 8, 24, torch.float16)
    case.check(linear_cross_entropy, dloss=torch.tensor(1.0, dtype=torch.float64), rounded_dlogits=True)
    hidden = case.input.requires_grad_()
    linear_cross_entropy(hidden, case.linear_weight, case.target).backward()
    assert hidden.grad is not None
    assert bool(hidden.grad.any(1).all())


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
@pytest.mark.parametrize("bad", [-1, 130, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("gradient", [1.0, 0.0])
def test_bad_target_gives_nan(monkeypatch, request, gradient, bad, schedule, dtype, narrow):
    if narrow:
        request.getfixturevalue("narrow_products")
    monkeypatch.setattr(row_functions, "_refuse_targets", lambda *_: None)
    case = random_case(9, 16, 130, dtype)
    case.target[4] = bad
    case.target[6] = -100
    expected = torch.zeros(9, dtype=torch.bool)
    expected[4] = True
    for reduction in ("mean", "none"):
        hidden = case.input.detach().requires_grad_()
        weight = case.linear_weight.detach()
        weight.requires_grad_(schedule != "grad_in_forward" or reduction != "none")
        loss = linear_cross_entropy(
            hidden, weight, case.target, reduction=reduction, schedule=schedule, window=64
        )
        loss.backward(torch.full_like(loss, gradient))
        assert torch.equal(loss.isnan(), expected if reduction == "none" else torch.tensor(True))
        assert hidden.grad is not None
        assert torch.equal(hidden.grad.isnan().all(1), expected)
        assert torch.equal(hidden.grad.isnan().any(1), expected)
        if weight.requires_grad:
            assert weight.grad is not None
            assert weight.grad.isnan().all()


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("schedule", ["recompute", "keep"])
def test_ignored_rows_take_no_part(request, schedule, dtype, narrow):
    """Whatever an ignored row's upstream gradient, and even if no class is left to it."""
    if narrow:
        request.getfixturevalue("narrow_products")
    case = random_case(30, 16, 200, dtype)
    case.target[[3, 4, 5, 6]] = -100
    case.linear_weight[:, 0] = 1
    case.input[6, 0] = -math.inf
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    rows = linear_cross_entropy(hidden, weight, case.target, reduction="none", schedule=schedule, window=64)
    upstream = torch.ones(30)
    upstream[3:6] = torch.tensor([math.nan, math.inf, 1e30])
    rows.backward(upstream)
    assert not rows[3:7].any()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert not hidden.grad[3:7].any()
    keep = torch.tensor([row for row in range(30) if row not in (3, 4, 5, 6)])
    rest = numerics.Case(hidden.detach()[keep], weight.detach(), case.target[keep])
    got = hidden.grad[keep]
    assert_close(
        "dinput", got, rest.expected(1.0, "sum")[1], rest.baseline(1.0, "sum", rounded_dlogits=narrow)[1]
    )


@pytest.mark.parametrize("terms", [{}, {"token_weight": torch.ones(30)}], ids=["plain", "terms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
def test_bad_ignored_rows_change_nothing_where_all_are_computed(
    narrow_products, monkeypatch, schedule, dtype, terms
):
    """As on a GPU: 0 in dlogits is not enough for dweight, since 0 times nan is nan."""
    monkeypatch.setattr(row_functions, "computes_some_rows", lambda device_type: False)
    nans, zeros = numerics.with_bad_ignored_rows(random_case(30, 16, 200, dtype))
    hidden, weight = (each.detach().requires_grad_() for each in (nans.input, nans.linear_weight))
    loss = linear_cross_entropy(hidden, weight, nans.target, schedule=schedule, window=64, **terms)
    found = loss.detach(), *torch.autograd.grad(loss, (hidden, weight))
    narrow = dtype is not torch.float32
    expected, baseline = zeros.expected(), zeros.baseline(rounded_dlogits=narrow)
    for name, mine, want, base in zip(("loss", "dinput", "dweight"), found, expected, baseline, strict=True):
        assert_close(name, mine, want, base)


@pytest.mark.parametrize("terms", [{}, {"token_weight": torch.ones(6)}], ids=["plain", "terms"])
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_upstream_reaches_rows_whose_gradient_is_zero(bad, schedule, reduction, terms):
    """0 times it is nan, as in torch: the gradient is 0 since the weight is. Not in ignored rows."""
    hidden, target = torch.randn(6, 8).requires_grad_(), torch.tensor([3, 9, -100, 4, -100, 5])
    loss = linear_cross_entropy(
        hidden, torch.zeros(20, 8), target.int(), reduction=reduction, schedule=schedule, **terms
    )
    upstream = torch.tensor([1.0, bad, 1.0, 1.0, bad, bad]) if reduction == "none" else torch.tensor(bad)
    loss.backward(upstream)
    assert hidden.grad is not None
    reached = (target != -100) & ~upstream.isfinite()
    assert torch.equal(hidden.grad.isnan(), reached[:, None].expand(6, 8))
    assert not hidden.grad.nan_to_num(0).any()


# Columns kept of 200; None: grad_in_forward.
HOW = {"recompute": 0, "half kept": 128, "keep": 200, "grad_in_forward": None}


def train(case, how, dloss):
    """(loss, dinput, dweight) with per-row gradients; grad_in_forward has the loss's sum instead, and takes
    gradients of 1."""
    kept = HOW[how]
    with torch.no_grad():
        if kept is None:
            loss, accumulated = None, passes.grad_in_forward(STREAMING, case, reduction="sum", window=64)
            one = torch.tensor(1.0)
            loss_options, dtype = LossOptions("sum"), case.input.dtype
            dinput, dweight = STREAMING.scale_gradients(one, case.target, accumulated, loss_options, dtype)
        else:
            results = passes.forward(STREAMING, case, kept_columns=kept, window=64)
            assert (results.kept is None) == (kept == 0)
            loss = results.loss
            dinput, dweight = passes.backward(STREAMING, case, dloss.float(), results, window=64)
    assert dinput is not None
    assert dweight is not None
    return loss, dinput, dweight


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sick", [(), (0, 5, 39)], ids=["finite gradients", "rows of nan"])
@pytest.mark.parametrize("how", HOW)
def test_bad_rows_change_no_other(request, how, sick, dtype, narrow):
    if narrow:
        request.getfixturevalue("narrow_products")
    impossible = (3, 17, 38)
    case = with_bad_rows(random_case(40, 16, 200, dtype), sick, impossible)
    dloss = torch.ones(40) if HOW[how] is None else case.upstream("none")
    check_bad_rows(case, sick, impossible, train(case, how, dloss), dloss, narrow)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", HOW)
def test_a_target_far_below_the_maximum(request, how, dtype, narrow):
    if narrow:
        request.getfixturevalue("narrow_products")
    case = random_case(40, 16, 200, dtype)
    case.input[:, 0], case.linear_weight[:, 0] = 0, 0
    case.input[7, 0], case.linear_weight[150, 0], case.target[7] = 1, 38400, 10
    dloss = torch.ones(40)
    loss, dinput, dweight = train(case, how, dloss)
    expected = case.expected(dloss.double(), "none")
    baseline = case.baseline(dloss.double(), "none", rounded_dlogits=narrow)
    if loss is not None:
        assert_close("loss", loss, expected[0], baseline[0])
    # The column's height would hide all else of dinput.
    assert_close("dinput", dinput[:, 1:], expected[1][:, 1:], baseline[1][:, 1:])
    assert_close("dweight", dweight, expected[2], baseline[2])


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", HOW)
def test_what_ignored_rows_hold_does_not_matter(request, how, dtype, narrow):
    if narrow:
        request.getfixturevalue("narrow_products")
    case, plain = with_bad_ignored_rows(random_case(40, 16, 200, dtype))
    dloss = torch.ones(40) if HOW[how] is None else case.upstream("none")
    loss, dinput, dweight = train(case, how, dloss)
    expected = plain.expected(dloss.double(), "none")
    baseline = plain.baseline(dloss.double(), "none", rounded_dlogits=narrow)
    if loss is not None:
        assert_close("loss", loss, expected[0], baseline[0])
    assert_close("dinput", dinput, expected[1], baseline[1])
    assert not dinput[case.target == -100].any()
    # Where narrow operands are multiplied as they are, only float16 has a copy of the rows, for a vector.
    if not narrow or dtype is torch.float32 or (dtype is torch.float16 and HOW[how] is not None):
        assert_close("dweight", dweight, expected[2], baseline[2])


def test_accumulators_are_not_rounded():
    """grad_in_forward rounds once, after the upstream's factor."""
    case = random_case(20, 16, 200, torch.bfloat16)
    with torch.no_grad():
        accumulated = passes.grad_in_forward(STREAMING, case, reduction="mean")
        upstream = torch.tensor(math.pi)
        got = STREAMING.scale_gradients(upstream, case.target, accumulated, LossOptions(), torch.bfloat16)
    for rounded, accumulator in zip(got, (accumulated.dinput, accumulated.dweight), strict=True):
        assert accumulator is not None
        assert rounded is not None
        assert accumulator.dtype is torch.float32
        assert torch.equal(rounded, (accumulator * (upstream / 20)).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_is_rounded_once(dtype):
    """torch 2.13's chunked loss rounds dW to bf16 per chunk of tokens, Liger's per 1024."""
    case = random_case(6000, 16, 40, dtype)
    case.check(linear_cross_entropy, reduction="sum")
    case.check(linear_cross_entropy, reduction="sum", schedule="grad_in_forward", workspace_mb=2)
