"""Logits that a forward keeps, and dlogits of them: for gradients in which the share of a row's softmax is
not known before the backward, such as the entropy's (arguments.TERMS).

A unit (Fragment.unit), 32 classes of a token, has a note, its largest logit rounded to fp16, and of each of
its logits z what is kept is note - z, in fp16 too. So the error of z is at most 2^-11 of its distance from
the unit's largest, and that of its exponential, which falls faster than the distance rises, at most 2e-4 of
the unit's largest one; rounding to bf16 is an error of up to 2^-9 of a number itself. Where |z| is beyond
2^14 a note is off by up to 16, and so z by up to 2^-8. 2 bytes a logit, 2 a unit.

A row whose largest logit is beyond +-65504 nats becomes nan.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64

from cute_lce import maths
from cute_lce.arguments import TOPK_CLASSES, TOPK_TOKENS, LossArguments, units
from cute_lce.kernels import pdl
from cute_lce.kernels.adjacent import adjacent
from cute_lce.kernels.epilogues.ids import integers, starts_of
from cute_lce.kernels.epilogues.store import Output
from cute_lce.kernels.fragment import Fragment
from cute_lce.kernels.logits import gradient, has_slope, numbers, of_operands, slope_at
from cute_lce.kernels.rows import Compacted, computed

THREADS = 128
ELEMENTS = 8  # of a thread in a row
ROWS = TOPK_TOKENS  # of a block: 16, whose notes of a unit are 32 consecutive bytes
AT_ONCE = 4  # rows of a block whose loads are in flight together
LARGEST = 65504.0  # of fp16


class Notes(NamedTuple):
    """Where a forward stores what it keeps: the matrix, notes (units, n) fp16, and how many columns are kept:
    whole tiles, or all."""

    out: Output
    notes: cute.Tensor
    columns: Int32


def notes_of(address: Int64, columns: Int32, n: Int32) -> cute.Tensor:
    """The notes of so many columns."""
    pointer = cute.make_ptr(Float16, address, cute.AddressSpace.gmem, assumed_align=2)
    return cute.make_tensor(pointer, cute.make_layout((units(columns), n), stride=(Int64(n), 1)))


def note(highest: Float32) -> Float32:
    """Of a unit's largest logit, which may be -inf."""
    return cute.arch.fmax(highest, Float32(-LARGEST)).to(Float16).to(Float32)


class KeptTensors(NamedTuple):
    """Global memory of a launch of the backward, and its numbers.

    target (n,) int32 or int64. row_max, row_sum, dloss (n,) fp32: as DlogitsTensors', with the term
    "coefficients". kept (n, columns), notes (units, n) fp16: what the forward kept. dlogits (n, columns)
    16-bit: written. Rows of both matrices begin at multiples of 16 bytes. loss: its numbers. first: the
    stripe's first class. rows: which tokens these are.
    """

    target: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    dloss: cute.Tensor
    kept: cute.Tensor
    notes: cute.Tensor
    dlogits: cute.Tensor
    loss: LossArguments
    first: Int32
    rows: Compacted


class DlogitsOfKept:
    """dlogits of a stripe that was kept, rounded once; 0 in ignored rows. Moves 4 bytes an element.

    A block has 16 tokens and 1024 classes, a thread 8 adjacent ones of each token, whose loads of 16 bytes
    are in flight for AT_ONCE tokens together. No shared memory.
    """

    def __init__(self, fragment: Fragment):
        """fragment: of the logits' GEMM, whose units are the forward's, whatever the width of tiles."""
        self.fragment = fragment

    @cute.jit
    def __call__(self, tensors: KeptTensors, stream: cuda.CUstream):
        n, columns = tensors.dlogits.shape
        grid = (cute.ceil_div(n, ROWS), cute.ceil_div(columns, ELEMENTS * THREADS), 1)
        self.kernel(tensors).launch(grid=grid, block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, tensors: KeptTensors):
        pdl.begin()
        group, block, _ = cute.arch.block_idx()
        column = (block * THREADS + cute.arch.thread_idx()[0]) * ELEMENTS
        begin = group * ROWS
        end = cutlass.min(begin + ROWS, computed(tensors.rows))
        if column < cute.size(tensors.kept, mode=[1]) and begin < end:
            weight = self._class_weights(tensors, column)
            unit = self.fragment.unit(column)
            entry, last = self._entries(tensors, column, begin)
            for row in cutlass.range(begin, end, AT_ONCE, unroll=1):
                # All loads before the first store: the compiler cannot know that they do not overlap.
                below = cute.make_rmem_tensor((ELEMENTS, AT_ONCE), Float16)
                below.fill(0.0)
                for i in cutlass.range_constexpr(AT_ONCE):
                    if row + i < end:
                        cute.autovec_copy(adjacent(tensors.kept, row + i, column, ELEMENTS), below[None, i])
                for i in cutlass.range_constexpr(AT_ONCE):
                    if row + i < end:
                        entry = self._row(tensors, below[None, i], unit, row + i, column, weight, entry, last)

    def _class_weights(self, tensors: KeptTensors, column: Int32) -> Any:
        """Of a thread's classes; None where there are none."""
        loss = tensors.loss
        if "uniform" not in loss.terms or "class_weight" not in loss.terms:
            return None
        last = tensors.first + cute.size(tensors.kept, mode=[1]) - 1
        given = numbers(loss.class_weight, last + 1)
        return [given[cutlass.min(tensors.first + column + i, last)] for i in range(ELEMENTS)]

    @cute.jit
    def _entries(self, tensors: KeptTensors, column: Int32, begin: Int32):
        """The first of the given ids of a block's tokens in a thread's unit of TOPK_CLASSES, and where they
        end: by rising tokens."""
        first = last = Int32(0)
        if cutlass.const_expr("topk" in tensors.loss.terms):
            block = (tensors.rows.first + begin) // TOPK_TOKENS
            at = (tensors.first + column) // TOPK_CLASSES * tensors.loss.topk_blocks + block
            starts = starts_of(tensors.loss)
            first, last = starts[at], starts[at + 1]
        return first, last

    @cute.jit
    def _row(
        self,
        tensors: KeptTensors,
        below: cute.Tensor,  # (8,) fp16
        unit: Int32,
        row: Int32,
        column: Int32,
        weight,
        entry: Int32,
        last: Int32,
    ) -> Int32:
        """A thread's elements of a row. Of the given ids' entries, up to `last`, this row's begin at `entry`;
        returns where they end."""
        kind = tensors.dlogits.element_type
        result = cute.make_rmem_tensor(ELEMENTS, kind)
        result.fill(0.0)
        index = Int64(tensors.target[row])
        if index != tensors.loss.ignore_index:
            highest = tensors.notes[unit, row].to(Float32)
            found = self._gradients(tensors, below, highest, row, weight)
            index -= tensors.first + column
            if index >= 0 and index < ELEMENTS:
                onehot = tensors.dloss[row]
                for i in cutlass.range_constexpr(ELEMENTS):
                    if index == i:
                        found[i] = maths.dlogits(found[i], onehot)
            if cutlass.const_expr("topk" in tensors.loss.terms):
                entry = self._add_ids(tensors, found, row, column, entry, last)
            result.store(found.load().to(kind))
        cute.autovec_copy(result, adjacent(tensors.dlogits, row, column, ELEMENTS))
        return entry

    @cute.jit
    def _add_ids(
        self,
        tensors: KeptTensors,
        found: cute.Tensor,
        row: Int32,
        column: Int32,
        entry: Int32,
        last: Int32,
    ) -> Int32:
        """Add the gradients of a row's given ids."""
        loss, token = tensors.loss, tensors.rows.first + row
        entries, values = integers(loss.topk_entries, last), numbers(loss.topk_values, last)
        own = (tensors.first + column) % TOPK_CLASSES
        more = entry < last
        while more:
            each = entries[entry]
            more = each // TOPK_CLASSES == token
            if more:
                at = each % TOPK_CLASSES - own
                if at >= 0 and at < ELEMENTS:
                    value = values[entry]
                    for i in cutlass.range_constexpr(ELEMENTS):
                        found[i] = found[i] + Float32(cutlass.select_(at == i, value, Float32(0.0)))
                entry += 1
                more = entry < last
        return entry

    def _gradients(
        self, tensors: KeptTensors, below: cute.Tensor, highest: Float32, row: Int32, weight
    ) -> cute.Tensor:
        """By products, but for the onehot. highest: the unit's note."""
        loss, n = tensors.loss, cute.size(tensors.target)
        token = of_operands(tensors.rows, row)
        row_max = tensors.row_max[row]
        fits = cute.math.absf(row_max) <= Float32(LARGEST)
        factor = Float32(cutlass.select_(fits, tensors.row_sum[row], Float32(float("nan"))))
        gap = uniform = slope_of = None
        if "gap" in loss.terms:
            gap = numbers(loss.gap, n)[token]
        if "uniform" in loss.terms:
            uniform = numbers(loss.uniform, n)[token]
        if has_slope(loss):
            slope_of = slope_at(loss, token)
        found = cute.make_rmem_tensor(ELEMENTS, Float32)
        for i in range(ELEMENTS):
            distance = below[i].to(Float32)
            slope = None if slope_of is None else slope_of(highest - distance)
            one = uniform if weight is None else uniform * weight[i]
            found[i] = gradient((highest - row_max) - distance, factor, gap, one, slope)
        return found
