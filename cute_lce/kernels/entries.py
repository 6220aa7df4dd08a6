"""The entries of what a forward kept whose gradient is more than a share of the softmax: those of a target
and of given ids, where their coefficients over the softmax's were not known in the forward.

What is kept is E = p slope / kept_scale (kernels/keep.py). With c the softmax's coefficient in a row's
gradient by z, and a the sum of the coefficients of onehots at a class, the entry becomes

    E' = (p + a / c) slope / kept_scale

so that c kept_scale E' is the gradient there, as c kept_scale E is elsewhere. p is of the logit in
fp32, and E' is rounded once: in bf16, whose range is fp32's, also where it is far larger than E. A c of 0, or
of much less than the onehots' coefficients, is launch.entries' to replace.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_lce.arguments import GradientOperands, LossArguments, Statistics
from cute_lce.kernels import pdl
from cute_lce.kernels.adjacent import LANES
from cute_lce.kernels.epilogues.ids import integers
from cute_lce.kernels.logits import numbers
from cute_lce.kernels.rows import Compacted, computed, origin
from cute_lce.maths import LOG2_E

WARPS = 4
NOWHERE = -1


class EntryTensors(NamedTuple):
    """Global memory of the launches, and their numbers.

    target (n,) int32 or int64, kept (n, columns) 16-bit and kept_scale (n,) fp32: by the launch's tokens;
    kept is written. row_max and row_sum (..,) fp32: by the tokens' origins, as the loss's vectors are. before
    (n, entries + 1) 16-bit: what the entries were, the target's last; at address 0 it is not written. rows:
    which tokens these are.
    """

    target: cute.Tensor
    kept: cute.Tensor
    kept_scale: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    before: cute.Tensor
    loss: LossArguments
    rows: Compacted


def entries_of(
    kept: cute.Tensor,
    target: cute.Tensor,
    statistics: Statistics,
    source: GradientOperands,
    loss,
    tokens: Compacted,
) -> EntryTensors:
    """kept, target: of the launch's tokens."""
    n, everything, count = cute.size(target), cute.size(tokens.source), loss.entries + 1
    before = cute.make_ptr(kept.element_type, loss.entries_before, cute.AddressSpace.gmem, assumed_align=2)
    return EntryTensors(
        target=target,
        kept=kept,
        kept_scale=numbers(source.kept_scale, n),
        row_max=numbers(statistics.row_max, everything),
        row_sum=numbers(loss.entry_row_sum, everything),
        before=cute.make_tensor(before, cute.make_layout((n, count), stride=(Int64(count), 1))),
        loss=loss,
        rows=tokens,
    )


class Entries:
    """A warp for each row, in rounds of 32 entries, the target being the last one: a lane compares its class
    with all ids of the row, which are shuffled around, and adds the coefficients of equal ones in their
    order. Equal ids are one entry, whose lanes store the same bits. A round reads 8 bytes an id, from the
    caches but once; each entry 8 more and, of a matrix whose sectors have 32, its 2 bytes. No shared memory.
    """

    @cute.jit
    def __call__(self, tensors: EntryTensors, stream: cuda.CUstream):
        self.kernel(tensors).launch(
            grid=self._grid(tensors), block=(LANES * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.jit
    def restore(self, tensors: EntryTensors, stream: cuda.CUstream):
        """What the entries were before."""
        self.restoring(tensors).launch(
            grid=self._grid(tensors), block=(LANES * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    def _grid(self, tensors: EntryTensors):
        return cute.ceil_div(cute.size(tensors.target), WARPS), 1, 1

    @cute.kernel
    def kernel(self, tensors: EntryTensors):
        pdl.begin()
        row = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
        if row < computed(tensors.rows):
            if Int64(tensors.target[row]) != tensors.loss.ignore_index:
                end = tensors.loss.entries + 1
                if tensors.before.iterator.toint() != 0:
                    for at in cutlass.range(cute.arch.lane_idx(), end, LANES, unroll=1):
                        column = self._column(tensors, row, at)
                        if column != NOWHERE:
                            tensors.before[row, at] = tensors.kept[row, column]
                    # An equal id's lane may be writing in the next loop.
                    cute.arch.sync_warp()
                for first in cutlass.range(0, end, LANES, unroll=1):
                    self._write(tensors, row, first + cute.arch.lane_idx())

    @cute.kernel
    def restoring(self, tensors: EntryTensors):
        pdl.begin()
        row = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
        if row < computed(tensors.rows):
            if Int64(tensors.target[row]) != tensors.loss.ignore_index:
                for at in cutlass.range(cute.arch.lane_idx(), tensors.loss.entries + 1, LANES, unroll=1):
                    column = self._column(tensors, row, at)
                    if column != NOWHERE:
                        tensors.kept[row, column] = tensors.before[row, at]

    @cute.jit
    def _column(self, tensors: EntryTensors, row: Int32, at: Int32) -> Int32:
        """Of an entry, that behind the ids being the target; NOWHERE: it is not kept, or there is none."""
        index = Int64(NOWHERE)
        if at < tensors.loss.entries:
            index = Int64(self._of_entry(tensors, row, at, tensors.loss.entry_ids, Int32))
        elif at == tensors.loss.entries:
            index = Int64(tensors.target[row])
        if index < 0 or index >= cute.size(tensors.kept, mode=[1]):
            index = Int64(NOWHERE)
        return Int32(index)

    def _of_entry(self, tensors: EntryTensors, row: Int32, at: Int32, address: Int64, kind):
        """Of the (.., entries) numbers at an address."""
        place = Int64(origin(tensors.rows, row)) * tensors.loss.entries + at
        make = integers if kind is Int32 else numbers
        return make(address, place + 1)[place]

    @cute.jit
    def _write(self, tensors: EntryTensors, row: Int32, at: Int32):
        """The entries `at` of the lanes."""
        loss, token = tensors.loss, origin(tensors.rows, row)
        own, target = self._column(tensors, row, at), self._column(tensors, row, loss.entries)
        total, is_given = Float32(0.0), Boolean(False)
        for first in cutlass.range(0, loss.entries, LANES, unroll=1):
            each, value = Int32(NOWHERE), Float32(0.0)
            mine = first + cute.arch.lane_idx()
            if mine < loss.entries:
                each = self._column(tensors, row, mine)
                if loss.entry_values != 0:
                    value = self._of_entry(tensors, row, mine, loss.entry_values, Float32)
            for source in cutlass.range(cutlass.min(loss.entries - first, LANES), unroll=4):
                same = cute.arch.shuffle_sync(each, source) == own
                added = cute.arch.shuffle_sync(value, source)
                total += Float32(cutlass.select_(same, added, Float32(0.0)))
                is_given = is_given | same
        if loss.target_values != 0:
            added = numbers(loss.target_values, token + 1)[token]
            total += Float32(cutlass.select_(target == own, added, Float32(0.0)))
        # A target among the ids is these lanes'.
        if own != NOWHERE and not (at == loss.entries and is_given):
            logit, slope = Float32(0.0), Float32(1.0)
            if at < loss.entries:
                logit = self._of_entry(tensors, row, at, loss.entry_logits, Float32)
                if loss.entry_slopes != 0:
                    slope = self._of_entry(tensors, row, at, loss.entry_slopes, Float32)
            else:
                logit = numbers(loss.target_logits, token + 1)[token]
                if loss.target_slopes != 0:
                    slope = numbers(loss.target_slopes, token + 1)[token]
            softmax = numbers(loss.entry_softmax, token + 1)[token]
            if softmax != 0.0:
                total = total / softmax
            exponent = (logit - tensors.row_max[token]) * Float32(LOG2_E)
            share = cute.math.exp2(exponent, fastmath=True) / tensors.row_sum[token]
            entry = (share + total) * slope / tensors.kept_scale[row]
            tensors.kept[row, own] = entry.to(tensors.kept.element_type)
