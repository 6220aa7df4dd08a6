"""Which words of global memory a launch reads and writes, and what the next one may touch before its
griddepcontrol.wait.

A launch by programmatic dependent launch may begin when every CTA of the launch before has executed
griddepcontrol.launch_dependents or ended (PTX ISA 9.7.13). A CTA does either only after a wait of its own, so
of all earlier launches only the one before may still run. A word that it does not write may be read early,
and one that it does not touch may be written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .faults import Fault

if TYPE_CHECKING:
    from .memory import Region

WORD = 4  # bytes
BLOCK = 32  # bytes: the widest access of a thread; masks begin and end at a multiple
ONES = {n: np.frombuffer(b"\1" * n, f"u{n}")[0] for n in (2, 4, 8)}  # flags of n words


class Words:
    """A set of words of global memory: a mask for each region that has some."""

    def __init__(self) -> None:
        self.masks: dict[Region, np.ndarray] = {}

    def mask(self, region: Region) -> np.ndarray:
        """A flag for each word, from origin(region) on."""
        mask = self.masks.get(region)
        if mask is None:
            blocks = -(-region.end // BLOCK) - region.start // BLOCK
            mask = self.masks[region] = np.zeros(blocks * (BLOCK // WORD), bool)
        return mask

    def add(self, region: Region, offsets: np.ndarray, size: int) -> None:
        """`size` bytes at each offset; the addresses are aligned to the size."""
        mask, skip = self.mask(region), region.start % BLOCK
        if skip:
            offsets = offsets + skip
        if size <= WORD:
            mask[offsets >> 2] = True
        else:
            ones = ONES[size // WORD]
            mask.view(ones.dtype)[offsets // size] = ones

    def add_range(self, region: Region, first: int, size: int) -> None:
        """`size` consecutive bytes from address `first`."""
        first -= origin(region)
        self.mask(region)[first // WORD : -(-(first + size) // WORD)] = True

    def add_box(self, region: Region, first: int, counts: list[int], strides: list[int]) -> None:
        """Rows of counts[-1] consecutive bytes from address `first`; the others of `strides` are multiples of
        16."""
        shape = (*counts[:-1], -(-(first % WORD + counts[-1]) // WORD))
        steps = (*(s // WORD for s in strides[:-1]), 1)
        np.ndarray(shape, bool, self.mask(region), (first - origin(region)) // WORD, steps)[...] = True

    def among(self, addresses: np.ndarray, size: int) -> str | None:
        """Where the first of these words lies that `size` bytes at each address touch. Tensors may share
        memory, so every region is asked."""
        words = (addresses[:, None] + np.arange(0, size, WORD)).reshape(-1) >> 2
        for region, mask in self.masks.items():
            inside = words - origin(region) // WORD
            inside = inside[(inside >= 0) & (inside < mask.size)]
            hit = inside[mask[inside]]
            if hit.size:
                address = origin(region) + int(hit[0]) * WORD
                return f"the word at {address:#x} ({region.name} at {region.start:#x})"
        return None


def origin(region: Region) -> int:
    """The address of the first word of a region's masks."""
    return region.start // BLOCK * BLOCK


class Touched:
    """What a launch reads and what it writes, atomics both."""

    def __init__(self) -> None:
        self.read, self.written = Words(), Words()

    def check_early_read(self, addresses: np.ndarray, size: int) -> None:
        """Before a read by the next launch while this one may run."""
        _refuse("read", "writes", self.written.among(addresses, size))

    def check_early_write(self, addresses: np.ndarray, size: int) -> None:
        _refuse("written", "writes", self.written.among(addresses, size))
        _refuse("written", "reads", self.read.among(addresses, size))


def _refuse(done: str, conflict: str, where: str | None) -> None:
    if where is not None:
        raise Fault(
            "launch-order",
            f"{where} is {done} before griddepcontrol.wait, and the launch before, which may still run,"
            f" {conflict} it",
        )
