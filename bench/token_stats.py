"""Who else gives a token's log-probability, entropy and the like, for `--terms` that ask for these.

A maker takes what is asked and gives `stats(hidden, weight, target)`: the outputs asked for, each (n,) or
(n, K), differentiable where the peer's are.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.providers import Unavailable, needs_logits

READ = "entropy_read"
"""An entropy without a gradient."""
TOPK = "topk"
"""topk_logprob of so many random ids a token."""
NAMES = {READ: "entropy", TOPK: "topk_logprob"}
"""What linear_logprob calls outputs that are named otherwise here."""
CHUNK = 32768
"""TRL's, of the vocabulary."""


@dataclass(frozen=True)
class Asked:
    """Outputs by the bench's names, and what the logits are: softcap((hidden weight^T + linear_bias) *
    logit_scale) / temperature. topk_ids (n, K): of topk."""

    outputs: tuple[str, ...]
    temperature: float | Tensor = 1.0  # a tensor: (n,)
    softcap: float | None = None
    logit_scale: float = 1.0
    topk_ids: Tensor | None = None
    linear_bias: Tensor | None = None  # (V,)


Stats = Callable[[Tensor, Tensor, Tensor], list[Tensor]]


def scaled(asked: Asked, x: Tensor) -> Tensor:
    """The logits by torch's operators, in x's dtype. x (n, V): hidden weight^T."""
    z = x if asked.linear_bias is None else x + asked.linear_bias.to(x.dtype)
    z = z * asked.logit_scale
    if asked.softcap is not None:
        z = asked.softcap * torch.tanh(z / asked.softcap)
    temperature = asked.temperature
    return z / (temperature.unsqueeze(1) if isinstance(temperature, Tensor) else temperature)


def of_logits(asked: Asked, x: Tensor, target: Tensor) -> list[Tensor]:
    """The outputs likewise."""
    z = scaled(asked, x)
    lse = z.logsumexp(1)
    logprobs = z - lse.unsqueeze(1)

    def entropy() -> Tensor:
        return -(logprobs.exp() * logprobs).sum(1)

    outputs: dict[str, Callable[[], Tensor]] = {
        "logprob": lambda: logprobs.gather(1, target.unsqueeze(1)).squeeze(1),
        "lse": lambda: lse,
        "entropy": entropy,
        READ: lambda: entropy().detach(),
        TOPK: lambda: logprobs.gather(1, _given(asked.topk_ids)),
        "log_sum_sq_probs": lambda: (2 * logprobs).logsumexp(1).detach(),
        "mean_logit": lambda: z.mean(1).detach(),
        "argmax": lambda: z.argmax(1),
        "is_top1": lambda: z.argmax(1) == target,
    }
    return [outputs[name]() for name in asked.outputs]


def _given(ids: Tensor | None) -> Tensor:
    assert ids is not None, "topk is asked for without ids"
    return ids


def _torch_eager(asked: Asked) -> Stats:
    return lambda x, w, y: of_logits(asked, F.linear(x, w).float(), y)


def _torch_compile(asked: Asked) -> Stats:
    torch._dynamo.reset()
    return torch.compile(_torch_eager(asked), dynamic=False)


def _liger(asked: Asked) -> Stats:
    module = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")
    function = module.LigerFusedScaledCrossEntropySM90Function
    has_entropy = bool({"entropy", READ} & set(asked.outputs))

    def stats(x: Tensor, w: Tensor, y: Tensor) -> list[Tensor]:
        # Of the arguments without a name here, the first two are its defaults.
        found = function.apply(x, w, y, asked.temperature, -100, 1, has_entropy, asked.topk_ids)
        loss, *rest = found if isinstance(found, tuple) else (found,)
        outputs = {"logprob": -loss}
        if has_entropy:
            outputs["entropy"] = rest.pop(0)
            outputs[READ] = outputs["entropy"].detach()
        if asked.topk_ids is not None:
            outputs[TOPK] = rest.pop(0)
        return [outputs[name] for name in asked.outputs]

    return stats


def _trl(asked: Asked) -> Stats:
    function = importlib.import_module("trl.kernels").ChunkedLogProbFunction
    theirs = {"entropy": "entropy", READ: "entropy", "log_sum_sq_probs": "log_sum_sq_probs"}
    theirs |= {"mean_logit": "mean_logits", "is_top1": "is_top1"}
    names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    wanted = tuple(theirs[name] for name in asked.outputs if name in theirs)

    def stats(x: Tensor, w: Tensor, y: Tensor) -> list[Tensor]:
        logprob, *rest = function.apply(
            x, w, None, y, asked.temperature, CHUNK, asked.softcap, asked.logit_scale, wanted
        )
        outputs = {"logprob": logprob, **dict(zip(names, rest, strict=True))}
        found = [outputs[theirs.get(name, name)] for name in asked.outputs]
        return [
            each.detach() if name == READ else each for name, each in zip(asked.outputs, found, strict=True)
        ]

    return stats


def _verl(asked: Asked) -> Stats:
    function = _kernel_of_verl().linear_cross_entropy

    def stats(x: Tensor, w: Tensor, y: Tensor) -> list[Tensor]:
        logprob, entropy = function(x, w, y, float(asked.temperature), "none", None)
        outputs = {"logprob": logprob, "entropy": entropy, READ: entropy.detach()}
        return [outputs[name] for name in asked.outputs]

    return stats


def _kernel_of_verl() -> Any:
    """The module of verl's kernel, without its packages' own imports, which want ray."""
    found = importlib.util.find_spec("verl") if "verl" not in sys.modules else None
    if found is not None and found.submodule_search_locations:
        (root,) = found.submodule_search_locations
        for name, path in (("verl", root), ("verl.utils", f"{root}/utils")):
            module = types.ModuleType(name)
            module.__path__ = [path]
            sys.modules[name] = module
    return importlib.import_module("verl.utils.kernel.linear_cross_entropy")


@dataclass(frozen=True)
class Peer:
    make: Callable[[Asked], Stats]
    outputs: frozenset[str]
    terms: frozenset[str]
    """Besides outputs: names of --terms."""
    whole: bool = False  # holds all logits


_LOGITS = frozenset({"temperature", "softcap", "logit_scale"})
_TORCH = _LOGITS | {"linear_bias", "temperatures"}
_ALL = frozenset(
    {"logprob", "lse", "entropy", READ, TOPK, "log_sum_sq_probs", "mean_logit", "argmax", "is_top1"}
)
PEERS = {
    "torch_eager_fp32ce": Peer(_torch_eager, _ALL, _TORCH, whole=True),
    "torch_compile": Peer(_torch_compile, _ALL, _TORCH, whole=True),
    "liger_cute_scaled_ce": Peer(
        _liger, frozenset({"logprob", "entropy", READ, TOPK}), frozenset({"temperature"})
    ),
    "trl": Peer(_trl, _ALL - {"lse", TOPK, "argmax"}, _LOGITS),
    "verl": Peer(_verl, frozenset({"logprob", "entropy", READ}), frozenset({"temperature"})),
}


def make(provider: str, asked: Asked, terms: frozenset[str], logits: int) -> Stats:
    """A peer's function. terms: names of all that is asked besides outputs. logits: n V.

    Raises:
        Unavailable: the provider is not installed here, or does not offer it.
    """
    peer = PEERS.get(provider)
    missing = set(asked.outputs) | terms
    if peer is not None:
        missing -= peer.outputs | peer.terms
    if peer is None or missing:
        raise Unavailable(f"has no {', '.join(sorted(missing))}")
    if peer.whole:
        needs_logits(logits)
    try:
        return peer.make(asked)
    except ImportError as error:
        raise Unavailable(f"not installed ({error})") from error
