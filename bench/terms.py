"""Terms of a measured call: `softcap=30`, `z_loss=1e-4,logit_scale=0.5`, `entropy,temperature=0.7`, ..."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from bench import providers

NUMBERS = ("softcap", "z_loss", "label_smoothing", "logit_scale", "temperature", "denominator")
TENSORS = ("linear_bias", "weight", "token_weight", "temperatures")
"""Made here: of the sizes of the call."""
READ = "entropy_read"
"""An entropy without a gradient."""
TOPK = "topk"
"""topk_logprob of so many random ids a token."""
OUTPUTS = ("logprob", "lse", "entropy", READ, TOPK, "log_sum_sq_probs", "mean_logit", "argmax", "is_top1")
"""Those of linear_logprob, whose sum of these is the loss."""
_NAMES = {READ: "entropy", TOPK: "topk_logprob"}


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


def loss(text: str, request: providers.Request, hidden: Tensor, weight: Tensor) -> providers.LossFn:
    """cute_lce's function with these terms."""
    import cute_lce

    (n, _), V, device = hidden.shape, weight.shape[0], hidden.device
    terms = parse(text)
    made: dict[str, Any] = {
        "linear_bias": lambda: torch.linspace(-1, 1, V, device=device, dtype=hidden.dtype).requires_grad_(),
        "weight": lambda: torch.linspace(0.5, 1.5, V, device=device),
        "token_weight": lambda: torch.linspace(0.5, 1.5, n, device=device),
        "temperatures": lambda: torch.linspace(0.5, 1.5, n, device=device),
    }
    given: dict[str, Any] = {
        name: made[name]() if number is None else number
        for name, number in terms.items()
        if name not in OUTPUTS
    }
    options: dict[str, Any] = {"schedule": request.schedule, "workspace_mb": request.workspace_mb}
    options["window"] = request.window
    outputs = tuple(name for name in OUTPUTS if name in terms)
    if not outputs and not {"temperature", "temperatures"} & set(terms):
        call = functools.partial(cute_lce.linear_cross_entropy, reduction=request.reduction)
        return functools.partial(call, **options, **given)
    if "temperatures" in given:
        given["temperature"] = given.pop("temperatures")
    names = tuple(_NAMES.get(name, name) for name in outputs) or ("logprob",)
    if TOPK in terms:
        given["topk_ids"] = torch.randint(V, (n, int(terms[TOPK] or 0)), device=device)
    options["entropy_grad"] = READ not in terms

    def numbers(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        found = cute_lce.linear_logprob(x, w, y, outputs=names, **options, **given)
        each = [getattr(found, name).float() for name in names]
        rows = torch.stack([number.sum(-1) if number.dim() > 1 else number for number in each]).sum(0)
        return rows if request.reduction == "none" else rows.mean()

    return numbers
