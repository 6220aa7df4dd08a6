"""Sums that terms add to a row's statistics (arguments.MORE_PARTS), of parts of its columns."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_lce import maths
from cute_lce.arguments import MORE_PARTS
from cute_lce.kernels import row_stats


def places(terms: tuple[str, ...]) -> tuple[dict[str, int], int]:
    """Where the numbers of a part are, by their terms; how many there are."""
    present = [term for term in MORE_PARTS if term in terms]
    counts = [MORE_PARTS[term] for term in present]
    return {term: sum(counts[:i]) for i, term in enumerate(present)}, sum(counts)


@cute.jit
def add(
    at: cutlass.Constexpr[dict],
    sums: cute.Tensor,
    more: cute.Tensor,
    own_max: Float32,
    own_sum: Float32,
    row_max: Float32,
):
    """Add a part's numbers to those of more columns, but for the argmax. at: `places`. own_max, own_sum: the
    part's; row_max: what the sums are relative to, finite."""
    if own_sum > 0:
        if cutlass.const_expr("entropy" in at):
            gap = more[at["entropy"]] + (row_max - own_max) * own_sum
            gap = maths.rescaled(gap, own_max, row_max, row_stats.exp)
            sums[at["entropy"]] += gap
        if cutlass.const_expr("squares" in at):
            factor = row_stats.exp(own_max - row_max)
            sums[at["squares"]] += more[at["squares"]] * factor * factor
    if cutlass.const_expr("total" in at):
        rise, total = row_max - row_stats.finite_max(own_max), at["total"]
        sums[total] += more[total] + rise * more[total + 1]
        sums[total + 1] += more[total + 1]
    if cutlass.const_expr("logits" in at):
        sums[at["logits"]] += more[at["logits"]]
