"""Shards of the vocabulary through launch/'s host side and emulated kernels: each shard's passes one after
the other, their statistics folded as the ranks of a group fold them, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_lce.arguments import Operands
from cute_lce.implementation import Halfway, LocalTargets, Request, Results, Saved
from cute_lce.launch import KERNELS
from cute_lce.options import LossOptions
from cute_lce.parallel.tensor import local_loss
from cute_lce.plan import memory, overlap
from cute_lce.plan.problem import Collective, Limits
from cute_lce.streaming import STREAMING
from tests.device import two_sweeps
from tests.emulated.backward import device, narrow_plans
from tests.emulated.forward import ignoring
from tests.numerics import Case, assert_close, jumping, negated, random_case

BF16, FP16 = torch.bfloat16, torch.float16
full = pytest.mark.emulator_full
pytestmark = pytest.mark.usefixtures("poisoned_empty", "narrow")
hopper_first = pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=full)])


def train(
    case: Case,
    arch: str,
    sizes: list[int],
    kept: list[int],
    *,
    window: int = 0,
    reduction: str = "none",
    equal: bool = False,
    beside: Collective | None = None,
    is_summed: bool = True,
    joined: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[str]]:
    """(loss, dinput, dweight, kernels launched) of a vocabulary in shards of these sizes, which keep so many
    columns. dinput is the shards' sum, rounded once, or of rounded parts. joined gets how many launches a
    wait for that sum follows."""
    loss = LossOptions(reduction, case.ignore_index, case.logit_scale)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    joined = [] if joined is None else joined
    with device(arch, 4) as counts:
        shards: list[tuple[Operands, Any, Results]] = []
        for start, size, columns in zip(starts, sizes, kept, strict=True):
            targets = KERNELS.localize(case.target, case.ignore_index, start, size, equal)
            operands = Operands(case.input, case.linear_weight[start : start + size], targets.local)
            request = Request(Limits(window), columns, shard=True, is_summed=is_summed, beside=beside)
            forward = KERNELS.forward(operands, loss, request)
            found = forward.statistics(operands, local_loss(loss))
            shards.append((operands, (forward, request, targets), found))
        gathered = torch.stack([_packed(targets, found) for _, (_, _, targets), found in shards])
        dloss = case.upstream(reduction).float()
        total, dinput, dweights = None, torch.zeros_like(case.input, dtype=torch.float32), []
        for operands, (forward, request, targets), found in shards:
            merged = KERNELS.merge(gathered, targets, local_loss(loss))
            found = found._replace(row_max=merged.row_max, row_sum=merged.row_sum)
            results = forward.finish(operands, local_loss(loss), found)
            results = results._replace(loss=merged.loss, num_valid=merged.num_valid)
            # To the last bit, nan included.
            assert total is None or torch.equal(total.view(torch.int32), results.loss.view(torch.int32))
            total = results.loss
            saved = Saved(*operands, *results[1:])  # pyright: ignore
            backward = KERNELS.backward(operands, loss, request)
            halfway = backward.dinput(dloss, saved, local_loss(loss))
            assert isinstance(halfway, Halfway)
            assert halfway.dinput is not None
            assert halfway.dinput.dtype is (torch.float32 if is_summed else case.input.dtype)
            before = len(counts.launched)
            # What a reduction of dinput does to it meanwhile is not seen by dweight.
            dinput += halfway.dinput
            halfway.dinput.fill_(torch.nan)
            halfway = halfway._replace(join=lambda: joined.append(len(counts.launched)))
            dweights.append(backward.dweight(dloss, saved, local_loss(loss), halfway)[1])
            assert len(counts.launched) > before or case.input.dtype is FP16
    assert total is not None
    return total, dinput.to(case.input.dtype), torch.cat(dweights), counts.launched


def _packed(targets: LocalTargets, found: Results) -> Tensor:
    """A shard's statistics, as the ranks gather them."""
    assert found.row_max is not None
    assert found.row_sum is not None
    return torch.cat((targets.header, found.row_max, found.row_sum, found.loss))


def check(case: Case, arch: str, sizes: list[int], kept: list[int], **options: Any) -> list[str]:
    reduction = options.get("reduction", "none")
    parts = 0.0 if options.get("is_summed", True) else torch.finfo(case.input.dtype).eps
    loss, dinput, dweight, launched = train(case, arch, sizes, kept, **options)
    upstream = case.upstream(reduction)
    expected = case.expected(upstream, reduction)
    baseline = case.baseline(upstream, reduction, rounded_dlogits=True)
    for name, got, want, plain in zip(
        ("loss", "dinput", "dweight"), (loss, dinput, dweight), expected, baseline, strict=True
    ):
        assert_close(name, got, want, plain, rounding=parts if name == "dinput" else 0.0)
    return launched


@hopper_first
@pytest.mark.parametrize(
    ("kept", "window", "dtype"),
    [
        ([0, 0], 0, BF16),
        ([0, 0], 70, BF16),
        pytest.param([200, 130], 0, BF16, marks=full),
        pytest.param([128, 0], 70, BF16, marks=full),
        ([0, 0], 0, FP16),
        pytest.param([128, 128], 70, FP16, marks=full),
        pytest.param([200, 130], 0, FP16, marks=full),
    ],
)
def test_two_shards(arch: str, kept: list[int], window: int, dtype: torch.dtype):
    """dinput is complete before the last stripe's dweight, except in float16 where its stripe is computed
    anew, and no GEMM is computed twice."""
    scale = 0.7 if dtype is BF16 else 1.0
    case = replace(ignoring(random_case(40, 72, 330, dtype, seed=window)), logit_scale=scale)
    launched = check(case, arch, [200, 130], kept, window=window)
    gemms = 0
    for size, columns in zip([200, 130], kept, strict=True):
        stripes = -(-(size - columns) // (window or size))
        gemms += 1 + 3 * stripes + 2 * (columns > 0)
    assert sum("Gemm" in name for name in launched) == gemms


@hopper_first
@pytest.mark.parametrize(
    ("kept", "dtype", "divided"),
    [
        ([0, 0], BF16, 1),
        ([600, 0], FP16, 1),
        pytest.param([600, 70], BF16, 1, marks=full),
        pytest.param([0, 0], FP16, 0, marks=full),
    ],
)
def test_dweight_beside_a_collective(
    arch: str, kept: list[int], dtype: torch.dtype, divided: int, monkeypatch
):
    """A part leaves two of the four SMs, in a launch of its own; of float16's recomputed stripe there is
    none, and a shard of few classes is too small. What takes all SMs waits for the collective."""
    monkeypatch.setattr(overlap, "START_CLOCKS", 0)
    monkeypatch.setattr(overlap, "LAUNCH_CLOCKS", 0)
    case, beside = ignoring(random_case(40, 72, 670, dtype)), Collective(seconds=8e-8, sms=2)
    joined: list[int] = []
    launched = [check(case, arch, [600, 70], kept, beside=each, joined=joined) for each in (None, beside)]
    gemms = [sum("Gemm" in name for name in each) for each in launched]
    assert gemms[1] - gemms[0] == divided
    assert len(joined) == divided
    for count in joined:
        before, after = launched[1][count - 1 : count + 1]
        assert "Gemm" in before
        assert "Gemm" in after


@hopper_first
@pytest.mark.parametrize("kept", [[0, 0, 0], [128, 128, 7]])
def test_rows_that_jump_and_a_shard_of_few_classes(arch: str, kept: list[int]):
    """A row's columns and its sum lie far above what a shard that lacks its target takes as reference."""
    case = jumping(random_case(40, 64, 263, BF16), {20: 50.0, 100: 100.0, 262: 300.0})
    check(case, arch, [128, 128, 7], kept, reduction="sum")


@hopper_first
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=full)])
@pytest.mark.parametrize(
    ("kept", "window", "tall"),
    [([0, 0], 70, False), ([128, 0], 0, True), ([200, 130], 0, False)],
    ids=["recompute", "half", "keep"],
)
def test_ignored_rows_are_not_read(
    arch: str, kept: list[int], window: int, tall: bool, dtype: torch.dtype, monkeypatch
):
    """They are nan. tall: in dinput's own tiles, where the architecture has any."""
    narrow_plans(monkeypatch, tall=tall)
    monkeypatch.setattr(memory, "LEAST_COMPACTED", 0)
    monkeypatch.setattr(memory, "LEAST_VOCAB", 0)
    clean = ignoring(random_case(100, 72, 330, dtype))
    ignored = clean.target == clean.ignore_index
    clean = replace(clean, input=clean.input.masked_fill(ignored[:, None], 0))
    case = replace(clean, input=clean.input.masked_fill(ignored[:, None], torch.nan))
    loss, dinput, dweight, launched = train(case, arch, [200, 130], kept, window=window, reduction="mean")
    assert sum("Gather" in name for name in launched) == 4
    # dinput's GEMM stores where the tokens are.
    assert not any("Reduce" in name for name in launched)
    upstream = clean.upstream("mean")
    expected, plain = clean.expected(upstream), clean.baseline(upstream, rounded_dlogits=True)
    for name, got, want, base in zip(
        ("loss", "dinput", "dweight"), (loss, dinput, dweight), expected, plain, strict=True
    ):
        assert_close(name, got, want, base)
    assert not dinput[ignored].any()


@hopper_first
@pytest.mark.parametrize(
    ("kept", "window", "dtype"),
    [
        ([200, 130], 0, BF16),
        pytest.param([0, 0], 70, BF16, marks=full),
        pytest.param([0, 0], 0, FP16, marks=full),
    ],
    ids=["keep", "stripes", "fp16"],
)
def test_parts_that_are_not_summed(arch: str, kept: list[int], window: int, dtype: torch.dtype, monkeypatch):
    """Each shard's dinput is rounded, by the kernels."""
    monkeypatch.setattr(memory, "LEAST_COMPACTED", 0)
    monkeypatch.setattr(memory, "LEAST_VOCAB", 0)
    case = ignoring(random_case(40, 72, 330, dtype))
    check(case, arch, [200, 130], kept, window=window, is_summed=False)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("is_summed", [True, pytest.param(False, marks=full)])
def test_two_sweeps_and_splits(splits: int, is_summed: bool, monkeypatch):
    case = ignoring(random_case(70, 64, 300, BF16))
    two_sweeps(monkeypatch, chunk=48, columns=100, splits=splits)
    check(case, "sm_90a", [160, 140], [0, 0], is_summed=is_summed)


def test_two_sweeps_of_a_frozen_weight(monkeypatch):
    """No stripe is left behind the chunks, nor anything beside a collective."""
    case = random_case(70, 64, 300, BF16)
    two_sweeps(monkeypatch, chunk=48, columns=100)
    loss = LossOptions("sum", case.ignore_index)
    request = Request(need_dweight=False, shard=True, beside=Collective(4e-6, 2))
    operands = Operands(case.input, case.linear_weight, case.target)
    with device("sm_90a", 4):
        forward = KERNELS.forward(operands, loss, request)
        results = forward.statistics(operands, local_loss(loss))
        count = torch.tensor(70)
        saved = Saved(*operands, results.row_max, results.row_sum, count)  # pyright: ignore
        backward = KERNELS.backward(operands, loss, request)
        halfway = backward.dinput(torch.ones(()), saved, local_loss(loss))
        assert isinstance(halfway, Halfway)
        _, dweight = backward.dweight(torch.ones(()), saved, local_loss(loss), halfway)
    assert dweight is None
    assert halfway.dinput is not None
    upstream = case.upstream("sum")
    wanted = case.expected(upstream * 0 + 1, "sum")[1]
    plain = case.baseline(upstream * 0 + 1, "sum", rounded_dlogits=True)[1]
    assert_close("dinput", halfway.dinput.to(BF16), wanted, plain)


def test_splits_of_k(monkeypatch):
    narrow_plans(monkeypatch, splits=2)
    check(ignoring(random_case(40, 64, 300, BF16)), "sm_90a", [160, 140], [0, 128], reduction="mean")


def test_a_target_in_no_shard():
    case = random_case(40, 64, 300, BF16)
    case.target[5] = 290
    # Shards of the first 280 classes.
    loss, dinput, dweight, _ = train(case, "sm_90a", [150, 130], [150, 0])
    row = torch.arange(40) == 5
    assert torch.equal(loss.isnan(), row | (case.target >= 280))
    assert dinput[row].isnan().all()
    assert dweight.isnan().all()


def test_an_empty_call():
    case, loss, request = random_case(0, 64, 300, BF16), LossOptions("none"), Request(shard=True)
    operands = Operands(case.input, case.linear_weight, case.target)
    forward, backward = KERNELS.forward(operands, loss, request), KERNELS.backward(operands, loss, request)
    results = forward.finish(operands, loss, forward.statistics(operands, loss))
    assert results.loss.shape == (0,)
    saved = Saved(*operands, *results[1:])  # pyright: ignore
    halfway = backward.dinput(results.loss, saved, loss)
    dinput, dweight = backward.dweight(results.loss, saved, loss, halfway)
    assert dinput is not None
    assert dinput.dtype is torch.float32
    assert dinput.shape == (0, 64)
    assert dweight is not None
    assert not dweight.any()


def test_shards_that_are_said_to_be_equal_and_are_not():
    loss, dinput, _, _ = train(random_case(40, 64, 300, BF16), "sm_90a", [160, 140], [0, 0], equal=True)
    assert loss.isnan().all()
    assert dinput.isnan().all()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_merge_of_many_tokens_and_ranks(reduction: str):
    """The kernels of the merge against torch's: blocks of tokens, shards of -inf, targets in none or two."""
    n, ranks, columns = 600, 5, 70
    torch.manual_seed(1)
    target = torch.randint(0, ranks * columns, (n,), dtype=torch.int32)
    target[::7], target[3] = -100, ranks * columns + 5
    row_max = torch.randn(ranks, n) * 30
    row_max[1], row_max[:, 9] = -torch.inf, -torch.inf
    row_sum = torch.rand(ranks, n) + 1
    row_sum[row_max.isinf()] = 0
    starts = [columns * rank for rank in range(ranks)]
    for starts_at in (starts, [0, *starts[:-1]]):
        loss = local_loss(LossOptions(reduction, -100))
        found = []
        # The kernels get a lazily negated target, which they cannot read in place.
        for implementation, own in ((KERNELS, negated(target)), (STREAMING, target.clone())):
            with device("sm_90a", 4):
                shards = [implementation.localize(own, -100, start, columns, True) for start in starts_at]
                logits = torch.where(torch.stack([each.local for each in shards]) >= 0, 1.5, torch.nan)
                parts = zip(shards, row_max, row_sum, logits, strict=True)
                gathered = torch.stack([torch.cat((each.header, *rows)) for each, *rows in parts])
                found.append((shards, implementation.merge(gathered, shards[0], loss)))
        (shards, merged), (want_shards, want) = found
        for one, other in zip(shards, want_shards, strict=True):
            assert torch.equal(one.local, other.local)
            assert torch.equal(one.header, other.header)
        for got, wanted in zip(merged, want, strict=True):
            assert torch.allclose(got.double(), wanted.double(), rtol=2e-6, equal_nan=True)
        assert merged.row_sum[3].isnan()
        assert int(merged.num_valid) == int((target != -100).sum())


@pytest.mark.parametrize(("entropy", "total"), [(True, False), (False, True), (True, True)])
def test_the_merge_of_what_terms_sum(entropy: bool, total: bool):
    """Against the numbers of float64 logits; a shard without any probability, targets in none or two."""
    n, sizes = 300, [40, 7, 60]
    V = sum(sizes)
    generator = torch.Generator().manual_seed(3)
    z = 20 * torch.randn((n, V), generator=generator, dtype=torch.float64)
    target, weight = torch.randint(V, (n,), generator=generator), torch.linspace(-0.5, 2, V).double()
    target[::7], target[3] = -100, V
    z[:, 40:47] = -torch.inf if entropy and not total else -300.0
    target = torch.where((target >= 40) & (target < 47), 1, target)
    found = []
    for implementation in (KERNELS, STREAMING):
        with device("sm_90a", 4):
            shards, parts = [], []
            for first, size in zip((0, 40, 47), sizes, strict=True):
                shards.append(implementation.localize(target.clone(), -100, first, size, False))
                own, local = z[:, first : first + size], shards[-1].local
                row_max = own.amax(1)
                gap = row_max.masked_fill(row_max.isinf(), 0).unsqueeze(1) - own
                sums = (-gap).exp().sum(1)
                logit = own.gather(1, local.clamp(min=0).unsqueeze(1)).squeeze(1)
                rows = [row_max, sums, logit.masked_fill(local < 0, torch.nan)]
                if entropy:
                    rows.append(((-gap).exp() * gap).sum(1) / sums)
                if total:
                    own_weight = weight[first : first + size]
                    rows += [(gap * own_weight).sum(1), own_weight.sum().view(1)]
                parts.append(torch.cat((shards[-1].header, *(each.float() for each in rows))))
            gathered = torch.stack(parts)
            found.append(implementation.merge_sums(gathered, shards[0], entropy=entropy, total=total))
    row_max, valid = z.amax(1), target != -100
    gap = row_max.unsqueeze(1) - z
    row_sum = (-gap).exp().sum(1)
    mean_gap = (gap.clamp(max=1e30) * (-gap).exp()).sum(1) / row_sum
    nowhere = target == V
    for got in found:
        assert torch.equal(got.row_max.double(), row_max.float().double())
        assert torch.equal(got.row_sum.isnan(), nowhere)
        torch.testing.assert_close(got.row_sum[~nowhere].double(), row_sum[~nowhere], rtol=1e-5, atol=0)
        logit = z.gather(1, target.clamp(0, V - 1).unsqueeze(1)).squeeze(1)
        kept = valid & ~nowhere
        torch.testing.assert_close(got.target_logit[kept].double(), logit[kept], rtol=1e-6, atol=0)
        assert got.target_logit[nowhere].isnan().all()
        assert (got.mean_gap is not None, got.total_gap is not None) == (entropy, total)
        if got.mean_gap is not None:
            assert torch.equal(got.mean_gap.isnan(), nowhere)
            torch.testing.assert_close(
                got.mean_gap[~nowhere].double(), mean_gap[~nowhere], rtol=1e-4, atol=1e-6
            )
        if got.total_gap is not None:
            wanted = (gap * weight).sum(1)
            torch.testing.assert_close(got.total_gap.double(), wanted, rtol=1e-5, atol=1e-2)
