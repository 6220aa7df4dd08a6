"""What commands read and print."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

MOST = 2**31 - 1


class Refused(ValueError):
    """What was asked for cannot be done here; the message begins with the option's name."""


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
    if value > MOST:
        raise argparse.ArgumentTypeError(f"got {text}, want at most {MOST}")
    return value


def mebibytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    # This is also false for nan.
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, want a positive number of MiB")
    return value


def unwritable(path: Path) -> str | None:
    """Why no new file can be written there; None: one can."""
    if path.is_dir():
        return "a folder, want a file"
    folder = path.parent
    if not folder.is_dir():
        return f"want a file in a folder that exists: {folder} does not"
    return None if os.access(folder, os.W_OK) else "want a file in a folder that you may write to"


def new_file(text: str) -> Path:
    """Where results are to be written, which are measured first."""
    path = Path(text)
    if why := unwritable(path):
        raise argparse.ArgumentTypeError(f"got {text}, {why}")
    return path
