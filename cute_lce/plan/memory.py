"""Bytes that the kernels' passes allocate beyond their results, and how much of a limit a plan may use."""

from __future__ import annotations

from ..arch import SLABS
from ..arguments import NOTE_BYTES, SUMMED_TOKENS, units
from .problem import KIB, MIB, Problem, ceil_div, round_up

DEFAULT_WORKSPACE = 2304 * MIB
"""What workspace_mb=None means, in bytes; raised if a call needs more."""
ROUNDING = 4 * MIB
"""The most by which torch's allocator rounds a call's few large blocks up: each by at most 1 MiB."""


class SmallWorkspace(ValueError):
    """A workspace smaller than the least, in bytes, that a schedule needs."""

    schedule: str
    workspace: int
    least: int


def refuse_workspace(schedule: str, workspace: int, least: int, heads: int = 1) -> SmallWorkspace:
    """The error. heads: the numbers are of how many heads' call."""
    import decimal  # A hundredth of what the package's import takes.

    # Rounded up, so that the printed number suffices.
    up = decimal.Context(prec=6, rounding=decimal.ROUND_CEILING)
    least_mb = up.divide(decimal.Decimal(int(least)), decimal.Decimal(MIB))
    error = SmallWorkspace(
        f"workspace_mb: got {int(workspace) / MIB:.6g}, want at least {least_mb:f} "
        f"for schedule={schedule!r} with these shapes, dtype and window"
        + (f" of {heads} heads" if heads > 1 else "")
    )
    error.schedule, error.workspace, error.least = schedule, int(workspace), least
    return error


def usable(workspace: int) -> int:
    """The part of a workspace that a plan may use; the allocator's rounding takes the rest."""
    return workspace - min(workspace // 8, ROUNDING)


def workspace_for(nbytes: int) -> int:
    """The least workspace of which `nbytes` are usable."""
    least = min(ceil_div(8 * nbytes, 7), nbytes + ROUNDING)
    return max(least - (usable(least - 1) >= nbytes), 0)


LEAST_COMPACTED = 1 << 38
"""Multiplications of a GEMM, n d V, from which a launch more is nothing: some 0.9 ms on an H200."""
LEAST_VOCAB = 16384
"""Classes from which a copy of the hidden states takes a percent or two of a GEMM, or less."""


def compacts(problem: Problem, kept: int) -> bool:
    """Whether a backward computes compacted tokens: where that pays, and where ignored rows would otherwise
    be read, since dweight's product in bfloat16 has hidden states that were not scaled."""
    n, d, vocab = problem.n, problem.d, problem.vocab
    unscaled = _has_recomputed(problem, kept)
    reads = not problem.half and unscaled and (problem.need_dweight or kept > 0)
    return reads or (vocab >= LEAST_VOCAB and n * d * vocab >= LEAST_COMPACTED)


def _has_recomputed(problem: Problem, kept: int) -> bool:
    """Whether dlogits of a backward are of logits, computed again or kept: not all are kept exponentials."""
    return kept < problem.vocab or problem.keeps_logits


MOST_COPIED = 64 * MIB
"""Bytes of hidden states that a call without gradients copies: it has no workspace of that size otherwise."""


def forward_compacts(problem: Problem, kept: int) -> bool:
    """Whether a forward does: as the backward does for which it keeps columns."""
    if not problem.wants_gradient and 2 * problem.n * problem.d > MOST_COPIED:
        return False
    if not kept:
        problem = problem._replace(keeps_logits=False)
    return compacts(problem, kept or problem.vocab)


def compaction_bytes(problem: Problem, *, copies: bool) -> int:
    """Bytes of a compaction; copies: of hidden states and values too."""
    return problem.n * (12 + (2 * problem.d + 12 if copies else 0)) + 2 * KIB


def forward_compaction_bytes(problem: Problem, kept: int) -> int:
    return compaction_bytes(problem, copies=True) if forward_compacts(problem, kept) else 0


def backward_compaction_bytes(problem: Problem, kept: int, *, summed: bool = False) -> int:
    """summed: whether dinput is a sum, which is rounded last."""
    if not compacts(problem, kept):
        return 0
    copies = _has_recomputed(problem, kept)
    beside = 2 * problem.n * problem.d if copies and copies_into_dinput(problem, summed=summed) else 0
    return compaction_bytes(problem, copies=copies) - beside


def copies_into_dinput(problem: Problem, *, summed: bool) -> bool:
    """Whether a backward copies compacted hidden states to where dinput will be, which is written last. A
    shard's is not: other ranks wait for it."""
    return problem.need_dinput and summed and not problem.shard


def window_bytes(n: int) -> int:
    """Bytes of statistics and of a forward's workspace with one window, without a compaction."""
    return 192 * n + 4 * KIB


def forward_bytes(problem: Problem, kept: int) -> int:
    """Bytes of workspace and statistics with which every forward can run, besides those for keeping."""
    return window_bytes(problem.n) + forward_compaction_bytes(problem, kept)


def keep_workspace_bytes(n: int, kept: int) -> int:
    """Bytes of KeepOutputs.workspace: each row's reference and largest raise, and a note per unit."""
    return n * (8 + note_bytes(kept))


def note_bytes(kept: int) -> int:
    """Bytes of a token's notes."""
    return NOTE_BYTES * units(kept)


def keeping_bytes(n: int, kept: int) -> int:
    """Bytes that keeping adds to a forward: 16-bit numbers in rows of a multiple of 8, kept_scale, and
    KeepOutputs.workspace."""
    return n * (2 * round_up(kept, 8) + 4) + keep_workspace_bytes(n, kept) if kept else 0


def dlogits_bytes(problem: Problem, tokens: int, columns: int) -> int:
    """Bytes of dlogits of so many tokens, and of their sums over the narrowest slabs of these."""
    sums = 4 * columns * ceil_div(tokens, min(SLABS)) if problem.need_dbias else 0
    return 2 * tokens * round_up(columns, 8) + sums


def kept_sums_bytes(problem: Problem, kept: int) -> int:
    """Bytes of the sums of what was kept over slabs of tokens."""
    return 4 * kept * ceil_div(problem.n, SUMMED_TOKENS) if problem.need_dbias else 0


def backward_bytes(problem: Problem, columns: int, kept: int = 0, splits: int = 1) -> int:
    """Bytes that a backward in one sweep allocates beyond its results, and those that were kept for it.

    columns: of a stripe of dlogits; 0 where none is computed. kept: columns that the forward kept.
    splits: of dhidden's k.
    """
    n, d, vocab = problem.n, problem.d, problem.vocab
    exponentials = 0 if problem.keeps_logits else kept
    # What is kept and is a stripe by itself.
    whole = 0 if problem.has_stripes_of_logits else kept
    several = columns + whole < vocab or 0 < whole < vocab
    summed = splits > 1 or several
    total = 64 * n + 4 * KIB + dlogits_bytes(problem, n, columns)
    # The gradient by a bias, before it is rounded.
    total += 4 * vocab if problem.need_dbias else 0
    total += backward_compaction_bytes(problem, kept, summed=summed)
    if problem.need_dinput and summed:
        total += 4 * n * d * splits
    elif problem.need_dinput and compacts(problem, kept):
        # dinput by compacted tokens.
        total += 2 * n * d
    if kept:
        # 16-bit numbers, the notes and sums.
        total += 2 * n * round_up(kept, 8) + n * note_bytes(kept) + kept_sums_bytes(problem, kept)
    if problem.need_dweight and (exponentials or problem.half):
        # The scaled copy of the hidden rows.
        total += 2 * n * d
    return total


def sweeps_bytes(problem: Problem, chunk: int, splits: int, columns: int) -> int:
    """Bytes that a backward in two sweeps allocates beyond its results.

    chunk: tokens whose dlogits exist at once while dinput is computed, with a sum for each of dhidden's
    `splits`. columns: of a stripe of dlogits while dweight is.
    """
    n, d = problem.n, problem.d
    dinput = dlogits_bytes(problem, chunk, problem.vocab)
    if splits > 1:
        dinput += 4 * chunk * d * splits
    elif compacts(problem, 0):
        # By compacted tokens.
        dinput += 2 * chunk * d
    without_dinput = problem._replace(need_dinput=False)
    return backward_bytes(without_dinput, 0) + max(dinput, dlogits_bytes(problem, n, columns))


def chunk_forward_bytes(problem: Problem, chunk: int) -> int:
    """Bytes that the forward of a chunk of tokens may take in grad_in_forward: it keeps all columns, and
    partials take at most a sixteenth of what it keeps."""
    return window_bytes(chunk) + keeping_bytes(chunk, problem.vocab) + chunk * problem.vocab // 8


def partials_in_rows(problem: Problem, chunk: int, partials: int) -> bool:
    """Whether the bytes of a chunk's partials lie in its rows of dinput's accumulator, behind the copy of its
    hidden states, until dinput's GEMM writes these."""
    return problem.need_dinput and partials <= 2 * chunk * problem.d


def chunk_bytes(problem: Problem, chunk: int, partials: int, splits: int) -> int:
    """Bytes of the workspace of a chunk: what it keeps, its factors, and in the same memory first what only
    its forward uses, `partials` bytes of it its plan's workspace, then its backward's scaled rows and sums of
    several splits of dhidden. Without dinput's accumulator also a copy of its hidden states."""
    of_forward = keep_workspace_bytes(chunk, problem.vocab)
    if not partials_in_rows(problem, chunk, partials):
        of_forward += partials
    if not problem.need_dinput:
        of_forward += 2 * chunk * problem.d
    sums = splits if problem.need_dinput and splits > 1 else 0
    of_backward = chunk * problem.d * (2 * problem.need_dweight + 4 * sums)
    return 2 * chunk * round_up(problem.vocab, 8) + max(of_forward, of_backward) + 64 * chunk + 4 * KIB


def accumulator_bytes(problem: Problem, chunks: int) -> int:
    """Bytes of what grad_in_forward allocates beside a chunk's workspace: both accumulators, the compaction,
    which is returned in part, each row's loss and statistics, and the chunks' counters."""
    n, d = problem.n, problem.d
    rows = problem.need_dinput * n + problem.need_dweight * problem.vocab
    return 4 * rows * d + 20 * n + 64 * chunks + 4 * KIB + compaction_bytes(problem, copies=False)


def grad_in_forward_bytes(problem: Problem, chunks: int, chunk: int) -> int:
    """Bytes that grad_in_forward allocates beyond its results with chunks of `chunk` bytes: the accumulators,
    and what a chunk takes beyond the gradients. These do not exist before the accumulators are whole, and of
    padded operands they have up to 7 features fewer."""
    rows = problem.need_dinput * problem.n + (problem.need_dweight and not problem.adds) * problem.vocab
    gradients = 2 * rows * max(problem.d - 7, 0)
    return accumulator_bytes(problem, chunks) + max(chunk - gradients, 0)
