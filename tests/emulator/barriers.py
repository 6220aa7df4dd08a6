"""mbarrier objects, named barriers of a CTA, and the cluster barrier (PTX ISA 9.7.13)."""

from __future__ import annotations

import numpy as np

from .faults import Fault
from .ordering import CONTROL, ROWS, Ordering, acquire, relaxed_release, release

MAX_COUNT = (1 << 20) - 1  # PTX ISA 9.7.13: range of the expected and pending counts; tx-count likewise


class MBarrier:
    """One mbarrier object: count of pending arrivals, tx-count, phase.

    `phase` counts completed phases from initialisation; its lowest bit is the parity of the current
    incomplete phase.
    """

    def __init__(self, rank: int, offset: int, count: int, initialiser: tuple[int, int], ordering: Ordering):
        if not 1 <= count <= MAX_COUNT:
            raise Fault(
                "mbarrier-count", f"mbarrier at {offset:#x} of CTA rank {rank} initialised with count {count}"
            )
        self.rank, self.offset, self.count = rank, offset, count
        self.pending, self.tx, self.phase = count, 0, 0
        self.initialiser = initialiser  # (warp id, its epoch)
        self.published = False  # visible to other CTAs and the async proxy, see fence.mbarrier_init
        self.agent = ordering.new_agent(f"the mbarrier at {offset:#x} of CTA rank {rank}")
        self.arriving = np.zeros((ROWS, ordering.capacity), np.int32)  # clocks of this phase's arrivals
        self.observed = np.zeros(
            (ROWS, ordering.capacity), np.int32
        )  # clocks that a successful wait acquires
        self.waiting: dict[int, int] = {}  # warp id -> phase it waits for
        self.used = False

    def name(self) -> str:
        return f"mbarrier at {self.offset:#x} of CTA rank {self.rank}"

    def describe(self) -> str:
        pending = f"{self.pending} of {self.count} arrivals pending"
        return f"{self.name()} (phase {self.phase}, {pending}, tx-count {self.tx})"

    def arrive(self, count: int, clock: np.ndarray) -> None:
        """`clock` is what the arrival publishes."""
        self.used = True
        if count < 1 or count > self.pending:
            raise Fault("mbarrier-count", f"{count} arrivals at {self.describe()}")
        self.pending -= count
        np.maximum(self.arriving, clock, out=self.arriving)
        self._complete()

    def expect_tx(self, size: int) -> None:
        self.used = True
        self.tx += size
        if abs(self.tx) > MAX_COUNT:
            raise Fault("mbarrier-tx", f"tx-count out of range at {self.describe()}")

    def complete_tx(self, size: int, issued_in: int, issuer: np.ndarray) -> None:
        """`size` bytes of a copy arrived, issued while the barrier was in phase `issued_in` by a warp with
        clock `issuer`."""
        np.maximum(self.arriving[CONTROL:], issuer[CONTROL:], out=self.arriving[CONTROL:])
        if self.phase != issued_in:
            raise Fault(
                "mbarrier-tx",
                f"{size} bytes arrive at {self.describe()}, but their copy was issued in phase {issued_in}:"
                f" that phase expected fewer bytes",
            )
        self.tx -= size
        if abs(self.tx) > MAX_COUNT:
            raise Fault("mbarrier-tx", f"tx-count out of range at {self.describe()}")
        self._complete()

    def _complete(self) -> None:
        if self.pending or self.tx:
            return
        for warp, phase in self.waiting.items():
            if self.phase > phase:
                raise Fault(
                    "mbarrier-phase",
                    f"{self.name()} completes phase {self.phase} while warp {warp} still waits for phase"
                    f" {phase}",
                )
        self.phase += 1
        self.pending = self.count
        # TMA loads that signal this barrier wrote on its behalf: their epoch is the phase that now ends,
        # counted from 1.
        self.arriving[:, self.agent] = self.phase
        np.maximum(self.observed, self.arriving, out=self.observed)

    def complete_at(self, parity: int) -> bool:
        """test_wait.parity: has the phase of this parity completed, i.e. is the current phase of the other
        parity?"""
        return (self.phase & 1) != (parity & 1)


class NamedBarriers:
    """bar/barrier{.cta}: 16 per CTA. Counts are threads, in whole warps."""

    def __init__(self, cta):
        self.cta = cta
        self.arrived = [0] * 16
        self.expected = [0] * 16
        self.generation = [0] * 16
        self.who: list[list[int]] = [[] for _ in range(16)]
        capacity = cta.cluster.ordering.capacity
        self.arriving = [np.zeros((ROWS, capacity), np.int32) for _ in range(16)]
        self.observed = [np.zeros((ROWS, capacity), np.int32) for _ in range(16)]
        self.reduction: list[list] = [[] for _ in range(16)]
        self.result: list[list] = [[] for _ in range(16)]

    def arrive(self, warp, barrier: int, count: int, threads: int, predicate=None) -> int:
        """One warp arrives; returns the generation it belongs to."""
        if not 0 <= barrier < 16:
            raise Fault("barrier", f"barrier id {barrier}")
        if count % 32 or not 0 < count <= 1024:
            raise Fault(
                "barrier", f"barrier {barrier}: thread count {count} is not a multiple of the warp size"
            )
        if self.arrived[barrier] and self.expected[barrier] != count:
            raise Fault(
                "barrier",
                f"barrier {barrier}: warp {warp.index} says {count} threads, others said"
                f" {self.expected[barrier]}",
            )
        if warp.index in self.who[barrier]:
            raise Fault("barrier", f"barrier {barrier}: warp {warp.index} arrives twice in one phase")
        self.expected[barrier] = count
        self.arrived[barrier] += threads
        self.who[barrier].append(warp.index)
        if self.arrived[barrier] > count:
            raise Fault(
                "barrier",
                f"barrier {barrier}: {self.arrived[barrier]} threads arrived, {count} expected (warps"
                f" {self.who[barrier]})",
            )
        if predicate is not None:
            self.reduction[barrier].append(predicate)
        release(warp.clock, warp.id, self.arriving[barrier])
        generation = self.generation[barrier]
        if self.arrived[barrier] == count:
            self.generation[barrier] += 1
            self.arrived[barrier] = 0
            self.who[barrier] = []
            self.result[barrier], self.reduction[barrier] = self.reduction[barrier], []
            np.maximum(self.observed[barrier], self.arriving[barrier], out=self.observed[barrier])
        return generation

    def passed(self, barrier: int, generation: int) -> bool:
        return self.generation[barrier] != generation

    def leave(self, warp, barrier: int) -> None:
        acquire(warp.clock, self.observed[barrier])

    def describe(self, barrier: int) -> str:
        threads = f"{self.arrived[barrier]} of {self.expected[barrier]} threads"
        return f"barrier {barrier} ({threads}: warps {self.who[barrier]})"


class ClusterBarrier:
    """barrier.cluster: all non-exited threads of the cluster arrive, then wait."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.arrived: dict[int, bool] = {}  # warp id -> release
        self.generation = 0
        capacity = cluster.ordering.capacity
        self.arriving = np.zeros((ROWS, capacity), np.int32)
        self.observed = np.zeros((ROWS, capacity), np.int32)

    def arrive(self, warp, ordered: bool) -> int:
        if warp.id in self.arrived:
            raise Fault("barrier", "barrier.cluster.arrive twice without barrier.cluster.wait")
        self.arrived[warp.id] = ordered
        if ordered:
            release(warp.clock, warp.id, self.arriving)
        else:
            relaxed_release(warp.clock, warp.state.get("fenced clock"), self.arriving)
        generation = self.generation
        self.check()
        return generation

    def check(self) -> None:
        """Complete the phase when every warp that has not exited has arrived; called on exits too."""
        waiting = [w for c in self.cluster.ctas for w in c.warps if not w.done and w.id not in self.arrived]
        if not waiting and self.arrived:
            self.generation += 1
            self.arrived = {}
            np.maximum(self.observed, self.arriving, out=self.observed)

    def describe(self) -> str:
        missing = [
            (w.cta.rank, w.index)
            for c in self.cluster.ctas
            for w in c.warps
            if not w.done and w.id not in self.arrived
        ]
        return f"barrier.cluster (not yet arrived: (CTA rank, warp) {missing[:12]})"
