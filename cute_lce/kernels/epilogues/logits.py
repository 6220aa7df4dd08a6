"""What the epilogues of logits share that find something of each token."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_lce.arch import WARPGROUP, WARPS
from cute_lce.arguments import LossArguments
from cute_lce.kernels import row_stats
from cute_lce.kernels.epilogues.store import Staging
from cute_lce.kernels.epilogues.tokens import mask_beyond
from cute_lce.kernels.fragment import Fragment
from cute_lce.kernels.logits import has_own_logits, tile_logits
from cute_lce.kernels.rows import Compacted

IN_REGISTERS = 192
"""Accumulators of a thread in the largest tiles whose tokens' numbers stay in registers."""
WITH_TOTALS = 176
"""The same where totals do too."""


class ForwardTensors(NamedTuple):
    """Global memory that the forward's epilogue accesses, and sizes.

    target (n,) int32 or int64. partials (partials, n, 2) fp32: of every window and group of four warps
    maximum and sum, or, of epilogues.sums, an exponent of two and the sum relative to it without the target's
    term. target_logit (n,) fp32: written for tokens whose target lies in [0, vocab). arrived (1,)
    int32: the combine kernel's counter, zeroed here; None: it has none.
    vocab: V; rows of tiles at and beyond it are masked with -inf. loss: its numbers. rows: which tokens
    these are, where terms have numbers of them.
    """

    target: cute.Tensor
    partials: cute.Tensor
    target_logit: cute.Tensor
    arrived: Any
    vocab: Int32
    loss: LossArguments
    rows: Compacted | None = None


class LogitsEpilogue:
    """Where the numbers of the tokens that a thread owns lie, and how products become logits."""

    stores = False
    streams = True
    scarce_registers = True

    def __init__(
        self, fragment: Fragment, warps: int, in_registers: int = IN_REGISTERS, *, total: bool = False
    ):
        """warps: that share a tile; their numbers in the CTA differ modulo `warps`. in_registers:
        accumulators of a thread in the largest tiles whose tokens' numbers stay in registers, of those
        with totals WITH_TOTALS at most; others' are in shared memory. total: whether it is a term."""
        self.fragment = fragment
        self.warps = warps
        if total:
            in_registers = min(in_registers, WITH_TOTALS)
        arrays, registers = 4 if total else 3, len(fragment.rows) * fragment.count
        self.words = arrays * fragment.slabs * fragment.owned if registers > in_registers else 0

    def _numbers(self, staging: Staging, i: int, count: int, kind: Any = Float32) -> cute.Tensor:
        """The i-th of begin's three arrays of a thread, or its totals, of this kind of numbers: in its
        registers, or its words of shared memory."""
        if not self.words:
            return cute.make_rmem_tensor(count, kind)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        address = staging.words + 4 * (WARPGROUP * count * i + thread)
        words = cute.make_ptr(kind, address, cute.AddressSpace.smem, assumed_align=4)
        return cute.make_tensor(words, cute.make_layout(count, stride=WARPGROUP))

    @cute.jit
    def to_logits(
        self,
        tensors: ForwardTensors,
        state: Any,  # it has row_sum
        frag: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
    ):
        """Products become logits."""
        fragment = self.fragment
        if cutlass.const_expr(has_own_logits(tensors.loss)):
            # Of the slab before, whose exponentials would otherwise be computed beside these logits.
            before = state.row_sum[(slab * fragment.owned - 1) % cute.size(state.row_sum)]
            own = tile_logits(tensors, row, tensors.vocab - 1, column, slab, fragment, before)
            for columns in own.together(fragment.count):
                own.apply(frag, columns)
                if cutlass.const_expr(own.row_scale is not None):
                    for c in cutlass.range_constexpr(columns.start, columns.stop):
                        scale = own.scale(c)
                        for r in cutlass.range_constexpr(len(fragment.rows)):
                            frag[r, c] = frag[r, c] * scale
        else:
            row_stats.to_logits(frag, tensors.loss)

    @cute.jit
    def to_masked_logits(
        self,
        tensors: ForwardTensors,
        state: Any,  # as in to_logits
        frag: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
    ):
        """Products become logits, rows beyond the vocabulary -inf."""
        self.to_logits(tensors, state, frag, row, column, slab)
        if row + self.fragment.rows[-1] >= tensors.vocab:
            mask_beyond(self.fragment, frag, row, tensors.vocab)

    def number(self, partial: Int32) -> Int32:
        """Of this group of warps' partial."""
        return partial * (self.warps // WARPS) + cute.arch.warp_idx() % self.warps // WARPS
