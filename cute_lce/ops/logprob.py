"""linear_logprob: checks, autocast, schedule, the op, and its numbers in target's shape."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import Operands
from ..implementation import Stats, StatsOperands, StatsOptions
from ..options import ComputeOptions, LossOptions, TermOptions, check_divisor, check_outputs
from ..symbolic import TensorNumber, differs, quotient
from . import inner
from .checks import TARGET_DTYPES, check_term, flatten, know_shardings, refuse_gradient
from .plain import is_distributed
from .select import DTYPES
from .terms import checked, decide, plain_losses, stats_of

SCHEMA = (
    "fused_linear_logprob(Tensor input, Tensor linear_weight, Tensor target, *, Tensor? linear_bias=None, "
    "Tensor? temperature=None, Tensor? topk_ids=None, Scalar temperature_number=1.0, "
    "str[] outputs, bool entropy_grad=True, SymInt? ignore_index=-100, Scalar logit_scale=1.0, "
    "Scalar? softcap=None, str schedule='auto', float? workspace_mb=None, SymInt? window=None) -> Tensor[]"
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
    if is_distributed(input, linear_weight, target):
        know_shardings()
    call = call_of(
        StatsOperands(input, linear_weight, target, linear_bias, temperature=temperature, topk_ids=topk_ids),
        Wanted(outputs, entropy_grad, temperature_number),
        LossOptions("none", ignore_index, logit_scale),
        TermOptions(softcap=softcap),
        ComputeOptions(schedule, workspace_mb, window),
    )
    if call.is_plain:
        return [-plain_losses(call.plain_operands, call.plain_loss, call.compute).view(target.shape)]
    _, how = decide(call.operands, call.options, call.compute, "none", None)
    numbers = call.named(stats_of(call.operands, how))
    return [each.view((*target.shape, *each.shape[1:])) for each in numbers]


class Wanted(NamedTuple):
    """What linear_logprob is asked for, by its arguments' names; temperature_number: where there is no
    tensor."""

    outputs: tuple[str, ...]
    entropy_grad: bool
    temperature_number: float


class Call(NamedTuple):
    """A checked call: operands with one dimension of tokens, and what is computed of them."""

    operands: StatsOperands
    options: StatsOptions
    compute: ComputeOptions

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain call's, which the kernels serve."""
        given, options = self.operands, self.options
        terms = given.linear_bias, given.temperature, options.softcap
        return options.outputs == ("logprob",) and all(each is None for each in terms)

    @property
    def plain_operands(self) -> Operands:
        return Operands(*self.operands[:3])

    @property
    def plain_loss(self) -> LossOptions:
        """Whose rows' losses are -logprob."""
        ignore_index, scale, _, temperature, *_ = self.options
        # A symbol over 1 would be another one.
        if differs(temperature, 1):
            scale = quotient(scale, temperature)
        if isinstance(scale, TensorNumber):
            # The op looks at its value.
            return LossOptions._make(("none", ignore_index, scale))
        return LossOptions("none", ignore_index, scale)

    def named(self, found: Stats) -> list[Tensor]:
        """The outputs in their order, of tokens in one dimension."""
        if found.entropy is not None and not self.options.entropy_grad:
            found = found._replace(entropy=found.entropy.detach())
        return [getattr(found, name) for name in self.options.outputs]


def call_of(
    given: StatsOperands, wanted: Wanted, loss: LossOptions, terms: TermOptions, compute: ComputeOptions
) -> Call:
    """Check a call, and cast and flatten its tensors. given: as the caller has them."""
    operands, options = checked_call(given, wanted, loss, terms, compute, given.target)
    hidden, weight, target = flatten(Operands(*operands[:3]))
    n, temperature, topk_ids = hidden.shape[0], given.temperature, given.topk_ids
    tensors = operands._replace(
        hidden=hidden,
        weight=weight,
        target=target,
        temperature=None if temperature is None else temperature.reshape(n),
        topk_ids=None if topk_ids is None else topk_ids.reshape(n, topk_ids.shape[-1]),
    )
    return Call(tensors, options, compute)


def checked_call(
    given: StatsOperands,
    wanted: Wanted,
    loss: LossOptions,
    terms: TermOptions,
    compute: ComputeOptions,
    as_input: Tensor,
) -> tuple[StatsOperands, StatsOptions]:
    """The tensors after autocast, and what is computed of them. as_input: target, or a part of it that has
    the shape of input's tokens, which are then a part of target's."""
    check_outputs(wanted.outputs)
    if type(wanted.temperature_number) in (int, float) and wanted.temperature_number == 0:
        raise ValueError(
            f"temperature: got {wanted.temperature_number}, want a positive number; for temperature 0 ask "
            "for the output 'argmax'"
        )
    check_divisor("temperature", wanted.temperature_number)
    if not isinstance(wanted.entropy_grad, bool):
        raise TypeError(f"entropy_grad: got {type(wanted.entropy_grad).__name__}, want a bool")
    if compute.schedule == "grad_in_forward":
        raise ValueError("schedule: got 'grad_in_forward', want 'recompute', 'keep' or 'auto'")
    (hidden, weight, _), linear_bias = checked(Operands(*given[:2], as_input), given.linear_bias)
    operands = given._replace(hidden=hidden, weight=weight, linear_bias=linear_bias)
    _check(operands, wanted.outputs)
    numbers = loss.ignore_index, loss.logit_scale, terms.softcap, wanted.temperature_number
    return operands, StatsOptions(*numbers, tuple(wanted.outputs), entropy_grad=wanted.entropy_grad)


def _check(operands: StatsOperands, outputs: tuple[str, ...]) -> None:
    shape, hidden = tuple(operands.target.shape), operands.hidden
    temperature, topk_ids = operands.temperature, operands.topk_ids
    if temperature is not None:
        check_term("temperature", temperature, shape, DTYPES, hidden)
        refuse_gradient("temperature", temperature)
    if (topk_ids is not None) != ("topk_logprob" in outputs):
        got = "no tensor" if topk_ids is None else "a tensor"
        raise ValueError(f"topk_ids: got {got}, want one exactly where outputs has 'topk_logprob'")
    if topk_ids is not None:
        # A nested tensor, which is refused, has no shape.
        sized = isinstance(topk_ids, Tensor) and not topk_ids.is_nested and topk_ids.dim() > 0
        ids = (*shape, topk_ids.shape[-1] if sized else 0)
        check_term("topk_ids", topk_ids, ids, TARGET_DTYPES, hidden)


inner.library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
inner.library.impl("fused_linear_logprob", linear_logprob, "CompositeImplicitAutograd")
# torch's fallback, one call after another, serves no op that returns a list: it gets those within.
for key in ("FuncTorchBatchedDecomposition", "Batched"):
    inner.library.impl("fused_linear_logprob", linear_logprob, key)
