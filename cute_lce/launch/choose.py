"""The schedule of a call on a device with kernels."""

from __future__ import annotations

import torch

from ..plan import schedule as schedule_plan
from ..plan.problem import Limits, Problem
from ..streaming import STREAMING


def choose(
    problem: Problem, dtype: torch.dtype, device_type: str, schedule: str, reduction: str, limits: Limits
) -> tuple[str, int]:
    """The plan's choice; "grad_in_forward" is the streaming implementation's."""
    if schedule == "grad_in_forward" and problem.wants_gradient:
        return STREAMING.choose(problem, dtype, device_type, schedule, reduction, limits)
    return schedule_plan.choose(problem, schedule, limits)
