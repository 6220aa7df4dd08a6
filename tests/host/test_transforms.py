"""What goes beyond a call and one backward: batched gradients, torch.func, forward mode, torch.jit.trace."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_lce import LinearCrossEntropy, linear_cross_entropy, linear_logprob
from tests.numerics import Case, assert_close, random_case

OPS = torch.ops.cute_lce
REDUCTIONS = ("mean", "sum", "none")
SCHEDULES = ("auto", "recompute", "keep", "grad_in_forward")
DIFFERENTIABLE = ("auto", "recompute", "keep")
"""The schedules that serve torch.func's transforms."""

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def case_of(n: int = 7, seed: int = 0, dtype: torch.dtype = torch.float32) -> Case:
    case = random_case(n, 8, 100, dtype, seed=seed)
    case.target[2] = -100
    return case


def loss_of(case: Case, **options) -> Callable[..., Tensor]:
    """The call as a function of input and linear_weight."""
    return lambda hidden, weight: linear_cross_entropy(hidden, weight, case.target, **options)


def check_gradients(case: Case, got: tuple[Tensor, ...], dloss: Tensor | float = 1.0, reduction="mean"):
    """`got`: (dinput, dlinear_weight), or the former alone."""
    expected, baseline = case.expected(dloss, reduction)[1:], case.baseline(dloss, reduction)[1:]
    for name, mine, want, plain in zip(("dinput", "dlinear_weight"), got, expected, baseline, strict=False):
        assert_close(name, mine, want, plain)


def check_loss(case: Case, loss: Tensor, reduction: str = "mean"):
    assert_close("loss", loss, case.expected(1.0, reduction)[0], case.baseline(1.0, reduction)[0])


# ----------------------------------------------------------------------------------------------------------
# Forward mode is refused: never a tangent of zero or none


@pytest.mark.parametrize("of_weight", [False, True], ids=["input", "linear_weight"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_mode_of_torch_func_is_refused(schedule, reduction, of_weight):
    case = case_of()
    operands = [case.input, case.linear_weight]
    loss = loss_of(case, schedule=schedule, reduction=reduction)

    def call(moved):
        return loss(case.input, moved) if of_weight else loss(moved, case.linear_weight)

    moved = operands[of_weight]
    for compute in (
        lambda: torch.func.jvp(call, (moved,), (torch.ones_like(moved),)),
        lambda: torch.func.jacfwd(call)(moved),
        lambda: torch.func.linearize(call, moved),
        lambda: torch.vmap(lambda tangent: torch.func.jvp(call, (moved,), (tangent,)))(
            torch.ones(2, *moved.shape)
        ),
        lambda: torch.autograd.functional.jacobian(call, moved, vectorize=True, strategy="forward-mode"),
    ):
        with pytest.raises(RuntimeError, match=r"got a tangent for .*no forward-mode differentiation"):
            compute()


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dual_operands_are_refused(schedule, reduction, requires_grad, context):
    case = case_of()
    call = loss_of(case, schedule=schedule, reduction=reduction)
    hidden, weight = case.input.requires_grad_(requires_grad), case.linear_weight
    with forward_ad.dual_level(), context():
        dual_hidden = forward_ad.make_dual(hidden, torch.ones_like(hidden))
        with pytest.raises(RuntimeError, match=r"a tangent for input.*no forward-mode differentiation"):
            call(dual_hidden, weight)
        dual_weight = forward_ad.make_dual(weight, torch.ones_like(weight))
        with pytest.raises(
            RuntimeError, match=r"a tangent for linear_weight.*no forward-mode differentiation"
        ):
            call(hidden, dual_weight)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_dual_level_without_duals_changes_nothing(schedule):
    with forward_ad.dual_level():
        case_of().check(linear_cross_entropy, schedule=schedule)


@pytest.mark.parametrize("inside", [False, True], ids=["loss made before", "loss made at the level"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dual_upstream_is_refused(schedule, reduction, inside):
    case = case_of()
    hidden, weight = case.input.requires_grad_(), case.linear_weight
    call = loss_of(case, schedule=schedule, reduction=reduction)
    early = call(hidden, weight)
    with forward_ad.dual_level():
        loss = call(hidden, weight) if inside else early
        dloss = forward_ad.make_dual(torch.ones_like(loss), torch.ones_like(loss))
        with pytest.raises(RuntimeError, match=r"a tangent for dloss.*no forward-mode differentiation"):
            torch.autograd.grad(loss, hidden, dloss)


def inner_calls(reduction: str) -> dict[str, tuple]:
    case = case_of()
    operands = case.input, case.linear_weight, case.target
    options = (reduction, -100, 1.0, 0, 0)
    loss, *kept = OPS.forward_keep(*operands, *options, 64)
    calls = {
        "forward": (*operands, *options),
        "forward_keep": (*operands, *options, 64),
        "backward": (torch.ones_like(loss), *operands, *kept, *options, True, True),
    }
    needs = (True, reduction != "none")
    loss, *saved = OPS.grad_in_forward(*operands, *options, *needs)
    calls["grad_in_forward"] = (*operands, *options, *needs)
    dloss, target = torch.ones_like(loss), operands[2]
    calls["scale_gradients"] = (dloss, target, *saved, reduction, -100, 1.0, torch.float32, *needs)
    return calls


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "name", ["forward", "forward_keep", "backward", "grad_in_forward", "scale_gradients"]
)
def test_every_inner_op_refuses_duals(name, reduction, context):
    op, arguments = getattr(OPS, name).default, inner_calls(reduction)[name]
    refused = 0
    for i, value in enumerate(arguments):
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            continue
        with forward_ad.dual_level(), context():
            dual = forward_ad.make_dual(value, torch.ones_like(value))
            argument = op._schema.arguments[i].name
            with pytest.raises(RuntimeError, match=f"cute_lce::{name} got a tangent for {argument},"):
                op(*arguments[:i], dual, *arguments[i + 1 :])
        refused += 1
    assert refused == {"backward": 7, "scale_gradients": 3}.get(name, 2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_forward_mode_is_refused_when_compiled(backend):
    torch._dynamo.reset()
    case = case_of()
    call = loss_of(case)

    def jvp(hidden):
        return torch.func.jvp(lambda h: call(h, case.linear_weight), (hidden,), (torch.ones_like(hidden),))

    with pytest.raises(RuntimeError, match="no forward-mode differentiation"):
        torch.compile(jvp, backend=backend, fullgraph=True)(case.input)


# ----------------------------------------------------------------------------------------------------------
# Batched gradients


def upstreams(case: Case, reduction: str) -> Tensor:
    """A batch of three upstream gradients, one of them zero."""
    dloss = case.upstream(reduction)
    return torch.stack([dloss, torch.zeros_like(dloss), -0.5 * dloss.flip(0) if dloss.dim() else dloss / 3])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batched_gradients(schedule, reduction):
    case = case_of()
    need_dweight = not (schedule == "grad_in_forward" and reduction == "none")
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_(need_dweight)
    wanted = (hidden, weight) if need_dweight else (hidden,)
    loss = loss_of(case, schedule=schedule, reduction=reduction)(hidden, weight)
    batch = upstreams(case, reduction)
    got = torch.autograd.grad(loss, wanted, batch.float(), retain_graph=True, is_grads_batched=True)
    for i, dloss in enumerate(batch):
        gradients = tuple(tensor[i] for tensor in got)
        if dloss.any():
            check_gradients(case, gradients, dloss, reduction)
        else:
            assert not any(tensor.any() for tensor in gradients)
    # What was batched leaves nothing behind.
    check_gradients(case, torch.autograd.grad(loss, wanted, batch[0].float()), batch[0], reduction)


@pytest.mark.parametrize("schedule", ["recompute", "keep"])
def test_vectorized_jacobian(schedule):
    case = case_of()
    call = loss_of(case, schedule=schedule, reduction="none")
    operands = case.input, case.linear_weight
    of_input, of_weight = torch.autograd.functional.jacobian(call, operands, vectorize=True)
    for i, dloss in enumerate(torch.eye(7, dtype=torch.float64)):
        if case.target[i] == -100:
            assert not of_input[i].any()
            assert not of_weight[i].any()
        else:
            check_gradients(case, (of_input[i], of_weight[i]), dloss, "none")


@pytest.mark.parametrize("of_weight", [False, True], ids=["input", "linear_weight"])
def test_a_call_inside_a_batched_backward(of_weight):
    """A hook's gradients are batched there, and so are the operands that it makes of them."""
    case = case_of()
    operand = case.linear_weight if of_weight else case.input

    def call(moved):
        hidden, weight = (case.input, moved) if of_weight else (moved, case.linear_weight)
        return hidden, weight, linear_cross_entropy(hidden, weight, case.target)

    leaf = torch.zeros_like(operand).requires_grad_()
    product = leaf * 1
    product.register_hook(lambda gradient: call(gradient)[2] * torch.ones_like(gradient))
    batch = torch.stack([operand, 0.5 * operand, -2 * operand])
    (got,) = torch.autograd.grad(product, leaf, batch, is_grads_batched=True)
    for moved, losses in zip(batch, got, strict=True):
        hidden, weight, _ = call(moved)
        check_loss(Case(hidden, weight, case.target), losses.flatten()[-1])


# ----------------------------------------------------------------------------------------------------------
# torch.func


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("schedule", DIFFERENTIABLE)
def test_func_grad(schedule, reduction):
    case = case_of()
    call = loss_of(case, schedule=schedule, reduction=reduction)
    operands = case.input, case.linear_weight
    check_gradients(case, torch.func.grad(call, (0, 1))(*operands), 1.0, reduction)
    gradients, loss = torch.func.grad_and_value(call, (0, 1))(*operands)
    check_gradients(case, gradients, 1.0, reduction)
    check_loss(case, loss, reduction)
    check_gradients(case, (torch.func.grad(call)(*operands),), 1.0, reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("schedule", DIFFERENTIABLE)
def test_func_vjp(schedule, reduction):
    """The pullback runs when the transform has ended, more than once."""
    case = case_of()
    call = loss_of(case, schedule=schedule, reduction=reduction)
    loss, pull, *_ = torch.func.vjp(call, case.input, case.linear_weight)
    check_loss(case, loss, reduction)
    dloss = case.upstream(reduction)
    for upstream in (dloss, -2 * dloss):
        check_gradients(case, pull(upstream.float()), upstream, reduction)


@pytest.mark.parametrize("schedule", DIFFERENTIABLE)
def test_func_jacrev(schedule):
    case = case_of()
    call = loss_of(case, schedule=schedule, reduction="none")
    of_input, of_weight = torch.func.jacrev(call, (0, 1))(case.input, case.linear_weight)
    for i, dloss in enumerate(torch.eye(7, dtype=torch.float64)):
        if case.target[i] == -100:
            assert not of_input[i].any()
            assert not of_weight[i].any()
        else:
            check_gradients(case, (of_input[i], of_weight[i]), dloss, "none")


def batch_of_cases() -> tuple[list[Case], Tensor, Tensor, Tensor]:
    """Three cases of one weight."""
    weight = case_of().linear_weight
    cases = [Case(other.input, weight, other.target) for other in (case_of(seed=seed) for seed in range(3))]
    return cases, torch.stack([c.input for c in cases]), weight, torch.stack([c.target for c in cases])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_func_vmap(schedule, reduction):
    cases, hidden, weight, target = batch_of_cases()

    def call(hidden, target):
        return linear_cross_entropy(hidden, weight, target, schedule=schedule, reduction=reduction)

    losses = torch.vmap(call)(hidden, target)
    for case, loss in zip(cases, losses, strict=True):
        check_loss(case, loss, reduction)


def logprobs_of(hidden: Tensor, weight: Tensor, target: Tensor, more: Tensor, **options) -> list[Tensor]:
    """Numbers of tokens with all tensors that linear_logprob takes, made of `more`, target's shape."""
    found = linear_logprob(
        hidden,
        weight,
        target,
        linear_bias=weight[:, 0],
        temperature=1 + more,
        topk_ids=torch.stack([target, (more * 90).long()], -1),
        **options,
    )
    return [each for each in found if each is not None]


LOGPROB_CALLS = {
    "logprob": lambda h, w, t, more: [linear_logprob(h, w, t).logprob],
    "keep": lambda h, w, t, more: [
        *linear_logprob(h, w, t, schedule="keep", outputs=("lse", "entropy"))[1:3]
    ],
    "all tensors": lambda h, w, t, more: logprobs_of(
        h, w, t, more, outputs=("logprob", "entropy", "topk_logprob", "is_top1"), softcap=5.0
    ),
}


@pytest.mark.parametrize("name", LOGPROB_CALLS)
def test_func_vmap_of_logprob(name):
    """What a call of each gives, and its gradients, in a batch; also in a batched backward and compiled."""
    _, hidden, weight, target = batch_of_cases()
    more = torch.rand(target.shape)

    def call(*given):
        found = LOGPROB_CALLS[name](*given)
        assert None not in found
        return tuple(found)

    batch = hidden, weight, target, more
    alone = [call(hidden[i], weight, target[i], more[i]) for i in range(3)]
    for run in (call, torch.compile(call, backend="eager")):
        found = torch.vmap(run, (0, None, 0, 0))(*batch)
        for mine, each in zip(found, zip(*alone, strict=True), strict=True):
            assert torch.equal(mine, torch.stack(each))

    def total(*given):
        return torch.stack([each.sum() for each in call(*given) if each.is_floating_point()]).sum()

    gradients = torch.func.grad(total, (0, 1))
    for i, mine in enumerate(zip(*torch.vmap(gradients, (0, None, 0, 0))(*batch), strict=True)):
        for one, other in zip(mine, gradients(hidden[i], weight, target[i], more[i]), strict=True):
            assert torch.equal(one, other)
            assert one.any()
    leaf = torch.zeros_like(hidden[0]).requires_grad_()
    product = leaf * 1
    product.register_hook(lambda g: total(g, weight, target[0], more[0]) * torch.ones_like(g))
    (found,) = torch.autograd.grad(product, leaf, hidden, is_grads_batched=True)
    for mine, each in zip(found, hidden, strict=True):
        assert torch.equal(mine, total(each, weight, target[0], more[0]).expand(mine.shape))


@pytest.mark.parametrize("schedule", DIFFERENTIABLE)
def test_func_gradients_per_sample(schedule):
    cases, hidden, weight, target = batch_of_cases()

    def call(hidden, weight, target):
        return linear_cross_entropy(hidden, weight, target, schedule=schedule)

    per_sample = torch.vmap(torch.func.grad(call, (0, 1)), (0, None, 0))(hidden, weight, target)
    of_sum = torch.func.grad(lambda hidden: torch.vmap(call, (0, None, 0))(hidden, weight, target).sum())(
        hidden
    )
    for i, case in enumerate(cases):
        check_gradients(case, tuple(gradient[i] for gradient in per_sample))
        check_gradients(case, (of_sum[i],))


@pytest.mark.parametrize("schedule", DIFFERENTIABLE)
def test_a_loss_from_a_transform_is_differentiable_outside(schedule):
    """The inner level leaves the outer one's graph whole: of torch.func, and of plain autograd."""
    case = case_of()
    call = loss_of(case, schedule=schedule)
    hidden, weight = case.input, case.linear_weight
    outer = torch.func.grad(lambda h: torch.func.grad_and_value(call)(h, weight)[1])
    check_gradients(case, (outer(hidden),))
    hidden.requires_grad_()
    weight.requires_grad_()
    _, loss = torch.func.grad_and_value(call)(hidden, weight)
    check_gradients(case, torch.autograd.grad(loss, (hidden, weight)))
    # Of what the transform does not differentiate itself.
    shift = torch.zeros(())
    _, loss = torch.func.grad_and_value(lambda s: call(hidden, weight) + s)(shift)
    check_gradients(case, torch.autograd.grad(loss, (hidden, weight)))
    with torch.no_grad():
        gradient, loss = torch.func.grad_and_value(call)(hidden, weight)
    assert not gradient.requires_grad
    assert not loss.requires_grad
    check_gradients(case, (gradient,))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_second_derivatives_are_refused(schedule, reduction):
    case = case_of()
    rows = loss_of(case, schedule=schedule, reduction=reduction)
    weight = case.linear_weight
    grad = torch.func.grad(lambda h: rows(h, weight).sum())
    tangent = torch.ones_like(case.input)
    leaf = case.input.clone().requires_grad_()
    refused = "double backward|forward-mode differentiation|schedule: got 'grad_in_forward'"
    for compute in (
        # The terms of their own are differentiable, so that a missing part would go unnoticed.
        lambda: torch.func.grad(lambda h: grad(h).sum() + h.sum())(case.input),
        lambda: torch.func.grad(
            lambda w: torch.func.grad(lambda h: rows(h, w).sum())(case.input).sum() + w.sum()
        )(weight),
        lambda: torch.func.jacrev(grad)(case.input),
        lambda: torch.func.hessian(lambda h: rows(h, weight).sum())(case.input),
        lambda: torch.func.jvp(grad, (case.input,), (tangent,)),
        lambda: torch.func.vjp(grad, case.input)[1](tangent),
        lambda: (grad(leaf).sum() + leaf.sum()).backward(),
    ):
        with pytest.raises(RuntimeError, match=refused):
            compute()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.grad_and_value])
def test_func_refuses_grad_in_forward(transform):
    """Its gradients are constants of the forward, of which a second derivative would silently be zero."""
    case = case_of()
    call = loss_of(case, schedule="grad_in_forward")
    with pytest.raises(
        RuntimeError, match=r"schedule: got 'grad_in_forward' .*torch\.func.*want 'recompute'"
    ):
        transform(call)(case.input, case.linear_weight)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_func_grad_compiled(backend):
    torch._dynamo.reset()
    case = case_of()
    grad = torch.func.grad(loss_of(case), (0, 1))
    compiled = torch.compile(grad, backend=backend, fullgraph=True)
    check_gradients(case, compiled(case.input, case.linear_weight))


# ----------------------------------------------------------------------------------------------------------
# torch.jit.trace


def ops_of(traced: Any) -> list[str]:
    """The ops of a trace, without its constants and attributes."""
    return [node.kind() for node in traced.graph.nodes() if not node.kind().startswith("prim::")]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_trace_records_the_op(schedule, reduction):
    first, second = case_of(), case_of(n=19, seed=5)

    def call(hidden, weight, target):
        return linear_cross_entropy(
            hidden, weight, target, schedule=schedule, reduction=reduction, window=64, ignore_index=-100
        )

    traced: Any = torch.jit.trace(call, (first.input, first.linear_weight, first.target))
    assert ops_of(traced) == ["cute_lce::fused_linear_cross_entropy"]
    need_dweight = not (schedule == "grad_in_forward" and reduction == "none")
    for case in (first, second):
        case.check(lambda *operands, **_: traced(*operands), reduction=reduction, need_dweight=need_dweight)


def test_traced_module_is_saved_and_loaded():
    """Its parameter requires a gradient while it is traced; inputs of other sizes and values follow."""
    first, second = case_of(), case_of(n=19, seed=5)
    head = LinearCrossEntropy(8, 100, reduction="none")
    with torch.no_grad():
        head.weight.copy_(second.linear_weight)
    traced: Any = torch.jit.trace(head, (first.input, first.target))
    assert ops_of(traced) == ["cute_lce::fused_linear_cross_entropy"]
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    hidden, dloss = second.input.requires_grad_(), second.upstream("none")
    loss = loaded(hidden, second.target)
    check_loss(second, loss.detach(), "none")
    gradients = torch.autograd.grad(loss, (hidden, *loaded.parameters()), dloss.float())
    check_gradients(second, gradients, dloss, "none")
