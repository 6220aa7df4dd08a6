"""Before the backward's GEMMs over kept columns: the rows' factors, and hidden with its rows scaled."""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce.arguments import LossArguments
from cute_lce.kernels.adjacent import adjacent
from cute_lce.kernels.row_stats import grad_scale

WARPS = 4


class ScaleTensors(NamedTuple):
    """Global memory that the scaling kernel accesses, and the numbers that it needs.

    Read: hidden (n, d), target (n,) int32 or int64, dloss (n,) fp32 with any stride (0: one number),
    num_valid (1,) int64, kept_scale (n,) fp32.
    Written: factor (n,) fp32, grad_scale times kept_scale, 0 where the row is ignored; scaled (n, d), if
    `wanted`: hidden's rows times factor, zeros where the row is ignored, whatever hidden holds.
    """

    hidden: cute.Tensor
    target: cute.Tensor
    dloss: cute.Tensor
    num_valid: cute.Tensor
    kept_scale: cute.Tensor
    factor: cute.Tensor
    scaled: cute.Tensor
    loss: LossArguments
    wanted: Int32


class ScaleRows:
    """A warp for each row, 8 elements a lane at once. Moves 4 bytes an element."""

    @cute.jit
    def __call__(self, tensors: ScaleTensors, stream: cuda.CUstream):
        blocks = cute.ceil_div(cute.size(tensors.target), WARPS)
        self.kernel(tensors).launch(grid=(blocks, 1, 1), block=(32 * WARPS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, tensors: ScaleTensors):
        lane = cute.arch.lane_idx()
        row = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
        if row < cute.size(tensors.target):
            factor = Float32(0.0)
            valid = Int64(tensors.target[row]) != tensors.loss.ignore_index
            if valid:
                gradient = grad_scale(tensors.dloss, tensors.num_valid, tensors.loss, row)
                # 0 times nan is nan: a target out of range gives nan even if its upstream gradient is 0.
                factor = gradient * tensors.kept_scale[row]
            if lane == 0:
                tensors.factor[row] = factor
            if tensors.wanted != 0:
                for chunk in cutlass.range(lane, cute.size(tensors.hidden, mode=[1]) // 8, 32, unroll=1):
                    source = cute.make_rmem_tensor(8, tensors.hidden.element_type)
                    source.fill(0.0)
                    if valid:
                        cute.autovec_copy(adjacent(tensors.hidden, row, chunk * 8, 8), source)
                        source.store((source.load().to(Float32) * factor).to(tensors.hidden.element_type))
                    cute.autovec_copy(source, adjacent(tensors.scaled, row, chunk * 8, 8))
