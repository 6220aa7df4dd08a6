"""The launches of a backward: what each is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..arguments import (
    Counters,
    GradientOperands,
    Gradients,
    LossArguments,
    Statistics,
    Stripe,
    Upstream,
)
from ..plan.overlap import Piece
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


def after(counters: Counters, count: int = 1) -> Counters:
    """Those of the launch behind so many."""
    return Counters(address=counters.address + 4 * COUNTERS * count, clears=0)


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


def in_pieces(
    step: Step, pieces: Sequence[Piece], stripe: Stripe, loss_of: Callable[[int], Any], gathered: Any
) -> Iterator[Step]:
    """The launch of a stripe of kept logits as len(pieces) + 2: dlogits of its first piece, each piece's
    dweight beside the next one's dlogits, and dinput of all. stripe: the step's, not frozen. loss_of: the
    loss of what begins at a column. gathered: the rows, behind the first launch."""
    parts = [
        stripe._replace(first=stripe.first + first, columns=columns, is_last=0, dweight=grid)
        for first, columns, grid in pieces
    ]
    losses = [loss_of(part.first) for part in parts]
    nothing = step.gradients._replace(dhidden=0, dweight=0)
    yield step._replace(gradients=nothing, stripe=parts[0])
    _, whole = halves(step)
    counters = step.counters
    for i, (part, own) in enumerate(zip(parts, losses, strict=True)):
        if i + 1 < len(parts):
            own = own._replace(
                beside_logits=losses[i + 1].kept_logits,
                beside_notes=losses[i + 1].kept_notes,
                beside_first=parts[i + 1].first,
                beside_columns=parts[i + 1].columns,
            )
        counters = after(counters)
        yield whole._replace(
            loss=loss_arguments(own),
            source=whole.source._replace(dlogits=own.kept_logits),
            rows=gathered,
            stripe=part,
            counters=counters,
        )
    gradients = step.gradients._replace(dweight=0)
    yield whole._replace(gradients=gradients, rows=gathered, counters=after(counters))


def arguments_of_kept(loss: Any, arguments: Any) -> Any:
    """A loss's arguments for what was kept, which has row factors of its own. arguments: for the rest."""
    if "coefficients" not in loss.terms:
        return arguments
    return loss_arguments(loss._replace(row_factor=loss.kept_factor))
