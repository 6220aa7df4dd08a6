"""On a GPU: terms of the loss and linear_logprob, by the kernels where they serve them and else by the
streaming path, against float64."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_lce
import cute_lce.reference
from cute_lce import TokenStats, linear_cross_entropy
from tests.device import accepted
from tests.gpu.test_forward import device_case
from tests.logit_terms import Knee, LogCap, SoftPlus, Tanh
from tests.numerics import CAPS, FLOORS, assert_close, check_near_a_cap, near_a_cap, relative_error

# A test reads what it asked for: no field is None.
linear_logprob: Any = cute_lce.linear_logprob
reference: Any = cute_lce.reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
N, D, V = 300, 96, 1003
SCHEDULES = ("recompute", "keep", "grad_in_forward")
dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


def terms_of(dtype, n=N, V=V):
    generator = torch.Generator().manual_seed(3)

    def numbers(*shape):
        return torch.rand(shape, generator=generator).cuda()

    return {
        "linear_bias": (numbers(V) * 2 - 1).to(dtype),
        "weight": numbers(V),
        "label_smoothing": 0.1,
        "logit_scale": 0.6,
        "softcap": 5.0,
        "z_loss": 0.01,
        "token_weight": numbers(n) + 0.5,
        "denominator": torch.tensor(177, device="cuda"),
    }


NAMES = (
    "linear_bias",
    "weight",
    "label_smoothing",
    "logit_scale",
    "softcap",
    "z_loss",
    "token_weight",
    "denominator",
)


def case_of(dtype):
    case = device_case(N, D, V, dtype)
    case.target[::3] = case.ignore_index
    return case


def check(case, terms, reduction, **options):
    """Beside the error of torch with fp32 logits whose gradients are rounded last, that of dlogits, which are
    rounded to the dtype before the products."""
    dtype = case.input.dtype
    upstream = case.upstream(reduction)
    leaves = [case.input.detach().requires_grad_(), case.linear_weight.detach().requires_grad_()]
    given = dict(terms)
    if "linear_bias" in given:
        leaves.append(given["linear_bias"].detach().requires_grad_())
        given["linear_bias"] = leaves[2]
    loss = linear_cross_entropy(leaves[0], leaves[1], case.target, reduction=reduction, **given, **options)
    found = loss.detach(), *torch.autograd.grad(loss, leaves, upstream.float())

    def by_reference(wide):
        cast = {
            name: value.to(wide) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in terms.items()
        }
        operands = case.input.to(wide), case.linear_weight.to(wide), case.target
        return reference.gradients(*operands, upstream.to(wide), reduction=reduction, **cast)

    expected, baseline = by_reference(torch.float64), by_reference(FP32)
    for i, name in enumerate(("loss", "dinput", "dweight", "dbias")[: len(found)]):
        rounding = 2 * 2.0**-8 if i in (1, 2) else 0.0
        if name == "dbias" and options.get("schedule") == "keep":
            # The sum of entries that were rounded once; of a single token it is one of them.
            rounding = 2.0 * FLOORS[dtype]
        assert_close(name, found[i], expected[i], baseline[i].to(found[i].dtype), rounding=rounding)
    assert found[1].dtype is dtype


@dtypes
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_pairs(dtype, schedule, reduction):
    if schedule == "grad_in_forward" and reduction == "none":
        schedule = "auto"
    case, every = case_of(dtype), terms_of(dtype)
    for names in (*((name,) for name in NAMES), *itertools.combinations(NAMES, 2), NAMES):
        terms = {name: every[name] for name in names}
        if schedule == "keep" and {"softcap", "label_smoothing"} <= {*names}:
            with pytest.raises(ValueError, match="schedule: got 'keep' with a softcap and label_smoothing"):
                check(case, terms, reduction, schedule=schedule)
        else:
            check(case, terms, reduction, schedule=schedule)


@dtypes
@pytest.mark.parametrize("schedule", [*SCHEDULES, "auto"])
def test_the_kernels_scale_logits(dtype, schedule):
    """By values that are no powers of two, and with factors of rows."""
    case, every = case_of(dtype), terms_of(dtype)
    for scale in (0.37, 3.1, -1.3):
        check(case, {"logit_scale": scale}, "mean", schedule=schedule)
        check(case, {"logit_scale": scale, "denominator": every["denominator"]}, "mean", schedule=schedule)
        if schedule != "grad_in_forward":
            check(
                case, {"logit_scale": scale, "token_weight": every["token_weight"]}, "sum", schedule=schedule
            )


SHAPES = [(300, 96, 1003), (1, 64, 130), (190, 72, 513), (700, 100, 4099), (2100, 256, 20000)]


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize(
    "terms",
    [
        {"softcap": 30.0},
        {"softcap": 2.0, "logit_scale": 0.6},
        {"z_loss": 0.01},
        {"z_loss": 0.01, "softcap": 5.0, "logit_scale": -1.3},
        {"label_smoothing": 0.1},
        {"label_smoothing": 0.2, "softcap": 5.0, "z_loss": 0.01},
    ],
    ids=lambda terms: " ".join(terms),
)
def test_the_kernels_terms(dtype, shape, terms):
    """Ragged n, d and V, few tokens and many, with ignored rows; and in several stripes."""
    n, d, V = shape
    case = device_case(n, d, V, dtype)
    if n > 1:
        case.target[::3] = case.ignore_index
    for reduction, options in (("mean", {}), ("none", {"schedule": "recompute"}), ("sum", {"window": 700})):
        check(case, terms, reduction, **options)


KEPT = [
    ("linear_bias",),
    ("z_loss",),
    ("linear_bias", "z_loss", "weight", "logit_scale", "token_weight"),
    ("label_smoothing",),
    ("label_smoothing", "linear_bias", "z_loss", "logit_scale", "token_weight"),
    ("softcap",),
    ("softcap", "linear_bias", "z_loss", "weight", "logit_scale", "token_weight"),
]


def workspace(call, mib):
    """So many MiB, or the least that is accepted. call: `check` of all but a reduction and the workspace."""
    return accepted(lambda least: call("sum", workspace_mb=least), mib)


SOME = 90, 93
"""MiB that hold, by the terms, some of the columns of 1536 features."""


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        pytest.param(dtype, names, id=f"{'bf16' if dtype is BF16 else 'fp16'}-{' '.join(names)}")
        for dtype in (BF16, FP16)
        for names in KEPT
        if dtype is BF16 or "label_smoothing" not in names
    ],
)
@pytest.mark.parametrize("shape", [*SHAPES, (2100, 1536, 20000)], ids=lambda shape: "-".join(map(str, shape)))
def test_the_kernels_keep(dtype, shape, names):
    """All columns, and some of them where the workspace holds no more. A second backward gives the same, but
    for rounding where kept logits are computed again."""
    n, d, V = shape
    case = device_case(n, d, V, dtype)
    if n > 1:
        case.target[::3] = case.ignore_index
    every = terms_of(dtype, n, V)
    terms = {name: every[name] for name in names}
    keep = functools.partial(check, case, terms, schedule="keep")
    some = [("sum", {"workspace_mb": workspace(keep, mib)}) for mib in SOME]
    for reduction, options in (("mean", {}), ("none", {}), *some):
        keep(reduction, **options)
    hidden = case.input.detach().requires_grad_()
    loss = linear_cross_entropy(hidden, case.linear_weight, case.target, schedule="keep", **terms)
    one, other = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in "ab")
    assert one.any()
    if "label_smoothing" in names:
        assert relative_error(other, one) < 0.01
    else:
        assert torch.equal(one, other)


@dtypes
def test_kept_without_a_coefficient_of_the_softmax(dtype):
    """1 + 2 z_loss lse is 0, or next to it, with either sign."""
    case = case_of(dtype)
    for scale in (0.0, 0.01):
        near = replace(case, input=case.input * scale)
        check(near, {"z_loss": -1 / (2 * math.log(V))}, "mean", schedule="keep")


@pytest.mark.parametrize(
    "terms",
    [
        ("z_loss",),
        ("linear_bias", "label_smoothing"),
        ("linear_bias", "softcap"),
        ("weight", "label_smoothing"),
    ],
    ids=" ".join,
)
def test_what_keeps_terms_compiles(terms):
    case, every = case_of(BF16), terms_of(BF16)
    given = {name: every[name] for name in terms}
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")

    def run(function):
        leaves = [case.input.detach().requires_grad_(), case.linear_weight.detach().requires_grad_()]
        loss = function(*leaves, case.target, schedule="keep", **given)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    torch._dynamo.reset()
    for one, other in zip(run(compiled), run(linear_cross_entropy), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("schedule", ["keep", "auto"])
def test_what_keeps_terms_keeps_to_its_workspace(schedule):
    n, d, V = 4096, 1024, 65536
    case, every = device_case(n, d, V, BF16), terms_of(BF16, 4096, 65536)
    bias = every["linear_bias"].requires_grad_()
    hidden, weight = case.input.detach().requires_grad_(), case.linear_weight.detach().requires_grad_()
    leaves = hidden, weight, bias
    for mib in (150, 700):

        def step(mib=mib):
            terms = {"z_loss": 0.01, "label_smoothing": 0.1, "linear_bias": bias}
            loss = linear_cross_entropy(
                hidden, weight, case.target, schedule=schedule, workspace_mb=mib, **terms
            )
            torch.autograd.grad(loss, leaves)

        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - sum(each.nbytes for each in leaves)
        assert extra <= mib << 20, extra / (1 << 20)


KEPT_LOGITS = {
    "entropy": {"outputs": ("logprob", "entropy"), "temperature": 0.7},
    "lse": {"outputs": ("logprob", "lse", "entropy", "argmax"), "softcap": 5.0},
    "temperatures": {"outputs": ("logprob", "entropy", "log_sum_sq_probs")},
    "given ids": {"outputs": ("entropy", "topk_logprob")},
    "own": {"outputs": ("logprob", "entropy"), "softcap": LogCap(5.0), "temperature": 0.7},
    "lse of a target": {"outputs": ("logprob", "lse")},
    "ids": {"outputs": ("lse", "topk_logprob", "argmax")},
    "ids of a target": {"outputs": ("logprob", "topk_logprob"), "softcap": 20.0, "temperature": 0.7},
}


@pytest.mark.parametrize("which", KEPT_LOGITS)
@pytest.mark.parametrize(
    ("shape", "mib"),
    [((300, 96, 1003), None), *(((2100, 1024, 20000), mib) for mib in (None, 100, 140))],
    ids=["few", "all", "some", "stripes"],
)
def test_what_is_kept_for_numbers(which, shape, mib):
    """Their gradients, of compacted tokens too; the bits repeat."""
    n, d, V = shape
    case, given = device_case(n, d, V, BF16), dict(KEPT_LOGITS[which])
    case.target[::3] = case.ignore_index
    if which == "temperatures":
        given["temperature"] = torch.linspace(0.3, 3, n, device="cuda")
    shapes = {"topk_logprob": (n, 40)}
    if "topk_logprob" in given["outputs"]:
        given["topk_ids"] = torch.randint(-3, V + 3, shapes["topk_logprob"], device="cuda")
        given["topk_ids"][:, 7] = given["topk_ids"][:, 30]
        given["topk_ids"][::2, 1] = case.target[::2]
    names = [name for name in given["outputs"] if name not in ("argmax", "log_sum_sq_probs")]
    generator = torch.Generator(device="cuda").manual_seed(5)
    upstream = [torch.randn(shapes.get(name, (n,)), generator=generator, device="cuda") for name in names]
    leaves = [case.input.detach().requires_grad_(), case.linear_weight.detach().requires_grad_()]

    def call(schedule, mib):
        options = {"schedule": schedule, "ignore_index": case.ignore_index, "workspace_mb": mib}
        return linear_logprob(*leaves, case.target, **given, **options)

    def gradients(schedule, mib=mib):
        if mib is not None:
            mib = accepted(functools.partial(call, schedule), mib)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = call(schedule, mib)
        every = torch.autograd.grad([getattr(found, name) for name in names], leaves, upstream)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - sum(each.nbytes for each in leaves)
        # The numbers are results too, and sorted ids lie beside the workspace.
        beside = (1 << 20) + 40 * n * ("topk_ids" in given) * 50
        assert mib is None or extra <= mib * 2**20 + beside
        return every

    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    options = {name: each for name, each in given.items() if name != "outputs"}
    expected = reference.linear_logprob(*wide, case.target, ignore_index=case.ignore_index, **options)
    exact = torch.autograd.grad(
        [getattr(expected, name) for name in names], wide, [each.double() for each in upstream]
    )
    kept, again, recomputed = gradients("keep"), gradients("keep"), gradients("recompute")
    for name, mine, same, plain, wanted in zip(
        ("dinput", "dweight"), kept, again, recomputed, exact, strict=True
    ):
        assert torch.equal(mine, same)
        errors = [(each.double() - wanted).norm() / wanted.norm() for each in (mine, plain)]
        assert errors[0] <= 1.25 * errors[1] + 1e-6, (name, errors)
        assert errors[0] < 0.02


@pytest.mark.parametrize("which", ["entropy", "entropy and ids", "ids of a target"])
def test_a_graph_is_retained_although_what_it_kept_is_overwritten(which):
    """The next backward computes kept logits again, for another upstream gradient and other leaves; they are
    freed by then. What hooks packed is not overwritten."""
    n, d, V = 700, 256, 20000
    case = device_case(n, d, V, BF16)
    leaves = [case.input.detach().requires_grad_(), case.linear_weight.detach().requires_grad_()]
    names = {"entropy": ("logprob", "entropy"), "entropy and ids": ("entropy", "topk_logprob")}
    names = names.get(which, ("logprob", "topk_logprob"))
    ids = torch.randint(0, V, (n, 8), device="cuda") if "topk_logprob" in names else None
    shapes = [(n, 8) if name == "topk_logprob" else (n,) for name in names]
    ones = [torch.ones(shape, device="cuda") for shape in shapes]
    factor = torch.linspace(-2, 3, n, device="cuda")
    scaled = [each * (factor.unsqueeze(1) if each.dim() > 1 else factor) for each in ones]
    if which == "ids of a target" and ids is not None:
        ids[:, 0] = case.target
        # Other shares of the softmax than those of the backward before.
        scaled[0] = scaled[0] * 3

    def errors(found, upstream, number):
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        exact = reference.linear_logprob(*wide, case.target, topk_ids=ids)
        outputs = [getattr(exact, name) for name in names]
        exact = torch.autograd.grad(outputs, wide, [each.double() for each in upstream])
        return [
            float((mine.double() - wanted).norm() / wanted.norm())
            for mine, wanted in zip(found, [exact[i] for i in number], strict=True)
        ]

    def forward():
        options = {"outputs": names, "topk_ids": ids, "schedule": "keep"}
        found = linear_logprob(*leaves, case.target, **options)
        return [getattr(found, name) for name in names]

    numbers = forward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    first = torch.autograd.grad(numbers, leaves, ones, retain_graph=True)
    torch.cuda.synchronize()
    # The kept logits. The allocator may hold up to 1 MiB more for each large block.
    gone = before + sum(each.nbytes for each in first) - torch.cuda.memory_allocated()
    assert gone > 2 * n * V - 3 * 2**20
    second = torch.autograd.grad(numbers, leaves, scaled, retain_graph=True)
    (third,) = torch.autograd.grad(numbers, leaves[1], scaled)
    for found, upstream, number in (
        (first, ones, (0, 1)),
        (second, scaled, (0, 1)),
        ((third,), scaled, (1,)),
    ):
        assert max(errors(found, upstream, number)) < 0.01
    assert min(errors(first, scaled, (0, 1))) > 0.1
    moved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: moved.append(t) or t.cpu(), lambda t: t.cuda()):
        numbers = forward()
    for upstream in (ones, scaled):
        found = torch.autograd.grad(numbers, leaves, upstream, retain_graph=True)
        assert max(errors(found, upstream, (0, 1))) < 0.01
    assert moved


@dtypes
@pytest.mark.parametrize(("height", "softcap"), [(60.0, 30.0), (1e4, 50.0), (400.0, 200.0), (1.0, 1e4)])
def test_a_kept_softcap_of_any_logits(dtype, height, softcap):
    """Confident rows, logits far above their cap and below it; some rise above their reference."""
    for n, d, V in SHAPES:
        case = device_case(n, d, V, dtype)
        if n > 1:
            case.target[::3] = case.ignore_index
        # Above its caps by more, most of what float16 keeps is subnormal.
        height = min(height, 400.0) if dtype is FP16 else height
        largest = (case.input.float() @ case.linear_weight.float().mT).abs().max()
        case = replace(case, linear_weight=case.linear_weight * (height / largest))
        keep = functools.partial(check, case, {"softcap": softcap}, schedule="keep")
        # Some of the columns of 2100 tokens: all take 80 MiB besides all else.
        for options in ({}, {"workspace_mb": workspace(keep, 96)}):
            keep("mean", **options)


@dtypes
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("schedule", ["keep", "auto"])
def test_kept_temperatures(dtype, schedule, softcap):
    """Of each row: the gradient of its log-probability, beside an entropy that is only read."""
    for n, d, V in SHAPES:
        case = device_case(n, d, V, dtype)
        if n > 1:
            case.target[::3] = case.ignore_index
        temperature = torch.linspace(0.3, 3, n, device="cuda")

        def gradients(function, wide, case=case, temperature=temperature, **options):
            hidden, weight = (each.detach().to(wide) for each in (case.input, case.linear_weight))
            leaves = hidden.requires_grad_(), weight.requires_grad_()
            stats = function(*leaves, case.target, temperature=temperature, softcap=softcap, **options)
            found = stats.logprob
            upstream = torch.linspace(-1, 2, case.target.numel(), device="cuda").to(found.dtype)
            numbers = found.detach(), stats.entropy.detach()
            return *numbers, *torch.autograd.grad(found, leaves, upstream)

        read = {"outputs": ("logprob", "entropy"), "entropy_grad": False}
        found = gradients(linear_logprob, dtype, schedule=schedule, **read)
        wanted, plain = (gradients(reference.linear_logprob, wide) for wide in (torch.float64, FP32))
        for i, name in enumerate(("logprob", "entropy", "dinput", "dweight")):
            rounding = 2 * 2.0**-8 if i > 1 else 0.0
            assert_close(name, found[i], wanted[i], plain[i].to(found[i].dtype), rounding=rounding)


@dtypes
@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0, "tensor"])
@pytest.mark.parametrize("shape", [(300, 96, 1003), (2100, 256, 20000)], ids=["few", "many"])
def test_the_kernels_numbers(dtype, temperature, shape):
    """What RL reads, by the kernels: forward, and the gradients of each alone and of all."""
    n, d, V = shape
    case = device_case(n, d, V, dtype)
    case.target[::3] = case.ignore_index
    if temperature == "tensor":
        temperature = torch.linspace(0.3, 3, n, device="cuda")
    names = ("logprob", "entropy", "lse")

    def by_reference(wide):
        leaves = [each.detach().to(wide).requires_grad_() for each in (case.input, case.linear_weight)]
        number = temperature.to(wide) if isinstance(temperature, torch.Tensor) else temperature
        return leaves, reference.linear_logprob(*leaves, case.target, temperature=number)

    leaves = [each.detach().requires_grad_() for each in (case.input, case.linear_weight)]
    plain = ("log_sum_sq_probs", "mean_logit", "argmax", "is_top1")
    found = linear_logprob(*leaves, case.target, temperature=temperature, outputs=(*names, *plain))
    (wide, expected), (narrow, baseline) = by_reference(torch.float64), by_reference(FP32)
    for name in (*names, *plain[:2]):
        want, other = getattr(expected, name).detach(), getattr(baseline, name).detach()
        assert_close(name, getattr(found, name).detach(), want, other)
    check_top(found, expected)
    operands = case.input, case.linear_weight, case.target
    again = linear_logprob(
        *operands, temperature=temperature, outputs=("logprob", *plain[1:]), schedule="keep"
    )
    assert torch.equal(again.argmax, found.argmax)
    assert_close("mean_logit", again.mean_logit, expected.mean_logit, baseline.mean_logit)
    for chosen in (("logprob",), ("entropy",), ("lse",), names):
        generator = torch.Generator().manual_seed(len(chosen))
        upstream = [torch.randn(n, generator=generator).cuda() for _ in chosen]

        def gradients(stats, inputs, chosen=chosen, upstream=upstream):
            outputs = [getattr(stats, name) for name in chosen]
            given = [each.to(output.dtype) for each, output in zip(upstream, outputs, strict=True)]
            return torch.autograd.grad(outputs, inputs, given, retain_graph=True)

        for name, one, want, plain in zip(
            ("dinput", "dweight"),
            *(gradients(found, leaves), gradients(expected, wide), gradients(baseline, narrow)),
            strict=True,
        ):
            assert_close(f"{name} of {chosen}", one, want, plain.to(dtype), rounding=2 * 2.0**-8)


@dtypes
@pytest.mark.parametrize(
    "term", [LogCap(2.0), Tanh(5.0), Knee(0.5), SoftPlus()], ids=lambda t: type(t).__name__
)
@pytest.mark.parametrize("schedule", ["recompute", "auto"])
def test_a_term_of_ones_own(dtype, term, schedule):
    """With "auto" bfloat16 keeps exponentials times slopes."""
    case = device_case(1100, 256, 20000, dtype)
    case.target[::3] = case.ignore_index
    terms = {"softcap": term, "logit_scale": 0.7, "z_loss": 1e-3, "reduction": "sum"}

    def run(function, wide):
        leaves = [each.detach().to(wide).requires_grad_() for each in (case.input, case.linear_weight)]
        loss = function(*leaves, case.target, **terms)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    found = run(functools.partial(linear_cross_entropy, schedule=schedule), dtype)
    expected, plain = (run(reference.linear_cross_entropy, wide) for wide in (torch.float64, FP32))
    for name, one, want, other in zip(("loss", "dinput", "dweight"), found, expected, plain, strict=True):
        rounding = 0.0 if name == "loss" else 2 * 2.0**-8
        assert_close(name, one, want, other.to(one.dtype), rounding=rounding)


@dtypes
@pytest.mark.parametrize("schedule", ["recompute", "keep"])
@pytest.mark.parametrize("term", ["softcap", "LogitTerm"])
@pytest.mark.parametrize("cap", CAPS)
def test_the_slope_near_a_small_cap(dtype, schedule, term, cap):
    """Whose logits are but a few ulp of lse; of a loss, and of numbers with ids and a temperature each."""
    case = near_a_cap(cap, dtype, V).to("cuda")
    n = len(case.target)
    softcap = cap if term == "softcap" else Tanh(cap)
    ids = torch.stack([case.target, (case.target + 5) % V], dim=1)
    temperature = torch.linspace(0.3, 3, n, device="cuda")
    upstream = torch.linspace(-2, 3, 3 * n, device="cuda").view(n, 3)

    def losses(function, leaves):
        return function(*leaves, case.target, softcap=softcap, reduction="none")

    def numbers(function, leaves):
        outputs = {"outputs": ("logprob", "topk_logprob")} if function is linear_logprob else {}
        options = {"softcap": softcap, "temperature": temperature, "topk_ids": ids, **outputs}
        found = function(*leaves, case.target, **options)
        return torch.cat([found.logprob.unsqueeze(1), found.topk_logprob], dim=1)

    for call, mine, given, by in (
        (losses, linear_cross_entropy, upstream[:, 0], reference.linear_cross_entropy),
        (numbers, linear_logprob, upstream, reference.linear_logprob),
    ):
        found = []
        for function, wide in ((mine, dtype), (by, torch.float64), (by, FP32)):
            leaves = [each.detach().to(wide).requires_grad_() for each in (case.input, case.linear_weight)]
            if function is linear_cross_entropy:
                function = functools.partial(function, schedule=schedule)
            value = call(function, leaves)
            found.append((value.detach(), torch.autograd.grad(value, leaves[1], given.to(value.dtype))[0]))
        (value, dweight), (want, expected), (plain, _) = found
        assert_close("numbers", value, want, plain)
        factor = given.abs() if call is losses else given.abs().sum(1) / temperature
        # Of numbers "auto" keeps what it can.
        check_near_a_cap(case, dweight, expected, factor, schedule == "keep" or call is numbers)


@dtypes
@pytest.mark.parametrize("K", [1, 64, 300])
def test_the_kernels_topk(dtype, K):
    """Beside the others, where most ids are in few tiles, and with a softcap and a bias."""
    n, d, V = 1100, 256, 20000
    case = device_case(n, d, V, dtype)
    case.target[::3] = case.ignore_index
    ids = torch.randint(-3, V + 3, (n, K), device="cuda", generator=torch.Generator("cuda").manual_seed(K))
    ids[::2] = ids[::2].clamp(min=0) % 300
    ids[:, 0] = case.target
    bias = torch.linspace(-1, 1, V, device="cuda").to(dtype)
    for names, terms in (
        (("topk_logprob",), {}),
        (("logprob", "entropy", "topk_logprob"), {"softcap": 8.0, "temperature": 0.7, "linear_bias": bias}),
    ):
        shape = n, len(names) - 1 + K
        upstream = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(K + 1))

        def run(function, wide, names=names, terms=terms, upstream=upstream):
            given = [case.input, case.linear_weight, *(terms[name] for name in ("linear_bias",) if terms)]
            leaves = [each.detach().to(wide).requires_grad_() for each in given]
            options = {**terms, **({"linear_bias": leaves[2]} if terms else {})}
            if function is linear_logprob:
                options["outputs"] = names
            found = function(*leaves[:2], case.target, topk_ids=ids, **options)
            numbers = [getattr(found, name).reshape(n, -1) for name in names]
            dnumbers = upstream.to(numbers[0].dtype).split([each.shape[1] for each in numbers], 1)
            return *(each.detach() for each in numbers), *torch.autograd.grad(numbers, leaves, dnumbers)

        found = run(linear_logprob, dtype)
        expected, plain = (run(reference.linear_logprob, wide) for wide in (torch.float64, FP32))
        for i, (one, want, other) in enumerate(zip(found, expected, plain, strict=True)):
            rounding = 2 * 2.0**-8 if i >= len(names) else 0.0
            assert_close(f"{i} of {names}", one, want, other.to(one.dtype), rounding=rounding)


def check_top(found, expected):
    """Where float32 sees two logits as equal, or in another order, the other one may be first."""
    agree = (found.argmax == expected.argmax).double().mean()
    assert agree > 0.99, agree
    assert (found.is_top1 == expected.is_top1).double().mean() >= agree


@dtypes
def test_capped_logits_far_beyond_their_cap(dtype):
    """All are the cap or its negative there, with hardly a gradient, and some are in between."""
    case = device_case(N, D, V, dtype)
    for scale in (1e-3, 1.0, 30.0, 1e4):
        found = linear_logprob(
            case.input,
            case.linear_weight,
            case.target,
            softcap=20.0,
            logit_scale=scale,
            outputs=("logprob", "lse"),
        )
        wide, plain = (
            reference.linear_logprob(
                case.input.to(kind), case.linear_weight.to(kind), case.target, softcap=20.0, logit_scale=scale
            )
            for kind in (torch.float64, FP32)
        )
        for name in ("logprob", "lse"):
            assert_close(name, getattr(found, name), getattr(wide, name), getattr(plain, name))


def test_nothing_waits_for_the_device():
    case, every = case_of(BF16), terms_of(BF16)
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    for _ in range(2):
        loss = linear_cross_entropy(hidden, weight, case.target, **every)
        loss.backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            linear_cross_entropy(hidden, weight, case.target, **every).backward()
            names = ("logprob", "entropy", "lse")
            found = linear_logprob(hidden, weight, case.target, outputs=names, temperature=0.7)
            (found.entropy + found.logprob).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0, "tensor"])
def test_logprob(dtype, temperature):
    """All numbers, and the gradients by each alone and by all."""
    case = case_of(dtype)
    if temperature == "tensor":
        temperature = torch.linspace(0.3, 3, N, device="cuda")
    ids = torch.randint(-3, V + 3, (N, 20), device="cuda")
    ids[:, 1] = ids[:, 0]
    ids[:, 2] = case.target.clamp(min=0)
    names = TokenStats._fields

    def gradients(found, leaves, chosen, upstream):
        outputs = [found[i] for i in chosen]
        dloss = [upstream[i].to(output.dtype) for i, output in zip(chosen, outputs, strict=True)]
        return torch.autograd.grad(outputs, leaves, dloss, retain_graph=True)

    def by_reference(wide):
        leaves = [each.detach().to(wide).requires_grad_() for each in (case.input, case.linear_weight)]
        number = temperature.to(wide) if isinstance(temperature, torch.Tensor) else temperature
        return leaves, reference.linear_logprob(*leaves, case.target, temperature=number, topk_ids=ids)

    leaves = [each.detach().requires_grad_() for each in (case.input, case.linear_weight)]
    found = linear_logprob(*leaves, case.target, temperature=temperature, topk_ids=ids, outputs=names)
    (wide, expected), (narrow, baseline) = by_reference(torch.float64), by_reference(FP32)
    for name, one, want, plain in zip(names, found, expected, baseline, strict=True):
        if name not in ("argmax", "is_top1"):
            assert_close(name, one.detach(), want.detach(), plain.detach())
    agree = (found.argmax == expected.argmax).double().mean()
    assert agree > 0.99
    upstream = [torch.randn(each.shape, device="cuda") for each in found[:4]]
    for chosen in ((0,), (1,), (2,), (3,), (0, 1, 2, 3)):
        rounding = 0.0 if dtype is FP32 else 2 * 2.0**-8
        for name, one, want, plain in zip(
            ("dinput", "dweight"),
            gradients(found, leaves, chosen, upstream),
            gradients(expected, wide, chosen, upstream),
            gradients(baseline, narrow, chosen, upstream),
            strict=True,
        ):
            assert_close(f"{name} of {chosen}", one, want, plain.to(dtype), rounding=rounding)


@dtypes
def test_logprob_alone_is_the_kernels(dtype):
    case = replace(case_of(dtype), logit_scale=1 / 0.7)
    hidden = case.input.detach().requires_grad_()
    found = linear_logprob(hidden, case.linear_weight, case.target, temperature=0.7).logprob
    loss = linear_cross_entropy(
        hidden, case.linear_weight, case.target, logit_scale=1 / 0.7, reduction="none"
    )
    assert torch.equal(found, -loss)


def test_two_runs_give_the_same_bits():
    case, every = case_of(BF16), terms_of(BF16)
    ids = torch.randint(0, 30, (N, 40), device="cuda")

    def run():
        leaves = [case.input.detach().requires_grad_(), case.linear_weight.detach().requires_grad_()]
        loss = linear_cross_entropy(leaves[0], leaves[1], case.target, **every)
        found = linear_logprob(
            *leaves, case.target, topk_ids=ids, outputs=("logprob", "entropy", "topk_logprob")
        )
        total = loss + found.logprob.sum() + found.entropy.sum() + found.topk_logprob.sum()
        return total.detach(), *torch.autograd.grad(total, leaves)

    for one, other in zip(run(), run(), strict=True):
        assert torch.equal(one, other)


def bits_of(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("how", ["hooks", "opcheck", "compiled", "graph"])
@pytest.mark.parametrize("names", [("logprob", "lse", "topk_logprob"), ("logprob", "entropy")], ids=" ".join)
def test_kept_numbers_of_graphs(how, names, fresh_inductor):
    """What is kept is another's there: it is not written to."""
    n, d, V = 300, 128, 5000
    case = device_case(n, d, V, BF16)
    leaves = [case.input.detach().requires_grad_(), case.linear_weight.detach().requires_grad_()]
    ids = torch.randint(-3, V + 3, (n, 9), device="cuda") if "topk_logprob" in names else None
    if ids is not None:
        ids[:, 4] = case.target
    options = {"outputs": names, "topk_ids": ids, "schedule": "keep"}
    if how == "opcheck":
        torch.library.opcheck(
            *(torch.ops.cute_lce.fused_linear_logprob.default, (*leaves, case.target), options),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )
        return

    def sums(hidden, weight):
        found = linear_logprob(hidden, weight, case.target, **options)
        return torch.stack([getattr(found, name).sum(-1).mean() for name in names]).sum()

    wanted = torch.autograd.grad(sums(*leaves), leaves)
    assert all(each.any() for each in wanted)
    if how == "hooks":
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            total = sums(*leaves)
        assert (n, V) in [tuple(each.shape) for each in saved]
        # Copies of the bytes, as ignored rows of what is kept may be nan.
        before = [bits_of(each).clone() for each in saved]
        found = torch.autograd.grad(total, leaves)
        assert all(torch.equal(bits_of(each), was) for each, was in zip(saved, before, strict=True))
    elif how == "compiled":
        found = torch.autograd.grad(torch.compile(sums, fullgraph=True)(*leaves), leaves)
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = torch.autograd.grad(sums(*leaves), leaves)
        for _ in range(2):
            for each in found:
                each.fill_(torch.nan)
            graph.replay()
    for mine, theirs in zip(found, wanted, strict=True):
        assert relative_error(mine, theirs) < 0.005
