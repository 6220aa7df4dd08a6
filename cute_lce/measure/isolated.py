"""Functions in processes of their own: a kernel that hangs, or ends its process, is a result among others."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

Item = TypeVar("Item")
Result = TypeVar("Result")
START_SECONDS = 300
"""For the imports of a new process."""


@dataclass(frozen=True)
class Failure:
    """Why there is no result."""

    why: str


def each(
    function: Callable[[Item], Result], items: Sequence[Item], seconds: float, jobs: int = 1
) -> Iterator[Result | Failure]:
    """function(item) of each item, in order; a process serves every jobs-th item for as long as all is well.

    function is importable, items and results can be pickled. What the function raises becomes a Failure, and
    so do the end of the process and `seconds` without an answer, which start when the item's turn comes.
    After a Failure, which may leave a device unusable, the process has ended, and its next item begins in a
    new one.
    """
    jobs = min(jobs, len(items))
    lanes = [_lane(function, items[first::jobs], seconds) for first in range(jobs)]
    try:
        for lane in lanes:
            next(lane)
        for index in range(len(items)):
            yield cast("Result | Failure", next(lanes[index % jobs]))
    finally:
        for lane in lanes:
            lane.close()


def _lane(
    function: Callable[[Item], Result], items: Sequence[Item], seconds: float
) -> Generator[Result | Failure | None, None, None]:
    """None once the process has been started, then its results: it does not wait to be asked for them."""
    context = multiprocessing.get_context("spawn")
    begun = 0
    while begun < len(items):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(function, items[begun:], sender), daemon=True)
        process.start()
        sender.close()
        try:
            if not begun:
                yield None
            found = _receive(receiver, process, START_SECONDS)
            if isinstance(found, Failure):
                found = Failure(f"the process did not start: {found.why}")
                begun += 1
            while begun < len(items) and not isinstance(found, Failure):
                found = _receive(receiver, process, seconds)
                begun += 1
                if not isinstance(found, Failure):
                    yield found
        finally:
            process.kill()
            process.join()
            receiver.close()
        if isinstance(found, Failure):
            yield found


def _serve(function: Callable[[Item], object], items: Sequence[Item], sender: Connection) -> None:
    sender.send(None)
    for item in items:
        try:
            found = function(item)
        except Exception as error:
            # The message may be as long as a compiler's output.
            found = Failure(f"{type(error).__name__}: {error}"[:2000])
        sender.send(found)
        if isinstance(found, Failure):
            return


def _receive(receiver: Connection, process: BaseProcess, seconds: float) -> Any:
    if not receiver.poll(seconds):
        return Failure(f"no answer within {seconds:g} s")
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return Failure(f"the process ended with status {process.exitcode}")
