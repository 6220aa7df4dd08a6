"""Compaction of tokens, so that GEMMs compute the valid ones alone: who is where, and copies in that order.

Compacted, the valid tokens come first, in their order, and then the ignored ones, in theirs. If none is
ignored, that is the operands' order, and hidden states are not copied: GEMMs read the operands'. A launch
computes the valid ones among its own, and as many ignored ones as fill a k tile of dweight's GEMM; the call's
first launch at least one k tile. These are as any ignored row: their targets say so, and their hidden states
are copied as zeros. What is behind them is computed only as part of a tile whose other rows are.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_lce.arguments import COMPUTED_ROWS
from cute_lce.kernels import pdl
from cute_lce.kernels.adjacent import AT_ONCE, LANES, adjacent, load_chunks, store_chunks

WARPS = LANES
"""A lane adds up, or finds, a warp's count."""
THREADS = WARPS * LANES
BLOCKS = 128
"""The most blocks: each reads all targets."""
COPY_WARPS = 4


class Compacted(NamedTuple):
    """Where the tokens of a launch are: arguments.Rows. At address 0 they are the operands' own."""

    source: cute.Tensor
    count: cute.Tensor
    first: Int32
    tokens: Int32


@cute.jit
def computed(rows: Compacted, early: cutlass.Constexpr[bool] = False) -> Int32:
    """How many of the launch's tokens are computed. early: asked before `pdl.begin`."""
    found = rows.tokens
    if rows.count.iterator.toint() != 0:
        found = computed_of(rows, pdl.load(rows.count, 0) if early else rows.count[0])
    return found


@cute.jit
def is_whole(rows: Compacted) -> Boolean:
    """Whether tokens are compacted and none of the call's is ignored."""
    found = Boolean(False)
    if rows.count.iterator.toint() != 0:
        found = rows.count[0] == cute.size(rows.source)
    return found


def computed_of(rows: Compacted, valid: Int32) -> Int32:
    """What `computed` is, of so many valid tokens of the call."""
    least = Int32(cutlass.select_(rows.first == 0, Int32(1), Int32(0)))
    left = cutlass.max(valid - rows.first, least)
    return cutlass.min(rows.tokens, cute.ceil_div(left, COMPUTED_ROWS) * COMPUTED_ROWS)


@cute.jit
def origin(rows: Compacted, at: Int32, early: cutlass.Constexpr[bool] = False) -> Int32:
    """Which of the operands' tokens the launch's token `at` is; if they are not compacted, among its own.
    early: as in `computed`."""
    token = at
    if rows.source.iterator.toint() != 0:
        at += rows.first
        token = pdl.load(rows.source, at) if early else rows.source[at]
    return token


class GatherTensors(NamedTuple):
    """Global memory that the compaction accesses.

    Read: target (n,); hidden (n, d), rows of 16 bytes; dloss (n,) fp32 with any stride, row_max and row_sum
    (n,) fp32. ignore_index: of targets that are ignored. Written: see arguments.Rows; compacted hidden, if a
    token is ignored, and values unless they are at address 0, and so zeros in the rows of sums (n, d) of
    tokens that are ignored, where the launch begins at token 0. sums None: a forward's. counters,
    int32: zeros, for the GEMMs that follow.
    """

    target: cute.Tensor
    hidden: cute.Tensor
    dloss: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    ignore_index: Int64
    rows: Compacted
    compacted_target: cute.Tensor
    compacted_hidden: cute.Tensor
    values: cute.Tensor
    sums: cute.Tensor | None
    counters: cute.Tensor


class Gather:
    """A block has a range of the tokens. Moves 4 bytes an element of hidden if a token is ignored.

    Timeline of a block of 1024 threads: count the valid tokens of all and of those before the block's -> 1024
    tokens at a time, each lane finds where its token goes, by a vote and the other warps' counts, and writes
    its numbers -> if a token of the call is ignored, the warps move rows, every 32nd one each. So an order
    exists without atomics and without a second launch. The first warp of the first block zeroes the counters.
    Shared memory: 256 bytes of counts of all tokens, 128 of those at hand, and 4096 of their places.
    """

    @cute.jit
    def __call__(self, tensors: GatherTensors, stream: cuda.CUstream):
        @cute.struct
        class SharedStorage:
            counts: cute.struct.MemRange[Int32, WARPS * 2]
            found: cute.struct.MemRange[Int32, WARPS]
            places: cute.struct.MemRange[Int32, THREADS]

        self.storage = SharedStorage
        blocks = cutlass.min(cute.ceil_div(cute.size(tensors.target), LANES), BLOCKS)
        self.kernel(tensors).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, tensors: GatherTensors):
        pdl.begin()
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, n = warp * LANES + lane, cute.size(tensors.target)
        each = cute.ceil_div(cute.ceil_div(n, cute.arch.grid_dim()[0]), LANES) * LANES
        begin = cute.arch.block_idx()[0] * each
        end = cutlass.min(begin + each, n)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        counts = storage.counts.get_tensor(cute.make_layout((WARPS, 2), stride=(2, 1)))
        found = storage.found.get_tensor(cute.make_layout(WARPS))
        places = storage.places.get_tensor(cute.make_layout(THREADS))
        total, before = Int32(0), Int32(0)
        for token in cutlass.range(thread, n, THREADS, unroll=8):
            valid = Int32(self._is_valid(tensors, token))
            total += valid
            before += Int32(cutlass.select_(token < begin, valid, Int32(0)))
        total = cute.arch.warp_reduction(total, lambda a, b: a + b)
        before = cute.arch.warp_reduction(before, lambda a, b: a + b)
        if lane == 0:
            counts[warp, 0] = total
            counts[warp, 1] = before
        cute.arch.sync_threads()
        total = cute.arch.warp_reduction(counts[lane, 0], lambda a, b: a + b)
        before = cute.arch.warp_reduction(counts[lane, 1], lambda a, b: a + b)
        rows = tensors.rows
        if begin == 0 and warp == 0:
            if lane == 0:
                rows.count[0] = total
            for i in cutlass.range(lane, cute.size(tensors.counters), LANES, unroll=1):
                tensors.counters[i] = Int32(0)
        for first in cutlass.range(begin, end, THREADS, unroll=1):
            token, valid = first + thread, Boolean(False)
            if token < end:
                valid = self._is_valid(tensors, token)
            votes = cute.arch.vote_ballot_sync(valid)
            if lane == 0:
                found[warp] = cute.arch.popc(votes)
            cute.arch.sync_threads()
            # A lane has a warp's count.
            others = Int32(cutlass.select_(lane < warp, found[lane], Int32(0)))
            valid_before = before + cute.arch.warp_reduction(others, lambda a, b: a + b)
            valid_before += cute.arch.popc(votes & ((Int32(1) << lane) - 1))
            before += cute.arch.warp_reduction(found[lane], lambda a, b: a + b)
            # Of the ignored ones those before it.
            place = Int32(cutlass.select_(valid, valid_before, total + token - valid_before))
            if token < end:
                self._write(tensors, token, place, valid)
            if total < n:
                places[thread] = place
            cute.arch.sync_threads()
            if total < n:
                for at in cutlass.range(warp, cutlass.min(end - first, THREADS), WARPS, unroll=1):
                    self._move(tensors, first + at, places[at], total)

    @cute.jit
    def _is_valid(self, tensors: GatherTensors, token: Int32) -> Boolean:
        return Int64(tensors.target[token]) != tensors.ignore_index

    @cute.jit
    def _write(self, tensors: GatherTensors, token: Int32, place: Int32, valid: Boolean):
        """A token's numbers, to its place; by a lane."""
        tensors.rows.source[place] = token
        tensors.compacted_target[place] = tensors.target[token]
        if tensors.values.iterator.toint() != 0 and valid:
            tensors.values[0, place] = tensors.dloss[token]
            tensors.values[1, place] = tensors.row_max[token]
            tensors.values[2, place] = tensors.row_sum[token]

    @cute.jit
    def _move(self, tensors: GatherTensors, token: Int32, place: Int32, total: Int32):
        """A token's rows; by a warp. total: valid tokens of the call, which have the first places; fewer than
        all."""
        valid = Int32(place < total)
        if cutlass.const_expr(tensors.sums is not None):
            if valid == 0 and tensors.rows.first == 0:
                _clear_row(tensors.sums, token)
        at = place - tensors.rows.first
        # Unsigned, a token before the launch's first is beyond the last: with two comparisons sm_100a spills.
        is_computed = Uint32(at) < Uint32(computed_of(tensors.rows, total))
        if tensors.compacted_hidden.iterator.toint() != 0 and is_computed:
            _copy_row(tensors.hidden, token, valid, tensors.compacted_hidden, at)


class Copy:
    """Compacted hidden states of another launch than the one that gathered; a warp for each."""

    @cute.jit
    def __call__(self, tensors: GatherTensors, stream: cuda.CUstream):
        """What Gather copies of them; `count` and `source` are read."""
        blocks = cute.ceil_div(tensors.rows.tokens, COPY_WARPS)
        self.kernel(tensors).launch(
            grid=(blocks, 1, 1), block=(COPY_WARPS * LANES, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tensors: GatherTensors):
        pdl.begin()
        rows = tensors.rows
        row = cute.arch.block_idx()[0] * COPY_WARPS + cute.arch.warp_idx()
        if row < computed(rows) and not is_whole(rows):
            valid = Int32(rows.first + row < rows.count[0])
            _copy_row(tensors.hidden, origin(rows, row), valid, tensors.compacted_hidden, row)


@cute.jit
def _clear_row(sums: cute.Tensor, token: Int32):
    """Zeros in a row of fp32, by a warp; at address 0: none."""
    if sums.iterator.toint() != 0:
        zeros = cute.make_rmem_tensor(4, sums.element_type)
        zeros.fill(0.0)
        for chunk in cutlass.range(cute.arch.lane_idx(), cute.size(sums, mode=[1]) // 4, LANES, unroll=1):
            cute.autovec_copy(zeros, adjacent(sums, token, chunk * 4, 4))


@cute.jit
def _copy_row(source: cute.Tensor, token: Int32, valid: Int32, out: cute.Tensor, row: Int32):
    """A token's hidden states to a row, zeros where it is ignored; by a warp."""
    lane = cute.arch.lane_idx()
    chunks = cute.size(source, mode=[1]) // 8
    for chunk in cutlass.range(lane, chunks, LANES * AT_ONCE, unroll=1):
        (parts,) = load_chunks([(source, token)], chunk, chunks, valid != 0)
        store_chunks(parts, out, row, chunk, chunks)
