"""linear_logprob on the streaming path: every output and combination of gradients against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import cute_lce
import cute_lce.reference
from cute_lce import LinearLogprob, TokenStats
from tests.numerics import assert_close, nested, random_case

# A test reads what it asked for: no field is None.
linear_logprob: Any = cute_lce.linear_logprob
reference: Any = cute_lce.reference

NAMES = TokenStats._fields
DIFFERENTIABLE = NAMES[:4]
D, V, K = 8, 70, 6
SHAPE = (3, 4)
OPTIONS = {"logit_scale": 0.8, "softcap": 6.0}


def operands(dtype, requires_grad=True, scale=2.0):
    """(input, linear_weight, linear_bias), target."""
    case = random_case(12, D, V, dtype, scale=scale)
    case.target[5] = -100
    bias = torch.linspace(-1, 1, V).to(dtype)
    tensors = case.input.view(*SHAPE, D), case.linear_weight, bias
    return [each.detach().requires_grad_(requires_grad) for each in tensors], case.target.view(SHAPE)


def ids_of(target):
    """Some repeat, one is the target, and some are no classes."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V, (*target.shape, K), generator=generator)
    ids[..., 1] = ids[..., 0]
    ids[..., 2] = target.clamp(min=0)
    ids[0, :, 3], ids[1, :, 3] = -1, V
    ids[2, 0] = 7
    return ids


def temperatures(dtype=torch.float64):
    return torch.linspace(0.3, 3, 12, dtype=dtype).view(SHAPE)


def run(function, leaves, target, dtype=None, **options):
    hidden, weight, bias = leaves if dtype is None else [each.detach().to(dtype) for each in leaves]
    if dtype is not None:
        hidden, weight, bias = leaves = [each.requires_grad_() for each in (hidden, weight, bias)]
    return leaves, function(
        hidden, weight, target, linear_bias=bias, topk_ids=ids_of(target), **OPTIONS, **options
    )


@pytest.mark.parametrize("schedule", ["recompute", "keep"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_numbers_and_gradients(dtype, schedule):
    """All outputs, and the gradients by every combination of the differentiable ones."""
    leaves, target = operands(dtype)
    options = {"temperature": temperatures()}
    plain = torch.float64 if dtype is torch.float64 else torch.float32
    _, found = run(linear_logprob, leaves, target, outputs=NAMES, schedule=schedule, window=32, **options)
    wide, expected = run(reference.linear_logprob, leaves, target, torch.float64, **options)
    narrow, baseline = run(reference.linear_logprob, leaves, target, plain, temperature=temperatures(plain))
    for name, actual, want, other in zip(NAMES, found, expected, baseline, strict=True):
        if name in ("argmax", "is_top1"):
            assert torch.equal(actual, want)
        else:
            assert actual.dtype is plain
            assert_close(name, actual, want.detach(), other.detach())
    generator = torch.Generator().manual_seed(2)
    upstream = [torch.randn(each.shape, generator=generator, dtype=plain) for each in found[:4]]
    for count in range(1, 5):
        for chosen in itertools.combinations(range(4), count):
            given = [upstream[i] for i in chosen]

            def gradients(stats, inputs, given=given, chosen=chosen):
                outputs = [stats[i] for i in chosen]
                dloss = [each.to(output.dtype) for each, output in zip(given, outputs, strict=True)]
                return torch.autograd.grad(outputs, inputs, dloss, retain_graph=True)

            for name, actual, want, other in zip(
                ("dinput", "dweight", "dbias"),
                gradients(found, leaves),
                gradients(expected, wide),
                gradients(baseline, narrow),
                strict=True,
            ):
                assert actual.dtype is dtype
                assert_close(f"{name} of {chosen}", actual, want, other.to(dtype))


def test_only_what_is_asked_for():
    leaves, target = operands(torch.float32)
    for name in NAMES:
        options = {"topk_ids": ids_of(target)} if name == "topk_logprob" else {}
        found = linear_logprob(leaves[0], leaves[1], target, outputs=(name,), **options)
        assert [each for each in NAMES if getattr(found, each) is not None] == [name]
        assert getattr(found, name).requires_grad == (name in DIFFERENTIABLE)
        assert not getattr(found, name).view(12, -1)[5].any()
    found = linear_logprob(leaves[0], leaves[1], target, outputs=("entropy", "lse"), entropy_grad=False)
    assert not found.entropy.requires_grad
    assert found.lse.requires_grad


@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_precision(temperature, offset):
    """Also of logits with a large common offset, and of confident rows."""
    leaves, target = operands(torch.float32, scale=6.0)
    leaves = [each.detach().clone() for each in leaves[:2]]
    leaves[0][..., 0], leaves[1][:, 0] = 1, offset
    names = ("logprob", "entropy", "log_sum_sq_probs")
    found = linear_logprob(*leaves, target, temperature=temperature, outputs=names, window=16)
    wide = [each.double() for each in leaves]
    expected = reference.linear_logprob(*wide, target, temperature=temperature)
    baseline = reference.linear_logprob(*leaves, target, temperature=temperature)
    for name in names:
        assert_close(name, getattr(found, name), getattr(expected, name), getattr(baseline, name))


def test_columns_of_minus_infinity():
    (hidden, weight, _), target = operands(torch.float64)
    bias = torch.zeros(V, dtype=torch.float64)
    bias[16:40] = -torch.inf
    target = target.clone()
    target[target >= 0] = 3
    names = ("logprob", "entropy", "lse", "log_sum_sq_probs")
    expected = reference.linear_logprob(hidden, weight, target, linear_bias=bias)
    wanted = torch.autograd.grad(expected.lse.sum() + expected.logprob.sum(), (hidden, weight))
    for window in (8, 70):
        found = linear_logprob(hidden, weight, target, linear_bias=bias, outputs=names, window=window)
        for name in names:
            torch.testing.assert_close(getattr(found, name), getattr(expected, name))
        total = found.lse.sum() + found.logprob.sum()
        for one, other in zip(
            torch.autograd.grad(total, (hidden, weight), retain_graph=True), wanted, strict=True
        ):
            torch.testing.assert_close(one, other)
        # As without these columns, whatever the upstream gradient's size.
        known = bias == 0
        of_known = reference.linear_logprob(hidden, weight[known], target, linear_bias=bias[known])
        exact = torch.autograd.grad(of_known.entropy.sum(), (hidden, weight))
        for scale in (1.0, 2.0**16):
            gradients = torch.autograd.grad(found.entropy.sum() * scale, (hidden, weight), retain_graph=True)
            for one, other in zip(gradients, exact, strict=True):
                torch.testing.assert_close(one / scale, other)


def test_the_first_maximum_wins():
    hidden = torch.ones(1, D)
    weight = torch.zeros(V, D)
    weight[[20, 50]] = 1
    for window in (8, 16, 64, 70):
        for target, top in ((20, True), (50, False)):
            found = linear_logprob(
                hidden, weight, torch.tensor([target]), outputs=("argmax", "is_top1"), window=window
            )
            assert found.argmax.tolist() == [20]
            assert found.is_top1.tolist() == [top]
            alone = linear_logprob(
                hidden, weight, torch.tensor([target]), outputs=("is_top1",), window=window
            )
            assert alone.is_top1.tolist() == [top]


def test_a_temperature_of_zero_spoils_its_own_row():
    leaves, target = operands(torch.float64)
    temperature = temperatures()
    clean = linear_logprob(leaves[0], leaves[1], target, temperature=temperature).logprob
    wanted = torch.autograd.grad(clean.sum(), leaves[0])[0]
    temperature.view(-1)[[2, 5]] = 0
    found = linear_logprob(leaves[0], leaves[1], target, temperature=temperature).logprob
    (gradient,) = torch.autograd.grad(found.sum(), leaves[0])
    sick = torch.arange(12).view(SHAPE) == 2
    assert not found[sick].isfinite().any()
    assert torch.equal(found[~sick], clean[~sick])
    assert torch.equal(gradient[~sick], wanted[~sick])


def test_ignored_rows_do_not_matter():
    leaves, target = operands(torch.float64)
    options = {"outputs": ("logprob", "entropy"), "temperature": temperatures()}
    clean = linear_logprob(leaves[0], leaves[1], target, **options)
    upstream = torch.ones(SHAPE, dtype=torch.float64)
    wanted = torch.autograd.grad([*clean[:2]], leaves[:2], [upstream, upstream])
    with torch.no_grad():
        sick = leaves[0].clone()
        sick.view(12, D)[5] = torch.nan
        options["temperature"].view(-1)[5] = torch.nan
        upstream.view(-1)[5] = torch.nan
    sick.requires_grad_()
    found = linear_logprob(sick, leaves[1], target, **options)
    got = torch.autograd.grad([*found[:2]], (sick, leaves[1]), [upstream, upstream])
    for one, other in zip((*found[:2], *got), (*clean[:2], *wanted), strict=True):
        assert torch.equal(one, other)


def test_gradcheck():
    case = random_case(3, 3, 9, torch.float64)
    case.target[1] = -100
    ids = torch.tensor([[0, 0, 9], [1, 2, 3], [int(case.target[2]), 4, -1]])

    def call(hidden, weight, bias):
        found = linear_logprob(
            hidden, weight, case.target, linear_bias=bias, topk_ids=ids, outputs=DIFFERENTIABLE, window=4,
            temperature=0.7, softcap=3.0,
        )  # fmt: skip
        return found[:4]

    bias = torch.randn(9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        call, (case.input.requires_grad_(), case.linear_weight.requires_grad_(), bias)
    )


@pytest.mark.parametrize("schedule", ["recompute", "keep"])
def test_any_upstream_gradient_may_be_a_subclass_or_batched(schedule):
    """The second of two, while the first is an ordinary tensor."""
    leaves, target = operands(torch.float64)
    ones = torch.ones(SHAPE, dtype=torch.float64)

    def call():
        names = ("logprob", "entropy")
        return linear_logprob(leaves[0], leaves[1], target, outputs=names, schedule=schedule)

    stats = call()
    expected = torch.autograd.grad([stats.logprob, stats.entropy], leaves[:2], [ones, 2 * ones])
    stats = call()
    wrapped = TwoTensor(2 * ones, 2 * ones)
    found = torch.autograd.grad([stats.logprob, stats.entropy], leaves[:2], [ones, wrapped])
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.a if isinstance(got, TwoTensor) else got, want)
    stats = call()
    stats.logprob.register_hook(lambda gradient: ones)
    total = stats.logprob.sum() + 2 * stats.entropy.sum()
    batched = torch.autograd.grad(
        total, leaves[:2], torch.ones(2, dtype=torch.float64), is_grads_batched=True
    )
    for got, want in zip(batched, expected, strict=True):
        torch.testing.assert_close(got, want.expand_as(got))


def test_compiles_in_one_graph():
    torch._dynamo.reset()
    leaves, target = operands(torch.float32)
    options = {"outputs": NAMES, "temperature": temperatures(torch.float32)}
    compiled = torch.compile(linear_logprob, fullgraph=True, backend="aot_eager")
    _, plain = run(linear_logprob, leaves, target, **options)
    _, found = run(compiled, leaves, target, **options)
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(
        torch.autograd.grad(found.entropy.sum() + found.logprob.sum(), leaves),
        torch.autograd.grad(plain.entropy.sum() + plain.logprob.sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_opcheck():
    (hidden, weight, bias), target = operands(torch.float32)
    options = {"linear_bias": bias, "topk_ids": ids_of(target), "outputs": list(NAMES)}
    op = torch.ops.cute_lce.fused_linear_logprob.default
    # Another of opcheck's utilities looks at .grad of what is in a list of results, which warns.
    for util in ("test_schema", "test_autograd_registration", "test_aot_dispatch_dynamic"):
        torch.library.opcheck(op, (hidden, weight, target), options, test_utils=util)


def test_the_module():
    (hidden, _, _), target = operands(torch.float32)
    head = LinearLogprob(D, V, bias=True, outputs=("logprob", "topk_logprob"), softcap=5.0)
    assert isinstance(head, nn.Linear)
    found = head(hidden, target, temperature=0.5, topk_ids=ids_of(target))
    want = linear_logprob(
        hidden,
        head.weight,
        target,
        linear_bias=head.bias,
        temperature=0.5,
        topk_ids=ids_of(target),
        outputs=("logprob", "topk_logprob"),
        softcap=5.0,
    )
    assert torch.equal(found.logprob, want.logprob)
    assert torch.equal(found.topk_logprob, want.topk_logprob)
    assert "softcap=5.0" in repr(head)
    with pytest.raises(TypeError, match="reduction: not an option"):
        LinearLogprob(D, V, reduction="mean")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 0.0}, ValueError, r"temperature: got 0\.0, want a positive .* the output 'argmax'"),
        ({"temperature": float("inf")}, ValueError, "temperature: got inf"),
        ({"temperature": 1e-310}, ValueError, "temperature: got 1e-310, want a number from 1e-30 to 1e30"),
        ({"temperature": "1"}, TypeError, "temperature: got str"),
        ({"temperature": torch.ones(3)}, ValueError, r"temperature: got shape \(3,\), want \(3, 4\)"),
        (
            {"temperature": torch.ones(SHAPE, requires_grad=True)},
            ValueError,
            "temperature: got a tensor that",
        ),
        ({"outputs": ()}, ValueError, r"outputs: got \(\), want at least one"),
        ({"outputs": "lse"}, TypeError, "outputs: got 'lse', want a tuple"),
        ({"outputs": None}, TypeError, "outputs: got None, want a tuple"),
        ({"outputs": ("loss",)}, ValueError, "outputs: got 'loss', want names of logprob"),
        ({"outputs": ("lse", "lse")}, ValueError, "outputs: got"),
        ({"outputs": ("topk_logprob",)}, ValueError, "topk_ids: got no tensor"),
        (
            {"topk_ids": torch.zeros(3, 4, 2, dtype=torch.int64)},
            ValueError,
            "topk_ids: got a tensor, want one",
        ),
        (
            {"outputs": ("topk_logprob",), "topk_ids": torch.zeros(4, 2, dtype=torch.int64)},
            ValueError,
            r"topk_ids: got shape \(4, 2\), want \(3, 4, 2\)",
        ),
        (
            {"outputs": ("topk_logprob",), "topk_ids": torch.zeros(3, 4, 2)},
            TypeError,
            r"topk_ids: got torch\.float32",
        ),
        (
            {"outputs": ("topk_logprob",), "topk_ids": nested(torch.arange(4))},
            ValueError,
            "topk_ids: got a nested tensor",
        ),
        ({"schedule": "grad_in_forward"}, ValueError, "schedule: got 'grad_in_forward', want"),
        ({"entropy_grad": 1}, TypeError, "entropy_grad: got int"),
    ],
)
def test_refused(options, error, message):
    (hidden, weight, _), target = operands(torch.float32)
    with pytest.raises(error, match=message):
        linear_logprob(hidden, weight, target, **options)


def test_one_token_without_a_dimension():
    hidden, weight = torch.randn(8, requires_grad=True), torch.randn(17, 8)
    names = ("logprob", "entropy", "lse", "argmax", "topk_logprob")
    found = linear_logprob(hidden, weight, torch.tensor(3), outputs=names, topk_ids=torch.tensor([1, 3]))
    z = hidden @ weight.T
    assert found.logprob is not None
    assert found.entropy is not None
    assert found.topk_logprob is not None
    assert found.argmax is not None
    assert torch.allclose(found.logprob, z.log_softmax(-1)[3], atol=1e-5)
    assert torch.allclose(found.topk_logprob, z.log_softmax(-1)[[1, 3]], atol=1e-5)
    assert found.entropy.shape == found.argmax.shape == ()
    (found.logprob + found.entropy).backward()
    assert hidden.grad is not None
    assert hidden.grad.any()
