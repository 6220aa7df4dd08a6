"""The softcap of a warp's logits, by the series where all are small, and the gradients by the logits near a
small cap, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_lce import maths
from cute_lce.arguments import with_terms
from tests import emulator
from tests.emulated import softcaps, token_stats
from tests.emulated.token_stats import Numbers
from tests.logit_terms import Tanh
from tests.numerics import CAPS, REACHES, check_near_a_cap, near_a_cap

SHAPE = (softcaps.COLUMNS, softcaps.ROWS, 32)
VOTES = 2
"""Of a fragment's columns."""
BF16, FP16 = torch.bfloat16, torch.float16
full = pytest.mark.emulator_full
LONG = "ex2.approx.ftz.f32", "rcp.approx.ftz.f32"


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def compiled(request, tmp_path_factory):
    return emulator.build(softcaps.compile_caps(request.param, str(tmp_path_factory.mktemp("caps"))))


def apply(compiled, x: Tensor, cap: float, scale: float = 1.0, temperature: float = 1.0):
    """(the softcap of x (blocks, *SHAPE), what ran)."""
    numbers = maths.softcap_numbers(cap, scale, temperature)
    loss = with_terms(("softcap",))(reduction=0, ignore_index=-100, **numbers)
    out = torch.full((2, *x.shape), torch.nan)
    ran = emulator.run(compiled, loss, x, out)
    # A number that is alone is capped as in a fragment.
    assert torch.equal(out[0].nan_to_num(7), out[1].nan_to_num(7))
    return out[0], ran


def check(x: Tensor, found: Tensor, cap: float, scale: float = 1.0, temperature: float = 1.0):
    want = cap * torch.tanh(x.double() * scale / cap) / temperature
    error = (found.double() - want).abs()
    assert bool((error <= 2.0**-21 * want.abs() + 2.0**-140).all()), (error / want.abs()).max()


def fill(values: Tensor) -> Tensor:
    """Blocks of these numbers, the last repeated."""
    count = SHAPE[0] * SHAPE[1] * SHAPE[2]
    blocks = -(-len(values) // count)
    return torch.cat([values, values[-1:].expand(blocks * count - len(values))]).reshape(blocks, *SHAPE)


@pytest.mark.parametrize(
    ("cap", "scale", "temperature"),
    [(30.0, 1.0, 1.0), (50.0, -0.7, 0.25), (1e5, 3.0, 2.0), (1e-5, 1.0, 1.0)],
)
def test_the_softcap_of_any_number(compiled, cap, scale, temperature):
    """Sorted, so that some warps have small numbers alone, and shuffled, so that most have both; among them
    those at the edge."""
    edge = abs(maths.CAP_EDGE * cap / scale)
    size = torch.cat(
        [
            torch.logspace(-44, 38, 700, dtype=torch.float64).float(),
            (edge * torch.logspace(-3, 1.5, 1500, dtype=torch.float64)).float(),
            (edge * (1 + torch.arange(-60, 61).double() * 2.0**-23)).float(),
        ]
    )
    x = torch.cat([-size, size]).sort().values
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    by_size = x[x.abs().argsort()]
    for values in (by_size, shuffled):
        values = fill(values)
        found, _ = apply(compiled, values, cap, scale, temperature)
        check(values, found, cap, scale, temperature)
    steps = fill(x)
    found, _ = apply(compiled, steps, cap, scale, temperature)
    rises = (found.flatten().diff() * (1 if scale > 0 else -1)) / found.flatten()[1:].abs().clamp(min=1e-30)
    assert rises.min() >= -(2.0**-20), "falls where its argument rises"


def test_numbers_that_are_none(compiled):
    """Each alone among small numbers; the others of its warp do not change."""
    small = torch.linspace(-9, 9, SHAPE[0] * SHAPE[1] * SHAPE[2]).reshape(SHAPE)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 13.0, -0.0])
    x = small.repeat(len(odd), 1, 1, 1)
    places = torch.randperm(small.numel(), generator=torch.Generator().manual_seed(2))[: len(odd)]
    for each, number, place in zip(x, odd, places, strict=True):
        each.view(-1)[place] = number
    found, _ = apply(compiled, x, 30.0)
    plain, _ = apply(compiled, small[None], 30.0)
    given = torch.stack([each.view(-1)[place] for each, place in zip(found, places, strict=True)])
    want = torch.tensor([torch.nan, 30, -30, 30, -30, 30 * torch.tanh(torch.tensor(13 / 30)), -0.0])
    torch.testing.assert_close(given, want, rtol=2.0**-21, atol=0, equal_nan=True)
    assert bool(given[-1].signbit())
    others = torch.ones_like(x, dtype=torch.bool)
    for each, place in zip(others, places, strict=True):
        each.view(-1)[place] = False
    assert torch.equal(found[others], plain.expand_as(found)[others])


def test_small_logits_cost_no_exponentials(compiled):
    """Four FMAs and a product each; where one of a vote's is large, its votes' are computed the long way."""
    each = SHAPE[0] * SHAPE[1]
    small = torch.linspace(-11.9, 11.9, each * 32).reshape(1, *SHAPE)
    large = small.clone()
    large[0, -1, 2, 17] = 12.1
    _, ran = apply(compiled, small, 30.0)
    assert [executed(ran, 0, name) for name in ("fma.rn.f32", "mul.f32", *LONG)] == [4 * each, each, 0, 0]
    _, ran = apply(compiled, large, 30.0)
    for launch, count in ((0, each // VOTES), (1, each)):
        assert [executed(ran, launch, name) for name in LONG] == [count, count]


def executed(ran: emulator.Result, launch: int, name: str) -> int:
    return sum(warp[name] for warp in ran.by_launch[launch].values())


IDS = "logprob", "topk_logprob"
EACH = torch.linspace(0.3, 3, len(REACHES))


def numbers_near(cap: float, dtype: torch.dtype, kind: str) -> Numbers:
    case = near_a_cap(cap, dtype)
    numbers = Numbers(case, softcap=Tanh(cap).key if kind == "LogitTerm" else cap)
    if kind == "ids":
        ids = torch.stack([case.target, (case.target + 5) % len(case.linear_weight)], dim=1)
        return replace(numbers, outputs=IDS, differentiated=IDS, topk_ids=ids, temperature=EACH)
    return replace(numbers, temperature=0.7) if kind == "one temperature" else numbers


NEAR = (
    ("sm_90a", BF16, "", 0),
    ("sm_100a", FP16, "", 0),
    ("sm_100a", BF16, "ids", 0),
    ("sm_90a", FP16, "LogitTerm", 0),
)


@pytest.mark.usefixtures("poisoned_empty", "narrow")
@pytest.mark.parametrize(
    ("arch", "dtype", "kind", "kept"),
    [
        pytest.param(arch, dtype, kind, kept, marks=[] if (arch, dtype, kind, kept) in NEAR else [full])
        for arch in ("sm_90a", "sm_100a")
        for dtype in (BF16, FP16)
        for kind in ("", "one temperature", "ids", "LogitTerm")
        for kept in (0, 128)
        if not kept or kind in ("", "one temperature")
    ],
)
def test_the_slope_near_a_small_cap(arch, dtype, kind, kept):
    """Whose logits are but a few ulp of lse: what the backward has is the forward's logit itself."""
    for cap in CAPS:
        numbers = numbers_near(cap, dtype, kind)
        run = token_stats.run(numbers, arch, kept_columns=kept)
        values, gradients = token_stats.by_torch(numbers, torch.float64, rounded=False)
        plain, _ = token_stats.by_torch(numbers, torch.float32, rounded=True)
        for name in numbers.outputs:
            token_stats.agree(name, getattr(run.stats, name), values[name], plain[name])
        factor = torch.stack([each.abs().view(len(REACHES), -1).sum(1) for each in numbers.upstream.values()])
        factor = factor.sum(0) / numbers.temperature
        dweight = run.gradients[1]
        assert dweight is not None
        check_near_a_cap(numbers.case, dweight, gradients["dweight"], factor, kept > 0)
