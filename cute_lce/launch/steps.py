"""The launches of a backward: what each is given."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..arguments import (
    Counters,
    GradientOperands,
    Gradients,
    LossArguments,
    Statistics,
    Upstream,
)
from .device import loss_arguments

COUNTERS = 3
"""int32 progress counters of a stripe, one for each GEMM."""


class Step(NamedTuple):
    """The arguments of a launch."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    loss: LossArguments
    upstream: Upstream
    statistics: Statistics
    gradients: Gradients
    source: GradientOperands
    rows: Any
    stripe: Any
    counters: Counters


def after(counters: Counters) -> Counters:
    """Those of the launch behind."""
    return Counters(address=counters.address + 4 * COUNTERS, clears=0)


def halves(step: Step) -> tuple[Step, Step]:
    """A launch as two: what dinput needs, and dweight from the same dlogits."""
    source = step.source
    if not source.kept_scale:
        # An address other than 0 says that the dlogits are there; where nothing is scaled it is not read.
        source = source._replace(kept_scale=step.statistics.row_sum, scales=0)
    return (
        step._replace(gradients=step.gradients._replace(dweight=0)),
        step._replace(
            gradients=step.gradients._replace(dhidden=0),
            source=source,
            counters=step.counters._replace(clears=0),
        ),
    )


def arguments_of_kept(loss: Any, arguments: Any) -> Any:
    """A loss's arguments for what was kept, which has row factors of its own. arguments: for the rest."""
    if "coefficients" in loss.terms:
        loss = loss._replace(row_factor=loss.kept_factor)
    elif "shared" not in loss.terms:
        return arguments
    return loss_arguments(loss)


def of_recomputed(loss: Any) -> Any:
    """A loss for what was not kept, to which nothing is added."""
    return loss._replace(shared=0, weight_sum=0, hidden_sum=0) if "shared" in loss.terms else loss
