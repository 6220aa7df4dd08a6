"""The loss and the valid targets of all tokens, from those that blocks have found: added up by one block, in
a fixed order and in float64, so that the result does not depend on which block does it."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int64

from cute_lce.arguments import REDUCTIONS, LossArguments
from cute_lce.kernels.adjacent import LANES


class TotalTensors(NamedTuple):
    """Read: blocks (blocks, 2) fp32, loss and valid targets of each. Written: losses (1,) fp32, unless the
    reduction gives each token's; for "mean" divided by max(num_valid, 1). num_valid (1,) int64."""

    loss: LossArguments
    blocks: cute.Tensor
    losses: cute.Tensor
    num_valid: cute.Tensor


def sums_of(field, warps: int) -> cute.Tensor:
    """The (warps, 2) tensor in a field of shared memory for `add_up`; warps: of the block."""
    return field.get_tensor(cute.make_layout((warps, 2), stride=(2, 1)))


@cute.jit
def add_up(loss: Float64, valid: Float64, sums: cute.Tensor) -> tuple[Float64, Float64]:
    """The sums over a block's threads, in each of them: over lanes, then warps."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    loss = cute.arch.warp_reduction(loss, lambda a, b: a + b)
    valid = cute.arch.warp_reduction(valid, lambda a, b: a + b)
    # All have read what an earlier call left.
    cute.arch.sync_threads()
    if lane == 0:
        sums[warp, 0] = loss
        sums[warp, 1] = valid
    cute.arch.sync_threads()
    loss, valid = sums[0, 0], sums[0, 1]
    for other in cutlass.range_constexpr(1, cute.size(sums, mode=[0])):
        loss += sums[other, 0]
        valid += sums[other, 1]
    return loss, valid


@cute.jit
def write_total(tensors: TotalTensors, sums: cute.Tensor):
    """By all threads of a block, of which `sums` has a row for each warp; it sees the sums of all blocks."""
    thread, threads = cute.arch.thread_idx()[0], LANES * cute.size(sums, mode=[0])
    loss, valid = Float64(0.0), Float64(0.0)
    for block in cutlass.range(thread, cute.size(tensors.blocks, mode=[0]), threads, unroll=4):
        loss += Float64(tensors.blocks[block, 0])
        valid += Float64(tensors.blocks[block, 1])
    loss, valid = add_up(loss, valid, sums)
    if thread == 0:
        tensors.num_valid[0] = Int64(valid)
        if tensors.loss.reduction == REDUCTIONS["sum"]:
            tensors.losses[0] = Float32(loss)
        if tensors.loss.reduction == REDUCTIONS["mean"]:
            tensors.losses[0] = Float32(loss / cutlass.max(valid, Float64(1.0)))
