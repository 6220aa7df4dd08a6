"""Numbers and sizes that torch.compile traces as symbols: one graph for their values, and right values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cute_lce import (
    linear_cross_entropy,
    linear_logprob,
    ops,
    reference,
    sampled_linear_cross_entropy,
)
from cute_lce.arch import Gpu
from cute_lce.launch import choose
from cute_lce.ops import inner, token_stats
from cute_lce.plan.problem import Limits, Problem
from tests.logit_terms import LogCap

from ..device import planned_for
from ..numerics import relative_error

n, d, V = 23, 20, 37
SAMPLE = torch.arange(0, V, 3)


@pytest.fixture(autouse=True)
def fresh_dynamo(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "capture_dynamic_output_shape_ops", True)
    monkeypatch.setattr(torch._dynamo.config, "capture_scalar_outputs", True)
    torch.manual_seed(0)


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(rows, d, generator=generator) for rows in (n, V))
    target = torch.randint(V, (n,), generator=generator)
    target[4] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


Call = Callable[..., Any]


def gradients(call: Call, dtype: torch.dtype, *values: Any) -> list[Tensor]:
    """What it gives, and the gradients of a sum of it with other coefficients for each number."""
    hidden, weight, target = tensors(dtype)
    found = call(hidden, weight, target, *values)
    total = (found * torch.arange(1, found.numel() + 1).view(found.shape)).sum()
    if not total.requires_grad:
        return [found]
    return [found, *torch.autograd.grad(total, (hidden, weight))]


def check(call: Call, want: Call, *values: Any) -> None:
    for actual, expected in zip(
        gradients(call, torch.float32, *values), gradients(want, torch.float64, *values), strict=True
    ):
        assert actual.shape == expected.shape
        if not expected.any():
            assert not actual.any()
        else:
            # Zeros have an error of 1.
            assert relative_error(actual, expected) < 2e-6


def compiled(
    call: Call, backend: str = "aot_eager", **options: Any
) -> tuple[Call, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(call, backend=counter, fullgraph=True, **options), counter


# ----------------------------------------------------------------------------------------------------------
# Numbers


def loss(schedule: str, **names: Callable[[float], Any]) -> tuple[Call, Call]:
    """linear_cross_entropy, and its definition, of a number x from which the arguments are made."""

    def given(x: float) -> dict[str, Any]:
        return {name: of(x) for name, of in names.items()}

    return (
        lambda h, w, t, x: linear_cross_entropy(h, w, t, schedule=schedule, **given(x)),
        lambda h, w, t, x: reference.linear_cross_entropy(h, w, t, **given(x)),
    )


def logprobs(schedule: str, **names: Callable[[float], Any]) -> tuple[Call, Call]:
    outputs = ("logprob", "entropy", "lse") if "softcap" in names else ("logprob",)

    def given(x: float) -> dict[str, Any]:
        return {name: of(x) for name, of in names.items()}

    def call(h, w, t, x):
        found = linear_logprob(h, w, t, schedule=schedule, outputs=outputs, **given(x))
        return torch.cat([getattr(found, name) for name in outputs])

    def want(h, w, t, x):
        found = reference.linear_logprob(h, w, t, **given(x))
        return torch.cat([getattr(found, name) for name in outputs])

    return call, want


def heads(h, w, t, x):
    """Three equal ones."""
    stacked = torch.stack((t, t, t), -1)
    return linear_cross_entropy(h, [w, w, w], stacked, z_loss=x, denominator=10 * x).sum() / 3


def sampled(h, w, t, x):
    return sampled_linear_cross_entropy(h, w, t, SAMPLE, logit_scale=x, denominator=10 * x)


def sampled_want(h, w, t, x):
    found = reference.sampled_linear_cross_entropy(h, w, t, SAMPLE, logit_scale=x, reduction="none")
    return found.sum() / (10 * x)


def same(x: float) -> float:
    return x


ALL = {
    "logit_scale": same,
    "z_loss": lambda x: 0.1 * x,
    "label_smoothing": lambda x: 0.2 * x,
    "softcap": lambda x: 5 * x,
    "denominator": lambda x: 10 * x,
}
NUMBERS = {
    "terms": loss("recompute", **ALL),
    "accumulated terms": loss("grad_in_forward", **ALL),
    "kept scale": loss("keep", logit_scale=same),
    "accumulated scale": loss("grad_in_forward", logit_scale=same),
    "logprob": logprobs("recompute", temperature=same, logit_scale=lambda x: 1.5 * x),
    "kept entropy": logprobs("keep", temperature=same, softcap=lambda x: 5 * x),
    "heads": (heads, loss("auto", z_loss=same, denominator=lambda x: 10 * x)[1]),
    "sampled": (sampled, sampled_want),
}
FLOATS = [0.5 + 0.07 * i for i in range(10)]
INTS = [3 + i for i in range(10)]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_compile_at_most_twice(name):
    """More values than dynamo compiles one function for, under fullgraph."""
    call, want = NUMBERS[name]
    run, counter = compiled(call)
    for x in FLOATS:
        check(run, want, x)
    assert counter.frame_count <= 2


def test_integers_in_their_place():
    names = "logit_scale", "z_loss", "softcap", "denominator"
    call, want = loss("keep", **dict.fromkeys(names, same))
    run, counter = compiled(call)
    for x in INTS:
        check(run, want, x)
    assert counter.frame_count <= 2


def test_numbers_with_dynamic_shapes():
    call, want = NUMBERS["logprob"]
    run, counter = compiled(call, dynamic=True)
    for x in FLOATS:
        check(run, want, x)
    # Dynamo first tries the numbers as inputs.
    assert counter.frame_count <= 2


def test_numbers_beside_cuda_graphs(fresh_inductor):
    """On a CPU there are none, but the same graphs."""
    call, want = NUMBERS["kept scale"]
    run = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for x in FLOATS:
        check(run, want, x)


def test_numbers_without_gradients():
    call, want = NUMBERS["kept entropy"]
    run, counter = compiled(call)
    with torch.no_grad():
        for x in FLOATS:
            check(run, want, x)
    assert counter.frame_count <= 2


def test_a_default_is_a_constant():
    """A loss without a term is a plain one, also where the term's number has been seen to change."""
    call, want = loss("recompute", z_loss=same, logit_scale=lambda x: x + 1)
    graphs: list[str] = []

    def seen(graph, inputs):
        graphs.append(graph.code)
        return make_boxed_func(graph)

    run = torch.compile(call, backend=aot_autograd(fw_compiler=seen), fullgraph=True)
    with torch.no_grad():
        for x in (0.0, 0.5, 0.6, 0.7):
            check(run, want, x)
        assert "cute_lce.forward.default" in graphs[0]
        assert "token_stats_with_numbers" in graphs[-1]
        torch._dynamo.reset()
        for x in (0.5, 0.6, 0.0):
            check(run, want, x)
    assert "token_stats_with_numbers" in graphs[-2]
    assert "token_stats" not in graphs[-1]


def test_terms_with_other_fields():
    call, want = loss("keep", softcap=same)
    run, counter = compiled(call)
    for i in range(10):
        check(run, want, LogCap(1.0 + i))
    assert counter.frame_count <= 2


def test_numbers_that_only_the_data_knows():
    call, want = NUMBERS["terms"]
    run, counter = compiled(lambda h, w, t, x: call(h, w, t, x.item()))
    for x in FLOATS[:3]:
        check(run, lambda *given: want(*given[:3], given[3].item()), torch.tensor(x, dtype=torch.float64))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [("logit_scale", float("inf")), ("softcap", 0.0), ("label_smoothing", 1.5), ("denominator", -1.0)],
)
def test_a_wrong_number_is_refused_by_its_name(argument, wrong):
    call, _ = loss("recompute", **{argument: same})
    run, _ = compiled(call)
    hidden, weight, target = tensors(torch.float32)
    for x in (0.5, 0.6, 0.7):
        run(hidden, weight, target, x)
    with pytest.raises(Exception, match=argument):
        run(hidden, weight, target, wrong)


def test_a_wrong_number_that_only_the_data_knew_is_refused_by_its_name():
    run, _ = compiled(lambda h, w, t, x: linear_logprob(h, w, t, temperature=x.item(), outputs=("lse",)).lse)
    hidden, weight, target = tensors(torch.float32)
    run(hidden, weight, target, torch.tensor(0.5))
    with pytest.raises(ValueError, match="temperature: got 0"):
        run(hidden, weight, target, torch.tensor(0.0))


def test_ops_with_numbers_stay_outside_of_cuda_graphs():
    """A replayed graph would not read them."""
    assert len(inner.twins) >= 10
    for op, twin in inner.twins.items():
        assert torch.Tag.cudagraph_unsafe in twin.op.tags
        assert torch.Tag.cudagraph_unsafe not in op.tags


def test_a_kept_format_of_other_numbers_is_refused(monkeypatch):
    """On a device with kernels a cap beyond float32's range is served by the streaming path."""
    kernels = object()
    monkeypatch.setattr(
        token_stats, "statistics", lambda _, options, schedule: kernels if options.softcap < 100 else ops
    )
    operands = [torch.zeros(2, 2)] * 7
    options = [-100, 1.0, 5.0, 1.0, ["logprob"], 0.0, 0.0, True]
    other = [-100, 1.0, 500.0, 1.0, ["logprob"], 0.0, 0.0, True]
    token_stats.check_format((*operands, *options, 0, 0, 8), (*operands, *options, 0, 0, 8))
    token_stats.check_format((*operands, *options, 0, 0, 0), (*operands, *other, 0, 0, 0))
    with pytest.raises(ValueError, match="softcap: got 500"):
        token_stats.check_format((*operands, *options, 0, 0, 8), (*operands, *other, 0, 0, 8))


# ----------------------------------------------------------------------------------------------------------
# Sizes that only the data knows


class Beside:
    """Tensors of each token."""

    weight = torch.linspace(0.1, 2, n)
    temperature = torch.linspace(0.5, 2, n)
    ids = torch.arange(3 * n).view(n, 3) % V
    bias = torch.linspace(-1, 1, V)
    chosen = torch.arange(V) % 3 == 1


def masked_loss(**options: Any) -> tuple[Call, Call]:
    def call(kind: Call, given: dict[str, Any]) -> Call:
        def run(h, w, t, one, two, three):
            beside = {"token_weight": Beside.weight[three]} if "z_loss" in options else {}
            return kind(h[one], w, t[two], **beside, **given)

        return run

    plain = {name: value for name, value in options.items() if name not in ("schedule", "workspace_mb")}
    return call(linear_cross_entropy, options), call(reference.linear_cross_entropy, plain)


def masked_numbers(schedule: str) -> tuple[Call, Call]:
    def of(found: Any) -> Tensor:
        return torch.cat((found.logprob, found.entropy, found.lse, found.topk_logprob.flatten()))

    def call(h, w, t, one, two, three):
        outputs = "logprob", "entropy", "lse", "topk_logprob"
        given: dict[str, Any] = {"temperature": Beside.temperature[three], "topk_ids": Beside.ids[three]}
        return of(linear_logprob(h[one], w, t[two], outputs=outputs, schedule=schedule, **given))

    def want(h, w, t, one, two, three):
        temperature = Beside.temperature[three].to(h.dtype)
        return of(
            reference.linear_logprob(h[one], w, t[two], temperature=temperature, topk_ids=Beside.ids[three])
        )

    return call, want


def masked_heads(h, w, t, one, two, three):
    target, weight = torch.stack((t, t, t), -1)[two], torch.stack((Beside.weight,) * 3, -1)[three]
    return linear_cross_entropy(h[one], [w, w, w], target, token_weight=weight).sum() / 3


def masked_heads_want(h, w, t, one, two, three):
    return reference.linear_cross_entropy(h[one], w, t[two], token_weight=Beside.weight[three])


def masked_sampled(kind: Call) -> Call:
    def call(h, w, t, one, two, three):
        chosen = Beside.chosen
        return kind(
            *(h[one], w, t[two], torch.arange(V)[chosen]),
            sampled_log_q=Beside.bias[chosen].to(h.dtype),
            target_log_q=Beside.weight[three].to(h.dtype),
            token_weight=Beside.weight[three],
        )

    return call


def masked_rows(h, w, t, one, two, three):
    """Losses in three dimensions, and a denominator that is a size."""
    rows = linear_cross_entropy(
        torch.stack((h[one], h[three])), w, torch.stack((t[two], t[two])), reduction="none"
    )
    return rows + linear_cross_entropy(h[one], w, t[two], denominator=h[three].shape[0] + 1)


def masked_rows_want(h, w, t, one, two, three):
    rows = reference.linear_cross_entropy(
        torch.stack((h[one], h[three])), w, torch.stack((t[two], t[two])), reduction="none"
    )
    return rows + reference.linear_cross_entropy(h[one], w, t[two], denominator=h[three].shape[0] + 1)


MASKED = {
    "keep": masked_loss(schedule="keep", workspace_mb=1.0),
    "grad_in_forward": masked_loss(schedule="grad_in_forward", workspace_mb=1.0),
    "kept terms": masked_loss(schedule="keep", z_loss=0.1, label_smoothing=0.1, reduction="none"),
    "accumulated terms": masked_loss(schedule="grad_in_forward", z_loss=0.1, softcap=5.0),
    "numbers": masked_numbers("recompute"),
    "heads": (masked_heads, masked_heads_want),
    "sampled": (
        masked_sampled(sampled_linear_cross_entropy),
        masked_sampled(reference.sampled_linear_cross_entropy),
    ),
    "rows": (masked_rows, masked_rows_want),
}


@pytest.mark.parametrize("name", MASKED)
def test_tokens_selected_by_several_masks(name):
    call, want = MASKED[name]
    run, counter = compiled(call)
    for least in (9, 22, 23):
        mask = torch.arange(n) >= least
        check(run, want, *(mask.clone() for _ in range(3)))
    assert counter.frame_count == 1
    hidden, weight, target = tensors(torch.float32)
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        run(hidden, weight, target, mask, torch.arange(n) >= 5, mask)


def test_tokens_selected_by_several_masks_with_inductor(fresh_inductor):
    call, want = MASKED["keep"]
    run = torch.compile(call, fullgraph=True)
    for least in (2, 23):
        check(run, want, *(torch.arange(n) >= least for _ in range(3)))


@pytest.mark.parametrize("schedule", ["auto", "recompute", "keep", "grad_in_forward"])
def test_the_kernels_keep_nothing_of_an_unknown_number_of_tokens(schedule):
    size: Any = ShapeEnv().create_unbacked_symint()
    problem = Problem(size, 4096, 32000, False, True, True)
    with planned_for(Gpu("sm_90a", 132)):
        found = choose.choose(
            problem, torch.bfloat16, torch.device("cuda"), schedule, "mean", Limits(0, 1 << 30)
        )
    assert found == ("grad_in_forward" if schedule == "grad_in_forward" else "recompute", 0)
