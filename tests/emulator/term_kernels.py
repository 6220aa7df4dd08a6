"""What terms of the loss add to the kernels, as subjects of mutations of arithmetic: the statistics of a
forward's epilogue, dlogits of an entropy, and the small kernels of what is kept of smoothing.

An epilogue has the same statements for each column: every few of a GEMM's are altered.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from cute_lce.launch import token_terms
from cute_lce.plan.kernels import BackwardKey, ForwardKey

from .host import Emulated
from .kept_logits_kernels import EVERY_TOKEN, NEVER_NEGATIVE, kernels_of, narrow
from .mutate import ARITHMETIC
from .mutation_kernels import Subject

if TYPE_CHECKING:
    from cute_lce.implementation import Stats
    from tests.emulated.token_stats import Numbers, Run

TOKENS = 148
"""The valid ones fill two tiles but for one column, for which the second one's are looked at."""

LOSS = ("logprob", "total_nll", "lse")
DOUBLE = [
    (r"add(\S*\.f64) (.*)", "subtracts", "sub{0} {1}"),
    (r"sub(\S*\.f64) (.*)", "adds", "add{0} {1}"),
    (r"mul\S*\.f64 ([^,]+), ([^,]+), (.*)", "second factor dropped", "mov.b64 {0}, {1}"),
    (r"fma\.rn\.f64 (.*), ([^,]+)", "addend dropped", "mul.f64 {0}"),
    (r"fma\.rn\.f64 ([^,]+), [^,]+, [^,]+, (.*)", "product dropped", "mov.b64 {0}, {1}"),
    (r"div\S*\.f64 ([^,]+), ([^,]+), (.*)", "divisor dropped", "mov.b64 {0}, {1}"),
    (r"neg\.f64 (.*)", "sign kept", "mov.b64 {0}"),
]

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
BOUND = (
    r"setp\.(?:ge|lt|le)\.s(?:32|64) \S+ %\w+, %\w+$",
    "equal",
    "No row, slab or column of these calls lies at the bound, or nothing is looked at behind it.",
)
COMPUTED = (
    r"max\.s32",
    "minimum",
    "Counts tokens that are computed, to a multiple of more than these calls have.",
)
SUMS = [
    BOUND,
    COMPUTED,
    NEVER_NEGATIVE,
    (
        r"add\.f(?:32|64)",
        "subtracts",
        "Adds rows that a slab of two has not, or more slabs at once than lie behind the kept classes.",
    ),
    (r"fma\.rn\.f32 .*, 0f00000000$", "addend dropped", "It is 0."),
    (
        r"(?:mul|div|setp\.gt)\.\S*f64",
        "dropped|equal",
        "Scales what tensor cores lost of a target's logit, less than a bit of these totals"
        " (test_corners_of_what_is_smoothed has offsets).",
    ),
    (
        "0f00800000|0f7F800000|0f34000000|0fBE055027|2139095039",
        "dropped|equal",
        "Part of the logarithm, for sums that these rows have not, or below its last bit.",
    ),
]
FACTORS = [
    BOUND,
    COMPUTED,
    EVERY_TOKEN,
    (r"setp\.gt\.f32 .*, 0f3F800000", "or equal", "No onehot's ratio is exactly 1."),
    (r"mul\.f32", "factor dropped", "That of a token's temperature: these calls have none."),
    (
        r"setp\.ne\.b32 \S+ %r\d+, 0$|st\.global\.b32 \[%rd\d+\], 0$",
        "reversed|store removed",
        "Zeroes the GEMMs' counters, which affect speed alone.",
    ),
]


@dataclass(frozen=True)
class Call:
    """Which numbers of the tokens, and whether their gradients are computed."""

    which: str
    backward: bool = True
    vocab: int = 330
    window: int = 130
    high: int = 200
    kept_columns: int = 0

    @property
    def numbers(self) -> Numbers:
        """Of rows with equal classes, some of which rise in class `high`, by little or beyond what
        exponentials hold, and ignored ones. Each element of a thread is the target's logit of one."""
        from tests.emulated.token_stats import PLAIN, Numbers, repeating
        from tests.numerics import jumping, random_case

        if "smoothing" in self.which:
            # More features than a warp has in flight, and more slabs of kept classes than one adds at once.
            few = random_case(21, 1032, self.vocab, torch.bfloat16, scale=4.0)
            few.target[3::7] = few.ignore_index
            bias = torch.linspace(-1, 2, self.vocab).bfloat16()
            scale = 0.7 if self.which.startswith("scaled") else 1.0
            terms: dict[str, Any] = {"linear_bias": bias, "logit_scale": scale}
            return Numbers(few, LOSS, label_smoothing=0.9, z_loss=0.02, **terms)
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

        numbers, needed = self.numbers, self.backward
        if "smoothing" in self.which:
            hidden = numbers.case.input.clone()
            hidden[numbers.case.target == numbers.case.ignore_index] = torch.nan
            numbers = replace(numbers, case=replace(numbers.case, input=hidden))
        with narrow(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(token_terms, "LEAST_SLAB", 2)
            return run(
                *(numbers, "sm_90a"),
                window=self.window,
                seed=seed,
                need_dinput=needed,
                need_dweight=needed,
                kept_columns=self.kept_columns,
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
    *,
    rules: list[tuple[str, str, str | None]] | None = None,
    reasons: Sequence[tuple[str, str, str]] = (ARRIVALS, EXACTLY_FOUR),
) -> Subject:
    """Of the kernels whose names have the regular expression `entry`. calls: all of the same kernels. rules:
    None: of floating-point numbers alone."""

    def check(program: Emulated, seed: int) -> bool:
        return all(_is_right(call, kind, seed) for call in calls)

    return Subject(
        f"arithmetic of {name}",
        kernels_of(functools.partial(_expected, calls[0]), kind),
        *(check, range(1), least, missed),
        list(reasons),
        entries=lambda found: re.search(entry, found) is not None,
        rules=FLOATING if rules is None else rules,
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
    smoothing = Call("smoothing", vocab=290, window=0, kept_columns=256)
    scaled = replace(smoothing, which="scaled smoothing")
    rules = [*ARITHMETIC, *DOUBLE]
    sums = "SlabSums|AddSlabs|TotalGaps"
    return [
        _subject("the statistics of numbers", numbers, ForwardKey, "GemmSm90", 140, 2, every=8),
        _subject("dlogits of an entropy", entropy, BackwardKey, "GemmSm90.*_2$", 75, 0, every=8),
        _subject(
            *("smoothing's sums", (smoothing,), ForwardKey, sums, 80, 20),
            every=8,
            rules=rules,
            reasons=SUMS,
        ),
        _subject(
            *("smoothing's factors", (scaled,), BackwardKey, "ScaleRows", 30, 9),
            every=3,
            rules=rules,
            reasons=FACTORS,
        ),
    ]
