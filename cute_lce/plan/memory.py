"""Bytes that the kernels' passes allocate beyond their results, and what a budget leaves to fill."""

from __future__ import annotations

from .problem import Problem, ceil_div, round_up

KIB, MIB = 1 << 10, 1 << 20
DEFAULT_WORKSPACE = 1 << 30
"""What workspace_mb=None means, in bytes; raised where the schedule needs more."""
LEAST_UNIT = 64
"""Columns that share one note of what was raised, at least."""
NOTE_BYTES = 2


def refuse_workspace(schedule: str, workspace: int, least: int) -> ValueError:
    """The error for a workspace below the least bytes that a schedule needs."""
    least_mb = -(-int(least) * 1000 // MIB) / 1000
    return ValueError(
        f"workspace_mb: got {int(workspace) / MIB:.3f}, want at least {least_mb:.3f} "
        f"for schedule={schedule!r} with these shapes, dtype and window"
    )


def usable(workspace: int) -> int:
    """What of a workspace a plan may fill.

    torch's allocator takes up to 1 MiB more for each of a few large blocks.
    """
    return workspace - min(workspace // 8, 4 * MIB)


def forward_bytes(n: int) -> int:
    """The least bytes of workspace and statistics that every forward gets by with: one window."""
    return 128 * n + 4 * KIB


def note_bytes(n: int, kept: int) -> int:
    """Bytes of a keeping forward's notes: each row's reference and highest raise, and a raise a unit."""
    return n * (8 + NOTE_BYTES * ceil_div(kept, LEAST_UNIT))


def kept_bytes(n: int, kept: int) -> int:
    """Bytes of what a forward keeps: exponentials in bf16, rows of a multiple of 8, and a factor a row."""
    return n * (2 * round_up(kept, 8) + 4)


def backward_bytes(problem: Problem, columns: int, kept: int = 0) -> int:
    """Bytes that a backward allocates, or finds kept, beyond its results.

    columns: of a stripe of dlogits; 0 where everything is kept. kept: columns that the forward kept.
    """
    n, d, vocab = problem.n, problem.d, problem.vocab
    total = 64 * n + 4 * KIB + 2 * n * round_up(columns, 8)
    if problem.need_dinput and (columns + kept < vocab or 0 < kept < vocab):
        total += 4 * n * d
    if problem.half:
        total += 6 * n * d
    if kept:
        # The operand, the notes, and the scaled copy of the hidden rows.
        total += 2 * n * round_up(kept, 8) + NOTE_BYTES * n * ceil_div(kept, LEAST_UNIT)
        total += 2 * n * d if problem.need_dweight else 0
    return total
