"""Groups of launch arguments that are converted once instead of at every launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def freeze(group: tuple) -> Any:
    """The group, nested groups included, as a constant that compiled functions take in the tuple's place.

    For groups that outlive a call: freezing takes about as long as passing five such tuples.
    """
    return _array()(group)


@functools.cache
def _array() -> Callable[[tuple], Any]:
    import tvm_ffi

    return tvm_ffi.Array
