"""The end of a forward's run: what a group's warps have of each token, merged, and stored as a partial."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce.arch import BOX_BYTES, BOXES, WARPGROUP, WARPS
from cute_lce.arguments import MORE_PARTS, NO_CLASS
from cute_lce.kernels import more_sums, row_stats
from cute_lce.kernels.epilogues.store import Staging, drain
from cute_lce.kernels.fragment import Fragment
from cute_lce.kernels.logits import numbers

LANES = WARPGROUP // WARPS


@cute.jit
def store_partials(
    tensors,  # ForwardTensors
    staging: Staging,
    own: cute.Tensor,  # (numbers, tokens) fp32
    column: Int32,
    number: Int32,
    fragment: cutlass.Constexpr[Fragment],
    stores: cutlass.Constexpr[bool],
    exp: cutlass.Constexpr = row_stats.exp,
):
    """Store a partial of each of a run's tokens.

    own: of each token that the lane owns the maximum, or an exponent of two, the sum relative to its
    exponential, and what terms have, as in MORE_PARTS. number: of the partial. stores: whether copies may
    read the boxes. exp: as in row_stats.merge.

    A group's warps have rows of their own. Their numbers meet in its boxes, 4 bytes for each number, token
    and warp, and are merged in the warps' order.
    """
    parts, count = own.shape[0], own.shape[1]
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() % WARPS
    n = cute.size(tensors.target)
    at_once = BOXES * WARPS * BOX_BYTES // (4 * WARPGROUP * parts)
    boxes = cute.make_ptr(Float32, staging.boxes, cute.AddressSpace.smem, assumed_align=16)
    shared = cute.make_tensor(boxes, cute.make_layout((LANES, WARPS, parts, min(at_once, count))))
    if cutlass.const_expr(stores):
        drain()
    for first in cutlass.range_constexpr(0, count, at_once):
        several = range(first, min(first + at_once, count))
        # The boxes are empty: every warp's copies, and its part of the last merge, have been read.
        cute.arch.barrier(barrier_id=staging.barrier, number_of_threads=WARPGROUP)
        for i in cutlass.range_constexpr(several.start, several.stop):
            for part in cutlass.range_constexpr(parts):
                shared[lane, warp, part, i - first] = own[part, i]
        cute.arch.barrier(barrier_id=staging.barrier, number_of_threads=WARPGROUP)
        for i in cutlass.range(warp, len(several), WARPS, unroll=1):
            token, exists = fragment.any_owned_column(column, first + i, n)
            if exists:
                of_warps = [[shared[lane, w, part, i] for part in range(parts)] for w in range(WARPS)]
                _store(tensors, _merged(of_warps, tensors.loss.terms, exp), number, token)


def _merged(of_warps: list[list[Float32]], terms: tuple[str, ...], exp) -> list[Float32]:
    """What the warps have of a token, as one."""
    row_max, row_sum, *_ = of_warps[0]
    for own_max, own_sum, *_ in of_warps[1:]:
        row_max, row_sum = row_stats.merge(row_max, row_sum, own_max, own_sum, exp)
    at, parts = more_sums.places(terms)
    if not parts:
        return [row_max, row_sum]
    sums = cute.make_rmem_tensor(parts, Float32)
    sums.fill(0.0)
    first = Int32(NO_CLASS)
    for own_max, own_sum, *own in of_warps:
        more = cute.make_rmem_tensor(parts, Float32)
        for i, each in enumerate(own):
            more[i] = each
        more_sums.add(at, sums, more, own_max, own_sum, row_stats.finite_max(row_max))
        if "argmax" in at:
            own_first = more[at["argmax"]].bitcast(Int32)
            own_first = Int32(cutlass.select_(own_max == row_max, own_first, Int32(NO_CLASS)))
            first = Int32(cutlass.min(first, own_first))
    if "argmax" in at:
        sums[at["argmax"]] = first.bitcast(Float32)
    return [row_max, row_sum, *(sums[i] for i in range(parts))]


def _store(tensors, merged: list[Float32], number: Int32, token: Int32):
    tensors.partials[number, token, 0], tensors.partials[number, token, 1] = merged[:2]
    if merged[2:]:
        count = len(merged[2:])
        first = (Int64(number) * cute.size(tensors.target) + token) * count
        partials = numbers(tensors.loss.more_partials + 4 * first, count)
        for i, each in enumerate(merged[2:]):
            partials[i] = each


assert (sum(MORE_PARTS.values()) + 2) * 4 * WARPGROUP <= BOXES * WARPS * BOX_BYTES
