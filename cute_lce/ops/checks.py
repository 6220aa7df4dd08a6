"""What a call's tensors may be; autocast's casts, and the operands' common shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import Operands
from ..symbolic import holds, same_shape
from .plain import is_distributed
from .select import DTYPES

TARGET_DTYPES = (torch.int64, torch.int32)

_any_autocast = torch._C._is_any_autocast_enabled


def autocast(input: Tensor, linear_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Under autocast cast as torch's own linear does: every floating tensor except float64."""
    # Most calls run without autocast on any device, and stop here.
    if not _any_autocast():
        return input, linear_weight
    return _cast(input, input), _cast(linear_weight, input)


def autocast_hidden(input: Tensor) -> Tensor:
    """The same for hidden states that several projections share, which then share the cast too."""
    return _cast(input, input)


def autocast_bias(linear_bias: Tensor | None, input: Tensor) -> Tensor | None:
    """The same for the bias of a projection of `input`."""
    if linear_bias is None or not _any_autocast():
        return linear_bias
    return _cast(linear_bias, input)


def _cast(tensor: Tensor, input: Tensor) -> Tensor:
    device_type = input.device.type
    if not (torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type))


def know_shardings() -> None:
    """Tell torch how the inner ops spread over a mesh."""
    from ..parallel import sharding

    sharding.register()


def flatten(operands: Operands) -> Operands:
    """(..., d) and (...) as (n, d) and (n,)."""
    hidden, weight, target = operands
    if hidden.dim() == 2:
        return operands
    return Operands(hidden.reshape(-1, hidden.shape[-1]), weight, target.reshape(-1))


def no_tensor(name: str, value: object, want: str = "a torch.Tensor") -> TypeError:
    """The error for what is no tensor, with the way to make one of it."""
    message = f"{name}: got {type(value).__name__}, want {want}"
    if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
        message += f": torch.from_numpy({name}) is one"
    elif isinstance(value, list | tuple) or hasattr(value, "__array__"):
        message += f": torch.as_tensor({name}) is one"
    return TypeError(message)


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor of another kind, which may have no shape."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        what = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise ValueError(f"{name}: got {what}, want a dense tensor")


def check_tensors(operands: Operands) -> None:
    input, linear_weight, target = operands
    for name, tensor in (("input", input), ("linear_weight", linear_weight), ("target", target)):
        check_dense(name, tensor)
    if input.dtype not in DTYPES:
        raise TypeError(f"input: got {input.dtype}, want one of {', '.join(map(str, DTYPES))}")
    if linear_weight.dtype is not input.dtype:
        raise TypeError(f"linear_weight: got {linear_weight.dtype}, want input's dtype, {input.dtype}")
    if target.dtype not in TARGET_DTYPES:
        message = f"target: got {target.dtype}, want class indices as torch.int64 or torch.int32"
        if target.is_floating_point():
            message += (
                "; for class probabilities label_smoothing, or linear_logprob's topk_logprob of the classes "
                "that have some"
            )
        raise TypeError(message)
    if linear_weight.dim() != 2:
        raise ValueError(f"linear_weight: got shape {tuple(linear_weight.shape)}, want (V, d)")
    V, d = linear_weight.shape
    if not (holds(V > 0) and holds(d > 0)):
        raise ValueError(f"linear_weight: got shape {(V, d)}, want at least one class and one feature")
    if input.dim() == 0 or not same_shape(input.shape[-1:], (d,)):
        raise ValueError(
            f"input: got shape {tuple(input.shape)}, want (..., {d}) for linear_weight's shape {(V, d)}"
        )
    if not same_shape(target.shape, input.shape[:-1]):
        raise ValueError(
            f"target: got shape {tuple(target.shape)}, want {tuple(input.shape[:-1])} "
            f"for input's shape {tuple(input.shape)}"
        )
    device = input.device
    if device != linear_weight.device == target.device:
        raise ValueError(f"input: got device {device}, want linear_weight's device, {target.device}")
    if linear_weight.device != device:
        raise ValueError(f"linear_weight: got device {linear_weight.device}, want input's device, {device}")
    if target.device != device:
        raise ValueError(f"target: got device {target.device}, want input's device, {device}")


def check_term(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], input: Tensor
) -> None:
    """Check a tensor besides the operands. Raises TypeError and ValueError, by its name."""
    if not isinstance(tensor, Tensor):
        raise no_tensor(name, tensor, "a torch.Tensor or None")
    if is_distributed(tensor) and not is_distributed(input):
        raise ValueError(f"{name}: got a DTensor beside ordinary operands, want an ordinary tensor")
    check_dense(name, tensor)
    # Not a question that a traced graph can ask.
    if not torch.compiler.is_compiling() and tensor.is_neg():
        raise ValueError(f"{name}: got a lazily negated tensor, want {name}.resolve_neg()")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: got {tensor.dtype}, want one of {', '.join(map(str, dtypes))}")
    if not same_shape(tensor.shape, shape):
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want {tuple(shape)}")
    if tensor.device != input.device:
        raise ValueError(f"{name}: got device {tensor.device}, want input's device, {input.device}")


def refuse_gradient(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor by which nothing is differentiated here."""
    if tensor.requires_grad:
        raise ValueError(f"{name}: got a tensor that requires a gradient, want one that does not")
