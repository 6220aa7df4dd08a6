"""The project's Hopper forward as a subject: compiled without a cache, called through launch.forward.

One small problem serves the mutations and the record on hardware: ragged in n and V, several k tiles, two
windows of the vocabulary, ignored rows.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch

N, D, VOCAB, WINDOW = 140, 136, 200, 128


def config(pingpong: bool = False):
    from cute_lce.plan import KernelConfig

    return KernelConfig("sm_90a", tile_n=64, stages=2, pingpong=pingpong)


def trace(pingpong: bool, folder: str | None):
    """The compiled function; with a folder it carries its PTX."""
    from cute_lce import compiled, plan

    key = plan.forward_key(config(pingpong))
    return compiled.trace(key, f"--keep-ptx --dump-dir {folder}" if folder else "")


def inputs() -> list[torch.Tensor]:
    """hidden (N, D), weight (VOCAB, D), target (N,)."""
    g = torch.Generator().manual_seed(9)
    hidden = torch.randn(N, D, generator=g).bfloat16()
    weight = (torch.randn(VOCAB, D, generator=g) / D**0.5).bfloat16()
    target = torch.randint(0, VOCAB, (N,), generator=g)
    target[::7] = -100
    return [hidden, weight, target]


def call(function: Callable, pingpong: bool, hidden, weight, target) -> torch.Tensor:
    """launch.forward with `function` as what `compiled` gives: (3, N) loss, row_max and row_sum."""
    from cute_lce import launch, plan

    chosen = plan.forward("sm_90a", N, D, VOCAB, 4, WINDOW, config=config(pingpong))
    with mock.patch.object(launch, "_prepare", return_value=(chosen, function)):
        loss, *statistics = launch.forward(hidden, weight, target, -100, "none", WINDOW, None)
    return torch.stack([loss, *statistics[:2]])


def reference(hidden, weight, target) -> torch.Tensor:
    """The same in float64."""
    logits = hidden.double() @ weight.double().T
    row_max = logits.max(1).values
    row_sum = (logits - row_max[:, None]).exp().sum(1)
    loss = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    return torch.stack([loss, row_max, row_sum])
