"""Time and memory of one call, beside a floor that is measured in alternation with it.

On a GPU a call is timed by CUDA events, behind passes over a buffer larger than the L2 cache, so that it
finds none of its operands there, and as many of them that the host enqueues a short call while they run. On a
CPU it is timed by the wall clock.
"""

from __future__ import annotations

import functools
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

IDLE_CYCLES = 16_000_000
"""Of an SM, that a GPU waits before a call which is to find it cool: 8 ms at the highest clock."""
FLUSH_BYTES = 256 * 2**20  # Several times the L2 cache of any current GPU (H100: 50 MB, B200: 126 MB).
MOST_FLUSHES = 32
AHEAD = 4
"""A call's first kernels take at least one part in so many of its time; the host enqueues the others then."""
HOST_RUNS = 3
Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median over several runs of each run's own, and the runs' extremes."""

    ms: float
    ms_min: float
    ms_max: float

    @classmethod
    def of_runs(cls, medians: Sequence[float]) -> Timing:
        return cls(statistics.median(medians), min(medians), max(medians))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _turns(count: int, reps: int, draw: random.Random) -> Iterator[Sequence[int]]:
    """The order of the calls in each repetition: two alternate; more are in an order that is drawn anew, so
    that none has always the same predecessor's heat."""
    for _ in range(reps):
        yield range(count) if count <= 2 else draw.sample(range(count), count)


def flushes(host_ms: Sequence[float], call_ms: Sequence[float], flush_ms: float) -> int:
    """How many passes over the buffer go before each of several calls, the same number for all of them: while
    they run, and the first part of a call (AHEAD), the host enqueues it. host_ms: until each returns."""
    ahead = max(host - call / AHEAD for host, call in zip(host_ms, call_ms, strict=True))
    return min(max(1, math.ceil(ahead / flush_ms)), MOST_FLUSHES)


@functools.cache
def _flushed(device: torch.device) -> torch.Tensor:
    """The buffer, allocated once: later it might be cut from a block that a call uses again and again, which
    would then ask the driver for another one, a few ms for gigabytes, while it is timed."""
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)


def _flushes_before(calls: Sequence[Call], device: torch.device) -> int:
    """`flushes` of these calls, which have run before; each runs HOST_RUNS times more."""
    flush = _flushed(device)
    host_ms, call_ms = [], []
    for call in calls:
        taken = []
        for _ in range(HOST_RUNS - 1):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            call()
            taken.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize(device)
        # Of the GPU alone: behind passes during which the host enqueues the call.
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(MOST_FLUSHES):
            flush.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        host_ms.append(statistics.median_low(taken))
        call_ms.append(begin.elapsed_time(end))
    return flushes(host_ms, call_ms, time_back_to_back(flush.zero_, 3, device))


def _time_in_turn(
    calls: Sequence[Call],
    reps: int,
    device: torch.device,
    draw: random.Random,
    passes: int = 1,
    idle: int = 0,
) -> list[list[float]]:
    """Time each of `calls` `reps` times, one after the other in turn; milliseconds, a list for each call.

    On a GPU, if there are more than two, the first, the floor, runs before each of them too, untimed: behind
    a call that leaves the GPU cool, or hot, another would be faster, or slower, by up to 10%. passes: over
    the buffer, before each call. idle: cycles of an SM that the GPU waits before each call instead.
    """
    if device.type != "cuda":
        times: list[list[float]] = [[] for _ in calls]
        for turn in _turns(len(calls), reps, draw):
            for i in turn:
                start = time.perf_counter()
                calls[i]()
                times[i].append((time.perf_counter() - start) * 1e3)
        return times
    flush = _flushed(device)
    events = [[] for _ in calls]
    for turn in _turns(len(calls), reps, draw):
        for i in turn:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if len(calls) > 2 and not idle:
                calls[0]()
            for _ in range(passes):
                flush.zero_()
            if idle:
                torch.cuda._sleep(idle)
            start.record()
            calls[i]()
            end.record()
            events[i].append((start, end))
    torch.cuda.synchronize(device)
    return [[start.elapsed_time(end) for start, end in marks] for marks in events]


class Interleaved:
    """Calls to be timed in alternation, so that a drift of clock or power limit affects all of them.

    calls: the floor first. Each is called here, on a GPU HOST_RUNS times more.
    """

    def __init__(self, calls: Sequence[Call], device: torch.device):
        self._calls, self._device, self._draw = calls, device, random.Random(0)
        is_gpu = device.type == "cuda"
        if is_gpu:
            _flushed(device)
        for call in calls:
            call()
        synchronize(device)
        self._passes = _flushes_before(calls, device) if is_gpu else 1

    def times(self, reps: int) -> list[list[float]]:
        """Milliseconds of `reps` repetitions, a list for each call."""
        return _time_in_turn(self._calls, reps, self._device, self._draw, self._passes)


def time_interleaved(
    calls: Sequence[Call], device: torch.device, *, budget_s: float = 0.5, runs: int = 3, max_reps: int = 50
) -> list[Timing]:
    """Time several calls in alternation.

    Args:
        calls: The functions to time, the floor first. Each is called twice before anything counts, on a GPU
            HOST_RUNS times more.
        device: Where they run.
        budget_s: About how long all the timed repetitions may take together, in seconds. At least one
            repetition of each call is timed in each run.
        runs: How many runs; `Timing.ms` is the median of their medians.
        max_reps: The most repetitions in one run.
    """
    interleaved = Interleaved(calls, device)
    estimate_ms = sum(times[0] for times in interleaved.times(1))
    reps = max(1, min(max_reps, int(budget_s * 1e3 / runs / max(estimate_ms, 1e-3))))
    medians: list[list[float]] = [[] for _ in calls]
    for _ in range(runs):
        for found, times in zip(medians, interleaved.times(reps), strict=True):
            found.append(statistics.median(times))
    return [Timing.of_runs(found) for found in medians]


def time_back_to_back(call: Call, reps: int, device: torch.device) -> float:
    """Milliseconds of one of `reps` calls, one right behind the other."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(reps):
            call()
        return (time.perf_counter() - start) * 1e3 / reps
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(reps):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / reps


def time_sustained(
    calls: Sequence[Call], device: torch.device, *, seconds: float = 0.4, rounds: int = 8
) -> list[Timing]:
    """Time each of several calls back to back for so long, in rounds of random order.

    So long, a GPU settles at the clock that its power limit leaves to this load. Half as many calls go
    before, untimed: they have the heat of the load before. The order is drawn anew in each round and run: in
    a fixed one a call that follows a hot one would be slower in every run. Nothing is flushed from the
    caches. `Timing` is of the rounds.
    """
    reps = []
    for call in calls:
        for _ in range(2):
            call()
        synchronize(device)
        taken = statistics.median(time_back_to_back(call, 1, device) for _ in range(3))
        reps.append(max(1, round(seconds * 1e3 / max(taken, 1e-3))))
    draw = random.Random()
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for i in draw.sample(range(len(calls)), len(calls)):
            for _ in range(reps[i] // 2):
                calls[i]()
            found[i].append(time_back_to_back(calls[i], reps[i], device))
    return [Timing.of_runs(times) for times in found]


def time_cool(
    calls: Sequence[Call], device: torch.device, *, budget_s: float = 0.5, most_reps: int = 9
) -> list[Timing]:
    """Time each of several calls, which have run before, in turn, on a GPU behind IDLE_CYCLES without work:
    so it takes a short call at its highest clock, as behind a host that is slower than it. budget_s: as in
    `time_interleaved`. `Timing` is of the repetitions."""
    draw, start = random.Random(0), time.perf_counter()
    _time_in_turn(calls, 1, device, draw, idle=IDLE_CYCLES)
    reps = max(3, min(most_reps, int(budget_s / (time.perf_counter() - start))))
    times = _time_in_turn(calls, reps, device, draw, idle=IDLE_CYCLES)
    return [Timing.of_runs(each) for each in times]


def peak_extra_bytes(call: Call, device: torch.device) -> int:
    """The most bytes that `call` holds at any moment above what was held before it.

    On a GPU this is torch's own count (`max_memory_allocated`). On a CPU, where torch keeps none, the
    profiler's record of every allocation and release is summed up.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    results = profile.profiler.kineto_results if profile.profiler is not None else None
    if results is None:
        raise RuntimeError("torch.profiler kept no record of the call")
    events: list[Any] = [event for event in results.events() if event.name() == "[memory]"]
    records = [(event.start_ns(), event.nbytes()) for event in events]
    held = peak = 0
    for _, nbytes in sorted(records, key=lambda record: record[0]):
        held += nbytes
        peak = max(peak, held)
    return peak


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    """RMS of `got - want` over RMS of `want`, in float64. NaN where `got` has one; inf where `want` is all
    zero."""
    want = want.double()
    error = (got.double() - want).pow(2).mean().sqrt().item()
    size = want.pow(2).mean().sqrt().item()
    return error / size if size > 0 else (0.0 if error == 0 else math.inf)
