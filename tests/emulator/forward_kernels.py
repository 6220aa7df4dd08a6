"""The Blackwell forward's GEMM as subjects of mutations; Hopper's are in mutation_kernels.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from .host import Emulated
from .mutate import ARITHMETIC
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


def _statistics_are_right(config) -> Callable[[Emulated, int], bool]:
    """Of rows that stray, confident ones, classes of -inf, and targets out of range."""
    from tests.emulated import forward as asks
    from tests.numerics import random_case

    case = asks.ignoring(random_case(75, 64, 520, asks.BF16))
    cases = [
        case,
        asks.sloped(case, -200, 100),
        asks.confident(case, 12),
        asks.minus_infinity(random_case(75, 64, 520, asks.BF16), 260),
    ]
    outside = replace(case, target=case.target.clone())
    outside.target[:2] = torch.tensor([520, -1])

    def check(program: Emulated, seed: int) -> bool:
        run = functools.partial(asks.forward, config=config, sms=2, window=128, program=program)
        try:
            for each in cases:
                asks.check(each, run(each))
            total = run(case, reduction="mean")
            expected = asks.reference(case, torch.float64)[0].sum() / int(total.num_valid)
            assert abs(float(total.loss) - float(expected)) < 1e-5 * float(expected)
            found = run(outside)
            assert bool(found.loss[:2].isnan().all())
            assert bool(found.row_sum[:2].isnan().all())
        except AssertionError:
            return False
        return True

    return check


def _combine() -> Subject:
    """What makes rows' statistics and losses of partials, by the rules of arithmetic."""
    from cute_lce.plan.kernels import ForwardKey
    from tests.emulated.forward import emulated

    config = configs()["pair"]
    return Subject(
        "arithmetic of Combine",
        lambda folder: emulated(ForwardKey(config)),
        _statistics_are_right(config),
        range(1),
        least_mutations=60,
        missed=0,
        reasons=[],
        entries=lambda entry: "Combine" in entry,
        rules=ARITHMETIC,
    )


def subjects() -> list[Subject]:
    return [*(_subject(name, config) for name, config in configs().items()), _combine()]
