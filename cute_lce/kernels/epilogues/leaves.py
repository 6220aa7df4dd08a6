"""What a thread makes of its elements of a column of logits, and how those of several threads are merged: the
arguments of fragment.fold; and the greatest of a thread's numbers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_lce import maths
from cute_lce.arguments import NO_CLASS
from cute_lce.kernels import row_stats
from cute_lce.kernels.fragment import Fragment, spread
from cute_lce.kernels.logits import Slope
from cute_lce.kernels.row_stats import fma

NOTHING = -200.0  # an exponent whose exponential is 0
SQUARED = 2.0**-32  # of exponentials that are squared: they are at most 2^HEADROOM


class TotalOf(NamedTuple):
    """What a thread's rows count in a total: their classes' weights, or None for ones, and how many rows from
    its first on are in the vocabulary, or None for all. apart: whether tiles that are all in it have code of
    their own."""

    weight: Any
    left: Int32 | None
    apart: bool


def highest(fragment: Fragment, frag: cute.Tensor, first: int, j: int):
    """The maximum of a thread's elements of a column, element first + j of a row."""
    if first + j >= fragment.count:
        return (-Float32.inf,)
    return (row_stats.tree([frag[r, first + j] for r in range(len(fragment.rows))], cute.arch.fmax),)


def sum_of(fragment: Fragment, frag: cute.Tensor, left: Int32, first: int, j: int):
    """The sum of a thread's elements of a column, element first + j of a row, in the `left` rows from its
    first on that are in the vocabulary."""
    if first + j >= fragment.count:
        return (Float32(0.0),)
    values = [frag[r, first + j] for r in range(len(fragment.rows))]
    inside = [row < left for row in fragment.rows]
    pairs = zip(inside, values, strict=True)
    return (row_stats.tree([Float32(cutlass.select_(*each, Float32(0.0))) for each in pairs], _add),)


def _add(a, b):
    return a + b


def first_of(fragment: Fragment, frag: cute.Tensor, row: Int32, highest: Float32, first: int, j: int):
    """The first row of a thread's elements of a column, element first + j of a row, that is `highest`, which
    the column's owner has; row: of element 0."""
    found = Int32(NO_CLASS)
    if first + j < fragment.count:
        highest = spread(highest, j)
        for r in reversed(range(len(fragment.rows))):
            is_highest = frag[r, first + j] == highest
            found = Int32(cutlass.select_(is_highest, row + fragment.rows[r], found))
    return (found,)


def min_each(a: Int32, b: Int32):
    return (Int32(cutlass.min(a, b)),)


def fmax_each(a: Float32, b: Float32):
    return (cute.arch.fmax(a, b),)


def add_each(*both: Float32):
    half = len(both) // 2
    return tuple(a + b for a, b in zip(both[:half], both[half:], strict=True))


def exponentials(
    fragment: Fragment,
    frag: cute.Tensor,
    base: Float32,
    first: int,
    j: int,
    *,
    in_place: bool,
    gaps: bool = False,
    above: Float32 | None = None,
    squares: bool = False,
    of: TotalOf | None = None,
    slopes: Callable[[int], Slope] | None = None,
):
    """The sum of 2^x, with x = z log2 e - base, of a thread's elements of a column, element first + j of a
    row; with `gaps` also that of (x - above) 2^x, with `squares` of (SQUARED 2^x)^2, with `of` of x times the
    rows' weights.

    base, above: of the column that this lane owns among the 32 with elements first, first + 1, ...;
    above None: 0.
    in_place: whether the exponentials replace the fragment's elements; with `slopes`, by j, times what these
    are for z, which is not in the sums.
    """
    c, several = first + j, 1 + gaps + squares + (of is not None)
    if c >= fragment.count:
        return (Float32(0.0),) * several
    base, above = spread(base, j), None if above is None else spread(above, j)
    slope = None if slopes is None else slopes(j)
    sums: list[list] = [[] for _ in range(several)]
    for r in range(len(fragment.rows)):
        exponent = maths.kept_exponent(frag[r, c], base, fma)
        term = cute.math.exp2(exponent, fastmath=True)
        each = [term]
        if gaps:
            # 0 times -inf is 0 here.
            gap = exponent if above is None else exponent - above
            each.append(term * cute.arch.fmax(gap, Float32(NOTHING)))
        if squares:
            least = term * Float32(SQUARED)
            each.append(least * least)
        if of is not None:
            counted = exponent if of.weight is None else exponent * of.weight[r]
            if of.left is not None:
                counted = Float32(cutlass.select_(fragment.rows[r] < of.left, counted, Float32(0.0)))
            each.append(counted)
        for values, value in zip(sums, each, strict=True):
            values.append(value)
        if in_place:
            z, frag[r, c] = frag[r, c], term
            if slope is not None:
                frag[r, c] = term * slope(z)
    return tuple(row_stats.tree(values, lambda a, b: a + b) for values in sums)


def greatest_bits(values: list[Float32]) -> Int32:
    """The greatest of the numbers' bits as integers: that of the greatest number, if any is positive; a nan's
    that is not negative exceeds all. Hopper's instruction for three numbers is of integers alone."""
    bits = [value.bitcast(Int32) for value in values]
    while len(bits) > 1:
        parts = [bits[first : first + 3] for first in range(0, len(bits), 3)]
        bits = [functools.reduce(lambda a, b: Int32(cutlass.max(a, b)), part) for part in parts]
    return bits[0]
