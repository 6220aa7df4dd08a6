"""Running maximum and sum per row: the paper's Algorithm 1, for fragments in registers.

A fragment is (rows, cols) in one thread's registers. A row may be distributed over several threads, each of
which has the statistics of its own columns, until `merge_threads` merges them at the end of a run.

The maximum is an element of the row, and the sum is relative to its exponential. An element's term is
2^((z - max) log2 e): the difference is taken first and is exact where it matters, so the maximum's own term
is 1 and a common offset of the logits loses nothing. An element costs an FADD, an FMUL and a MUFU, besides
the FMNMX and FADD of the reductions. Only `update_relative`, for columns that are kept, uses an FFMA instead.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

LOG2_E = 1.4426950408889634
# Independent chains of maxima and sums; this width lets Blackwell use packed two-wide instructions.
LANES = 8
HEADROOM = 64.0  # base-2 exponent above a row's K up to which update_relative stays relative to it
STEP = 128.0  # a raise of K by one step
MOST_STEPS = 65535.0  # what 16 bits hold


@cute.jit
def reference(row_max: Float32) -> Float32:
    """What elements are relative to: the maximum, or 0 for a row that has seen only -inf."""
    return Float32(cutlass.select_(row_max == -Float32.inf, Float32(0.0), row_max))


@cute.jit
def rescale(row_max: Float32, ref: Float32) -> Float32:
    """The factor from a sum relative to exp(row_max) to one relative to exp(ref), ref >= row_max."""
    return cute.math.exp2((row_max - ref) * Float32(LOG2_E), fastmath=True)


@cute.jit
def merge(row_max: Float32, row_sum: Float32, other_max: Float32, other_sum: Float32):
    """(maximum, sum) of two sets of columns of a row."""
    both = cute.arch.fmax(row_max, other_max)
    ref = reference(both)
    return both, row_sum * rescale(row_max, ref) + other_sum * rescale(other_max, ref)


@cute.jit
def update(row_max: cute.Tensor, row_sum: cute.Tensor, frag: cute.Tensor):
    """Merge a fragment (rows, cols) into the statistics (rows,), in place. cols: a multiple of LANES."""
    cols = cute.size(frag, mode=[1])
    for r in cutlass.range_constexpr(cute.size(frag, mode=[0])):
        chains = [row_max[r]] + [frag[r, i] for i in range(1, LANES)]
        for c in cutlass.range_constexpr(cols):
            chains[c % LANES] = cute.arch.fmax(chains[c % LANES], frag[r, c])
        both = _tree(chains, cute.arch.fmax)
        ref = reference(both)
        lanes = cute.make_rmem_tensor(LANES, Float32)
        total = cute.make_rmem_tensor(LANES, Float32)
        for block in cutlass.range_constexpr(cols // LANES):
            for i in cutlass.range_constexpr(LANES):
                lanes[i] = frag[r, block * LANES + i]
            terms = cute.math.exp2((lanes.load() - ref) * Float32(LOG2_E), fastmath=True)
            total.store(terms if cutlass.const_expr(block == 0) else total.load() + terms)
        row_sum[r] = row_sum[r] * rescale(row_max[r], ref) + _tree([total[i] for i in range(LANES)], _add)
        row_max[r] = both


@cute.jit
def update_relative(
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    frag: cute.Tensor,
    reference_exponent: Float32,
    r: cutlass.Constexpr[int],
    threads_per_row: cutlass.Constexpr[int],
):
    """Merge row r of the fragment into the statistics, and replace it by 2^(z log2 e - K - STEP j), in place.

    reference_exponent: K, an integer. Returns j, the least from 0 to MOST_STEPS with which no exponent
    exceeds HEADROOM; it is the same in all threads that share the row.
    """
    cols = cute.size(frag, mode=[1])
    chains = [frag[r, i] for i in range(LANES)]
    for c in cutlass.range_constexpr(LANES, cols):
        chains[c % LANES] = cute.arch.fmax(chains[c % LANES], frag[r, c])
    highest = _tree(chains, cute.arch.fmax)
    step = 1
    while cutlass.const_expr(step < threads_per_row):
        highest = cute.arch.fmax(highest, cute.arch.shuffle_sync_bfly(highest, offset=step))
        step *= 2
    above = cute.math.fma(highest, Float32(LOG2_E), -(reference_exponent + Float32(HEADROOM)))
    steps = cute.arch.fmin(
        cute.arch.fmax(cute.math.ceil(above * Float32(1 / STEP)), Float32(0.0)), Float32(MOST_STEPS)
    )
    base = reference_exponent + Float32(STEP) * steps
    both = cute.arch.fmax(row_max[r], highest)
    ref = reference(both)
    scale = cute.make_rmem_tensor(LANES, Float32)
    scale.fill(LOG2_E)
    shift = cute.make_rmem_tensor(LANES, Float32)
    shift.fill(-base)
    lanes = cute.make_rmem_tensor(LANES, Float32)
    total = cute.make_rmem_tensor(LANES, Float32)
    for block in cutlass.range_constexpr(cols // LANES):
        for i in cutlass.range_constexpr(LANES):
            lanes[i] = frag[r, block * LANES + i]
        lanes.store(cute.math.exp2(cute.math.fma(lanes.load(), scale.load(), shift.load()), fastmath=True))
        total.store(lanes.load() if cutlass.const_expr(block == 0) else total.load() + lanes.load())
        for i in cutlass.range_constexpr(LANES):
            frag[r, block * LANES + i] = lanes[i]
    # From 2^base to exp(ref). If nothing lies near K, the sum is 0 and the exponent may exceed fp32.
    back = cute.arch.fmin(cute.math.fma(ref, Float32(-LOG2_E), base), Float32(126.0))
    row_sum[r] = row_sum[r] * rescale(row_max[r], ref) + _tree(
        [total[i] for i in range(LANES)], _add
    ) * cute.math.exp2(back, fastmath=True)
    row_max[r] = both
    return Int32(steps)


@cute.jit
def merge_threads(row_max: cute.Tensor, row_sum: cute.Tensor, threads_per_row: cutlass.Constexpr[int]):
    """Merge the statistics of the adjacent lanes that share a row; each lane gets the result."""
    for r in cutlass.range_constexpr(cute.size(row_max)):
        step = 1
        while cutlass.const_expr(step < threads_per_row):
            other_max = cute.arch.shuffle_sync_bfly(row_max[r], offset=step)
            other_sum = cute.arch.shuffle_sync_bfly(row_sum[r], offset=step)
            row_max[r], row_sum[r] = merge(row_max[r], row_sum[r], other_max, other_sum)
            step *= 2


def _add(a, b):
    return a + b


def _tree(values, op):
    """Reduce a list by pairs, traced as a tree."""
    while len(values) > 1:
        half = len(values) // 2
        values = [op(values[i], values[i + half]) for i in range(half)]
    return values[0]
