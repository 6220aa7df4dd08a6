"""What commands read and print."""

from __future__ import annotations

import argparse
from collections.abc import Iterable


def print_table(rows: Iterable[tuple[str, str]], indent: int = 0) -> None:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{'':{indent}}{name:{width}}  {value}")


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, want a whole number of at least 1")
    return value
