"""Terms of the loss in the kernels, which are compiled for them, against float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cute_lce.arch import BOX_BYTES, BOXES, WARPGROUP, WARPS, architecture
from cute_lce.arguments import MORE_PARTS
from cute_lce.logit_term import kernel_term
from cute_lce.plan import forward as forward_plans
from cute_lce.plan.kernels import BackwardKey, ForwardKey
from tests.device import forget_plans, two_sweeps
from tests.emulated import token_stats
from tests.emulated.backward import check, narrow_plans, train
from tests.emulated.forward import ignoring, minus_infinity, offset, scaled
from tests.emulated.token_stats import PLAIN, Numbers, given_ids, repeating
from tests.emulator.ops import tcgen05, wgmma
from tests.logit_terms import Knee, LogCap, SoftPlus, Tanh
from tests.numerics import assert_close, jumping, random_case

BF16, FP16 = torch.bfloat16, torch.float16
full = pytest.mark.emulator_full
pytestmark = pytest.mark.usefixtures("poisoned_empty", "narrow")
hopper_first = pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=full)])


@hopper_first
@pytest.mark.parametrize(
    ("dtype", "kept", "reduction"),
    [
        (BF16, 0, "mean"),
        pytest.param(BF16, 200, "none", marks=full),
        pytest.param(BF16, 128, "sum", marks=full),
        pytest.param(FP16, 0, "none", marks=full),
        pytest.param(FP16, 200, "mean", marks=full),
    ],
)
def test_logit_scale(arch, dtype, kept, reduction):
    case = replace(ignoring(random_case(20, 64, 200, dtype, scale=4.0)), logit_scale=0.37)
    run = train(case, arch, kept_columns=kept, reduction=reduction)
    check(case, run, reduction=reduction)
    assert {key.terms for key in run.emulator.keys if isinstance(key, ForwardKey | BackwardKey)} == {
        ("logit_scale",)
    }
    without = replace(case, logit_scale=1.0)
    with pytest.raises(AssertionError):
        check(without, run, reduction=reduction)


@hopper_first
@pytest.mark.parametrize("kept", [0, pytest.param(200, marks=full)])
def test_logit_scale_of_compacted_rows(arch, kept, compacting):
    case = replace(ignoring(random_case(20, 64, 200, BF16, scale=4.0)), logit_scale=0.37)
    run = train(case, arch, kept_columns=kept)
    check(case, run)
    assert any("Gather" in name for name in run.emulator.launched)


both = pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])


def terms_of_keys(run: token_stats.Run) -> set[tuple[str, ...]]:
    return {key.terms for key in run.emulator.keys if isinstance(key, ForwardKey | BackwardKey)}


def each_architecture(*short: tuple[str, torch.dtype]) -> pytest.MarkDecorator:
    """With each dtype; those that are not named in the long sweep."""
    every = [(arch, dtype) for arch in ("sm_90a", "sm_100a") for dtype in (BF16, FP16)]
    return pytest.mark.parametrize(
        ("arch", "dtype"), [pytest.param(*each, marks=[] if each in short else [full]) for each in every]
    )


@each_architecture(("sm_90a", BF16))
def test_softcap(arch, dtype):
    """Of logits on either side of the cap; rows beyond the vocabulary are masked after it."""
    case = ignoring(random_case(21, 72, 137, dtype, scale=4.0))
    numbers = Numbers(case, softcap=5.0, logit_scale=0.8, temperature=0.7)
    if dtype is BF16:
        numbers = replace(numbers, outputs=("logprob", "lse"), differentiated=("logprob", "lse"))
    run = token_stats.run(numbers, arch)
    token_stats.check(numbers, run)
    assert terms_of_keys(run) == {("softcap",), ("softcap", "coefficients")}
    with pytest.raises(AssertionError):
        token_stats.check(replace(numbers, softcap=5.2), run)


@full
@both
@pytest.mark.parametrize("seed", range(20))
def test_softcap_of_any_schedule_of_warps(arch, seed):
    dtype = FP16 if seed % 2 else BF16
    case = ignoring(random_case(70 + seed, 72 + 8 * (seed % 3), 190 + 7 * seed, dtype, scale=6.0, seed=seed))
    differentiated = (("logprob",), ("lse",), ("logprob", "lse"))[seed % 3]
    numbers = Numbers(case, ("logprob", "lse"), differentiated, softcap=3.0)
    token_stats.check(numbers, token_stats.run(numbers, arch, seed=seed, window=0 if seed % 4 else 130))


@each_architecture(("sm_90a", BF16))
def test_entropy(arch, dtype):
    """Beside the log-probability, with a temperature of each row; that of an ignored one does not matter."""
    case = ignoring(random_case(21, 72, 137, dtype, scale=4.0))
    temperature = torch.linspace(0.3, 3, 21)
    temperature[1] = torch.nan
    numbers = Numbers(case, ("logprob", "entropy"), ("logprob", "entropy"), temperature=temperature)
    run = token_stats.run(numbers, arch)
    token_stats.check(numbers, run)
    given = ("row_scale", "coefficients", "gap")
    assert terms_of_keys(run) == {("row_scale", "entropy"), given}
    with pytest.raises(AssertionError):
        token_stats.check(replace(numbers, temperature=temperature * 1.02), run)


# One temperature of all rows has kernels of its own; those of one of each are others' too.
@hopper_first
@pytest.mark.parametrize(
    ("kept", "temperature"),
    [(0, torch.full((12,), 0.7)), pytest.param(0, 0.7, marks=full), (1500, 0.7)],
    ids=["recompute, each", "recompute", "keep"],
)
def test_entropy_of_confident_rows(arch, kept, temperature):
    """One class, which is not in the first tile, lies 20 nats above the rest: it is nearly all of the sum.
    What is kept is relative to the target, which is another class."""
    case, sure = random_case(12, 128, 1500, BF16), 400 + 90 * torch.arange(12)
    hidden = case.input + 20 * case.linear_weight[sure]
    case = replace(case, input=hidden, target=(sure + 700) % 1500 if kept else sure)
    outputs, gradients = ("logprob", "entropy"), ("logprob",) if kept else ("logprob", "entropy")
    numbers = Numbers(case, outputs, gradients, temperature=temperature, entropy_grad=not kept)
    token_stats.check(numbers, token_stats.run(numbers, arch, sms=2, kept_columns=kept))


@hopper_first
def test_entropy_of_raised_rows(arch):
    """Of some tiles the largest logit lies more than 64 binary orders above the target, of others less: they
    are kept relative to different powers of two, whose distance is no normal number of float32."""
    case, target = random_case(21, 72, 1500, BF16), torch.full((21,), 7)
    hidden, weight = case.input.clone(), case.linear_weight.clone()
    hidden[:, 0], weight[:, 0], weight[7] = torch.linspace(0.8, 1.2, 21), 0, 0
    weight[7, 0] = -44
    case = replace(case, input=hidden, linear_weight=weight, target=target)
    numbers = Numbers(case, ("logprob", "entropy"), ("logprob",), entropy_grad=False)
    token_stats.check(numbers, token_stats.run(numbers, arch, sms=2, kept_columns=1500))


NAMES = ("logprob", "lse", "entropy", "total_nll")


@each_architecture(("sm_90a", BF16))
def test_numbers_without_a_gradient(arch, dtype):
    """Ties between and within tiles, and classes that are never taken."""
    case = ignoring(repeating(random_case(21, 72, 330, dtype, scale=4.0)))
    numbers = Numbers(case, ("logprob", *PLAIN), temperature=torch.linspace(0.3, 3, 21), softcap=9.0)
    run = token_stats.run(numbers, arch, window=130)
    token_stats.check(numbers, run)
    assert run.stats.is_top1 is not None
    assert 3 < run.stats.is_top1.sum() < 21
    forward = "softcap", "row_scale", "squares", "logits", "argmax"
    assert terms_of_keys(run) == {forward, ("softcap", "row_scale", "coefficients")}
    bias, target = torch.zeros(330), torch.where(case.target < 0, case.target, 140 + case.target % 60)
    bias[:140], bias[200:] = -torch.inf, -torch.inf
    outputs = "logprob", "log_sum_sq_probs", "argmax", "is_top1"
    numbers = Numbers(replace(case, target=target), outputs, linear_bias=bias.to(dtype))
    token_stats.check(numbers, token_stats.run(numbers, arch, need_dinput=False))


@each_architecture(("sm_90a", BF16))
@pytest.mark.parametrize("kept", [128, pytest.param(330, marks=full)])
def test_numbers_beside_what_is_kept(arch, dtype, kept):
    case = ignoring(repeating(random_case(21, 72, 330, dtype, scale=4.0)))
    case = jumping(case, {300: 100.0 if dtype is BF16 else 12.0}, slice(5, None, 6))
    numbers = Numbers(case, ("logprob", "mean_logit", "argmax", "is_top1"), temperature=0.7)
    token_stats.check(numbers, token_stats.run(numbers, arch, kept_columns=kept))


TERMS_OF_ONES_OWN = (LogCap(3.0), Tanh(5.0), Knee(0.5), SoftPlus())


# Kernels are compiled for each term. By default each is in one of the next two tests, of which the second
# recomputes what was not kept, too; the others are in the long sweep.
RECOMPUTED = (LogCap,)
KEPT = ((Tanh, "one"), (Knee, "each"), (SoftPlus, "each"))


@pytest.mark.parametrize(
    "term",
    [pytest.param(term, marks=[] if type(term) in RECOMPUTED else [full]) for term in TERMS_OF_ONES_OWN],
    ids=lambda term: type(term).__name__,
)
@each_architecture(("sm_90a", BF16))
def test_a_term_of_ones_own(arch, dtype, term):
    """With a scale before it and a temperature behind it, and rows beyond the vocabulary."""
    case = ignoring(random_case(21, 72, 137, dtype, scale=4.0))
    names = ("logprob", "lse")
    numbers = Numbers(case, names, names, softcap=term.key, logit_scale=0.8, temperature=0.7)
    run = token_stats.run(numbers, arch)
    token_stats.check(numbers, run)
    own = kernel_term(term)
    assert terms_of_keys(run) == {(own,), (own, "coefficients")}
    with pytest.raises(AssertionError):
        token_stats.check(replace(numbers, logit_scale=0.82), run)


@pytest.mark.parametrize(
    ("term", "temperature"),
    [
        pytest.param(
            term,
            value,
            id=f"{type(term).__name__}-{name}",
            marks=[] if (type(term), name) in KEPT else [full],
        )
        for term in TERMS_OF_ONES_OWN
        for name, value in (("one", 0.7), ("each", torch.linspace(0.3, 3, 21)))
    ],
)
@hopper_first
def test_what_keeps_a_term_of_ones_own(arch, term, temperature):
    """Exponentials times slopes, which K and sums know nothing of; some rows are raised."""
    case = jumping(ignoring(random_case(21, 72, 330, BF16, scale=4.0)), {200: 100.0}, slice(5, None, 6))
    numbers = Numbers(case, softcap=term.key, logit_scale=0.8, temperature=temperature)
    run = token_stats.run(numbers, arch, kept_columns=256)
    token_stats.check(numbers, run)
    assert any("Finish" in name for name in run.emulator.launched)
    with pytest.raises(AssertionError):
        token_stats.check(replace(numbers, logit_scale=0.82), run)


@full
@both
@pytest.mark.parametrize("seed", range(20))
def test_what_keeps_a_term_of_ones_own_of_any_schedule_of_warps(arch, seed):
    """Some in stripes, behind which columns are recomputed; rows that are raised have other factors."""
    n, V = 30 + 7 * seed, 190 + 37 * seed
    case = ignoring(random_case(n, 72 + 8 * (seed % 3), V, BF16, scale=4.0, seed=seed))
    if seed % 5 < 2:
        case = jumping(case, {150: 60.0}, slice(5, None, 6))
    z_loss = 0.02 if seed % 3 else 0.0
    numbers = Numbers(
        case,
        LOSS if z_loss else ("logprob",),
        z_loss=z_loss,
        logit_scale=0.8,
        softcap=TERMS_OF_ONES_OWN[seed % 4].key,
        temperature=torch.linspace(0.3, 3, n) if seed % 4 == seed // 5 else 0.7,
        class_weight=torch.linspace(0, 2, V) if z_loss and seed % 5 == 2 else None,
        linear_bias=torch.linspace(-1, 1, V).to(BF16) if seed % 3 == 1 else None,
    )
    needs = {"need_dinput": seed % 7 != 3, "need_dweight": seed % 7 != 5}
    kept, window = V if seed % 2 else max(V // 256, 1) * 128, 128 if seed % 3 == 1 else 0
    run = token_stats.run(numbers, arch, seed=seed, kept_columns=kept, window=window, **needs)
    assert any("Finish" in name for name in run.emulator.launched)
    token_stats.check(numbers, run)


@hopper_first
def test_a_term_of_ones_own_of_masked_classes(arch):
    """Infinitely far below the others, as a bias says."""
    case, bias = random_case(21, 72, 330, BF16), torch.zeros(330)
    bias[200:] = -torch.inf
    case = replace(case, target=case.target % 200)
    numbers = Numbers(case, linear_bias=bias.to(BF16), softcap=LogCap(3.0).key)
    token_stats.check(numbers, token_stats.run(numbers, arch, kept_columns=256))


@each_architecture(("sm_100a", BF16))
def test_a_term_of_ones_own_beside_others(arch, dtype):
    case, names = ignoring(random_case(45, 72, 201, dtype, scale=4.0)), ("logprob", "entropy", "topk_logprob")
    numbers = Numbers(
        case,
        names,
        names,
        linear_bias=torch.linspace(-3, 3, 201).to(dtype),
        softcap=LogCap(2.0).key,
        temperature=torch.linspace(0.3, 3, 45),
        topk_ids=given_ids(case, 5).int(),
    )
    run = token_stats.run(numbers, arch, window=130)
    token_stats.check(numbers, run)
    with pytest.raises(AssertionError):
        token_stats.check(replace(numbers, softcap=LogCap(2.1).key), run)


@each_architecture(("sm_90a", BF16), ("sm_100a", FP16))
def test_topk(arch, dtype):
    """Of a row whose other coefficients are 0 too, and of one that is ignored."""
    case = ignoring(random_case(21, 72, 330, dtype, scale=4.0))
    ids, names = given_ids(case, 9), ("logprob", "topk_logprob")
    numbers = Numbers(case, names, names, topk_ids=ids)
    run = token_stats.run(numbers, arch, window=130)
    token_stats.check(numbers, run)
    assert terms_of_keys(run) == {("topk",), ("coefficients", "topk")}
    wrong = ids.clone()
    wrong[2, 4] += 1
    with pytest.raises(AssertionError):
        token_stats.check(replace(numbers, topk_ids=wrong), run)


# By default those of a LogitTerm above, and of a softcap without a bias below.
@full
@each_architecture()
def test_topk_of_other_logits(arch, dtype):
    """Capped, with a temperature of each row and a bias, whose gradient has that of the ids."""
    case = ignoring(random_case(45, 72, 201, dtype, scale=4.0))
    numbers = Numbers(
        case,
        ("topk_logprob", "entropy", "lse"),
        ("topk_logprob", "entropy"),
        linear_bias=torch.linspace(-3, 3, 201).to(dtype),
        softcap=6.0,
        temperature=torch.linspace(0.3, 3, 45),
        topk_ids=given_ids(case, 5).int(),
    )
    token_stats.check(numbers, token_stats.run(numbers, arch, window=130))


@each_architecture(("sm_100a", BF16))
def test_topk_in_slabs(arch, dtype, monkeypatch):
    """Of two tiles of three slabs on Blackwell: each visits its own blocks of tokens."""
    narrow_plans(monkeypatch, tile_n=96)
    case = ignoring(random_case(110, 40, 137, dtype, scale=4.0))
    numbers = Numbers(case, ("topk_logprob",), ("topk_logprob",), topk_ids=given_ids(case, 5))
    token_stats.check(numbers, token_stats.run(numbers, arch))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=full) for seed in range(1, 8))])
def test_numbers_of_tiles_between(monkeypatch, seed):
    """Of widths that forwards alone have, multiples of 8 tokens: ids' blocks of 16 lie in two tiles."""
    row = architecture("sm_90a")
    beside = next(config for config in row.forward_configs if config.cluster_n == 2)
    tile = replace(beside, tile_n=(24, 40)[seed % 2], stages=3)
    monkeypatch.setattr(forward_plans, "choose_config", lambda *_: tile)
    forget_plans()
    case = ignoring(random_case(90 + seed, 40, 330, BF16, scale=4.0, seed=seed))
    n = len(case.target)
    names = ("logprob", "entropy", "topk_logprob")
    numbers = Numbers(
        case,
        (*names, *PLAIN),
        names,
        temperature=torch.linspace(0.3, 3, n),
        softcap=(9.0, LogCap(4.0).key, None)[seed % 3],
        topk_ids=given_ids(case, 7, seed),
    )
    run = token_stats.run(numbers, "sm_90a", seed=seed, window=130 if seed % 4 == 3 else 0)
    token_stats.check(numbers, run)
    assert any(isinstance(key, ForwardKey) and key.config == tile for key in run.emulator.keys)


@full
@both
@pytest.mark.parametrize("seed", range(20))
def test_topk_of_any_schedule_of_warps(arch, seed):
    dtype = FP16 if seed % 2 else BF16
    n, V, K = 30 + 7 * seed, 190 + 37 * seed, (5, 1 + 64 * (seed % 2), 300)[seed % 3]
    case = ignoring(random_case(n, 72 + 8 * (seed % 3), V, dtype, scale=6.0, seed=seed))
    ids = given_ids(case, K, seed) if K > 4 else torch.randint(-3, V + 3, (n, K))
    numbers = Numbers(
        case,
        (*LOSS, "topk_logprob"),
        (("topk_logprob",), ("logprob", "topk_logprob"))[seed % 2],
        softcap=10.0 if seed % 3 == 0 else None,
        temperature=torch.linspace(0.3, 3, n) if seed % 4 == 1 else 0.8,
        linear_bias=torch.linspace(-1, 1, V).to(dtype) if seed % 3 == 1 else None,
        topk_ids=ids,
    )
    needs = {"need_dinput": seed % 7 != 3, "need_dweight": seed % 7 != 5}
    run = token_stats.run(numbers, arch, seed=seed, window=130 if seed % 2 else 0, **needs)
    token_stats.check(numbers, run)


@each_architecture(("sm_90a", BF16))
def test_topk_of_compacted_rows(arch, dtype, compacting):
    case = ignoring(random_case(20, 64, 200, dtype, scale=4.0))
    names = ("logprob", "topk_logprob")
    numbers = Numbers(case, names, names, topk_ids=given_ids(case, 6))
    run = token_stats.run(numbers, arch)
    token_stats.check(numbers, run)
    assert any("Gather" in name for name in run.emulator.launched)


@each_architecture(("sm_90a", FP16))
def test_numbers_by_chunks_of_tokens(arch, dtype, monkeypatch):
    """Each finds its own tokens' coefficients; bfloat16's without a compaction, as there is no dweight."""
    two_sweeps(monkeypatch, 64, 128)
    case = ignoring(random_case(90, 72, 137, dtype, scale=4.0))
    temperature, names, ids = torch.linspace(0.3, 3, 90), (*NAMES, "topk_logprob"), given_ids(case, 7)
    numbers = Numbers(case, names, names, temperature=temperature, softcap=8.0, topk_ids=ids)
    token_stats.check(numbers, token_stats.run(numbers, arch, need_dweight=dtype is FP16))


@full
@both
@pytest.mark.parametrize("seed", range(20))
def test_numbers_of_any_schedule_of_warps(arch, seed):
    """Of several windows, so that rows have several partials, and stripes; some are frozen."""
    dtype = FP16 if seed % 2 else BF16
    n, V = 30 + 7 * seed, 190 + 37 * seed
    case = ignoring(random_case(n, 72 + 8 * (seed % 3), V, dtype, scale=6.0, seed=seed))
    differentiated = tuple(name for i, name in enumerate(NAMES) if (seed + 1) >> i & 1) or NAMES
    plain = PLAIN if seed % 5 != 2 else tuple(name for name in PLAIN if name != "mean_logit")
    numbers = Numbers(
        case,
        (*NAMES, *plain),
        differentiated,
        softcap=10.0 if seed % 3 == 0 else None,
        temperature=torch.linspace(0.3, 3, n) if seed % 4 == 1 else 0.8,
        class_weight=torch.linspace(0, 2, V) if seed % 5 == 2 else None,
        linear_bias=torch.linspace(-1, 1, V).to(dtype) if seed % 3 == 1 else None,
    )
    needs = {"need_dinput": seed % 7 != 3, "need_dweight": seed % 7 != 5}
    run = token_stats.run(numbers, arch, seed=seed, window=130 if seed % 2 else 0, **needs)
    token_stats.check(numbers, run)


@each_architecture()
def test_totals(arch, dtype):
    """What label smoothing needs; with class weights in one of two."""
    case = ignoring(random_case(21, 72, 137, dtype, scale=4.0))
    weight = torch.linspace(0, 2, 137) if dtype is BF16 else None
    names = ("logprob", "total_nll")
    numbers = Numbers(case, names, names, class_weight=weight, softcap=6.0)
    run = token_stats.run(numbers, arch)
    token_stats.check(numbers, run)
    ignored = case.target == case.ignore_index
    for name in names:
        assert not bool(getattr(run.stats, name)[ignored].signbit().any()), name
    with pytest.raises(AssertionError):
        token_stats.check(replace(numbers, class_weight=torch.linspace(0, 3, 137)), run)


LARGE = [
    config
    for config in architecture("sm_90a").configs[-1].forwards(False)
    if (config.tile_m, config.tile_n, config.cluster_n) in ((128, 176, 2), (128, 200, 2), (192, 128, 2))
]
assert len(LARGE) == 3


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(each, id=f"{each.tile_m}x{each.tile_n}", marks=[] if each.tile_m == 192 else full)
        for each in LARGE
    ],
)
@pytest.mark.parametrize("weighted", [False, pytest.param(True, marks=full)])
def test_totals_of_large_tiles(monkeypatch, config, weighted):
    """In registers with 176 tokens, else in shared memory. Of the last tile's warps one has some classes, the
    others none; without weights it has code of its own."""
    config = replace(config, stages=3)
    monkeypatch.setattr(forward_plans, "choose_config", lambda *_: config)
    forget_plans()
    V = 10 * config.tile_m + 21
    case = random_case(config.cluster_columns // 2 + 30, 72, V, BF16)
    case = jumping(case, {V - 5: 150.0}, slice(0, None, 4))
    names = ("logprob", "total_nll")
    weight = torch.linspace(0, 2, V) if weighted else None
    numbers = Numbers(ignoring(case), names, names, class_weight=weight)
    run = token_stats.run(numbers, "sm_90a", sms=config.cluster_size, need_dinput=False, need_dweight=False)
    assert any(isinstance(key, ForwardKey) and key.config == config for key in run.emulator.keys)
    token_stats.check(numbers, run)


@each_architecture(("sm_100a", BF16))
@pytest.mark.parametrize(
    "way", ["stripes", pytest.param("dweight", marks=full), pytest.param("chunks", marks=full)]
)
def test_linear_bias(arch, dtype, way, monkeypatch):
    """And its gradient, in several stripes, with large numbers that tokens beyond the last must not add."""
    case = ignoring(random_case(70 if way == "chunks" else 21, 72, 201, dtype, scale=3.0))
    bias = torch.linspace(-3, 3, 201)
    bias[::17] = 95.0
    bias = (bias * (0.05 if dtype is FP16 else 1.0)).to(dtype)
    if way == "chunks":
        two_sweeps(monkeypatch, 64, 128)
    numbers = Numbers(case, ("logprob", "lse"), ("logprob", "lse"), linear_bias=bias, logit_scale=0.7)
    window = 130 if way == "stripes" else 0
    run = token_stats.run(numbers, arch, window=window, need_dinput=way != "dweight")
    token_stats.check(numbers, run)
    assert run.gradients[2] is not None
    with pytest.raises(AssertionError):
        token_stats.check(replace(numbers, linear_bias=bias * 1.1), run)


ROW_SCALE = torch.linspace(0.3, 3, 21)
ROW_SCALE[1] = torch.nan
"""Of a row that is ignored."""
LOSS = ("logprob", "lse")


def kept_numbers(dtype: torch.dtype) -> dict[str, Numbers]:
    case = ignoring(random_case(21, 72, 201, dtype, scale=4.0))
    weight, bias = torch.linspace(0, 2, 201), torch.linspace(-3, 3, 201)
    bias[::17] = 9.0
    bias = (bias * (0.05 if dtype is FP16 else 1.0)).to(dtype)
    of_loss = {"outputs": LOSS, "z_loss": 0.05}
    return {
        "every": Numbers(
            case, **of_loss, class_weight=weight, linear_bias=bias, temperature=ROW_SCALE, logit_scale=0.7
        ),
        "temperatures": Numbers(case, temperature=ROW_SCALE),
        "z_loss": Numbers(case, **of_loss),
        "bias": Numbers(case, linear_bias=bias),
        "entropy": Numbers(
            case, ("logprob", "entropy"), ("logprob",), temperature=ROW_SCALE, entropy_grad=False
        ),
        "cap": Numbers(case, softcap=5.0, logit_scale=0.8, temperature=0.7),
        "cap and": Numbers(
            case,
            **of_loss,
            softcap=5.0,
            class_weight=weight,
            linear_bias=bias,
            temperature=ROW_SCALE,
            logit_scale=0.7,
        ),
        "cap and entropy": Numbers(
            case,
            ("logprob", "entropy"),
            ("logprob",),
            softcap=5.0,
            temperature=ROW_SCALE,
            entropy_grad=False,
        ),
    }


WITH_TERMS = "every", "temperatures", "z_loss", "bias", "entropy", "cap", "cap and", "cap and entropy"
SHORT_KEPT = [("every", 128, "sm_90a", BF16), ("cap", 128, "sm_90a", BF16)]


@pytest.mark.parametrize(
    ("which", "kept", "arch", "dtype"),
    [
        pytest.param(*each, marks=[] if each in SHORT_KEPT else [full])
        for each in itertools.product(WITH_TERMS, (128, 201), ("sm_90a", "sm_100a"), (BF16, FP16))
    ],
)
def test_kept(which, kept, arch, dtype):
    numbers = kept_numbers(dtype)[which]
    run = token_stats.run(numbers, arch, kept_columns=kept)
    token_stats.check(numbers, run)
    for changed in (
        {"z_loss": 0.06},
        {"temperature": ROW_SCALE * 1.02},
        {"class_weight": torch.linspace(0, 3, 201)},
        {"softcap": 5.2},
    ):
        if which.startswith("cap") and "softcap" in changed:
            with pytest.raises(AssertionError):
                token_stats.check(replace(numbers, **changed), run)
        if which == "every" and "softcap" not in changed:
            with pytest.raises(AssertionError):
                token_stats.check(replace(numbers, **changed), run)


@full
@each_architecture()
@pytest.mark.parametrize("kept", [128, 201])
def test_kept_rows_that_rise_above_their_reference(arch, dtype, kept):
    """By logits, whose sums are then relative to other bases, and by the bias."""
    case = ignoring(random_case(21, 72, 201, dtype, scale=0.5))
    heights = {20: 100.0, 150: 300.0} if dtype is BF16 else {20: 30.0, 150: 60.0}
    rising = jumping(case, heights, slice(0, None, 2))
    bias = torch.zeros(201)
    for column, height in heights.items():
        bias[column] = height
    of_loss: dict[str, Any] = {"outputs": LOSS, "z_loss": 1e-3}
    for numbers in (
        Numbers(rising, **of_loss),
        Numbers(rising, ("logprob", "entropy"), ("logprob",), temperature=0.7, entropy_grad=False),
        Numbers(case, **of_loss, linear_bias=bias.to(dtype)),
        Numbers(rising, softcap=200.0),
        Numbers(rising, LOSS, z_loss=1e-3, softcap=100.0 if dtype is BF16 else 30.0, temperature=0.4),
        Numbers(case, softcap=100.0, linear_bias=bias.to(dtype)),
    ):
        token_stats.check(numbers, token_stats.run(numbers, arch, kept_columns=kept))


@full
@each_architecture()
@pytest.mark.parametrize("kept", [128, 201])
@pytest.mark.parametrize(
    ("height", "cap"), [(60.0, 30.0), (300.0, 30.0), (1e4, 50.0), (60.0, 2.0), (3.0, 1e4)]
)
def test_kept_logits_about_their_cap(arch, dtype, kept, height, cap):
    """Confident rows, logits of which most are far above the cap and have no slope, and far below."""
    # Above its caps by more, most of what float16 keeps is subnormal.
    height = min(height, 300.0) if dtype is FP16 else height
    case = scaled(ignoring(random_case(21, 72, 201, dtype, scale=4.0)), height)
    numbers = Numbers(case, softcap=cap)
    token_stats.check(numbers, token_stats.run(numbers, arch, kept_columns=kept))


@full
def test_the_gradient_of_a_bias_alone_is_not_of_what_was_kept():
    """Neither of the operands' gradients is asked for: the streaming path computes that."""
    numbers = kept_numbers(BF16)["every"]
    run = token_stats.run(numbers, "sm_90a", kept_columns=128, need_dinput=False, need_dweight=False)
    token_stats.check(numbers, run)
    assert run.gradients[2] is not None


@full
@pytest.mark.parametrize(("arch", "dtype"), [("sm_90a", FP16), ("sm_100a", BF16)])
def test_kept_where_the_softmax_has_no_coefficient(arch, dtype):
    """1 + 2 z_loss lse is 0, or next to it, with either sign."""
    for scale in (0.0, 0.01):
        case = ignoring(random_case(21, 72, 137, dtype, scale=scale))
        numbers = Numbers(case, LOSS, z_loss=-1 / (2 * math.log(137)))
        token_stats.check(numbers, token_stats.run(numbers, arch, kept_columns=137))


@full
@both
@pytest.mark.parametrize("seed", range(20))
def test_kept_of_any_schedule_of_warps(arch, seed):
    dtype = FP16 if seed % 2 else BF16
    n, V = 30 + 7 * seed, 190 + 37 * seed
    case = ignoring(random_case(n, 72 + 8 * (seed % 3), V, dtype, scale=6.0, seed=seed))
    z_loss, smoothing = 0.02 if seed % 3 else 0.0, 0.2 if seed % 7 > 3 and dtype is BF16 else 0.0
    numbers = Numbers(
        case,
        ("logprob", *("lse",) * bool(z_loss), *("total_nll",) * bool(smoothing)),
        z_loss=z_loss,
        label_smoothing=smoothing,
        temperature=torch.linspace(0.3, 3, n) if seed % 4 == 1 else 0.8,
        class_weight=torch.linspace(0, 2, V) if z_loss and not smoothing and seed % 5 == 2 else None,
        linear_bias=torch.linspace(-1, 1, V).to(dtype) if seed % 3 == 1 else None,
        softcap=4.0 if not smoothing and seed % 2 == seed // 10 else None,
    )
    needs = {"need_dinput": seed % 7 != 3, "need_dweight": seed % 7 != 5}
    kept = V if seed % 2 else V // 256 * 128
    run = token_stats.run(numbers, arch, seed=seed, kept_columns=kept, **needs)
    token_stats.check(numbers, run)


OFFSET = "common offset of 10000"
CORNERS = {
    OFFSET: lambda: offset(random_case(20, 64, 137, BF16), 10000),
    "logits of +-60": lambda: scaled(random_case(20, 64, 137, BF16), 60),
    "logits of +-1e4": lambda: scaled(random_case(20, 64, 137, BF16, scale=8), 1e4),
    "one class": lambda: random_case(20, 64, 1, BF16),
    "one token": lambda: random_case(1, 64, 137, BF16),
    "int32 targets": lambda: replace(
        random_case(20, 64, 137, BF16), target=random_case(20, 64, 137, BF16).target.int()
    ),
}


@full
@both
@pytest.mark.parametrize("corner", CORNERS)
def test_corners(arch, corner):
    case = CORNERS[corner]()
    differentiated = ("logprob", "lse", "total_nll") if corner == "one class" else NAMES
    numbers = Numbers(case, NAMES, differentiated)
    token_stats.check(numbers, token_stats.run(numbers, arch, window=128))


# Of one class the smoothed loss is 0, and its gradients are what rounding leaves.
@full
@both
@pytest.mark.parametrize("corner", [each for each in CORNERS if each not in ("one class", OFFSET)])
def test_corners_of_what_is_smoothed(arch, corner):
    numbers = Numbers(CORNERS[corner](), ("logprob", "total_nll"), label_smoothing=0.9)
    for kept in (128, 137):
        token_stats.check(numbers, token_stats.run(numbers, arch, kept_columns=kept))


@full
@both
def test_smoothing_where_the_target_is_far_from_the_others(arch):
    """What its logit alone is rounded by is not what the others are."""
    case = replace(random_case(20, 64, 400, BF16, scale=1.0), target=torch.full((20,), 7))
    weight, hidden = case.linear_weight.clone(), case.input.clone()
    hidden[:, 0], weight[:, 0], weight[7, 0] = 1, 0, -30000
    below = torch.zeros(400)
    below[7] = -300
    total = ("logprob", "total_nll")
    far = replace(case, input=hidden, linear_weight=weight)
    for numbers in (
        Numbers(case, total, label_smoothing=1.0, linear_bias=below.to(BF16)),
        Numbers(far, total, label_smoothing=0.9),
    ):
        run = token_stats.run(numbers, arch, kept_columns=400)
        values, _ = token_stats.by_torch(numbers, torch.float64, rounded=False)
        plain, _ = token_stats.by_torch(numbers, torch.float32, rounded=True)
        assert run.stats.total_nll is not None
        assert_close("total_nll", run.stats.total_nll, values["total_nll"], plain["total_nll"])


@both
@pytest.mark.parametrize("kept", [128, pytest.param(137, marks=full)])
def test_what_tensor_cores_lose_of_an_offset_is_not_in_a_smoothed_loss(arch, kept, monkeypatch):
    """Here the 131072th part of each logit."""
    exact = wgmma.multiplied
    for module in (wgmma, tcgen05):
        monkeypatch.setattr(module, "multiplied", lambda a, b: exact(a, b) * np.float32(1 - 2.0**-17))
    case = CORNERS[OFFSET]()
    numbers = Numbers(case, ("logprob", "total_nll"), label_smoothing=0.9)
    run = token_stats.run(numbers, arch, kept_columns=kept)
    values, gradients = token_stats.by_torch(numbers, torch.float64, rounded=False)
    plain, rounded = token_stats.by_torch(numbers, torch.float32, rounded=True)
    total, given = run.stats.total_nll, values["total_nll"]
    assert total is not None
    # Four units in the last place of a logit, a third of 1% of the loss.
    units = 4 * 137 * 10000 * 2.0**-23 / float(given.mean())
    assert units < 0.005 < 10000 * 2.0**-17 * 137 / float(given.mean())
    assert_close("total_nll", total, given, plain["total_nll"], rounding=units)
    # The first feature is the offset, beside which nothing is left.
    for name, mine in zip(token_stats.NAMES[:2], run.gradients, strict=False):
        assert mine is not None
        own = rounded[name][:, 1:].to(mine.dtype)
        assert_close(name, mine[:, 1:], gradients[name][:, 1:], own)


# Before a test's fixture has narrow tiles in their place.
WIDE = {
    arch: next(each for each in architecture(arch).token_configs if each.tile_n == tokens)
    for arch, tokens in (("sm_90a", 160), ("sm_100a", 256))
}


@hopper_first
def test_all_numbers_of_wide_tiles(arch, monkeypatch):
    """Of more tokens than the warps' numbers have room for at once where they are merged."""
    config = WIDE[arch]
    parts = 2 + sum(MORE_PARTS.values())
    assert 4 * WARPGROUP * parts * config.tile_n // 32 > BOXES * WARPS * BOX_BYTES
    monkeypatch.setattr(forward_plans, "choose_config", lambda *_: replace(config, stages=2))
    case = ignoring(random_case(190, 64, 330, BF16, scale=4.0))
    differentiable = ("logprob", "lse", "entropy", "total_nll")
    numbers = Numbers(case, (*differentiable, *PLAIN), differentiable, temperature=0.7)
    token_stats.check(numbers, token_stats.run(numbers, arch))


@hopper_first
def test_sums_of_a_bias_in_two_slabs(arch):
    """With nan where a token is ignored."""
    case = ignoring(random_case(270, 136, 250, BF16, scale=4.0))
    hidden = case.input.clone()
    hidden[case.target == case.ignore_index] = torch.nan
    numbers = Numbers(
        replace(case, input=hidden), LOSS, z_loss=0.02, linear_bias=torch.linspace(-1, 1, 250).to(BF16)
    )
    run = token_stats.run(numbers, arch, kept_columns=128)
    token_stats.check(replace(numbers, case=case), run)
    assert sum("SlabSums" in name for name in run.emulator.launched) == 1


@full
@both
def test_columns_of_minus_infinity(arch):
    """Half of the logits and a whole tile of them, which count as nothing but in a total."""
    case = minus_infinity(random_case(20, 64, 300, BF16), 128)
    names = ("logprob", "entropy", "lse")
    numbers = Numbers(case, names, names)
    run = token_stats.run(numbers, arch)
    values, gradients = token_stats.by_torch(numbers, torch.float64, rounded=False)
    plain, rounded = token_stats.by_torch(numbers, torch.float32, rounded=True)
    for name in names:
        assert_close(name, getattr(run.stats, name), values[name], plain[name])
    dinput, dweight, _ = run.gradients
    assert dinput is not None
    assert dweight is not None
    # What 0 times -inf makes of dinput stays in its feature.
    assert_close("dinput", dinput[:, 1:], gradients["dinput"][:, 1:], rounded["dinput"][:, 1:].bfloat16())
    assert_close("dweight", dweight, gradients["dweight"], rounded["dweight"].bfloat16())
    total = token_stats.run(replace(numbers, outputs=("total_nll",), differentiated=("total_nll",)), arch)
    assert total.stats.total_nll is not None
    assert bool(total.stats.total_nll.isposinf().all())


@full
@both
def test_a_target_out_of_range_spoils_its_own_row(arch):
    case = ignoring(random_case(20, 64, 137, BF16))
    case.target[3] = 137
    numbers = Numbers(case, NAMES, NAMES, softcap=6.0)
    run = token_stats.run(numbers, arch)
    sick = torch.arange(20) == 3
    for name in NAMES:
        assert torch.equal(getattr(run.stats, name).isnan(), sick)
    dinput, dweight, _ = run.gradients
    assert dinput is not None
    assert dweight is not None
    assert torch.equal(dinput.isnan().any(1), sick)
    assert bool(dweight.isnan().all())
