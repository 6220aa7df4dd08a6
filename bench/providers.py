"""The implementations that are measured side by side, each imported only when it is asked for.

A provider makes a function `loss(hidden, weight, target)`: hidden (n, d), weight (V, d), target (n,) int64,
giving a 0-d mean, or (n,) losses where the reduction is "none". cute_lce's takes grad_weight_out besides.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LossFn = Callable[..., Tensor]

SCHEDULES = ("auto", "recompute", "keep", "grad_in_forward")

# Where the logits exist whole, more of them than this do not fit beside their gradient.
MOST_LOGITS = 2**32


class Unavailable(Exception):
    """The provider cannot serve this request; the text says why."""


@dataclass(frozen=True)
class Request:
    """What is asked of a provider. `workspace_mb` and `window` are cute_lce's; the others have no such
    arguments."""

    reduction: str = "mean"
    schedule: str = "auto"
    workspace_mb: float | None = None
    window: int | None = None
    logits: int = 0  # n x V, for the providers that materialise them


def needs_logits(number: int) -> None:
    if number > MOST_LOGITS:
        raise Unavailable(f"would hold {number:,} logits")


def _only_mean(request: Request) -> None:
    if request.reduction != "mean":
        raise Unavailable(f"has no reduction {request.reduction!r}")


def _cute_lce(request: Request) -> LossFn:
    import cute_lce

    options: dict[str, Any] = {"reduction": request.reduction, "schedule": request.schedule}
    if request.workspace_mb is not None:
        options["workspace_mb"] = request.workspace_mb
    if request.window is not None:
        options["window"] = request.window
    return functools.partial(cute_lce.linear_cross_entropy, **options)


def _torch_eager_fp32(request: Request) -> LossFn:
    needs_logits(request.logits)
    return lambda x, w, y: F.cross_entropy(F.linear(x, w).float(), y, reduction=request.reduction)


def _torch_eager_bf16(request: Request) -> LossFn:
    needs_logits(request.logits)
    return lambda x, w, y: F.cross_entropy(F.linear(x, w), y, reduction=request.reduction)


def _torch_compile(request: Request) -> LossFn:
    # A compile for each shape, with its sizes as constants. Those of earlier shapes are forgotten: after
    # eight of one function torch would run it eagerly instead.
    torch._dynamo.reset()
    return torch.compile(_torch_eager_fp32(request), dynamic=False)


def _torch_f_lce(request: Request) -> LossFn:
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise Unavailable(f"torch {torch.__version__} has no F.linear_cross_entropy")
    return lambda x, w, y: function(x, w, y, reduction=request.reduction)


def _peer(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _quack(chunk_size: int, **options: object) -> Callable[[Request], LossFn]:
    def make(request: Request) -> LossFn:
        _only_mean(request)
        function = _peer("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
        return lambda x, w, y: function(x, w, y, chunk_size=chunk_size, **options)

    return make


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _liger_triton(request: Request) -> LossFn:
    _only_mean(request)
    function = _peer(
        "liger_kernel.ops.fused_linear_cross_entropy",
        "LigerFusedLinearCrossEntropyFunction",
    )
    return lambda x, w, y: _first(function.apply(x, w, y))


def _liger_cute(request: Request) -> LossFn:
    _only_mean(request)
    function = _peer(
        "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90",
        "LigerFusedLinearCrossEntropySM90Function",
    )
    return lambda x, w, y: _first(function.apply(x, w, y))


def _liger_cute_scaled(request: Request) -> LossFn:
    function = _peer(
        "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90",
        "LigerFusedScaledCrossEntropySM90Function",
    )
    if request.reduction == "none":
        return lambda x, w, y: _first(function.apply(x, w, y))
    return lambda x, w, y: _first(function.apply(x, w, y)).mean()


def _cce(**options: object) -> Callable[[Request], LossFn]:
    def make(request: Request) -> LossFn:
        function = _peer("cut_cross_entropy", "linear_cross_entropy")
        return lambda x, w, y: function(x, w, y, reduction=request.reduction, **options)

    return make


def _only_terms(request: Request) -> LossFn:
    raise Unavailable("gives log-probabilities: --terms logprob")


PROVIDERS: dict[str, Callable[[Request], LossFn]] = {
    "cute_lce": _cute_lce,
    "torch_eager_fp32ce": _torch_eager_fp32,
    "torch_eager_bf16ce": _torch_eager_bf16,
    "torch_compile": _torch_compile,
    "torch_f_lce": _torch_f_lce,
    "quack_chunk2k": _quack(2048),
    "quack_chunk4k": _quack(4096),
    "quack_chunk8k": _quack(8192),
    "quack_base": _quack(4096, use_scaled_exp=False),
    "liger_triton": _liger_triton,
    "liger_cute_flce": _liger_cute,
    "liger_cute_scaled_ce": _liger_cute_scaled,
    "cce": _cce(),
    "cce_exact": _cce(filter_eps=None),
    "trl": _only_terms,
    "verl": _only_terms,
}


def make(name: str, request: Request) -> LossFn:
    """The loss function of provider `name`.

    Raises:
        Unavailable: it is not installed here, or does not offer what `request` asks for.
    """
    try:
        return PROVIDERS[name](request)
    except ImportError as error:
        raise Unavailable(f"not installed ({error})") from error


def names(asked: list[str]) -> list[str]:
    """What a --providers option means: the names themselves, or ["all"].

    Raises:
        ValueError: a name that is no provider's.
    """
    if asked == ["all"]:
        return list(PROVIDERS)
    for name in asked:
        if name not in PROVIDERS:
            raise ValueError(f"--providers must be all or among {', '.join(PROVIDERS)}, got {name!r}")
    return asked
