"""Heads of models: an nn.Linear, or what PEFT puts in its place, as one product of an input and a weight.

modules_to_save     copies of the head, of which a wrapper calls one: that one is the nn.Linear
LoRA                [x, s A(dropout(x))] @ [W, B].T, with s the scaling: a copy of W with r more columns
trainable tokens    W with the trained rows in their place: a copy of W

A copy lives until the backward, and its gradient is a temporary of the same size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..options import ComputeOptions, with_default_workspace
from ..plan.memory import DEFAULT_WORKSPACE
from ..plan.problem import MIB
from .hooks import check_hooks, check_no_hooks

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LINEAR_FORWARD = nn.Linear.forward
LORA = "peft.tuners.lora.layer", "Linear"
SAVED = "peft.utils.other", "ModulesToSaveWrapper"
TOKENS = "peft.utils.other", "TrainableTokensWrapper"
"""Module and name of PEFT's classes, which need not be installed."""
WAY_OUT = "an adapter that leaves the head out, or merge_and_unload() before patch"


class Product(NamedTuple):
    """Logits are input @ weight.T + bias."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None


def modules(head: Any) -> tuple[nn.Module, ...]:
    """The modules of which one makes the logits: with modules_to_save every copy, else the head itself."""
    if _kind(head) == SAVED:
        return (head.original_module, *head.modules_to_save.values())
    return (head,)


def active(head: Any) -> nn.Module:
    """The one of `modules(head)` that a call of the head runs at present."""
    if _kind(head) != SAVED:
        return head
    names = head.active_adapters
    if head.disable_adapters or not names or any(name not in head._adapters for name in names):
        return head.original_module
    return head.modules_to_save[names[0]]


def check(head: Any, name: str, compute: ComputeOptions) -> None:
    """Raise TypeError or ValueError, by the head's name, unless `product` gives the head's logits."""
    check_hooks(head, name)
    kind = _kind(head)
    if kind == SAVED:
        _check_forward(head, name)
        for module in modules(head):
            _check_linear(module, name)
            check_hooks(module, name)
    elif kind == LORA:
        _check_accelerate(head, name)
        _check_read(head.base_layer, f"{name}.base_layer")
        _check_lora(head, name, compute)
    elif kind == TOKENS:
        _check_accelerate(head, name)
        _check_read(head.token_adapter.base_layer, f"{name}.token_adapter.base_layer")
        _check_forward(head.token_adapter, f"{name}.token_adapter")
        check_no_hooks(head.token_adapter, f"{name}.token_adapter")
        if _trained_tokens(head.token_adapter):
            _check_copy(head.token_adapter.base_layer.weight, 0, name, compute)
    else:
        _check_linear(head, name)


def product(module: Any, input: Tensor) -> Product:
    """What a call of one of `modules(head)` multiplies."""
    kind = _kind(module)
    if kind == LORA:
        return _lora_product(module, input)
    if kind != TOKENS:
        return Product(input, module.weight, module.bias)
    adapter = module.token_adapter
    if _trained_tokens(adapter):
        # PEFT leaves the bias out here.
        return Product(input, adapter.get_merged_weights(adapter.active_adapters), None)
    if adapter.merged and (adapter.disable_adapters or not adapter.active_adapters):
        # As PEFT's forward does.
        adapter.unmerge()
    return Product(input, adapter.base_layer.weight, adapter.base_layer.bias)


def _kind(module: nn.Module) -> tuple[str, str]:
    kind = type(module)
    return kind.__module__, kind.__qualname__


def _check_linear(module: nn.Module, name: str) -> None:
    """Raise unless calling the module is linear(input, weight, bias)."""
    kind = type(module)
    if not isinstance(module, nn.Linear) or kind.forward is not LINEAR_FORWARD:
        raise TypeError(
            f"{name}: got {kind.__module__}.{kind.__qualname__}, want an nn.Linear, or PEFT's LoRA, "
            f"modules_to_save or trainable_token_indices of one; else {WAY_OUT}"
        )
    _check_accelerate(module, name)
    weight = module.weight
    plain = type(weight) in (Tensor, nn.Parameter) or hasattr(weight, "device_mesh")
    if not plain or weight.dtype not in DTYPES:
        got = f"{type(weight).__name__} of {weight.dtype}"
        raise TypeError(f"{name}.weight: got {got}, want an ordinary one of {', '.join(map(str, DTYPES))}")


def _check_accelerate(module: nn.Module, name: str) -> None:
    """Raise ValueError for a hook of a user's, put there by accelerate."""
    hook: Any = vars(module).get("_hf_hook")
    for each in [] if hook is None else getattr(hook, "hooks", [hook]):
        if type(each).__module__ != "accelerate.hooks":
            raise ValueError(f"{name}: got accelerate's hook {type(each).__qualname__}, want one of its own")


def _check_forward(module: nn.Module, name: str) -> None:
    """Raise ValueError for a forward of this instance alone."""
    if "forward" in vars(module):
        raise ValueError(f"{name}: got one whose forward was replaced, want that of its class")


def _check_read(module: Any, name: str) -> None:
    """Raise unless the module is an nn.Linear whose parameters may be read instead of calling it."""
    _check_linear(module, name)
    _check_forward(module, name)
    check_no_hooks(module, name)
    if hasattr(module.weight, "device_mesh"):
        raise ValueError(
            f"{name}.weight: got a DTensor, want an ordinary tensor: fully_shard the head as one unit, with "
            f"its adapter; else {WAY_OUT}"
        )


def _check_copy(weight: Tensor, columns: int, name: str, compute: ComputeOptions) -> None:
    """Raise ValueError if a copy of the weight with more columns is more than workspace_mb."""
    size = weight.shape[0] * (weight.shape[1] + columns) * weight.element_size()
    limit = with_default_workspace(compute).limits.workspace or DEFAULT_WORKSPACE
    if size > limit:
        raise ValueError(
            f"workspace_mb: got {round(limit / MIB, 4):g}, want at least {-(-size // MIB)} for the copy of "
            f"{name}'s weight that its adapter takes; else {WAY_OUT}"
        )


# ----------------------------------------------------------------------------------------------------------
# LoRA


def _lora_adapters(layer: Any) -> list[str]:
    """The adapters whose products its forward adds."""
    if layer.disable_adapters or layer.merged:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _check_lora(layer: Any, name: str, compute: ComputeOptions) -> None:
    adapters = _lora_adapters(layer)
    for adapter in adapters:
        variant = layer.lora_variant.get(adapter)
        if variant is not None:
            raise ValueError(
                f"{name}: got the adapter {adapter!r} with PEFT's {type(variant).__qualname__}, want plain "
                f"LoRA; else {WAY_OUT}"
            )
        _check_read(layer.lora_B[adapter], f"{name}.lora_B.{adapter}")
    if adapters:
        ranks = sum(layer.lora_B[adapter].in_features for adapter in adapters)
        _check_copy(layer.base_layer.weight, ranks, name, compute)


def _lora_product(layer: Any, input: Tensor) -> Product:
    base, adapters = layer.base_layer, _lora_adapters(layer)
    if not adapters:
        if layer.merged and layer.disable_adapters:
            # As PEFT's forward does.
            layer.unmerge()
        return Product(input, base.weight, base.bias)
    inputs, weights, bias = [input], [base.weight], base.bias
    for name in adapters:
        lora_A, lora_B, scaling = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
        reduced = lora_A(layer.lora_dropout[name](input.to(lora_A.weight.dtype))) * scaling
        inputs.append(reduced.to(input.dtype))
        weights.append(lora_B.weight.to(base.weight.dtype))
        if lora_B.bias is not None:
            offset = (lora_B.bias * scaling).to(base.weight.dtype)
            bias = offset if bias is None else bias + offset
    # A multiple of 8 columns, which the kernels take as it is.
    missing = -sum(each.shape[1] for each in weights) % 8
    inputs.append(input.new_zeros((*input.shape[:-1], missing)))
    weights.append(base.weight.new_zeros((base.weight.shape[0], missing)))
    return Product(torch.cat(inputs, -1), torch.cat(weights, 1), bias)


# ----------------------------------------------------------------------------------------------------------
# Trainable tokens


def _trained_tokens(adapter: Any) -> bool:
    """Whether the adapter's forward puts trained rows into the weight."""
    return bool(adapter.active_adapters) and not (adapter.disable_adapters or adapter.merged)
