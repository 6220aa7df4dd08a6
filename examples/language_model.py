"""A small decoder, and its output layer by way of the logits and without them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

import cute_lce


class Block(nn.Module):
    """Causal attention with rotary positions, then a gated feed-forward layer, each behind an RMSNorm."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        hidden = 64 * math.ceil(8 * d / 3 / 64)
        self.heads = heads
        self.attention_norm = nn.RMSNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.attention_out = nn.Linear(d, d, bias=False)
        self.feed_forward_norm = nn.RMSNorm(d)
        self.gate_up = nn.Linear(d, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        batch, length, d = x.shape
        # (3, batch, heads, length, d / heads)
        qkv = (
            self.qkv(self.attention_norm(x))
            .view(batch, length, 3, self.heads, d // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        q, k, v = rotate(qkv[0], rotation), rotate(qkv[1], rotation), qkv[2]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, d))
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotations(length: int, head_dim: int) -> torch.Tensor:
    """Cosines and sines of the rotary position embedding: (2, length, head_dim / 2) float32."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(length)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class CanonicalHead(nn.Linear):
    """The same parameter and call as cute_lce.LinearCrossEntropy, by way of the logits.

    Operands are rounded to `operand_dtype`, as the fused loss sees them, and the logits are float32.
    """

    def __init__(self, d: int, vocab_size: int, operand_dtype: torch.dtype):
        super().__init__(d, vocab_size, bias=False)
        self.operand_dtype = operand_dtype

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden, weight = input.to(self.operand_dtype).float(), self.weight.to(self.operand_dtype).float()
        return F.cross_entropy(F.linear(hidden, weight), target)


class FusedHead(cute_lce.LinearCrossEntropy):
    """cute_lce.LinearCrossEntropy, under autocast where the operands are not to be float32."""

    def __init__(self, d: int, vocab_size: int, operand_dtype: torch.dtype, schedule: str):
        super().__init__(d, vocab_size, schedule=schedule)
        self.operand_dtype = operand_dtype

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.operand_dtype == torch.float32:
            return super().forward(input, target)
        with torch.autocast(input.device.type, dtype=self.operand_dtype):
            return super().forward(input, target)


class LanguageModel(nn.Module):
    """A decoder whose `forward` gives the mean loss of predicting `target` from the tokens up to each
    place."""

    rotation: torch.Tensor

    def __init__(self, vocab_size: int, d: int, layers: int, heads: int, length: int, head: nn.Linear):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(d)
        self.head = head
        self.register_buffer("rotation", rotations(length, d // heads), persistent=False)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every weight anew, on the CPU and in a fixed order, so that two models of one seed are
        equal."""
        generator = torch.Generator().manual_seed(seed)
        residual = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, parameter in sorted(self.named_parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                std = residual if name.endswith(("attention_out.weight", "down.weight")) else 0.02
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states before the output layer: (batch, length) tokens to (batch, length, d)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotation)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(tokens)
        return self.head(hidden.flatten(0, 1), target.flatten())
