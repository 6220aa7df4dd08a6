"""A call's memory, schedule, windows and chunks. Integers may be symbolic."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..arguments import Operands
from ..implementation import Request, StatsOperands, StatsOptions
from ..logit_term import term_of
from ..plan.memory import DEFAULT_WORKSPACE, refuse_workspace
from ..plan.problem import MIB, Limits, Problem
from ..symbolic import holds
from .products import accumulate_dtype, multiplies_narrow

# Bytes of one window of logits in acc: few enough for a CPU's cache, and enough to fill a GPU.
CPU_LOGITS_BYTES = 8 * MIB
GPU_LOGITS_BYTES = 256 * MIB
# Bytes of a chunk of tokens times the whole vocabulary in grad_in_forward, which updates all of dW once per
# chunk.
_CHUNK_BYTES = 128 * MIB
_WINDOW_MULTIPLE = 64
_LEAST_CHUNK = 16
# Bytes a row of the (n,) vectors that are alive at once: statistics, targets, masks and temporaries.
ROW_BYTES = 128
# Windows of logits that are alive at once in token_stats.py, more with a LogitTerm, and vectors of the
# vocabulary's length.
_TERM_COPIES, _OWN_COPIES = 5, 9
_TERM_VECTORS = 4
# Bytes that CUDA's reductions over long rows allocate.
_REDUCTION_BYTES = 4 * MIB


def problem_of(operands: Operands | StatsOperands, request: Request) -> Problem:
    (n, d), V = operands.hidden.shape, operands.weight.shape[0]
    half = operands.hidden.dtype is torch.float16
    return Problem(n, d, V, half, request.need_dinput, request.need_dweight)


def _costs(problem: Problem, dtype: torch.dtype, device_type: str, copies: int = 0):
    """Bytes beyond the results of a sweep over windows: (fixed, for each column of a window).

    copies: of a window's logits that token_stats.py has alive at once; 0: not that.
    """
    n, d = problem.n, problem.d
    acc = accumulate_dtype(dtype).itemsize
    narrow = dtype.itemsize < acc
    rounded = narrow and multiplies_narrow(device_type)
    widened = narrow and not rounded
    fixed, column = ROW_BYTES * n + (_REDUCTION_BYTES if device_type == "cuda" else 0), n * acc
    if copies:
        column *= copies
        # The copy with zeros in ignored rows.
        fixed += n * d * dtype.itemsize + _TERM_VECTORS * problem.vocab * acc
    elif device_type == "cpu":
        # Of the rows that are not ignored.
        fixed += n * d * dtype.itemsize
    if device_type == "cpu" and problem.need_dinput and not narrow and not problem.need_dweight:
        # Their gradient, beside that of all rows; the scaled copy for dweight is gone by then.
        fixed += n * d * acc
    if widened:
        fixed += n * d * acc
        column += d * acc
    if rounded and problem.wants_gradient:
        column += n * dtype.itemsize
    if narrow and problem.need_dinput:
        fixed += n * d * acc * (2 if rounded else 1)
    if problem.need_dweight and not rounded:
        fixed += n * d * acc
        column += d * acc if widened else 0
    if problem.need_dweight and rounded and not problem.half and not copies:
        # A copy with zeros in ignored rows.
        fixed += n * d * dtype.itemsize
    if problem.need_dweight and rounded and not problem.half and copies:
        # A window of dweight that is not rounded yet.
        column += d * acc
    if problem.need_dweight and rounded and problem.half:
        fixed += n * d * (acc + dtype.itemsize)
        column += d * acc
    return fixed, column


def _chunk_costs(problem: Problem, dtype: torch.dtype, device_type: str, copies: int = 0):
    """Bytes of grad_in_forward beyond its loss: (fixed, each column of a window, each token of a chunk).

    copies: as in _costs.
    """
    n, d, V = problem.n, problem.d, problem.vocab
    acc = accumulate_dtype(dtype).itemsize
    narrow = dtype.itemsize < acc
    rounded = narrow and multiplies_narrow(device_type)
    fixed = ROW_BYTES * n + (n * d * acc if problem.need_dinput else 0)
    if device_type == "cpu":
        # Those of the rows that are not ignored.
        fixed += n * d * (dtype.itemsize + (acc if problem.need_dinput else 0))
    fixed += V * d * acc if problem.need_dweight else 0
    fixed += _TERM_VECTORS * V * acc if copies else 0
    token = max(copies, 1) * V * acc + (V * dtype.itemsize if rounded else 0) + 2 * d * acc + ROW_BYTES
    return fixed, d * acc if narrow else 0, token


def _min(a: int, b: int) -> int:
    """min, without the guard that comparing symbolic integers makes."""
    return cast("int", torch.sym_min(a, b))


def _max(a: int, b: int) -> int:
    return cast("int", torch.sym_max(a, b))


def _least_window(V, window):
    return _min(window or _WINDOW_MULTIPLE, V)


def choose(
    problem: Problem,
    dtype: torch.dtype,
    device: torch.device,
    schedule: str,
    reduction: str,
    limits: Limits,
    may_accumulate: bool = False,
) -> tuple[str, int]:
    """Decide the schedule and how many columns it keeps: (schedule, kept_columns).

    "keep" keeps what fits into the workspace besides the windows. "auto" is "keep" if the caller gives a
    workspace, else "recompute", which needs the least. With a symbolic n the columns kept are an expression
    that may come to 0, and no guard on n: an exported program has one graph for every n. Raises ValueError
    naming the least workspace_mb if the given one is too small, and naming schedule for "grad_in_forward"
    with a per-token upstream gradient and a weight that needs a gradient.
    """
    return _choose(problem, dtype, device, schedule, reduction, limits, copies=0)


def copies_of(options: StatsOptions) -> int:
    """Of a window's logits, that are alive at once."""
    return _TERM_COPIES if term_of(options.softcap) is None else _OWN_COPIES


def choose_with_terms(
    problem: Problem,
    operands: StatsOperands,
    options: StatsOptions,
    schedule: str,
    reduction: str,
    limits: Limits,
) -> tuple[str, int]:
    """The same for token_stats.py."""
    hidden = operands.hidden
    return _choose(problem, hidden.dtype, hidden.device, schedule, reduction, limits, copies_of(options))


def _choose(
    problem: Problem,
    dtype: torch.dtype,
    device: torch.device,
    schedule: str,
    reduction: str,
    limits: Limits,
    copies: int,
) -> tuple[str, int]:
    n, V = problem.n, problem.vocab
    window, workspace = limits
    if schedule == "auto" and workspace:
        schedule = "keep"
    if schedule == "grad_in_forward" and problem.wants_gradient:
        if reduction == "none" and problem.need_dweight:
            raise ValueError(
                "schedule: got 'grad_in_forward' with reduction='none' and a linear_weight that needs a "
                "gradient, which it would compute before the upstream gradients are known; want reduction "
                "'mean' or 'sum', a frozen linear_weight, or another schedule"
            )
        if workspace:
            fixed, column, token = _chunk_costs(problem, dtype, device.type, copies)
            least = fixed + column * _least_window(V, window) + token * _min(_LEAST_CHUNK, n)
            if not holds(least <= workspace):
                raise refuse_workspace(schedule, workspace, least)
        return schedule, 0
    if not workspace and (schedule != "keep" or not problem.wants_gradient):
        return "recompute", 0
    fixed, column = _costs(problem, dtype, device.type, copies)
    least = fixed + column * _least_window(V, window)
    if workspace and not holds(least <= workspace):
        raise refuse_workspace(schedule, workspace, least)
    if schedule != "keep" or not problem.wants_gradient or (type(n) is int and n == 0):
        return "recompute", 0
    kept = ((workspace or DEFAULT_WORKSPACE) - least) // (_max(n, 1) * accumulate_dtype(dtype).itemsize)
    # All of V, or whole windows; whether it is all is a number, 0 or 1, since a branch would be a guard.
    everything = _max(_min(kept - V + 1, 1), 0)
    kept = _min(kept, V) // _WINDOW_MULTIPLE * _WINDOW_MULTIPLE + everything * (V % _WINDOW_MULTIPLE)
    kept = _max(kept, 0)
    return ("recompute", 0) if type(kept) is int and kept == 0 else ("keep", kept)


def windows(operands: Operands | StatsOperands, request: Request, copies: int = 0) -> list[tuple[int, int]]:
    """The half-open ranges of the vocabulary of one sweep; none crosses the end of the kept columns."""
    problem = problem_of(operands, request)
    dtype, device_type = operands.hidden.dtype, operands.hidden.device.type
    window, workspace = request.limits
    if not window:
        logits = problem.n * accumulate_dtype(dtype).itemsize
        window = (CPU_LOGITS_BYTES if device_type == "cpu" else GPU_LOGITS_BYTES) // max(logits, 1)
        fixed, column = _costs(problem, dtype, device_type, copies)
        spare = (workspace or DEFAULT_WORKSPACE) - fixed - request.kept_columns * logits
        window = min(window, spare // max(column, 1))
        window = max(window // _WINDOW_MULTIPLE, 1) * _WINDOW_MULTIPLE
    return [
        (low, min(low + window, end))
        for start, end in ((0, request.kept_columns), (request.kept_columns, problem.vocab))
        for low in range(start, end, window)
    ]


def request_of_rows(request: Request, hidden: Tensor, rows: Tensor) -> Request:
    """The request for some rows of hidden alone; what is kept has memory for all of them."""
    unused = hidden.shape[0] - len(rows)
    window, workspace = request.limits
    if workspace:
        workspace -= unused * request.kept_columns * accumulate_dtype(hidden.dtype).itemsize
    return request._replace(limits=Limits(window, workspace))


def chunks(
    operands: Operands | StatsOperands, request: Request, copies: int = 0
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The chunks of tokens of grad_in_forward and its windows: two lists of half-open ranges."""
    problem = problem_of(operands, request)
    n, V = problem.n, problem.vocab
    window, workspace = request.limits
    on_cpu = operands.hidden.device.type == "cpu"
    fixed, column, token = _chunk_costs(problem, operands.hidden.dtype, operands.hidden.device.type, copies)
    if not window:
        # A window only bounds what 16-bit operands cost: the converted weight, or a product to be added.
        logits_bytes = CPU_LOGITS_BYTES if on_cpu else GPU_LOGITS_BYTES
        window = V if not column else max(logits_bytes // column, _WINDOW_MULTIPLE)
        if workspace:
            spare = workspace - fixed - token * min(_LEAST_CHUNK, n)
            window = min(window, max(spare // max(column, 1), _WINDOW_MULTIPLE))
        window = min(window, V)
    chunk = (_CHUNK_BYTES if on_cpu else GPU_LOGITS_BYTES) // token
    if workspace:
        chunk = min(chunk, (workspace - fixed - column * window) // token)
    chunk = max(chunk, _LEAST_CHUNK)
    return (
        [(low, min(low + chunk, n)) for low in range(0, n, chunk)],
        [(low, min(low + window, V)) for low in range(0, V, window)],
    )
