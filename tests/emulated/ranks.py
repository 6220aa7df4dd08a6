"""Ranks of a group as threads that take turns: parallel/ as it is, over emulated kernels."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from cute_lce.launch import KERNELS
from cute_lce.ops import autograd, select
from cute_lce.parallel import numbers, ops, token_stats, tokens
from tests import emulator
from tests.emulated.backward import device
from tests.emulated.forward import Emulator

T = TypeVar("T")


class Group:
    """What parallel/ asks of a process group, and its collectives. Of its threads one runs at once: the
    others wait for the turn, or in a collective for the other ranks."""

    group_name = "threads"

    def __init__(self, size: int):
        self._size, self._own = size, threading.local()
        self._turn = threading.Condition()
        self._rounds: list[dict[int, Tensor]] = []
        self._errors: list[BaseException] = []

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._own.rank

    def run(self, body: Callable[[int], T]) -> list[T]:
        """What the body gives of each rank."""
        found: dict[int, T] = {}

        def on(rank: int) -> None:
            self._own.rank, self._own.round = rank, 0
            with self._turn:
                try:
                    with emulator.known_allocations():
                        found[rank] = body(rank)
                except BaseException as error:
                    self._errors.append(error)
                self._turn.notify_all()

        threads = [threading.Thread(target=on, args=(rank,)) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return [found[rank] for rank in range(self._size)]

    def gather(self, own: Tensor, group: Any = None) -> Tensor:
        """collectives.gather."""
        number = self._own.round
        self._own.round += 1
        if number == len(self._rounds):
            self._rounds.append({})
        given = self._rounds[number]
        given[self.rank()] = own.clone()
        self._turn.notify_all()
        self._turn.wait_for(lambda: len(given) == self._size or self._errors)
        assert len(given) == self._size, "another rank has failed"
        return torch.stack([given[rank] for rank in range(self._size)])

    def start_sum(self, sums: Tensor, dtype: torch.dtype, group: Any, *, scatters: bool) -> Sum:
        """collectives.start_sum."""
        total = self.gather(sums).sum(0).to(dtype)
        sums.fill_(torch.nan)
        return Sum(total.chunk(self._size)[self.rank()].clone() if scatters else total)


class Sum:
    def __init__(self, total: Tensor):
        self._total = total

    def wait(self) -> Tensor:
        return self._total


@contextlib.contextmanager
def ranks(arch: str, size: int, sms: int = 4) -> Iterator[tuple[Group, Emulator]]:
    """While active, calls of CPU tensors over the group are the kernels'."""
    group = Group(size)
    with contextlib.ExitStack() as stack:
        counts = stack.enter_context(device(arch, sms))
        for module in (select, token_stats):
            stack.enter_context(mock.patch.object(module, "implementation", return_value=KERNELS))
        for module, name in ((token_stats, "gather"), (token_stats, "start_sum"), (tokens, "gather")):
            stack.enter_context(mock.patch.object(module, name, getattr(group, name)))
        gather_rows = mock.patch.object(ops, "gather_rows", lambda rows, *_: group.gather(rows))
        stack.enter_context(gather_rows)
        # What records allocations is a dispatch mode.
        for module in (autograd, numbers):
            stack.enter_context(mock.patch.object(module, "is_plain_eager", return_value=True))
        yield group, counts
