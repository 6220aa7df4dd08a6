"""Functions in processes of their own: a kernel that hangs, or ends its process, is a result among others."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
START_SECONDS = 300
"""For the imports of a new process."""


@dataclass(frozen=True)
class Failure:
    """Why there is no result."""

    why: str


def each(
    function: Callable[[Item], Result], items: Sequence[Item], seconds: float
) -> Iterator[Result | Failure]:
    """function(item) of each item in turn; they share a process for as long as all is well.

    function is importable, items and results can be pickled. What the function raises becomes a Failure, and
    so do the end of the process and `seconds` without an answer. After a Failure, which may leave a device
    unusable, the next item begins in a new process.
    """
    context = multiprocessing.get_context("spawn")
    begun = 0
    while begun < len(items):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(function, items[begun:], sender), daemon=True)
        process.start()
        sender.close()
        try:
            failed = _receive(receiver, process, START_SECONDS)
            well = failed is None
            if not well:
                begun += 1
                yield Failure(f"the process did not start: {failed.why}")
            while well and begun < len(items):
                found = _receive(receiver, process, seconds)
                begun += 1
                well = not isinstance(found, Failure)
                yield found
        finally:
            process.kill()
            process.join()
            receiver.close()


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
