"""How the backward obtains the logits: how many columns are kept, and how wide the other stripes are."""

from __future__ import annotations

from ..arguments import KEPT_TILE
from .memory import (
    backward_bytes,
    forward_bytes,
    note_bytes,
    refuse_workspace,
    usable,
    workspace_of,
)
from .problem import Limits, Problem, ceil_div

STRIPE_MULTIPLE = 256
"""Columns that are whole tiles in all three GEMMs."""
LEAST_STRIPE = 64
STRIPE_COLUMNS = 1400
"""What a stripe costs besides its GEMMs (reading and writing the fp32 sum of dinput), in columns of a logits
GEMM:
on an H100, 8 n d bytes at 2 TB/s take as long as n d times this many columns at 700 TFLOP/s.
The estimate is used for every architecture."""
LEAST_KEPT = 1 << 33
LEAST_KEPT_WEIGHT = 1 << 26
"""n d V and d V: where both are less, "auto" does not keep. Keeping takes longer than the logits' GEMM that
it saves, whose time is that of its arithmetic or of reading the weight."""


def choose(problem: Problem, schedule: str, limits: Limits) -> tuple[str, int]:
    """Decide among the kernels' schedules: ("recompute", 0) or ("keep", columns).

    schedule: "auto", "recompute" or "keep". "auto" keeps what the workspace holds, and recomputes small
    products. Raises ValueError naming the least workspace_mb for a smaller one.
    """
    n, _, vocab = problem.n, problem.d, problem.vocab
    if limits.workspace:
        least = forward_bytes(n)
        if problem.wants_gradient:
            columns = min(limits.window or LEAST_STRIPE, vocab)
            least = max(least, backward_bytes(problem, columns))
        if limits.workspace < least:
            raise refuse_workspace(schedule, limits.workspace, least)
    if (
        schedule == "recompute"
        or not problem.wants_gradient
        or n == 0
        or vocab < LEAST_STRIPE
        or (schedule == "auto" and problem.d * vocab < min(LEAST_KEPT_WEIGHT, LEAST_KEPT // n))
    ):
        return "recompute", 0
    kept = kept_columns(problem, limits)
    return ("keep", kept) if kept > 0 else ("recompute", 0)


def stripe_columns(problem: Problem, kept: int, limits: Limits) -> int:
    """Columns of a stripe that is not kept: limits.window, or what the workspace holds besides all else, but
    at least LEAST_STRIPE."""
    left = problem.vocab - kept
    if limits.window or not left:
        return min(limits.window, left)
    workspace = usable(workspace_of(problem, limits))
    if backward_bytes(problem, left, kept) <= workspace:
        return left
    columns = (workspace - backward_bytes(problem, 0, kept)) // (2 * max(problem.n, 1))
    multiple = STRIPE_MULTIPLE if columns >= STRIPE_MULTIPLE else LEAST_STRIPE
    return min(max(columns // multiple * multiple, LEAST_STRIPE), left)


def kept_columns(problem: Problem, limits: Limits) -> int:
    """Columns that a forward keeps: all of them if the workspace holds them, else as many whole tiles as
    leave room for stripes of the rest."""
    n, vocab = problem.n, problem.vocab
    workspace = usable(workspace_of(problem, limits))
    if backward_bytes(problem, 0, vocab) + forward_bytes(n) <= workspace:
        return vocab
    rest = backward_bytes(problem, 0, KEPT_TILE) + forward_bytes(n)
    # Columns that fit: two bytes per row each, and their share of the notes.
    fit = max((workspace - rest) * KEPT_TILE // ((2 * KEPT_TILE + note_bytes(KEPT_TILE)) * max(n, 1)), 0)
    # The alternative: keep nothing, and use the whole workspace for stripes.
    recomputed = stripe_columns(problem, 0, limits._replace(workspace=workspace))
    best, least = 0, vocab + ceil_div(vocab, recomputed) * STRIPE_COLUMNS
    # A wider stripe leaves less room to keep, but more stripes make more passes over dinput's sum.
    for tiles in (2, 4, 8, 16, 32, 64, 128, 256):
        stripe = limits.window or tiles * STRIPE_MULTIPLE
        kept = min(max(fit - stripe, 0), vocab - 1) // STRIPE_MULTIPLE * STRIPE_MULTIPLE
        cost = vocab - kept + ceil_div(vocab - kept, stripe) * STRIPE_COLUMNS
        if kept > 0 and cost < least:
            best, least = kept, cost
    return best
