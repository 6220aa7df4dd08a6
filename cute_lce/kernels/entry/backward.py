"""The backward's host function: a stripe of the vocabulary, three GEMMs (the paper's Algorithm 2 in stripes).

    dlogits = grad_scale (softmax(hidden @ weight.T) - onehot)   the forward's GEMM, rounded and stored
    dhidden += dlogits @ weight                                  fp32 over the stripes, rounded after the last
    dweight = dlogits.T @ hidden                                 the stripe's rows, written once

All three use the architecture's mainloop, with different major dimensions of the operands and different
epilogues. A stripe that the forward kept does not need the first. It and float16's, whose dlogits are without
grad_scale, need factors and scaled rows (kernels.scale) instead. Of kept logits dlogits are made without a
GEMM (kernels.kept_logits).
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64, Numeric

from cute_lce import maths
from cute_lce.arch import KernelConfig
from cute_lce.arguments import (
    SUMMED_TOKENS,
    Counters,
    GemmPlan,
    GradientOperands,
    Gradients,
    Rows,
    Statistics,
    Stripe,
    Upstream,
    with_terms,
)
from cute_lce.kernels.clear import clear
from cute_lce.kernels.column_sums import AddSlabs, AddTensors, SlabSums, SlabTensors
from cute_lce.kernels.entry.stripe import DhiddenParts, Matrices, dhidden_parts, given_rows
from cute_lce.kernels.entry.types import (
    ADDED,
    compacted,
    dloss_of_origins,
    example,
    example_operands,
    gather_tensors,
    given_tokens,
    has_numbers_of_tokens,
    matrix,
    origins,
    strided,
    tokens_of,
    transposed,
    values_of,
    vector,
)
from cute_lce.kernels.epilogues.dlogits import DlogitsEpilogue, DlogitsTensors
from cute_lce.kernels.epilogues.gradient import (
    AccumulatorEpilogue,
    AccumulatorTensors,
    DhiddenEpilogue,
    DhiddenTensors,
    DweightEpilogue,
    DweightTensors,
)
from cute_lce.kernels.epilogues.store import accumulator, output
from cute_lce.kernels.kept_logits import DlogitsOfKept, KeptTensors, notes_of
from cute_lce.kernels.mainloop import mainloop
from cute_lce.kernels.reduce import Reduce
from cute_lce.kernels.rows import Compacted, Gather
from cute_lce.kernels.scale import ScaleRows, ScaleTensors


class Backward:
    """One stripe of the backward; see cute_lce.arguments for what is read and written.

    Args:
        tokens: the configuration of the logits' GEMM.
        dhidden, dweight: those of the gradients' GEMMs.
        half: whether the operands are float16, whose dlogits do not hold grad_scale.
        terms: of the loss. Spare warps of dweight's GEMM, if its configuration has any, make dlogits of kept
            logits, but with a bias, whose gradient is summed before.
        added: the type of a matrix to which dweight is added; None: dweight is written.
    """

    def __init__(
        self,
        tokens: KernelConfig,
        dhidden: KernelConfig,
        dweight: KernelConfig,
        half: bool,
        added: Numeric | None = None,
        *,
        terms: tuple[str, ...] = (),
    ):
        gemm = mainloop(tokens)
        self.dlogits = gemm(tokens, DlogitsEpilogue(gemm.fragment(tokens), half))
        self.dhidden = gemm(dhidden, DhiddenEpilogue(gemm.fragment(dhidden)))
        epilogue = AccumulatorEpilogue if added is Float32 else DweightEpilogue
        if "kept_logits" in terms:
            self.dlogits_of_kept = DlogitsOfKept(gemm.fragment(tokens), terms)
        self.beside = "kept_logits" in terms and "bias_gradient" not in terms and dweight.has_spare_warps
        spare = self.dlogits_of_kept if self.beside else None
        self.dweight = gemm(dweight, epilogue(gemm.fragment(dweight)), tokens_along="k", spare=spare)
        self.added = added
        self.slab = gemm.fragment(tokens).columns
        # dlogits of float16 are HALF_SCALE times what they stand for; the sums of what was kept are made so.
        self.kept_sums = SlabSums(maths.HALF_SCALE if half else 1.0)
        self.bias_gradient = AddSlabs(1 / maths.HALF_SCALE if half else 1.0)
        self.gather = Gather()
        self.reduce = Reduce()
        self.scale = ScaleRows(half)

    @cute.jit
    def __call__(
        self,
        hidden: cute.Tensor,  # (n, d)
        weight: cute.Tensor,  # (V, d)
        target: cute.Tensor,  # (n,)
        loss,  # LossArguments, or with_terms
        upstream: Upstream,
        statistics: Statistics,
        gradients: Gradients,
        source: GradientOperands,
        rows: Rows,
        stripe: Stripe,
        counters: Counters,
        stream: cuda.CUstream,
    ):
        dtype, n = hidden.element_type, rows.tokens
        everything, d = cute.size(hidden, mode=[0]), cute.size(hidden, mode=[1])
        # A kept stripe has no GEMM of logits: the scaling zeroes the counters too.
        scaled_first = source.kept_scale != 0 and source.scales != 0
        clears = vector(Int32, counters.address, cutlass.select_(scaled_first, Int32(0), counters.clears))
        if rows.gathers != 0:
            values = (
                strided(upstream.dloss, everything, upstream.stride),
                vector(Float32, statistics.row_max, everything),
                vector(Float32, statistics.row_sum, everything),
            )
            self.gather(gather_tensors(hidden, target, rows, loss, values, clears), stream)
        tokens = compacted(rows, everything)
        whole = hidden
        hidden, target = tokens_of(hidden, target, rows)
        dloss, row_max, row_sum = values_of(upstream, statistics, rows, everything)
        row_pitch = weight.stride[0]
        classes = cute.make_tensor(
            weight.iterator + Int64(stripe.first) * row_pitch,
            cute.make_layout((stripe.columns, d), stride=(row_pitch, 1)),
        )
        matrices = Matrices(
            classes=classes,
            hidden=hidden,
            dlogits=matrix(dtype, source.dlogits, n, stripe.columns, source.pitch),
            rows=matrix(dtype, source.hidden, n, d, source.hidden_pitch),
            given=given_tokens(whole, rows),
            given_rows=given_rows(whole, source, rows),
            factor=vector(Float32, source.factor, n),
            weight_factor=vector(Float32, source.weight_factor, 1),
        )
        progress = [vector(Int32, counters.address + 4 * i, 1) for i in range(3)]
        num_valid = vector(Int64, statistics.num_valid, 1)
        own = target, row_max, row_sum, dloss
        if cute.size(clears) != 0 and rows.gathers == 0:
            clear(clears, stream)
        if source.kept_scale == 0:
            written = DlogitsTensors(
                *own,
                num_valid=num_valid,
                dlogits=output(matrices.dlogits),
                loss=loss,
                first=stripe.first,
                columns=stripe.columns,
                rows=tokens if has_numbers_of_tokens(loss) else None,
            )
            self._dlogits(written, matrices, progress[0], stripe.logits, tokens, stream)
        if source.scales != 0:
            self.scale(
                ScaleTensors(
                    rows=tokens,
                    hidden=origins(whole, hidden, rows),
                    target=target,
                    dloss=dloss_of_origins(self._row_factors(upstream, loss), rows, everything),
                    num_valid=num_valid,
                    kept_scale=vector(Float32, source.kept_scale, n),
                    factor=matrices.factor,
                    weight_factor=matrices.weight_factor,
                    scaled=matrices.rows,
                    counters=vector(
                        Int32, counters.address, cutlass.select_(scaled_first, counters.clears, Int32(0))
                    ),
                    loss=loss,
                    wanted=Int32(gradients.dweight != 0),
                ),
                stream,
            )
        if cutlass.const_expr("bias_gradient" in loss.terms):
            if loss.with_dhidden == 0 or gradients.dhidden != 0:
                self._dbias(matrices, loss, source, stripe, tokens, stream)
        parts = dhidden_parts(matrices, gradients, rows, stripe)
        if gradients.dhidden != 0:
            self._dhidden(matrices, parts, stripe, progress[1], tokens, stream)
        if gradients.dweight != 0:
            # A shard's dweight alone is not: SMs that become free are for another stream's sum of dhidden.
            early = gradients.dhidden != 0
            if cutlass.const_expr(self.beside):
                early = early or loss.beside_columns != 0
            self.dweight(
                transposed(matrices.dlogits),
                transposed(matrices.rows),
                self._dweight_tensors(dtype, gradients, stripe, d, matrices.weight_factor),
                progress[2],
                stripe.dweight,
                tokens,
                stream,
                early,
                given=transposed(matrices.given_rows),
                beside=self._kept_beside(own, dtype, loss, tokens),
            )
        if gradients.dhidden != 0:
            # Last: rows.hidden, which dweight's GEMM may read, may lie where this writes.
            self._rounded(parts, rows, stripe, tokens, gradients.dweight != 0, stream)

    @cute.jit
    def _dlogits(
        self,
        written: DlogitsTensors,
        matrices: Matrices,
        progress: cute.Tensor,
        grid: GemmPlan,
        tokens: Compacted,
        stream,
    ):
        """dlogits of logits, computed again or kept."""
        loss, dlogits, given = written.loss, matrices.dlogits, matrices.given
        operands = matrices.classes, matrices.hidden
        if cutlass.const_expr("kept_logits" in loss.terms):
            if loss.kept_logits != 0:
                n, columns = dlogits.shape
                kept = matrix(Float16, loss.kept_logits, n, columns, loss.kept_pitch)
                notes = notes_of(loss.kept_notes, columns, n)
                own = written.target, written.row_max, written.row_sum, written.dloss
                self.dlogits_of_kept(
                    KeptTensors(*own, kept, notes, dlogits, loss, written.first, tokens), stream
                )
            else:
                self.dlogits(*operands, written, progress, grid, tokens, stream, given=given)
        else:
            self.dlogits(*operands, written, progress, grid, tokens, stream, given=given)

    def _kept_beside(
        self, own: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor], dtype, loss, tokens: Compacted
    ) -> KeptTensors | None:
        """What becomes dlogits beside dweight's GEMM. own: the first fields of KeptTensors."""
        if not self.beside:
            return None
        n, columns, pitch = cute.size(own[0]), loss.beside_columns, loss.kept_pitch
        kept, dlogits = (matrix(kind, loss.beside_logits, n, columns, pitch) for kind in (Float16, dtype))
        notes = notes_of(loss.beside_notes, columns, n)
        return KeptTensors(*own, kept, notes, dlogits, loss, loss.beside_first, tokens)

    @cute.jit
    def _dbias(
        self,
        matrices: Matrices,
        loss,
        source: GradientOperands,
        stripe: Stripe,
        tokens: Compacted,
        stream,
    ):
        """The gradient by a bias, of the slabs' sums, which the GEMM of logits has stored where it ran."""
        sums, slab, is_kept = loss.column_sums, Int32(SUMMED_TOKENS), source.kept_scale != 0
        kept = SlabTensors(matrices.dlogits, factor=matrices.factor, partials=sums, slab=slab, of=tokens)
        if is_kept:
            self.kept_sums(kept, stream)
        elif cutlass.const_expr("kept_logits" in loss.terms):
            if loss.kept_logits != 0:
                self.kept_sums(kept._replace(factor=None), stream)
        if cutlass.const_expr("kept_logits" in loss.terms):
            is_kept = loss.kept_logits != 0
        slab = Int32(cutlass.select_(is_kept, slab, Int32(self.slab)))
        dbias = vector(Float32, loss.dbias + 4 * Int64(stripe.first), stripe.columns)
        adds = Boolean(tokens.first > 0)
        self.bias_gradient(AddTensors(partials=sums, out=dbias, slab=slab, adds=adds, of=tokens), stream)

    @cute.jit
    def _dhidden(
        self,
        matrices: Matrices,
        parts: DhiddenParts,
        stripe: Stripe,
        progress: cute.Tensor,
        tokens: Compacted,
        stream,
    ):
        """dhidden's GEMM."""
        everything = cute.size(tokens.source)
        self.dhidden(
            transposed(matrices.classes),
            matrices.dlogits,
            DhiddenTensors(
                out=output(parts.out, self.dhidden.config.tile_n),
                n=cute.size(matrices.hidden, mode=[0]),
                sums=parts.sums,
                factor=matrices.factor,
                places=tokens._replace(source=vector(Int32, parts.places, everything)),
                is_first=stripe.is_first,
                to_out=Int32(stripe.is_last != 0 and stripe.dhidden.splits == 1 and not parts.from_sums),
            ),
            progress,
            stripe.dhidden,
            tokens,
            stream,
        )

    @cute.jit
    def _rounded(
        self, parts: DhiddenParts, rows: Rows, stripe: Stripe, tokens: Compacted, follows: Boolean, stream
    ):
        """After the last stripe, the sums of dhidden's splits and the tokens' places. follows: whether the
        launch before is dweight's GEMM, whose last tiles need not be awaited."""
        out, sums, from_sums = parts.out, parts.sums, parts.from_sums
        (n, d), everything, dtype = out.shape, cute.size(tokens.source), out.element_type
        if stripe.is_last != 0 and (stripe.dhidden.splits > 1 or from_sums):
            # Without compaction `out` begins at the launch's first row.
            address = Int64(cutlass.select_(from_sums, rows.dhidden, out.iterator.toint()))
            # Not where dweight's GEMM may still read copied hidden states.
            overlaps = Int32(follows and rows.hidden != address)
            self.reduce(matrix(dtype, address, everything, d, d), sums, tokens, stream, overlaps)
        if stripe.is_last != 0 and rows.dhidden != 0 and not from_sums:
            only = cute.make_tensor(out.iterator, cute.make_layout((1, n, d), stride=(Int64(n) * d, d, 1)))
            # Of several splits the launch before is the one above.
            overlaps = Int32(follows and stripe.dhidden.splits == 1 and rows.hidden != rows.dhidden)
            self.reduce(matrix(dtype, rows.dhidden, everything, d, d), only, tokens, stream, overlaps)
        if rows.accumulator != 0:
            source = Int64(cutlass.select_(rows.in_order != 0, Int64(0), rows.source))
            places = tokens._replace(source=vector(Int32, source, everything))
            self.reduce(matrix(Float32, rows.accumulator, everything, d, d), sums, places, stream)

    def _row_factors(self, upstream: Upstream, loss) -> Upstream:
        """What the rows of float16's dlogits, or of what was kept, are multiplied by."""
        if "coefficients" in loss.terms:
            return Upstream(dloss=loss.row_factor, stride=Int64(1))
        return upstream

    def _dweight_tensors(
        self, dtype, gradients: Gradients, stripe: Stripe, d: Int32, factor: cute.Tensor
    ) -> DweightTensors | AccumulatorTensors:
        """Of the rows of a stripe."""
        kind = dtype if self.added is None else self.added
        address = gradients.dweight + Int64(stripe.first) * d * (kind.width // 8)
        dweight = matrix(kind, address, stripe.columns, d, d)
        if self.added is Float32:
            return AccumulatorTensors(out=accumulator(dweight, gradients.adds), factor=factor)
        before = None if self.added is None else dweight
        return DweightTensors(out=output(dweight), before=before, factor=factor)


def compile_backward(
    tokens: KernelConfig,
    dhidden: KernelConfig,
    dweight: KernelConfig,
    dtype: str,
    target_dtype: str,
    added: str,
    terms: tuple[str, ...],
    *,
    options: str,
):
    """Compile `Backward` for any n, d, V, stripe, and pitch of rows that begin at multiples of 16 bytes."""
    return cute.compile(
        Backward(
            *(tokens, dhidden, dweight),
            half=dtype == "float16",
            added=ADDED[added],
            terms=terms,
        ),
        *example_operands(dtype, target_dtype),
        example(with_terms(terms)),
        example(Upstream),
        example(Statistics),
        example(Gradients),
        example(GradientOperands),
        example(Rows),
        example(Stripe),
        example(Counters),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
