"""The paper's Algorithm 2, stripe by stripe: logits again, dlogits, the gradients' GEMMs (kernels.entry)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..arguments import GradientOperands, Gradients, LossArguments, Statistics, Upstream
from ..compile import cache
from ..implementation import Request, Saved
from ..options import LossOptions
from ..plan import backward as backward_plan
from ..plan.kernels import BackwardKey
from ..plan.problem import Limits, Problem, round_up
from ..streaming.rows import grad_scale, is_ignored
from .device import aligned_rows, dtype_name, gpu_of, template

ALIGNMENT = 256
"""The parts of a workspace begin at multiples of this many bytes."""
COUNTERS = 3
"""int32 progress counters of a stripe, one for each GEMM."""


class _Prepared:
    """Decided once for backwards of one kind: the plan, and the layout of the workspace.

    sizes: the fields of a Problem. limits: those of Limits.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, target_dtype: torch.dtype, kept: int, sizes, limits
    ):
        problem = Problem(*sizes)
        n, d = problem.n, problem.d
        chosen = backward_plan.plan(gpu_of(device), problem, kept, Limits(*limits))
        configs = chosen.tokens, chosen.dweight
        self.function = cache.get(BackwardKey(*configs, dtype_name(dtype), dtype_name(target_dtype)))
        self.kept, self.pitch, self.stripes = kept, chosen.pitch, chosen.stripes
        self.paced = any(
            stripe.logits.paced or stripe.dhidden.paced or stripe.dweight.paced for stripe in self.stripes
        )
        total = 0

        def part(size: int) -> int:
            """Reserve `size` bytes; returns their offset."""
            nonlocal total
            offset, total = total, total + round_up(size, ALIGNMENT)
            return offset

        self.kept_factor = part(4 * n if kept else 0)
        self.kept_hidden = part(n * d * dtype.itemsize if kept and problem.need_dweight else 0)
        self.dlogits = part(n * chosen.pitch * dtype.itemsize)
        summed = problem.need_dinput and (len(self.stripes) > 1 or chosen.splits > 1)
        self.sums = part(4 * n * d * chosen.splits if summed else 0)
        self.workspace = template(device, torch.uint8, total)


_prepare = functools.lru_cache(maxsize=4096)(_Prepared)


def backward(
    dloss: Tensor, saved: Saved, loss: LossOptions, request: Request
) -> KernelBackward | EmptyBackward:
    if saved.hidden.shape[0] == 0:
        return EmptyBackward(saved, request)
    return KernelBackward(dloss, saved, loss, request)


class EmptyBackward:
    """The backward of a call without rows."""

    def __init__(self, saved: Saved, request: Request):
        self._saved, self._request = saved, request

    def dinput(self) -> Tensor | None:
        return _zeros(self._saved.hidden) if self._request.need_dinput else None

    def dweight(self) -> Tensor | None:
        return _zeros(self._saved.weight) if self._request.need_dweight else None


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)


class KernelBackward:
    """See implementation.Backward. `dinput` launches every stripe's three GEMMs.

    The range of float16 is too small for upstream / n: its dlogits are softmax - onehot, dinput's rows are
    scaled when they are rounded, and dweight is computed with a copy of the hidden rows scaled by factor /
    max factor, with the maximum applied at the end.
    Kept columns need no dlogits: a row's factor is its grad_scale times kept_scale.
    """

    def __init__(self, dloss: Tensor, saved: Saved, loss: LossOptions, request: Request):
        self._dloss, self._saved, self._loss, self._request = dloss, saved, loss, request
        self._features = saved.hidden.shape[1]
        self._dweight: Tensor | None = None

    def dinput(self) -> Tensor | None:
        dloss, saved, request = self._dloss, self._saved, self._request
        hidden, weight = aligned_rows("input", saved.hidden), aligned_rows("linear_weight", saved.weight)
        target = saved.target if saved.target.stride(0) == 1 else saved.target.contiguous()
        (n, d), V = hidden.shape, weight.shape[0]
        device, dtype, half = hidden.device, hidden.dtype, hidden.dtype is torch.float16
        sizes = n, d, V, half, request.need_dinput, request.need_dweight
        kept = 0 if saved.kept is None else min(saved.kept.shape[1], V)
        prepared = _prepare(device, dtype, target.dtype, kept, sizes, request.limits)
        scratch = torch.empty_like(prepared.workspace)
        start = scratch.data_ptr()
        contiguous = torch.contiguous_format
        dinput = torch.empty_like(hidden, memory_format=contiguous) if request.need_dinput else None
        dweight = torch.empty_like(weight, memory_format=contiguous) if request.need_dweight else None
        groups = (
            *(hidden, weight, target),
            LossArguments.of(self._loss),
            Upstream(dloss=dloss.data_ptr(), stride=dloss.stride(0) if dloss.dim() else 0),
            Statistics(
                row_max=saved.row_max.data_ptr(),
                row_sum=saved.row_sum.data_ptr(),
                num_valid=saved.num_valid.data_ptr(),
            ),
            Gradients(
                dhidden=0 if dinput is None else dinput.data_ptr(),
                dweight=0 if dweight is None else dweight.data_ptr(),
                sums=start + prepared.sums,
            ),
        )
        progress = 0
        if prepared.paced:
            counters = torch.zeros((COUNTERS * len(prepared.stripes),), dtype=torch.int32, device=device)
            progress = counters.data_ptr()
        stripes = prepared.stripes
        if kept:
            prepared.function(*groups, self._kept_source(prepared, start, d), stripes[0], progress)
            progress, stripes = progress + 4 * COUNTERS, stripes[1:]
        if stripes:
            # float16: keep the copies alive until every stripe is launched.
            source, _copies = self._recomputed_source(prepared, start, hidden, target)
            for stripe in stripes:
                prepared.function(*groups, source, stripe, progress)
                progress += 4 * COUNTERS
        self._dweight = dweight
        return self._without_padding(dinput)

    def _kept_source(self, prepared: _Prepared, start: int, d: int) -> GradientOperands:
        kept, kept_scale = self._saved.kept, self._saved.kept_scale
        assert kept is not None
        assert kept_scale is not None
        return GradientOperands(
            dlogits=kept.data_ptr(),
            pitch=kept.stride(0),
            factor=start + prepared.kept_factor,
            factor_stride=1,
            weight_factor=0,
            hidden=start + prepared.kept_hidden,
            hidden_pitch=d,
            kept_scale=kept_scale.data_ptr(),
        )

    def _recomputed_source(
        self, prepared: _Prepared, start: int, hidden: Tensor, target: Tensor
    ) -> tuple[GradientOperands, tuple[Tensor, ...]]:
        """The operand of stripes that are recomputed, and what it points to beside the workspace."""
        if hidden.dtype is not torch.float16:
            factor, weight_factor, scaled, copies = 0, 0, hidden, ()
        else:
            copies = _split_factor(hidden, target, self._dloss, self._saved.num_valid, self._loss)
            factor, weight_factor, scaled = copies[0].data_ptr(), copies[1].data_ptr(), copies[2]
        source = GradientOperands(
            dlogits=start + prepared.dlogits,
            pitch=prepared.pitch,
            factor=factor,
            factor_stride=1 if factor else 0,
            weight_factor=weight_factor,
            hidden=scaled.data_ptr(),
            hidden_pitch=scaled.stride(0),
            kept_scale=0,
        )
        return source, copies

    def dweight(self) -> Tensor | None:
        return self._without_padding(self._dweight)

    def _without_padding(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or gradient.shape[1] == self._features:
            return gradient
        return gradient[:, : self._features].contiguous()


def _split_factor(
    hidden: Tensor, target: Tensor, dloss: Tensor, num_valid: Tensor, loss: LossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """For float16: (factors of dinput's rows, their maximum, hidden's rows times factor / maximum)."""
    ignored = is_ignored(target, loss.ignore_index)
    factor = torch.where(ignored, 0, grad_scale(dloss, num_valid, loss))
    greatest = factor.abs().amax().clamp_(min=torch.finfo(torch.float32).tiny)
    scaled = hidden * (factor / greatest).unsqueeze(1)
    scaled = scaled.masked_fill_(ignored.unsqueeze(1), 0).to(hidden.dtype).contiguous()
    return factor, greatest, scaled
