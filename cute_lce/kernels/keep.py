"""The kernels that "keep" adds to the forward: the rows' references before its GEMM, and the completion of
the kept operand after it.

What is kept is E = 2^(z log2 e - K) in the operands' type, with one integer K for each row. With
v = grad_scale 2^K exp(-lse) for each row

    dhidden = v (E' weight)        dweight = E'^T (v hidden)        E' = E - onehot 2^(lse log2 e - K)

are plain GEMMs, for any upstream vector. K must suit the type's range (maths.KeptRange): in bf16, which has
fp32's, K is the target's logit in base 2, rounded down: no logit that matters lies far below it. In fp16 the
row's sum 2^(lse log2 e - K) must be at most 65504, and the larger it is, the smaller are the probabilities
that are normal numbers. There K lies 6 below a guess of lse log2 e: the target's logit, or what the least of
four other logits comes to times V, if that is more. The first is near in rows whose target is probable, the
second where the distribution is flat, as it is before training.

Where a row exceeds K by more than the headroom within a unit (32 columns of the vocabulary, those of one warp
in a tile: Fragment.unit), it and what the warp stores of the row after it in a run are relative to K + step
j, and j is noted in 16 bits. `Finish` rescales such rows, and those whose sum exceeds the headroom, to one K,
and subtracts the onehot. Scaling by a power of two is exact except for what becomes subnormal; the target's
own entry is rounded once. Where terms give the softmax a coefficient of its own, v is times that, and the
onehot times its own coefficient over it, which is at most 1 / LEAST_SHARE. With a softcap or a LogitTerm E'
is times its slope, of which K and the sums know nothing. In bf16 raised rows are rare; in fp16 they are those
whose guess is 2^9.5 times too small, 0.1% of the probability for the target.

K is limited to +-far, which also stands for a target's logit of -inf, and j to MOST_STEPS. So a kept logit
may lie 2^23 in base 2, 5.8 million nats, above its row's K, and reach 2.9 million nats if the target's logit
is -inf; in fp16 2^19, 363 thousand nats, and 181 thousand. A row beyond that, or with all logits below -2.9
million (-181 thousand) nats, becomes nan.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Float64, Int32, Int64

from cute_lce import maths
from cute_lce.kernels import pdl
from cute_lce.kernels.adjacent import AT_ONCE, LANES, adjacent, load_chunks
from cute_lce.kernels.fragment import Fragment
from cute_lce.kernels.logits import has_own_logits, has_slope, logit, numbers, slope_at
from cute_lce.kernels.row_stats import fma, to_logits
from cute_lce.kernels.rows import Compacted, computed, origin
from cute_lce.kernels.totals import TotalTensors, sums_of, write_total
from cute_lce.maths import LOG2_E

WARPS = 4
ROWS = 8  # of a block of Finish
COLUMNS = 16 * 8 * 32 * WARPS  # of a block of Finish: a thread has sixteen times 8 of each row


class KeepTensors(NamedTuple):
    """Global memory of a forward that keeps.

    kept (n, columns) 16-bit: E. reference (n,) fp32: K. notes (units, n) uint16: j of a row and a unit of
    columns. most_raised (n,) int32: the largest j of a row. kept_scale (n,) fp32: 2^K exp(-lse) with the
    raised K, which is v without grad_scale; 0 of ignored rows. columns: how many are kept: whole tiles, or V.
    """

    kept: cute.Tensor
    reference: cute.Tensor
    notes: cute.Tensor
    most_raised: cute.Tensor
    kept_scale: cute.Tensor
    columns: Int32


class References:
    """K of every row that is computed, and zeros for `most_raised` and for the GEMM's counter.

    A warp for each row, a lane of which has AT_ONCE times 8 elements in flight; a row whose target is not a
    class uses class 0. 4 d bytes are read a row, and the rows of the weight that are samples from L1; hidden
    is that of the token's origin. An ignored row is not read: its products are zeros.
    """

    def __init__(self, kept: maths.KeptRange):
        self.kept = kept

    @cute.jit
    def __call__(
        self,
        hidden,
        weight,
        target,
        tokens: Compacted,
        keep: KeepTensors,
        progress,
        loss,
        stream: cuda.CUstream,
    ):
        n = cute.size(target)
        self.kernel(hidden, weight, target, tokens, keep, progress, loss).launch(
            grid=(cute.ceil_div(n, WARPS), 1, 1), block=(32 * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        hidden: cute.Tensor,
        weight: cute.Tensor,
        target: cute.Tensor,
        tokens: Compacted,
        keep: KeepTensors,
        progress: cute.Tensor,  # (1,) int32
        loss,
    ):
        pdl.begin()
        lane = cute.arch.lane_idx()
        row = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
        if row < computed(tokens):
            vocab = cute.size(weight, mode=[0])
            index = Int64(target[row])
            # An ignored row is not read.
            chunks = cute.size(hidden, mode=[1]) // 8
            chunks = Int32(cutlass.select_(index != loss.ignore_index, chunks, Int32(0)))
            if index < 0 or index >= vocab:
                index = Int64(0)
            count = 1 + self.kept.samples
            totals = cute.make_rmem_tensor(count, Float32)
            totals.fill(0.0)
            token = origin(tokens, row)
            classes = [(weight, self._class(k, index, vocab)) for k in range(count)]
            for chunk in cutlass.range(lane, chunks, LANES * AT_ONCE, unroll=1):
                a, *b = load_chunks([(hidden, token), *classes], chunk, chunks, True)
                for k in cutlass.range_constexpr(count):
                    for i in cutlass.range_constexpr(8 * AT_ONCE):
                        totals[k] += a[i].to(Float32) * b[k][i].to(Float32)
            for k in cutlass.range_constexpr(count):
                totals[k] = cute.arch.warp_reduction(totals[k], lambda a, b: a + b)
            if lane == 0:
                self._to_logits(totals, loss, index, vocab, tokens, row)
                guess = totals[0] * Float32(LOG2_E)
                if cutlass.const_expr(self.kept.samples > 0):
                    least = totals[1]
                    for k in cutlass.range_constexpr(2, count):
                        least = cute.arch.fmin(least, totals[k])
                    flat = least * Float32(LOG2_E) + cute.math.log2(Float32(vocab))
                    guess = cute.arch.fmax(guess, flat)
                far = Float32(self.kept.far)
                bound = cute.arch.fmin(cute.arch.fmax(guess - self.kept.below, -far), far)
                keep.reference[row] = cute.math.floor(bound)
                keep.most_raised[row] = Int32(0)
                if row == 0:
                    progress[0] = Int32(0)

    def _class(self, k: int, index: Int64, vocab: Int32) -> Int64:
        """Of the k-th logit: the target, and samples from all parts of the vocabulary."""
        return Int64(vocab) * (2 * k - 1) // (2 * self.kept.samples) if k else index

    def _to_logits(
        self, totals: cute.Tensor, loss, index: Int64, vocab: Int32, tokens: Compacted, row: Int32
    ):
        """Products of a row with these classes become logits."""
        if not has_own_logits(loss):
            to_logits(totals, loss)
            return
        bias = scale = None
        if "linear_bias" in loss.terms:
            given = numbers(loss.linear_bias, vocab)
            bias = [given[self._class(k, index, vocab)] for k in range(cute.size(totals))]
        if "row_scale" in loss.terms:
            token = origin(tokens, row)
            scale = numbers(loss.row_scale, token + 1)[token]
        for k in range(cute.size(totals)):
            totals[k] = logit(totals[k], loss, None if bias is None else bias[k], scale)


class Finish:
    """After the statistics: one K for raised rows, the target's entry, kept_scale, and the loss.

    A block for 8 rows and 16384 columns, whose threads rescale 8 columns of a row at once. Rows that need it
    move 4 bytes a column, the others nothing. A further block adds up the losses and valid targets that
    Combine's blocks have found. Shared memory: 64 bytes of sums.
    """

    def __init__(self, fragment: Fragment, kept: maths.KeptRange):
        self.fragment = fragment
        self.kept = kept

    @cute.jit
    def __call__(
        self,
        keep: KeepTensors,
        tokens: Compacted,
        target,
        target_logit,
        shard_logit,
        row_max,
        row_sum,
        total: TotalTensors,
        stream: cuda.CUstream,
    ):
        """row_max and row_sum lie at their tokens' origins, and so does shard_logit, which is at address 0
        where the vocabulary is whole; target_logit is by the launch's tokens. Of a shard this is a call's
        only launch, and there is no total."""

        @cute.struct
        class SharedStorage:
            sums: cute.struct.MemRange[Float64, WARPS * 2]

        self.storage = SharedStorage
        rows = cute.ceil_div(cute.size(target), ROWS) + Int32(shard_logit.iterator.toint() == 0)
        self.kernel(keep, tokens, target, target_logit, shard_logit, row_max, row_sum, total).launch(
            grid=(rows, cute.ceil_div(keep.columns, COLUMNS), 1),
            block=(32 * WARPS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        keep: KeepTensors,
        tokens: Compacted,
        target: cute.Tensor,
        target_logit: cute.Tensor,
        shard_logit: cute.Tensor,
        row_maxima: cute.Tensor,
        row_sums: cute.Tensor,
        total: TotalTensors,
    ):
        loss = total.loss
        thread = cute.arch.thread_idx()[0]
        rows, columns, _ = cute.arch.block_idx()
        first, start = rows * ROWS, columns * COLUMNS
        end = cutlass.min(start + COLUMNS, keep.columns)
        # Each eighth lane has the numbers of one row.
        own = first + thread % ROWS
        is_whole = shard_logit.iterator.toint() == 0
        if not is_whole:
            pdl.wait()
        # What the launch before, which makes the statistics, does not write is loaded before that ends.
        noted, token, valid = Int32(0), Int32(0), Boolean(False)
        reference, index, own_logit = Float32(0.0), Int64(0), Float32(0.0)
        if own < cute.size(target):
            index = Int64(pdl.load(target, own))
            # Ignored rows are zeros.
            valid = index != loss.ignore_index
            if valid:
                noted, reference = pdl.load(keep.most_raised, own), pdl.load(keep.reference, own)
                token = origin(tokens, own, True)
                if is_whole and index >= start and index < end:
                    own_logit = pdl.load(target_logit, own)
        pdl.begin()
        steps, row_max, row_sum, ratio = Int32(0), Float32(0.0), Float32(1.0), Float32(1.0)
        if valid:
            row_max, row_sum = row_maxima[token], row_sums[token]
            most = row_sum
            if cutlass.const_expr("proportion" in loss.terms):
                ratio = self._onehot_ratio(loss, token, row_max, row_sum)
                most *= cute.arch.fmax(cute.math.absf(ratio), Float32(1.0))
                if start == 0 and thread < ROWS:
                    numbers(loss.onehot_ratio, token + 1)[token] = ratio
            steps = self._steps(reference, row_max, most, noted)
        for r in cutlass.range(ROWS, unroll=1):
            most, units = cute.arch.shuffle_sync(steps, r), cute.arch.shuffle_sync(noted, r)
            if most > 0:
                for column in cutlass.range(start + 8 * thread, end, 8 * 32 * WARPS, unroll=1):
                    self._rescale(keep, first + r, column, most, units)
        cute.arch.sync_threads()
        if thread < ROWS and own < cute.size(target):
            k = maths.raised(reference, steps.to(Float32), self.kept)
            if start == 0:
                scale = Float32(0.0)
                if valid:
                    scale = maths.softmax_factor(
                        cute.math.exp2(maths.base_exponent(row_max, k, fma)), row_sum
                    )
                keep.kept_scale[own] = scale
            if valid and index >= start and index < end:
                # 2^(lse log2 e - K): what E sums to over the whole vocabulary.
                one = cute.math.exp2(maths.kept_exponent(row_max, k, fma), fastmath=True)
                if not is_whole:
                    own_logit = shard_logit[token]
                entry = cute.math.exp2(maths.kept_exponent(own_logit, k, fma), fastmath=True)
                onehot = row_sum * one
                if cutlass.const_expr("proportion" in loss.terms):
                    onehot *= ratio
                entry = maths.dlogits(entry, onehot)
                if cutlass.const_expr(has_slope(loss)):
                    entry *= slope_at(loss, token)(own_logit)
                keep.kept[own, Int32(index)] = entry.to(keep.kept.element_type)
        if first >= cute.size(target) and start == 0:
            storage = cutlass.memory.SmemAllocator().allocate(self.storage)
            write_total(total, sums_of(storage.sums, WARPS))

    @cute.jit
    def _onehot_ratio(self, loss, token: Int32, row_max: Float32, row_sum: Float32) -> Float32:
        """The onehot's coefficient over the softmax's in a row's gradient; token: its origin."""
        onehot = Float32(1.0)
        if loss.target_weight != 0:
            onehot = numbers(loss.target_weight, token + 1)[token]
        lse = maths.lse(cute.math.log(row_sum), row_max)
        softmax = maths.softmax_coefficient(onehot, loss.lse_slope, lse)
        least = onehot * Float32(maths.LEAST_SHARE)
        if cute.math.absf(softmax) < cute.math.absf(least):
            softmax = least
        ratio = Float32(0.0)
        if onehot != 0:
            ratio = onehot / softmax
        return ratio

    @cute.jit
    def _steps(self, reference: Float32, row_max: Float32, row_sum: Float32, noted: Int32) -> Int32:
        """j of a whole row: the largest of its units, or what its sum, kept or not, requires; row_sum: or the
        onehot that is subtracted from it, if that is larger."""
        # What row_max stands for exceeds K by that much less than the sum does.
        reference -= cute.math.log2(row_sum, fastmath=True)
        steps = maths.raise_steps(row_max, reference, self.kept, fma, cute.math.ceil)
        steps = cute.arch.fmin(cute.arch.fmax(steps, Float32(0.0)), Float32(2.0**22))
        return cutlass.max(Int32(steps), noted)

    @cute.jit
    def _rescale(self, keep: KeepTensors, row: Int32, column: Int32, most: Int32, noted: Int32):
        """Eight columns of a unit of a row, to the row's K. most: the row's j; noted: its units' largest."""
        behind = most
        if noted > 0:
            # The DSL sign-extends even an unsigned type.
            behind -= keep.notes[self.fragment.unit(column), row].to(Int32) & 65535
        if behind > 0:
            source = adjacent(keep.kept, row, column, 8)
            values = cute.make_rmem_tensor(8, keep.kept.element_type)
            cute.autovec_copy(source, values)
            # Twice the root, since a step of bf16 is no normal number of fp32.
            root = cute.math.exp2(behind.to(Float32) * Float32(-self.kept.step / 2), fastmath=True)
            values.store((values.load().to(Float32) * root * root).to(keep.kept.element_type))
            cute.autovec_copy(values, source)
