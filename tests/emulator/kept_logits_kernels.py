"""The kernel that makes dlogits of kept logits, which both architectures share, as subjects of mutations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from cute_lce.plan.kernels import BackwardKey

from .backward_kernels import FIRST_OF_VALID, poisoned
from .host import Emulated
from .mutate import ARITHMETIC
from .mutation_kernels import Subject

if TYPE_CHECKING:
    from tests.emulated.token_stats import Numbers, Run

VOCAB, WINDOW = 201, 128


@contextlib.contextmanager
def narrow() -> Iterator[None]:
    """Narrow tiles, and what nobody writes is nan."""
    from tests.device import forget_plans
    from tests.emulated.backward import narrow_plans

    with pytest.MonkeyPatch.context() as patch, poisoned():
        narrow_plans(patch)
        yield
    forget_plans()


@functools.cache
def _numbers(which: str) -> Numbers:
    """test_kept_logits' loss of this name. A thread computes sixteen classes of four tokens at once: each of
    these classes is the target of each of these tokens several times, with an upstream gradient and without.
    """
    from tests.emulated.test_kept_logits import losses
    from tests.emulated.token_stats import given_ids
    from tests.numerics import random_case

    n = 115
    case = random_case(n, 72, VOCAB, torch.bfloat16, scale=4.0)
    ignored = torch.arange(n) % 7 == 3
    computed = (~ignored).cumsum(0) - 1
    target = (computed // 4 % 8 + 8 * (computed % 23)).masked_fill(ignored, -100)
    case = replace(case, target=target, ignore_index=-100)
    numbers = replace(losses()[which], case=case)
    if numbers.topk_ids is not None:
        numbers = replace(numbers, topk_ids=given_ids(case, 40))
    if isinstance(numbers.temperature, torch.Tensor):
        numbers = replace(numbers, temperature=torch.linspace(0.3, 3, n).masked_fill(ignored, torch.nan))
    return numbers


@functools.cache
def _expected(which: str) -> Run:
    """Of the kernel as it is, right by what the tests ask."""
    from tests.emulated.test_kept_logits import run
    from tests.emulated.token_stats import check

    numbers = _numbers(which)
    with narrow():
        found = run(numbers, "sm_90a", VOCAB, window=WINDOW)
    check(numbers, found)
    return found


def _gradients(which: str, seed: int) -> tuple[Tensor | None, ...]:
    """Of what the unchanged forward kept."""
    from tests.emulated.token_stats import run

    numbers, stats = _numbers(which), _expected(which).stats
    with narrow():
        found = run(numbers, "sm_90a", stats=stats, kept_columns=VOCAB, window=WINDOW, seed=seed)
    return found.gradients


def kernels_of(run: Callable[[], Run], kind: type) -> Callable[[str], Emulated]:
    """How a Subject builds those of the one key of a kind that a run has asked for."""

    def build(folder: str) -> Emulated:
        from tests.emulated.forward import emulated

        (key,) = (key for key in run().emulator.keys if isinstance(key, kind))
        return emulated(key)

    return build


def _check(which: str) -> Callable[[Emulated, int], bool]:
    def check(program: Emulated, seed: int) -> bool:
        """Whether gradients have the bits of the kernel's as it is."""
        pairs = zip(_gradients(which, seed), _expected(which).gradients, strict=True)
        return all(a is None or b is None or torch.equal(a, b) for a, b in pairs)

    return check


EVERY_TOKEN = (
    r"setp\.eq\.b64 .*, 0$",
    "reversed",
    "Every token is computed, also those past the last valid one, whose dlogits nobody reads.",
)
ONE_MORE = (
    r"setp\.(?:ge|lt)\.s32 \S+ %r\d+, %r\d+$",
    "equal",
    "One token or one given id more is looked at, which is another block's or lies past the last one.",
)
NEVER_NEGATIVE = (
    r"setp\.(?:ne\.b32 \S+ %r\d+, %r\d+|lt\.s32 \S+ %r\d+, 0)$",
    "reversed|or equal",
    "Part of a division that rounds down; the number is never negative.",
)
THE_LARGEST = (
    r"setp\.le\.f32 .*, 0f477FE000",
    "not equal",
    "Matters only to a row whose largest logit is exactly 65504.",
)


def subjects() -> list[Subject]:
    return [
        Subject(
            f"arithmetic of DlogitsOfKept, {which}",
            kernels_of(functools.partial(_expected, which), BackwardKey),
            *(_check(which), range(1), least, missed),
            [EVERY_TOKEN, ONE_MORE, FIRST_OF_VALID, NEVER_NEGATIVE, THE_LARGEST],
            entries=lambda entry: "DlogitsOfKept" in entry,
            rules=ARITHMETIC,
        )
        for which, least, missed in (("all at once", 550, 32), ("smoothing and class weights", 250, 13))
    ]
