"""The paper's Algorithm 2, stripe by stripe: logits again, dlogits, the gradients' GEMMs (kernels.entry).

Where the plan has chunks, dinput is computed first, a chunk of tokens at a time, without the stripes. Of a
shard of the vocabulary dinput is a sum in fp32, unless nothing else is added to it, and the last stripe's
dweight waits until the sum over the shards has begun.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arch import SLABS
from ..arguments import (
    SUMMED_TOKENS,
    Counters,
    GradientOperands,
    Gradients,
    Operands,
    Rows,
    Statistics,
    Upstream,
    units,
)
from ..compile import cache
from ..compile.frozen import freeze
from ..implementation import BothGradients, Halfway, Request, Saved
from ..options import LossOptions
from ..plan import backward as backward_plan
from ..plan import overlap
from ..plan.kernels import BackwardKey
from ..plan.memory import compacts, copies_into_dinput
from ..plan.problem import Problem, ceil_div, round_up
from .device import Parts, aligned, dtype_name, gpu_of, layout, loss_arguments, readable, template, unpadded
from .empty import EmptyBackward
from .packing import Packing
from .rows import Compaction
from .steps import COUNTERS, Step, after, arguments_of_kept, halves, in_pieces

Memory = tuple[Tensor | None, Tensor | None, Tensor]
"""What a pass writes: dinput, dweight and the workspace."""


def backward(operands: Operands, loss: LossOptions, request: Request) -> KernelBackward | EmptyBackward:
    """A backward for operands as launch.forward takes them; it copies, allocates and launches likewise."""
    if operands.hidden.shape[0] == 0:
        return EmptyBackward(request)
    return (ShardBackward if request.shard else KernelBackward)(operands, loss, request)


class KernelBackward:
    """See implementation.Backward. `dinput` launches the GEMMs of every chunk and stripe.

    What was kept, and float16's dlogits, lack the upstream gradient: dinput's rows are then multiplied by
    factors, and dweight is computed with a copy of the hidden rows that is (kernels/scale.py).
    """

    def __init__(
        self,
        operands: Operands,
        loss: LossOptions,
        request: Request,
        plan: backward_plan.BackwardPlan | None = None,
    ):
        """plan: None: chosen for the request."""
        hidden, weight, target = operands
        device, dtype, kept = hidden.device, hidden.dtype, request.kept_columns
        keeps_logits = kept > 0 and "kept_logits" in loss.terms
        (n, self.features), self.itemsize = hidden.shape, dtype.itemsize
        d, needs = round_up(self.features, 8), (request.need_dinput, request.need_dweight)
        # Without padding the rows of what dweight is added to begin at multiples of 16 bytes.
        self.added, self.directly = request.added, self.features == d
        added = "" if self.added is None else dtype_name(self.added if self.directly else torch.float32)
        half, overwrites = dtype is torch.float16, keeps_logits and request.overwrites
        problem = Problem(n, d, weight.shape[0], half, *needs, keeps_logits, request.shard, overwrites)
        problem = problem._replace(need_dbias="bias_gradient" in loss.terms)
        gpu = gpu_of(device).serving(loss.terms, "backward")
        chosen = plan or backward_plan.plan(gpu, problem, kept, request.limits)
        self.problem, self.plan = problem, chosen
        dtypes = dtype_name(dtype), dtype_name(target.dtype)
        self.function = cache.get(BackwardKey(*chosen.configs, *dtypes, added, loss.terms))
        # Every call checks alignment and layout, which hooks on saved tensors may change.
        self.layout = layout(operands) if readable(operands) else None
        self.pitch, self.half = chosen.pitch, problem.half
        # Columns of exponentials, and of logits.
        self.kept, self.kept_logits = (0, kept) if keeps_logits else (kept, 0)
        self.packing, self.padded = Packing(hidden, kept) if request.packs else None, d
        # What shards are summed of stays in fp32, and of one split is the result.
        exact = request.shard and request.is_summed
        self.sums_are_results = exact and chosen.splits == 1
        self.accumulates = exact and chosen.splits > 1
        last = {"is_last": 0} if exact else {}
        self.stripes = tuple(freeze(stripe._replace(**last)) for stripe in chosen.stripes)
        self.chunks = [
            (chunk.first, chunk.tokens, freeze(chunk.stripe._replace(**last))) for chunk in chosen.chunks
        ]
        self.pieces: Sequence[overlap.Piece] = ()
        if overwrites and all(needs) and not request.shard and "bias_gradient" not in loss.terms:
            self.pieces = overlap.pieces(gpu, chosen.dweight, problem, chosen.stripes[0].columns)
        launched = [*(chunk.stripe for chunk in chosen.chunks), *chosen.stripes]
        self.column_sums = _column_sums(chosen, n)
        grids = [grid for each in launched for grid in (each.logits, each.dhidden, each.dweight)]
        paced = any(grid.paced for grid in [*grids, *(piece.dweight for piece in self.pieces)])
        # A shard's last launch may be two; pieces are launched beside their stripe's two others.
        count = len(launched) + request.shard + (len(self.pieces) + 1 if self.pieces else 0)
        self.counters = COUNTERS * count if paced else 0
        self.row_bytes = d * (4 if exact else self.itemsize)
        self.hidden = None
        if problem.need_dinput:
            self.hidden = template(device, torch.float32 if exact else dtype, n, d)
        self.weight = None
        if problem.need_dweight and not (added and self.directly):
            self.weight = template(device, torch.float32 if added else dtype, problem.vocab, d)
        self.compaction, self.all_rows, self.compacted = None, freeze(Rows(first=0, tokens=n)), None
        self.copies_into_dinput = False
        self._reserve(hidden, target.dtype.itemsize, exact)

    def _reserve(self, hidden: Tensor, target_bytes: int, exact: bool) -> None:
        """The parts of the workspace, by their offsets. exact: whether sums of dinput stay in fp32."""
        chosen, problem, kept = self.plan, self.problem, self.kept
        n, d, itemsize = problem.n, problem.d, self.itemsize
        compacted = compacts(problem, kept or self.kept_logits)
        parts = Parts()
        part = parts.reserve
        self.progress = part(4 * self.counters)
        scales = kept > 0 or problem.half
        self.factor = part(4 * n if scales else 0)
        self.weight_factor = part(4 if problem.half else 0)
        several = len(self.stripes) > 1 and not exact
        summed = problem.need_dinput and (several or chosen.splits > 1)
        if compacted:
            copied = kept < problem.vocab
            nbytes = n * d * itemsize
            self.copies_into_dinput = (
                copied and not self.chunks and copies_into_dinput(problem, summed=summed)
            )
            beside = copied and not self.copies_into_dinput
            self.compaction = Compaction(parts, n, target_bytes, nbytes if beside else 0, values=copied)
            if problem.need_dinput and not self.chunks and not summed and not exact:
                # dinput by compacted tokens, where there are no sums of it.
                self.compacted = part(nbytes)
        self.scaled = part(n * d * itemsize if scales and problem.need_dweight else 0)
        # The chunks are done with their part when the stripes take it.
        begin = parts.nbytes
        self.chunk_pitch = round_up(problem.vocab, 8)
        rows = max((chunk.tokens for chunk in chosen.chunks), default=0)
        self.chunk_dlogits = part(rows * self.chunk_pitch * itemsize)
        self.chunk_sums = part(4 * rows * d * chosen.splits if chosen.splits > 1 else 0)
        if compacted and rows and chosen.splits == 1 and not exact:
            self.compacted = part(rows * d * itemsize)
        end, parts.nbytes = parts.nbytes, begin
        self.dlogits = part(n * chosen.pitch * itemsize)
        self.sums = part(4 * n * d * chosen.splits if summed and not rows else 0)
        self.workspace = template(hidden.device, torch.uint8, max(parts.nbytes, end))

    def dinput(
        self, dloss: Tensor, saved: Saved, loss: LossOptions, out: Tensor | None = None
    ) -> BothGradients | Halfway:
        memory = dinput, dweight, _ = self.allocate(out)
        for step in self.steps(dloss, saved, loss, memory, adds=dweight is out):
            self.function(*step)
        return unpadded(dinput, self.features), dweight

    def allocate(self, out: Tensor | None) -> Memory:
        dinput = None if self.hidden is None else torch.empty_like(self.hidden)
        dweight = out if self.weight is None else torch.empty_like(self.weight)
        return dinput, dweight, torch.empty_like(self.workspace)

    def steps(
        self,
        dloss: Tensor,
        saved: Saved,
        loss: LossOptions,
        memory: Memory,
        *,
        adds: bool,
    ) -> Iterator[tuple]:
        """The arguments of every launch, in order."""
        hidden, weight, target = saved.hidden, saved.weight, saved.target
        if layout(saved.operands) != self.layout or (hidden.data_ptr() | weight.data_ptr()) % 16:
            hidden, weight, target = aligned(saved.operands)
        dinput, dweight, scratch = memory
        start = scratch.data_ptr()
        arguments = loss_arguments(loss)
        dloss = dloss.resolve_neg()
        upstream = Upstream(dloss=dloss.data_ptr(), stride=dloss.stride(0) if dloss.dim() else 0)
        statistics, kept_source = self._of_forward(saved, start)
        rows, dhidden = self.all_rows, 0 if dinput is None else dinput.data_ptr()
        result = dhidden
        if self.compaction is not None:
            rows = self.compaction.rows(start)
            if self.sums_are_results:
                rows = rows._replace(sums=result)
            elif not self.accumulates:
                rows = rows._replace(dhidden=result)
            if self.copies_into_dinput:
                rows = rows._replace(hidden=result)
            if self.compacted is not None:
                dhidden = start + self.compacted
        elif self.accumulates:
            rows = Rows(first=0, tokens=saved.hidden.shape[0])
        gradients = Gradients(
            dhidden=dhidden,
            dweight=0 if dweight is None else dweight.data_ptr(),
            sums=start + self.sums,
            adds=int(adds),
        )
        if self.sums_are_results:
            gradients = gradients._replace(sums=gradients.dhidden)
        # The first launch zeroes the counters of all.
        counters = Counters(address=start + self.progress, clears=self.counters)
        groups = hidden, weight, target, arguments, upstream, statistics
        stripes, chunks = self.stripes, self.chunks
        if self.kept:
            kept, stripes = stripes[0], stripes[1:]
            is_last = not stripes and not chunks
            last = self._accumulating(rows, result) if is_last else rows
            own = hidden, weight, target, arguments_of_kept(loss, arguments), upstream, statistics
            yield *own, gradients, kept_source, last, kept, counters
            if is_last:
                return
            counters, rows = after(counters), self._gathered(rows)
        copied = 0 if self.compaction is None else rows.hidden
        source = self._recomputed_source(hidden, start, copied)
        for first, tokens, stripe in chunks:
            sums = start + self.chunk_sums
            if self.sums_are_results:
                sums = gradients.dhidden + first * self.row_bytes
            yield (
                *groups,
                gradients._replace(dweight=0, sums=sums),
                source._replace(
                    dlogits=start + self.chunk_dlogits,
                    pitch=self.chunk_pitch,
                    factor=source.factor + (4 * first if self.half else 0),
                ),
                self._accumulating(self._chunk_of(rows, first, tokens), result),
                *(stripe, counters),
            )
            counters = after(counters)
        if chunks:
            # A chunk's rows were copied up to its last k tile, which is not one of all tokens.
            gradients = gradients._replace(dhidden=0)
            rows = rows if self.compaction is None else rows._replace(sums=0)
        for stripe, planned in zip(stripes, self.plan.stripes[self.kept > 0 :], strict=True):
            last = self._accumulating(rows, result) if stripe is stripes[-1] else rows
            own, written = arguments, source
            if planned.first < self.kept_logits:
                own = self._loss_of_logits(saved, loss, planned.first)
                at_kept = source._replace(dlogits=own.kept_logits, pitch=own.kept_pitch)
                own, written = loss_arguments(own), at_kept if self.problem.overwrites else source
            groups = hidden, weight, target, own, upstream, statistics, gradients
            step = Step(*groups, written, last, stripe, counters)
            if not self.pieces or planned.first:
                yield step
            else:
                of_logits = functools.partial(self._loss_of_logits, saved, loss)
                yield from in_pieces(step, self.pieces, planned, of_logits, self._gathered(last))
                counters = after(counters, len(self.pieces) + 1)
            counters = after(counters)
            source, rows = source._replace(scales=0), self._gathered(rows)

    def _loss_of_logits(self, saved: Saved, loss: Any, first: int) -> Any:
        """The loss of a stripe of kept logits that begins at the column `first`."""
        kept, notes = saved.kept, saved.kept_scale
        assert kept is not None
        assert notes is not None
        return loss._replace(
            kept_logits=kept.data_ptr() + first * kept.itemsize,
            kept_pitch=kept.stride(0),
            kept_notes=notes.data_ptr() + units(first) * notes.stride(0) * notes.itemsize,
        )

    def _accumulating(self, rows: Rows, result: int) -> Rows:
        """The same, for the last launch that adds to a shard's sums. result: the address of all tokens'."""
        if not self.accumulates or not result:
            return rows
        own = result + rows.first * self.row_bytes if self.compaction is None else result
        return rows._replace(accumulator=own)

    def _gathered(self, rows: Rows) -> Rows:
        """The same, for the launches after the first."""
        return rows if self.compaction is None else rows._replace(gathers=0)

    def _chunk_of(self, rows: Rows, first: int, tokens: int) -> Rows:
        """Some of them, which are copied behind those before."""
        if self.compaction is None:
            return Rows(first=first, tokens=tokens)
        row = round_up(self.features, 8) * self.itemsize
        return rows._replace(first=first, tokens=tokens, hidden=rows.hidden + first * row)

    def _of_forward(self, saved: Saved, start: int) -> tuple[Statistics, GradientOperands | None]:
        """The forward's statistics, and what it kept. start: the workspace's address."""
        packing, packed = self.packing, saved.kept
        if packing is None:
            statistics = Statistics(
                row_max=saved.row_max.data_ptr(),
                row_sum=saved.row_sum.data_ptr(),
                num_valid=saved.num_valid.data_ptr(),
            )
            if not self.kept:
                return statistics, None
            kept, kept_scale = saved.kept, saved.kept_scale
            assert kept is not None
            assert kept_scale is not None
            found = kept.data_ptr(), kept.stride(0), kept_scale.data_ptr()
        else:
            assert packed is not None
            base = packed.data_ptr()
            statistics = packing.statistics(base)
            found = base + packing.kept, packing.pitch, base + packing.kept_scale
        return statistics, self._scaled_source(start, *found) if self.kept else None

    def _recomputed_source(self, hidden: Tensor, start: int, copied: int) -> GradientOperands:
        """copied: the address of compacted hidden states, 0: there are none."""
        source = self._scaled_source(start, start + self.dlogits, self.pitch)
        if self.half:
            return source
        address, pitch = hidden.data_ptr(), hidden.stride(0)
        if copied:
            address, pitch = copied, source.hidden_pitch
        return source._replace(factor=0, hidden=address, hidden_pitch=pitch, scales=0)

    def _scaled_source(self, start: int, dlogits: int, pitch: int, kept_scale: int = 0) -> GradientOperands:
        """Of what was kept, or of float16's first recomputed stripe."""
        return GradientOperands(
            dlogits=dlogits,
            pitch=pitch,
            factor=start + self.factor,
            weight_factor=start + self.weight_factor if self.half else 0,
            hidden=start + self.scaled,
            hidden_pitch=self.padded,
            kept_scale=kept_scale,
            scales=1,
        )

    def dweight(
        self,
        dloss: Tensor,
        saved: Saved,
        loss: LossOptions,
        gradients: BothGradients | Halfway,
        out: Tensor | None = None,
    ) -> BothGradients:
        dinput, dweight = gradients[0], gradients[1]
        if out is None or dweight is None:
            return dinput, unpadded(dweight, self.features)
        if not self.directly:
            out += dweight[:, : self.features]
        return dinput, None


class ShardBackward(KernelBackward):
    """The same of a shard of the vocabulary: `dinput` launches all that dinput needs, `dweight` the rest, of
    which the last stripe leaves SMs to what runs beside it (plan/overlap.py)."""

    def __init__(
        self,
        operands: Operands,
        loss: LossOptions,
        request: Request,
        plan: backward_plan.BackwardPlan | None = None,
    ):
        super().__init__(operands, loss, request, plan)
        self.early, self.late, self.offset = None, None, 0
        if request.beside is not None and request.need_dinput and request.need_dweight:
            gpu, stripe = gpu_of(operands.hidden.device), self.plan.stripes[-1]
            parts = overlap.divide(gpu, self.plan.dweight, self.problem, stripe, request.beside)
            if parts is not None:
                early, late = parts
                self.early = freeze(early)
                if late is not None:
                    self.late, self.offset = freeze(late), (late.first - stripe.first) * self.itemsize

    def dinput(
        self, dloss: Tensor, saved: Saved, loss: LossOptions, out: Tensor | None = None
    ) -> BothGradients | Halfway:
        memory = dinput, dweight, scratch = self.allocate(out)
        steps = list(map(Step._make, self.steps(dloss, saved, loss, memory, adds=dweight is out)))
        later: list[Step] = []
        if dinput is not None and dweight is not None:
            count = sum(step.gradients.dhidden != 0 for step in steps)
            steps, later = steps[:count], steps[count:]
            # float16's first recomputed stripe would compute its scaled rows anew, and so its logits.
            if not later and (not self.half or steps[-1].source.kept_scale or not steps[-1].source.scales):
                steps[-1], last = halves(steps[-1])
                last = last._replace(rows=self._gathered(last.rows))
                later = [*self._divided(last)]
        for step in steps:
            self.function(*step)
        return Halfway(unpadded(dinput, self.features), dweight, (later, scratch))

    def _divided(self, step: Step) -> Iterator[Step]:
        """dweight of the last stripe, in one launch or in two."""
        if self.early is None:
            yield step
            return
        yield step._replace(stripe=self.early)
        if self.late is not None:
            source = step.source
            yield step._replace(
                source=source._replace(dlogits=source.dlogits + self.offset, scales=0),
                stripe=self.late,
                counters=after(step.counters),
            )

    def dweight(
        self,
        dloss: Tensor,
        saved: Saved,
        loss: LossOptions,
        gradients: BothGradients | Halfway,
        out: Tensor | None = None,
    ) -> BothGradients:
        assert isinstance(gradients, Halfway)
        later, _ = gradients.rest
        for step in later:
            if gradients.join is not None and step.stripe is self.late:
                gradients.join()
            self.function(*step)
        return super().dweight(dloss, saved, loss, gradients, out)


def _column_sums(plan: backward_plan.BackwardPlan, n: int) -> int:
    """The most numbers that a launch stores of sums over tokens: of each class, by slabs of tokens."""
    config = plan.tokens
    slab = min(SLABS) if config.row.tmem_columns else config.tile_n
    launches = [(chunk.stripe.columns, chunk.tokens, slab) for chunk in plan.chunks]
    for stripe in plan.stripes:
        launches.append((stripe.columns, n, SUMMED_TOKENS if stripe.first < plan.kept else slab))
    return max(columns * ceil_div(tokens, each) for columns, tokens, each in launches)
