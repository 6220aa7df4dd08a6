"""The backward of grad_in_forward: its accumulators times the upstream gradient, rounded once or added."""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_lce import maths
from cute_lce.arguments import REDUCTIONS, LossArguments
from cute_lce.kernels import pdl
from cute_lce.kernels.adjacent import adjacent

THREADS = 128
ELEMENTS = 8
AT_ONCE = 4
"""Elements of a thread in flight, in as many parts: 32 bytes each."""


class MultiplyTensors(NamedTuple):
    """Global memory that the kernel accesses.

    Read: dinput (n, d) and dweight (V, d) fp32, the accumulators, contiguous, d a multiple of 8; dloss (n,)
    fp32 with any stride (0: one number); num_valid (1,) int64; source (n,) int32, at address 0 instead target
    (n,) int64, or narrow_target int32, with any stride: arguments.Products. Written: the products, dinput_out
    in 16 bits and dweight_out in its type, to which dweight's may be added instead. One that is not needed
    has no rows.
    """

    dinput: cute.Tensor
    dweight: cute.Tensor
    dinput_out: cute.Tensor
    dweight_out: cute.Tensor
    dloss: cute.Tensor
    num_valid: cute.Tensor
    target: cute.Tensor
    narrow_target: cute.Tensor
    is_narrow: Boolean
    source: cute.Tensor
    loss: LossArguments


class Multiply:
    """A block for each row of either, a thread of which has AT_ONCE times 8 elements in flight.

    Args:
        adds: whether dweight's product is added to what is there.
    """

    def __init__(self, adds: bool):
        self.adds = adds

    @cute.jit
    def __call__(self, tensors: MultiplyTensors, stream: cuda.CUstream):
        rows = cute.size(tensors.dinput, mode=[0]) + cute.size(tensors.dweight, mode=[0])
        self.kernel(tensors).launch(grid=(rows, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, tensors: MultiplyTensors):
        pdl.begin()
        row, n = cute.arch.block_idx()[0], cute.size(tensors.dinput, mode=[0])
        if row < n:
            token, valid = self._token(tensors, row)
            # 0 times nan is nan: what flows into ignored rows does not matter.
            factor = Float32(0.0)
            if valid:
                factor = self._upstream(tensors, token)
            self._multiply(tensors.dinput, row, valid, tensors.dinput_out, token, factor, False)
        else:
            factor, row = self._upstream(tensors, Int32(0)), row - n
            self._multiply(tensors.dweight, row, Boolean(True), tensors.dweight_out, row, factor, self.adds)

    @cute.jit
    def _token(self, tensors: MultiplyTensors, row: Int32) -> tuple[Int32, Boolean]:
        """(which token a row of dinput is, whether that is not ignored)."""
        token, valid = row, Boolean(False)
        if tensors.source.iterator.toint() != 0:
            token = tensors.source[row]
            valid = Int64(row) < tensors.num_valid[0]
        else:
            target = Int64(0)
            if tensors.is_narrow:
                target = Int64(tensors.narrow_target[row])
            else:
                target = tensors.target[row]
            valid = target != tensors.loss.ignore_index
        return token, valid

    @cute.jit
    def _upstream(self, tensors: MultiplyTensors, row: Int32) -> Float32:
        """The gradient by a row's loss; of a sum or mean of no rows 0, whatever dloss is."""
        found, valid = tensors.dloss[row], tensors.num_valid[0]
        if tensors.loss.reduction == REDUCTIONS["mean"]:
            found = maths.mean_upstream(found, cutlass.max(Float32(valid), Float32(1.0)))
        if tensors.loss.reduction != REDUCTIONS["none"] and valid == 0:
            found = Float32(0.0)
        return found

    @cute.jit
    def _multiply(
        self,
        source: cute.Tensor,
        row: Int32,
        valid: Boolean,
        out: cute.Tensor,
        out_row: Int32,
        factor: Float32,
        adds: cutlass.Constexpr[bool],
    ):
        """A row of source, zeros unless `valid`, to one of out."""
        chunks = cute.size(source, mode=[1]) // ELEMENTS
        for first in cutlass.range(cute.arch.thread_idx()[0], chunks, THREADS * AT_ONCE, unroll=1):
            parts = cute.make_rmem_tensor((ELEMENTS, AT_ONCE), Float32)
            parts.fill(0.0)
            before = cute.make_rmem_tensor((ELEMENTS, AT_ONCE), out.element_type)
            # All loads before the first store: the compiler cannot know that they do not overlap.
            for i in cutlass.range_constexpr(AT_ONCE):
                chunk = first + i * THREADS
                if valid and chunk < chunks:
                    cute.autovec_copy(adjacent(source, row, chunk * ELEMENTS, ELEMENTS), parts[None, i])
                    if cutlass.const_expr(adds):
                        cute.autovec_copy(adjacent(out, out_row, chunk * ELEMENTS, ELEMENTS), before[None, i])
            for i in cutlass.range_constexpr(AT_ONCE):
                chunk = first + i * THREADS
                if chunk < chunks:
                    product = parts[None, i].load() * factor
                    if cutlass.const_expr(adds):
                        product = product + before[None, i].load().to(Float32)
                    rounded = cute.make_rmem_tensor(ELEMENTS, out.element_type)
                    rounded.store(product.to(out.element_type))
                    cute.autovec_copy(rounded, adjacent(out, out_row, chunk * ELEMENTS, ELEMENTS))
