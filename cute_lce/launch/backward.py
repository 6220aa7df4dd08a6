"""The paper's Algorithm 2, stripe by stripe: logits again, dlogits, the gradients' GEMMs (kernels.entry).

Where the plan has chunks, dinput is computed first, a chunk of tokens at a time, without the stripes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments import GradientOperands, Gradients, Operands, Statistics, Upstream
from ..compile import cache
from ..compile.frozen import freeze
from ..implementation import BothGradients, Request, Saved
from ..options import LossOptions
from ..plan import backward as backward_plan
from ..plan.kernels import BackwardKey
from ..plan.problem import Problem, round_up
from .device import (
    Parts,
    aligned,
    dtype_name,
    gpu_of,
    in_place,
    loss_arguments,
    template,
    without_padding,
)

COUNTERS = 3
"""int32 progress counters of a stripe, one for each GEMM."""


def backward(operands: Operands, loss: LossOptions, request: Request) -> KernelBackward | EmptyBackward:
    """A backward for operands as launch.forward takes them; it copies, allocates and launches likewise."""
    if operands.hidden.shape[0] == 0:
        return EmptyBackward(request)
    return KernelBackward(operands, loss, request)


@dataclass(frozen=True)
class EmptyBackward:
    """The backward of a call without rows."""

    request: Request

    def dinput(
        self, dloss: Tensor, saved: Saved, loss: LossOptions, out: Tensor | None = None
    ) -> BothGradients:
        return _zeros(saved.hidden) if self.request.need_dinput else None, None

    def dweight(
        self,
        dloss: Tensor,
        saved: Saved,
        loss: LossOptions,
        gradients: BothGradients,
        out: Tensor | None = None,
    ) -> BothGradients:
        writes = self.request.need_dweight and out is None
        return gradients[0], _zeros(saved.weight) if writes else None


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)


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
        (n, self.features), self.itemsize = hidden.shape, dtype.itemsize
        d, needs = round_up(self.features, 8), (request.need_dinput, request.need_dweight)
        # Without padding the rows of what dweight is added to begin at multiples of 16 bytes.
        self.added, self.directly = request.added, self.features == d
        added = "" if self.added is None else dtype_name(self.added if self.directly else torch.float32)
        problem = Problem(n, d, weight.shape[0], dtype is torch.float16, *needs)
        chosen = plan or backward_plan.plan(gpu_of(device), problem, kept, request.limits)
        configs = chosen.tokens, chosen.dweight
        self.function = cache.get(BackwardKey(*configs, dtype_name(dtype), dtype_name(target.dtype), added))
        # Every call checks the alignment of addresses, and strides, which hooks on saved tensors may change.
        usable = in_place(hidden) and in_place(weight) and target.stride(0) == 1
        self.strides = (hidden.stride(), weight.stride(), target.stride()) if usable else None
        self.kept, self.pitch, self.half = kept, chosen.pitch, problem.half
        self.stripes = tuple(map(freeze, chosen.stripes))
        self.chunks = [(chunk.first, chunk.tokens, freeze(chunk.stripe)) for chunk in chosen.chunks]
        launched = [*(chunk.stripe for chunk in chosen.chunks), *chosen.stripes]
        self.paced = any(each.logits.paced or each.dhidden.paced or each.dweight.paced for each in launched)
        self.counters = COUNTERS * len(launched)
        self.hidden = template(device, dtype, n, d) if problem.need_dinput else None
        self.weight = None
        if problem.need_dweight and not (added and self.directly):
            self.weight = template(device, torch.float32 if added else dtype, problem.vocab, d)
        parts = Parts()
        part = parts.reserve
        scales = kept > 0 or problem.half
        self.factor = part(4 * n if scales else 0)
        self.weight_factor = part(4 if problem.half else 0)
        self.scaled = part(n * d * dtype.itemsize if scales and problem.need_dweight else 0)
        # The chunks are done with their part when the stripes take it.
        begin = parts.nbytes
        self.chunk_pitch = round_up(problem.vocab, 8)
        rows = max((chunk.tokens for chunk in chosen.chunks), default=0)
        self.chunk_dlogits = part(rows * self.chunk_pitch * dtype.itemsize)
        self.chunk_sums = part(4 * rows * d * chosen.splits if chosen.splits > 1 else 0)
        end, parts.nbytes = parts.nbytes, begin
        self.dlogits = part(n * chosen.pitch * dtype.itemsize)
        summed = problem.need_dinput and not rows and (len(self.stripes) > 1 or chosen.splits > 1)
        self.sums = part(4 * n * d * chosen.splits if summed else 0)
        self.workspace = template(device, torch.uint8, max(parts.nbytes, end))

    def dinput(
        self, dloss: Tensor, saved: Saved, loss: LossOptions, out: Tensor | None = None
    ) -> BothGradients:
        hidden, weight, target = saved.hidden, saved.weight, saved.target
        strides = hidden.stride(), weight.stride(), target.stride()
        if strides != self.strides or (hidden.data_ptr() | weight.data_ptr()) % 16:
            hidden, weight, target = aligned(saved.operands)
        scratch = torch.empty_like(self.workspace)
        start = scratch.data_ptr()
        dinput = None if self.hidden is None else torch.empty_like(self.hidden)
        dweight = out if self.weight is None else torch.empty_like(self.weight)
        arguments = loss_arguments(loss)
        upstream = Upstream(dloss=dloss.data_ptr(), stride=dloss.stride(0) if dloss.dim() else 0)
        statistics = Statistics(
            row_max=saved.row_max.data_ptr(),
            row_sum=saved.row_sum.data_ptr(),
            num_valid=saved.num_valid.data_ptr(),
        )
        gradients = Gradients(
            dhidden=0 if dinput is None else dinput.data_ptr(),
            dweight=0 if dweight is None else dweight.data_ptr(),
            sums=start + self.sums,
            adds=int(dweight is out),
        )
        progress = 0
        if self.paced:
            counters = torch.zeros((self.counters,), dtype=torch.int32, device=hidden.device)
            progress = counters.data_ptr()
        stripes, chunks = self.stripes, self.chunks
        if self.kept:
            groups = hidden, weight, target, arguments, upstream, statistics, gradients
            self.function(*groups, self._kept_source(saved, start), stripes[0], progress)
            progress, stripes = progress + 4 * COUNTERS, stripes[1:]
        source = self._recomputed_source(hidden, start)
        for first, tokens, stripe in chunks:
            self.function(
                *(hidden[first : first + tokens], weight, target[first : first + tokens], arguments),
                *self._of_tokens(first, upstream, statistics, gradients, start),
                source._replace(
                    dlogits=start + self.chunk_dlogits,
                    pitch=self.chunk_pitch,
                    factor=source.factor + (4 * first if self.half else 0),
                ),
                *(stripe, progress),
            )
            progress += 4 * COUNTERS
        if chunks:
            gradients = gradients._replace(dhidden=0)
        groups = hidden, weight, target, arguments, upstream, statistics, gradients
        for stripe in stripes:
            self.function(*groups, source, stripe, progress)
            progress += 4 * COUNTERS
            source = source._replace(scales=0)
        return without_padding(dinput, self.features), dweight

    def _of_tokens(
        self, first: int, upstream: Upstream, statistics: Statistics, gradients: Gradients, start: int
    ) -> tuple[Upstream, Statistics, Gradients]:
        """The groups of the tokens from `first` on, for dinput alone."""
        row = round_up(self.features, 8) * self.itemsize
        return (
            upstream._replace(dloss=upstream.dloss + 4 * first * upstream.stride),
            statistics._replace(
                row_max=statistics.row_max + 4 * first, row_sum=statistics.row_sum + 4 * first
            ),
            gradients._replace(
                dhidden=gradients.dhidden + first * row, dweight=0, sums=start + self.chunk_sums
            ),
        )

    def _kept_source(self, saved: Saved, start: int) -> GradientOperands:
        kept, kept_scale = saved.kept, saved.kept_scale
        assert kept is not None
        assert kept_scale is not None
        return self._scaled_source(start)._replace(
            dlogits=kept.data_ptr(), pitch=kept.stride(0), kept_scale=kept_scale.data_ptr()
        )

    def _recomputed_source(self, hidden: Tensor, start: int) -> GradientOperands:
        source = self._scaled_source(start)
        if self.half:
            return source
        return source._replace(factor=0, hidden=hidden.data_ptr(), hidden_pitch=hidden.stride(0), scales=0)

    def _scaled_source(self, start: int) -> GradientOperands:
        """Of float16's first recomputed stripe; such operands differ from it in a few fields."""
        return GradientOperands(
            dlogits=start + self.dlogits,
            pitch=self.pitch,
            factor=start + self.factor,
            weight_factor=start + self.weight_factor if self.half else 0,
            hidden=start + self.scaled,
            hidden_pitch=round_up(self.features, 8),
            kept_scale=0,
            scales=1,
        )

    def dweight(
        self,
        dloss: Tensor,
        saved: Saved,
        loss: LossOptions,
        gradients: BothGradients,
        out: Tensor | None = None,
    ) -> BothGradients:
        dinput, dweight = gradients
        if out is None or dweight is None:
            return dinput, without_padding(dweight, self.features)
        if not self.directly:
            out += dweight[:, : self.features]
        return dinput, None
