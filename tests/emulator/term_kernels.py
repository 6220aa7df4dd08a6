"""What terms of the loss add to the kernels, as subjects of mutations of arithmetic: the statistics of a
forward's epilogue, and dlogits of an entropy.

An epilogue has the same statements for each column: every few of a GEMM's are altered.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cute_lce.plan.kernels import BackwardKey, ForwardKey

from .host import Emulated
from .kept_logits_kernels import kernels_of, narrow
from .mutate import ARITHMETIC
from .mutation_kernels import Subject

if TYPE_CHECKING:
    from cute_lce.implementation import Stats
    from tests.emulated.token_stats import Numbers, Run

TOKENS = 148
"""The valid ones fill two tiles but for one column, for which the second one's are looked at."""


ARRIVALS = (
    r"st\.global\.b32 \[%rd\d+\], 0$",
    "store removed",
    "Zeroes the counter of blocks that have added up losses, for a total that these calls do not ask for.",
)
EXACTLY_FOUR = (
    r"setp\.gt\.f32 .*, 0f40800000$",
    "or equal",
    "Matters only to a row that rises by four steps exactly.",
)


@dataclass(frozen=True)
class Call:
    """Which numbers of the tokens, and whether their gradients are computed."""

    which: str
    backward: bool = True
    vocab: int = 330
    window: int = 130
    high: int = 200

    @property
    def numbers(self) -> Numbers:
        """Of rows with equal classes, some of which rise in class `high`, by little or beyond what
        exponentials hold, and ignored ones. Each element of a thread is the target's logit of one."""
        from tests.emulated.token_stats import PLAIN, Numbers, repeating
        from tests.numerics import jumping, random_case

        case = repeating(random_case(TOKENS, 72, self.vocab, torch.bfloat16, scale=4.0))
        case = jumping(case, {self.high: 16.0}, slice(0, None, 5))
        case.input[10::15, 0] = 20
        valid = torch.arange(TOKENS) % 7 != 3
        # A thread has columns c and c + 1 of each 8, and of a tile's rows these and those 8, 64 and 72 below.
        own = torch.tensor([3, 11, 67, 75])[torch.arange(int(valid.sum())) % 8 // 2]
        case.target.fill_(case.ignore_index)[valid] = own
        if self.which == "numbers":
            temperature = torch.linspace(0.3, 3, TOKENS)
            return Numbers(case, ("logprob", "lse", "entropy", *PLAIN), temperature=temperature)
        assert self.which == "entropy"
        return Numbers(case, ("logprob", "entropy"), ("logprob", "entropy"), temperature=0.7)

    def run(self, seed: int = 0, stats: Stats | None = None) -> Run:
        from tests.emulated.token_stats import run

        with narrow():
            return run(
                *(self.numbers, "sm_90a"),
                window=self.window,
                seed=seed,
                need_dinput=self.backward,
                need_dweight=self.backward,
                stats=stats,
            )


@functools.cache
def _expected(call: Call) -> Run:
    """Of the kernels as they are, right by what the tests ask."""
    from tests.emulated.token_stats import check

    found = call.run()
    check(call.numbers, found)
    return found


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors have the same bits."""
    if a is None or b is None:
        return a is b
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _is_right(call: Call, kind: type, seed: int) -> bool:
    """Whether the numbers, or the gradients of numbers by the kernels as they are, have their bits."""
    expected = _expected(call)
    if kind is BackwardKey:
        pairs = zip(call.run(seed, expected.stats).gradients, expected.gradients, strict=True)
    else:
        pairs = zip(call.run(seed).stats, expected.stats, strict=True)
    return all(_same(*pair) for pair in pairs)


def _subject(
    name: str,
    calls: tuple[Call, ...],
    kind: type,
    entry: str,
    least: int,
    missed: int,
    every: int,
) -> Subject:
    """Of the kernels whose names have the regular expression `entry`. calls: all of the same kernels."""

    def check(program: Emulated, seed: int) -> bool:
        return all(_is_right(call, kind, seed) for call in calls)

    return Subject(
        f"arithmetic of {name}",
        kernels_of(functools.partial(_expected, calls[0]), kind),
        *(check, range(1), least, missed),
        [ARRIVALS, EXACTLY_FOUR],
        entries=lambda found: re.search(entry, found) is not None,
        rules=FLOATING,
        every=every,
    )


# Of a GEMM's kernel; its integers count tiles and slots.
FLOATING = [
    (
        re.sub(r"^(setp|selp)(.*?)\(\\S\*\)", r"\1\2(\\.f32)", pattern).replace("[fs]32", "f32"),
        what,
        replacement,
    )
    for pattern, what, replacement in ARITHMETIC
]


def subjects() -> list[Subject]:
    # Two tiles of a window for each warpgroup, too.
    numbers = Call("numbers", False), Call("numbers", False, vocab=1100, window=1024, high=600)
    entropy = (Call("entropy"),)
    return [
        _subject("the statistics of numbers", numbers, ForwardKey, "GemmSm90", 140, 2, every=8),
        _subject("dlogits of an entropy", entropy, BackwardKey, "GemmSm90.*_2$", 75, 0, every=8),
    ]
