"""Backwards that ask for one of the gradients alone, beside a grad_weight_out."""

from __future__ import annotations

import pytest
import torch

from cute_lce import linear_cross_entropy
from tests.host.test_grad_weight_out import FP32, D, N, V, buffer, operands, ways
from tests.numerics import Case, assert_close, random_case


def check_dweights(out: torch.Tensor, times: int, case: Case) -> None:
    """Of a mean, added to zeros so many times."""
    assert_close("sum", out, times * case.expected(1.0, "mean")[2], times * case.baseline(1.0, "mean")[2])


@ways
def test_only_what_is_asked_for(schedule: str, reduction: str):
    """autograd.grad by input alone adds nothing; by the weight it adds, and returns None or zeros."""
    case = random_case(N, D, V, FP32)
    hidden, weight, target = operands(case)
    dloss = case.upstream(reduction).float()
    for dummy in (False, True):
        out = buffer(FP32)
        before = out.clone()
        loss = linear_cross_entropy(
            *(hidden, weight, target),
            reduction=reduction,
            schedule=schedule,
            grad_weight_out=out,
            grad_weight_dummy=dummy,
        )
        (dinput,) = torch.autograd.grad(loss, hidden, dloss, retain_graph=True)
        assert torch.equal(out, before)
        assert dinput.any()
        given = torch.autograd.grad(loss, weight, dloss, retain_graph=True, allow_unused=True)[0]
        assert not torch.equal(out, before)
        if dummy:
            assert given.shape == weight.shape
            assert given.dtype is weight.dtype
            assert not given.any()
        else:
            assert given is None
        plain = before + case.baseline(dloss, reduction)[2]
        assert_close("sum", out, before.double() + case.expected(dloss, reduction)[2], plain)


class Head(torch.nn.Module):
    """Takes both operands, so that a full backward hook's node has both."""

    def __init__(self, change, target: torch.Tensor, out: torch.Tensor, schedule: str):
        super().__init__()
        self.change, self.target, self.out, self.schedule = change, target, out, schedule
        self.register_full_backward_hook(lambda *_: None)

    def forward(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden, weight = self.change(hidden), self.change(weight)
        return linear_cross_entropy(
            *(hidden, weight, self.target),
            schedule=self.schedule,
            grad_weight_out=self.out,
            grad_weight_dummy=True,
        )


@pytest.mark.parametrize(
    "change", [lambda x: x, lambda x: 1.0 * x.view_as(x)], ids=["as they are", "changed"]
)
@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
def test_only_what_is_asked_for_behind_a_modules_hook(change, schedule: str):
    """Torch then executes one node for either; input first and weight later add once."""
    case = random_case(N, D, V, FP32)
    hidden, weight, target = operands(case)
    head = Head(change, target, torch.zeros(V, D), schedule)
    loss = head(hidden, weight)
    torch.autograd.grad(loss, hidden, retain_graph=True)
    loss.backward(inputs=[hidden], retain_graph=True)
    assert not head.out.any()
    torch.autograd.grad(loss, weight, retain_graph=True, allow_unused=True)
    once = head.out.clone()
    check_dweights(once, 1, case)
    for inputs in ([hidden, weight], None):
        loss.backward(inputs=inputs, retain_graph=True)
    check_dweights(head.out, 3, case)


def test_operands_of_one_node():
    """Torch does not say which of its outputs are asked for."""
    case = random_case(N, D, V, FP32)
    both = torch.cat([case.input, case.linear_weight]).requires_grad_()
    out = torch.zeros(V, D)

    def call(change) -> tuple[torch.Tensor, ...]:
        hidden, weight = (change(part) for part in both.split([N, V]))
        return linear_cross_entropy(hidden, weight, case.target, grad_weight_out=out), hidden, weight

    loss, hidden, weight = call(lambda x: x)
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, both, retain_graph=True)
    check_dweights(out, 2, case)
    before = out.clone()
    for asked in (hidden, weight, [hidden, weight]):
        with pytest.raises(RuntimeError, match=r"grad_weight_out: got input .* outputs of one Split"):
            torch.autograd.grad(loss, asked, retain_graph=True, allow_unused=True)
    # Views are outputs of their own nodes.
    loss, hidden, _ = call(lambda x: x.view_as(x))
    torch.autograd.grad(loss, hidden)
    assert torch.equal(out, before)


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *operands):
        return tuple(each.view_as(each) for each in operands)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


class BackwardHookFunction(Both):
    """Not torch's, and so of unknown outputs."""


@pytest.mark.parametrize("function", [Both, BackwardHookFunction])
def test_operands_of_another_function(function: type[torch.autograd.Function]):
    """All is added, whichever of them is asked for: what flows where is not known."""
    case = random_case(N, D, V, FP32)
    hidden, weight, target = operands(case)
    out = torch.zeros(V, D)
    loss = linear_cross_entropy(*function.apply(hidden, weight), target, grad_weight_out=out)  # pyright: ignore[reportCallIssue]
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, hidden)
    check_dweights(out, 2, case)


def test_operands_of_fully_shards_function():
    """As fully_shard registers it around a module's arguments."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

    class Group:
        def post_backward(self, *unused):
            pass

    case = random_case(N, D, V, FP32)
    hidden, weight, target = operands(case)
    out = torch.zeros(V, D)
    given = fsdp.RegisterPostBackwardFunction.apply(Group(), hidden, weight)
    loss = linear_cross_entropy(*given, target, grad_weight_out=out)  # pyright: ignore[reportCallIssue]
    torch.autograd.grad(loss, hidden, retain_graph=True)
    assert not out.any()
    loss.backward()
    check_dweights(out, 1, case)
