"""Who else gives a loss with `--terms` that ask for no number of each token: softcap, z_loss and the like.

A maker takes terms as arguments of cute_lce.linear_cross_entropy, and gives `loss(hidden, weight, target)`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.providers import LossFn, Request, Unavailable, needs_logits
from bench.token_stats import Asked, scaled

Given = Mapping[str, Any]


def of_logits(given: Given, x: Tensor, target: Tensor) -> Tensor:
    """Each row's loss by torch's operators, in x's dtype. x (n, V): hidden weight^T."""
    names = ("temperature", "softcap", "logit_scale", "linear_bias")
    z = scaled(Asked((), **{name: given[name] for name in names if name in given}), x)
    weight = given.get("weight")
    rows = F.cross_entropy(
        z,
        target,
        weight=None if weight is None else weight.to(z.dtype),
        label_smoothing=given.get("label_smoothing", 0.0),
        reduction="none",
    )
    if "z_loss" in given:
        rows = rows + given["z_loss"] * z.logsumexp(1).square()
    return rows * given["token_weight"].to(z.dtype) if "token_weight" in given else rows


def _torch_eager(given: Given, request: Request) -> LossFn:
    needs_logits(request.logits)

    def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        rows = of_logits(given, F.linear(x, w).float(), y)
        if request.reduction == "none":
            return rows
        if "denominator" in given:
            return rows.sum() / given["denominator"]
        return rows.sum() / given["weight"][y].sum() if "weight" in given else rows.mean()

    return loss


def _torch_compile(given: Given, request: Request) -> LossFn:
    torch._dynamo.reset()
    return torch.compile(_torch_eager(given, request), dynamic=False)


def _cce(**options: object) -> Callable[[Given, Request], LossFn]:
    def make(given: Given, request: Request) -> LossFn:
        function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        theirs = {"bias": given.get("linear_bias"), "softcap": given.get("softcap")}
        return lambda x, w, y: function(x, w, y, reduction=request.reduction, **theirs, **options)

    return make


def _liger(module: str, name: str) -> Callable[[Given, Request], LossFn]:
    def make(given: Given, request: Request) -> LossFn:
        if request.reduction != "mean":
            raise Unavailable(f"has no reduction {request.reduction!r}")
        function = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)
        # bias, class weights, ignore_index, lse_square_scale, label_smoothing, reduction, softcap
        options = given.get("linear_bias"), given.get("weight"), -100
        options += given.get("z_loss", 0.0), given.get("label_smoothing", 0.0), "mean", given.get("softcap")

        def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            found = function.apply(x, w, y, *options)
            return found[0] if isinstance(found, tuple) else found

        return loss

    return make


@dataclass(frozen=True)
class Peer:
    make: Callable[[Given, Request], LossFn]
    terms: frozenset[str]
    """Names of --terms."""


_LIGER = frozenset({"linear_bias", "weight", "label_smoothing", "softcap", "z_loss"})
_TORCH = _LIGER | {"logit_scale", "temperature", "temperatures", "token_weight", "denominator"}
_CCE = frozenset({"linear_bias", "softcap"})
PEERS = {
    "torch_eager_fp32ce": Peer(_torch_eager, _TORCH),
    "torch_compile": Peer(_torch_compile, _TORCH),
    "liger_triton": Peer(
        _liger("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"), _LIGER
    ),
    "liger_cute_flce": Peer(
        _liger(
            "cutedsl.ops.fused_linear_cross_entropy_sm90",
            "LigerFusedLinearCrossEntropySM90Function",
        ),
        _LIGER,
    ),
    "cce": Peer(_cce(), _CCE),
    "cce_exact": Peer(_cce(filter_eps=None), _CCE),
}


def make(provider: str, given: Given, terms: frozenset[str], request: Request) -> LossFn:
    """A peer's function. terms: the names of `given` in --terms.

    Raises:
        Unavailable: the provider is not installed here, or does not offer it.
    """
    peer = PEERS.get(provider)
    missing = terms if peer is None else terms - peer.terms
    if peer is None or missing:
        raise Unavailable(f"has no {', '.join(sorted(missing))}")
    try:
        return peer.make(given, request)
    except ImportError as error:
        raise Unavailable(f"not installed ({error})") from error
