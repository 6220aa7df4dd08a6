"""Cases of a loss's terms over a group, for any number of ranks and for CPUs as for GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_lce import linear_cross_entropy, reference
from tests.distributed.calls import slice_of
from tests.distributed.ranks import Rank
from tests.numerics import assert_close, random_case

SHAPE, D = (4, 24), 32
TOKENS = SHAPE[0] * SHAPE[1]
REDUCTIONS = ("mean", "sum", "none")


def operands(here: Rank, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(input, linear_weight, linear_bias, target, token_weight) of the whole, some rows ignored."""
    V = 48 * here.ranks
    case = random_case(TOKENS, D, V, dtype, scale=2.0)
    case.target[[1, 10, 23]] = -100
    tensors = (
        case.input.view(*SHAPE, D),
        case.linear_weight,
        torch.linspace(-1, 1, V).to(dtype),
        case.target.view(SHAPE),
        torch.linspace(0, 2, TOKENS).view(SHAPE),
    )
    return tuple(each.to(here.device) for each in tensors)


def whole(tensors: tuple[Tensor, ...], kind: torch.dtype, reduction: str, terms: dict, upstream: Tensor):
    """By the reference: (loss, dinput, dlinear_weight, and with a bias dlinear_bias)."""
    hidden, weight, bias, target, token_weight = tensors
    given = dict(terms)
    if "linear_bias" in given:
        given["linear_bias"] = bias.to(kind)
    if "token_weight" in given:
        given["token_weight"] = token_weight.to(kind)
    return reference.gradients(
        hidden.to(kind), weight.to(kind), target, upstream.to(kind), reduction=reduction, **given
    )


def compare(here: Rank, dtype: torch.dtype, reduction: str, terms: dict, **options: Any) -> None:
    tensors = operands(here, dtype)
    hidden, weight, bias, target, token_weight = tensors
    dim = options.get("sequence_dim")

    def own(each: Tensor) -> Tensor:
        return each if dim is None else slice_of(each, here, dim)

    leaves = [own(hidden).clone().requires_grad_(), slice_of(weight, here, 0).clone().requires_grad_()]
    given = dict(terms)
    if "linear_bias" in given:
        given["linear_bias"] = slice_of(bias, here, 0).clone().requires_grad_()
        leaves.append(given["linear_bias"])
    if "token_weight" in given:
        given["token_weight"] = token_weight
    upstream = torch.linspace(-1, 2, TOKENS, device=here.device).view(SHAPE)
    upstream = upstream if reduction == "none" else upstream.mean()
    loss = linear_cross_entropy(
        leaves[0], leaves[1], target, reduction=reduction, tp_group=here.group, **given, **options
    )
    found = loss.detach(), *torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    want, plain = (whole(tensors, kind, reduction, terms, upstream) for kind in (torch.float64, wide))
    assert here.is_same(loss.detach())
    assert_close("loss", found[0], want[0], plain[0])
    rounding = 2.0**-8 if loss.is_cuda and dtype is torch.bfloat16 else 0.0
    for index, (got, exact, other) in enumerate(zip(found[1:], want[1:], plain[1:], strict=True)):
        part = own if index == 0 else lambda each: slice_of(each, here, 0)
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


def terms_that_are_refused(here: Rank) -> None:
    hidden, weight, _, target, token_weight = operands(here, torch.float32)
    shard = slice_of(weight, here, 0).clone().requires_grad_()
    for name, options in (
        ("label_smoothing", {"label_smoothing": 0.1}),
        ("weight", {"weight": torch.ones(48, device=here.device)}),
        ("sequence_dim", {"softcap": 5.0, "sequence_dim": 0}),
        ("grad_weight_out", {"z_loss": 0.1, "grad_weight_out": torch.zeros_like(shard, requires_grad=False)}),
        ("token_weight", {"token_weight": token_weight[:1]}),
        ("denominator", {"denominator": 0.0}),
        ("softcap", {"softcap": -1.0}),
        ("schedule", {"softcap": 1.0, "schedule": "grad_in_forward"}),
    ):
        given: dict[str, Any] = options
        with pytest.raises(ValueError, match=f"^{name}: got"):
            linear_cross_entropy(hidden, shard, target, tp_group=here.group, **given)
    sliced = [each.repeat(here.ranks, 1) for each in (target, token_weight)]
    with pytest.raises(ValueError, match=r"^token_weight: got one with a slice"):
        linear_cross_entropy(
            hidden, shard, target, tp_group=here.group, sequence_dim=0, token_weight=sliced[1][:4]
        )


CASES = (factors_of_rows, terms_of_numbers, terms_that_are_refused)
