"""Terms of a measured call: `softcap=30`, `z_loss=1e-4,logit_scale=0.5`, `entropy,temperature=0.7`, ..."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cute_lce
from bench import loss_peers, token_stats
from bench.providers import LossFn, Request
from bench.token_stats import NAMES, READ, TOPK, Asked, Stats

LOG_CAP = "log_cap"
"""A softcap that is a LogitTerm, LogCap."""
NUMBERS = ("softcap", LOG_CAP, "z_loss", "label_smoothing", "logit_scale", "temperature", "denominator")
TENSORS = ("linear_bias", "weight", "token_weight", "temperatures")
"""Made here: of the sizes of the call."""
OUTPUTS = ("logprob", "lse", "entropy", READ, TOPK, "log_sum_sq_probs", "mean_logit", "argmax", "is_top1")
"""Those of linear_logprob, whose sum of these is the loss."""


@dataclass(frozen=True)
class LogCap(cute_lce.LogitTerm):
    """x near 0, and a logarithm of it far beyond the cap."""

    cap: float

    def logit(self, x: Any, ops: Any) -> Any:
        return ops.where(x < 0, -self.cap, self.cap) * ops.log1p(ops.abs(x) / self.cap)

    def slope(self, z: Any, ops: Any) -> Any:
        return ops.exp(-ops.abs(z) / self.cap)


def parse(text: str) -> dict[str, float | None]:
    """Name -> number, None for what has none. Raises ValueError for what is no term."""
    found: dict[str, float | None] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if (name in (*NUMBERS, TOPK)) != bool(number) or name not in (*NUMBERS, *TENSORS, *OUTPUTS):
            others = *TENSORS, *(each for each in OUTPUTS if each != TOPK)
            names = ", ".join((*(f"{each}=NUMBER" for each in (*NUMBERS, TOPK)), *others))
            raise ValueError(f"--terms: got {part!r}, want none or some of {names}")
        found[name] = float(number) if number else None
    return found


def of_option(texts: Sequence[str]) -> list[str | None]:
    """What --terms asks for; None: no terms. Raises ValueError for what is no term."""
    for text in texts:
        if text != "none":
            parse(text)
    return [None if text == "none" else text for text in texts]


def loss(provider: str, text: str, request: Request, hidden: Tensor, weight: Tensor) -> LossFn:
    """A provider's loss with these terms; with outputs among them their sum.

    Raises:
        bench.providers.Unavailable: the provider is not installed here, or does not offer them.
    """
    terms = parse(text)
    outputs = _outputs(terms)
    given = arguments(terms, hidden, weight)
    others = frozenset(terms) - frozenset(outputs)
    if provider != "cute_lce":
        if not outputs and (provider in loss_peers.PEERS or provider not in token_stats.PEERS):
            return loss_peers.make(provider, given, others, request)
        stats = token_stats.make(provider, _asked(outputs, given), others, len(hidden) * len(weight))
    elif outputs or "temperature" in given:
        stats = _of_ours(outputs, given, request)
    else:
        call = functools.partial(cute_lce.linear_cross_entropy, reduction=request.reduction)
        return functools.partial(call, **_options(request), **given)

    def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        rows = _summed(stats(x, w, y), outputs)
        return rows if request.reduction == "none" else rows.mean()

    return loss


def check_logits(text: str) -> None:
    """Raises ValueError for terms that by_logits has not, or whose mean is not that of the rows."""
    terms = parse(text)
    outputs = _outputs(terms)
    peers: Mapping[str, Any] = token_stats.PEERS if outputs else loss_peers.PEERS
    missing = set(terms) - set(outputs) - (peers["torch_eager_fp32ce"].terms - {"denominator", "weight"})
    if missing:
        raise ValueError(
            f"--terms: got {text!r}, of which errors are not compared: {', '.join(sorted(missing))}"
        )


def by_logits(text: str, hidden: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """(hidden weight^T (n, V), target) -> the losses (n,), in the logits' dtype. text: of check_logits."""
    terms = parse(text)
    outputs, given = _outputs(terms), arguments(terms, hidden, weight)
    if not outputs:
        return functools.partial(loss_peers.of_logits, given)
    asked = _asked(outputs, given)
    return lambda logits, target: _summed(token_stats.of_logits(asked, logits, target), outputs)


def _outputs(terms: Mapping[str, float | None]) -> tuple[str, ...]:
    return tuple(name for name in OUTPUTS if name in terms)


def _asked(outputs: tuple[str, ...], given: Mapping[str, Any]) -> Asked:
    fields = ("temperature", "softcap", "logit_scale", "topk_ids", "linear_bias")
    return Asked(outputs or ("logprob",), **{name: given[name] for name in fields if name in given})


def _summed(stats: Sequence[Tensor], outputs: tuple[str, ...]) -> Tensor:
    """Each row's loss: the sum of its numbers; where no output is asked for, minus its log-probability."""
    rows = [number.sum(-1) if number.dim() > 1 else number for number in stats]
    return sum(rows[1:], rows[0]) if outputs else -rows[0]


def arguments(terms: Mapping[str, float | None], hidden: Tensor, weight: Tensor) -> dict[str, Any]:
    """Arguments of cute_lce's functions."""
    (n, _), V, device = hidden.shape, weight.shape[0], hidden.device
    generator = torch.Generator(device).manual_seed(3)
    made = {
        "linear_bias": lambda: torch.linspace(-1, 1, V, device=device, dtype=hidden.dtype).requires_grad_(),
        "weight": lambda: torch.linspace(0.5, 1.5, V, device=device),
        "token_weight": lambda: torch.linspace(0.5, 1.5, n, device=device),
        "temperatures": lambda: torch.linspace(0.5, 1.5, n, device=device),
        TOPK: lambda: torch.randint(V, (n, int(terms[TOPK] or 0)), device=device, generator=generator),
        LOG_CAP: lambda: LogCap(terms[LOG_CAP] or 0.0),
    }
    arguments = {"temperatures": "temperature", TOPK: "topk_ids", LOG_CAP: "softcap"}
    return {
        arguments.get(name, name): made[name]() if name in made else number
        for name, number in terms.items()
        if name in made or name not in OUTPUTS
    }


def _options(request: Request) -> dict[str, Any]:
    return {"schedule": request.schedule, "workspace_mb": request.workspace_mb, "window": request.window}


def _of_ours(outputs: tuple[str, ...], given: Mapping[str, Any], request: Request) -> Stats:
    names = tuple(NAMES.get(name, name) for name in outputs) or ("logprob",)
    call = functools.partial(cute_lce.linear_logprob, outputs=names, entropy_grad=READ not in outputs)
    call = functools.partial(call, **_options(request), **given)

    def stats(x: Tensor, w: Tensor, y: Tensor) -> list[Tensor]:
        found = call(x, w, y)
        return [getattr(found, name) for name in names]

    return stats
