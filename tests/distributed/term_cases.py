"""Cases of a loss's terms over a group, for any number of ranks and for CPUs as for GPUs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cute_lce import environment, linear_cross_entropy, reference
from tests.distributed.calls import slice_of
from tests.distributed.ranks import Rank
from tests.logit_terms import Knee, LogCap
from tests.numerics import assert_close, random_case

SHAPE, D = (4, 24), 32
TOKENS = SHAPE[0] * SHAPE[1]
REDUCTIONS = ("mean", "sum", "none")


def operands(here: Rank, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(input, linear_weight, linear_bias, target, token_weight, weight) of the whole, some rows ignored."""
    V = 48 * here.ranks
    case = random_case(TOKENS, D, V, dtype, scale=2.0)
    case.target[[1, 10, 23]] = -100
    tensors = (
        case.input.view(*SHAPE, D),
        case.linear_weight,
        torch.linspace(-1, 1, V).to(dtype),
        case.target.view(SHAPE),
        torch.linspace(0, 2, TOKENS).view(SHAPE),
        torch.linspace(0.1, 3, V),
    )
    return tuple(each.to(here.device) for each in tensors)


def whole(tensors: tuple[Tensor, ...], kind: torch.dtype, reduction: str, terms: dict, upstream: Tensor):
    """By the reference: (loss, dinput, dlinear_weight, and with a bias dlinear_bias)."""
    hidden, weight, bias, target, token_weight, class_weight = tensors
    given = dict(terms)
    if "weight" in given:
        given["weight"] = class_weight.to(kind)
    if "linear_bias" in given:
        given["linear_bias"] = bias.to(kind)
    if "token_weight" in given:
        given["token_weight"] = token_weight.to(kind)
    return reference.gradients(
        hidden.to(kind), weight.to(kind), target, upstream.to(kind), reduction=reduction, **given
    )


def compare(
    here: Rank,
    dtype: torch.dtype,
    reduction: str,
    terms: dict,
    *,
    sliced_target: bool = False,
    **options: Any,
) -> None:
    """sliced_target: what is of each token is a slice too, as input is."""
    tensors = operands(here, dtype)
    hidden, weight, bias, target, token_weight, class_weight = tensors
    dim = options.get("sequence_dim")

    def own(each: Tensor) -> Tensor:
        return each if dim is None else slice_of(each, here, dim)

    def of_tokens(each: Tensor) -> Tensor:
        return own(each).clone() if sliced_target else each

    def of_classes(each: Tensor) -> Tensor:
        return slice_of(each, here, 0).clone()

    leaves = [own(hidden).clone().requires_grad_(), of_classes(weight).requires_grad_()]
    given = dict(terms)
    if "linear_bias" in given:
        given["linear_bias"] = of_classes(bias).requires_grad_()
        leaves.append(given["linear_bias"])
    if "token_weight" in given:
        given["token_weight"] = of_tokens(token_weight)
    if "weight" in given:
        given["weight"] = of_classes(class_weight)
    if options.get("grad_weight_out"):
        options["grad_weight_out"] = torch.ones_like(leaves[1], dtype=torch.float32, requires_grad=False)
    upstream = torch.linspace(-1, 2, TOKENS, device=here.device).view(SHAPE)
    upstream = upstream if reduction == "none" else upstream.mean()
    loss = linear_cross_entropy(
        leaves[0], leaves[1], of_tokens(target), reduction=reduction, tp_group=here.group, **given, **options
    )
    dloss = of_tokens(upstream) if reduction == "none" else upstream
    gradients = list(torch.autograd.grad(loss, leaves, dloss.to(loss.dtype), allow_unused=True))
    if "grad_weight_out" in options:
        assert gradients[1] is None
        gradients[1] = options["grad_weight_out"] - 1
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    want, plain = (whole(tensors, kind, reduction, terms, upstream) for kind in (torch.float64, wide))
    if reduction == "none":
        want, plain = ((of_tokens(each[0]), *each[1:]) for each in (want, plain))
    if reduction != "none" or not sliced_target:
        assert here.is_same(loss.detach())
    assert_close("loss", loss.detach(), want[0], plain[0])
    rounding = 2.0**-8 if loss.is_cuda and dtype is torch.bfloat16 else 0.0
    for index, (got, exact, other) in enumerate(zip(gradients, want[1:], plain[1:], strict=True)):
        part = own if index == 0 else lambda each: slice_of(each, here, 0)
        assert got is not None
        assert_close(f"gradient {index}", got, part(exact), part(other).to(dtype), rounding=rounding)


def factors_of_rows(here: Rank) -> None:
    """What the kernels serve where there are any; a denominator as a number and as a tensor."""
    for reduction in REDUCTIONS:
        for dtype in here.dtypes:
            for terms in ({"token_weight": True, "denominator": 17.0}, {"denominator": 17}):
                compare(here, dtype, reduction, terms)
        terms = {"token_weight": True, "logit_scale": 0.5}
        compare(here, torch.float32, reduction, terms, schedule="keep", workspace_mb=64)
        denominator = torch.tensor(11.0, device=here.device)
        compare(here, torch.float32, reduction, {"denominator": denominator}, sequence_dim=1)
        if SHAPE[0] % here.ranks == 0:
            compare(here, torch.float32, reduction, {"token_weight": True}, sequence_dim=0)


def terms_of_numbers(here: Rank) -> None:
    every = {"linear_bias": True, "softcap": 5.0, "z_loss": 0.1, "token_weight": True, "denominator": 9.0}
    for dtype in here.dtypes:
        for reduction in REDUCTIONS:
            compare(here, dtype, reduction, every, window=16)
    for name in ("linear_bias", "softcap", "z_loss"):
        compare(here, torch.float32, "mean", {name: every[name]})
    kept = {"linear_bias": True, "z_loss": 0.1, "token_weight": True}
    compare(here, torch.bfloat16, "mean", kept, schedule="keep", workspace_mb=64)


def terms_of_a_users_own(here: Rank) -> None:
    for dtype in here.dtypes:
        for reduction in REDUCTIONS:
            compare(here, dtype, reduction, {"softcap": LogCap(3.0)}, window=16)
    every = {"softcap": Knee(1.0), "linear_bias": True, "z_loss": 0.1, "token_weight": True, "weight": True}
    for dtype in here.dtypes:
        compare(here, dtype, "mean", every, sequence_dim=1, sliced_target=True)
    compare(here, torch.bfloat16, "none", {"softcap": LogCap(3.0)}, schedule="keep", workspace_mb=64)


def terms_of_classes(here: Rank) -> None:
    """Class weights and smoothing: what each rank has of the targets' weights, and of all classes."""
    for reduction in REDUCTIONS:
        compare(here, torch.float32, reduction, {"weight": True})
        for dtype in here.dtypes:
            every = {"weight": True, "label_smoothing": 0.2, "linear_bias": True, "z_loss": 0.1}
            compare(here, dtype, reduction, every, window=16)
    for dtype in here.dtypes:
        compare(here, dtype, "mean", {"label_smoothing": 0.3})
        compare(here, dtype, "mean", {"weight": True, "z_loss": 0.1}, schedule="keep", workspace_mb=64)
    compare(here, torch.bfloat16, "sum", {"label_smoothing": 0.3}, schedule="keep", workspace_mb=64)


def terms_of_slices(here: Rank) -> None:
    every = {"linear_bias": True, "z_loss": 0.1, "token_weight": True, "weight": True, "label_smoothing": 0.1}
    for reduction in REDUCTIONS:
        for sliced_target in (False, True):
            compare(here, torch.bfloat16, reduction, every, sequence_dim=1, sliced_target=sliced_target)
            factors = {"token_weight": True, "weight": True}
            dim = 1 if SHAPE[0] % here.ranks else 0
            compare(here, torch.float32, reduction, factors, sequence_dim=dim, sliced_target=sliced_target)


def terms_added_to_a_buffer(here: Rank) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        compare(here, dtype, "sum", {"z_loss": 0.1, "linear_bias": True}, grad_weight_out=True)
    compare(here, torch.float32, "sum", {"weight": True}, grad_weight_out=True, sequence_dim=1)


def terms_in_one_graph(here: Rank) -> None:
    """Of slices of tokens: what changes a token's factor alone, and what is made of numbers of each token."""
    hidden, weight, bias, target, token_weight, class_weight = operands(here, torch.float32)
    leaves = [
        slice_of(hidden, here, 1).clone(),
        *(slice_of(each, here, 0).clone() for each in (weight, bias)),
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    weights = {"token_weight": token_weight, "weight": slice_of(class_weight, here, 0)}

    def run(hidden: Tensor, shard: Tensor, bias: Tensor | None, **terms: Any) -> Tensor:
        call: dict[str, Any] = {"linear_bias": bias, "tp_group": here.group, "sequence_dim": 1, **terms}
        return linear_cross_entropy(hidden * 1.0, shard, target, **call)

    backend = "inductor" if here.device != "cpu" else "aot_eager"
    compiled: list[Any] = [run, torch.compile(run, fullgraph=True, backend=backend, dynamic=False)]
    cases: tuple[tuple[int, dict[str, Any]], ...] = (
        (2, weights),
        (3, {**weights, "label_smoothing": 0.1, "z_loss": 0.1, "softcap": 9.0, "denominator": 7.0}),
        (3, {"label_smoothing": 0.1, "reduction": "none", "schedule": "keep", "workspace_mb": 64}),
        (2, {"softcap": LogCap(3.0)}),
    )
    for count, terms in cases:
        found = []
        for function in compiled:
            loss = function(*leaves[:2], leaves[2] if count == 3 else None, **terms)
            found.append((loss.detach(), *torch.autograd.grad(loss.sum(), leaves[:count])))
        for eager, graph in zip(*found, strict=True):
            torch.testing.assert_close(graph, eager)


def terms_that_are_refused(here: Rank) -> None:
    hidden, weight, _, target, token_weight, _ = operands(here, torch.float32)
    shard = slice_of(weight, here, 0).clone().requires_grad_()
    for name, options in (
        ("weight", {"weight": torch.ones(48 * here.ranks, device=here.device)}),
        ("token_weight", {"token_weight": token_weight[:1]}),
        ("denominator", {"denominator": -1.0}),
        ("softcap", {"softcap": -1.0}),
        ("schedule", {"softcap": 1.0, "schedule": "grad_in_forward"}),
        ("schedule", {"denominator": 2.0, "schedule": "grad_in_forward"}),
    ):
        given: dict[str, Any] = options
        with pytest.raises(ValueError, match=f"^{name}: got"):
            linear_cross_entropy(hidden, shard, target, tp_group=here.group, **given)


def weights_of_targets_in_no_shard(here: Rank) -> None:
    """nan, although nothing is left to divide by."""
    hidden, weight, _, target, _, class_weight = operands(here, torch.float32)
    shard, own = slice_of(weight, here, 0).clone().requires_grad_(), slice_of(class_weight, here, 0)
    choices: tuple[dict[str, Any], ...] = ({}, {"z_loss": 0.1})
    for options in choices:
        nowhere = torch.full_like(target, 10**6)
        loss = linear_cross_entropy(hidden, shard, nowhere, tp_group=here.group, weight=own, **options)
        assert loss.isnan()
        ignored = torch.full_like(target, -100)
        loss = linear_cross_entropy(hidden, shard, ignored, tp_group=here.group, weight=own, **options)
        assert loss == 0


def terms_that_differ(here: Rank) -> None:
    """CUTE_LCE_CHECK_RANKS=1: the same error on every rank, before a collective that one would not make."""
    hidden, weight, _, target, token_weight, class_weight = operands(here, torch.float32)
    shard, own = slice_of(weight, here, 0), slice_of(class_weight, here, 0)
    with mock.patch.object(environment, "CHECK_RANKS", True):
        for name, given in (
            ("token_weight's values", {"token_weight": token_weight + here.rank}),
            ("denominator's values", {"denominator": 2.0 + here.rank}),
            ("terms", {"weight": None if here.rank else own, "z_loss": 0.1}),
            ("terms", {"z_loss": 0.0 if here.rank else 0.1}),
            ("terms", {"weight": None if here.rank else own}),
        ):
            options: dict[str, Any] = given
            with pytest.raises(ValueError, match=f"differ in {name}"):
                linear_cross_entropy(hidden, shard, target, tp_group=here.group, **options)
        given = {"token_weight": token_weight, "weight": own, "z_loss": 0.1}
        linear_cross_entropy(hidden, shard, target, tp_group=here.group, **given)
        if here.device == "cpu":
            run = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
            run(hidden, shard, target, tp_group=here.group, **given)
        # Of slices each rank has its own.
        slices = (slice_of(each, here, 1) for each in (hidden, target, token_weight))
        hidden, target, given["token_weight"] = (each.contiguous() for each in slices)
        linear_cross_entropy(hidden, shard, target, tp_group=here.group, sequence_dim=1, **given)


CASES = (
    weights_of_targets_in_no_shard,
    terms_that_differ,
    factors_of_rows,
    terms_of_numbers,
    terms_of_a_users_own,
    terms_of_classes,
    terms_of_slices,
    terms_added_to_a_buffer,
    terms_in_one_graph,
    terms_that_are_refused,
)
