"""Random operands of a shape, and what float64 makes of them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.shapes import Shape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROWS = ("untrained", "mixed", "confident")
SAMPLE = 128  # rows, and vocabulary entries of each of two kinds, on which gradients are compared


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # (n, d)
    weight: Tensor  # (V, d)
    target: Tensor  # (n,) int64
    upstream: Tensor  # (n,) float32, the gradient of per-token losses


def make_inputs(shape: Shape, dtype: torch.dtype, rows: str, device: torch.device) -> Inputs:
    """Random operands of unit-size logits. In confident rows the target's logit stands 20 above the rest."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(shape.n, shape.d, device=device, generator=generator)
    weight = torch.empty(shape.vocab, shape.d, device=device, dtype=dtype)
    for block in weight.split(65536):
        block.copy_(torch.randn(block.shape, device=device, generator=generator) * shape.d**-0.5)
    target = torch.randint(shape.vocab, (shape.n,), device=device, generator=generator)
    confident = {"untrained": 0, "mixed": shape.n // 2, "confident": shape.n}[rows]
    hidden[:confident] += 20 * weight[target[:confident]].float()
    upstream = torch.rand(shape.n, device=device, generator=generator) / shape.n
    return Inputs(hidden.to(dtype), weight, target, upstream)


PROMPT = 2048
"""Tokens of a sequence that begins with a prompt."""


def is_ignored(n: int, which: str | None, device: torch.device) -> Tensor:
    """(n,) bool. which: random:FRACTION of the tokens, prompt:FRACTION of each PROMPT of them, from its
    first; None: none. Raises ValueError for anything else."""
    if which is None:
        return torch.zeros(n, dtype=torch.bool, device=device)
    kind, _, text = which.partition(":")
    fraction = float(text) if text.replace(".", "", 1).isdigit() else -1.0
    if kind not in ("random", "prompt") or not 0 <= fraction <= 1:
        raise ValueError(f"--ignored: got {which}, want none, random:FRACTION or prompt:FRACTION")
    if kind == "prompt":
        return torch.arange(n, device=device) % PROMPT < fraction * PROMPT
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).to(device)
    return order < round(fraction * n)


class Reference:
    """Loss and gradients in float64: each token's loss, dH and dW on samples of rows and vocabulary entries.

    Half of the sampled entries are targets, since the gradient of the others is small beside theirs.
    """

    @torch.no_grad()
    def __init__(self, inputs: Inputs):
        hidden, weight, target = inputs.hidden.double(), inputs.weight, inputs.target
        n, vocab = hidden.shape[0], weight.shape[0]
        generator = torch.Generator(hidden.device).manual_seed(1)
        draw = functools.partial(torch.randint, size=(SAMPLE,), device=hidden.device, generator=generator)
        self.rows = draw(n)
        self.columns = torch.cat((target[draw(n)], draw(vocab)))
        lse = torch.full((n,), -math.inf, dtype=torch.float64, device=hidden.device)
        # A gigabyte of float64 at most, of the block and of its logits.
        blocks = weight.split(max(1, 2**27 // max(n, hidden.shape[1])))
        for block in blocks:
            lse = torch.logaddexp(lse, torch.logsumexp(hidden @ block.double().T, dim=1))
        target_logit = torch.cat(
            [
                (h * weight[y].double()).sum(1)
                for h, y in zip(hidden.split(4096), target.split(4096), strict=True)
            ]
        )
        self.losses = lse - target_logit

        self._dh = -weight[target[self.rows]].double()
        for block in blocks:
            w = block.double()
            self._dh += (hidden[self.rows] @ w.T - lse[self.rows, None]).exp() @ w
        self._dlogits = (hidden @ weight[self.columns].double().T - lse[:, None]).exp()
        self._dlogits -= (target[:, None] == self.columns).double()
        self._hidden = inputs.hidden

    def loss(self, reduction: str, valid: Tensor) -> Tensor:
        """valid (n,) bool: the others are ignored."""
        losses = self.losses.where(valid, 0.0)
        return losses.sum() / valid.sum().clamp(min=1) if reduction == "mean" else losses

    def dh(self, grad_scale: Tensor) -> Tensor:
        """(SAMPLE, d) for the per-token factors `grad_scale` (n,)."""
        return grad_scale[self.rows, None].double() * self._dh

    def dw(self, grad_scale: Tensor) -> Tensor:
        """(2 SAMPLE, d) for the per-token factors `grad_scale` (n,)."""
        return (grad_scale[:, None].double() * self._dlogits).T @ self._hidden.double()
