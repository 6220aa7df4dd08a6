"""Before gradients' GEMMs whose operand lacks grad_scale: the rows' factors, and hidden with its rows scaled.

Such an operand is what a forward kept, E' = (softmax - onehot) / kept_scale, and float16's dlogits, which are
HALF_SCALE (softmax - onehot): the range of float16 is too small for upstream / n. Times a row's factor it is
dlogits: dhidden's GEMM multiplies by it last, dweight's takes a copy of hidden that is multiplied by it.

bf16 holds factor times hidden as it is. In float16 all of it is multiplied by one number more, so that the
largest magnitude is HALF_LARGEST, and weight_factor is the inverse, which dweight's GEMM multiplies by last.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce import maths
from cute_lce.arguments import LossArguments
from cute_lce.kernels import pdl
from cute_lce.kernels.adjacent import AT_ONCE, LANES, load_chunks, store_chunks
from cute_lce.kernels.row_stats import grad_scale
from cute_lce.kernels.rows import Compacted, computed, origin

WARPS = 4


class ScaleTensors(NamedTuple):
    """Global memory that the scaling kernels access, and the numbers that they need.

    rows: which tokens these are; n of them.
    Read: target (n,) int32 or int64; hidden (.., d), dloss (..,) fp32 with any stride (0: one number), of the
    tokens' origins; num_valid (1,) int64, kept_scale (n,) fp32; at address 0: 1 / HALF_SCALE.
    Written, of tokens that are computed: factor (n,) fp32, grad_scale times kept_scale, 0 where the row is
    ignored; counters (count,) int32, zeros; if `wanted`: scaled (n, d), hidden's rows times factor, in
    float16 over weight_factor, zeros where the row is ignored, whatever hidden holds; and in float16
    weight_factor (1,) fp32.
    """

    rows: Compacted
    hidden: cute.Tensor
    target: cute.Tensor
    dloss: cute.Tensor
    num_valid: cute.Tensor
    kept_scale: cute.Tensor
    factor: cute.Tensor
    weight_factor: cute.Tensor
    scaled: cute.Tensor
    counters: cute.Tensor
    loss: LossArguments
    wanted: Int32


class ScaleRows:
    """A warp for each row, a lane with AT_ONCE times 8 elements in flight. Moves 4 bytes an element. Ignored
    rows are read too, so that no load waits for the target.

    Args:
        half: whether hidden is float16. Its weight_factor takes two kernels more, which read 2 bytes an
            element.
    """

    def __init__(self, half: bool):
        self.half = half

    @cute.jit
    def __call__(self, tensors: ScaleTensors, stream: cuda.CUstream):
        blocks = cute.ceil_div(cute.size(tensors.target), WARPS)
        if cutlass.const_expr(self.half):
            if tensors.wanted != 0:
                self.start(tensors).launch(grid=(1, 1, 1), block=(LANES, 1, 1), stream=stream, use_pdl=True)
                self.largest(tensors).launch(
                    grid=(blocks, 1, 1), block=(LANES * WARPS, 1, 1), stream=stream, use_pdl=True
                )
        self.kernel(tensors).launch(
            grid=(blocks, 1, 1), block=(LANES * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def start(self, tensors: ScaleTensors):
        """The least that weight_factor may be."""
        pdl.begin()
        if cute.arch.thread_idx()[0] == 0:
            tensors.weight_factor[0] = Float32(maths.HALF_LEAST / maths.HALF_LARGEST)

    @cute.kernel
    def largest(self, tensors: ScaleTensors):
        """weight_factor: the largest magnitude in factor times hidden over HALF_LARGEST, nan if a
        factor is nan; a nan of hidden stays in its scaled row.

        A maximum does not depend on its order, and the bits of non-negative numbers have theirs.
        """
        pdl.begin()
        lane = cute.arch.lane_idx()
        row = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
        if row < computed(tensors.rows):
            token = origin(tensors.rows, row)
            factor, valid = self._factor(tensors, row, token)
            if valid:
                highest = Float32(0.0)
                chunks = cute.size(tensors.hidden, mode=[1]) // 8
                for chunk in cutlass.range(lane, chunks, LANES * AT_ONCE, unroll=1):
                    (parts,) = load_chunks([(tensors.hidden, token)], chunk, chunks, True)
                    for i in cutlass.range_constexpr(8 * AT_ONCE):
                        highest = cute.arch.fmax(highest, cute.math.absf(parts[i].to(Float32)))
                highest = cute.arch.warp_reduction(highest, cute.arch.fmax)
                if lane == 0:
                    highest *= factor * Float32(1 / maths.HALF_LARGEST)
                    cute.arch.red(
                        cute.recast_ptr(tensors.weight_factor.iterator, dtype=Int32),
                        highest.bitcast(Int32) & 0x7FFFFFFF,
                        op="max",
                        dtype="s32",
                        sem="relaxed",
                        scope="gpu",
                    )

    @cute.kernel
    def kernel(self, tensors: ScaleTensors):
        pdl.begin()
        lane = cute.arch.lane_idx()
        row = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
        if row < computed(tensors.rows):
            token = origin(tensors.rows, row)
            # The row's first chunks are loaded before the factor's numbers are used.
            chunks = Int32(0)
            if tensors.wanted != 0:
                chunks = cute.size(tensors.hidden, mode=[1]) // 8
            (parts,) = load_chunks([(tensors.hidden, token)], lane, chunks, True)
            factor, valid = self._factor(tensors, row, token)
            if lane == 0:
                tensors.factor[row] = factor
            if row == 0:
                for i in cutlass.range(lane, cute.size(tensors.counters), LANES, unroll=1):
                    tensors.counters[i] = Int32(0)
            if tensors.wanted != 0:
                if cutlass.const_expr(self.half):
                    factor = factor / tensors.weight_factor[0]
                for chunk in cutlass.range(lane, chunks, LANES * AT_ONCE, unroll=1):
                    parts.store((parts.load().to(Float32) * factor).to(tensors.hidden.element_type))
                    if not valid:
                        parts.fill(0.0)
                    store_chunks(parts, tensors.scaled, row, chunk, chunks)
                    following = chunk + LANES * AT_ONCE
                    (found,) = load_chunks([(tensors.hidden, token)], following, chunks, True)
                    parts.store(found.load())

    @cute.jit
    def _factor(self, tensors: ScaleTensors, row: Int32, token: Int32):
        """(the row's factor, whether it is not ignored). token: its origin."""
        factor = Float32(0.0)
        valid = Int64(tensors.target[row]) != tensors.loss.ignore_index
        if valid:
            factor = grad_scale(tensors.dloss, tensors.num_valid, tensors.loss, token)
            if tensors.kept_scale.iterator.toint() == 0:
                factor *= Float32(1 / maths.HALF_SCALE)
            else:
                # 0 times nan is nan: a target out of range gives nan even if its upstream gradient is 0.
                factor *= tensors.kept_scale[row]
        return factor, valid
