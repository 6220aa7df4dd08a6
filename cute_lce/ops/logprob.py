"""linear_logprob: checks, autocast, schedule, the op, and its numbers in target's shape."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import Operands
from ..implementation import StatsOperands, StatsOptions
from ..options import ComputeOptions, LossOptions, TermOptions, check_outputs, check_positive
from . import inner
from .checks import TARGET_DTYPES, check_term, flatten, refuse_gradient
from .select import DTYPES
from .terms import checked, decide, plain_losses, stats_of

_SCHEMA = (
    "fused_linear_logprob(Tensor input, Tensor linear_weight, Tensor target, *, Tensor? linear_bias=None, "
    "Tensor? temperature=None, Tensor? topk_ids=None, float temperature_number=1.0, "
    "str[] outputs, bool entropy_grad=True, SymInt? ignore_index=-100, float logit_scale=1.0, "
    "float? softcap=None, str schedule='auto', float? workspace_mb=None, SymInt? window=None) -> Tensor[]"
)


def linear_logprob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: Tensor | None = None,
    topk_ids: Tensor | None = None,
    temperature_number: float = 1.0,
    outputs: tuple[str, ...] = ("logprob",),
    entropy_grad: bool = True,
    ignore_index: int | None = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    schedule: str = "auto",
    workspace_mb: float | None = None,
    window: int | None = None,
) -> list[Tensor]:
    """The numbers that outputs names, in its order; cute_lce.linear_logprob documents the arguments.

    temperature_number: the temperature where there is no tensor.
    """
    check_outputs(outputs)
    check_positive("temperature", temperature_number)
    if not isinstance(entropy_grad, bool):
        raise TypeError(f"entropy_grad: got {type(entropy_grad).__name__}, want a bool")
    if schedule == "grad_in_forward":
        raise ValueError("schedule: got 'grad_in_forward', want 'recompute', 'keep' or 'auto'")
    loss, compute = (
        LossOptions("none", ignore_index, logit_scale),
        ComputeOptions(schedule, workspace_mb, window),
    )
    terms = TermOptions(softcap=softcap)
    operands, linear_bias = checked(Operands(input, linear_weight, target), linear_bias)
    _check(operands, temperature, topk_ids, outputs)
    flat = flatten(operands)
    n, shape = flat.hidden.shape[0], target.shape
    if tuple(outputs) == ("logprob",) and linear_bias is None and softcap is None and temperature is None:
        # A plain call's, which the kernels serve.
        scaled = loss._replace(logit_scale=logit_scale / temperature_number)
        return [-plain_losses(flat, scaled, compute).view(shape)]
    numbers = loss.ignore_index, loss.logit_scale, terms.softcap, temperature_number
    options = StatsOptions(*numbers, tuple(outputs))
    given = StatsOperands(
        *flat,
        linear_bias,
        temperature=None if temperature is None else temperature.reshape(n),
        topk_ids=None if topk_ids is None else topk_ids.reshape(n, topk_ids.shape[-1]),
    )
    _, how = decide(given, options, compute, "none", None)
    found = stats_of(given, how)
    if found.entropy is not None and not entropy_grad:
        found = found._replace(entropy=found.entropy.detach())
    named = found._asdict()
    return [named[name].view(*shape, *named[name].shape[1:]) for name in outputs]


def _check(
    operands: Operands, temperature: Tensor | None, topk_ids: Tensor | None, outputs: tuple[str, ...]
) -> None:
    shape, device = tuple(operands.target.shape), operands.hidden.device
    if temperature is not None:
        check_term("temperature", temperature, shape, DTYPES, device)
        refuse_gradient("temperature", temperature)
    if (topk_ids is not None) != ("topk_logprob" in outputs):
        got = "no tensor" if topk_ids is None else "a tensor"
        raise ValueError(f"topk_ids: got {got}, want one exactly where outputs has 'topk_logprob'")
    if topk_ids is not None:
        ids = (*shape, topk_ids.shape[-1] if isinstance(topk_ids, Tensor) and topk_ids.dim() else 0)
        check_term("topk_ids", topk_ids, ids, TARGET_DTYPES, device)


inner.library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
inner.library.impl("fused_linear_logprob", linear_logprob, "CompositeImplicitAutograd")
