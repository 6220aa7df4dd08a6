"""Losses with terms on the streaming path: every pair of terms, reduction and schedule against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cute_lce import LinearCrossEntropy, linear_cross_entropy, reference
from cute_lce.ops import terms as terms_module
from cute_lce.ops import token_stats
from cute_lce.options import NO_TERMS, TermOptions
from tests.numerics import assert_close, negated, random_case, relative_error

N, D, V = 11, 8, 70

CALL = torch.ops.cute_lce.fused_linear_cross_entropy


def values(dtype: torch.dtype) -> dict:
    """Every term, by its name; tensors in float64 but for the bias."""
    generator = torch.Generator().manual_seed(3)

    def numbers(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    return {
        "linear_bias": (numbers(V) * 2 - 1).to(dtype),
        "weight": numbers(V),
        "label_smoothing": 0.1,
        "logit_scale": 0.6,
        "softcap": 1.5,
        "z_loss": 0.05,
        "token_weight": numbers(N) * 2 - 0.5,
        "denominator": torch.tensor(7),
    }


TERMS = tuple(values(torch.float64))
PAIRS = [*itertools.combinations(TERMS, 2), TERMS]
SCHEDULES = ("recompute", "keep", "grad_in_forward")


def case_of(dtype: torch.dtype):
    case = random_case(N, D, V, dtype, scale=2.0)
    case.target[2] = -100
    case.target[7] = -100
    return case


def wide(terms: dict, dtype: torch.dtype) -> dict:
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in terms.items()
    }


def leaves_of(case, terms: dict) -> tuple[list[torch.Tensor], dict]:
    leaves = [case.input.detach().requires_grad_(), case.linear_weight.detach().requires_grad_()]
    if "linear_bias" in terms:
        leaves.append(terms["linear_bias"].detach().requires_grad_())
        terms = {**terms, "linear_bias": leaves[2]}
    return leaves, terms


def expected_of(case, terms, upstream, reduction, dtype):
    return reference.gradients(
        case.input.to(dtype),
        case.linear_weight.to(dtype),
        case.target,
        upstream,
        reduction=reduction,
        **wide(terms, dtype),
    )


def check(case, terms: dict, reduction: str, call=linear_cross_entropy, **options) -> None:
    """The loss and all gradients against float64."""
    dtype = case.input.dtype
    upstream = case.upstream(reduction)
    leaves, given = leaves_of(case, terms)
    if options.get("schedule") == "grad_in_forward" and reduction == "none":
        leaves = leaves[:1]
        given = {name: value.detach() if name == "linear_bias" else value for name, value in given.items()}
        weight = case.linear_weight
    else:
        weight = leaves[1]
    loss = call(leaves[0], weight, case.target, reduction=reduction, **given, **options)
    found = loss.detach(), *torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))
    expected = expected_of(case, terms, upstream, reduction, torch.float64)
    plain = torch.float64 if dtype is torch.float64 else torch.float32
    baseline = expected_of(case, terms, upstream.to(plain), reduction, plain)
    for i, (name, actual) in enumerate(zip(("loss", "dinput", "dweight", "dbias"), found, strict=False)):
        assert actual.dtype is (plain if i == 0 else dtype)
        assert_close(name, actual, expected[i], baseline[i].to(actual.dtype))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_pairs(reduction, schedule):
    """Every two terms together, and all, in float64, with a ragged last window."""
    case, every = case_of(torch.float64), values(torch.float64)
    for names in PAIRS:
        terms = {name: every[name] for name in names}
        check(case, terms, reduction, schedule=schedule, window=32)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype, schedule):
    case, every = case_of(dtype), values(dtype)
    for names in (*((name,) for name in TERMS), TERMS):
        terms = {name: every[name] for name in names}
        for reduction in ("mean", "none"):
            check(case, terms, reduction, schedule=schedule)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2, 1.0])
def test_is_torchs(label_smoothing, weighted, reduction):
    case, every = case_of(torch.float64), values(torch.float64)
    weight, bias = every["weight"] if weighted else None, every["linear_bias"]
    expected = F.cross_entropy(
        F.linear(case.input, case.linear_weight, bias),
        case.target,
        weight,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    terms = {"linear_bias": bias, "weight": weight, "label_smoothing": label_smoothing}
    for call in (linear_cross_entropy, reference.linear_cross_entropy):
        found = call(case.input, case.linear_weight, case.target, reduction=reduction, **terms)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradcheck(schedule):
    case = random_case(4, 3, 9, torch.float64)
    case.target[1] = -100
    terms = {name: value for name, value in values(torch.float64).items() if name != "linear_bias"}
    terms |= {"weight": terms["weight"][:9], "token_weight": terms["token_weight"][:4]}
    bias = torch.randn(9, dtype=torch.float64, requires_grad=True)

    def call(hidden, weight, bias):
        return linear_cross_entropy(
            hidden, weight, case.target, linear_bias=bias, **terms, schedule=schedule, window=4
        )

    inputs = case.input.requires_grad_(), case.linear_weight.requires_grad_(), bias
    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ignored_rows_do_not_matter(schedule):
    """Whatever stands in them: nan in input, token_weight."""
    case, every = case_of(torch.float64), values(torch.float64)
    clean, terms = leaves_of(case, every)
    plain = linear_cross_entropy(clean[0], clean[1], case.target, **terms, schedule=schedule)
    leaves, terms = leaves_of(case, every)
    with torch.no_grad():
        leaves[0] = leaves[0].index_fill(0, torch.tensor([2, 7]), torch.nan)
    leaves[0].requires_grad_()
    terms["token_weight"] = terms["token_weight"].index_fill(0, torch.tensor([2, 7]), torch.inf)
    found = linear_cross_entropy(leaves[0], leaves[1], case.target, **terms, schedule=schedule)
    for one, other in zip(
        (found, *torch.autograd.grad(found, leaves)), (plain, *torch.autograd.grad(plain, clean)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "names", [("weight",), ("label_smoothing", "z_loss"), ("linear_bias", "token_weight")]
)
def test_all_ignored_is_zero(names, schedule):
    case, every = case_of(torch.float64), values(torch.float64)
    case.target[:] = -100
    terms = {name: every[name] for name in names}
    leaves, terms = leaves_of(case, terms)
    loss = linear_cross_entropy(leaves[0], leaves[1], case.target, **terms, schedule=schedule)
    for each in (loss, *torch.autograd.grad(loss, leaves)):
        assert not each.any()


@pytest.mark.parametrize("weighted", [False, True])
def test_columns_of_minus_infinity(weighted):
    """Without smoothing they do not matter; with it torch's inf, and nan with weight 0."""
    case = case_of(torch.float64)
    case.target[:] = 3
    bias = torch.zeros(V, dtype=torch.float64)
    bias[40:60] = -torch.inf
    weight = torch.ones(V, dtype=torch.float64)
    if weighted:
        weight[40:60] = 0
    for smoothing in (0.0, 0.1):
        terms = {"linear_bias": bias, "weight": weight, "label_smoothing": smoothing}
        expected = F.cross_entropy(
            F.linear(case.input, case.linear_weight, bias),
            case.target,
            weight,
            reduction="none",
            label_smoothing=smoothing,
        )
        for window in (20, 64):
            found = linear_cross_entropy(
                case.input, case.linear_weight, case.target, **terms, reduction="none", window=window
            )
            torch.testing.assert_close(found, expected, equal_nan=True)
    leaves, terms = leaves_of(case, {"linear_bias": bias, "z_loss": 0.1})
    loss = linear_cross_entropy(leaves[0], leaves[1], case.target, **terms)
    assert all(bool(each.isfinite().all()) for each in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("terms", [{"denominator": 7}, {"token_weight": True}, {"z_loss": 1e-3}], ids=str)
def test_losses_of_rows_may_be_changed_in_place(terms):
    case = random_case(12, 8, 30, torch.float64)
    terms = {**terms, "token_weight": torch.linspace(0, 2, 12)} if "token_weight" in terms else terms
    found = []
    for in_place in (False, True):
        hidden, weight = case.input.clone().requires_grad_(), case.linear_weight.clone().requires_grad_()
        losses = linear_cross_entropy(hidden, weight, case.target, reduction="none", **terms)
        (losses.mul_(3) if in_place else losses * 3).sum().backward()
        found.append([hidden.grad, weight.grad])
    torch.testing.assert_close(found[1], found[0])


def test_token_weight_does_not_divide_and_denominator_does():
    case = case_of(torch.float64)
    rows = linear_cross_entropy(case.input, case.linear_weight, case.target, reduction="none")
    given = case.input, case.linear_weight, case.target
    ones = torch.full_like(rows, 3)
    torch.testing.assert_close(linear_cross_entropy(*given, token_weight=ones), 3 * rows.sum() / 9)
    for denominator in (5, 5.0, torch.tensor(5), torch.tensor(5.0)):
        torch.testing.assert_close(linear_cross_entropy(*given, denominator=denominator), rows.sum() / 5)
        torch.testing.assert_close(
            linear_cross_entropy(*given, denominator=denominator, reduction="sum"), rows.sum()
        )


ZEROS = {
    "number": 0,
    "float": 0.0,
    "int64": torch.tensor(0),
    "float32": torch.tensor(0.0),
}


@pytest.mark.parametrize("nothing", ["ignored", "token_weight"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero", ZEROS)
def test_nothing_over_a_denominator_of_zero_is_zero(zero, schedule, nothing):
    """With and without the terms of which the kernels' statistics are asked; of something it is inf."""
    case = case_of(torch.float64)
    target, terms = case.target, {}
    if nothing == "ignored":
        target = torch.full_like(target, -100)
    else:
        terms["token_weight"] = torch.zeros(target.shape)
    for more in ({}, {"z_loss": 0.1}) if schedule != "grad_in_forward" else ({},):
        for function in (linear_cross_entropy, reference.linear_cross_entropy):
            call: Any = function
            leaves = [each.detach().requires_grad_() for each in (case.input, case.linear_weight)]
            how = {"schedule": schedule} if function is linear_cross_entropy else {}
            loss = call(*leaves, target, denominator=ZEROS[zero], **terms, **more, **how)
            assert torch.equal(loss, torch.zeros_like(loss))
            assert not any(each.any() for each in torch.autograd.grad(loss, leaves))
            assert call(*leaves, case.target, denominator=ZEROS[zero], **more, **how).isposinf()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_gradient_of_the_weight_is_added_to_a_buffer(schedule):
    case, every = case_of(torch.float64), values(torch.float64)
    leaves, terms = leaves_of(case, every)
    loss = linear_cross_entropy(leaves[0], leaves[1], case.target, **terms, schedule=schedule)
    expected = torch.autograd.grad(loss, leaves)
    out = torch.ones_like(leaves[1])
    leaves, terms = leaves_of(case, every)
    loss = linear_cross_entropy(
        leaves[0],
        leaves[1],
        case.target,
        **terms,
        schedule=schedule,
        grad_weight_out=out,
        grad_weight_dummy=True,
    )
    loss.backward()
    assert leaves[1].grad is not None
    assert not leaves[1].grad.any()
    for found, want in zip((leaves[0].grad, out - 1, leaves[2].grad), expected, strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_compiles_in_one_graph(schedule):
    torch._dynamo.reset()
    case, every = case_of(torch.float32), values(torch.float32)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    check(case, every, "mean", compiled, schedule=schedule)
    check(case, every, "mean", CALL, schedule=schedule)


def test_autocast_casts_the_bias():
    case, every = case_of(torch.float32), values(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(case.input, case.linear_weight, case.target, **every)
    terms = {**every, "linear_bias": every["linear_bias"].bfloat16()}
    want = linear_cross_entropy(case.input.bfloat16(), case.linear_weight.bfloat16(), case.target, **terms)
    assert torch.equal(found, want)


@pytest.mark.parametrize("op", ["token_stats", "token_loss_gradients"])
def test_opcheck(op):
    case, every = case_of(torch.float32), values(torch.float32)
    leaves, terms = leaves_of(case, every)
    schedule = "recompute" if op == "token_stats" else "grad_in_forward"
    torch.library.opcheck(CALL.default, (leaves[0], leaves[1], case.target), {**terms, "schedule": schedule})


def test_a_second_derivative_is_refused():
    case = case_of(torch.float64)
    hidden = case.input.requires_grad_()
    loss = linear_cross_entropy(hidden, case.linear_weight, case.target, z_loss=0.1)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_small_workspace_gives_the_same(schedule):
    case, every = random_case(64, 8, 900, torch.float64), values(torch.float64)
    terms = {name: every[name] for name in ("softcap", "z_loss", "label_smoothing")}
    (hidden, weight), _ = leaves_of(case, terms)
    with pytest.raises(ValueError, match="workspace_mb: got") as refused:
        linear_cross_entropy(hidden, weight, case.target, schedule=schedule, workspace_mb=0.01, **terms)
    least = float(str(refused.value).split("at least ")[1].split()[0])
    check(case, terms, "sum", schedule=schedule, workspace_mb=least)


ONES = torch.ones(V, dtype=torch.float64)


@pytest.mark.parametrize(
    ("terms", "error", "message"),
    [
        ({"label_smoothing": -0.1}, ValueError, r"label_smoothing: got -0\.1, want a number in \[0, 1\]"),
        ({"label_smoothing": "a"}, TypeError, "label_smoothing: got str"),
        ({"logit_scale": float("inf")}, ValueError, "logit_scale: got inf"),
        ({"z_loss": float("nan")}, ValueError, "z_loss: got nan"),
        ({"label_smoothing": torch.ones(2)}, TypeError, "label_smoothing: got Tensor, want a number"),
        ({"z_loss": torch.ones(2)}, TypeError, "z_loss: got Tensor"),
        ({"softcap": torch.ones(2)}, TypeError, "softcap: got Tensor"),
        ({"logit_scale": torch.ones(2)}, TypeError, "logit_scale: got Tensor"),
        ({"logit_scale": torch.ones(())}, TypeError, "logit_scale: got Tensor.* multiply the hidden states"),
        ({"logit_scale": True}, TypeError, "logit_scale: got bool"),
        ({"logit_scale": 10**40}, ValueError, "logit_scale: got 1000"),
        ({"z_loss": 10**40}, ValueError, "z_loss: got 1000"),
        ({"denominator": 10**40}, ValueError, "denominator: got 1000"),
        ({"softcap": 0}, ValueError, "softcap: got 0"),
        ({"softcap": -3.0}, ValueError, r"softcap: got -3\.0"),
        ({"softcap": float("nan")}, ValueError, "softcap: got nan"),
        ({"softcap": float("inf")}, ValueError, "softcap: got inf"),
        ({"softcap": 1e39}, ValueError, r"softcap: got 1e\+39, want a number from 1e-30 to 1e30"),
        ({"denominator": -1}, ValueError, "denominator: got -1, want a positive, finite number or 0"),
        ({"denominator": False}, TypeError, "denominator: got bool"),
        ({"denominator": torch.ones(1)}, ValueError, r"denominator: got shape \(1,\), want \(\)"),
        (
            {"denominator": torch.tensor(1.0, requires_grad=True)},
            ValueError,
            "denominator: got a tensor that",
        ),
        ({"linear_bias": ONES[1:]}, ValueError, r"linear_bias: got shape \(69,\), want \(70,\)"),
        ({"linear_bias": negated(ONES)}, ValueError, "linear_bias: got a lazily negated"),
        ({"linear_bias": ONES.float()}, TypeError, r"linear_bias: got torch\.float32, want one of"),
        ({"linear_bias": 3}, TypeError, "linear_bias: got int, want a torch.Tensor"),
        ({"weight": ONES.long()}, TypeError, r"weight: got torch\.int64"),
        ({"weight": ONES[None]}, ValueError, r"weight: got shape \(1, 70\)"),
        (
            {"weight": ONES.clone().requires_grad_()},
            ValueError,
            "weight: got a tensor that requires a gradient",
        ),
        ({"weight": ONES.to_sparse()}, ValueError, "weight: got layout"),
        ({"token_weight": ONES}, ValueError, r"token_weight: got shape \(70,\), want \(11,\)"),
        ({"token_weight": ONES[:N].clone().requires_grad_()}, ValueError, "token_weight: got a tensor that"),
        ({"token_weight": ONES[:N].to("meta")}, ValueError, "token_weight: got device meta"),
    ],
)
def test_refused(terms, error, message):
    case = case_of(torch.float64)
    with pytest.raises(error, match=message):
        linear_cross_entropy(case.input, case.linear_weight, case.target, **terms)


def test_defaults_are_no_terms():
    """A call that gives them is the plain one."""
    assert TermOptions() == NO_TERMS == (0.0, None, 0.0)
    case = case_of(torch.float32)
    given = case.input, case.linear_weight, case.target
    assert torch.equal(
        linear_cross_entropy(*given, label_smoothing=0, logit_scale=1, z_loss=0.0, softcap=None),
        linear_cross_entropy(*given),
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_under_activation_checkpointing_and_retained(schedule):
    case, every = case_of(torch.float64), values(torch.float64)
    leaves, terms = leaves_of(case, every)

    def call(hidden):
        return linear_cross_entropy(hidden, leaves[1], case.target, **terms, schedule=schedule)

    expected = torch.autograd.grad(call(leaves[0]), leaves)
    loss = checkpoint(call, leaves[0], use_reentrant=False)
    for one, other in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        torch.testing.assert_close(one, other)
    loss = call(leaves[0])
    for _ in range(2):
        for one, other in zip(torch.autograd.grad(loss, leaves, retain_graph=True), expected, strict=True):
            torch.testing.assert_close(one, other)


class Dispatched(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("schedule", ["recompute", "keep"])
@pytest.mark.parametrize("needs", ["no gradient", "gradients", "a buffer"])
def test_a_plain_call_does_not_use_the_dispatcher(schedule, needs, monkeypatch):
    """Which would take longer than all else that the host does. A dispatched call gives the same bits."""
    case, given = case_of(torch.float64), {**wide(values(torch.float64), torch.float64), "schedule": schedule}
    leaves, terms = leaves_of(case, given)
    out = torch.zeros_like(leaves[1]) if needs == "a buffer" else None
    with Dispatched():
        dispatched = linear_cross_entropy(leaves[0], leaves[1], case.target, **terms)
        expected = torch.autograd.grad(dispatched, leaves)

    def refuse(*arguments):
        raise AssertionError("dispatched")

    monkeypatch.setattr(terms_module, "token_stats", refuse)
    monkeypatch.setattr(token_stats, "token_stats_backward", refuse)
    with torch.set_grad_enabled(needs != "no gradient"):
        loss = linear_cross_entropy(leaves[0], leaves[1], case.target, grad_weight_out=out, **terms)
    assert torch.equal(loss, dispatched)
    if needs != "no gradient":
        found = torch.autograd.grad(loss, leaves, allow_unused=out is not None)
        for got, want in zip(found, expected, strict=True):
            assert torch.equal(out if got is None and out is not None else got, want)


@pytest.mark.parametrize("schedule", ["recompute", "keep"])
@pytest.mark.parametrize("where", ["of each token", "linear_bias"])
@pytest.mark.parametrize("with_terms", [False, True])
def test_saved_tensors_may_come_back_as_subclasses(schedule, where, with_terms):
    """Of which only some: a plain call's backward then uses the dispatcher."""
    case = case_of(torch.float64)
    leaves, terms = leaves_of(case, {"linear_bias": values(torch.float64)["linear_bias"], "z_loss": 0.1})
    if not with_terms:
        leaves, terms = leaves[:2], {}
    shape, found = {"of each token": (N,), "linear_bias": (V,)}[where], 0

    def unpack(tensor):
        nonlocal found
        wraps = tensor.shape == shape and tensor.is_floating_point()
        found += wraps
        return TwoTensor(tensor, tensor.clone()) if wraps else tensor

    def call():
        return linear_cross_entropy(leaves[0] * 1, leaves[1] * 1, case.target, schedule=schedule, **terms)

    expected = torch.autograd.grad(call(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), unpack):
        loss = call()
    gradients = torch.autograd.grad(loss, leaves)
    assert found or (where, with_terms) == ("linear_bias", False)
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got.a if isinstance(got, TwoTensor) else got, want)


def test_transforms_and_export():
    case, every = case_of(torch.float64), values(torch.float64)
    leaves, terms = leaves_of(case, every)
    terms["linear_bias"] = terms["linear_bias"].detach()

    def call(hidden):
        return linear_cross_entropy(hidden, case.linear_weight, case.target, **terms)

    (expected,) = torch.autograd.grad(call(leaves[0]), leaves[0])
    torch.testing.assert_close(torch.func.grad(call)(case.input), expected)
    both = torch.func.vmap(call)(torch.stack([case.input, case.input * 2]))
    torch.testing.assert_close(both, torch.stack([call(case.input), call(case.input * 2)]))
    head = LinearCrossEntropy(D, V, bias=True, softcap=4.0, z_loss=0.1, dtype=torch.float64)
    program = torch.export.export(head, (case.input, case.target))
    torch.testing.assert_close(program.module()(case.input, case.target), head(case.input, case.target))


def test_inductor(fresh_inductor):
    torch._dynamo.reset()
    case, every = case_of(torch.float32), values(torch.float32)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    check(case, every, "mean", compiled)


def test_an_ignore_index_beyond_int32_ignores_no_int32_target():
    """2^32 would wrap to class 0."""
    hidden, weight = torch.randn(5, 8).requires_grad_(), torch.randn(7, 8).requires_grad_()
    target = torch.zeros(5, dtype=torch.int32)
    for schedule in ("recompute", "grad_in_forward"):
        options = {"ignore_index": 2**32, "softcap": 2.0, "schedule": schedule}
        loss = linear_cross_entropy(hidden, weight, target, **options)
        wanted = linear_cross_entropy(hidden, weight, target, softcap=2.0)
        assert torch.allclose(loss, wanted)
        for found, want in zip(
            *(torch.autograd.grad(each, (hidden, weight)) for each in (loss, wanted)), strict=True
        ):
            assert want.any()
            assert relative_error(found, want) < 1e-6
