"""The environment's variables: every CUTE_LCE_* is read here.

Those that say how calls are made are parsed once, when cute_lce is imported: a graph that was compiled with
one would not see a change. A value that is refused is refused by `check`, which a process's first call makes,
and not by the import. The two that name something are read when it is needed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

REFUSED: list[str] = []
"""What is wrong with the variables, an error's message each."""
_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_IMPLEMENTATIONS = {"auto": "auto", "streaming": "streaming"}


def _parsed(name: str, parse: Callable[[str], T], default: T, want: str) -> T:
    """A variable's value; the default where it is not set, empty or refused. parse: of a text without
    capitals and spaces around it, raises ValueError or KeyError for what it refuses."""
    text = os.environ.get(name, "")
    try:
        return parse(text.strip().lower()) if text.strip() else default
    except (KeyError, ValueError):
        REFUSED.append(f"{name}: got {text!r}, want {want}")
        return default


def _boolean(name: str) -> bool:
    return _parsed(name, _BOOLEANS.__getitem__, False, "1, true, yes or on, or 0, false, no or off")


def _mib(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number


CHECK_TARGETS = _boolean("CUTE_LCE_CHECK_TARGETS")
CHECK_RANKS = _boolean("CUTE_LCE_CHECK_RANKS")
WORKSPACE_MB: float | None = _parsed(
    "CUTE_LCE_WORKSPACE_MB", _mib, None, "a positive number of MiB, or no such variable"
)
"""The workspace_mb of calls that give none."""
IMPLEMENTATION = _parsed(
    "CUTE_LCE_IMPLEMENTATION", _IMPLEMENTATIONS.__getitem__, "auto", "'auto' or 'streaming'"
)
"""What serves a GPU that has kernels: these, or the streaming path."""


def check() -> None:
    """Raise ValueError for variables whose values are refused."""
    if REFUSED:
        raise ValueError("; ".join(REFUSED))


def cache_dir() -> str:
    """The folder of compiled kernels; "": none is named."""
    return os.environ.get("CUTE_LCE_CACHE_DIR", "")


def commit() -> str:
    """The commit of a copy without git's folder; "": none is named."""
    return os.environ.get("CUTE_LCE_COMMIT", "")
