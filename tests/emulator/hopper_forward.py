"""The project's Hopper forward as a subject: compiled without a cache, called through launch/.

One small problem serves the mutations and the record on hardware: ragged in n and V, several k tiles, several
runs a cluster, with ping-pong of two windows of the vocabulary, ignored rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

N, D, VOCAB, WINDOW = 140, 136, 200, 128


def config(pingpong: bool = False):
    from cute_lce.arch import architecture

    planned = architecture("sm_90a").token_configs[0]
    return replace(planned, tile_m=64 if pingpong else 128, tile_n=32, stages=2, pingpong=pingpong)


def trace(pingpong: bool, folder: str | None):
    """The compiled function; with a folder it carries its PTX."""
    from cute_lce.compile.trace import trace
    from cute_lce.plan.kernels import ForwardKey

    return trace(ForwardKey(config(pingpong)), f"--keep-ptx --dump-dir {folder}" if folder else "")


def inputs() -> list[torch.Tensor]:
    """hidden (N, D), weight (VOCAB, D), target (N,)."""
    g = torch.Generator().manual_seed(9)
    hidden = torch.randn(N, D, generator=g).bfloat16()
    weight = (torch.randn(VOCAB, D, generator=g) / D**0.5).bfloat16()
    target = torch.randint(0, VOCAB, (N,), generator=g)
    target[::7] = -100
    return [hidden, weight, target]


def call(function: Callable, pingpong: bool, hidden, weight, target) -> torch.Tensor:
    """A forward of launch/ with `function` as what is compiled: (2, N) loss and lse."""
    from cute_lce.arch import Gpu
    from cute_lce.launch import KERNELS
    from cute_lce.plan import forward as plans
    from cute_lce.plan.kernels import ForwardKey, Key
    from cute_lce.plan.problem import Limits
    from tests import passes
    from tests.device import planned_for
    from tests.numerics import Case

    gpu, chosen = Gpu("sm_90a", 4), config(pingpong)
    plan = plans.plan(gpu, N, D, VOCAB, Limits(WINDOW), chosen)
    functions: dict[Key, Callable] = {ForwardKey(chosen): function}
    with planned_for(gpu, functions, plan):
        results = passes.forward(KERNELS, Case(hidden, weight, target), window=WINDOW)
    row_max, row_sum, _ = passes.statistics_of(results)
    return torch.stack([results.loss, row_max + row_sum.log()])


def reference(hidden, weight, target) -> torch.Tensor:
    """The same in float64."""
    logits = hidden.double() @ weight.double().T
    loss = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    return torch.stack([loss, logits.logsumexp(1)])
