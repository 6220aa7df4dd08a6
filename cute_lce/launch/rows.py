"""Tokens that a call compacts: where the kernels find them."""

from __future__ import annotations

from ..arguments import Rows
from .device import Parts


class Compaction:
    """The parts of a workspace for a compaction of n tokens (kernels/rows.py)."""

    def __init__(
        self, parts: Parts, n: int, target_bytes: int, hidden_bytes: int = 0, *, values: bool = False
    ):
        """target_bytes: of a target. hidden_bytes: of the hidden states that are copied. values: whether a
        backward's statistics and upstream gradient are copied."""
        self.n = n
        self.source, self.count = parts.reserve(4 * n), parts.reserve(4)
        self.target = parts.reserve(target_bytes * n)
        self.hidden = parts.reserve(hidden_bytes) if hidden_bytes else None
        self.values = parts.reserve(12 * n) if values else None

    def rows(self, start: int) -> Rows:
        """All tokens, to be compacted first, in a workspace at this address."""
        return Rows(
            first=0,
            tokens=self.n,
            source=start + self.source,
            count=start + self.count,
            target=start + self.target,
            hidden=0 if self.hidden is None else start + self.hidden,
            values=0 if self.values is None else start + self.values,
            gathers=1,
        )
