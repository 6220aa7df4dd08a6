"""The sum of lse - z over all classes, of each token, from one product with the sum of the classes' rows; of
a shard that of row_max - z.

row_max is of tensor cores, which truncate sums. Where all logits of a token have a common offset each loses
about the same, and the product nothing: so the error of the target's logit is taken off row_max, by their
magnitudes where the target's is larger. Where the target is in another shard nothing is.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, Int64

from cute_lce.arguments import LossArguments
from cute_lce.kernels import pdl
from cute_lce.kernels.adjacent import AT_ONCE, LANES, adjacent, load_chunks
from cute_lce.kernels.logits import numbers
from cute_lce.kernels.rows import Compacted, computed, origin

WARPS = 4
TOGETHER = 4
"""Tokens of a warp, which share what it reads of the sum."""
FINITE = 3.0e38
"""Above that a number is taken to be infinite."""


class TotalGapTensors(NamedTuple):
    """rows: the launch's n tokens. loss: with the terms of the logits.

    Read: target (n,); target_logit (n,) fp32, of targets that are classes; hidden (.., d), row_max (..,) fp32
    and target_product (..,) fp64, hidden's with the target's row of the weight where that is a class, of the
    tokens' origins; sums (d,) fp32, 16-byte aligned, of the weight's rows, with d a multiple of 8; bias_sum
    (1,) fp64, at address 0: 0. Written: total (..,) fp32, by the tokens' origins: of a shard the gaps, of
    tokens that are computed and not ignored; else with the row's own, the sum of lse - z, and 0 of others.
    vocab: classes. shard, row_sum: as in CombineTensors.
    """

    rows: Compacted
    target: cute.Tensor
    target_logit: cute.Tensor
    hidden: cute.Tensor
    target_product: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    sums: cute.Tensor
    bias_sum: cute.Tensor
    total: cute.Tensor
    vocab: Int32
    shard: Int32
    loss: LossArguments


class TotalGaps:
    """A warp has TOGETHER tokens, a lane AT_ONCE times 8 elements of each in flight. Products of 8 are added
    up in float64. Reads 2 bytes an element of hidden, and the sum for each TOGETHER tokens. 92 registers on
    Hopper, no shared memory."""

    @cute.jit
    def __call__(self, tensors: TotalGapTensors, stream: cuda.CUstream):
        blocks = cute.ceil_div(cute.size(tensors.target), WARPS * TOGETHER)
        self.kernel(tensors).launch(
            grid=(blocks, 1, 1), block=(LANES * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tensors: TotalGapTensors):
        pdl.begin()
        lane, count = cute.arch.lane_idx(), computed(tensors.rows)
        first = (cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()) * TOGETHER
        if first < count:
            # The last warp reads a row again rather than one that is not there.
            rows = [cutlass.min(first + i, count - 1) for i in range(TOGETHER)]
            totals = self._products(tensors, rows)
            for k in cutlass.range_constexpr(TOGETHER):
                valid = Int64(tensors.target[rows[k]]) != tensors.loss.ignore_index
                if lane == 0 and first + k < count and valid:
                    self._write(tensors, rows[k], totals[k])
        for k in cutlass.range_constexpr(TOGETHER):
            self._write_ignored(tensors, first + k, count)

    @cute.jit
    def _products(self, tensors: TotalGapTensors, rows: list) -> list:
        """Of each row with the sum, in every lane."""
        sources = [(tensors.hidden, origin(tensors.rows, row)) for row in rows]
        found = cute.make_rmem_tensor(TOGETHER, Float64)
        found.fill(0.0)
        chunks = cute.size(tensors.hidden, mode=[1]) // 8
        row_of_sums = cute.make_tensor(
            tensors.sums.iterator, cute.make_layout((1, cute.size(tensors.sums)), stride=(0, 1))
        )
        for chunk in cutlass.range(cute.arch.lane_idx(), chunks, LANES * AT_ONCE, unroll=1):
            each = load_chunks(sources, chunk, chunks, True)
            for part in cutlass.range_constexpr(AT_ONCE):
                at = chunk + part * LANES
                if at < chunks:
                    few = cute.make_rmem_tensor(TOGETHER, Float32)
                    few.fill(0.0)
                    for half in cutlass.range_constexpr(2):
                        own = cute.make_rmem_tensor(4, Float32)
                        cute.autovec_copy(adjacent(row_of_sums, 0, at * 8 + half * 4, 4), own)
                        for i in cutlass.range_constexpr(4):
                            for k in cutlass.range_constexpr(TOGETHER):
                                few[k] += each[k][half * 4 + i, part].to(Float32) * own[i]
                    for k in cutlass.range_constexpr(TOGETHER):
                        found[k] += few[k].to(Float64)
        return [cute.arch.warp_reduction(found[k], lambda a, b: a + b) for k in range(TOGETHER)]

    @cute.jit
    def _write_ignored(self, tensors: TotalGapTensors, row: Int32, count: Int32):
        """0 where the token is not computed, or ignored."""
        if cute.arch.lane_idx() == 0 and tensors.shard == 0 and row < cute.size(tensors.target):
            if row >= count or Int64(tensors.target[row]) == tensors.loss.ignore_index:
                tensors.total[origin(tensors.rows, row)] = Float32(0.0)

    @cute.jit
    def _write(self, tensors: TotalGapTensors, row: Int32, total: Float64):
        """total: the product with the sum."""
        loss, vocab = tensors.loss, tensors.vocab
        token, index = origin(tensors.rows, row), Int64(tensors.target[row])
        scale = Float64(1.0)
        if cutlass.const_expr("logit_scale" in loss.terms):
            scale *= loss.logit_scale.to(Float64)
        if cutlass.const_expr("row_scale" in loss.terms):
            scale *= numbers(loss.row_scale, token + 1)[token].to(Float64)
        highest = tensors.row_max[token].to(Float64)
        if highest < Float64(-FINITE):
            highest = Float64(0.0)
        error = Float64(0.0)
        if index >= 0 and index < vocab:
            own = tensors.target_product[token]
            if cutlass.const_expr("linear_bias" in loss.terms):
                own += numbers(loss.linear_bias, vocab)[index].to(Float64)
            own *= scale
            error = tensors.target_logit[row].to(Float64) - own
            # None where the logit is infinite, or nan; of one that is larger than the others a part.
            if not (error > Float64(-FINITE) and error < Float64(FINITE)):
                error = Float64(0.0)
            if own * own > highest * highest:
                ratio = highest / own
                error *= cutlass.max(ratio, -ratio)
        if tensors.bias_sum.iterator.toint() != 0:
            total += tensors.bias_sum[0]
        found = (highest - error) * vocab.to(Float64) - total * scale
        if tensors.shard == 0:
            found += cute.math.log(tensors.row_sum[token]).to(Float64) * vocab.to(Float64)
        tensors.total[token] = found.to(Float32)
