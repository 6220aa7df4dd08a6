"""What somebody who waits for kernels is told: a line on the log and, where tqdm is installed, a bar."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from typing import Any

_logger = logging.getLogger("cute_lce")
USUAL_SECONDS = 6.0
"""What a kernel is taken to need before the first one is done, with the start of its process."""
TERMINAL_SECONDS, FILE_SECONDS = 0.5, 5.0
"""Seconds between two states of the bar, by what stderr is."""


class Estimate:
    """How many kernels are there, and how much longer the others are likely to take."""

    def __init__(self, total: int):
        self.total, self.done, self._begun, self.seconds_left = total, 0, time.monotonic(), USUAL_SECONDS

    def update(self, done: int, usual: float, processes: int) -> None:
        """usual: seconds of a kernel. processes: that compile."""
        elapsed, self.done = time.monotonic() - self._begun, done
        left = math.ceil(self.total / max(1, processes)) * usual - elapsed
        if done:
            left = elapsed * (self.total - done) / done
        self.seconds_left = max(1.0, left)

    def __str__(self) -> str:
        left = f", about {self.seconds_left:.0f} s left" if self.done < self.total else ""
        return f"{self.done}/{self.total}{left}"


class Progress:
    """Tells it. It says nothing before the first `show`."""

    def __init__(self, arch: str, total: int):
        self._arch, self.estimate, self._bar, self._shown = arch, Estimate(total), None, -math.inf

    def show(self) -> None:
        line, now = f"compiling for {self._arch}, once on this machine: {self.estimate}", time.monotonic()
        if self._shown == -math.inf:
            _logger.info("%s", line)
            self._bar = _bar(self.estimate.total)
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        if now - self._shown < (TERMINAL_SECONDS if is_terminal else FILE_SECONDS):
            return
        self._shown = now
        if self._bar is not None:
            self._bar.n = self.estimate.done
            self._bar.set_description_str(f"cute_lce: {line}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar(total: int) -> Any:
    """A bar on stderr; None without tqdm, and in all but one process of a job's on this machine."""
    if os.environ.get("LOCAL_RANK", "0") not in ("", "0"):
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None

    class Bar(tqdm):
        # tqdm's own has a lock for other processes too, in /dev/shm, and a thread.
        _lock, monitor_interval = threading.RLock(), 0

    return Bar(total=total, bar_format="{desc} |{bar:20}|", leave=False, delay=1e-9)
