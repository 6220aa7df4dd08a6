"""What a thread holds of a tile, and how the threads of a warp share its columns.

Both mainloops hand epilogues the fragment of an m16n8 MMA: a warp has two, four or six blocks of 8 rows, and
of each block of 8 columns the lane l has the elements of row l // 4 in columns 2 (l % 4) and 2 (l % 4) + 1. A
column is therefore spread over the 8 lanes with the same l % 4.

Per column a warp keeps one value, not eight: in each 32 columns lane l *owns* the one at

    16 bit4(l) + 8 bit3(l) + 2 (l % 4) + bit2(l)

`fold` reduces what the 8 lanes have of 8 columns each to the owner of each column; `spread` gives the lanes
what the owner has.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

SHARED = 8  # columns of a thread in 32 columns, and lanes that share a column
OWNED = 32  # columns among which a lane owns one


@dataclass(frozen=True)
class Fragment:
    """The elements of a thread in one call of an epilogue's visit, (rows, columns // 4).

    rows: of its elements, relative to the first. columns: of the tile, over all lanes. slabs: calls of visit
    a tile, which have their columns one after the other.
    """

    rows: tuple[int, ...]
    columns: int
    slabs: int

    @property
    def count(self) -> int:
        """Elements of a thread in a row."""
        return self.columns // 4

    @property
    def owned(self) -> int:
        """Columns that a lane owns, at most."""
        return -(-self.columns // OWNED)

    @property
    def span(self) -> int:
        """Rows from a warp's first to its last."""
        return self.rows[-1] + 8

    @property
    def warp_rows(self) -> int:
        """Rows from the first of a warp to the first of the next."""
        return 16 if len(self.rows) == 2 or self.rows[2] > 16 else 32

    @staticmethod
    def offset(c: int) -> int:
        """The column of element c of a row, relative to that of element 0."""
        return 8 * (c // 2) + c % 2

    def unit(self, row):
        """The number of the unit of a row: the rows of a warp's blocks in a tile, if these are four."""
        stride = self.rows[2]
        return row // (2 * stride) * (stride // 16) + row % stride // 16

    def shared(self, i: int) -> range:
        """The elements of a thread in the i-th 32 columns."""
        return range(SHARED * i, min(SHARED * (i + 1), self.count))

    def owned_column(self, column, slab: int, i: int, end):
        """(the i-th column that this lane owns, whether the slab has it and it lies before `end`); column: of
        element 0 in slab 0."""
        own, within = self._owned(column, slab, i)
        if OWNED * (i + 1) <= self.columns:
            return own, own < end
        return own, Boolean(OWNED * i + within < self.columns) & (own < end)

    def any_owned_column(self, column, number, end):
        """What `owned_column` returns for one of all slabs, whose number need not be constant."""
        slab, i = number // self.owned, number % self.owned
        own, within = self._owned(column, slab, i)
        return own, (OWNED * i + within < self.columns) & (own < end)

    def _owned(self, column, slab, i):
        """(the i-th column that this lane owns in a slab, its pair's place in the 32)."""
        lane = cute.arch.lane_idx()
        within = 16 * ((lane >> 4) & 1) + 8 * ((lane >> 3) & 1)
        return column + (slab * self.columns + OWNED * i + within + ((lane >> 2) & 1)), within

    def owned_columns(self, column, end):
        """(its number, what `owned_column` returns) for each column that this lane owns in all slabs."""
        for slab in range(self.slabs):
            for i in range(self.owned):
                yield (slab * self.owned + i, *self.owned_column(column, slab, i, end))


def spread(own, c: int):
    """What the owner of element c's column has, in every lane that has an element of it; own: this lane's
    value of the 32 columns in which c is."""
    j = c % SHARED
    source = 16 * (j >> 2) + 8 * ((j >> 1) & 1) + 4 * (j & 1)
    return cute.arch.shuffle_sync(own, source + (cute.arch.lane_idx() & 3))


def fold(leaf, merge):
    """Merge what 8 lanes have of 8 columns: leaf(j) is a tuple of numbers for a thread's j-th element, and
    merge(*a, *b) a commutative function of two of them. Returns that of the column that the lane owns.

    Depth first: few of the tuples are alive at once.
    """
    lane = cute.arch.lane_idx()

    def node(j: int, step: int):
        # Elements j, j + step / 4 of the next level: bit `step` of the lane says which of them it keeps.
        if step > 16:
            return leaf(j)
        upper = (lane & step) != 0
        mine, theirs = [], []
        for a, b in zip(node(j, 2 * step), node(j + step // 4, 2 * step), strict=True):
            kind = Int32 if isinstance(a, Int32) else Float32
            mine.append(kind(cutlass.select_(upper, b, a)))
            sent = kind(cutlass.select_(upper, a, b))
            theirs.append(cute.arch.shuffle_sync_bfly(sent, offset=step))
        return merge(*mine, *theirs)

    return node(0, 4)


def opaque(value: Int32) -> Int32:
    """The value, of which the compiler knows nothing: it does not keep what is computed from it in registers
    while a loop runs in which this is called."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def first_row_of_warp(row: Int32) -> Int32:
    """The first row of a warp's elements; row: of this thread's first."""
    return row - (cute.arch.lane_idx() >> 2)
