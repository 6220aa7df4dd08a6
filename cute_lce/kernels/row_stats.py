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

from cute_lce import maths
from cute_lce.arguments import REDUCTIONS, LossArguments

# Independent chains of maxima and sums; this width lets Blackwell use packed two-wide instructions.
LANES = 8


def exp(exponent):
    """e^exponent, from exp2.approx."""
    return cute.math.exp2(exponent * Float32(maths.LOG2_E), fastmath=True)


@cute.jit
def grad_scale(dloss: cute.Tensor, num_valid: cute.Tensor, loss: LossArguments, row: Int32) -> Float32:
    """The gradient of the loss by a valid row's products, but for the softmax: dloss, over num_valid for
    "mean"."""
    scale = dloss[row]
    if loss.reduction == REDUCTIONS["mean"]:
        scale = maths.mean_upstream(scale, Float32(num_valid[0]))
    return maths.product_gradient(scale, loss)


def fma(a, b: float, c):
    """a b + c in one instruction."""
    return cute.math.fma(a, Float32(b), c)


@cute.jit
def finite_max(row_max: Float32) -> Float32:
    """What elements are relative to: the maximum, or 0 for a row that has seen only -inf."""
    return Float32(cutlass.select_(row_max == -Float32.inf, Float32(0.0), row_max))


@cute.jit
def merge(row_max: Float32, row_sum: Float32, other_max: Float32, other_sum: Float32):
    """(maximum, sum) of two sets of columns of a row."""
    both = cute.arch.fmax(row_max, other_max)
    ref = finite_max(both)
    return both, maths.rescaled(row_sum, row_max, ref, exp) + maths.rescaled(other_sum, other_max, ref, exp)


@cute.jit
def update(row_max: cute.Tensor, row_sum: cute.Tensor, frag: cute.Tensor):
    """Merge a fragment (rows, cols) into the statistics (rows,), in place. cols: a multiple of LANES."""
    cols = cute.size(frag, mode=[1])
    for r in cutlass.range_constexpr(cute.size(frag, mode=[0])):
        chains = [row_max[r]] + [frag[r, i] for i in range(1, LANES)]
        for c in cutlass.range_constexpr(cols):
            chains[c % LANES] = cute.arch.fmax(chains[c % LANES], frag[r, c])
        both = _tree(chains, cute.arch.fmax)
        ref = finite_max(both)
        lanes = cute.make_rmem_tensor(LANES, Float32)
        total = cute.make_rmem_tensor(LANES, Float32)
        for block in cutlass.range_constexpr(cols // LANES):
            for i in cutlass.range_constexpr(LANES):
                lanes[i] = frag[r, block * LANES + i]
            terms = maths.exponential(lanes.load(), ref, exp)
            total.store(terms if cutlass.const_expr(block == 0) else total.load() + terms)
        before = maths.rescaled(row_sum[r], row_max[r], ref, exp)
        row_sum[r] = before + _tree([total[i] for i in range(LANES)], _add)
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

    reference_exponent: K, an integer. Returns j, the least from 0 to maths.MOST_STEPS with which no exponent
    exceeds maths.HEADROOM; it is the same in all threads that share the row.
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
    steps = maths.raise_steps(highest, reference_exponent, fma, cute.math.ceil)
    steps = cute.arch.fmin(cute.arch.fmax(steps, Float32(0.0)), Float32(maths.MOST_STEPS))
    base = maths.raised(reference_exponent, steps)
    both = cute.arch.fmax(row_max[r], highest)
    ref = finite_max(both)
    lanes = cute.make_rmem_tensor(LANES, Float32)
    total = cute.make_rmem_tensor(LANES, Float32)
    for block in cutlass.range_constexpr(cols // LANES):
        for i in cutlass.range_constexpr(LANES):
            lanes[i] = frag[r, block * LANES + i]
        exponents = maths.kept_exponent(lanes.load(), base, _fma_lanes)
        lanes.store(cute.math.exp2(exponents, fastmath=True))
        total.store(lanes.load() if cutlass.const_expr(block == 0) else total.load() + lanes.load())
        for i in cutlass.range_constexpr(LANES):
            frag[r, block * LANES + i] = lanes[i]
    # From 2^base to exp(ref). If nothing lies near K, the sum is 0 and the exponent may exceed fp32.
    back = cute.arch.fmin(maths.base_exponent(ref, base, fma), Float32(126.0))
    before = maths.rescaled(row_sum[r], row_max[r], ref, exp)
    row_sum[r] = before + _tree([total[i] for i in range(LANES)], _add) * cute.math.exp2(back, fastmath=True)
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


def _fma_lanes(lanes, scale: float, shift: Float32):
    """lanes scale + shift, LANES numbers at once."""
    scales, shifts = cute.make_rmem_tensor(LANES, Float32), cute.make_rmem_tensor(LANES, Float32)
    scales.fill(scale)
    shifts.fill(shift)
    return cute.math.fma(lanes, scales.load(), shifts.load())


def _add(a, b):
    return a + b


def _tree(values, op):
    """Reduce a list by pairs, traced as a tree."""
    while len(values) > 1:
        half = len(values) // 2
        values = [op(values[i], values[i + half]) for i in range(half)]
    return values[0]
