"""Happens-before: which accesses each warp may rely on, kept as vector clocks.

Agents are the warps of a cluster and everything asynchronous that acts for them: per warp its wgmma, its bulk
copies' reads of shared memory, its tcgen05.ld and tcgen05.st, its cp.async; per CTA the tensor pipe that
tcgen05.mma runs on; and each mbarrier, on whose behalf TMA loads write. Each agent counts epochs. Memory
remembers the (agent, epoch) of the last write of each word and of the last reads; an access is ordered after
them when the accessing warp's clock has reached that epoch. Clocks travel with release and acquire: mbarrier
arrivals and waits, named and cluster barriers. A missing wait is then found whenever the two accesses happen,
in whatever order the schedule ran them.

A clock has four rows (PTX ISA 8 "Memory Consistency Model", 9.7.13 "membar/fence" for the proxy fences,
9.7.16 "tcgen05 Memory Consistency Model" for the last):
- ORDER: what happened before, as release and acquire carry it;
- PROXY: which of the warps' generic writes have also passed a fence.proxy.async on the way, which is what a
  read through the async proxy needs;
- CONTROL: what must have been executed before in time, carried by relaxed arrivals and by asynchronous
  completions too. It decides whether an mbarrier was initialised before its use, and nothing else;
- TENSOR: which tcgen05 operations have passed a tcgen05.fence::before_thread_sync, or the one that
  tcgen05.commit implies, on the way. Every operation that orders execution carries it, relaxed ones too. The
  warp's next asynchronous tcgen05 operations may rely on it once tcgen05.fence::after_thread_sync has copied
  it to the warp's `tensor_view`.
"""

from __future__ import annotations

import numpy as np

NEVER = np.int32(2**31 - 1)  # the epoch of memory that nobody wrote: no clock reaches it
ORDER, PROXY, CONTROL, TENSOR = range(4)
ROWS = 4
MBARRIERS = 96  # agents set aside per CTA for mbarriers

# Asynchronous agents of one warp, in this order after the warps themselves.
WARP_AGENTS = ("wgmma", "bulk copy", "tcgen05.ld", "tcgen05.st", "cp.async")


class Ordering:
    """Agent numbers and names of one cluster."""

    def __init__(self, ctas: int, warps_per_cta: int):
        self.warps = ctas * warps_per_cta
        self.warps_per_cta, self.ctas = warps_per_cta, ctas
        self._pipes = self.warps * (1 + len(WARP_AGENTS))
        self._next = self._pipes + ctas
        self.capacity = self._next + ctas * MBARRIERS
        self._names: dict[int, str] = {}
        self.epochs = np.zeros(
            self.capacity, np.int32
        )  # of the asynchronous agents; warps count in their own clocks

    def new_clock(self, warp: int) -> np.ndarray:
        clock = np.zeros((ROWS, self.capacity), np.int32)
        clock[ORDER, warp] = clock[CONTROL, warp] = 1
        return clock

    def warp_agent(self, warp: int, name: str) -> int:
        return self.warps * (1 + WARP_AGENTS.index(name)) + warp

    def pipe(self, rank: int) -> int:
        return self._pipes + rank

    def new_agent(self, name: str) -> int:
        agent = self._next
        self._next += 1
        if agent >= self.capacity:
            raise RuntimeError("more mbarriers than ordering.MBARRIERS")
        self._names[agent] = name
        return agent

    def advance(self, agent: int) -> int:
        """The next epoch of an asynchronous agent."""
        self.epochs[agent] += 1
        return int(self.epochs[agent])

    def name(self, agent: int) -> str:
        if agent in self._names:
            return self._names[agent]
        if agent >= self._pipes:
            return f"tcgen05 of CTA rank {agent - self._pipes}"
        kind, warp = divmod(agent, self.warps)
        who = f"warp {warp % self.warps_per_cta} of CTA rank {warp // self.warps_per_cta}"
        return who if kind == 0 else f"{WARP_AGENTS[kind - 1]} of {who}"


def new_epoch(clock: np.ndarray, warp: int) -> None:
    """What the warp does from now on is not covered by what it has published."""
    clock[ORDER, warp] += 1
    clock[CONTROL, warp] = clock[ORDER, warp]


def release(clock: np.ndarray, warp: int, into: np.ndarray) -> None:
    """A warp publishes what happened before: `into` learns the clock, and the warp begins a new epoch."""
    np.maximum(into, clock, out=into)
    new_epoch(clock, warp)


def relaxed_release(clock: np.ndarray, fenced: np.ndarray | None, into: np.ndarray) -> None:
    """A relaxed arrival carries time, fenced tcgen05 operations, and what came before the last fence
    (`fenced`, a clock) if there was one."""
    np.maximum(into[CONTROL:], clock[CONTROL:], out=into[CONTROL:])
    if fenced is not None:
        np.maximum(into, fenced, out=into)


def acquire(clock: np.ndarray, source: np.ndarray) -> None:
    np.maximum(clock, source, out=clock)


def before_thread_sync(clock: np.ndarray, tensor_view: np.ndarray) -> None:
    """tcgen05.fence::before_thread_sync: what this warp publishes next covers its tcgen05 operations."""
    np.maximum(clock[TENSOR], tensor_view, out=clock[TENSOR])


def after_thread_sync(clock: np.ndarray, tensor_view: np.ndarray) -> None:
    """tcgen05.fence::after_thread_sync: tcgen05 operations from now on come after what this warp has
    acquired."""
    np.maximum(tensor_view, clock[TENSOR], out=tensor_view)


def proxy_fence(clock: np.ndarray, warp: int) -> None:
    """fence.proxy.async: everything this warp knows of becomes visible to the async proxy; a new epoch
    begins."""
    np.maximum(clock[PROXY], clock[ORDER], out=clock[PROXY])
    new_epoch(clock, warp)


def async_view(clock: np.ndarray, warps: int) -> np.ndarray:
    """What the async proxy may rely on when this clock's owner starts it: fenced generic writes, and
    asynchronous ones."""
    view = clock[ORDER].copy()
    view[:warps] = clock[PROXY, :warps]
    return view
