"""Exponentials kept for numbers whose onehots' shares the forward does not know: the backward forms the
entries of the target and of given ids. Against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_lce.launch import token_stats as launch
from cute_lce.plan.kernels import BackwardKey, ForwardKey
from tests.emulated import token_stats
from tests.emulated.forward import ignoring
from tests.emulated.token_stats import CORNERS, TEMPERATURES, Numbers, given_ids
from tests.logit_terms import LogCap
from tests.numerics import random_case

BF16 = torch.bfloat16
full = pytest.mark.emulator_full
pytestmark = pytest.mark.usefixtures("poisoned_empty", "narrow")
hopper_first = pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=full)])
blackwell_first = pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=full), "sm_100a"])
BOTH, TOP = ("logprob", "lse"), ("logprob", "topk_logprob")


def run(numbers: Numbers, arch: str, kept: int, **options: Any) -> token_stats.Run:
    """Both passes, whose kernels keep exponentials."""
    assert launch.keeps_exponentials(numbers.operands, numbers.options)
    found = token_stats.run(numbers, arch, kept_columns=kept, **options)
    (forward,) = [key for key in found.emulator.keys if isinstance(key, ForwardKey)]
    (backward,) = [key for key in found.emulator.keys if isinstance(key, BackwardKey)]
    assert forward.keeps
    assert "kept_logits" not in (*forward.terms, *backward.terms)
    assert "entries" in backward.terms
    assert sum("Entries" in name for name in found.emulator.launched) == 2 - bool(options.get("overwrites"))
    return found


def ids_of(numbers: int = 9) -> torch.Tensor:
    """With the target among them, in half of the tokens twice; some are no classes."""
    case = losses_case()
    ids = given_ids(case, numbers)
    ids[:, 0] = case.target
    ids[::2, -1] = case.target[::2]
    return ids


def losses_case():
    return ignoring(random_case(21, 72, 201, BF16, scale=4.0))


def losses() -> dict[str, Numbers]:
    case, bias = losses_case(), torch.linspace(-3, 3, 201).to(BF16)
    ids = ids_of()
    return {
        "lse": Numbers(case, BOTH, BOTH, temperature=0.7),
        "lse alone": Numbers(case, ("lse",), ("lse",)),
        "numbers beside": Numbers(
            case,
            (*BOTH, "entropy", "argmax", "mean_logit"),
            BOTH,
            entropy_grad=False,
            temperature=TEMPERATURES,
        ),
        "ids": Numbers(case, TOP, TOP, topk_ids=ids, temperature=0.7),
        "ids alone": Numbers(case, ("topk_logprob",), ("topk_logprob",), topk_ids=ids_of(40)),
        "ids without a gradient": Numbers(case, TOP, ("logprob",), topk_ids=ids),
        "ids beside a target": Numbers(case, TOP, ("topk_logprob",), topk_ids=ids),
        "cap": Numbers(case, (*TOP, "lse"), (*TOP, "lse"), topk_ids=ids, softcap=5.0, logit_scale=-0.8),
        "own": Numbers(
            case, TOP, TOP, topk_ids=ids, softcap=LogCap(2.0).key, logit_scale=0.8, temperature=TEMPERATURES
        ),
        "all at once": Numbers(
            case,
            (*TOP, "lse", "argmax"),
            (*TOP, "lse"),
            topk_ids=ids_of(40),
            linear_bias=bias,
            softcap=5.0,
            temperature=TEMPERATURES,
        ),
    }


SHORT = ("all at once", 128, "sm_90a"), ("ids", 201, "sm_100a"), ("lse", 201, "sm_90a")


@pytest.mark.parametrize(
    ("which", "kept", "arch"),
    [
        pytest.param(*each, marks=[] if each in SHORT else [full])
        for each in itertools.product(losses(), (128, 201), ("sm_90a", "sm_100a"))
    ],
)
def test_losses(which, kept, arch):
    """Whether what was kept is restored or not."""
    numbers = losses()[which]
    found = run(numbers, arch, kept, overwrites=(kept == 128) == (arch == "sm_90a"))
    token_stats.check(numbers, found)
    for name, changed in (
        ("temperature", 0.72 if isinstance(numbers.temperature, float) else TEMPERATURES * 1.02),
        ("softcap", LogCap(2.2).key if which == "own" else 5.2),
    ):
        given = getattr(numbers, name)
        if isinstance(given, torch.Tensor) or given not in (None, 1.0):
            with pytest.raises(AssertionError):
                token_stats.check(replace(numbers, **{name: changed}), found)


@hopper_first
@pytest.mark.parametrize("overwrites", [False, True])
def test_the_entries_are_formed_again(arch, overwrites):
    """By the next backward, for other upstream gradients, from what the one before left."""
    case = losses_case()
    numbers = Numbers(case, TOP, TOP, topk_ids=ids_of())
    first = run(numbers, arch, 201, overwrites=overwrites)
    for names in (("logprob",), ("topk_logprob",), TOP):
        other = replace(numbers, differentiated=names)
        again = token_stats.run(other, arch, kept_columns=201, overwrites=overwrites, stats=first.stats)
        again.stats = first.stats
        token_stats.check(other, again)
        if names == TOP:
            for one, same in zip(first.gradients[:2], again.gradients[:2], strict=True):
                assert one is not None
                assert same is not None
                assert torch.equal(one, same)


@blackwell_first
@pytest.mark.parametrize("K", [1, 32, *(pytest.param(each, marks=full) for each in (31, 33, 64, 256))])
def test_rounds_of_ids(arch, K):
    """Equal ones in rounds of their own, the last of which is the target, too."""
    case = losses_case()
    ids = given_ids(case, max(K, 9))[:, :K].clone()
    ids[:, K - 1] = ids[:, 0]
    ids[::3, K - 1] = case.target[::3]
    numbers = Numbers(case, TOP, TOP, topk_ids=ids)
    token_stats.check(numbers, run(numbers, arch, 201))


@blackwell_first
@pytest.mark.parametrize("names", [BOTH, (*TOP, "lse")])
def test_no_share_of_the_softmax(arch, names):
    """Where upstream gradients cancel only the onehots' are left."""
    case = losses_case()
    topk = "topk_logprob" in names
    numbers = Cancelling(case, names, names, topk_ids=ids_of() if topk else None)
    token_stats.check(numbers, run(numbers, arch, 201))


class Cancelling(Numbers):
    @property
    def upstream(self) -> dict[str, torch.Tensor]:
        found = super().upstream
        lse = found["logprob"].clone()
        if self.topk_ids is not None:
            V, ids = len(self.case.linear_weight), self.topk_ids
            lse += torch.where((ids >= 0) & (ids < V), found["topk_logprob"], 0).sum(1)
        # Exactly in some rows, and nearly in others.
        return found | {"lse": lse + torch.where(torch.arange(len(lse)) % 2 == 0, 0.0, 1e-5)}


@hopper_first
@pytest.mark.parametrize("ignored", ["some", "none", "all", "all but one"])
def test_compacted_rows(arch, ignored, compacting):
    n = 150
    case = random_case(n, 72, 270, BF16, scale=3.0)
    at = torch.arange(n)
    where = {"some": at % 3 == 1, "none": at < 0, "all": at >= 0, "all but one": at != 77}[ignored]
    case = replace(case, target=torch.where(where, case.ignore_index or -100, case.target))
    numbers = Numbers(
        case, TOP, TOP, topk_ids=given_ids(case, 5), linear_bias=torch.linspace(-2, 2, 270).to(BF16)
    )
    poisoned = replace(case, input=case.input.masked_fill(where.unsqueeze(1), torch.nan))
    for kept in (270, 128):
        token_stats.check(numbers, run(replace(numbers, case=poisoned), arch, kept, overwrites=kept == 270))


@pytest.mark.parametrize(
    ("which", "arch"),
    [
        pytest.param(*each, marks=[] if each == ("rows that rise", "sm_90a") else full)
        for each in itertools.product(CORNERS, ("sm_90a", "sm_100a"))
    ],
)
def test_corners(which, arch):
    case = CORNERS[which]()
    numbers = Numbers(case, (*TOP, "lse"), (*TOP, "lse"), topk_ids=given_ids(case, 6))
    token_stats.check(numbers, run(numbers, arch, case.linear_weight.shape[0]))


@full
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@token_stats.each_need
def test_one_gradient_and_one_that_is_added(arch, needs):
    token_stats.check_needs(losses()["ids"], run, arch, 201, needs)
