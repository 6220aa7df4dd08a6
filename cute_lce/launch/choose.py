"""The schedule of a call on a device with kernels."""

from __future__ import annotations

import logging

import torch

from ..arch import Gpu
from ..plan import grad_in_forward
from ..plan import schedule as schedule_plan
from ..plan.problem import MIB, Limits, Problem
from ..streaming import STREAMING
from ..symbolic import is_known
from .device import gpu_of

_logger = logging.getLogger("cute_lce")
_logged: set[tuple] = set()


def choose(
    problem: Problem,
    dtype: torch.dtype,
    device: torch.device,
    schedule: str,
    reduction: str,
    limits: Limits,
    may_accumulate: bool = False,
) -> tuple[str, int]:
    """The plan's choice.

    With symbolic sizes it is the choice for those that a graph is traced with, and a number of columns that
    is right for others too. Of sizes that only the data knows nothing is kept.
    """
    gpu = gpu_of(device)
    sizes = problem.n, problem.d, problem.vocab
    if schedule == "grad_in_forward" and problem.wants_gradient:
        found = STREAMING.choose(problem, dtype, device, schedule, reduction, limits._replace(workspace=0))
        # Without a workspace nothing is compared.
        if limits.workspace and all(map(is_known, sizes)) and _known(problem.n):
            known, known_limits = _known_sizes(problem), Limits(*map(_known, limits))
            grad_in_forward.check_workspace(gpu, known, known_limits)
            predicted = grad_in_forward.predict(gpu, known, known_limits)
            _log_if_slow(gpu, known, schedule, known_limits, predicted, accumulates=True)
        return found
    if not all(map(is_known, sizes)):
        return "recompute", 0
    known, known_limits = _known_sizes(problem), Limits(*map(_known, limits))
    # Other schedules allocate the same.
    known = known._replace(adds=False)
    call = gpu, known, schedule, known_limits
    found, kept = schedule_plan.choose(*call)
    accumulates = schedule == "auto" and may_accumulate
    if accumulates and (reduction != "none" or not problem.need_dweight):
        predicted = grad_in_forward.predict_auto(gpu, known, known_limits)
        if predicted is not None:
            _log_if_slow(*call, predicted, accumulates=True)
            return "grad_in_forward", 0
    if known.n:
        _log_if_slow(*call, schedule_plan.predict(*call))
    if any(isinstance(size, torch.SymInt) for size in sizes):
        kept = schedule_plan.kept_of_any(gpu, known, problem, kept, known_limits)
    return found, kept


def least_workspace(problem: Problem, device: torch.device, schedule: str, limits: Limits) -> int:
    """The least bytes of workspace that `choose` accepts."""
    known_limits = Limits(*map(_known, limits))
    return schedule_plan.least_workspace(gpu_of(device), _known_sizes(problem), schedule, known_limits)


def _known_sizes(problem: Problem) -> Problem:
    return problem._replace(n=_known(problem.n), d=_known(problem.d), vocab=_known(problem.vocab))


def _known(size: int) -> int:
    """A size, or what a symbolic one is while a graph is traced."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return int(size) if hint is None else hint
    return size


def _log_if_slow(
    gpu: Gpu,
    problem: Problem,
    schedule: str,
    limits: Limits,
    found: schedule_plan.Prediction,
    accumulates: bool = False,
) -> None:
    """Log a call that another workspace would make much faster, once for all numbers of tokens. found: what
    it is predicted to take. accumulates: whether it forms gradients in its forward."""
    kind = gpu, problem._replace(n=0), schedule, limits
    if not found.is_slow or kind in _logged:
        return
    _logged.add(kind)
    call = gpu, problem, schedule, limits
    if accumulates:
        helpful = grad_in_forward.helpful_workspace(*call, found.best)
    else:
        helpful = schedule_plan.helpful_workspace(*call)
    # Whoever gives a number may not know what it costs; the default is documented.
    _logger.log(
        logging.WARNING if limits.workspace else logging.INFO,
        "n %d, d %d, V %d: with %s a call is predicted to take %.2f times its GEMMs; with "
        "workspace_mb=%d it would be at most %.2f times",
        problem.n,
        problem.d,
        problem.vocab,
        f"workspace_mb={limits.workspace / MIB:g}" if limits.workspace else "the default workspace_mb",
        found.seconds / found.floor,
        -(-helpful // MIB),
        schedule_plan.HELPFUL * found.best / found.floor,
    )
