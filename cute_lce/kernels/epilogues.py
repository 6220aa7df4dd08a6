"""What happens to a tile of fp32 logits in registers: the mathematics of the loss. Mainloops move data.

A mainloop calls, for every run (a row of tiles and a range of the vocabulary's tiles):

    state = epilogue.begin(tensors, rows)              # registers that live through the run
    epilogue.visit(tensors, state, frag, cols, tile)   # each slab of columns of each tile, in place
    epilogue.end(tensors, state, rows, window)         # results of the run

`rows` (rows,) and `cols` (cols,) are the thread's coordinates: its global row indices and, inside the tile,
its column indices. The architecture shows only in how many rows a thread has and over how many threads a
row is spread. An epilogue is a compile-time value; what it reads and writes in global memory is in its
NamedTuple of tensors.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16

from cute_lce.kernels import row_stats
from cute_lce.kernels.keep import KeepTensors

NO_COLUMN = -(2**30)  # a target column that no tile contains


class ForwardTensors(NamedTuple):
    """Global memory of the forward's epilogue, and its sizes.

    target (n,) int32 or int64. partials (windows, n, 2) fp32: maximum and sum of every window. target_logit
    (n,) fp32: written for rows whose target lies in [0, vocab). arrived (1,) int32: the combine kernel's
    counter, set to zero here.
    vocab: V; columns at and beyond it are masked with -inf.
    """

    target: cute.Tensor
    partials: cute.Tensor
    target_logit: cute.Tensor
    arrived: cute.Tensor
    vocab: Int32


class ForwardState(NamedTuple):
    """Per thread: statistics (rows,) of the columns seen in this run, and the rows' target columns."""

    row_max: cute.Tensor
    row_sum: cute.Tensor
    target: cute.Tensor


class ForwardEpilogue:
    """Row statistics of the logits, and the target's logit.

    Args:
        tile_n: columns of a tile.
        threads_per_row: 4 for WGMMA's accumulators, 1 for TMEM.
    """

    def __init__(self, tile_n: int, threads_per_row: int):
        self.tile_n = tile_n
        self.threads_per_row = threads_per_row

    @cute.jit
    def begin(self, tensors: ForwardTensors, rows: cute.Tensor) -> ForwardState:
        """Statistics of nothing: maximum -inf, sum 0. rows (rows,) int32, which may lie beyond n."""
        if rows[0] == 0:
            tensors.arrived[0] = Int32(0)
        count = cute.size(rows)
        row_max = cute.make_rmem_tensor(count, Float32)
        row_sum = cute.make_rmem_tensor(count, Float32)
        target = cute.make_rmem_tensor(count, Int32)
        for r in cutlass.range_constexpr(count):
            row_max[r] = -Float32.inf
            row_sum[r] = Float32(0.0)
            target[r] = Int32(NO_COLUMN)
            if rows[r] < cute.size(tensors.target):
                index = tensors.target[rows[r]]
                if index >= 0 and index < tensors.vocab:
                    target[r] = Int32(index)
        return ForwardState(row_max, row_sum, target)

    @cute.jit
    def visit(
        self,
        tensors: ForwardTensors,
        state: ForwardState,
        frag: cute.Tensor,  # (rows, cols) fp32
        rows: cute.Tensor,
        cols: cute.Tensor,
        tile: Int32,
    ):
        self.mask_and_catch(tensors, state, frag, rows, cols, tile * self.tile_n)
        row_stats.update(state.row_max, state.row_sum, frag)

    @cute.jit
    def mask_and_catch(
        self,
        tensors: ForwardTensors,
        state: ForwardState,
        frag: cute.Tensor,
        rows: cute.Tensor,
        cols: cute.Tensor,
        first: Int32,
    ):
        """Columns beyond the vocabulary become -inf; a target's logit in the fragment is written."""
        if first + self.tile_n > tensors.vocab:
            for c in cutlass.range_constexpr(cute.size(cols)):
                if first + cols[c] >= tensors.vocab:
                    for r in cutlass.range_constexpr(cute.size(rows)):
                        frag[r, c] = -Float32.inf
        for r in cutlass.range_constexpr(cute.size(rows)):
            column = state.target[r] - first
            if column >= 0 and column < self.tile_n:
                for c in cutlass.range_constexpr(cute.size(cols)):
                    if cols[c] == column:
                        tensors.target_logit[rows[r]] = frag[r, c]

    @cute.jit
    def end(self, tensors: ForwardTensors, state: ForwardState, rows: cute.Tensor, window: Int32):
        row_stats.merge_threads(state.row_max, state.row_sum, self.threads_per_row)
        if cute.arch.lane_idx() % self.threads_per_row == 0:
            for r in cutlass.range_constexpr(cute.size(rows)):
                if rows[r] < cute.size(tensors.target):
                    tensors.partials[window, rows[r], 0] = state.row_max[r]
                    tensors.partials[window, rows[r], 1] = state.row_sum[r]


class KeepForwardTensors(NamedTuple):
    """The forward's tensors, those of what it keeps, and the ignored target, whose rows keep zeros."""

    forward: ForwardTensors
    keep: KeepTensors
    ignore_index: Int64


class KeepState(NamedTuple):
    """The forward's state; per row, K and whether the row counts."""

    forward: ForwardState
    reference: cute.Tensor
    counts: cute.Tensor


class KeepEpilogue:
    """The forward's epilogue, which also keeps the exponentials of the first columns; see kernels.keep.

    A kept fragment's exponentials are computed once, relative to the row's K, for the operand and for the
    statistics.
    A fragment of a row has one j: `unit` columns, the tile or the slab that a visit sees.
    """

    def __init__(self, tile_n: int, unit: int, threads_per_row: int):
        self.tile_n = tile_n
        self.unit = unit
        self.threads_per_row = threads_per_row
        self.forward = ForwardEpilogue(tile_n, threads_per_row)

    @cute.jit
    def begin(self, tensors: KeepForwardTensors, rows: cute.Tensor) -> KeepState:
        count = cute.size(rows)
        reference, counts = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Int32)
        for r in cutlass.range_constexpr(count):
            reference[r], counts[r] = Float32(0.0), Int32(0)
            if rows[r] < cute.size(tensors.forward.target):
                reference[r] = tensors.keep.reference[rows[r]]
                if Int64(tensors.forward.target[rows[r]]) != tensors.ignore_index:
                    counts[r] = Int32(1)
        return KeepState(self.forward.begin(tensors.forward, rows), reference, counts)

    @cute.jit
    def visit(
        self,
        tensors: KeepForwardTensors,
        state: KeepState,
        frag: cute.Tensor,  # (rows, cols) fp32
        rows: cute.Tensor,
        cols: cute.Tensor,
        tile: Int32,
    ):
        first = tile * self.tile_n
        self.forward.mask_and_catch(tensors.forward, state.forward, frag, rows, cols, first)
        if first < tensors.keep.columns:
            for r in cutlass.range_constexpr(cute.size(rows)):
                steps = row_stats.update_relative(
                    state.forward.row_max,
                    state.forward.row_sum,
                    frag,
                    state.reference[r],
                    r,
                    self.threads_per_row,
                )
                if state.counts[r] == 0:
                    for c in cutlass.range_constexpr(cute.size(cols)):
                        frag[r, c] = Float32(0.0)
                if rows[r] < cute.size(tensors.forward.target):
                    if self._notes(tensors, cols, first):
                        tensors.keep.raised[(first + cols[0]) // self.unit, rows[r]] = Uint16(steps)
                        if steps > 0:
                            cute.arch.red(
                                (tensors.keep.most_raised.iterator + rows[r]),
                                steps,
                                op="max",
                                dtype="s32",
                                sem="relaxed",
                                scope="gpu",
                            )
            store_rows(tensors.keep.kept, frag, rows, cols, first, self.threads_per_row)
        else:
            row_stats.update(state.forward.row_max, state.forward.row_sum, frag)

    def _notes(self, tensors: KeepForwardTensors, cols: cute.Tensor, first: Int32):
        """Whether this is the one of the threads that share a row that notes its j."""
        if self.unit < self.tile_n:
            # A thread has the whole row; a slab of its tile may lie beyond the vocabulary, where no note is.
            return first + cols[0] < tensors.keep.columns
        return cols[0] % 8 == 0

    @cute.jit
    def end(self, tensors: KeepForwardTensors, state: KeepState, rows: cute.Tensor, window: Int32):
        self.forward.end(tensors.forward, state.forward, rows, window)


class DlogitsTensors(NamedTuple):
    """Global memory of the backward's first epilogue, for a stripe of the vocabulary, and its sizes.

    target (n,) int32 or int64. row_max, row_sum (n,) fp32: the forward's. dloss (n,) fp32, any stride (0:
    one number). num_valid (1,) int64. dlogits (n, columns) in the operands' dtype, rows 16-byte aligned:
    what is written.
    first: the stripe's first column. vocab: the stripe's columns. mean: whether the loss was divided by
    num_valid.
    """

    target: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    dloss: cute.Tensor
    num_valid: cute.Tensor
    dlogits: cute.Tensor
    ignore_index: Int64
    first: Int32
    vocab: Int32
    mean: Int32


class DlogitsState(NamedTuple):
    """Per thread and row: what logits are relative to, what exponentials and the onehot are multiplied by,
    the column of the target in the stripe, and whether the row counts."""

    ref: cute.Tensor
    factor: cute.Tensor
    onehot: cute.Tensor
    target: cute.Tensor
    counts: cute.Tensor


class DlogitsEpilogue:
    """dlogits = grad_scale (softmax - onehot), rounded once; an ignored row's are 0, whatever its logits.

    Args:
        tile_n: columns of a tile.
        scaled: whether grad_scale, a row's upstream gradient, is in the dlogits. float16 lacks the range
            for it and leaves it to the gradients' epilogues.
    """

    def __init__(self, tile_n: int, threads_per_row: int, scaled: bool):
        self.tile_n = tile_n
        self.threads_per_row = threads_per_row
        self.scaled = scaled

    @cute.jit
    def begin(self, tensors: DlogitsTensors, rows: cute.Tensor) -> DlogitsState:
        count = cute.size(rows)
        ref, factor, onehot = (cute.make_rmem_tensor(count, Float32) for _ in range(3))
        target, counts = cute.make_rmem_tensor(count, Int32), cute.make_rmem_tensor(count, Int32)
        for r in cutlass.range_constexpr(count):
            ref[r], factor[r], onehot[r] = Float32(0.0), Float32(0.0), Float32(0.0)
            target[r], counts[r] = Int32(NO_COLUMN), Int32(0)
            if rows[r] < cute.size(tensors.target):
                index = Int64(tensors.target[rows[r]])
                if index != tensors.ignore_index:
                    counts[r] = Int32(1)
                    scale = Float32(1.0)
                    if cutlass.const_expr(self.scaled):
                        scale = tensors.dloss[rows[r]]
                        if tensors.mean != 0:
                            scale = scale / Float32(tensors.num_valid[0])
                    ref[r] = row_stats.reference(tensors.row_max[rows[r]])
                    factor[r] = scale / tensors.row_sum[rows[r]]
                    onehot[r] = scale
                    index = index - tensors.first
                    if index >= 0 and index < tensors.vocab:
                        target[r] = Int32(index)
        return DlogitsState(ref, factor, onehot, target, counts)

    @cute.jit
    def visit(
        self,
        tensors: DlogitsTensors,
        state: DlogitsState,
        frag: cute.Tensor,  # (rows, cols) fp32
        rows: cute.Tensor,
        cols: cute.Tensor,
        tile: Int32,
    ):
        first = tile * self.tile_n
        for r in cutlass.range_constexpr(cute.size(rows)):
            for c in cutlass.range_constexpr(cute.size(cols)):
                frag[r, c] = state.factor[r] * cute.math.exp2(
                    (frag[r, c] - state.ref[r]) * Float32(row_stats.LOG2_E), fastmath=True
                )
            column = state.target[r] - first
            if column >= 0 and column < self.tile_n:
                for c in cutlass.range_constexpr(cute.size(cols)):
                    if cols[c] == column:
                        frag[r, c] = frag[r, c] - state.onehot[r]
            if state.counts[r] == 0:
                for c in cutlass.range_constexpr(cute.size(cols)):
                    frag[r, c] = Float32(0.0)
        store_rows(tensors.dlogits, frag, rows, cols, first, self.threads_per_row)

    @cute.jit
    def end(self, tensors: DlogitsTensors, state: DlogitsState, rows: cute.Tensor, window: Int32):
        pass


class GradientTensors(NamedTuple):
    """Global memory of a gradient's epilogue.

    out (m, n) in the operands' dtype, written when `last`. accumulator (m, n) fp32: read unless `first`,
    written unless `last`. factor (m,) fp32 with any stride (0: one number): what the product's rows are
    multiplied by; at address 0: ones.
    """

    out: cute.Tensor
    accumulator: cute.Tensor
    factor: cute.Tensor
    first: Int32
    last: Int32


class GradientEpilogue:
    """A product whose rows are scaled, added to those of earlier stripes in fp32, and after the last one
    rounded once.

    Args:
        tile_n: columns of a tile.
    """

    def __init__(self, tile_n: int, threads_per_row: int):
        self.tile_n = tile_n
        self.threads_per_row = threads_per_row

    @cute.jit
    def begin(self, tensors: GradientTensors, rows: cute.Tensor):
        factor = cute.make_rmem_tensor(cute.size(rows), Float32)
        scaled = tensors.factor.iterator.toint() != 0
        for r in cutlass.range_constexpr(cute.size(rows)):
            factor[r] = Float32(1.0)
            if scaled and rows[r] < cute.size(tensors.out, mode=[0]):
                factor[r] = tensors.factor[rows[r]]
        return factor

    @cute.jit
    def visit(
        self,
        tensors: GradientTensors,
        factor: cute.Tensor,
        frag: cute.Tensor,  # (rows, cols) fp32
        rows: cute.Tensor,
        cols: cute.Tensor,
        tile: Int32,
    ):
        first = tile * self.tile_n
        for r in cutlass.range_constexpr(cute.size(rows)):
            for c in cutlass.range_constexpr(cute.size(cols)):
                frag[r, c] = frag[r, c] * factor[r]
        if tensors.first == 0:
            add_pairs(tensors.accumulator, frag, rows, cols, first)
        if tensors.last == 0:
            store_pairs(tensors.accumulator, frag, rows, cols, first)
        else:
            store_rows(tensors.out, frag, rows, cols, first, self.threads_per_row)

    @cute.jit
    def end(self, tensors: GradientTensors, factor: cute.Tensor, rows: cute.Tensor, window: Int32):
        pass


@cute.jit
def _pair(matrix: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
    """Two neighbouring elements of a row-major matrix, the first of an even column of rows that are 16-byte
    aligned."""
    pointer = matrix.iterator + (Int64(row) * matrix.stride[0] + column)
    return cute.make_tensor(
        cute.make_ptr(
            matrix.element_type,
            pointer.toint(),
            cute.AddressSpace.gmem,
            assumed_align=matrix.element_type.width // 4,
        ),
        cute.make_layout(2),
    )


@cute.jit
def store_pairs(matrix: cute.Tensor, frag: cute.Tensor, rows: cute.Tensor, cols: cute.Tensor, first: Int32):
    """Round a fragment to the matrix's type and store it; cols come in neighbouring pairs. Outside stays
    untouched, except that where the matrix has an odd number of columns the padding of its rows gets one
    more."""
    width = cute.size(matrix, mode=[1])
    for r in cutlass.range_constexpr(cute.size(rows)):
        if rows[r] < cute.size(matrix, mode=[0]):
            for c in cutlass.range_constexpr(0, cute.size(cols), 2):
                if first + cols[c] < width:
                    values = cute.make_rmem_tensor(2, Float32)
                    values[0], values[1] = frag[r, c], frag[r, c + 1]
                    pair = cute.make_rmem_tensor(2, matrix.element_type)
                    pair.store(values.load().to(matrix.element_type))
                    cute.autovec_copy(pair, _pair(matrix, rows[r], first + cols[c]))


@cute.jit
def store_rows(
    matrix: cute.Tensor,
    frag: cute.Tensor,
    rows: cute.Tensor,
    cols: cute.Tensor,
    first: Int32,
    threads_per_row: cutlass.Constexpr[int],
):
    """Round a fragment to the matrix's 16-bit type and store it, 16 bytes a thread at once.

    The matrix's rows begin at multiples of 16 bytes and have room for a multiple of 8 columns; the room
    beyond the last column gets numbers of no meaning. With 4 threads a row (WGMMA) a thread has 2 of every 8
    columns: the four exchange them for 8 of every 32, a transposition of 4 x 4 words by two rounds of
    shuffles.
    """
    width = cute.size(matrix, mode=[1])
    lane = cute.arch.lane_idx() % threads_per_row
    for r in cutlass.range_constexpr(cute.size(rows)):
        for c in cutlass.range_constexpr(0, cute.size(cols), 8):
            values = cute.make_rmem_tensor(8, Float32)
            for i in cutlass.range_constexpr(8):
                values[i] = frag[r, c + i]
            rounded = cute.make_rmem_tensor(8, matrix.element_type)
            rounded.store(values.load().to(matrix.element_type))
            column = first + cols[c]
            if cutlass.const_expr(threads_per_row == 4):
                _transpose_words(cute.recast_tensor(rounded, Int32), lane)
                # This thread's pair of columns in the first of four blocks of 8 -> its block.
                column = first + cols[c] + 6 * lane
            if rows[r] < cute.size(matrix, mode=[0]) and column < width:
                pointer = matrix.iterator + (Int64(rows[r]) * matrix.stride[0] + column)
                target = cute.make_ptr(
                    matrix.element_type, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16
                )
                cute.autovec_copy(rounded, cute.make_tensor(target, cute.make_layout(8)))


@cute.jit
def _transpose_words(words: cute.Tensor, lane: Int32):
    """Word i of lane j of four neighbouring lanes <-> word j of lane i, in place."""
    for step in cutlass.range_constexpr(1, 3):
        upper = (lane & step) != 0
        for i in cutlass.range_constexpr(4):
            if cutlass.const_expr(i & step == 0):
                low, high = words[i], words[i + step]
                sent = Int32(cutlass.select_(upper, low, high))
                got = cute.arch.shuffle_sync_bfly(sent, offset=step)
                words[i] = Int32(cutlass.select_(upper, got, low))
                words[i + step] = Int32(cutlass.select_(upper, high, got))


@cute.jit
def add_pairs(matrix: cute.Tensor, frag: cute.Tensor, rows: cute.Tensor, cols: cute.Tensor, first: Int32):
    """Add the matrix's elements to a fragment, in place; cols come in neighbouring pairs.

    What lies outside of the matrix gets elements of its last row or columns: without a condition all loads
    can be under way at once.
    """
    last_row, last_pair = cute.size(matrix, mode=[0]) - 1, cute.size(matrix, mode=[1]) - 2
    for r in cutlass.range_constexpr(cute.size(rows)):
        row = cutlass.min(rows[r], last_row)
        for c in cutlass.range_constexpr(0, cute.size(cols), 2):
            pair = cute.make_rmem_tensor(2, matrix.element_type)
            cute.autovec_copy(_pair(matrix, row, cutlass.min(first + cols[c], last_pair)), pair)
            frag[r, c] = frag[r, c] + pair[0]
            frag[r, c + 1] = frag[r, c + 1] + pair[1]
