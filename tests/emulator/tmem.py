"""Tensor memory of one CTA: 128 lanes x 512 columns of 32-bit cells (PTX ISA 9.7.16), its allocation,
validity and ordering."""

from __future__ import annotations

import numpy as np

from .faults import Fault
from .ordering import NEVER, Ordering

LANES, COLUMNS = 128, 512


class TensorMemory:
    """Cells, a validity bit for each, and per (warp quarter of lanes, column) the last write and the reads.

    Addresses hold the lane in bits 16..31 and the column in bits 0..15.
    """

    def __init__(self, rank: int, ordering: Ordering):
        self.rank, self.ordering = rank, ordering
        self.cells = np.full((LANES, COLUMNS), 0xDEADBEEF, np.uint32)
        self.valid = np.zeros((LANES, COLUMNS), bool)
        self.writer = np.zeros((4, COLUMNS), np.int16)
        self.epoch = np.full((4, COLUMNS), NEVER, np.int32)
        self.reads: dict[int, np.ndarray] = {}  # agent -> epochs (4, columns)
        self.owner = np.full(COLUMNS, -1, np.int32)  # number of the allocation that holds each column
        self.allocations: dict[int, int] = {}  # first column -> count
        self.relinquished = False

    # ---- allocation (PTX ISA 9.7.16 tcgen05.alloc, dealloc, relinquish_alloc_permit)

    @staticmethod
    def check_size(columns: int) -> None:
        if columns < 32 or columns > COLUMNS or columns & (columns - 1):
            raise Fault("tmem-alloc", f"{columns} columns: must be a power of two from 32 to 512")

    def find_room(self, columns: int) -> int | None:
        """First column of a free, aligned run, or None."""
        for first in range(0, COLUMNS, columns):
            if (self.owner[first : first + columns] < 0).all():
                return first
        return None

    def allocate(self, first: int, columns: int) -> None:
        self.owner[first : first + columns] = first
        self.allocations[first] = columns
        self.valid[:, first : first + columns] = False
        self.epoch[:, first : first + columns] = NEVER

    def free(self, address: int, columns: int) -> None:
        first = address & 0xFFFF
        if address >> 16 or self.allocations.get(first) != columns:
            raise Fault(
                "tmem-alloc",
                f"dealloc of {columns} columns at {address:#x}; allocated (first: columns):"
                f" {self.allocations}",
            )
        del self.allocations[first]
        self.owner[first : first + columns] = -1

    def check_freed(self) -> None:
        if self.allocations:
            raise Fault(
                "tmem-alloc",
                f"CTA rank {self.rank} ends with TMEM allocated (first column: columns): {self.allocations}",
            )

    # ---- accesses

    def check(self, column: int, columns: int) -> None:
        if column < 0 or column + columns > COLUMNS or (self.owner[column : column + columns] < 0).any():
            raise Fault(
                "tmem-bounds",
                f"TMEM columns {column}..{column + columns} of CTA rank {self.rank}; allocated (first:"
                f" columns): {self.allocations}",
            )

    def note_read(
        self, clock: np.ndarray, agent: int, epoch: int, quarters: slice, columns: slice, what: str
    ) -> None:
        """`agent` reads until its `epoch`; the read must come after the last write as far as `clock`
        knows."""
        writer, written = self.writer[quarters, columns], self.epoch[quarters, columns]
        late = written > clock[0][writer]
        if late.any():
            q, c = (int(x[0]) for x in late.nonzero())
            lane = 32 * (quarters.start + q)
            where = f"TMEM column {columns.start + c}, lanes {lane}.. of CTA rank {self.rank}"
            if written[q, c] == NEVER:
                raise Fault("uninit-tmem", f"{what} reads {where}, which nobody wrote")
            raise Fault(
                "async-overlap",
                f"{what} reads {where} before waiting for the write by"
                f" {self.ordering.name(int(writer[q, c]))}",
            )
        if agent not in self.reads:
            self.reads[agent] = np.zeros((4, COLUMNS), np.int32)
        self.reads[agent][quarters, columns] = epoch

    def note_write(
        self, clock: np.ndarray, agent: int, epoch: int, quarters: slice, columns: slice, what: str
    ) -> None:
        """`agent` writes until its `epoch`; earlier reads and writes must be over as far as `clock` knows."""
        for reader, epochs in self.reads.items():
            if reader != agent and (epochs[quarters, columns] > clock[0, reader]).any():
                raise Fault(
                    "async-overlap",
                    f"{what} writes TMEM columns {columns.start}.. of CTA rank {self.rank}, and nothing"
                    f" orders it after the read by"
                    f" {self.ordering.name(reader)}",
                )
        writer, written = self.writer[quarters, columns], self.epoch[quarters, columns]
        late = (written > clock[0][writer]) & (written != NEVER) & (writer != agent)
        if late.any():
            q, c = (int(x[0]) for x in late.nonzero())
            raise Fault(
                "async-overlap",
                f"{what} writes TMEM column {columns.start + c} of CTA rank {self.rank}, and nothing orders"
                f" it after the write by"
                f" {self.ordering.name(int(writer[q, c]))}",
            )
        self.writer[quarters, columns] = agent
        self.epoch[quarters, columns] = epoch

    def read(self, lanes: slice, columns: slice) -> np.ndarray:
        """The cells (lanes, columns), which must all have been written."""
        if not self.valid[lanes, columns].all():
            lane, column = (int(x[0]) for x in (~self.valid[lanes, columns]).nonzero())
            raise Fault(
                "uninit-tmem",
                f"TMEM lane {lanes.start + lane}, column {columns.start + column} of CTA rank {self.rank} is"
                f" read,"
                " and nobody wrote it",
            )
        return np.ascontiguousarray(self.cells[lanes, columns])

    def write(self, lanes: slice, columns: slice, values: np.ndarray) -> None:
        self.cells[lanes, columns] = values
        self.valid[lanes, columns] = True
