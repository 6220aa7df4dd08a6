"""Bytes that the kernels' passes allocate beyond their results, and how much of a limit a plan may use."""

from __future__ import annotations

import decimal

from ..arguments import KEPT_TILE, NOTE_BYTES, UNIT
from .problem import KIB, MIB, Limits, Problem, ceil_div, round_up

DEFAULT_WORKSPACE = 1 << 30
"""What workspace_mb=None means, in bytes; raised if the schedule needs more."""
DEFAULT_STRIPE = 2048
"""Columns of a stripe that the default holds: a pass over the accumulator then costs a quarter of its
GEMMs (schedule.STRIPE_COLUMNS)."""
ROUNDING = 4 * MIB
"""The most by which torch's allocator rounds a call's few large blocks up: each by at most 1 MiB."""


def refuse_workspace(schedule: str, workspace: int, least: int) -> ValueError:
    """The error for a workspace smaller than the least that a schedule needs, in bytes."""
    # Rounded up, so that the printed number suffices.
    up = decimal.Context(prec=6, rounding=decimal.ROUND_CEILING)
    least_mb = up.divide(decimal.Decimal(int(least)), decimal.Decimal(MIB))
    return ValueError(
        f"workspace_mb: got {int(workspace) / MIB:.6g}, want at least {least_mb:f} "
        f"for schedule={schedule!r} with these shapes, dtype and window"
    )


def usable(workspace: int) -> int:
    """The part of a workspace that a plan may use; the allocator's rounding takes the rest."""
    return workspace - min(workspace // 8, ROUNDING)


def workspace_of(problem: Problem, limits: Limits) -> int:
    """Bytes that a call may allocate: limits.workspace, or the default, which holds a backward that
    recomputes in stripes of DEFAULT_STRIPE columns."""
    if limits.workspace:
        return limits.workspace
    return max(DEFAULT_WORKSPACE, backward_bytes(problem, min(DEFAULT_STRIPE, problem.vocab)) + ROUNDING)


def forward_bytes(n: int) -> int:
    """Bytes of workspace and statistics with which every forward can run: those of one window."""
    return 192 * n + 4 * KIB


def keep_workspace_bytes(n: int, kept: int) -> int:
    """Bytes of KeepOutputs.workspace: each row's reference and largest raise, and a note per unit."""
    return n * (8 + note_bytes(kept))


def note_bytes(kept: int) -> int:
    """Bytes of a token's notes."""
    return NOTE_BYTES * KEPT_TILE // UNIT * ceil_div(kept, KEPT_TILE)


def kept_bytes(n: int, kept: int) -> int:
    """Bytes of what a forward keeps: 16-bit exponentials in rows of a multiple of 8, and kept_scale."""
    return n * (2 * round_up(kept, 8) + 4)


def backward_bytes(problem: Problem, columns: int, kept: int = 0) -> int:
    """Bytes that a backward allocates beyond its results, and those that were kept for it.

    columns: of a stripe of dlogits; 0 where everything is kept. kept: columns that the forward kept.
    """
    n, d, vocab = problem.n, problem.d, problem.vocab
    total = 64 * n + 4 * KIB + 2 * n * round_up(columns, 8)
    if problem.need_dinput and (columns + kept < vocab or 0 < kept < vocab):
        total += 4 * n * d
    if kept:
        # The operand and the notes.
        total += 2 * n * round_up(kept, 8) + n * note_bytes(kept)
    if problem.need_dweight and (kept or problem.half):
        # The scaled copy of the hidden rows.
        total += 2 * n * d
    return total
