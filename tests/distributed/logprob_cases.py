"""Cases of linear_logprob over a group, for any number of ranks and for CPUs as for GPUs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_lce
import cute_lce.reference
from cute_lce import environment
from tests.distributed.calls import shard_sizes, slice_of
from tests.distributed.ranks import Rank
from tests.numerics import assert_close, random_case

linear_logprob: Any = cute_lce.linear_logprob
reference: Any = cute_lce.reference

NAMES = ("logprob", "entropy", "lse")
D = 24


def operands(here: Rank, dtype: torch.dtype, V: int) -> tuple[Tensor, ...]:
    """(input (3, 7, D), linear_weight, linear_bias, target, temperature) of the whole, two rows ignored."""
    case = random_case(21, D, V, dtype, scale=2.0)
    case.target[[5, 20]] = -100
    # Confident rows, whose entropy is small, in every shard.
    hidden = case.input.clone()
    hidden[::4] *= 4
    bias, temperature = torch.linspace(-1, 1, V), torch.linspace(0.4, 2, 21)
    tensors = hidden.view(3, 7, D), case.linear_weight, bias.to(dtype), case.target.view(3, 7)
    return *(each.to(here.device) for each in tensors), temperature.view(3, 7).to(here.device)


def whole(tensors: tuple[Tensor, ...], dtype: torch.dtype, terms: dict[str, Any]):
    """By the reference in a dtype: (leaves, numbers)."""
    hidden, weight, bias, target, temperature = tensors
    leaves = [each.to(dtype).requires_grad_() for each in (hidden, weight, bias)]
    options = dict(terms)
    if "linear_bias" in options:
        options["linear_bias"] = leaves[2]
    if isinstance(options.get("temperature"), Tensor):
        options["temperature"] = temperature.to(dtype)
    found = reference.linear_logprob(leaves[0], leaves[1], target, **options)
    return leaves, [getattr(found, name) for name in NAMES]


def compare(here: Rank, dtype: torch.dtype, sizes: list[int] | None, terms: dict, **options: Any) -> None:
    """Every number, and the gradients by every combination of them, with this rank's part of float64's."""
    V = sum(sizes) if sizes else 40 * here.ranks
    tensors = operands(here, dtype, V)
    hidden, weight, bias, target, temperature = tensors
    each = sizes or [40] * here.ranks
    start = sum(each[: here.rank])
    rows = slice(start, start + each[here.rank])
    if "linear_bias" in terms:
        terms["linear_bias"] = bias
    if isinstance(terms.get("temperature"), Tensor):
        terms["temperature"] = temperature
    leaves = [one.clone().requires_grad_() for one in (hidden, weight[rows], bias[rows])]
    given = {**terms, "linear_bias": leaves[2]} if "linear_bias" in terms else terms
    found = linear_logprob(
        *leaves[:2],
        target,
        outputs=NAMES,
        tp_group=here.group,
        vocab_start=start if sizes else None,
        **given,
        **options,
    )
    numbers = [getattr(found, name) for name in NAMES]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    (exact, expected), (plain, baseline) = (whole(tensors, kind, terms) for kind in (torch.float64, wide))
    for name, number, want, other in zip(NAMES, numbers, expected, baseline, strict=True):
        assert number.dtype is wide
        assert_close(name, number, want.detach(), other.detach())
        assert here.is_same(number.detach())
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(3, 7, generator=generator, dtype=wide).to(here.device) for _ in NAMES]
    used = 3 if "linear_bias" in terms else 2
    for count in range(1, 4):
        for chosen in itertools.combinations(range(3), count):

            def gradients(outputs: list, inputs: list, chosen=chosen) -> tuple[Tensor, ...]:
                picked = [outputs[i] for i in chosen]
                dout = [upstream[i].to(one.dtype) for i, one in zip(chosen, picked, strict=True)]
                return torch.autograd.grad(picked, inputs[:used], dout, retain_graph=True)

            got = gradients(numbers, leaves)
            for index, (one, want, other) in enumerate(
                zip(got, gradients(expected, exact), gradients(baseline, plain), strict=True)
            ):
                assert one.dtype is dtype
                part = (want, other) if index == 0 else (want[rows], other[rows])
                # With narrow operands a GPU's products take rounded dlogits.
                rounding = 2.0**-8 if one.is_cuda and dtype is torch.bfloat16 else 0.0
                assert_close(f"{index} of {chosen}", one, part[0], part[1].to(dtype), rounding=rounding)
            assert here.is_same(got[0])


def numbers_of_shards(here: Rank) -> None:
    for dtype in here.dtypes:
        compare(here, dtype, None, {})
        compare(here, dtype, None, {"temperature": 0.7}, schedule="keep", workspace_mb=64)
    everything = {
        "temperature": torch.ones(()),
        "linear_bias": None,
        "softcap": 6.0,
        "logit_scale": 0.8,
    }
    for dtype in (torch.float32, torch.bfloat16):
        compare(here, dtype, shard_sizes(40 * here.ranks, here.ranks), dict(everything), window=16)


def plain_logprobs(here: Rank) -> None:
    """What the kernels serve where there are any."""
    V = 64 * here.ranks
    hidden, weight, _, target, _ = operands(here, torch.float32, V)
    leaves = [hidden.clone().requires_grad_(), slice_of(weight, here, 0).clone().requires_grad_()]
    found = linear_logprob(*leaves, target, temperature=0.6, tp_group=here.group).logprob
    dlogprob = torch.linspace(-1, 1, 21, device=here.device).view(3, 7)
    got = torch.autograd.grad(found, leaves, dlogprob)

    def by_the_reference(kind: torch.dtype) -> tuple[Tensor, ...]:
        wide = [each.to(kind).requires_grad_() for each in (hidden, weight)]
        number = reference.linear_logprob(*wide, target, temperature=0.6).logprob
        return number.detach(), *torch.autograd.grad(number, wide, dlogprob.to(kind))

    expected, baseline = by_the_reference(torch.float64), by_the_reference(torch.float32)
    assert_close("logprob", found.detach(), expected[0], baseline[0])
    assert_close("dinput", got[0], expected[1], baseline[1])
    assert_close("dweight", got[1], slice_of(expected[2], here, 0), slice_of(baseline[2], here, 0))


def partial_gradients_by_input(here: Rank) -> None:
    """Their sum over the ranks, taken by the caller, is what "reduced" gives."""
    hidden, weight, _, target, _ = operands(here, torch.float64, 32 * here.ranks)
    shard = slice_of(weight, here, 0).clone().requires_grad_()
    found = []
    for grad_input in ("reduced", "partial"):
        leaf = hidden.clone().requires_grad_()
        stats = linear_logprob(
            leaf, shard, target, outputs=("entropy", "logprob"), tp_group=here.group, grad_input=grad_input
        )
        (stats.entropy.sum() + (2 * stats.logprob).sum()).backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    reduced, part = found
    assert not torch.allclose(reduced, part)
    torch.distributed.all_reduce(part, group=here.group)
    torch.testing.assert_close(reduced, part)


def rows_that_are_nan(here: Rank) -> None:
    """A target in no shard spoils its row alone, and unequal shards without a start everything."""
    V = 32 * here.ranks
    hidden, weight, _, target, _ = operands(here, torch.float64, V)
    target = target.clone()
    target[1, 2] = V + 1
    leaf = hidden.clone().requires_grad_()
    shard = slice_of(weight, here, 0)
    stats = linear_logprob(leaf, shard, target, outputs=NAMES, tp_group=here.group)
    sick = torch.zeros(3, 7, dtype=torch.bool, device=here.device)
    sick[1, 2] = True
    assert torch.equal(stats.logprob.isnan(), sick)
    (gradient,) = torch.autograd.grad(stats.logprob.sum(), leaf)
    assert torch.equal(gradient.isnan().any(-1), sick)
    stats = linear_logprob(
        hidden, weight[: 32 - here.rank], target, outputs=("entropy", "lse"), tp_group=here.group
    )
    assert torch.equal(stats.entropy.isnan(), target != -100)


def a_shard_without_any_probability(here: Rank) -> None:
    """Logits of -inf in the last shard change nothing: entropy's 0 times inf is 0."""
    hidden, weight, bias, target, _ = operands(here, torch.float64, 32 * here.ranks)
    bias, last = bias.clone(), 32 * (here.ranks - 1)
    bias[last:] = -torch.inf
    target = torch.where(target == -100, target, target % last)
    stats = linear_logprob(
        hidden,
        slice_of(weight, here, 0),
        target,
        outputs=NAMES,
        linear_bias=slice_of(bias, here, 0),
        tp_group=here.group,
    )
    rest = reference.linear_logprob(hidden, weight[:last], target, linear_bias=bias[:last])
    for name in NAMES:
        torch.testing.assert_close(getattr(stats, name), getattr(rest, name))


def refused_numbers(here: Rank) -> None:
    hidden, weight, _, target, _ = operands(here, torch.float32, 32 * here.ranks)
    shard = slice_of(weight, here, 0)
    for name, options in (
        ("outputs", {"outputs": ("argmax", "loss")}),
        ("topk_ids", {"outputs": ("topk_logprob",)}),
        ("temperature", {"temperature": torch.ones(2, device=here.device)}),
        ("sequence_dim", {"sequence_dim": 2}),
        ("sm_margin", {"sm_margin": -1}),
        ("sequence_dim", {"tp_group": None, "sequence_dim": 0}),
        ("schedule", {"schedule": "grad_in_forward"}),
        ("vocab_start", {"vocab_start": -1}),
        ("vocab_start", {"tp_group": None, "vocab_start": 0}),
        ("grad_input", {"grad_input": "summed"}),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            linear_logprob(hidden, shard, target, **{"tp_group": here.group, **options})
    leaf = hidden.clone().requires_grad_()
    stats = linear_logprob(leaf, shard, target, outputs=("entropy",), tp_group=here.group)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(stats.entropy.sum(), leaf, create_graph=True)
    environment.CHECK_RANKS = True
    try:
        with pytest.raises(ValueError, match="differ in input's values"):
            linear_logprob(hidden + here.rank, shard, target, outputs=("entropy",), tp_group=here.group)
    finally:
        environment.CHECK_RANKS = False


CASES = (
    numbers_of_shards,
    plain_logprobs,
    partial_gradients_by_input,
    rows_that_are_nan,
    a_shard_without_any_probability,
    refused_numbers,
)
