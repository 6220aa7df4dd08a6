"""The sampled loss: values and gradients against float64, repeated ids, accidental hits, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cute_lce import linear_cross_entropy, reference, sampled_linear_cross_entropy
from cute_lce.streaming import sampled as streaming
from tests.numerics import assert_close, nested, random_case

N, D, V, M = 13, 24, 90, 41


def case_of(dtype: torch.dtype, scale: float = 2.0):
    """Ids that repeat and are some rows' targets; two rows ignored."""
    case = random_case(N, D, V, dtype, scale=scale)
    ids = torch.randint(V, (M,), generator=torch.Generator().manual_seed(5))
    ids[7], ids[30], ids[31] = ids[3], case.target[0], case.target[0]
    case.target[2] = -100
    case.target[9] = -100
    case.target[5] = case.target[4]
    return case, ids


def terms_of(dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(6)

    def numbers(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    return {
        "sampled_log_q": numbers(M) * 3 - 4,
        "target_log_q": numbers(N) * 3 - 4,
        "linear_bias": numbers(V).to(dtype),
        "logit_scale": 0.7,
        "token_weight": numbers(N),
    }


def gradients(call, case, ids: Tensor, terms: dict, upstream: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The loss and all gradients of operands, and of the definition's terms, cast to a dtype."""
    if call is reference.sampled_linear_cross_entropy:
        terms = {
            name: value.to(dtype) if isinstance(value, Tensor) else value for name, value in terms.items()
        }
    terms = dict(terms)
    leaves = [each.to(dtype).detach().requires_grad_() for each in (case.input, case.linear_weight)]
    if "linear_bias" in terms:
        leaves.append(terms["linear_bias"].detach().requires_grad_())
        terms["linear_bias"] = leaves[2]
    loss = call(leaves[0], leaves[1], case.target, ids, **terms)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))]


def check(case, ids: Tensor, call: Any = sampled_linear_cross_entropy, window: int | None = None, **terms):
    dtype = case.input.dtype
    plain = torch.float64 if dtype is torch.float64 else torch.float32
    upstream = case.upstream(terms.get("reduction", "mean"))
    given = {**terms, "window": window}
    found = gradients(call, case, ids, given, upstream, dtype)
    definition = reference.sampled_linear_cross_entropy
    expected = gradients(definition, case, ids, terms, upstream, torch.float64)
    baseline = gradients(definition, case, ids, terms, upstream, plain)
    names = "loss", "dinput", "dweight", "dbias"
    for name, actual, want, base in zip(names, found, expected, baseline, strict=False):
        assert actual.dtype is (plain if name == "loss" else dtype)
        assert_close(name, actual, want, base.to(actual.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_gradients(reduction, dtype):
    case, ids = case_of(dtype)
    terms = terms_of(dtype)
    for window in (None, 1, 16, 10**40):
        check(case, ids, window=window, reduction=reduction)
        check(case, ids, window=window, reduction=reduction, **terms)
        check(case, ids, window=window, reduction=reduction, remove_accidental_hits=False, **terms)
    check(case, ids.int(), reduction=reduction, denominator=torch.tensor(7))
    check(case, ids[:1], reduction=reduction, denominator=3.0)


@pytest.mark.parametrize("removes", [True, False])
def test_gradcheck(removes):
    case = random_case(5, 3, 9, torch.float64)
    case.target[1] = -100
    ids = torch.tensor([4, 4, int(case.target[0]), 8])
    log_q = torch.randn(4).double(), torch.randn(5).double()
    bias = torch.randn(9, dtype=torch.float64, requires_grad=True)

    def call(hidden, weight, bias):
        return sampled_linear_cross_entropy(
            hidden,
            weight,
            case.target,
            ids,
            sampled_log_q=log_q[0],
            target_log_q=log_q[1],
            remove_accidental_hits=removes,
            linear_bias=bias,
            logit_scale=0.8,
            window=2,
        )

    assert torch.autograd.gradcheck(
        call, (case.input.requires_grad_(), case.linear_weight.requires_grad_(), bias)
    )


def test_with_every_class_once_it_is_the_whole_loss():
    case, _ = case_of(torch.float64)
    for reduction in ("mean", "none"):
        found = sampled_linear_cross_entropy(
            case.input, case.linear_weight, case.target, torch.randperm(V), reduction=reduction
        )
        want = linear_cross_entropy(case.input, case.linear_weight, case.target, reduction=reduction)
        torch.testing.assert_close(found, want)


def test_leading_dimensions_and_strides():
    case, ids = case_of(torch.float64)
    hidden, target = case.input[:12].view(3, 4, D), case.target[:12].view(3, 4)
    log_q = torch.randn(V, dtype=torch.float64)
    # An ignored target has no class.
    own = log_q[target.clamp(min=0)]
    given = {"sampled_log_q": log_q[ids], "target_log_q": own, "reduction": "none"}
    found = sampled_linear_cross_entropy(hidden.mT.contiguous().mT, case.linear_weight, target, ids, **given)
    assert found.shape == (3, 4)
    torch.testing.assert_close(
        found, reference.sampled_linear_cross_entropy(hidden, case.linear_weight, target, ids, **given)
    )


def test_rows_that_are_sure_keep_their_digits():
    """A target 40 above the sample: neither the loss, 1e-16, nor its gradients are lost beside 1."""
    case, ids = case_of(torch.float32, scale=0.1)
    hidden, weight = case.input.clone(), case.linear_weight.clone()
    hidden[:, 0], weight[:, 0] = 8.0, 0.0
    weight[case.target.clamp(min=0), 0] = 5.0
    outside = ids[~torch.isin(ids, case.target)]
    assert outside.numel() > 10
    hidden, weight = (each.detach().requires_grad_() for each in (hidden, weight))
    losses = sampled_linear_cross_entropy(hidden, weight, case.target, outside, reduction="none")
    wide = hidden.detach().double().requires_grad_()
    # The loss is the sum of the others relative to the target, which the definition's logsumexp loses.
    z, valid = reference.logits(wide, weight.detach().double()), case.target >= 0
    own = z[valid, case.target[valid]].unsqueeze(1)
    exact = (z[valid][:, outside] - own).exp().sum(1)
    assert float(exact.detach().max()) < 1e-12
    torch.testing.assert_close(losses[valid].double().detach(), exact.detach(), rtol=1e-4, atol=0)
    (found,) = torch.autograd.grad(losses.sum(), hidden)
    (gradient,) = torch.autograd.grad(exact.sum(), wide)
    torch.testing.assert_close(found.double(), gradient, rtol=1e-3, atol=0)


def test_ignored_rows_do_not_matter():
    case, ids = case_of(torch.float64)
    terms = terms_of(torch.float64)
    upstream = torch.ones((), dtype=torch.float64)
    want = gradients(sampled_linear_cross_entropy, case, ids, terms, upstream, torch.float64)
    case.input[2], case.input[9] = torch.nan, torch.inf
    terms["token_weight"][2] = torch.nan
    terms["target_log_q"][9] = torch.nan
    found = gradients(sampled_linear_cross_entropy, case, ids, terms, upstream, torch.float64)
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one, other)
    case.target[:] = -100
    for each in gradients(sampled_linear_cross_entropy, case, ids, terms, upstream, torch.float64):
        assert not each.any()


def test_frozen_operands_and_parts():
    case, ids = case_of(torch.float32)
    want = gradients(sampled_linear_cross_entropy, case, ids, {}, torch.ones(()), torch.float32)
    hidden = case.input.detach().requires_grad_()
    loss = sampled_linear_cross_entropy(hidden, case.linear_weight, case.target, ids)
    assert torch.equal(torch.autograd.grad(loss, hidden)[0], want[1])
    weight = case.linear_weight.detach().requires_grad_()
    loss = sampled_linear_cross_entropy(case.input, weight, case.target, ids)
    assert torch.equal(torch.autograd.grad(loss, weight)[0], want[2])
    assert not sampled_linear_cross_entropy(case.input, case.linear_weight, case.target, ids).requires_grad


def test_the_gradient_by_weight_repeats():
    """Many rows of few classes: any other order of the additions would give other bits."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(4000, 16), torch.randn(50, 16, requires_grad=True)
    target, ids = torch.randint(3, (4000,)), torch.randint(50, (300,))
    loss = sampled_linear_cross_entropy(hidden, weight, target, ids)
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    # A class that no sample and no row has gets 0, others their rows' alone.
    few = torch.autograd.grad(sampled_linear_cross_entropy(hidden, weight, target, ids[:1]), weight)[0]
    touched = torch.unique(torch.cat((target, ids[:1])))
    assert bool(few[touched].any(1).all())
    assert few.any(1).sum() == touched.numel()


class _Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.untyped_storage().nbytes() // each.element_size())
        return found


def test_logits_are_never_whole():
    """n x m is 4 times the largest tensor."""
    n, m, d = 3072, 2048, 8
    hidden, weight = torch.randn(n, d), torch.randn(5000, d)
    operands = streaming.SampledOperands(hidden, weight, torch.randint(5000, (n,)), torch.randint(5000, (m,)))
    options = streaming.SampledOptions(-100, 1.0, True, 0)
    with _Largest() as mode:
        losses, stats = streaming.forward(operands, options)
        streaming.backward(operands, options, stats, losses, (True, True, False))
    assert 0 < mode.numel <= n * m // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_in_one_graph(dtype):
    torch._dynamo.reset()
    case, ids = case_of(dtype)
    compiled = torch.compile(sampled_linear_cross_entropy, fullgraph=True, backend="aot_eager")
    check(case, ids, compiled, **terms_of(dtype))


def test_opcheck():
    case, ids = case_of(torch.float32)
    terms = terms_of(torch.float32)
    operands = [each.requires_grad_() for each in (case.input, case.linear_weight)]
    bias = terms["linear_bias"].requires_grad_()
    arguments = *operands, case.target, ids, bias, terms["sampled_log_q"], terms["target_log_q"]
    torch.library.opcheck(torch.ops.cute_lce.sampled.default, (*arguments, -100, 0.7, True, 16))


def test_autocast_and_a_second_derivative():
    case, ids = case_of(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = sampled_linear_cross_entropy(case.input, case.linear_weight, case.target, ids)
    narrow = case.input.bfloat16(), case.linear_weight.bfloat16()
    assert torch.equal(found, sampled_linear_cross_entropy(*narrow, case.target, ids))
    hidden = case.input.detach().requires_grad_()
    loss = sampled_linear_cross_entropy(hidden, case.linear_weight, case.target, ids)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


IDS = torch.zeros(M, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"sampled_ids": [1]}, TypeError, "sampled_ids: got list"),
        ({"sampled_ids": IDS[:0]}, ValueError, r"sampled_ids: got shape \(0,\), want \(m,\)"),
        ({"sampled_ids": IDS[None]}, ValueError, r"sampled_ids: got shape \(1, 41\)"),
        ({"sampled_ids": IDS.float()}, TypeError, r"sampled_ids: got torch\.float32"),
        ({"sampled_ids": nested(IDS)}, ValueError, "sampled_ids: got a nested"),
        ({"sampled_ids": IDS + V}, ValueError, r"sampled_ids: got 90, want classes in \[0, 90\)"),
        ({"sampled_ids": IDS - 100}, ValueError, "sampled_ids: got -100"),
        ({"sampled_log_q": torch.zeros(M)}, ValueError, "sampled_log_q: got a tensor without"),
        ({"target_log_q": torch.zeros(N)}, ValueError, "target_log_q: got a tensor without"),
        (
            {"sampled_log_q": torch.zeros(N), "target_log_q": torch.zeros(N)},
            ValueError,
            r"sampled_log_q: got shape \(13,\), want \(41,\)",
        ),
        (
            {"sampled_log_q": torch.zeros(M), "target_log_q": torch.zeros(N, requires_grad=True)},
            ValueError,
            "target_log_q: got a tensor that requires a gradient",
        ),
        ({"remove_accidental_hits": 1}, TypeError, "remove_accidental_hits: got int"),
        ({"window": 0}, ValueError, "window: got 0"),
        ({"reduction": "max"}, ValueError, "reduction: got 'max'"),
        ({"logit_scale": float("nan")}, ValueError, "logit_scale: got nan"),
        ({"denominator": -1}, ValueError, "denominator: got -1"),
        ({"token_weight": torch.zeros(3)}, ValueError, "token_weight: got shape"),
        ({"linear_bias": torch.zeros(3)}, ValueError, "linear_bias: got shape"),
        ({"target": torch.full((N,), V)}, ValueError, "target: got 90 at token 0"),
        ({"linear_weight": torch.zeros(2, V, D)}, ValueError, r"linear_weight: got shape \(2, 90, 24\)"),
        ({"label_smoothing": 0.1}, TypeError, "label_smoothing"),
        ({"weight": torch.ones(V)}, TypeError, "weight"),
        ({"tp_group": "a"}, ValueError, "tp_group: got a group in a sampled loss, want None"),
    ],
)
def test_refused(changes, error, message):
    case, ids = case_of(torch.float32)
    given = {
        "input": case.input,
        "linear_weight": case.linear_weight,
        "target": case.target,
        "sampled_ids": ids,
        **changes,
    }
    with pytest.raises(error, match=message):
        sampled_linear_cross_entropy(**given)
