"""Which calls with terms the kernels serve, and which of them: what `compile` is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_lce import linear_cross_entropy, linear_logprob, maths
from cute_lce.arch import Gpu
from cute_lce.implementation import StatsOperands, StatsOptions
from cute_lce.launch import KERNELS, token_stats, token_terms
from cute_lce.logit_term import kernel_term
from cute_lce.ops import select
from cute_lce.plan.kernels import BackwardKey, ForwardKey, Key, MultiplyKey
from cute_lce.plan.problem import Limits, Problem
from tests.device import planned_for
from tests.logit_terms import LogCap
from tests.numerics import random_case

BF16 = torch.bfloat16
GIVEN = "coefficients"


class Asked:
    """What stands for the compiled functions, which compute nothing."""

    def __init__(self):
        self.keys: list[Key] = []

    def get(self, key: Key) -> Callable[..., None]:
        self.keys.append(key)
        return lambda *_: None


@pytest.fixture
def asked(monkeypatch):
    for dtype in (BF16, torch.float16):
        monkeypatch.setitem(select._picked, (torch.device("cpu"), dtype), KERNELS)
    functions = Asked()
    with planned_for(Gpu("sm_90a", 132), functions):
        yield functions


def train(call, dtype: Any = BF16, **options) -> None:
    case = random_case(40, 64, 300, dtype)
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    found = call(hidden, weight, case.target, **options)
    numbers = [found] if isinstance(found, torch.Tensor) else [each for each in found if each is not None]
    torch.stack([each.sum() for each in numbers if each.requires_grad]).sum().backward()
    for leaf in (hidden, weight):
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape


OWN = kernel_term(LogCap(3.0))
LOSSES = [
    ({"softcap": 30.0}, ("softcap",), ("softcap", GIVEN)),
    ({"softcap": 30.0, "logit_scale": 0.5, "z_loss": 1e-4}, ("softcap",), ("softcap", GIVEN)),
    ({"z_loss": 1e-4}, (), (GIVEN,)),
    (
        {"z_loss": 1e-4, "logit_scale": 0.5, "weight": torch.ones(300)},
        ("logit_scale",),
        ("logit_scale", GIVEN),
    ),
    ({"label_smoothing": 0.1}, ("total",), (GIVEN, "uniform")),
    (
        {"linear_bias": torch.ones(300, dtype=BF16), "logit_scale": 0.5},
        ("linear_bias", "logit_scale"),
        ("linear_bias", "logit_scale", GIVEN),
    ),
    (
        {"label_smoothing": 0.1, "weight": torch.ones(300), "softcap": 30.0, "z_loss": 1e-4},
        ("softcap", "class_weight", "total"),
        ("softcap", GIVEN, "uniform", "class_weight"),
    ),
    ({"softcap": 30.0, "token_weight": torch.ones(40), "denominator": 7.0}, ("softcap",), ("softcap", GIVEN)),
    ({"softcap": LogCap(3.0), "z_loss": 1e-4}, (OWN,), (OWN, GIVEN)),
    ({"softcap": LogCap(5.0), "label_smoothing": 0.1}, (OWN, "total"), (OWN, GIVEN, "uniform")),
]


@pytest.mark.parametrize("schedule", ["auto", "recompute"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("terms", "forward", "backward"), LOSSES, ids=lambda each: "-".join(each))
def test_losses_of_the_kernels(asked, terms, forward, backward, reduction, schedule):
    train(linear_cross_entropy, reduction=reduction, schedule=schedule, **terms)
    assert [type(key) for key in asked.keys] == [ForwardKey, BackwardKey]
    assert [key.terms for key in asked.keys] == [forward, backward]
    assert not asked.keys[0].keeps
    # Another value is another argument.
    changed = {name: value * 1.5 if isinstance(value, float) else value for name, value in terms.items()}
    train(linear_cross_entropy, reduction=reduction, schedule=schedule, **changed)
    assert len(asked.keys) == 2


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        ({"outputs": ("lse", "logprob")}, (), (GIVEN,)),
        ({"outputs": ("lse",), "temperature": 0.5}, ("logit_scale",), ("logit_scale", GIVEN)),
        ({"softcap": 30.0, "temperature": 0.5}, ("softcap",), ("softcap", GIVEN)),
        ({"outputs": ("logprob", "entropy")}, ("entropy",), (GIVEN, "gap")),
        (
            {"outputs": ("entropy", "logprob"), "entropy_grad": False, "temperature": 0.5},
            ("logit_scale", "entropy"),
            ("logit_scale", GIVEN),
        ),
        ({"temperature": torch.ones(40)}, ("row_scale",), ("row_scale", GIVEN)),
        (
            {"outputs": ("is_top1", "logprob", "mean_logit", "log_sum_sq_probs", "argmax")},
            ("squares", "logits", "argmax"),
            (GIVEN,),
        ),
        (
            {"outputs": ("topk_logprob", "lse"), "topk_ids": torch.zeros(40, 2, dtype=torch.int64)},
            ("topk",),
            (GIVEN, "topk"),
        ),
        ({"outputs": ("topk_logprob", "logprob"), "topk_ids": torch.zeros(40, 0).long()}, (), (GIVEN,)),
    ],
    ids=lambda each: "-".join(each),
)
def test_numbers_of_the_kernels(asked, options, forward, backward):
    train(linear_logprob, **options)
    assert [key.terms for key in asked.keys] == [forward, backward]


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (linear_cross_entropy, {"softcap": LogCap(3.0), "schedule": "keep", "dtype": torch.float16}),
        (linear_cross_entropy, {"z_loss": 1e-4, "schedule": "grad_in_forward"}),
        (linear_cross_entropy, {"softcap": 30.0, "schedule": "grad_in_forward"}),
        (linear_cross_entropy, {"softcap": 1e8}),
        (linear_cross_entropy, {"softcap": 1e-8, "schedule": "keep"}),
        (linear_cross_entropy, {"softcap": 30.0, "logit_scale": 0.0}),
    ],
    ids=[
        "fp16 term of one's own kept",
        "z_loss at once",
        "softcap at once",
        "high softcap",
        "low softcap kept",
        "softcap of zeros",
    ],
)
def test_others_are_the_streaming_paths(asked, call, options):
    train(call, **options)
    assert not [key for key in asked.keys if not isinstance(key, MultiplyKey)]


@pytest.mark.parametrize(
    ("schedule", "terms", "backward"),
    [
        ("auto", {"softcap": 30.0}, ("linear_bias", "softcap", GIVEN, "bias_gradient")),
        ("keep", {}, (GIVEN, "bias_gradient")),
        ("keep", {"softcap": 30.0}, (GIVEN, "bias_gradient")),
    ],
)
def test_the_gradient_of_a_bias(asked, schedule, terms, backward):
    bias = torch.ones(300, dtype=BF16, requires_grad=True)
    train(linear_cross_entropy, linear_bias=bias, schedule=schedule, **terms)
    assert [key.terms for key in asked.keys] == [("linear_bias", *terms), backward]
    assert bias.grad is not None
    assert bias.grad.dtype is BF16


KEPT = [
    (linear_cross_entropy, {"z_loss": 1e-4}, ("proportion",)),
    (
        linear_cross_entropy,
        {"z_loss": 1e-4, "logit_scale": 0.5, "weight": torch.ones(300)},
        ("logit_scale", "proportion"),
    ),
    (linear_cross_entropy, {"linear_bias": torch.ones(300, dtype=BF16)}, ("linear_bias",)),
    (linear_cross_entropy, {"softcap": 30.0}, ("softcap",)),
    (linear_cross_entropy, {"softcap": 30.0, "z_loss": 1e-4}, ("softcap", "proportion")),
    (linear_logprob, {"softcap": 30.0, "temperature": torch.ones(40)}, ("softcap", "row_scale")),
    (linear_cross_entropy, {"softcap": LogCap(3.0), "z_loss": 1e-4}, (OWN, "proportion")),
    (linear_logprob, {"temperature": torch.ones(40)}, ("row_scale",)),
    (linear_logprob, {"outputs": ("logprob", "entropy"), "entropy_grad": False}, ("entropy",)),
]


@pytest.mark.parametrize(
    ("call", "terms", "forward"),
    KEPT,
    ids=[
        "z_loss",
        "weighted",
        "bias",
        "cap",
        "cap z_loss",
        "cap temperatures",
        "own z_loss",
        "temperatures",
        "entropy",
    ],
)
def test_what_the_kernels_keep(asked, call, terms, forward):
    """Of all columns the backward is that of a call without terms."""
    train(call, schedule="keep", **terms)
    assert [key.terms for key in asked.keys] == [forward, ()]
    assert asked.keys[0].keeps


LOGITS = -1
KEPT_LOGITS = [
    (
        linear_cross_entropy,
        {"label_smoothing": 0.1, "weight": torch.ones(300)},
        ("class_weight", "total"),
        (GIVEN, "uniform", "class_weight"),
    ),
    (linear_cross_entropy, {"label_smoothing": 0.1, "z_loss": 1e-4}, ("total",), (GIVEN, "uniform")),
    (linear_logprob, {"outputs": ("entropy", "logprob")}, ("entropy",), (GIVEN, "gap")),
    (linear_logprob, {"outputs": ("lse", "logprob"), "softcap": 30.0}, ("softcap",), ("softcap", GIVEN)),
    (linear_logprob, {"outputs": ("logprob", "log_sum_sq_probs")}, ("squares",), (GIVEN,)),
    (
        linear_logprob,
        {"outputs": ("topk_logprob", "entropy"), "topk_ids": torch.zeros(40, 2, dtype=torch.int64)},
        ("entropy", "topk"),
        (GIVEN, "gap", "topk"),
    ),
    (
        linear_logprob,
        {"outputs": ("topk_logprob", "argmax"), "topk_ids": torch.zeros(40, 256, dtype=torch.int32)},
        ("argmax", "topk"),
        (GIVEN, "topk"),
    ),
    (
        linear_logprob,
        {"outputs": ("lse", "entropy", "logprob"), "entropy_grad": False},
        ("entropy",),
        (GIVEN,),
    ),
    (
        linear_logprob,
        {"outputs": ("logprob", "entropy"), "linear_bias": torch.ones(300, dtype=BF16)},
        ("linear_bias", "entropy"),
        ("linear_bias", GIVEN, "gap"),
    ),
]


@pytest.mark.parametrize(
    ("call", "terms", "forward", "backward"),
    KEPT_LOGITS,
    ids=["weighted smoothing", "smoothing", "entropy", "lse", "squares", "topk", "ids", "beside", "bias"],
)
@pytest.mark.parametrize("schedule", ["auto", "keep"])
def test_logits_that_the_kernels_keep(asked, schedule, call, terms, forward, backward):
    train(call, schedule=schedule, **terms)
    logits = ("kept_logits",) * (schedule == "keep")
    wanted = [(*forward, *logits), (*backward, *logits)]
    if "topk" in forward:
        wanted[0] = (*forward[:-1], *logits, "topk")
    assert [key.terms for key in asked.keys] == wanted
    assert asked.keys[0].keeps is (schedule == "keep")


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"z_loss": 1e-4, "outputs": ("logprob", "lse")}, 131072),
        ({"label_smoothing": 0.1, "outputs": ("logprob", "total_nll")}, LOGITS),
        ({"softcap": 30.0}, 131072),
        ({"softcap": 30.0, "label_smoothing": 0.1, "outputs": ("logprob", "total_nll")}, 0),
        ({"softcap": 30.0, "outputs": ("lse",)}, LOGITS),
        ({"outputs": ("lse", "topk_logprob")}, LOGITS),
        ({"outputs": ("lse", "log_sum_sq_probs")}, LOGITS),
        ({"outputs": ("logprob", "entropy")}, LOGITS),
    ],
)
@pytest.mark.parametrize("workspace", [0, 2**32])
def test_auto_keeps_what_it_can(asked, options, kept, workspace):
    """Of exponentials as without terms; beside logits there are dlogits."""
    if kept == LOGITS:
        kept = 131072 if workspace else 114688
    operands = StatsOperands(
        torch.empty(8, 8, dtype=BF16), torch.empty(8, 8, dtype=BF16), torch.zeros(8, dtype=torch.int64)
    )
    given = StatsOptions(-100, 1.0, None, 1.0, ("logprob",))._replace(**options)
    limits = Limits(workspace=workspace)
    problem = Problem(8192, 4096, 131072, need_dbias=True)
    found = token_stats.choose(problem, operands, given, "auto", "mean", limits)
    assert found == ("keep" if kept else "recompute", kept)


@pytest.mark.parametrize("mib", [2240, 2304])
def test_a_bias_is_kept_for_as_others(asked, mib):
    """Its sums over slabs of 256 tokens take 16 MiB, and its gradient in float32 half of one."""
    problem = Problem(8192, 4096, 131072, need_dbias=True)
    operands = StatsOperands(
        torch.empty(8, 8, dtype=BF16), torch.empty(8, 8, dtype=BF16), torch.zeros(8, dtype=torch.int64)
    )
    options = StatsOptions(-100, 1.0, None, 1.0, ("logprob",))
    found = token_stats.choose(problem, operands, options, "auto", "mean", Limits(workspace=mib << 20))
    assert found == ("keep", 131072 if mib == 2304 else 122880)


def test_a_softcap_is_not_kept_with_smoothing(asked):
    with pytest.raises(
        ValueError, match="schedule: got 'keep' with a softcap and label_smoothing, want 'recompute'"
    ):
        train(linear_cross_entropy, softcap=30.0, label_smoothing=0.1, schedule="keep")


def test_given_ids_have_numbers_of_32_bits():
    from cute_lce.launch.topk import fits

    assert fits((32768, 1024), 262144)
    assert not fits((2**24 + 1, 1), 1000)
    assert not fits((2**20, 2**11), 1000)
    assert not fits((2**24, 1), 2**18)


@pytest.mark.parametrize("cap", [30.0, 2.0**-12, 2.0**-13, 1e-5])
def test_logits_of_a_small_cap_are_not_kept(cap):
    """Steps of fp16, in which distances between logits are kept, are too large for them."""
    operands = StatsOperands(
        torch.empty(8, 8, dtype=BF16), torch.empty(8, 8, dtype=BF16), torch.zeros(8, dtype=torch.int64)
    )
    options = StatsOptions(-100, 1.0, cap, 1.0, ("logprob", "entropy"))
    assert token_stats.keeps_logits(operands, options) is (cap >= 2.0**-12)
    assert token_stats.keeps(operands, options) is (cap >= 2.0**-12)
    warmer = options._replace(softcap=2 * cap, temperature=2.0)
    assert token_stats.keeps(operands, warmer) is (cap >= 2.0**-12)
    assert token_stats.keeps(operands, options._replace(outputs=("logprob",)))
    assert token_stats.keeps(operands, options._replace(softcap=LogCap(cap).key))


@pytest.mark.parametrize("temperature", [0.7, torch.linspace(0.1, 3, 50)], ids=["one", "each"])
def test_slopes_of_logits_at_the_cap(temperature):
    """0, and never less: of kernels, whose FMA does not round the product, and of a backward's targets."""
    number = temperature if isinstance(temperature, float) else 1.0
    each = None if isinstance(temperature, float) else temperature
    for power in range(-500, 600, 13):
        cap = 10.0 ** (power / 100)
        if not maths.softcap_fits(cap, -0.9, number):
            continue
        numbers = maths.softcap_numbers(cap, -0.9, number)
        highest, inverse_square = (torch.tensor(numbers[name]) for name in ("cap", "inverse_square"))
        slope = maths.slope_of_capped(highest, inverse_square, lambda a, b, c: a.double() * b.double() + c)
        assert 0 <= slope < 2.0**-22, cap
        tensors = token_terms.Tensors(None, None, None if each is None else each.reciprocal())
        z = highest.expand(50) if tensors.row_scale is None else highest * tensors.row_scale
        options = StatsOptions(-100, -0.9, cap, number, ("logprob",))
        for own in (z, -z, torch.stack([z, -z], dim=1)):
            found = token_terms.slopes(own, options, tensors)
            assert found is not None
            assert found.shape == own.shape
            assert not found.any(), cap
            half = token_terms.slopes(own / 2, options, tensors)
            torch.testing.assert_close(half, torch.full_like(own, 0.75))
