"""megatron-core's output layer and its loss as one call, without the logits.

    GPTModel before 0.18, MambaModel, HybridModel: fuse_output_layer(model), once; every head, MTP's too
    GPTModel from 0.18 on: model(..., labels=labels, output_processor=output_processor); the main head

In both cases the output layer is called as before, but returns a `Projection` instead of logits. Its hooks
therefore run, which gather its parameters with `overlap_param_gather`. A Projection accepts what the model
does with logits: MuP's factor, and the loss. Any other use raises AttributeError or TypeError.

These properties of the layer (ColumnParallelLinear) are followed: its tensor parallel group,
`sequence_parallel`, a weight that is passed (tied or detached), and `gradient_accumulation_fusion`: the
weight's gradient is added to `main_grad`, `grad_added_to_main_grad` is set, and autograd gets zeros.
Megatron-core's extension for that is not needed.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import linear_cross_entropy
from ..options import IGNORE_INDEX
from ..symbolic import same_shape


def fuse_output_layer(model: nn.Module) -> None:
    """Make a language model of megatron-core compute its losses without logits in calls with labels.

    model: a GPTModel before 0.18, a MambaModel or HybridModel; or wrappers around one with `module`. A model
    without an output layer (a pipeline's other stages), or that is fused already, stays unchanged. Without
    labels it returns logits as before.

    Labels are (b, s). A row whose label is -100, or whose loss_mask is 0, is ignored: loss 0 and no gradient.
    The losses are (b, s), float32 (float64 for float64).

    Raises TypeError for another kind of model, and ValueError, with its name, for anything that would change
    the loss: a model or layer with a forward or a loss of its own, a bias, `defer_embedding_wgrad_compute`,
    label smoothing, Megatron-FSDP's weights with gradient_accumulation_fusion, a model that takes an
    output_processor.
    """
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # pyright: ignore[reportAssignmentType]
    layer = getattr(model, "output_layer", None)
    if layer is None and not getattr(model, "post_process", True):
        return
    if layer is None or not hasattr(model, "compute_language_model_loss"):
        raise TypeError(f"model: got {type(model).__name__}, want a language model of megatron-core")
    if "output_processor" in inspect.signature(model.forward).parameters:
        raise ValueError(
            "model: got one whose forward takes an output_processor, want "
            "output_processor=cute_lce.integrations.megatron.output_processor there"
        )
    # Of nn.Module's attributes, which may be anything.
    given: Any = model
    name = "_postprocess" if hasattr(model, "_postprocess") else "forward"
    if isinstance(getattr(given, name), _Labelled):
        return
    _check_loss(given.compute_language_model_loss)
    forward = _fused(layer, given.config)
    setattr(given, name, _Labelled(getattr(given, name), forward))
    given.compute_language_model_loss = _Loss(given.compute_language_model_loss)


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor | None,
    loss_mask: Tensor | None = None,
    runtime_gather_output: bool | None = None,
    inference_context: Any = None,
    compute_language_model_loss: Any = None,
    scale_logits: Any = None,
    config: Any,
    **others: Any,
) -> Tensor:
    """The output_processor of GPTModel.forward in megatron-core >= 0.18: the losses (b, s) of labels (b, s).

    Labels, losses and errors are as in fuse_output_layer; others are not used. Without labels it returns the
    logits (b, s, V). Heads for multi-token prediction, whose logits megatron-core also reads, are not fused.
    """
    if inference_context is not None:
        raise ValueError("inference_context: got one, want None: inference takes no output_processor")
    if compute_language_model_loss is not None:
        _check_loss(compute_language_model_loss)
    forward = _fused(output_layer, config)
    forward.fuses = labels is not None
    try:
        given, _ = output_layer(
            hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output
        )
    finally:
        forward.fuses = False
    if scale_logits is not None:
        given = scale_logits(given)
    if labels is None:
        return given.transpose(0, 1).contiguous()
    return given.losses(_ignoring(labels, loss_mask))


class Projection:
    """What an output layer gives in place of logits.

    hidden: [s, b, h], s this rank's slice with sequence_parallel. weight: (V / ranks, h). scale: what the
    logits are multiplied by.
    """

    def __init__(self, layer: Any, hidden: Tensor, weight: Tensor, scale: float = 1.0):
        self.layer, self.hidden, self.weight, self.scale = layer, hidden, weight, scale

    def __mul__(self, factor: float) -> Projection:
        return Projection(self.layer, self.hidden, self.weight, self.scale * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Projection:
        return self * (1 / divisor)

    def __add__(self, other: Any) -> Any:
        raise TypeError("logits: got an addition to them, want none: a fused output layer has no logits")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("logits: got a slice of them, want none: a fused output layer has no logits")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"logits: got a use of their {name!r}, want none: a fused output layer has no logits"
        )

    def losses(self, labels: Tensor) -> Tensor:
        """[b, s], of labels [b, s]."""
        layer, weight = self.layer, self.weight
        parallel: dict[str, Any] = {}
        if layer.tp_group is not None and layer.tp_group.size() > 1:
            parallel["tp_group"] = layer.tp_group
            if layer.sequence_parallel:
                parallel["sequence_dim"] = 0
            elif not layer.allreduce_dgrad:
                parallel["grad_input"] = "partial"
        adds = layer.gradient_accumulation_fusion and torch.is_grad_enabled() and weight.requires_grad
        # Megatron's attributes of parameters, which others do not have.
        main_grad = getattr(weight, "main_grad", None) if adds else None
        has_flag = hasattr(weight, "grad_added_to_main_grad")
        if main_grad is not None:
            parallel.update(grad_weight_out=main_grad, grad_weight_dummy=has_flag)
        losses = linear_cross_entropy(
            self.hidden,
            weight,
            labels.transpose(0, 1),
            reduction="none",
            ignore_index=IGNORE_INDEX,
            logit_scale=self.scale,
            **parallel,
        )
        if main_grad is not None and has_flag:
            # In the backward, before the weight's own hooks: the flag is of one step.
            losses.register_hook(lambda _: setattr(weight, "grad_added_to_main_grad", True))
        return losses.transpose(0, 1).contiguous()


class _Forward:
    """In place of a layer's forward. fuses: whether a Projection is given instead of logits."""

    def __init__(self, layer: Any, config: Any):
        self.layer, self.config, self.original, self.fuses = layer, config, layer.forward, False

    def __call__(self, input_: Tensor, weight: Tensor | None = None, *others: Any, **named: Any) -> Any:
        if not self.fuses:
            return self.original(input_, weight, *others, **named)
        _check_unchanged(self.original, "output_layer")
        _check_settings(self.layer, self.config)
        weight = self.layer.weight if weight is None else weight
        if weight is None:
            raise ValueError("weight: got None for an output layer without a weight, want a weight")
        if self.layer.gradient_accumulation_fusion and hasattr(weight, "__fsdp_param__"):
            raise ValueError("gradient_accumulation_fusion: got True with Megatron-FSDP, want False")
        return Projection(self.layer, input_, weight), None


class _Labelled:
    """In place of the method that a model gets labels by: with them its heads are fused, and masked rows
    ignored."""

    def __init__(self, original: Any, forward: _Forward):
        self.original, self.forward = original, forward
        self.signature = inspect.signature(original)

    def __call__(self, *args: Any, **named: Any) -> Any:
        given = self.signature.bind(*args, **named)
        labels = given.arguments.get("labels")
        if labels is None:
            return self.original(*args, **named)
        _check_unchanged(self.original, "model")
        # MTP rolls labels as it rolls the mask.
        given.arguments["labels"] = _ignoring(labels, given.arguments.get("loss_mask"))
        self.forward.fuses = True
        try:
            return self.original(*given.args, **given.kwargs)
        finally:
            self.forward.fuses = False


class _Loss:
    """In place of a model's compute_language_model_loss."""

    def __init__(self, original: Any):
        self.original = original

    def __call__(self, labels: Tensor, logits: Tensor | Projection) -> Tensor:
        if isinstance(logits, Projection):
            _check_unchanged(self.original, "compute_language_model_loss")
            return logits.losses(labels)
        return self.original(labels, logits)


def _ignoring(labels: Tensor, loss_mask: Tensor | None) -> Tensor:
    """The labels with rows ignored where the mask is 0. Raises ValueError for one of another shape."""
    if loss_mask is None:
        return labels
    if not same_shape(loss_mask.shape, labels.shape):
        raise ValueError(f"loss_mask: got shape {tuple(loss_mask.shape)}, want {tuple(labels.shape)}")
    return labels.masked_fill(loss_mask == 0, IGNORE_INDEX)


def _fused(layer: Any, config: Any) -> _Forward:
    """What a layer's forward is replaced by, once."""
    forward = vars(layer).get("forward")
    if isinstance(forward, _Forward):
        return forward
    _check_layer(layer, config)
    layer.forward = _Forward(layer, config)
    return layer.forward


def _check_layer(layer: Any, config: Any) -> None:
    own = getattr(type(layer).forward, "__qualname__", "")
    if own != "ColumnParallelLinear.forward" or "forward" in vars(layer):
        raise ValueError(
            f"output_layer: got {type(layer).__name__} with a forward of its own, which may change the "
            "logits, want megatron-core's ColumnParallelLinear"
        )
    _check_settings(layer, config)


def _check_settings(layer: Any, config: Any) -> None:
    for name, owner, wanted in (
        ("bias", layer, None),
        ("is_expert", layer, False),
        ("gtp_remat_size", layer, 1),
        ("defer_embedding_wgrad_compute", config, False),
        ("label_smoothing", config, 0),
    ):
        value = getattr(owner, name, wanted)
        if value is not wanted and (wanted is None or value != wanted):
            raise ValueError(f"{name}: got {value if wanted is not None else 'one'}, want {wanted}")


def _check_loss(loss: Any) -> None:
    own = getattr(loss, "__qualname__", type(loss).__qualname__)
    if own != "LanguageModule.compute_language_model_loss":
        raise ValueError(
            f"compute_language_model_loss: got {own}, want that of megatron-core's LanguageModule"
        )


def _check_unchanged(method: Any, name: str) -> None:
    """Raise ValueError where the class of a bound method has had another since the model was fused."""
    owner = getattr(method, "__self__", None)
    if owner is not None and getattr(type(owner), method.__name__, None) is not method.__func__:
        raise ValueError(
            f"{name}: got a class whose {method.__name__} was replaced after fuse_output_layer, want that "
            "before the model is made and fused"
        )
