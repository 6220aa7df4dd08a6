"""The kernel that copies compacted tokens, which both architectures share, as a subject of mutations:
all of its statements that compute or count."""

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
    "Of a division that rounds towards zero, which adds 0 to numbers that are not negative.",
)
UNIFORM = (r"shfl\.sync\.idx", "a lane's own", "Of a number that all lanes have.")


def _copies(program: Emulated, seed: int) -> bool:
    """What tests/emulated/test_compaction.py asks of Copy."""
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
        Subject("Copy", _build, _copies, range(1), 40, 4, reasons, of("Copy"), rules),
    ]
