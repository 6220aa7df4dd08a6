"""The Blackwell forward's GEMM as subjects of mutations; Hopper's are in mutation_kernels.py."""

from __future__ import annotations

from dataclasses import replace

import torch

from .host import Emulated
from .mutation_kernels import MEETS, RELINQUISH, TAIL, TWO_FENCES, Subject


def configs() -> dict:
    """Narrow tiles and two stages: both rings wrap and fill."""
    from cute_lce.arch import architecture

    pair = replace(architecture("sm_100a").token_configs[0], tile_n=64, stages=2)
    single = replace(pair, tile_m=128, cluster_m=1)
    return {"pair": pair, "single": single, "two pairs": replace(pair, cluster_m=4)}


# Waits of producers' tails: two for the ring's two slots, one for the accumulators. Between two pairs, which
# release each other's slots, the ring's last one is needed, and is found. The others: the permit to
# allocate and, in a cluster, either of two fences.
MISSED = {"pair": 3 + 1 + 2 + 1, "single": 3 + 1 + 1, "two pairs": 2 + 1 + 2 + 1}


def _subject(name: str, config) -> Subject:
    from cute_lce.plan.kernels import ForwardKey
    from tests.emulated.forward import BF16, emulated, forward, ignoring, reference
    from tests.numerics import random_case

    case = ignoring(random_case(280, 136, 520, BF16))
    expected = reference(case, torch.float64)[0]

    def check(program: Emulated, seed: int) -> bool:
        sms = config.cluster_m * config.cluster_n
        run = forward(case, config, sms=sms, window=100_000, seed=seed, program=program)
        return bool((run.loss.double() - expected).norm() <= 1e-4 * expected.norm())

    return Subject(
        f"the Blackwell forward, {name}",
        lambda folder: emulated(ForwardKey(config)),
        check,
        range(6),
        least_mutations=31,
        missed=MISSED[name],
        reasons=[TAIL, RELINQUISH, TWO_FENCES, MEETS],
        entries=lambda entry: "Gemm" in entry,
    )


def subjects() -> list[Subject]:
    return [_subject(name, config) for name, config in configs().items()]
