"""Sums over the rows of a matrix: of slabs of rows, and then of these, so that their order depends on the
shape alone."""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Float64, Int32, Int64

from cute_lce.kernels import pdl
from cute_lce.kernels.adjacent import AT_ONCE, LANES, adjacent
from cute_lce.kernels.logits import numbers
from cute_lce.kernels.rows import Compacted, computed

ELEMENTS = 4  # of a lane
BLOCK_WARPS = 4
ABREAST = 8  # columns of a warp of AddSlabs: 32 bytes of a slab


class SlabTensors(NamedTuple):
    """Read: matrix (rows, columns) 16-bit, rows of 16 bytes; factor (rows,) fp32, or None: ones. Written at
    partials: (slabs, columns) fp32. slab: its rows. of: which rows are computed."""

    matrix: cute.Tensor
    factor: Any
    partials: Int64
    slab: Int32
    of: Compacted


class SlabSums:
    """The sums of each slab of rows, times the rows' factors. A warp sums 128 columns of a slab, a lane 4.
    Reads 2 bytes an element. 32 registers, no shared memory. scale: multiplies the sums."""

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    @cute.jit
    def __call__(self, tensors: SlabTensors, stream: cuda.CUstream):
        rows, columns = tensors.matrix.shape
        units = _slabs(rows, tensors.slab) * _wide(columns)
        self.kernel(tensors).launch(
            grid=(cute.ceil_div(units, BLOCK_WARPS), 1, 1),
            block=(LANES * BLOCK_WARPS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, tensors: SlabTensors):
        pdl.begin()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        unit, columns = cute.arch.block_idx()[0] * BLOCK_WARPS + warp, cute.size(tensors.matrix, mode=[1])
        wide = _wide(columns)
        number = unit // wide
        column = (unit % wide * LANES + cute.arch.lane_idx()) * ELEMENTS
        begin = number * tensors.slab
        end = cutlass.min(begin + tensors.slab, computed(tensors.of))
        if begin < end and column < columns:
            self._sums(tensors, number, column, begin, end)

    @cute.jit
    def _sums(self, tensors: SlabTensors, number: Int32, column: Int32, begin: Int32, end: Int32):
        """A lane's columns of a slab."""
        matrix, columns = tensors.matrix, cute.size(tensors.matrix, mode=[1])
        sums = cute.make_rmem_tensor(ELEMENTS, Float32)
        sums.fill(0.0)
        # Not row * pitch, which takes registers.
        pitch = matrix.stride[0] * (matrix.element_type.width // 8)
        address = adjacent(matrix, begin, column, ELEMENTS).iterator.toint()
        for row in cutlass.range(begin, end, AT_ONCE, unroll=1):
            values = cute.make_rmem_tensor((ELEMENTS, AT_ONCE), matrix.element_type)
            values.fill(0.0)
            for i in cutlass.range_constexpr(AT_ONCE):
                if row + i < end:
                    cute.autovec_copy(self._at(matrix, address), values[None, i])
                address += pitch
            for i in cutlass.range_constexpr(AT_ONCE):
                own = Float32(1.0)
                if cutlass.const_expr(tensors.factor is not None):
                    own = tensors.factor[cutlass.min(row + i, end - 1)]
                for k in cutlass.range_constexpr(ELEMENTS):
                    term = values[k, i].to(Float32)
                    if cutlass.const_expr(tensors.factor is not None):
                        term *= own
                    sums[k] += term
        out = numbers(tensors.partials + 4 * (Int64(number) * columns), columns)
        for i in cutlass.range_constexpr(ELEMENTS):
            if column + i < columns:
                out[column + i] = sums[i] * Float32(self.scale)

    def _at(self, matrix: cute.Tensor, address: Int64) -> cute.Tensor:
        pointer = cute.make_ptr(matrix.element_type, address, cute.AddressSpace.gmem, assumed_align=8)
        return cute.make_tensor(pointer, cute.make_layout(ELEMENTS))


class AddTensors(NamedTuple):
    """Read: partials, as SlabTensors', of slabs of so many rows, of those that `of` has computed.
    Written: out (columns,) fp32: the sums, with `adds` more by what was there."""

    partials: Int64
    out: cute.Tensor
    slab: Int32
    adds: Boolean
    of: Compacted


class AddSlabs:
    """The sums of all slabs, in float64. Four lanes have a column, each every fourth slab, and then add up
    what they have. Reads 4 bytes for each slab and column. 28 registers, no shared memory. scale: multiplies
    the sums."""

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    @cute.jit
    def __call__(self, tensors: AddTensors, stream: cuda.CUstream):
        blocks = cute.ceil_div(cute.size(tensors.out), BLOCK_WARPS * ABREAST)
        self.kernel(tensors).launch(
            grid=(blocks, 1, 1), block=(LANES * BLOCK_WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tensors: AddTensors):
        pdl.begin()
        lane, columns = cute.arch.lane_idx(), cute.size(tensors.out)
        warp = cute.arch.block_idx()[0] * BLOCK_WARPS + cute.arch.warp_idx()
        own = warp * ABREAST + lane % ABREAST
        total = self._total(tensors, own)
        if own < columns and lane < ABREAST:
            total *= Float64(self.scale)
            if tensors.adds:
                total += tensors.out[own].to(Float64)
            tensors.out[own] = total.to(Float32)

    @cute.jit
    def _total(self, tensors: AddTensors, own: Int32) -> Float64:
        """Of a column, in each of its lanes."""
        columns, total = cute.size(tensors.out), Float64(0.0)
        slabs = _slabs(computed(tensors.of), tensors.slab)
        if own < columns:
            for number in cutlass.range(cute.arch.lane_idx() // ABREAST, slabs, LANES // ABREAST, unroll=8):
                partials = numbers(tensors.partials + 4 * (Int64(number) * columns), columns)
                total += partials[own].to(Float64)
        for apart in (16, 8):
            total += cute.arch.shuffle_sync_bfly(total, apart)
        return total


def _slabs(rows: Int32, slab: Int32) -> Int32:
    """cute.ceil_div cannot be traced where one branch has a constant and the other a variable."""
    return (rows + slab - 1) // slab


def _wide(columns: Int32) -> Int32:
    """Warps that a slab's columns take."""
    return (columns + LANES * ELEMENTS - 1) // (LANES * ELEMENTS)
