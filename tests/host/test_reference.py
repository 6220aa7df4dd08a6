"""The definition against torch's own cross entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cute_lce import reference
from tests import numerics
from tests.numerics import CASES


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "all_ignored"])
def test_equals_torch(name, reduction):
    case = numerics.make(name, torch.float64)
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    logits = F.linear(hidden, weight).flatten(0, -2)
    expected = F.cross_entropy(
        logits, case.target.flatten().long(), reduction=reduction, ignore_index=case.ignore_index
    )
    if reduction == "none":
        expected = expected.view(case.target.shape)
    upstream = case.upstream(reduction)
    gradients = torch.autograd.grad(expected, (hidden, weight), upstream)
    got = case.expected(upstream, reduction)
    # Under an offset of 10000 torch's own lse - target_logit has lost digits.
    for mine, theirs in zip(got, (expected.detach(), *gradients), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_ignored_is_zero(reduction):
    loss, dinput, dweight = numerics.make("all_ignored", torch.float64).expected(1.0, reduction)
    assert not loss.any()
    assert not dinput.any()
    assert not dweight.any()


def test_gradcheck_twice():
    case = numerics.random_case(5, 4, 9, torch.float64)
    case.target[2] = -100
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()

    def call(h, w):
        return reference.linear_cross_entropy(h, w, case.target)

    assert torch.autograd.gradcheck(call, (hidden, weight))
    assert torch.autograd.gradgradcheck(call, (hidden, weight))


@pytest.mark.parametrize("target", [-1, 9, 1000])
def test_bad_target_is_refused(target):
    case = numerics.random_case(5, 4, 9, torch.float64)
    case.target[2] = target
    with pytest.raises(ValueError, match=r"target: found a class outside \[0, 9\)"):
        reference.linear_cross_entropy(case.input, case.linear_weight, case.target)
