"""The forward's host function: the GEMM with the row statistics, then the combine kernel."""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint16

from cute_lce import maths
from cute_lce.arch import KernelConfig
from cute_lce.arguments import (
    COMBINE_ROWS,
    COPIES,
    ForwardOutputs,
    GemmPlan,
    KeepOutputs,
    Rows,
    units,
    with_terms,
)
from cute_lce.kernels.clear import clear
from cute_lce.kernels.combine import Combine, CombineTensors, total_tensors
from cute_lce.kernels.combine_more import CombineMore
from cute_lce.kernels.entry.types import (
    compacted,
    example,
    example_operands,
    gather_tensors,
    given_tokens,
    has_numbers_of_tokens,
    matrix,
    origins,
    tokens_of,
    vector,
)
from cute_lce.kernels.epilogues.keep import KeepEpilogue, KeepForwardTensors, is_plain
from cute_lce.kernels.epilogues.keep_logits import KeepLogitsEpilogue, KeepLogitsTensors
from cute_lce.kernels.epilogues.logits import ForwardTensors
from cute_lce.kernels.epilogues.statistics import ForwardEpilogue
from cute_lce.kernels.epilogues.store import output
from cute_lce.kernels.epilogues.sums import SumEpilogue, suffices
from cute_lce.kernels.keep import Finish, KeepTensors, References
from cute_lce.kernels.kept_logits import Notes, notes_of
from cute_lce.kernels.mainloop import mainloop
from cute_lce.kernels.rows import Copy, Gather


class Workspace(NamedTuple):
    """The parts of ForwardOutputs.workspace: two int32, then fp32.

    progress, arrived (1,): the clusters' steps, and the combine kernel's blocks that are done. partials
    (partials of a row, n, 2). target_logit (n,). blocks (blocks, 2): sums of each of these.
    """

    progress: cute.Tensor
    arrived: cute.Tensor
    partials: cute.Tensor
    target_logit: cute.Tensor
    blocks: cute.Tensor


class Forward:
    """Loss and row statistics of hidden @ weight.T; see cute_lce.arguments for what is read and written.

    Args:
        config: tiles, cluster, stages.
        kept: where it also keeps the exponentials of the first columns, their type's range; see kernels.keep.
        terms: with "kept_logits" it keeps logits; see kernels.kept_logits.
    """

    def __init__(self, config: KernelConfig, kept: maths.KeptRange | None, terms: tuple[str, ...]):
        if kept is not None and "kept_logits" in terms:
            raise ValueError(f"kept: got {kept} with terms {terms}, want None, since logits are kept")
        gemm = mainloop(config)
        fragment = gemm.fragment(config)
        total = "total" in terms
        self.keeps, self.keeps_logits = kept is not None, "kept_logits" in terms
        if self.keeps_logits:
            epilogue = KeepLogitsEpilogue(fragment, config.tile_warps, total=total)
        elif kept is None:
            kind = SumEpilogue if suffices(terms) else ForwardEpilogue
            epilogue = kind(fragment, config.tile_warps, total=total)
        else:
            epilogue = KeepEpilogue(fragment, config.tile_warps, kept)
            self.references = References(kept)
            self.finish = Finish(fragment, kept)
        self.gemm = gemm(config, epilogue)
        self.gather, self.copy = Gather(), Copy()
        # The GEMM's partials have powers of two in the place of maxima, and no target's exponential.
        self.combine = Combine(without_targets=isinstance(epilogue, SumEpilogue))
        self.combine_more = CombineMore()
        self.partials_per_window = config.partials_per_window

    @cute.jit
    def __call__(
        self,
        hidden: cute.Tensor,  # (n, d)
        weight: cute.Tensor,  # (V, d)
        target: cute.Tensor,  # (n,)
        loss,  # LossArguments, or with_terms
        outputs: ForwardOutputs,
        rows: Rows,
        grid: GemmPlan,
        keep: KeepOutputs,
        stream: cuda.CUstream,
    ):
        vocab, n = cute.size(weight, mode=[0]), rows.tokens
        # References zeroes the counter of a forward that keeps.
        clears = vector(Int32, outputs.workspace, Int32(0) if self.keeps else grid.paced)
        if rows.gathers == 1:
            self.gather(gather_tensors(hidden, target, rows, loss, counters=clears), stream)
        if cutlass.const_expr(self.keeps):
            if rows.gathers == COPIES:
                self.copy(gather_tensors(hidden, target, rows, loss), stream)
        everything = cute.size(hidden, mode=[0])
        whole, given = hidden, given_tokens(hidden, rows)
        hidden, target = tokens_of(hidden, target, rows)
        tokens = compacted(rows, everything)
        space = _workspace(outputs.workspace, grid.windows * self.partials_per_window, n)
        # Finish adds up what blocks have found.
        arrived = None if self.keeps else space.arrived
        # By the operands' tokens.
        shard = outputs.shard
        logit_out = vector(Float32, outputs.target_logit, everything)
        row_max = vector(Float32, outputs.row_max, everything)
        row_sum = vector(Float32, outputs.row_sum, everything)
        tensors = ForwardTensors(
            target=target,
            partials=space.partials,
            target_logit=space.target_logit,
            arrived=arrived,
            vocab=vocab,
            loss=loss,
            rows=tokens if has_numbers_of_tokens(loss) else None,
        )
        combined = CombineTensors(
            vocab=vocab,
            shard=shard,
            loss=loss,
            rows=tokens,
            target=target,
            partials=space.partials,
            target_logit=space.target_logit,
            logit_out=logit_out,
            row_max=row_max,
            row_sum=row_sum,
            losses=vector(Float32, outputs.loss, everything),
            num_valid=vector(Int64, outputs.num_valid, 1),
            blocks=space.blocks,
            arrived=arrived,
        )
        if cutlass.const_expr(self.keeps):
            kept = self._keep_tensors(keep, hidden.element_type, n)
            if cutlass.const_expr(is_plain(loss)):
                combined = combined._replace(bases=kept.reference)
            if outputs.finishes == 0:
                by_origin = origins(whole, hidden, rows)
                self.references(by_origin, weight, target, tokens, kept, space.progress, loss, stream)
                out = output(kept.kept, self.gemm.config.tile_n)
                keeping = KeepForwardTensors(forward=tensors, keep=kept, out=out)
                self._statistics(hidden, given, weight, keeping, combined, space.progress, grid, stream)
            if shard == 0 or outputs.finishes != 0:
                address = Int64(cutlass.select_(shard != 0, outputs.target_logit, Int64(0)))
                shard_logit = vector(Float32, address, everything)
                own = kept, tokens, target, space.target_logit, shard_logit, row_max, row_sum
                self.finish(*own, total_tensors(combined), stream)
        else:
            if cute.size(clears) != 0 and rows.gathers == 0:
                clear(clears, stream)
            if cutlass.const_expr(self.keeps_logits):
                kept = matrix(Float16, keep.kept, n, keep.columns, keep.pitch)
                out = output(kept, self.gemm.config.tile_n)
                notes = Notes(out, notes_of(keep.workspace, keep.columns, n), keep.columns)
                tensors = KeepLogitsTensors(forward=tensors, keep=notes)
            self._statistics(hidden, given, weight, tensors, combined, space.progress, grid, stream)

    @cute.jit
    def _statistics(
        self,
        hidden,
        given,
        weight,
        tensors,
        combined: CombineTensors,
        progress,
        grid: GemmPlan,
        stream,
    ):
        """The GEMM and, from its partials, the rows' statistics."""
        self.gemm(weight, hidden, tensors, progress, grid, combined.rows, stream, given=given)
        self.combine(combined, stream)
        if cutlass.const_expr("more_partials" in combined.loss._fields):
            self.combine_more(combined, stream)

    @cute.jit
    def _keep_tensors(self, keep: KeepOutputs, element: cutlass.Constexpr, n) -> KeepTensors:
        notes = cute.make_ptr(Uint16, keep.workspace + Int64(n) * 8, cute.AddressSpace.gmem, assumed_align=2)
        return KeepTensors(
            kept=matrix(element, keep.kept, n, keep.columns, keep.pitch),
            reference=vector(Float32, keep.workspace, n),
            notes=cute.make_tensor(notes, cute.make_layout((units(keep.columns), n), stride=(Int64(n), 1))),
            most_raised=vector(Int32, keep.workspace + Int64(n) * 4, n),
            kept_scale=vector(Float32, keep.kept_scale, n),
            columns=keep.columns,
        )


def _workspace(address: Int64, count: Int32, n: Int32) -> Workspace:
    """count: partials of a row."""
    counters = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=8)
    floats = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=8)
    partials = cute.make_tensor(floats + 2, cute.make_layout((count, n, 2), stride=(Int64(n) * 2, 2, 1)))
    own = partials.iterator + Int64(count) * n * 2
    return Workspace(
        progress=cute.make_tensor(counters, cute.make_layout(1)),
        arrived=cute.make_tensor(counters + 1, cute.make_layout(1)),
        partials=partials,
        target_logit=vector(Float32, own.toint(), n),
        blocks=cute.make_tensor(
            own + n, cute.make_layout((cute.ceil_div(n, COMBINE_ROWS), 2), stride=(2, 1))
        ),
    )


def compile_forward(
    config: KernelConfig,
    dtype: str,
    target_dtype: str,
    keeps: bool = False,
    terms: tuple[str, ...] = (),
    *,
    options: str,
):
    """Compile `Forward` for any n, d and V, and any pitch of rows that begin at multiples of 16 bytes."""
    logits = keeps and "kept_logits" in terms
    return cute.compile(
        Forward(config, maths.KEPT_RANGES[dtype] if keeps and not logits else None, terms),
        *example_operands(dtype, target_dtype),
        example(with_terms(terms)),
        example(ForwardOutputs),
        example(Rows),
        example(GemmPlan),
        example(KeepOutputs),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
