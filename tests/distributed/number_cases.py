"""Cases of every number of linear_logprob over a group, of tokens that are whole or in slices, for any number
of ranks and for CPUs as for GPUs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import cute_lce
import cute_lce.reference
from cute_lce import environment
from tests.distributed.calls import shard_sizes, slice_of
from tests.distributed.ranks import Rank
from tests.distributed.tensor_cases import check_replays
from tests.logit_terms import LogCap
from tests.numerics import assert_close, random_case

linear_logprob: Any = cute_lce.linear_logprob
reference: Any = cute_lce.reference

DIFFERENTIABLE = ("logprob", "lse", "entropy", "topk_logprob")
INTEGERS = ("argmax", "is_top1")
NUMBERS = (*DIFFERENTIABLE, *INTEGERS, "log_sum_sq_probs", "mean_logit")
SHAPE, D = (4, 12), 24
TOKENS = SHAPE[0] * SHAPE[1]


def operands(here: Rank, dtype: torch.dtype, V: int) -> dict[str, Tensor]:
    """Of the whole: some rows ignored, and ids of any shard, repeated, the target's, and outside."""
    case = random_case(TOKENS, D, V, dtype, scale=2.0)
    case.target[[5, 20, 47]] = -100
    ids = torch.arange(TOKENS)[:, None] * torch.tensor([7, 3, 3, 11]) % V
    ids[:, 3] = case.target.clamp(min=0)
    ids[::5, 0], ids[1::5, 0] = V + 3, -1
    found = {
        "input": case.input.view(*SHAPE, D),
        "linear_weight": case.linear_weight,
        "target": case.target.view(SHAPE),
        "temperature": torch.linspace(0.4, 2, TOKENS).view(SHAPE),
        "topk_ids": ids.view(*SHAPE, 4),
        "linear_bias": torch.linspace(-1, 1, V).to(dtype),
    }
    return {name: each.to(here.device) for name, each in found.items()}


def whole(given: dict[str, Tensor], kind: torch.dtype, outputs: tuple[str, ...], terms: dict, upstream: dict):
    """By the reference: (numbers, gradients by input, linear_weight and linear_bias)."""
    wide = {name: each.to(kind) if each.is_floating_point() else each for name, each in given.items()}
    leaves = [wide.pop(name).clone().requires_grad_() for name in ("input", "linear_weight", "linear_bias")]
    found = reference.linear_logprob(
        *leaves[:2], wide.pop("target"), linear_bias=leaves[2], **{**wide, **terms}
    )
    numbers = {name: getattr(found, name) for name in outputs}
    used = [name for name in outputs if name in upstream]
    dout = [upstream[name].to(kind) for name in used]
    gradients = torch.autograd.grad([numbers[name] for name in used], leaves, dout)
    return {name: each.detach() for name, each in numbers.items()}, gradients


def compare(
    here: Rank,
    dtype: torch.dtype,
    *,
    outputs: tuple[str, ...] = NUMBERS,
    sizes: list[int] | None = None,
    order: list[int] | None = None,
    dim: int | None = None,
    sliced_target: bool = False,
    terms: dict | None = None,
    **options: Any,
) -> None:
    """Numbers and gradients with this rank's part of float64's. order: which shard each rank has."""
    each = sizes or [40] * here.ranks
    given, terms = operands(here, dtype, sum(each)), terms or {}
    shard = (order or list(range(here.ranks)))[here.rank]
    start = sum(each[:shard])
    rows = slice(start, start + each[shard])

    def of_input(tensor: Tensor) -> Tensor:
        return tensor if dim is None else slice_of(tensor, here, dim)

    def of_tokens(tensor: Tensor) -> Tensor:
        return of_input(tensor).contiguous() if sliced_target else tensor

    leaves = [of_input(given["input"]), given["linear_weight"][rows], given["linear_bias"][rows]]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    tensors = {"temperature": of_tokens(given["temperature"]), "topk_ids": of_tokens(given["topk_ids"])}
    if "topk_logprob" not in outputs:
        del tensors["topk_ids"], given["topk_ids"]
    found = linear_logprob(
        *leaves[:2],
        of_tokens(given["target"]),
        outputs=outputs,
        linear_bias=leaves[2],
        tp_group=here.group,
        vocab_start=start if sizes or order else None,
        sequence_dim=dim,
        **{**tensors, **terms},
        **options,
    )
    numbers = {name: getattr(found, name) for name in outputs}
    generator = torch.Generator().manual_seed(1)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    upstream = {
        name: torch.randn((*SHAPE, 4) if name == "topk_logprob" else SHAPE, generator=generator)
        .to(wide)
        .to(here.device)
        for name in outputs
        if name in DIFFERENTIABLE
    }
    (expected, exact), (baseline, plain) = (
        whole(given, kind, outputs, terms, upstream) for kind in (torch.float64, wide)
    )
    for name, number in numbers.items():
        want = of_tokens(expected[name])
        assert number.shape == want.shape
        if name in INTEGERS:
            assert torch.equal(number, want)
            assert not number.requires_grad
        else:
            assert number.dtype is wide
            assert_close(name, number.detach(), want, of_tokens(baseline[name]))
        assert sliced_target or here.is_same(number.detach())
    got = torch.autograd.grad(
        [numbers[name] for name in upstream], leaves, [of_tokens(one) for one in upstream.values()]
    )
    for index, (one, want, other) in enumerate(zip(got, exact, plain, strict=True)):
        assert one.dtype is dtype
        part = (of_input(want), of_input(other)) if index == 0 else (want[rows], other[rows])
        # With narrow operands a GPU's products take rounded dlogits.
        rounding = 2.0**-8 if one.is_cuda and dtype is torch.bfloat16 else 0.0
        assert_close(f"gradient {index}", one, part[0], part[1].to(dtype), rounding=rounding)


def every_number(here: Rank) -> None:
    for dtype in here.dtypes:
        compare(here, dtype)
    uneven = shard_sizes(40 * here.ranks, here.ranks)
    order = list(reversed(range(here.ranks)))
    compare(here, torch.float32, sizes=uneven, order=order, terms={"softcap": 6.0}, window=16)
    compare(here, torch.bfloat16, outputs=("topk_logprob", "is_top1"), terms={"logit_scale": 0.7})
    compare(here, torch.float32, outputs=("topk_logprob", "entropy"), terms={"softcap": LogCap(3.0)})
    compare(here, torch.float32, schedule="keep", workspace_mb=64, terms={"temperature": 0.7})


def numbers_of_slices(here: Rank) -> None:
    """A temperature and ids of each token, whole or slices as the target is."""
    for sliced_target in (False, True):
        compare(here, torch.float32, dim=1, sliced_target=sliced_target)
        for dtype in here.dtypes:
            kernels = {"outputs": ("logprob", "entropy", "lse"), "sliced_target": sliced_target}
            compare(here, dtype, dim=1 if SHAPE[0] % here.ranks else 0, **kernels)


def plain_slices(here: Rank) -> None:
    """logprob alone, which is a call of the loss; in one graph too."""
    given = operands(here, torch.float32, 40 * here.ranks)
    weight, target = slice_of(given["linear_weight"], here, 0), given["target"]

    def run(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return linear_logprob(
            hidden * 1.0, weight, target, temperature=0.6, tp_group=here.group, sequence_dim=1
        ).logprob

    def by_the_reference(kind: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [given[name].to(kind).requires_grad_() for name in ("input", "linear_weight")]
        number = reference.linear_logprob(*leaves, target, temperature=0.6).logprob
        return number.detach(), *torch.autograd.grad(number, leaves, dlogprob.to(kind))

    dlogprob = torch.linspace(-1, 1, TOKENS, device=here.device).view(SHAPE)
    expected, baseline = by_the_reference(torch.float64), by_the_reference(torch.float32)
    backend = "inductor" if here.device != "cpu" else "aot_eager"
    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=False)
    functions: tuple[Any, ...] = run, compiled
    for function in functions:
        for sliced in (False, True):

            def own(tensor: Tensor, sliced=sliced) -> Tensor:
                return slice_of(tensor, here, 1).contiguous() if sliced else tensor

            leaves = [slice_of(given["input"], here, 1).clone().requires_grad_(), weight.clone()]
            leaves[1].requires_grad_()
            found = function(*leaves, own(target))
            got = torch.autograd.grad(found, leaves, own(dlogprob))
            assert_close("logprob", found.detach(), own(expected[0]), own(baseline[0]))
            assert_close("dinput", got[0], *(slice_of(each[1], here, 1) for each in (expected, baseline)))
            assert_close("dweight", got[1], *(slice_of(each[2], here, 0) for each in (expected, baseline)))


def numbers_in_one_graph(here: Rank) -> None:
    """All of them, of slices with temperatures."""
    given = operands(here, torch.float32, 40 * here.ranks)
    leaves = [slice_of(given["input"], here, 1).clone().requires_grad_()]
    leaves += [
        slice_of(given[name], here, 0).clone().requires_grad_() for name in ("linear_weight", "linear_bias")
    ]
    tensors = {
        name: slice_of(given[name], here, 1).contiguous() for name in ("target", "temperature", "topk_ids")
    }

    def run(hidden: Tensor, weight: Tensor, linear_bias: Tensor, **tensors: Tensor) -> list[Tensor]:
        call: dict[str, Any] = {"outputs": NUMBERS, "tp_group": here.group, "sequence_dim": 1, **tensors}
        found = linear_logprob(hidden * 1.0, weight, call.pop("target"), linear_bias=linear_bias, **call)
        return [getattr(found, name) for name in NUMBERS]

    backend = "inductor" if here.device != "cpu" else "aot_eager"
    functions: list[Any] = [run, torch.compile(run, fullgraph=True, backend=backend, dynamic=False)]
    found = []
    for function in functions:
        numbers = function(*leaves, **tensors)
        total = sum(
            (each.sum() for each in numbers[: len(DIFFERENTIABLE)]), start=torch.zeros((), device=here.device)
        )
        found.append([*(each.detach() for each in numbers), *torch.autograd.grad(total, leaves)])
    for eager, graph in zip(*found, strict=True):
        torch.testing.assert_close(graph, eager)


def ties_and_unequal_shards(here: Rank) -> None:
    """The first class of the vocabulary wins, whatever rank has it; none where it is not known."""
    given = operands(here, torch.float32, 8 * here.ranks)
    hidden, target, weight = given["input"], given["target"], given["linear_weight"]
    same = weight[:8].contiguous()
    for start in (8 * here.rank, 8 * (here.ranks - 1 - here.rank)):
        found = linear_logprob(hidden, same, target, outputs=INTEGERS, tp_group=here.group, vocab_start=start)
        alone = reference.linear_logprob(hidden, same, target % 8)
        assert torch.equal(found.argmax, alone.argmax.masked_fill(target == -100, 0))
        assert torch.equal(found.is_top1, (alone.argmax == target) & (target != -100))
    found = linear_logprob(hidden, same[here.rank :], target, outputs=("argmax",), tp_group=here.group)
    assert torch.equal(found.argmax == -1, target != -100)


def numbers_that_differ(here: Rank) -> None:
    """CUTE_LCE_CHECK_RANKS=1: before a gather that only some ranks would make."""
    given = operands(here, torch.float32, 8 * here.ranks)
    shard = slice_of(given["linear_weight"], here, 0)
    with mock.patch.object(environment, "CHECK_RANKS", True):
        hidden, target, temperature = (
            slice_of(given[name], here, 1).contiguous() for name in ("input", "target", "temperature")
        )
        call: dict[str, Any] = {"outputs": ("entropy",), "tp_group": here.group, "sequence_dim": 1}
        with pytest.raises(ValueError, match="differ in outputs, entropy_grad and temperature"):
            linear_logprob(hidden, shard, target, temperature=0.5 if here.rank else temperature, **call)
        linear_logprob(hidden, shard, target, temperature=temperature, **call)
        other = temperature.double() if here.rank else temperature.float()
        with pytest.raises(ValueError, match="differ in temperature's shape and dtype"):
            linear_logprob(hidden, shard, target, temperature=other, **call)
        if here.device == "cpu":
            run = torch.compile(linear_logprob, backend="aot_eager", fullgraph=True)
            run(hidden, shard, target, temperature=temperature, **call)
        with pytest.raises(ValueError, match=r"^target: got a slice under torch.func's grad"):
            torch.func.grad(lambda each: linear_logprob(each, shard, target, **call).entropy.sum())(hidden)
        call = {"outputs": ("topk_logprob",), "tp_group": here.group}
        with pytest.raises(ValueError, match="differ in topk_ids's values"):
            linear_logprob(
                given["input"], shard, given["target"], topk_ids=given["topk_ids"] + here.rank, **call
            )


def captured_numbers(here: Rank) -> None:
    """What is a call of the loss, and every number; on GPUs alone."""
    ids = torch.arange(64 * here.ranks, device=here.device)[:, None] * torch.tensor(
        [7, 3], device=here.device
    )
    every: dict[str, Any] = {"outputs": NUMBERS, "topk_ids": ids % (128 * here.ranks)}
    cases: tuple[dict[str, Any], ...] = (
        {"temperature": 0.7},
        {"outputs": ("logprob", "entropy")},
        {"outputs": ("logprob", "entropy"), "schedule": "keep", "workspace_mb": 64},
        every,
        {**every, "sequence_dim": 0},
    )
    for options in cases:

        def call(*operands: Tensor, options: dict = options) -> list[Tensor]:
            found = linear_logprob(*operands, tp_group=here.group, **options)
            return [getattr(found, name) for name in options.get("outputs", ("logprob",))]

        check_replays(here, call, sliced="sequence_dim" in options)


GPU_CASES = (captured_numbers,)
CASES = (
    every_number,
    numbers_of_slices,
    plain_slices,
    numbers_in_one_graph,
    ties_and_unequal_shards,
    numbers_that_differ,
)
