"""A call's memory, schedule, windows and chunks. Integers may be symbolic."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..arguments import Operands
from ..implementation import Request, StatsOperands, StatsOptions
from ..logit_term import term_of
from ..plan.memory import DEFAULT_WORKSPACE, refuse_workspace
from ..plan.problem import MIB, Limits, Problem, ceil_div, round_up
from ..symbolic import holds, is_sure, is_symbolic, is_traced
from .products import ADDS_WIDE, accumulate_dtype, multiplies_narrow, sums_narrow

# Bytes of one window of logits in acc: few enough for a CPU's cache, and enough to fill a GPU.
CPU_LOGITS_BYTES = 8 * MIB
GPU_LOGITS_BYTES = 256 * MIB
# Bytes of a chunk of tokens times the whole vocabulary in grad_in_forward, which updates all of dW once per
# chunk: on a CPU and on a GPU.
_CPU_CHUNK_BYTES = 128 * MIB
_GPU_CHUNK_BYTES = 1024 * MIB
_WINDOW_MULTIPLE = 64
_LEAST_CHUNK = 16
# On tensor cores narrower windows and shorter chunks take more time for sums in memory and launches than for
# products: at least so many columns and so many multiplications in a window, so many tokens in a chunk.
_GPU_LEAST_COLUMNS = 2048
_GPU_LEAST_PRODUCTS = 10**11
_GPU_LEAST_CHUNK = 512
# Bytes a row of the (n,) vectors that are alive at once: statistics, targets, masks and temporaries.
ROW_BYTES = 128
# Windows of logits that are alive at once in token_stats.py: without numbers that need them twice and without
# slopes, one more for each of the two, with a LogitTerm. And vectors of the vocabulary's length.
_TERM_COPIES, _OWN_COPIES = 3, 9
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
        # The copy with a valid row in the place of ignored ones.
        fixed += n * d * dtype.itemsize + _TERM_VECTORS * problem.vocab * acc
    else:
        # Of the rows that are not ignored, or with a valid one in the place of others.
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
        fixed += n * d * acc * (2 if rounded and not ADDS_WIDE else 1)
    if problem.need_dweight and not rounded:
        fixed += n * d * acc
        column += d * acc if widened else 0
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
    # Those of the rows that are not ignored, or with others in the place of those that are.
    fixed += n * d * dtype.itemsize
    if device_type == "cpu":
        fixed += n * d * acc if problem.need_dinput else 0
    fixed += V * d * acc if problem.need_dweight else 0
    fixed += _TERM_VECTORS * V * acc if copies else 0
    token = max(copies, 1) * V * acc + (V * dtype.itemsize if rounded else 0) + 2 * d * acc + ROW_BYTES
    # A widened window of the weight, or a product that is to be added.
    has_window = narrow and not (rounded and ADDS_WIDE)
    return fixed, d * acc if has_window else 0, token


def _min(a: int, b: int) -> int:
    """min, without the guard that comparing symbolic integers makes."""
    return cast("int", torch.sym_min(a, b)) if _would_guard(a, b) else min(a, b)


def _max(a: int, b: int) -> int:
    return cast("int", torch.sym_max(a, b)) if _would_guard(a, b) else max(a, b)


def _would_guard(*sizes: int) -> bool:
    """Whether builtins would make a guard of these. Dynamo traces builtins without one."""
    return any(map(is_symbolic, sizes)) and not is_traced()


def _has_least(problem: Problem, dtype: torch.dtype, device_type: str) -> bool:
    """Whether narrow windows and short chunks would take much longer: of tensor cores' products."""
    return multiplies_narrow(device_type) and dtype.itemsize < 4 and problem.wants_gradient


def _least_window(problem: Problem, dtype: torch.dtype, window: int, device_type: str):
    """Columns of the narrowest window of a sweep."""
    if window or not _has_least(problem, dtype, device_type):
        return _min(window or _WINDOW_MULTIPLE, problem.vocab)
    columns = (
        ceil_div(_GPU_LEAST_PRODUCTS, _max(problem.n * problem.d * _WINDOW_MULTIPLE, 1)) * _WINDOW_MULTIPLE
    )
    return _min(_max(columns, _GPU_LEAST_COLUMNS), problem.vocab)


def _least_chunk(problem: Problem, dtype: torch.dtype, device_type: str):
    """Tokens of the shortest chunk."""
    if not _has_least(problem, dtype, device_type):
        return _min(_LEAST_CHUNK, problem.n)
    tokens = ceil_div(_GPU_LEAST_PRODUCTS, problem.vocab * problem.d * _WINDOW_MULTIPLE) * _WINDOW_MULTIPLE
    return _min(_max(tokens, _GPU_LEAST_CHUNK), problem.n)


def _least_of_chunks(problem: Problem, dtype: torch.dtype, device_type: str, window, copies: int = 0):
    """The least bytes of a workspace for grad_in_forward."""
    fixed, column, token = _chunk_costs(problem, dtype, device_type, copies)
    columns = _least_window(problem, dtype, window, device_type)
    return fixed + column * columns + token * _least_chunk(problem, dtype, device_type)


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

    "keep" keeps what fits into the workspace besides the windows. "auto" is "keep". Without a workspace it is
    "recompute" on a CPU in float32 and float64, which takes as long. With a frozen weight on a GPU it is
    "grad_in_forward" where a chunk fits. With a symbolic n the columns kept are an expression that may be 0,
    and no guard on n: an exported program has one graph for every n. Raises ValueError naming the least
    workspace_mb if the given one is too small, and naming schedule for "grad_in_forward" with a per-token
    upstream gradient and a weight that needs a gradient.
    """
    frozen = problem.need_dinput and not problem.need_dweight
    if schedule == "auto" and may_accumulate and frozen and device.type != "cpu" and not limits.window:
        least = _least_of_chunks(problem, dtype, device.type, limits.window)
        if least <= (limits.workspace or DEFAULT_WORKSPACE):
            schedule = "grad_in_forward"
    return _choose(problem, dtype, device, schedule, reduction, limits, copies=0)


def copies_of(options: StatsOptions) -> int:
    """Of a window's logits, that are alive at once."""
    if term_of(options.softcap) is not None:
        return _OWN_COPIES
    twice = {"entropy", "log_sum_sq_probs", "total_nll"}.intersection(options.outputs)
    return _TERM_COPIES + bool(twice) + (options.softcap is not None)


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
    if schedule == "auto" and (workspace or device.type != "cpu" or dtype.itemsize < 4):
        schedule = "keep"
    if schedule == "grad_in_forward" and problem.wants_gradient:
        if reduction == "none" and problem.need_dweight:
            raise ValueError(
                "schedule: got 'grad_in_forward' with reduction='none' and a linear_weight that needs a "
                "gradient, which it would compute before the upstream gradients are known; want reduction "
                "'mean' or 'sum', a frozen linear_weight, or another schedule"
            )
        if not copies and sums_narrow(device.type, dtype):
            # Sums over chunks want float32 products, which take longer than keeping everything does.
            whole = _bytes_with_dlogits(problem, dtype, limits)
            if is_sure(whole <= (workspace or DEFAULT_WORKSPACE)):
                return "keep", V
        if workspace:
            least = _least_of_chunks(problem, dtype, device.type, window, copies)
            if not holds(least <= workspace):
                raise refuse_workspace(schedule, workspace, least)
        return schedule, 0
    if not workspace and (schedule != "keep" or not problem.wants_gradient):
        return "recompute", 0
    fixed, column = _costs(problem, dtype, device.type, copies)
    least_window = _least_window(problem, dtype, window, device.type)
    least = fixed + column * least_window
    if workspace and not holds(least <= workspace):
        raise refuse_workspace(schedule, workspace, least)
    if schedule != "keep" or not problem.wants_gradient or (type(n) is int and n == 0):
        return "recompute", 0
    logits = _max(n, 1) * accumulate_dtype(dtype).itemsize
    if device.type != "cpu" and not window:
        # What is kept saves less time than wider windows do.
        least = fixed + column * _min(_max(GPU_LOGITS_BYTES // logits, least_window), V)
    kept = ((workspace or DEFAULT_WORKSPACE) - least) // logits
    # All of V, or whole windows; whether it is all is a number, 0 or 1, since a branch would be a guard.
    everything = _max(_min(kept - V + 1, 1), 0)
    kept = _min(kept, V) // _WINDOW_MULTIPLE * _WINDOW_MULTIPLE + everything * (V % _WINDOW_MULTIPLE)
    kept = _max(kept, 0)
    return ("recompute", 0) if type(kept) is int and kept == 0 else ("keep", kept)


def holds_dlogits(operands: Operands | StatsOperands, request: Request) -> bool:
    """Whether a CPU's backward holds the rounded dlogits of all columns, beside the kept logits of all. Each
    gradient is then one sum, which the CPU rounds once."""
    dtype, problem = operands.hidden.dtype, problem_of(operands, request)
    if request.kept_columns < problem.vocab or not sums_narrow(operands.hidden.device.type, dtype):
        return False
    workspace = request.limits.workspace or DEFAULT_WORKSPACE
    return not request.shard and _bytes_with_dlogits(problem, dtype, request.limits) <= workspace


def dlogits_columns(V: int) -> int:
    """Of a row of held dlogits: whole groups of the 64 elements that a CPU's matrix instructions read."""
    return round_up(V, 64)


def _bytes_with_dlogits(problem: Problem, dtype: torch.dtype, limits: Limits):
    """The least bytes of a workspace that holds all logits of a CPU and all rounded dlogits."""
    n, d, V = problem.n, problem.d, problem.vocab
    window = _least_window(problem, dtype, limits.window, "cpu")
    return n * (
        ROW_BYTES + d * (4 + dtype.itemsize) + 4 * window + V * 4 + dlogits_columns(V) * dtype.itemsize
    )


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
        if not copies and holds_dlogits(operands, request):
            spare -= problem.n * dlogits_columns(problem.vocab) * dtype.itemsize
        window = min(window, spare // max(column, 1)) // _WINDOW_MULTIPLE * _WINDOW_MULTIPLE
        window = max(window, _least_window(problem, dtype, 0, device_type), 1)
    parts = (0, request.kept_columns), (request.kept_columns, problem.vocab)
    return [
        each for start, end in parts for each in _ranges(start, end, window, even=not request.limits.window)
    ]


def _ranges(start: int, end: int, step: int, *, even: bool) -> list[tuple[int, int]]:
    """Half-open ranges of at most `step`, from start to end; even: of nearly equal lengths."""
    if even and end > start:
        step = min(step, round_up(ceil_div(end - start, ceil_div(end - start, step)), _WINDOW_MULTIPLE))
    return [(low, min(low + step, end)) for low in range(start, end, step)]


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
    dtype, device_type = operands.hidden.dtype, operands.hidden.device.type
    on_cpu, least = device_type == "cpu", _least_chunk(problem, dtype, device_type)
    fixed, column, token = _chunk_costs(problem, dtype, device_type, copies)
    if not window:
        # A window only bounds what 16-bit operands cost: the converted weight, or a product to be added.
        logits_bytes = CPU_LOGITS_BYTES if on_cpu else GPU_LOGITS_BYTES
        window = V if not column else max(logits_bytes // column, _WINDOW_MULTIPLE)
        if workspace and column:
            spare = workspace - fixed - token * least
            window = min(window, max(spare // column, _WINDOW_MULTIPLE))
        window = min(window, V)
    chunk = (_CPU_CHUNK_BYTES if on_cpu else _GPU_CHUNK_BYTES) // token
    if workspace:
        chunk = min(chunk, (workspace - fixed - column * window) // token)
    # Products over a number of tokens that is no multiple of 8 are slow on a GPU.
    multiple = 1 if on_cpu else _WINDOW_MULTIPLE
    chunk = max(chunk // multiple * multiple, least, 1)
    return _ranges(0, n, chunk, even=not on_cpu), _ranges(0, V, window, even=False)
