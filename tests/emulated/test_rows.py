"""Compacted tokens, executed: which rows are ignored, in every schedule, both architectures' PTX emulated."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from cute_lce.implementation import Request
from cute_lce.launch import KERNELS
from cute_lce.launch import backward as launched
from cute_lce.plan import grad_in_forward as plans
from cute_lce.plan import memory
from cute_lce.plan.problem import Limits
from tests import passes
from tests.device import forget_plans, two_sweeps
from tests.emulated.backward import check, device, known, narrow_plans, train
from tests.numerics import Case, assert_close, random_case

BF16, FP16 = torch.bfloat16, torch.float16
N = 150

full = pytest.mark.emulator_full
pytestmark = pytest.mark.usefixtures("poisoned_empty")
VALID = {
    "none": lambda i: i < 0,
    "one, the last": lambda i: i == N - 1,
    "random": lambda i: torch.rand(N, generator=torch.Generator().manual_seed(5)) < 0.4,
    "all": lambda i: i >= 0,
    "all but one": lambda i: i != 3,
    "at the end": lambda i: i >= 70,
    "64 of them": lambda i: (i % 2 == 0) & (i < 128),
    "a k tile more one": lambda i: i < 65,
    "one below a tile": lambda i: i >= N - 127,
    "a tile": lambda i: i >= N - 128,
    "a tile more one": lambda i: i >= N - 129,
    "the first chunk of 64 and 6 more": lambda i: i >= N - 70,
}
OFTEN = ("none", "random", "all")
which = pytest.mark.parametrize(
    "valid", [valid if valid in OFTEN else pytest.param(valid, marks=full) for valid in VALID]
)
hopper_first = pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=full)])
dtypes = pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=full)], ids=["bf16", "fp16"])


@pytest.fixture(autouse=True)
def _at_any_size(monkeypatch):
    monkeypatch.setattr(memory, "LEAST_COMPACTED", 0)
    monkeypatch.setattr(memory, "LEAST_VOCAB", 0)
    narrow_plans(monkeypatch)
    yield
    forget_plans()


@pytest.mark.parametrize("kept", [0, 128, 330])
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize(("need_dinput", "shard"), [(True, False), (False, False), (True, True)])
def test_copies_are_in_the_workspace_or_where_dinput_will_be(kept, window, need_dinput, shard):
    """The latter beside a sum of dinput over stripes; either way the workspace is what the plan counts."""
    case = random_case(N, 72, 330, BF16)
    request = Request(Limits(window), kept, need_dinput=need_dinput, shard=shard)
    with device("sm_90a", 4, 0):
        prepared = launched.backward(passes.operands_of(case), passes.loss_of(case, "mean"), request)
    assert isinstance(prepared, launched.KernelBackward)
    assert prepared.compaction is not None
    summed = need_dinput and not shard and kept < 330 and (kept > 0 or window > 0)
    assert prepared.copies_into_dinput == summed
    copies = prepared.compaction.hidden is not None
    assert copies == (kept < 330 and not summed)
    assert prepared.workspace.numel() <= prepared.plan.workspace


def some_valid(valid: str, dtype: torch.dtype, V: int = 330) -> tuple[Case, Case]:
    """A case whose ignored rows are nan and inf, and the same with zeros there."""
    case = random_case(N, 72, V, dtype)
    is_valid = VALID[valid](torch.arange(N))
    bad = torch.where(torch.arange(N) % 2 == 0, torch.nan, torch.inf).to(dtype)
    target = case.target.where(is_valid, case.ignore_index)
    return (
        replace(case, input=case.input.where(is_valid[:, None], bad[:, None]), target=target),
        replace(case, input=case.input.where(is_valid[:, None], 0), target=target),
    )


@hopper_first
@dtypes
@which
@pytest.mark.parametrize("kept", [0, pytest.param(256, marks=full), 330], ids=["recompute", "half", "keep"])
def test_which_are_valid(arch: str, dtype: torch.dtype, valid: str, kept: int):
    """An upstream gradient of nan flows into ignored rows."""
    case, clean = some_valid(valid, dtype)
    ignored = clean.target == clean.ignore_index
    dloss = torch.linspace(1, 2, N).masked_fill(ignored, torch.nan)
    run = train(case, arch, kept_columns=kept, dloss=dloss, window=0 if kept == 330 else 130, sms=2)
    check(clean, run, dloss=dloss.nan_to_num(0).double())
    assert run.dinput is not None
    assert not run.dinput[ignored].any()
    assert not run.loss[ignored].any()
    assert sum("Gather" in name for name in run.emulator.launched) == 2


@hopper_first
def test_only_tiles_of_valid_rows_are_computed(arch: str):
    """Of 150 rows in tiles and k tiles of 64 there are three, or two of a cluster; of 64 valid ones one."""
    found = []
    for valid in ("all", "64 of them"):
        case, _ = some_valid(valid, BF16)
        run = train(case, arch, kept_columns=330, dloss=torch.ones(N), sms=2)
        found.append(run.emulator.products)
    for every, some in zip(*found, strict=True):
        assert every in (3 * some, 2 * some)


@hopper_first
@which
def test_two_sweeps(arch: str, valid: str, monkeypatch):
    """Chunks of tokens that end within a k tile, and some without a valid token."""
    two_sweeps(monkeypatch, 96, 200)
    case, clean = some_valid(valid, BF16)
    run = train(case, arch, reduction="mean", sms=2)
    check(clean, run, reduction="mean")


@pytest.mark.parametrize("sweeps", [1, 2])
def test_rows_of_a_wider_matrix_of_which_none_is_ignored(sweeps: int, monkeypatch):
    """They are read where they are, at a pitch of their own, by the products of logits and of dweight."""
    if sweeps == 2:
        two_sweeps(monkeypatch, 96, 200)
    _, clean = some_valid("all", BF16)
    wide = torch.full((N, 96), torch.nan, dtype=BF16)
    wide[:, 8:80] = clean.input
    run = train(
        replace(clean, input=wide[:, 8:80]), "sm_90a", reduction="mean", window=130 * (sweeps == 1), sms=2
    )
    check(clean, run, reduction="mean")


@hopper_first
@dtypes
@which
@pytest.mark.parametrize("chunk", [pytest.param(64, marks=full), 96])
def test_grad_in_forward(arch: str, dtype: torch.dtype, valid: str, chunk: int, monkeypatch):
    choices = plans._choices

    @functools.cache
    def only(*call):
        return [choices(*call)[0]._replace(chunk=chunk, bytes=1, clocks=1)]

    monkeypatch.setattr(plans, "_choices", only)
    case, clean = some_valid(valid, dtype, V=200)
    dloss = clean.upstream("mean")
    with device(arch, 2):
        found = passes.grad_in_forward(KERNELS, case)
        upstream = known(dloss.float())
        dinput, dweight = KERNELS.scale_gradients(
            upstream, case.target, found, passes.loss_of(case, "mean"), dtype
        )
    expected, plain = clean.expected(dloss, "mean"), clean.baseline(dloss, "mean", rounded_dlogits=True)
    for name, mine, want, base in zip(
        ("loss", "dinput", "dweight"), (found.loss, dinput, dweight), expected, plain, strict=True
    ):
        assert mine is not None
        assert_close(name, mine, want, base, rounding=torch.finfo(dtype).eps / 4)


@hopper_first
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=full) for seed in range(2, 21))])
def test_the_same_bits_in_every_schedule(arch: str, seed: int):
    case, _ = some_valid("random", BF16)
    first, other = (train(case, arch, kept_columns=256, dloss=torch.ones(N), seed=s) for s in (0, seed))
    for name in ("loss", "dinput", "dweight"):
        assert torch.equal(getattr(first, name), getattr(other, name)), name
