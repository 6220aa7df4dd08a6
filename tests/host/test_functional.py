"""The public call on a CPU: every input, dtype, reduction and schedule, and every refusal."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from cute_lce import LinearCrossEntropy, LossOptions, linear_cross_entropy
from cute_lce.arguments import Operands
from cute_lce.ops import prepared
from cute_lce.options import ComputeOptions
from cute_lce.plan.memory import refuse_workspace
from tests import numerics
from tests.numerics import CASES, DTYPES, nested

SCHEDULES = ("auto", "recompute", "keep", "grad_in_forward")
REDUCTIONS = ("mean", "sum", "none")

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def dtype_name(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def test_poisoned():
    assert torch.empty(3).isnan().all()
    assert torch.zeros(2).new_empty(3).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", CASES)
def test_inputs(name, dtype):
    if name == "sixty" and dtype is not torch.float64:
        # Products of ones are exact, so only exponentials of 120 apart are left to err.
        assert float(numerics.make(name, dtype).baseline()[0]) > 0
    numerics.make(name, dtype).check(linear_cross_entropy)


@pytest.mark.parametrize("window", [None, 1, 64, 100, 5000])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_schedules_and_windows(schedule, reduction, window, dtype):
    if window == 1 and dtype is not torch.float32:
        window = 37
    need_dweight = not (schedule == "grad_in_forward" and reduction == "none")
    case = numerics.make("ignored", dtype)
    case.check(
        linear_cross_entropy, schedule=schedule, reduction=reduction, window=window, need_dweight=need_dweight
    )


@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
@pytest.mark.parametrize("name", ["jumps", "confident", "one_token", "all_ignored", "offset_10000", "sixty"])
def test_corners_of_schedules(name, schedule):
    for reduction in ("mean", "sum"):
        numerics.make(name, torch.float32).check(
            linear_cross_entropy, schedule=schedule, reduction=reduction, window=128
        )


@pytest.mark.parametrize("name", ["gpt2", "leading", "strided", "all_ignored", "one_valid", "sharp"])
def test_none(name):
    numerics.make(name, torch.float32).check(linear_cross_entropy, reduction="none")


@pytest.mark.parametrize("schedule", ["recompute", "keep"])
def test_upstream_expanded_and_strided(schedule):
    case = numerics.make("ignored", torch.float32)
    n = case.target.shape[0]
    expanded = torch.tensor(-1.5, dtype=torch.float64).expand(n)
    case.check(linear_cross_entropy, reduction="none", dloss=expanded, schedule=schedule)
    strided = torch.linspace(-1, 3, 2 * n).double()[::2]
    case.check(linear_cross_entropy, reduction="none", dloss=strided, schedule=schedule)


def test_sum_of_none_equals_sum():
    case = numerics.make("leading", torch.float64)
    rows = linear_cross_entropy(case.input, case.linear_weight, case.target, reduction="none")
    total = linear_cross_entropy(case.input, case.linear_weight, case.target, reduction="sum")
    assert rows.shape == case.target.shape
    torch.testing.assert_close(rows.sum(), total)


@pytest.mark.parametrize("name", ["offset_300", "offset_10000"])
def test_common_offset_costs_nothing(name):
    """The logits are exact, so each row's loss is as good as float32's own rounding of it."""
    case = numerics.make(name, torch.float32)
    rows = linear_cross_entropy(case.input, case.linear_weight, case.target, reduction="none", window=64)
    expected, _, _ = case.expected(1.0, "none")
    assert float(((rows.double() - expected) / expected).abs().max()) < 4e-7


def test_long_mean_is_summed_in_float32():
    """torch 2.13's chunked loss sums bf16 losses in bf16: 2.8% off at 16k tokens."""
    case = numerics.random_case(16384, 8, 32, torch.bfloat16)
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target)
    assert abs(float(loss) / float(case.expected()[0]) - 1) < 1e-6


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_no_tokens(reduction, schedule, dtype):
    hidden = torch.zeros(0, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(12, 8, dtype=dtype)
    weight.requires_grad_(reduction != "none" or schedule != "grad_in_forward")
    target = torch.zeros(0, dtype=torch.int64)
    loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, schedule=schedule)
    assert loss.shape == ((0,) if reduction == "none" else ())
    assert not loss.any()
    loss.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, 8)
    if weight.requires_grad:
        assert weight.grad is not None
        assert not weight.grad.any()


def test_scalar_target():
    case = numerics.make("one_token", torch.float64)
    for reduction in REDUCTIONS:
        loss = linear_cross_entropy(case.input[0], case.linear_weight, case.target[0], reduction=reduction)
        assert loss.shape == ()
        torch.testing.assert_close(loss, case.expected()[0])


@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
def test_gradcheck(schedule):
    case = numerics.random_case(7, 5, 70, torch.float64, scale=2.0)
    case.target[2] = -100
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()

    def call(reduction):
        return lambda h, w: linear_cross_entropy(
            h, w, case.target, reduction=reduction, schedule=schedule, window=32
        )

    for reduction in ("mean", "sum"):
        assert torch.autograd.gradcheck(call(reduction), (hidden, weight))
    if schedule != "grad_in_forward":
        assert torch.autograd.gradcheck(call("none"), (hidden, weight))
    frozen = weight.detach()
    assert torch.autograd.gradcheck(lambda h: call("none")(h, frozen), (hidden,))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_name)
def test_frozen(schedule, dtype):
    """Liger: a frozen hidden leaves W.grad None; a frozen weight still costs its gradient."""
    case = numerics.make("ignored", dtype)
    case.check(linear_cross_entropy, schedule=schedule, need_dweight=False)
    case.check(linear_cross_entropy, schedule=schedule, need_dinput=False)
    case.check(linear_cross_entropy, schedule=schedule, need_dweight=False, reduction="none")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_grad(schedule):
    case = numerics.make("ragged", torch.float32)
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            loss = linear_cross_entropy(hidden, weight, case.target, schedule=schedule)
        assert not loss.requires_grad
        numerics.assert_close("loss", loss, case.expected()[0], case.baseline()[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_retained_graph_with_other_upstreams(schedule):
    """Liger and quack: a second backward with a gradient other than 1 is wrong or fails."""
    case = numerics.make("ignored", torch.float32)
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, case.target, schedule=schedule)
    for upstream in (1.0, -3.0, 0.5):
        dloss = torch.tensor(upstream)
        got = torch.autograd.grad(loss, (hidden, weight), dloss, retain_graph=True)
        expected, baseline = case.expected(upstream), case.baseline(upstream)
        numerics.assert_close("dinput", got[0], expected[1], baseline[1])
        numerics.assert_close("dlinear_weight", got[1], expected[2], baseline[2])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_checkpoint(schedule, reentrant):
    case = numerics.make("ragged", torch.float32)

    def call(hidden, weight, target, **options):
        return checkpoint(
            lambda h, w: linear_cross_entropy(h, w, target, schedule=schedule, **options),
            hidden,
            weight,
            use_reentrant=reentrant,
        )

    case.check(call)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_double_backward_is_refused(schedule):
    case = numerics.make("ragged", torch.float32)
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, case.target, schedule=schedule)

    def differentiate_twice():
        dinput, dweight = torch.autograd.grad(loss, (hidden, weight), create_graph=True)
        # A term of its own, without which there might be nothing to differentiate.
        (dinput.sum() + dweight.sum() + hidden.sum()).backward()

    with pytest.raises(RuntimeError, match="double backward"):
        differentiate_twice()


def test_nothing_is_written_to():
    case = numerics.make("ignored", torch.float32)
    before = [t.clone() for t in (case.input, case.linear_weight, case.target)]
    for schedule in ("recompute", "keep", "grad_in_forward"):
        case.check(linear_cross_entropy, schedule=schedule)
    for now, then in zip((case.input, case.linear_weight, case.target), before, strict=True):
        assert torch.equal(now, then)


# ----------------------------------------------------------------------------------------------------------
# Values that are not finite


def test_minus_infinity():
    """Classes that are ruled out, whole windows of them too."""
    case = numerics.random_case(6, 4, 200, torch.float64)
    case.input.abs_()
    case.linear_weight[:130] = -math.inf
    case.target[:] = torch.arange(150, 156)
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target, window=64)
    expected = numerics.Case(case.input, case.linear_weight[130:], case.target - 130).expected()[0]
    torch.testing.assert_close(loss, expected)


def test_impossible_target():
    case = numerics.random_case(3, 4, 50, torch.float32)
    case.input.abs_()
    case.linear_weight[10] = -math.inf
    case.target[:] = torch.tensor([3, 10, 5])
    rows = linear_cross_entropy(case.input, case.linear_weight, case.target, reduction="none")
    assert rows.isposinf().tolist() == [False, True, False]
    assert rows[[0, 2]].isfinite().all()


@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
def test_nan_stays_in_its_row(schedule):
    case = numerics.make("ragged", torch.float32)
    case.input[5, 3] = math.nan
    case.input.requires_grad_()
    rows = linear_cross_entropy(
        case.input, case.linear_weight, case.target, reduction="none", schedule=schedule
    )
    rows.backward(torch.ones_like(rows))
    expected = torch.zeros(37, dtype=torch.bool)
    expected[5] = True
    assert torch.equal(rows.isnan(), expected)
    assert case.input.grad is not None
    assert torch.equal(case.input.grad.isnan().any(1), expected)


# ----------------------------------------------------------------------------------------------------------
# Refusals


def good() -> dict[str, Any]:
    return {"input": torch.randn(4, 8), "linear_weight": torch.randn(10, 8), "target": torch.arange(4)}


def jagged(tensor: torch.Tensor) -> torch.Tensor:
    return nested(tensor, torch.jagged)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input": [1.0]}, TypeError, "input: got list"),
        ({"linear_weight": None}, TypeError, "linear_weight: got NoneType"),
        ({"target": 3}, TypeError, "target: got int"),
        ({"input": torch.ones(4, 8, dtype=torch.int64)}, TypeError, "input: got torch.int64"),
        ({"input": torch.ones(4, 8, dtype=torch.complex64)}, TypeError, "input: got torch.complex64"),
        ({"linear_weight": torch.ones(10, 8).double()}, TypeError, "linear_weight: got torch.float64"),
        ({"target": torch.ones(4)}, TypeError, "target: got torch.float32"),
        ({"target": torch.ones(4, 10)}, TypeError, "target: got torch.float32.* label_smoothing, or .*topk"),
        ({"target": torch.ones(4, dtype=torch.int16)}, TypeError, "target: got torch.int16"),
        ({"linear_weight": torch.ones(10)}, ValueError, r"linear_weight: got shape \(10,\)"),
        ({"linear_weight": torch.ones(0, 8)}, ValueError, r"linear_weight: got shape \(0, 8\)"),
        (
            {"linear_weight": torch.ones(5, 0), "input": torch.ones(4, 0)},
            ValueError,
            r"linear_weight.*\(5, 0\)",
        ),
        ({"input": torch.ones(4, 7)}, ValueError, r"input: got shape \(4, 7\), want \(\.\.\., 8\)"),
        ({"input": torch.ones(())}, ValueError, r"input: got shape \(\)"),
        ({"target": torch.arange(5)}, ValueError, r"target: got shape \(5,\), want \(4,\)"),
        ({"target": torch.zeros(4, 1, dtype=torch.int64)}, ValueError, r"target: got shape \(4, 1\)"),
        ({"linear_weight": torch.ones(10, 8, device="meta")}, ValueError, "linear_weight: got device meta"),
        ({"target": torch.ones(4, dtype=torch.int64, device="meta")}, ValueError, "target: got device meta"),
        ({"input": torch.ones(4, 8).to_sparse()}, ValueError, r"input: got layout torch\.sparse_coo"),
        ({"linear_weight": torch.ones(10, 8).to_sparse()}, ValueError, "linear_weight: got layout"),
        ({"target": torch.arange(4).to_sparse()}, ValueError, "target: got layout"),
        ({"input": nested(torch.ones(4, 8))}, ValueError, "input: got a nested tensor, want a dense"),
        ({"linear_weight": nested(torch.ones(5, 8))}, ValueError, "linear_weight: got a nested tensor"),
        ({"target": nested(torch.arange(4))}, ValueError, "target: got a nested tensor"),
        ({"input": jagged(torch.ones(4, 8))}, ValueError, "input: got a nested tensor"),
        ({"linear_weight": jagged(torch.ones(5, 8))}, ValueError, "linear_weight: got a nested tensor"),
        ({"target": jagged(torch.arange(4))}, ValueError, "target: got a nested tensor"),
        ({"reduction": "batchmean"}, ValueError, "reduction: got 'batchmean'"),
        ({"reduction": None}, TypeError, "reduction: got NoneType"),
        ({"schedule": "fast"}, ValueError, "schedule: got 'fast'"),
        ({"schedule": 1}, TypeError, "schedule: got int"),
        ({"schedule": None}, TypeError, "schedule: got NoneType"),
        ({"reduction": ["mean"]}, TypeError, "reduction: got list"),
        ({"ignore_index": "no"}, TypeError, "ignore_index: got str"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index: got float"),
        ({"ignore_index": True}, TypeError, "ignore_index: got bool"),
        ({"ignore_index": torch.tensor(3)}, TypeError, "ignore_index: got Tensor"),
        ({"ignore_index": 2**63}, ValueError, "ignore_index: got 9223372036854775808, want .* int64"),
        ({"ignore_index": -(2**63) - 1}, ValueError, "ignore_index: got -9223372036854775809, want .* int64"),
        ({"ignore_index": 10**400}, ValueError, "ignore_index: got 1000"),
        ({"workspace_mb": "1"}, TypeError, "workspace_mb: got str"),
        ({"workspace_mb": True}, TypeError, "workspace_mb: got bool"),
        ({"workspace_mb": torch.tensor(3.0)}, TypeError, "workspace_mb: got Tensor"),
        ({"workspace_mb": 0}, ValueError, "workspace_mb: got 0"),
        ({"workspace_mb": -1}, ValueError, "workspace_mb: got -1"),
        ({"workspace_mb": math.nan}, ValueError, "workspace_mb: got nan"),
        ({"workspace_mb": math.inf}, ValueError, "workspace_mb: got inf"),
        ({"window": 0}, ValueError, "window: got 0"),
        ({"window": -5}, ValueError, "window: got -5"),
        ({"window": 2.0}, TypeError, "window: got float"),
        ({"window": "64"}, TypeError, "window: got str"),
        ({"window": True}, TypeError, "window: got bool"),
        ({"window": torch.tensor(64)}, TypeError, "window: got Tensor"),
        ({"target": torch.tensor([0, 1, 10, 2])}, ValueError, "target: got 10 at token 2"),
        ({"target": torch.tensor([0, -1, 3, 2])}, ValueError, "target: got -1 at token 1"),
        ({"target": torch.tensor([0, -100, 3, 2]), "ignore_index": 3}, ValueError, "target: got -100"),
        ({"target": torch.full((4,), 2**62)}, ValueError, "target: got 4611686018427387904"),
        ({"target": torch.full((4,), -(2**31), dtype=torch.int32)}, ValueError, "target: got -2147483648"),
    ],
)
@pytest.mark.parametrize("schedule", ["auto", "keep", "grad_in_forward"])
def test_refused(change, error, message, schedule):
    arguments = {**good(), "schedule": schedule, **change}
    if isinstance(arguments["input"], torch.Tensor) and arguments["input"].is_floating_point():
        arguments["input"].requires_grad_()
    with pytest.raises(error, match=message):
        linear_cross_entropy(**arguments)


@pytest.mark.parametrize("name", ["window", "workspace_mb", "ignore_index"])
def test_true_is_refused_after_one_was_used(name):
    """True equals 1, and would find what was prepared for it."""
    arguments = good()
    one: dict[str, Any] = {name: 1}
    true: dict[str, Any] = {name: True}
    head = LinearCrossEntropy(8, 10, **one)
    for _ in range(2):
        linear_cross_entropy(**arguments, **one)
        head(arguments["input"], arguments["target"])
    with pytest.raises(TypeError, match=f"{name}: got bool"):
        linear_cross_entropy(**arguments, **true)
    with pytest.raises(TypeError, match=f"{name}: got bool"):
        LinearCrossEntropy(8, 10, **true)


def test_grad_in_forward_refuses_per_token_upstream():
    arguments = good()
    arguments["linear_weight"].requires_grad_()
    with pytest.raises(ValueError, match="schedule: got 'grad_in_forward' with reduction='none'"):
        linear_cross_entropy(**arguments, schedule="grad_in_forward", reduction="none")


def test_ignore_index_none_means_minus_100():
    arguments = good()
    arguments["target"][1] = -100
    expected = linear_cross_entropy(**arguments)
    assert torch.equal(linear_cross_entropy(**arguments, ignore_index=None), expected)


@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
@pytest.mark.parametrize("ignore_index", [2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63)])
def test_an_ignore_index_beyond_int32_ignores_no_int32_target(ignore_index, schedule):
    """2**32 + 3 is 3 in int32, a class."""
    case = numerics.make("ragged", torch.float32)
    case = replace(case, target=case.target % 10, ignore_index=ignore_index)
    assert (case.target == 3).any()
    narrow = replace(case, target=case.target.int())
    loss, dinput, dweight = narrow.expected()
    for got, expected in zip((loss, dinput, dweight), case.expected(), strict=True):
        assert torch.equal(got, expected)
    narrow.check(linear_cross_entropy, schedule=schedule)


def test_an_ignore_index_beyond_int32_is_no_target_on_request(monkeypatch):
    """CUTE_LCE_CHECK_TARGETS, whose check is made where a device is not a CPU."""
    checked = []
    monkeypatch.setattr(torch.ops.aten._assert_async, "msg", lambda found, message: checked.append(found))

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda")

    target = torch.tensor([7, 20], dtype=torch.int32).as_subclass(Elsewhere)
    for ignore_index in (2**32 + 20, 20):
        loss = LossOptions(ignore_index=ignore_index)
        prepared.check_targets(Operands(torch.empty(2, 4), torch.empty(10, 4), target), loss)
    assert [bool(found) for found in checked] == [False, True]


@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
def test_least_workspace_is_named_and_fits(schedule):
    case = numerics.make("ragged", torch.float32)
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    with pytest.raises(ValueError, match=r"workspace_mb: got 0\.000999\d*, want at least") as caught:
        linear_cross_entropy(hidden, weight, case.target, schedule=schedule, workspace_mb=0.001)
    least = float(str(caught.value).split("at least ")[1].split()[0])
    case.check(linear_cross_entropy, schedule=schedule, workspace_mb=least)
    with pytest.raises(ValueError, match="want at least"):
        linear_cross_entropy(hidden, weight, case.target, schedule=schedule, workspace_mb=least * 0.9999)


@pytest.mark.parametrize("least", [1, 1023, 2**20 - 1, 2**20, 123456789, 10**12 + 1])
@pytest.mark.parametrize("share", [1e-6, 0.999])
def test_the_least_workspace_that_is_named_suffices(least, share):
    got = max(int(least * share), 1)
    text = str(refuse_workspace("keep", got, least))
    shown, named = re.findall(r"[-+.\de]*\d", text.partition(" for ")[0])
    assert float(shown) * 2**20 == pytest.approx(got, rel=1e-5)
    bytes_named = ComputeOptions(workspace_mb=float(named)).limits.workspace
    assert least <= bytes_named <= least * 1.00001 + 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "workspace_mb", [1e13, 1e300, 1.7e308, 10**400], ids=["1e13", "1e300", "1.7e308", "10**400"]
)
def test_any_workspace_however_large(workspace_mb, schedule):
    case = numerics.make("ragged", torch.float32)
    case.check(linear_cross_entropy, schedule=schedule, workspace_mb=workspace_mb)
    compute = ComputeOptions(schedule, workspace_mb)
    assert compute.limits.workspace == 2**62
    with FakeTensorMode(allow_non_fake_inputs=True):
        loss = linear_cross_entropy(
            case.input.requires_grad_(), case.linear_weight, case.target, **compute._asdict()
        )
        loss.backward()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "window",
    [2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**400],
    ids=["2**31-1", "2**31", "2**63-1", "2**63", "10**400"],
)
def test_any_window_however_wide(window, schedule):
    numerics.make("ragged", torch.float32).check(linear_cross_entropy, schedule=schedule, window=window)
    assert ComputeOptions(schedule, None, window).limits.window == 2**31 - 1


def test_replace_checks_as_the_call_does():
    assert LossOptions()._replace(reduction="sum", ignore_index=None) == ("sum", -100, 1.0)
    assert ComputeOptions()._replace(window=3) == ComputeOptions(window=3)
    with pytest.raises(ValueError, match="reduction: got 'batchmean'"):
        LossOptions()._replace(reduction="batchmean")
    with pytest.raises(TypeError, match="window: got float"):
        ComputeOptions()._replace(window=2.0)
