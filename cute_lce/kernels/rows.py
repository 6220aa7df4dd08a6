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

WARPS = 16
THREADS = WARPS * LANES
BLOCKS = 256
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
    """A block has a range of the tokens, and a warp every 16th of them. Moves 4 bytes an element of hidden if
    a token is ignored.

    Timeline of a block of 512 threads: count the valid tokens of all and of those before the block's -> 32
    tokens at a time, every warp finds where they go, by a vote, and copies two of them. So an order exists
    without atomics and without a second launch. The first warp of the first block zeroes the counters. Shared
    memory: 128 bytes of counts.
    """

    @cute.jit
    def __call__(self, tensors: GatherTensors, stream: cuda.CUstream):
        @cute.struct
        class SharedStorage:
            counts: cute.struct.MemRange[Int32, WARPS * 2]

        self.storage = SharedStorage
        blocks = cutlass.min(cute.ceil_div(cute.size(tensors.target), LANES), BLOCKS)
        self.kernel(tensors).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, tensors: GatherTensors):
        pdl.begin()
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        n = cute.size(tensors.target)
        each = cute.ceil_div(cute.ceil_div(n, cute.arch.grid_dim()[0]), LANES) * LANES
        begin = cute.arch.block_idx()[0] * each
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        shared = storage.counts.get_tensor(cute.make_layout((WARPS, 2), stride=(2, 1)))
        total, before = Int32(0), Int32(0)
        for token in cutlass.range(warp * LANES + lane, n, THREADS, unroll=8):
            valid = Int32(self._is_valid(tensors, token))
            total += valid
            before += Int32(cutlass.select_(token < begin, valid, Int32(0)))
        total = cute.arch.warp_reduction(total, lambda a, b: a + b)
        before = cute.arch.warp_reduction(before, lambda a, b: a + b)
        if lane == 0:
            shared[warp, 0] = total
            shared[warp, 1] = before
        cute.arch.sync_threads()
        total, before = Int32(0), Int32(0)
        for other in cutlass.range_constexpr(WARPS):
            total += shared[other, 0]
            before += shared[other, 1]
        rows = tensors.rows
        if begin == 0 and warp == 0:
            if lane == 0:
                rows.count[0] = total
            for i in cutlass.range(lane, cute.size(tensors.counters), LANES, unroll=1):
                tensors.counters[i] = Int32(0)
        for first in cutlass.range(begin, cutlass.min(begin + each, n), LANES, unroll=1):
            own, valid = first + lane, Boolean(False)
            if own < n:
                valid = self._is_valid(tensors, own)
            votes = cute.arch.vote_ballot_sync(valid)
            for half in cutlass.range_constexpr(LANES // WARPS):
                bit = warp + half * WARPS
                token = first + bit
                if token < n:
                    valid_before = before + cute.arch.popc(votes & ((Int32(1) << bit) - 1))
                    is_valid = (votes >> bit) & 1
                    # Of the ignored ones those before it.
                    place = Int32(cutlass.select_(is_valid != 0, valid_before, total + token - valid_before))
                    self._move(tensors, token, place, is_valid, total)
            before += cute.arch.popc(votes)

    @cute.jit
    def _is_valid(self, tensors: GatherTensors, token: Int32) -> Boolean:
        return Int64(tensors.target[token]) != tensors.ignore_index

    @cute.jit
    def _move(self, tensors: GatherTensors, token: Int32, place: Int32, valid: Int32, total: Int32):
        """What belongs to a token, to its place; by a warp. total: valid tokens of the call."""
        lane = cute.arch.lane_idx()
        if lane == 0:
            tensors.rows.source[place] = token
            tensors.compacted_target[place] = tensors.target[token]
            if tensors.values.iterator.toint() != 0 and valid != 0:
                tensors.values[0, place] = tensors.dloss[token]
                tensors.values[1, place] = tensors.row_max[token]
                tensors.values[2, place] = tensors.row_sum[token]
        if cutlass.const_expr(tensors.sums is not None):
            if valid == 0 and tensors.rows.first == 0:
                _clear_row(tensors.sums, token)
        at = place - tensors.rows.first
        most = computed_of(tensors.rows, total) * Int32(total < cute.size(tensors.target))
        # Unsigned, a token before the launch's first is beyond the last: with two comparisons sm_100a spills.
        if tensors.compacted_hidden.iterator.toint() != 0 and Uint32(at) < Uint32(most):
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
