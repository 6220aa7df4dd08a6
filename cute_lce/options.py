"""What the loss is: pure data, checked once."""

from __future__ import annotations

from dataclasses import dataclass

REDUCTIONS = ("mean", "sum", "none")
SCHEDULES = ("auto", "recompute", "keep", "grad_in_forward")
IGNORE_INDEX = -100
"""The ignore_index that ``None`` stands for, as in torch."""


@dataclass(frozen=True)
class LossOptions:
    """The definition of the loss, apart from its tensors.

    reduction: "mean" (over the targets that are not ignored), "sum" or "none".
    ignore_index: the target value whose rows have loss 0 and no gradient; ``None`` means -100.

    Raises ValueError for an unknown reduction and TypeError for a value of the wrong type.
    """

    reduction: str = "mean"
    ignore_index: int | None = IGNORE_INDEX

    def __post_init__(self):
        check_reduction(self.reduction)
        object.__setattr__(self, "ignore_index", resolve_ignore_index(self.ignore_index))


def check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: got {reduction!r}, want one of {', '.join(map(repr, REDUCTIONS))}")


def check_schedule(schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, want one of {', '.join(map(repr, SCHEDULES))}")


def resolve_ignore_index(ignore_index: int | None) -> int:
    if ignore_index is None:
        return IGNORE_INDEX
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise TypeError(f"ignore_index: got {type(ignore_index).__name__}, want an int or None")
    return ignore_index
