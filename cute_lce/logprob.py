"""Log-probabilities, entropy and other numbers of each token from one pass over the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import environment, ops
from .arguments import Operands
from .functional import check_kinds, check_types, check_types_besides, is_on_one_device, named_over_group
from .implementation import StatsOperands
from .logit_term import LogitTerm, as_number
from .ops.checks import no_tensor
from .ops.logprob import Wanted
from .options import ComputeOptions, LossOptions, TokenStats, is_number
from .scalars import python_number

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_fused_linear_logprob = torch.ops.cute_lce.fused_linear_logprob.default


def linear_logprob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    outputs: tuple[str, ...] = ("logprob",),
    topk_ids: Tensor | None = None,
    entropy_grad: bool = True,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = -100,
    logit_scale: float = 1.0,
    softcap: float | LogitTerm | None = None,
    schedule: str = "auto",
    workspace_mb: float | None = None,
    window: int | None = None,
    tp_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    sequence_dim: int | None = None,
    grad_input: str = "reduced",
    sm_margin: int | None = None,
) -> TokenStats:
    """Log-probability, entropy and other numbers of each token, in one pass and without storing the logits.

    The logits are z = softcap((input @ linear_weight.T + linear_bias) logit_scale) / temperature, with
    lse = log sum exp(z) and p = exp(z - lse); reference.linear_logprob is the definition.

    Args:
        input, linear_weight, target, linear_bias, ignore_index, logit_scale, softcap, workspace_mb, window:
            as in linear_cross_entropy.
        temperature: a number from 1e-30 to 1e30; or a tensor of target's shape, any floating dtype, on
            input's device, which is not read on the host: a row whose temperature is 0 becomes nan or inf,
            without effect on other rows' numbers and gradients by input.
        outputs: names of TokenStats' fields, those to compute. The others cost nothing.
        topk_ids: (*target.shape, K), int64 or int32: the classes whose log-probabilities "topk_logprob"
            gives. They may repeat and include the target; an id outside [0, V) gives 0 and has no gradient.
        entropy_grad: whether entropy is differentiable.
        schedule: "recompute", "keep" or "auto", as in linear_cross_entropy.
        tp_group, vocab_start, sequence_dim, grad_input, sm_margin: as in linear_cross_entropy, for a
            vocabulary that is sharded over a group; linear_weight and linear_bias are this rank's rows. With
            sequence_dim, temperature, topk_ids and the results have target's shape, whole or a slice.
            argmax and topk_ids are classes of the whole vocabulary. DTensors as in linear_cross_entropy.

    Returns:
        TokenStats with the fields that outputs names; the others are None.

    Where logits are kept, for the gradient of an entropy, of lse or of ids, an eager call's backward
    overwrites and frees them, unless hooks on saved tensors had them; another one of a retained
    graph recomputes, with other roundings.

    Errors are as in linear_cross_entropy; a temperature that requires a gradient is refused. Any combination
    of the differentiable fields may have an upstream gradient; one without costs nothing. torch.func's
    transforms work as in linear_cross_entropy.

    On a GPU with kernels these compute every field, with "recompute" and "keep". In float16 they keep nothing
    with a `LogitTerm`, or where a field other than logprob has a gradient: "auto" recomputes, and the
    streaming path serves "keep".
    """
    if workspace_mb is None:
        workspace_mb = environment.WORKSPACE_MB
    check_types(input, linear_weight, target)
    check_types_besides(linear_bias=linear_bias, topk_ids=topk_ids)
    names = tuple(outputs) if isinstance(outputs, list) else outputs
    tensor, number = (temperature, 1.0) if isinstance(temperature, Tensor) else (None, temperature)
    over_group = tp_group, vocab_start, sequence_dim, grad_input, sm_margin
    number, cap, logit_scale, ignore_index, workspace_mb, window, entropy_grad = map(
        python_number,
        (number, as_number(softcap), logit_scale, ignore_index, workspace_mb, window, entropy_grad),
    )
    if tensor is None and not is_number(number):
        raise no_tensor("temperature", temperature, "a number or a torch.Tensor")
    plain = ops.is_plain_eager(input, linear_weight, target)
    if not plain and ops.is_distributed(input, linear_weight, target):
        from .parallel import dtensor

        given = {
            "temperature": temperature,
            "outputs": outputs,
            "topk_ids": topk_ids,
            "entropy_grad": entropy_grad,
            "linear_bias": linear_bias,
            "ignore_index": ignore_index,
            "logit_scale": logit_scale,
            "softcap": cap,
            "schedule": schedule,
            "workspace_mb": workspace_mb,
            "window": window,
        }
        operands = Operands(input, linear_weight, target)
        return dtensor.linear_logprob(linear_logprob, operands, named_over_group(over_group), given)
    if not is_on_one_device(over_group):
        from .parallel import call, public

        found = public.linear_logprob(
            StatsOperands(input, linear_weight, target, linear_bias, temperature=tensor, topk_ids=topk_ids),
            Wanted(names, entropy_grad, number),
            LossOptions("none", ignore_index, logit_scale),
            cap,
            ComputeOptions(schedule, workspace_mb, window),
            call.spread_of(*over_group),
            plain,
        )
        return TokenStats(**dict(zip(names, found, strict=True)))
    if not plain:
        numbers = {"ignore_index": ignore_index, "logit_scale": logit_scale, "softcap": cap}
        check_kinds({**numbers, "workspace_mb": workspace_mb, "window": window})
    run = ops.linear_logprob if plain else _fused_linear_logprob
    found = run(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        temperature=tensor,
        topk_ids=topk_ids,
        temperature_number=number,
        outputs=names,
        entropy_grad=entropy_grad,
        ignore_index=ignore_index,
        logit_scale=logit_scale,
        softcap=cap,
        schedule=schedule,
        workspace_mb=workspace_mb,
        window=window,
    )
    return TokenStats(**dict(zip(names, found, strict=True)))


class LinearLogprob(nn.Linear):
    """An nn.Linear whose forward is linear_logprob with its weight and bias: the logits are never stored.

    Args:
        in_features: d, the hidden size.
        num_classes: V, the vocabulary.
        bias: whether there is also a parameter `bias` (num_classes,), the call's linear_bias.
        device, dtype: those of the parameters.
        outputs, options: outputs, entropy_grad, ignore_index, logit_scale, softcap, schedule, workspace_mb,
            window, as in linear_logprob, which checks them when the module is called.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        outputs: tuple[str, ...] = ("logprob",),
        **options: Any,
    ):
        for name in options:
            if name not in _MODULE_OPTIONS:
                raise TypeError(f"{name}: not an option, want one of {', '.join(_MODULE_OPTIONS)}")
        super().__init__(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.options = {"outputs": outputs, **options}

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input: Tensor,
        target: Tensor,
        *,
        temperature: float | Tensor = 1.0,
        topk_ids: Tensor | None = None,
    ) -> TokenStats:
        """linear_logprob of input (..., d) and target (...)."""
        return linear_logprob(
            input,
            self.weight,
            target,
            linear_bias=self.bias,
            temperature=temperature,
            topk_ids=topk_ids,
            **self.options,
        )

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        bias = self.bias is not None
        return f"in_features={self.in_features}, num_classes={self.out_features}, bias={bias}, {options}"


_MODULE_OPTIONS = (
    "outputs",
    "entropy_grad",
    "ignore_index",
    "logit_scale",
    "softcap",
    "schedule",
    "workspace_mb",
    "window",
)
