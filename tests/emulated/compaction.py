# type: ignore  # The DSL traces Python: its types are not Python's.
"""The compaction's kernels on the emulator without the GEMMs around them: what they move, exactly."""

import functools
import tempfile
from dataclasses import dataclass, replace
from unittest import mock

import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from torch import Tensor

from cute_lce.arguments import (
    COMPUTED_ROWS,
    COPIES,
    REDUCTIONS,
    Counters,
    LossArguments,
    Rows,
    Statistics,
    Upstream,
)
from cute_lce.kernels import rows as kernels
from cute_lce.kernels.entry.types import example, example_operands, gather_tensors, strided, vector
from cute_lce.kernels.rows import Copy, Gather
from tests import emulator
from tests.emulated.compiling import compile_host

IGNORED = -100
FEW_BLOCKS = 3
"""Instead of hundreds, so that a block has many tokens of few."""
CLEARED = 40  # counters, more than a warp's lanes


class Compaction:
    """Gather of a backward, or Copy, as Rows.gathers says; of a backward also what is not `hidden`."""

    def __init__(self):
        self.gather, self.copy = Gather(), Copy()

    @cute.jit
    def __call__(
        self,
        hidden: cute.Tensor,  # (n, d)
        target: cute.Tensor,  # (n,)
        loss,  # LossArguments
        upstream: Upstream,
        statistics: Statistics,
        rows: Rows,
        counters: Counters,
        stream,
    ):
        n = cute.size(hidden, mode=[0])
        if rows.gathers == COPIES:
            self.copy(gather_tensors(hidden, target, rows, loss), stream)
        else:
            values = (
                strided(upstream.dloss, n, upstream.stride),
                vector(Float32, statistics.row_max, n),
                vector(Float32, statistics.row_sum, n),
            )
            cleared = vector(Int32, counters.address, counters.clears)
            self.gather(gather_tensors(hidden, target, rows, loss, values, cleared), stream)


@functools.cache
def program(target_dtype: torch.dtype, arch: str, blocks: int) -> emulator.Emulated:
    """blocks: the most that gather. No defaults: equal calls give one object, which a survey mutates."""
    hidden, _, target = example_operands("bfloat16", str(target_dtype).removeprefix("torch."))
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(kernels, "BLOCKS", blocks):
        groups = (example(group) for group in (LossArguments, Upstream, Statistics, Rows, Counters))
        compiled = compile_host(
            *(Compaction(), hidden, target, *groups),
            arch=arch,
            folder=folder,
            options="--ptxas-options '-O0'",
        )
        return emulator.build(compiled)


@dataclass
class Tokens:
    """n tokens, of which `valid` are not ignored. What belongs to the others is nan and must not be read."""

    valid: Tensor
    d: int
    target_dtype: torch.dtype = torch.int64

    def __post_init__(self):
        n, g = len(self.valid), torch.Generator().manual_seed(len(self.valid) + self.d)
        self.hidden = torch.randn((n, self.d), generator=g).bfloat16()
        self.hidden[~self.valid] = torch.nan
        target = torch.randint(0, 1000, (n,), generator=g).masked_fill(~self.valid, IGNORED)
        self.target = target.to(self.target_dtype)
        # dloss, row_max and row_sum (n,)
        self.values = torch.randn((3, n), generator=g).masked_fill(~self.valid, torch.nan)

    @property
    def order(self) -> Tensor:
        """The origins of compacted tokens."""
        return torch.cat((self.valid.nonzero()[:, 0], (~self.valid).nonzero()[:, 0]))

    def computed(self, first: int, tokens: int) -> int:
        """How many of a launch's tokens are computed."""
        left = max(int(self.valid.sum()) - first, int(first == 0))
        return min(tokens, -(-left // COMPUTED_ROWS) * COMPUTED_ROWS)

    def rows(self, first: int, tokens: int) -> Tensor:
        """(tokens, d) compacted hidden states of a launch: nan where nothing is written, all if none is
        ignored."""
        found = torch.full((tokens, self.d), torch.nan, dtype=self.hidden.dtype)
        if self.valid.all():
            return found
        computed, places = self.computed(first, tokens), self.order[first : first + tokens]
        found[:computed] = self.hidden[places[:computed]].nan_to_num(0)
        return found


@dataclass
class Compacted:
    """What the kernels wrote, with nan, or -7, where they did not."""

    source: Tensor
    count: Tensor
    target: Tensor
    hidden: Tensor
    values: Tensor
    sums: Tensor
    counters: Tensor


def equal(mine: Tensor, want: Tensor) -> bool:
    same = mine == want
    if mine.is_floating_point():
        same |= mine.isnan() & want.isnan()
    return mine.shape == want.shape and bool(same.all())


def run(
    what: Tokens,
    first: int = 0,
    tokens: int | None = None,
    *,
    seed: int = 0,
    before: Compacted | None = None,
    stride: int = 1,
    without: tuple[str, ...] = (),
    arch: str = "sm_90a",
    blocks: int = FEW_BLOCKS,
) -> Compacted:
    """A launch of [first, first + tokens). before: what an earlier one compacted, for Copy; None: Gather.

    stride: of dloss; 0: its first number is that of all. without: names that have address 0.
    """
    n, d = what.hidden.shape
    tokens = n - first if tokens is None else tokens
    integers = {"dtype": torch.int32}
    if before is None:
        found = Compacted(
            torch.full((n,), -7, **integers),
            torch.full((1,), -7, **integers),
            torch.full((n,), -7, dtype=what.target_dtype),
            torch.full((tokens, d), torch.nan, dtype=what.hidden.dtype),
            torch.full((3, n), torch.nan),
            torch.full((n, d), torch.nan),
            torch.full((CLEARED + 1,), -7, **integers),
        )
    else:
        hidden = torch.full((tokens, d), torch.nan, dtype=what.hidden.dtype)
        found = replace(before, hidden=hidden)
    dloss, row_max, row_sum = (each.clone() for each in what.values)
    spread = torch.full((max(n * stride, 1),), torch.nan)
    if stride:
        spread[::stride] = dloss
    else:
        spread[0] = 3.0
    outputs = vars(found)
    addresses = {name: 0 if name in without else each.data_ptr() for name, each in outputs.items()}
    counters = Counters(addresses.pop("counters"), CLEARED)
    rows = Rows(first=first, tokens=tokens, gathers=COPIES if before else 1, **addresses)
    program(what.target_dtype, arch, blocks).run(
        *(what.hidden, what.target, LossArguments(REDUCTIONS["none"], IGNORED)),
        Upstream(spread.data_ptr(), stride),
        Statistics(row_max.data_ptr(), row_sum.data_ptr(), 0),
        rows,
        counters,
        seed=seed,
        extra_tensors=(spread, row_max, row_sum, *outputs.values()),
    )
    return found


def compacted(what: Tokens) -> Compacted:
    """What Copy reads of an earlier launch, not by a kernel."""
    nothing, count = torch.empty(0), what.valid.sum().int().reshape(1)
    return Compacted(what.order.int(), count, what.target[what.order], *[nothing] * 4)


def is_right(
    what: Tokens, found: Compacted, first: int = 0, *, stride: int = 1, without: tuple[str, ...] = ()
) -> bool:
    """Whether a launch of Gather wrote what it should, and nothing else."""
    order, count = what.order, int(what.valid.sum())
    values = torch.full_like(found.values, torch.nan)
    values[:, :count] = what.values[:, order[:count]]
    if stride == 0:
        values[0, :count] = 3.0
    sums = torch.full_like(found.sums, torch.nan)
    if first == 0:
        sums[~what.valid] = 0
    wanted = {
        "source": order,
        "count": torch.tensor([count]),
        "target": what.target[order],
        "hidden": what.rows(first, len(found.hidden)),
        "values": values,
        "sums": sums,
        "counters": torch.tensor([0] * CLEARED + [-7]),
    }
    for name in without:
        wanted[name] = torch.full_like(getattr(found, name), torch.nan)
    return all(equal(getattr(found, name), want) for name, want in wanted.items())
