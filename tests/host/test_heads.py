"""Several heads in one call: losses and gradients against float64, and their sum by hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cute_lce import LinearCrossEntropy, linear_cross_entropy, reference
from tests.numerics import assert_close

CALL = torch.ops.cute_lce.fused_linear_cross_entropy
N, D, K, V = (3, 5), 24, 3, 70
SCHEDULES = ("recompute", "keep", "grad_in_forward")


class Heads:
    """Operands of heads of unequal sizes, or of equal ones as one tensor."""

    def __init__(self, dtype: torch.dtype, *, shared: bool = True, stacked: bool = False):
        generator = torch.Generator().manual_seed(4)

        def numbers(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

        sizes = [V] * K if stacked else [V, 33, 129]
        self.input = numbers(*N, D) if shared else numbers(*N, K, D)
        self.weights = [numbers(size, D, scale=2 * D**-0.5) for size in sizes]
        self.target = torch.stack([torch.randint(size, N, generator=generator) for size in sizes], -1)
        self.target[0, :3, 1] = -100
        self.target[1, 2] = -100
        self.biases = [numbers(size) for size in sizes]
        self.class_weights = [torch.rand(size, generator=generator) for size in sizes]
        self.token_weight = torch.rand(self.target.shape, generator=generator)

    def leaves(self, stacked: bool) -> list[Tensor]:
        weights = [torch.stack(self.weights)] if stacked else self.weights
        return [each.detach().clone().requires_grad_() for each in (self.input, *weights)]

    def terms(self) -> dict[str, Any]:
        names = {"linear_bias": self.biases, "weight": self.class_weights, "token_weight": self.token_weight}
        return {**names, "label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.01, "logit_scale": 0.7}

    def expected(self, dtype: torch.dtype, upstream: Tensor, reduction: str, **terms: Any) -> list[Tensor]:
        """(losses, dinput, each head's dweight) by the definition, each head's alone."""
        found: list[tuple[Tensor, ...]] = []
        shared = self.input.dim() == self.target.dim()
        for k, weight in enumerate(self.weights):
            own = {
                name: value[k].to(dtype) if name in ("linear_bias", "weight") else value
                for name, value in terms.items()
            }
            if "token_weight" in own:
                own["token_weight"] = own["token_weight"][..., k].to(dtype)
            hidden = (self.input if shared else self.input[..., k, :]).to(dtype)
            given = hidden, weight.to(dtype), self.target[..., k], upstream[..., k].to(dtype)
            found.append(reference.gradients(*given, reduction=reduction, **own)[:3])
        losses, dinputs, dweights = zip(*found, strict=True)
        dinput = torch.stack(dinputs).sum(0) if shared else torch.stack(dinputs, -2)
        return [torch.stack(losses, -1), dinput, *dweights]


def upstream_of(reduction: str) -> Tensor:
    shape = (*N, K) if reduction == "none" else (K,)
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


def check(
    heads: Heads, reduction: str, *, stacked: bool = False, call: Any = linear_cross_entropy, **given: Any
):
    dtype = heads.input.dtype
    options = {name: given.pop(name) for name in ("schedule", "workspace_mb", "window") if name in given}
    leaves = heads.leaves(stacked)
    upstream = upstream_of(reduction)
    weights = leaves[1] if stacked else leaves[1:]
    losses = call(leaves[0], weights, heads.target, reduction=reduction, **given, **options)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert losses.dtype is wide
    found = [losses.detach(), *torch.autograd.grad(losses, leaves, upstream.to(wide))]
    if stacked:
        found = [*found[:2], *found[2].unbind()]
    expected = heads.expected(torch.float64, upstream, reduction, **given)
    baseline = heads.expected(wide, upstream, reduction, **given)
    for i, actual in enumerate(found):
        assert actual.dtype is (wide if i == 0 else dtype)
        assert_close(str(i), actual, expected[i], baseline[i].to(actual.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
def test_heads(stacked, shared, dtype):
    heads = Heads(dtype, shared=shared, stacked=stacked)
    for reduction in ("mean", "sum", "none"):
        check(heads, reduction, stacked=stacked)
        check(heads, reduction, stacked=stacked, **heads.terms())
    for schedule in SCHEDULES:
        check(heads, "mean", stacked=stacked, schedule=schedule)
        check(heads, "mean", stacked=stacked, schedule=schedule, workspace_mb=8)


def test_one_head_and_int32_targets():
    heads = Heads(torch.bfloat16)
    heads.weights, heads.target = heads.weights[:1], heads.target[..., :1].int()
    leaves = heads.leaves(stacked=False)
    losses = linear_cross_entropy(leaves[0], leaves[1:], heads.target)
    alone = linear_cross_entropy(leaves[0], leaves[1], heads.target[..., 0])
    assert losses.shape == (1,)
    assert torch.equal(losses[0], alone)
    for one, other in zip(
        torch.autograd.grad(losses.sum(), leaves), torch.autograd.grad(alone, leaves), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [2, 3, 24])
def test_the_sum_by_hidden_states_is_rounded_once(count, schedule):
    """Added by autograd in bfloat16, more than two would be rounded more often."""
    torch.manual_seed(0)
    hidden = torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(50, 64, dtype=torch.bfloat16) / 8 for _ in range(count)]
    target = torch.randint(50, (40, count))
    options: dict[str, Any] = {"reduction": "sum", "schedule": schedule}
    loss = linear_cross_entropy(hidden, weights, target, **options)
    (found,) = torch.autograd.grad(loss.sum(), hidden)

    def alone() -> list[Tensor]:
        return [
            linear_cross_entropy(hidden, weight, target[:, k], **options) for k, weight in enumerate(weights)
        ]

    each = [torch.autograd.grad(one, hidden)[0].float() for one in reversed(alone())]
    total = each[0]
    for one in each[1:]:
        total = total + one
    assert torch.equal(found, total.bfloat16())
    (by_autograd,) = torch.autograd.grad(torch.stack(alone()).sum(), hidden)
    assert torch.equal(found, by_autograd) == (count == 2)
    # A sum in float32 where one is needed.
    assert ("Rounded" in _nodes(loss.grad_fn)) == (count > 2)


def _nodes(node: Any) -> str:
    """The names of the nodes behind one."""
    behind = [each for each, _ in node.next_functions if each is not None]
    return " ".join([node.name(), *map(_nodes, behind)])


def test_some_heads_alone():
    """Gradients of one head's loss, of none of the first, and with a head's weight frozen."""
    heads = Heads(torch.bfloat16)
    for k in range(K):
        leaves = heads.leaves(stacked=False)
        losses = linear_cross_entropy(leaves[0], leaves[1:], heads.target)
        own = linear_cross_entropy(leaves[0], leaves[1 + k], heads.target[..., k])
        (found,), (want,) = (torch.autograd.grad(each, leaves[0]) for each in (losses[k], own))
        assert torch.equal(found, want)
    leaves = heads.leaves(stacked=False)
    leaves[2].requires_grad_(False)
    linear_cross_entropy(leaves[0], leaves[1:], heads.target).sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, True, False, True]
    frozen = heads.leaves(stacked=False)
    frozen[0].requires_grad_(False)
    linear_cross_entropy(frozen[0], frozen[1:], heads.target).sum().backward()
    torch.testing.assert_close(frozen[1].grad, leaves[1].grad, rtol=0, atol=0)
    with torch.no_grad():
        assert not linear_cross_entropy(leaves[0], leaves[1:], heads.target).requires_grad


def test_retained_backwards_and_batched_gradients():
    heads = Heads(torch.bfloat16)
    leaves = heads.leaves(stacked=False)
    losses = linear_cross_entropy(leaves[0], leaves[1:], heads.target)
    first = torch.autograd.grad(losses.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(losses.sum(), leaves, retain_graph=True)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    each = [torch.autograd.grad(losses[k], leaves[0], retain_graph=True)[0] for k in range(K)]
    (batched,) = torch.autograd.grad(losses, leaves[0], torch.eye(K), is_grads_batched=True)
    assert torch.equal(batched, torch.stack(each))


def test_vmap_over_hidden_states():
    heads = Heads(torch.bfloat16, stacked=True)
    weight, several = torch.stack(heads.weights), torch.stack([heads.input, -heads.input])
    found = torch.func.vmap(lambda hidden: linear_cross_entropy(hidden, weight, heads.target))(several)
    for one, hidden in zip(found, several, strict=True):
        assert torch.equal(one, linear_cross_entropy(hidden, weight, heads.target))


@pytest.mark.parametrize("compiles", [False, True])
def test_transforms(compiles):
    torch._dynamo.reset()
    heads = Heads(torch.bfloat16, stacked=True)
    weight = torch.stack(heads.weights)
    for call in (linear_cross_entropy, CALL):

        def total(hidden: Tensor, call=call) -> Tensor:
            return call(hidden, weight, heads.target).sum()

        gradient = torch.func.grad(total)
        if compiles:
            gradient = torch.compile(gradient, fullgraph=True, backend="aot_eager")
        found = gradient(heads.input)
        want = heads.expected(torch.float64, torch.ones(K), "mean")[1]
        baseline = heads.expected(torch.float32, torch.ones(K), "mean")[1].bfloat16()
        assert_close("dinput", found, want, baseline)


@pytest.mark.parametrize("stacked", [True, False])
def test_compiles_in_one_graph(stacked):
    torch._dynamo.reset()
    heads = Heads(torch.bfloat16, stacked=stacked)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    check(heads, "none", stacked=stacked, call=compiled, **({} if stacked else heads.terms()))


def test_compiles_for_sizes_of_which_some_are_symbolic():
    torch._dynamo.reset()
    heads = Heads(torch.float32, stacked=True)
    weight = torch.stack(heads.weights)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    target = heads.target.clone()
    torch._dynamo.maybe_mark_dynamic(target, 0)
    found = compiled(heads.input, weight, target)
    assert torch.equal(found, linear_cross_entropy(heads.input, weight, heads.target))


def test_the_op_takes_a_tensor_of_weights():
    heads = Heads(torch.bfloat16, stacked=True)
    check(heads, "sum", stacked=True, call=CALL, schedule="keep")
    bias, weight = torch.stack(heads.biases), torch.stack(heads.class_weights)
    given = torch.stack(heads.weights), heads.target
    found = CALL(heads.input, *given, linear_bias=bias, weight=weight)
    want = linear_cross_entropy(heads.input, *given, linear_bias=heads.biases, weight=heads.class_weights)
    assert torch.equal(found, want)


def test_autocast_casts_the_hidden_states_once():
    heads = Heads(torch.float32)
    leaves = heads.leaves(stacked=False)
    with torch.autocast("cpu", torch.bfloat16):
        losses = linear_cross_entropy(leaves[0], leaves[1:], heads.target)
    narrow = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    want = linear_cross_entropy(narrow[0], narrow[1:], heads.target)
    assert torch.equal(losses, want)
    (found,) = torch.autograd.grad(losses.sum(), leaves[0])
    assert torch.equal(found, torch.autograd.grad(want.sum(), narrow[0])[0].float())


@pytest.mark.parametrize("stacked", [True, False])
def test_gradients_are_added_to_buffers(stacked):
    heads = Heads(torch.bfloat16, stacked=stacked)
    leaves, plain = heads.leaves(stacked), heads.leaves(stacked)
    weights = leaves[1] if stacked else leaves[1:]
    out: Any = [torch.ones_like(weight, dtype=torch.float32) for weight in heads.weights]
    out = torch.stack(out) if stacked else out
    losses = linear_cross_entropy(leaves[0], weights, heads.target, grad_weight_out=out)
    losses.sum().backward()
    linear_cross_entropy(plain[0], plain[1] if stacked else plain[1:], heads.target).sum().backward()
    assert all(leaf.grad is None for leaf in leaves[1:])
    assert leaves[0].grad is not None
    assert plain[0].grad is not None
    assert torch.equal(leaves[0].grad, plain[0].grad)
    for buffer, leaf in zip([out] if stacked else out, plain[1:], strict=True):
        torch.testing.assert_close((buffer - 1).bfloat16(), leaf.grad, rtol=2e-2, atol=1e-4)


def test_heads_that_share_a_weight_add_to_one_buffer():
    heads = Heads(torch.float64)
    weight = heads.weights[0].detach().requires_grad_()
    target = heads.target % V
    out = torch.zeros_like(weight)
    losses = linear_cross_entropy(heads.input, [weight] * K, target, grad_weight_out=[out] * K)
    losses.sum().backward()
    other = heads.weights[0].detach().requires_grad_()
    linear_cross_entropy(heads.input, [other] * K, target).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(out, other.grad)


def test_denominators():
    heads = Heads(torch.float64)
    given = heads.input, heads.weights, heads.target
    total = linear_cross_entropy(*given, reduction="sum")
    for denominator in (7.0, torch.tensor(7), torch.tensor([7.0, 3.0, 2.0])):
        found = linear_cross_entropy(*given, denominator=denominator)
        torch.testing.assert_close(found, total / denominator)


def test_a_workspace_is_shared():
    heads = Heads(torch.float32)
    heads.input.requires_grad_()
    given = heads.input, heads.weights, heads.target
    linear_cross_entropy(*given, workspace_mb=0.01, schedule="recompute")
    for bad in (-1.0, torch.inf):
        with pytest.raises(ValueError, match=f"workspace_mb: got {bad}, want a positive number"):
            linear_cross_entropy(*given, workspace_mb=bad)


@pytest.mark.parametrize("call", [linear_cross_entropy, CALL], ids=["call", "op"])
@pytest.mark.parametrize("schedule", ["auto", *SCHEDULES])
def test_a_small_workspace_is_refused_by_the_callers_number(schedule, call):
    """The least is the whole call's, and suffices; a 64th less does not. The last head is the largest."""
    heads = Heads(torch.float32, stacked=call is CALL)
    weights = heads.leaves(call is CALL)[1:]
    given = heads.input, weights[0] if call is CALL else weights, heads.target
    with pytest.raises(ValueError, match=r"^workspace_mb: got 0\.00[12]\d*, .* of 3 heads$") as caught:
        call(*given, schedule=schedule, workspace_mb=0.00125)
    least = float(str(caught.value).split("want at least ")[1].split()[0])
    call(*given, schedule=schedule, workspace_mb=least)
    with pytest.raises(ValueError, match=f"want at least {least}"):
        call(*given, schedule=schedule, workspace_mb=least * 63 / 64)


def test_a_parameter_list_is_a_list():
    heads = Heads(torch.float64)
    weights, biases = nn.ParameterList(heads.weights), nn.ParameterList(heads.biases)
    losses = linear_cross_entropy(heads.input, weights, heads.target, linear_bias=biases)
    plain = linear_cross_entropy(heads.input, heads.weights, heads.target, linear_bias=heads.biases)
    assert torch.equal(losses, plain)
    losses.sum().backward()
    assert all(each.grad is not None and each.grad.any() for each in (*weights, *biases))
    compiled = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True)
    assert torch.equal(compiled(heads.input, weights, heads.target, linear_bias=biases), plain)
    with pytest.raises(ValueError, match="linear_weight: got no heads"):
        linear_cross_entropy(heads.input, nn.ParameterList(), heads.target)


def test_module():
    heads = Heads(torch.float64, stacked=True)
    module = LinearCrossEntropy(D, V, bias=True, num_heads=K, dtype=torch.float64, reduction="sum")
    assert module.weight.shape == (K, V, D)
    assert module.bias.shape == (K, V)
    assert 0.5 * D**-0.5 < float(module.weight.detach().abs().max()) <= D**-0.5
    assert f"num_heads={K}" in repr(module)
    losses = module(heads.input, heads.target, token_weight=heads.token_weight)
    given = {"linear_bias": module.bias, "token_weight": heads.token_weight, "reduction": "sum"}
    assert torch.equal(losses, linear_cross_entropy(heads.input, module.weight, heads.target, **given))
    losses.sum().backward()
    assert all(each.grad is not None and each.grad.any() for each in module.parameters())
    logits = module(heads.input)
    assert logits.shape == (*N, K, V)
    torch.testing.assert_close(
        logits[..., 1, :], nn.functional.linear(heads.input, module.weight[1], module.bias[1])
    )
    capped = LinearCrossEntropy(D, V, num_heads=K, dtype=torch.float64, softcap=2.0)
    assert float(capped(heads.input).detach().abs().max()) < 2


WEIGHTS = torch.zeros(K, V, D)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"linear_weight": []}, ValueError, "linear_weight: got no heads"),
        ({"linear_weight": [3]}, TypeError, "linear_weight: got int, want a torch.Tensor for each"),
        ({"linear_weight": WEIGHTS[:2]}, ValueError, r"target: got shape \(3, 5, 3\), want \(\.\.\., 2\)"),
        ({"linear_weight": [*WEIGHTS[:2], WEIGHTS[:2]]}, ValueError, "linear_weight: got a head of shape"),
        (
            {"linear_weight": [*WEIGHTS[:2], WEIGHTS[2].double()]},
            TypeError,
            "linear_weight: got torch.float64",
        ),
        ({"target": torch.zeros((), dtype=torch.int64)}, ValueError, r"target: got shape \(\), want"),
        ({"target": None}, TypeError, "target: got NoneType"),
        ({"input": torch.zeros(3, D)}, ValueError, r"input: got shape \(3, 24\), want \(3, 5, 'd'\), which"),
        ({"input": torch.zeros(3, 5, 2, D)}, ValueError, "input: got shape"),
        ({"linear_bias": torch.zeros(V)}, ValueError, r"linear_bias: got shape \(70,\), want one for each"),
        ({"linear_bias": [torch.zeros(V)]}, ValueError, "linear_bias: got 1 of them, want one for each"),
        (
            {"weight": torch.zeros(V)},
            ValueError,
            r"weight: got shape \(70,\), want one for each head: a list of 3",
        ),
        ({"weight": 3}, TypeError, "weight: got int, want a list"),
        ({"grad_weight_out": torch.zeros(V, D)}, ValueError, r"grad_weight_out: got shape \(70, 24\)"),
        (
            {"token_weight": torch.zeros(3, 5)},
            ValueError,
            r"token_weight: got shape \(3, 5\), want \(3, 5, 3",
        ),
        ({"denominator": torch.ones(2)}, ValueError, r"denominator: got shape \(2,\), want \(\) or \(3,\)"),
        ({"tp_group": "a"}, ValueError, "tp_group: got a group with several heads, want None"),
        ({"vocab_start": 0}, ValueError, "vocab_start: got 0 with several heads, want None"),
        ({"sequence_dim": 0}, ValueError, "sequence_dim: got 0 with several heads, want None"),
        (
            {"grad_input": "partial"},
            ValueError,
            "grad_input: got 'partial' with several heads, want 'reduced'",
        ),
        ({"sm_margin": 4}, ValueError, "sm_margin: got 4 with several heads, want None"),
    ],
)
def test_refused(changes, error, message):
    heads = Heads(torch.float32, stacked=True)
    given = {"input": heads.input, "linear_weight": WEIGHTS, "target": heads.target, **changes}
    with pytest.raises(error, match=message):
        linear_cross_entropy(**given)


@pytest.mark.parametrize("count", [0, -1, "a"])
def test_a_number_of_heads_is_refused(count):
    with pytest.raises(ValueError, match="num_heads: got"):
        LinearCrossEntropy(D, V, num_heads=count)
