"""What tests/gpu/test_random_shapes.py draws and checks, at sizes for a CPU."""

import math

import pytest
import torch

from cute_lce import linear_cross_entropy
from tests.gpu import test_random_shapes as on_gpu
from tests.random_calls import LAYOUTS, check, check_all, check_same_bits, draw, make, run, workspace_of

pytestmark = pytest.mark.usefixtures("poisoned_empty")

SMALL = (150, 300, 1500)


def test_calls_reach_every_argument():
    calls = [draw(seed) for seed in range(on_gpu.CALLS)]
    assert calls == [draw(seed) for seed in range(on_gpu.CALLS)]
    for name, wanted in (
        ("dtype", {torch.bfloat16, torch.float16}),
        ("target_dtype", {torch.int32, torch.int64}),
        ("reduction", {"mean", "sum", "none"}),
        ("schedule", {"auto", "recompute", "keep"}),
        ("strided", {True, False}),
        ("need", {(True, True), (True, False), (False, True)}),
    ):
        assert {getattr(call, name) for call in calls} == wanted
    assert len({(call.dtype, call.schedule) for call in calls}) == 2 * 3
    for side in (0, 1):
        assert {call.layouts[side] for call in calls} == set(LAYOUTS)
    assert min(call.n for call in calls) <= 2 < 1500 < max(call.n for call in calls) <= 2048
    assert 10_000 < max(call.V for call in calls) <= 20_000
    for share in (
        sum(call.d % 8 == 0 for call in calls),
        sum(call.d % 8 != 0 for call in calls),
        sum(call.n % 64 != 0 for call in calls),
        sum(call.budget == 0 for call in calls),
        sum(call.window is not None for call in calls),
        sum(call.window is None and call.budget is not None for call in calls),
        sum(0 < call.ignored < 1 for call in calls),
    ):
        assert share >= 20
    # float64 needs six multiplications and additions a logit and feature, plain torch in float32 as many.
    assert sum(12 * call.n * call.d * call.V for call in calls) < 2e13


def test_random_calls():
    check_all(check, (draw(seed, SMALL) for seed in range(12)), "cpu")


def test_random_calls_have_the_same_bits_run_after_run():
    check_all(check_same_bits, (draw(seed, SMALL) for seed in range(200, 203)), "cpu")


def test_a_budget_of_0_is_the_least_that_is_accepted():
    call = next(call for call in (draw(seed, SMALL) for seed in range(99)) if call.budget == 0)
    case = make(call, "cpu")
    least = workspace_of(call, case)
    assert least is not None
    run(call, case, least)
    with pytest.raises(ValueError, match=r"^workspace_mb: got .* want at least"):
        run(call, case, least * 0.99)


@pytest.mark.parametrize("fault", ["a class is left out", "nan", "dinput", "dlinear_weight", "refused"])
def test_a_wrong_result_is_found_and_named(fault):
    """The smallest fault there is: one class of many that no row has for a target."""
    call = next(
        call
        for call in (draw(seed, SMALL) for seed in range(99))
        if call.ignored < 1 and call.need == (True, True) and call.V > 1000
    )

    def wrong(hidden, weight, target, **options):
        if fault == "a class is left out":
            free = min(set(range(call.V)) - set(target.tolist()))
            weight = torch.cat((weight[:free], weight[free + 1 :]))
            ignored = target == options["ignore_index"]
            target = torch.where(target > free, target - 1, target).masked_fill(ignored, -1)
            options["ignore_index"] = -1
        if fault == "refused":
            raise RuntimeError("no such kernel")
        if fault == "dinput":
            hidden = hidden.detach() + 0 * hidden
        if fault == "dlinear_weight":
            weight = weight.detach() + 0 * weight
        loss = linear_cross_entropy(hidden, weight, target, **options)
        return loss * math.nan if fault == "nan" else loss

    with pytest.raises(AssertionError) as caught:
        check(call, "cpu", wrong)
    message = str(caught.value)
    assert f"seed={call.seed}, n={call.n}, d={call.d}, V={call.V}, dtype={call.dtype}" in message
    wanted = {"nan": "loss: not finite", "refused": "RuntimeError: no such kernel"}
    named = {"a class is left out": "loss: relative error"}
    assert (wanted | named).get(fault, f"{fault}: relative error") in message
    check_all(check, [call], "cpu")
    with pytest.raises(AssertionError, match="2 calls fail"):
        check_all(lambda each, device: check(each, device, wrong), [call, call], "cpu")
