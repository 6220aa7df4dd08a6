"""The number of tokens that a framework divides a sum of losses by."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def checked_count(name: str, count: Any) -> Tensor | float:
    """A count as a float, if it is a number that is not negative (an int, a float, a NumPy scalar); as a
    tensor of shape (), if it is a tensor of one element, whose value is not read.

    Raises TypeError and ValueError, by `name`, for anything else.
    """
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise ValueError(f"{name}: got shape {tuple(count.shape)}, want one element")
        return count.reshape(())
    if isinstance(count, str | bytes):
        raise TypeError(f"{name}: got {type(count).__name__}, want a number or a tensor")
    try:
        number = float(count)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: got {type(count).__name__}, want a number or a tensor") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"{name}: got {count}, want a finite number that is not negative")
    return number


def divided(total: Tensor, count: Tensor | float) -> Tensor:
    """total / count in total's dtype; 0 for a count of 0, and then gradients are 0 too. count: checked."""
    if isinstance(count, Tensor):
        count = count.to(total.device, total.dtype)
        return total / count.masked_fill(count == 0, math.inf)
    return total / (count or math.inf)
