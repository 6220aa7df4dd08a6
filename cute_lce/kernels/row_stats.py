"""Running maximum and sum per row: the streaming softmax of the paper's Algorithm 1, for fragments in registers.

A fragment is (rows, cols) in one thread's registers; a row may be spread over several threads, each of which keeps
the statistics of the columns that it saw, until `merge_threads` joins them at the end of a run.

The maximum m is kept in natural units and is an element of the row. The sum is kept relative to ref(m) = fl(m log2 e):
one FFMA and one ex2 an element. ref is rounded, so `relative_to_max` turns the sum into one relative to exp(m) itself by
2^(ref(m) - m log2 e), whose exponent one FFMA gives exactly: no error grows with a common offset of the logits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2_E = 1.4426950408889634
LANES = 8  # independent chains of maxima and sums; two-wide packed instructions on Blackwell come from this width


@cute.jit
def reference(row_max: Float32) -> Float32:
    """The base-2 exponent that sums are relative to; 0 for a row that has seen nothing but -inf."""
    ref = row_max * Float32(LOG2_E)
    return Float32(cutlass.select_(row_max == -Float32.inf, Float32(0.0), ref))


@cute.jit
def rescale(row_max: Float32, ref: Float32) -> Float32:
    """What turns a sum relative to reference(row_max) into one relative to `ref`, the reference of no smaller maximum.

    At most 1: where nothing was seen before, the sum is 0 and its reference of 0 may lie far above `ref`.
    """
    return cute.math.exp2(cute.arch.fmin(reference(row_max) - ref, Float32(0.0)), fastmath=True)


@cute.jit
def absorb(row_max: Float32, row_sum: Float32, other_max: Float32, other_sum: Float32):
    """(row_max, row_sum) joined with a partial: other_sum is relative to exp(other_max) itself."""
    both = cute.arch.fmax(row_max, other_max)
    ref = reference(both)
    other = cute.math.exp2(cute.math.fma(other_max, Float32(LOG2_E), -ref), fastmath=True)
    return both, row_sum * rescale(row_max, ref) + other_sum * other


@cute.jit
def update(row_max: cute.Tensor, row_sum: cute.Tensor, frag: cute.Tensor):
    """Take the fragment (rows, cols) into the statistics (rows,), in place."""
    cols = cute.size(frag, mode=[1])
    for r in cutlass.range_constexpr(cute.size(frag, mode=[0])):
        chains = [row_max[r]] + [frag[r, i] for i in range(1, LANES)]
        for c in cutlass.range_constexpr(cols):
            chains[c % LANES] = cute.arch.fmax(chains[c % LANES], frag[r, c])
        step = LANES // 2
        while cutlass.const_expr(step > 0):
            for i in cutlass.range_constexpr(step):
                chains[i] = cute.arch.fmax(chains[i], chains[i + step])
            step //= 2
        ref = reference(chains[0])
        scale = cute.make_rmem_tensor(LANES, Float32)
        scale.fill(LOG2_E)
        shift = cute.make_rmem_tensor(LANES, Float32)
        shift.fill(-ref)
        lanes = cute.make_rmem_tensor(LANES, Float32)
        total = cute.make_rmem_tensor(LANES, Float32)
        for block in cutlass.range_constexpr(cols // LANES):
            for i in cutlass.range_constexpr(LANES):
                lanes[i] = frag[r, block * LANES + i]
            terms = cute.math.exp2(cute.math.fma(lanes.load(), scale.load(), shift.load()), fastmath=True)
            total.store(terms if cutlass.const_expr(block == 0) else total.load() + terms)
        sums = [total[i] for i in range(LANES)]
        step = LANES // 2
        while cutlass.const_expr(step > 0):
            for i in cutlass.range_constexpr(step):
                sums[i] = sums[i] + sums[i + step]
            step //= 2
        row_sum[r] = row_sum[r] * rescale(row_max[r], ref) + sums[0]
        row_max[r] = chains[0]


@cute.jit
def merge_threads(row_max: cute.Tensor, row_sum: cute.Tensor, threads_per_row: cutlass.Constexpr[int]):
    """Join the statistics of the neighbouring lanes that share a row; every one of them gets the result."""
    for r in cutlass.range_constexpr(cute.size(row_max)):
        step = 1
        while cutlass.const_expr(step < threads_per_row):
            other_max = cute.arch.shuffle_sync_bfly(row_max[r], offset=step)
            other_sum = cute.arch.shuffle_sync_bfly(row_sum[r], offset=step)
            both = cute.arch.fmax(row_max[r], other_max)
            ref = reference(both)
            row_sum[r] = row_sum[r] * rescale(row_max[r], ref) + other_sum * rescale(other_max, ref)
            row_max[r] = both
            step *= 2


@cute.jit
def relative_to_max(row_max: Float32, row_sum: Float32) -> Float32:
    """The sum relative to exp(row_max) exactly, from the sum relative to the rounded reference."""
    rounding = cute.math.fma(row_max, Float32(-LOG2_E), reference(row_max))
    rounding = Float32(cutlass.select_(row_max == -Float32.inf, Float32(0.0), rounding))
    return row_sum * cute.math.exp2(rounding, fastmath=True)
