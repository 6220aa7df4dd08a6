"""Tensor memory of one CTA: 128 lanes x 512 columns of 32-bit cells (PTX ISA 9.7.16), its allocation,
validity and ordering."""

from __future__ import annotations

import numpy as np

from .faults import Fault
from .ordering import NEVER, TENSOR, Ordering
from .warp import Warp

LANES, COLUMNS = 128, 512


class TensorColumns:
    """The columns of an SM's tensor memory, which its CTAs share, and the permit to allocate some.

    The first CTA to allocate takes the permit and keeps it until tcgen05.relinquish_alloc_permit or its end;
    meanwhile tcgen05.alloc of the SM's other CTAs waits (9.7.16, and cute::TMEM::Allocator calls it a lock).
    """

    def __init__(self):
        self.taken = np.zeros(COLUMNS, bool)
        self.holder = None  # the CTA that has the permit

    def permits(self, cta) -> bool:
        return self.holder is None or self.holder is cta

    def release(self, cta) -> None:
        if self.holder is cta:
            self.holder = None


class TensorMemory:
    """Cells, a validity bit for each, and per (warp quarter of lanes, column) the last write and the reads.

    Addresses hold the lane in bits 16..31 and the column in bits 0..15.
    """

    def __init__(self, rank: int, ordering: Ordering, pool: TensorColumns):
        self.rank, self.ordering, self.pool = rank, ordering, pool
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

    def allocate(self, first: int, columns: int) -> None:
        self.pool.taken[first : first + columns] = True
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
        self.pool.taken[first : first + columns] = False
        self.owner[first : first + columns] = -1

    def forget(self, columns: slice) -> None:
        """Of columns that are free again: whoever gets them next owes nothing to earlier accesses."""
        for epochs in self.reads.values():
            epochs[:, columns] = 0

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
        self, warp: Warp, agent: int, epoch: int, quarters: slice, columns: slice, what: str
    ) -> None:
        """`agent` reads until its `epoch`; the read must come after the last write as far as the issuing
        warp's tcgen05 operations know."""
        writer, written = self.writer[quarters, columns], self.epoch[quarters, columns]
        late = written > warp.tensor_view[writer]
        if late.any():
            never = written == NEVER
            q, c = (int(x[0]) for x in (never if never.any() else late).nonzero())
            lane = 32 * (quarters.start + q)
            where = f"TMEM column {columns.start + c}, lanes {lane}.. of CTA rank {self.rank}"
            if never.any():
                raise Fault("uninit-tmem", f"{what} reads {where}, which nobody wrote")
            self._unordered(warp, what, f"reads {where}", "write", writer[late], written[late])
        if agent not in self.reads:
            self.reads[agent] = np.zeros((4, COLUMNS), np.int32)
        self.reads[agent][quarters, columns] = epoch

    def note_write(
        self, warp: Warp, agent: int, epoch: int, quarters: slice, columns: slice, what: str
    ) -> None:
        """`agent` writes until its `epoch`; earlier reads and writes must be over as far as the issuing
        warp's tcgen05 operations know."""
        self._check_unused(warp, warp.tensor_view, agent, quarters, columns, what, "writes")
        self.writer[quarters, columns] = agent
        self.epoch[quarters, columns] = epoch

    def note_dealloc(self, warp: Warp, columns: slice) -> None:
        """All reads and writes must be over. tcgen05.dealloc is synchronous, and so is the waiting for them:
        a barrier between orders the two, without fences."""
        known = np.maximum(warp.tensor_view, warp.clock[0])
        self._check_unused(warp, known, -1, slice(0, 4), columns, "tcgen05.dealloc", "frees")

    def _check_unused(
        self, warp: Warp, known: np.ndarray, agent: int, quarters: slice, columns: slice, what: str, does: str
    ) -> None:
        does = f"{does} TMEM columns {columns.start}.. of CTA rank {self.rank}"
        for reader, epochs in self.reads.items():
            seen = epochs[quarters, columns]
            if reader != agent and (seen > known[reader]).any():
                self._unordered(warp, what, does, "read", np.array([reader]), np.array([seen.max()]))
        writer, written = self.writer[quarters, columns], self.epoch[quarters, columns]
        late = (written > known[writer]) & (written != NEVER) & (writer != agent)
        if late.any():
            self._unordered(warp, what, does, "write", writer[late], written[late])

    def _unordered(
        self, warp: Warp, what: str, does: str, earlier: str, agents: np.ndarray, epochs: np.ndarray
    ) -> None:
        """Accesses by `agents` until `epochs` conflict with one of `warp`: a barrier between them leaves
        only tcgen05.fence missing, which the caller of `run` may ignore."""
        barrier = warp.clock[0][agents] >= epochs
        if not barrier.all():
            name = self.ordering.name(int(agents[(~barrier).nonzero()[0][0]]))
            raise Fault(
                "async-overlap", f"{what} {does}, and nothing orders it after the {earlier} by {name}"
            )
        agent = int(agents[0])
        missing = (
            "tcgen05.fence::after_thread_sync behind the wait for it"
            if warp.clock[TENSOR, agent] >= epochs[0]
            else "tcgen05.fence::before_thread_sync between that and its barrier"
        )
        fault = Fault(
            "tcgen05-fence",
            f"{what} {does} after the {earlier} by {self.ordering.name(agent)}, with no {missing}",
        )
        warp.cta.cluster.device.report(fault)

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
