"""What the kernels read of a call with terms besides the operands: numbers of its logits, and of the
gradients by them, which are made of the upstream gradients in torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import maths
from ..implementation import Request, StatsOperands, StatsOptions, StatsSaved
from ..logit_term import kernel_term, numbers_of, term_of
from ..streaming.token_stats import Coefficients
from ..torch_ops import slope_of


class Loss(NamedTuple):
    """What the passes read of LossOptions, for a loss of each row, with the numbers of arguments.TERMS.
    logit_scale: of the gradient by products too. kept_factor: row_factor for what was kept."""

    ignore_index: int
    terms: tuple[str, ...]
    logit_scale: float
    linear_bias: int = 0
    cap: float = 0.0
    inverse_square: float = 0.0
    edge: float = 0.0
    edge_square: float = 0.0
    doubled: float = 0.0
    series_0: float = 0.0
    series_1: float = 0.0
    series_2: float = 0.0
    series_3: float = 0.0
    own_scale: float = 1.0
    own_temperature: float = 1.0
    own_inverse: float = 1.0
    own_0: float = 0.0
    own_1: float = 0.0
    own_2: float = 0.0
    own_3: float = 0.0
    own_4: float = 0.0
    own_5: float = 0.0
    own_6: float = 0.0
    own_7: float = 0.0
    row_scale: int = 0
    class_weight: int = 0
    more_partials: int = 0
    mean_gap: int = 0
    square_sum: int = 0
    total: int = 0
    logit_sum: int = 0
    argmax: int = 0
    target_weight: int = 0
    lse_slope: float = 0.0
    onehot_ratio: int = 0
    row_factor: int = 0
    kept_factor: int = 0
    gap: int = 0
    uniform: int = 0
    topk_entries: int = 0
    topk_starts: int = 0
    topk_values: int = 0
    topk_units: int = 0
    topk_blocks: int = 0
    dbias: int = 0
    column_sums: int = 0
    with_dhidden: int = 0
    kept_logits: int = 0
    kept_pitch: int = 0
    kept_notes: int = 0
    beside_logits: int = 0
    beside_notes: int = 0
    beside_first: int = 0
    beside_columns: int = 0
    reduction: str = "logprob"

    def with_terms(self, *terms: str, **changes: Any) -> Any:
        return self._replace(terms=(*self.terms, *terms), **changes)


class Tensors(NamedTuple):
    """What a pass reads besides the operands, in fp32 and contiguous; kept alive for it."""

    linear_bias: Tensor | None
    class_weight: Tensor | None
    row_scale: Tensor | None
    target_weight: Tensor | None = None

    @classmethod
    def of(cls, operands: StatsOperands) -> Tensors:
        temperature = operands.temperature
        return cls(
            _vector(operands.linear_bias),
            _vector(operands.class_weight),
            None if temperature is None else temperature.float().reciprocal().contiguous(),
        )

    def with_target_weight(self, target: Tensor) -> Tensors:
        """With the class weights of the targets, 0 where a target is no class of these: a shard subtracts no
        onehot of others' from what it keeps."""
        if self.class_weight is None:
            return self
        inside = target.long().clamp(0, self.class_weight.shape[0] - 1)
        return self._replace(target_weight=torch.where(inside == target, self.class_weight[inside], 0))


def _vector(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().float().contiguous()


def loss_of(options: StatsOptions, tensors: Tensors) -> Any:
    """With the terms of the logits."""
    scale = _product_scale(options)
    loss = Loss(options.ignore_index, (), scale)
    if tensors.linear_bias is not None:
        loss = loss.with_terms("linear_bias", linear_bias=tensors.linear_bias.data_ptr())
    term = term_of(options.softcap)
    if term is not None:
        numbers = numbers_of(term, options.logit_scale, options.temperature)
        loss = loss.with_terms(kernel_term(term), **numbers)
    elif options.softcap is not None:
        numbers = maths.softcap_numbers(options.softcap, options.logit_scale, options.temperature)
        loss = loss.with_terms("softcap", **numbers)
    elif scale != 1:
        loss = loss.with_terms("logit_scale")
    if tensors.row_scale is not None:
        loss = loss.with_terms("row_scale", row_scale=tensors.row_scale.data_ptr())
    return loss


class Gradient(NamedTuple):
    """What a backward reads: its loss, and what lies where else dloss and row_sum do (arguments.TERMS).
    others: tensors whose addresses the loss has. topk (n, K): what is added at topk_ids, if it is a term."""

    loss: Any
    dloss: Tensor
    row_sum: Tensor
    others: tuple[Tensor | None, ...]
    topk: Tensor | None = None

    @classmethod
    def of(
        cls,
        operands: StatsOperands,
        saved: StatsSaved,
        options: StatsOptions,
        tensors: Tensors,
        coefficients: Coefficients,
        ignored: Tensor,
    ) -> Gradient:
        """By coefficients."""
        loss = loss_of(options, tensors).with_terms("coefficients")
        factor, row_factor = _product_factor(loss, tensors, ignored), None
        if operands.hidden.dtype is torch.float16:
            # Its range is too small for upstream / n: the rows' factors are applied in float32.
            size = coefficients.size()
            coefficients = coefficients.times(torch.where(size == 0, 0, maths.HALF_SCALE / size))
            row_factor, factor = size * factor, 1.0
            loss = loss._replace(row_factor=row_factor.data_ptr())
        softmax = maths.softmax_factor(coefficients.softmax * factor, saved.row_sum)
        target = torch.zeros_like(softmax) if coefficients.target is None else coefficients.target * -factor
        if saved.target_logit is not None:
            slope = slopes(saved.target_logit, options, tensors)
            target = target if slope is None else target * slope
        gap, uniform = coefficients.gap_factor, coefficients.uniform
        if gap is not None:
            gap = maths.softmax_factor(gap * factor, saved.row_sum)
            loss = loss.with_terms("gap", gap=gap.data_ptr())
        if uniform is not None:
            uniform = uniform * factor
            loss = loss.with_terms("uniform", uniform=uniform.data_ptr())
            if tensors.class_weight is not None:
                loss = loss.with_terms("class_weight", class_weight=tensors.class_weight.data_ptr())
        topk = coefficients.topk
        if topk is not None and topk.numel():
            topk = topk * (factor.unsqueeze(1) if isinstance(factor, Tensor) else factor)
            if saved.topk_logit is not None:
                slope = slopes(saved.topk_logit, options, tensors)
                topk = topk if slope is None else topk * slope
            loss = loss.with_terms("topk")
        return cls(loss, target, softmax, (row_factor, gap, uniform, *tensors), topk)


def kept_gradient(
    operands: StatsOperands,
    saved: StatsSaved,
    options: StatsOptions,
    request: Request,
    tensors: Tensors,
    coefficients: Coefficients,
    ignored: Tensor,
) -> Gradient:
    """Where columns of exponentials were kept. Of all of them nothing is computed by coefficients."""
    factor = _kept_factor(saved, coefficients, _product_factor(loss_of(options, tensors), tensors, ignored))
    if request.kept_columns < operands.weight.shape[0]:
        found = Gradient.of(operands, saved, options, tensors, coefficients, ignored)
    else:
        found = _of_kept_alone(factor, saved, options, request)
    loss = found.loss._replace(kept_factor=factor.data_ptr())
    return found._replace(loss=loss, others=(*found.others, factor))


def slopes(logit: Tensor | None, options: StatsOptions, tensors: Tensors) -> Tensor | None:
    """The derivative of a softcap, or of a LogitTerm, where it gave z, (n, ...) as logit; None: 1."""
    if options.softcap is None or logit is None:
        return None
    term, scale = term_of(options.softcap), tensors.row_scale
    if scale is not None:
        scale = scale.view(-1, *[1] * (logit.dim() - 1))
    if term is None:
        # The largest z, as the kernels round it, so that the slope there is 0, and nowhere less.
        cap = options.softcap / options.temperature
        return maths.cap_slope(logit / (cap if scale is None else scale * cap))
    z = logit * options.temperature
    return slope_of(term, z if scale is None else z / scale)


def _of_kept_alone(dloss: Tensor, saved: StatsSaved, options: StatsOptions, request: Request) -> Gradient:
    """Where all columns were kept."""
    terms = ("coefficients",) if request.need_dbias else ()
    return Gradient(Loss(options.ignore_index, terms, 1.0), dloss, saved.row_sum, ())


def _product_scale(options: StatsOptions) -> float:
    """The derivative of z by a product that all tokens share, but for a softcap's."""
    return options.logit_scale / options.temperature


def _product_factor(loss: Any, tensors: Tensors, ignored: Tensor) -> Tensor | float:
    """The derivative of z by a product, but for a softcap's."""
    if tensors.row_scale is None:
        return loss.logit_scale
    return (tensors.row_scale * loss.logit_scale).masked_fill_(ignored, 0)


def _kept_factor(saved: StatsSaved, coefficients: Coefficients, factor: Tensor | float) -> Tensor:
    """The coefficients of the softmax in the gradient by products, as the forward took them to be when it
    subtracted the onehot."""
    softmax, target = coefficients.softmax, coefficients.target
    assert target is not None
    assert coefficients.gap_factor is None
    if saved.onehot_ratio is not None and saved.onehot_ratio.numel():
        # In ignored rows anything, over which a target's 0 is 0.
        ratio = saved.onehot_ratio
        softmax = torch.where(ratio.abs() > 1, target / -ratio, softmax)
    # Without a launch for a factor of 1.
    return (softmax if isinstance(factor, float) and factor == 1 else softmax * factor).contiguous()
