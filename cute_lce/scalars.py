"""Numbers of other libraries as Python's."""

from __future__ import annotations

import numbers
from typing import Any

_PYTHON = frozenset((float, int, bool, str, type(None)))


def python_number(value: Any) -> Any:
    """A NumPy scalar, or another number that Python's `numbers` knows as real, as the bool, int or float of
    the same value; anything else as it is."""
    kind = type(value)
    if kind in _PYTHON:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            return value
    # Which `numbers` does not know.
    is_numpy_bool = kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
    return bool(value) if is_numpy_bool else value
