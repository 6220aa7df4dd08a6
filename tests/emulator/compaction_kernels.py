"""The compaction's kernels, which both architectures share, as subjects of mutations: all of their statements
that synchronise, compute or count."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .host import Emulated
from .mutate import ARITHMETIC, COUNTING, RULES
from .mutation_kernels import Subject


def _build(folder: str) -> Emulated:
    from tests.emulated.compaction import FEW_BLOCKS, program

    return program(torch.int64, "sm_90a", FEW_BLOCKS)


DIVISION = (
    r"shr\.(?:s32 .*, 31|u32 .*, (?:27|29|30))$|add\.s32 \S+ %r\d+, %r\d+$",
    "not shifted|subtracts",
    "Part of a division that rounds towards zero; the correction is 0 for numbers that are not negative.",
)
UNIFORM = (r"shfl\.sync\.idx", "a lane's own", "All lanes have the same number.")
UP = (r"setp\.gt\.s32 .*, -1$", "or equal", "Part of a division that rounds up; the number is not negative.")
RANGES = (
    r"and\.pred|shr\.u32 .*, 5$|and\.b32 .*, -32$",
    "or|not shifted",
    "The blocks' ranges become longer, and the first blocks handle all tokens.",
)
AGAIN = (
    r"min\.s32|setp\.(?:ge|lt)\.s32 \S+ %r\d+, %r\d+$",
    "maximum|(?:not|or) equal",
    "A block also moves the tokens of later blocks, to the same places as those, or reads 32 past the last.",
)
ALL_HAVE_IT = (
    r"setp\.ne\.b32 .*, 0$|or\.b32",
    "reversed|and",
    "Other lanes, warps or blocks write the number instead; all have the same.",
)
BEHIND = (
    r"setp\.le\.s32",
    "not equal",
    "Sixteen bytes are copied past a row's end; the next row's copy comes later here and overwrites them.",
)

UNCOUNTED = (
    r"setp\.lt\.s32 \S+ %r1, %r28$",
    "or equal",
    "Counts where tokens are not compacted alone, when Copy is not launched.",
)


def _gathers(program: Emulated, seed: int) -> bool:
    """What tests/emulated/test_compaction.py asks of Gather, the shortest first."""
    from tests.emulated.compaction import Tokens, is_right, run
    from tests.emulated.test_compaction import CHUNKS, VALID, at_random

    everything = ("hidden", "values", "sums")
    calls = [
        (Tokens(at_random(160), 136), 0, None),
        *((Tokens(VALID[valid](160), 72), 0, None) for valid in ("none", "all", "the last", "a k tile")),
        *((Tokens(VALID["a k tile and one"](160), 72), first, tokens) for first, tokens in CHUNKS),
        *((Tokens(VALID["all but one"](40), d), 0, None) for d in (264, 520, 776, 1032, 2056)),
        *((Tokens(at_random(n), 8), 0, None) for n in (33, 97, 1)),
    ]
    for what, first, tokens in calls:
        if not is_right(what, run(what, first, tokens, seed=seed), first):
            return False
    # A thread counts a token of each 1024, eight at once: any of these may be the last one, and the first one
    # of a block, of which some handle more than 1024 tokens. If all are valid, full warps count the same, and
    # a shuffle that gives a lane its own hides; random ones differ.
    thousands = (600, 1100, 2300, 3300, 4200, 5400, 6300, 7400, 8300, 9600, 11100)
    more = [
        *((at_random(70), (name,)) for name in everything),
        *((VALID["all"](n), everything) for n in thousands),
        (at_random(3300), everything),
    ]
    for valid, without in more:
        what = Tokens(valid, 8)
        if not is_right(what, run(what, seed=seed, without=without), without=without):
            return False
    return True


def _copies(program: Emulated, seed: int) -> bool:
    """What it asks of Copy."""
    from tests.emulated.compaction import Tokens, compacted, equal, run
    from tests.emulated.test_compaction import CHUNKS, VALID

    calls = [
        *((Tokens(VALID[valid](160), 72), *chunk) for valid in ("none", "all", "random") for chunk in CHUNKS),
        *((Tokens(VALID["a k tile and one"](160), 72), *chunk) for chunk in CHUNKS),
        *((Tokens(VALID["all but one"](40), d), 0, 40) for d in (264, 520, 776, 1032, 2056)),
    ]
    for what, first, tokens in calls:
        copied = run(what, first, tokens, before=compacted(what), seed=seed)
        if not equal(copied.hidden, what.rows(first, tokens)):
            return False
    return True


def subjects() -> list[Subject]:
    rules = [*RULES, *ARITHMETIC, *COUNTING]
    reasons = [UNIFORM, DIVISION]

    def of(kernel: str) -> Callable[[str], bool]:
        return lambda entry: f"rows{kernel}" in entry

    return [
        Subject(
            "Gather",
            *(_build, _gathers, range(1), 250, 27),
            [*reasons, UP, RANGES, AGAIN, ALL_HAVE_IT, BEHIND],
            *(of("Gather"), rules),
        ),
        Subject("Copy", _build, _copies, range(1), 40, 5, [*reasons, UNCOUNTED], of("Copy"), rules),
    ]
