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

ELEMENTS = 4  # of a lane, in two registers: a spare warp of a forward has few
BLOCK_WARPS = 4
ABREAST, FEW_ABREAST = 8, 2
"""Columns of a warp of AddSlabs. ABREAST: 32 bytes of a slab; FEW_ABREAST: a block's warps read 32 bytes
together."""


class SlabTensors(NamedTuple):
    """Read: matrix (rows, columns) 16-bit, rows of 16 bytes; factor (rows,) fp32, or None: ones. Written at
    partials: (slabs, columns) fp32. slab: its rows. split: a row with which a slab begins; 0: there is none
    but the first. of: which rows are computed; None: all. beside: whether spare warps sum (0 or 1)."""

    matrix: cute.Tensor
    factor: Any
    partials: Int64
    slab: Int32
    split: Int32 | int = 0
    of: Compacted | None = None
    beside: Int32 | int = 1

    @property
    def count(self) -> Int32:
        """Of rows that are computed."""
        return _count(cute.size(self.matrix, mode=[0]), self.of)


class SlabSums:
    """The sums of each slab of rows, times the rows' factors. A warp sums 128 columns of a slab, a lane 4.
    Reads 2 bytes an element. It is a kernel of blocks of BLOCK_WARPS, of 32 registers and without shared
    memory, or what spare warps of a GEMM do beside it (gemm.Gemm), in the 24 of a load warp.

    Args:
        scale: multiplies the sums.
        skips: whether rows with the factor 0 count for nothing, whatever they hold.
    """

    fits_load_registers = True

    def __init__(self, scale: float = 1.0, *, skips: bool = False):
        self.scale = scale
        self.skips = skips

    @cute.jit
    def __call__(self, tensors: SlabTensors, stream: cuda.CUstream):
        rows, columns = tensors.matrix.shape
        units = (_slabs(rows, tensors.slab) + 1) * _wide(columns)
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
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        self._parts(tensors, block * BLOCK_WARPS + warp, blocks * BLOCK_WARPS)

    @cute.jit
    def beside(self, tensors: SlabTensors, first: Int32, step: Int32):
        """Of a warp of a GEMM."""
        if tensors.beside != 0:
            self._parts(tensors, first, step)

    @cute.jit
    def _parts(self, tensors: SlabTensors, first: Int32, step: Int32):
        """Of a warp: the parts of slabs first, first + step, ..."""
        columns = cute.size(tensors.matrix, mode=[1])
        wide = _wide(columns)
        before, count = _slabs(tensors.split, tensors.slab), tensors.count
        units = (before + _slabs(count - tensors.split, tensors.slab)) * wide
        for unit in cutlass.range(first, units, step, unroll=1):
            number = unit // wide
            column = (unit % wide * LANES + cute.arch.lane_idx()) * ELEMENTS
            begin, end = number * tensors.slab, cutlass.min(count, tensors.split)
            if number >= before:
                begin, end = begin - before * tensors.slab + tensors.split, count
            end = cutlass.min(begin + tensors.slab, end)
            if column < columns:
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
                    if cutlass.const_expr(self.skips):
                        term = Float32(cutlass.select_(own == 0, Float32(0.0), term))
                    sums[k] += term
        out = numbers(tensors.partials + 4 * (Int64(number) * columns), columns)
        for i in cutlass.range_constexpr(ELEMENTS):
            if column + i < columns:
                out[column + i] = sums[i] * Float32(self.scale)

    def _at(self, matrix: cute.Tensor, address: Int64) -> cute.Tensor:
        pointer = cute.make_ptr(matrix.element_type, address, cute.AddressSpace.gmem, assumed_align=8)
        return cute.make_tensor(pointer, cute.make_layout(ELEMENTS))


class AddTensors(NamedTuple):
    """Read: partials, as SlabTensors', of `count` rows in slabs of so many, of those that `of` has computed.
    Written: out (columns,) fp32: the sums, with `adds` more by what was there. above (columns,) fp32, or
    None: the sums of the rows before `split`, SlabTensors'."""

    partials: Int64
    out: cute.Tensor
    slab: Int32
    count: Int32
    adds: Boolean | bool = False
    of: Compacted | None = None
    split: Int32 | int = 0
    above: Any = None


class AddSlabs:
    """The sums of all slabs, in float64. Four lanes have a column, each every fourth slab, and then add up
    what they have; or 16 lanes, each every 16th. Reads 4 bytes for each slab and column. 28 registers, no
    shared memory.

    Args:
        scale: multiplies the sums.
        few: of few columns with many slabs, so that 16 lanes have a column.
    """

    def __init__(self, scale: float = 1.0, *, few: bool = False):
        self.scale = scale
        self.abreast = FEW_ABREAST if few else ABREAST

    @cute.jit
    def __call__(self, tensors: AddTensors, stream: cuda.CUstream):
        blocks = cute.ceil_div(cute.size(tensors.out), BLOCK_WARPS * self.abreast)
        self.kernel(tensors).launch(
            grid=(blocks, 1, 1), block=(LANES * BLOCK_WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tensors: AddTensors):
        pdl.begin()
        lane, columns = cute.arch.lane_idx(), cute.size(tensors.out)
        warp = cute.arch.block_idx()[0] * BLOCK_WARPS + cute.arch.warp_idx()
        own = warp * self.abreast + lane % self.abreast
        count = _count(tensors.count, tensors.of)
        before = _slabs(tensors.split, tensors.slab)
        total = self._total(tensors, own, Int32(0), before)
        if cutlass.const_expr(tensors.above is not None):
            if own < columns and lane < self.abreast:
                tensors.above[own] = (total * Float64(self.scale)).to(Float32)
        total += self._total(tensors, own, before, before + _slabs(count - tensors.split, tensors.slab))
        if own < columns and lane < self.abreast:
            total *= Float64(self.scale)
            if Boolean(tensors.adds):
                total += tensors.out[own].to(Float64)
            tensors.out[own] = total.to(Float32)

    @cute.jit
    def _total(self, tensors: AddTensors, own: Int32, begin: Int32, end: Int32) -> Float64:
        """Of a column's slabs from `begin` on, in each of its lanes."""
        columns, total = cute.size(tensors.out), Float64(0.0)
        first, together = begin + cute.arch.lane_idx() // self.abreast, LANES // self.abreast
        if own < columns:
            for number in cutlass.range(first, end, together, unroll=8):
                partials = numbers(tensors.partials + 4 * (Int64(number) * columns), columns)
                total += partials[own].to(Float64)
        for apart in (16, 8, 4, 2):
            if cutlass.const_expr(apart >= self.abreast):
                total += cute.arch.shuffle_sync_bfly(total, apart)
        return total


def _count(rows: Int32, compacted: Compacted | None) -> Int32:
    return rows if compacted is None else computed(compacted)


def _slabs(rows: Int32, slab: Int32) -> Int32:
    """cute.ceil_div cannot be traced where one branch has a constant and the other a variable."""
    return (rows + slab - 1) // slab


def _wide(columns: Int32) -> Int32:
    """Warps that a slab's columns take."""
    return (columns + LANES * ELEMENTS - 1) // (LANES * ELEMENTS)
