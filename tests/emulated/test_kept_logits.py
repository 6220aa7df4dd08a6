"""Kept logits, of which the backward makes dlogits where exponentials would not do, against float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from cute_lce.arch import Gpu, KernelConfig
from cute_lce.launch import token_stats as launch
from cute_lce.launch.topk import Topk
from cute_lce.plan import gemm, overlap
from cute_lce.plan.kernels import BackwardKey, ForwardKey
from cute_lce.plan.problem import Problem, round_up
from tests.emulated import token_stats
from tests.emulated.backward import half_boxes
from tests.emulated.forward import ignoring, minus_infinity, scaled
from tests.emulated.token_stats import CORNERS, PLAIN, TEMPERATURES, Numbers, given_ids
from tests.logit_terms import LogCap
from tests.numerics import assert_close, random_case

BF16 = torch.bfloat16
full = pytest.mark.emulator_full
pytestmark = pytest.mark.usefixtures("poisoned_empty", "narrow")
both = pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
hopper_first = pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=full)])
blackwell_first = pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=full), "sm_100a"])
RL, TOP = ("logprob", "entropy"), ("topk_logprob", "entropy")
LSE, IDS = ("logprob", "lse"), ("logprob", "topk_logprob")


def run(numbers: Numbers, arch: str, kept: int, **options: Any) -> token_stats.Run:
    """Both passes, whose kernels keep logits."""
    assert launch.keeps_logits(numbers.operands, numbers.options)
    found = token_stats.run(numbers, arch, kept_columns=kept, **options)
    keys = [key for key in found.emulator.keys if isinstance(key, ForwardKey | BackwardKey)]
    assert len(keys) == 2
    assert all("kept_logits" in key.terms for key in keys)
    stripes = sum("DlogitsOfKept" in name for name in found.emulator.launched)
    window = round_up(options.get("window") or kept, 128)
    assert stripes == (1 if options.get("overwrites") else -(-kept // window))
    return found


def losses() -> dict[str, Numbers]:
    case, weight = ignoring(random_case(21, 72, 201, BF16, scale=4.0)), torch.linspace(0, 2, 201)
    of_loss, bias = ("logprob", "total_nll"), torch.linspace(-3, 3, 201).to(BF16)
    ids = given_ids(case, 9)
    ids[:, 0], ids[::2, -1] = case.target, case.target[::2]
    target = case.target.masked_fill(case.target == case.ignore_index, 7)
    return {
        "entropy": Numbers(case, RL, RL, temperature=0.7),
        "every number": Numbers(
            case, (*RL, "lse", *PLAIN), (*RL, "lse"), temperature=TEMPERATURES, logit_scale=0.7
        ),
        "lse": Numbers(case, (*RL, "lse"), LSE),
        "lse of a target": Numbers(case, LSE, LSE, temperature=0.7),
        "lse alone": Numbers(case, ("lse",), ("lse",)),
        "numbers beside": Numbers(
            case, (*LSE, "entropy", "argmax", "mean_logit"), LSE, entropy_grad=False, temperature=TEMPERATURES
        ),
        "entropy alone": Numbers(case, ("entropy",), ("entropy",)),
        "cap": Numbers(case, RL, RL, softcap=5.0, logit_scale=-0.8, temperature=0.7),
        "cap and temperatures": Numbers(case, RL, RL, softcap=5.0, temperature=TEMPERATURES),
        "own": Numbers(case, RL, RL, softcap=LogCap(2.0).key, logit_scale=0.8, temperature=TEMPERATURES),
        "smoothing": Numbers(case, of_loss, label_smoothing=0.2),
        "smoothing and": Numbers(
            case,
            (*LSE, "total_nll"),
            label_smoothing=0.2,
            z_loss=0.02,
            linear_bias=bias,
            temperature=TEMPERATURES,
            logit_scale=0.7,
        ),
        "smoothing and class weights": Numbers(case, of_loss, label_smoothing=0.2, class_weight=weight),
        "bias": Numbers(case, RL, RL, linear_bias=bias, temperature=TEMPERATURES),
        "given ids": Numbers(case, TOP, TOP, topk_ids=given_ids(case, 9), temperature=0.7),
        "ids of a target": Numbers(case, IDS, IDS, topk_ids=ids, temperature=0.7),
        "ids alone": Numbers(case, ("topk_logprob",), ("topk_logprob",), topk_ids=given_ids(case, 40)),
        "ids without a gradient": Numbers(case, IDS, ("logprob",), topk_ids=ids),
        "ids beside a target": Numbers(case, IDS, ("topk_logprob",), topk_ids=ids),
        "cap and ids": Numbers(case, IDS, IDS, topk_ids=ids, softcap=5.0, logit_scale=-0.8),
        "own and ids": Numbers(
            case, IDS, IDS, topk_ids=ids, softcap=LogCap(2.0).key, logit_scale=0.8, temperature=TEMPERATURES
        ),
        "all at once": Numbers(
            case,
            (*RL, "topk_logprob", "lse", *PLAIN),
            (*RL, "topk_logprob", "lse"),
            topk_ids=given_ids(case, 40),
            linear_bias=bias,
            softcap=5.0,
            temperature=TEMPERATURES,
        ),
        "ignored class": Numbers(replace(case, target=target, ignore_index=7), RL, RL),
    }


SHORT = ("all at once", 128, "sm_90a"), ("own", 201, "sm_100a"), ("smoothing and", 128, "sm_90a")
RL_BESIDE = "entropy", "some", "sm_100a"


def pieces_of(width: int) -> Callable[..., list[overlap.Piece]]:
    """Instead of plan.overlap.pieces: pieces of so many classes."""

    def pieces(gpu: Gpu, config: KernelConfig, problem: Problem, columns: int) -> list[overlap.Piece]:
        assert config.has_spare_warps
        parts = [(first, min(width, columns - first)) for first in range(0, columns, width)]
        sizes = problem.d, problem.n
        return [overlap.Piece(*each, gemm.plan_dweight(gpu, config, each[1], *sizes)) for each in parts]

    return pieces


@pytest.mark.parametrize(
    ("which", "kept", "arch"),
    [
        pytest.param(*each, marks=[] if each in SHORT else [full])
        for each in itertools.product(losses(), (128, 201), ("sm_90a", "sm_100a"))
    ],
)
def test_losses(which, kept, arch):
    numbers = losses()[which]
    found = run(numbers, arch, kept, overwrites=(kept == 128) == (arch == "sm_90a"))
    token_stats.check(numbers, found)
    for name, changed in (
        ("temperature", 0.72 if isinstance(numbers.temperature, float) else TEMPERATURES * 1.02),
        ("softcap", LogCap(2.2).key if which == "own" else 5.2),
        ("class_weight", torch.linspace(0, 2.5, 201)),
        ("label_smoothing", 0.21),
        ("z_loss", 0.06),
    ):
        value = getattr(numbers, name)
        if isinstance(value, torch.Tensor) or value not in (None, 0.0):
            with pytest.raises(AssertionError):
                token_stats.check(replace(numbers, **{name: changed}), found)


class Cancelling(Numbers):
    """Upstream gradients that leave nothing of the softmax, exactly in some rows, and nearly in others."""

    @property
    def upstream(self) -> dict[str, torch.Tensor]:
        found = super().upstream
        lse = found["logprob"].clone()
        if self.topk_ids is not None:
            V, ids = len(self.case.linear_weight), self.topk_ids
            lse += torch.where((ids >= 0) & (ids < V), found["topk_logprob"], 0).sum(1)
        return found | {"lse": lse + torch.where(torch.arange(len(lse)) % 2 == 0, 0.0, 1e-5)}


@full
@both
@pytest.mark.parametrize("names", [LSE, (*IDS, "lse")])
def test_no_share_of_the_softmax(arch, names):
    case = ignoring(random_case(21, 72, 201, BF16, scale=4.0))
    ids = given_ids(case, 9) if "topk_logprob" in names else None
    numbers = Cancelling(case, names, names, topk_ids=ids)
    token_stats.check(numbers, run(numbers, arch, 201))


@pytest.mark.parametrize("tile_n", [40, pytest.param(56, marks=full)])
def test_tiles_that_end_with_half_a_box(tile_n, monkeypatch):
    half_boxes(monkeypatch, tile_n)
    numbers = Numbers(ignoring(random_case(187, 72, 201, BF16, scale=3.0)), RL, RL)
    found = run(numbers, "sm_90a", 201)
    assert tile_n in {key.config.tile_n for key in found.emulator.keys if isinstance(key, ForwardKey)}
    token_stats.check(numbers, found)


@pytest.mark.parametrize(
    ("arch", "n", "d", "V", "kept", "window"),
    [
        ("sm_100a", 41, 72, 300, 256, 128),
        *(
            pytest.param(arch, *shape, marks=full)
            for arch in ("sm_90a", "sm_100a")
            for shape in (
                *(
                    (1, 8, 2, 2, 0),
                    (65, 64, 129, 129, 0),
                    (130, 136, 600, 600, 256),
                    (200, 72, 513, 513, 128),
                ),
                *((17, 200, 900, 384, 128), (40, 72, 300, 256, 130)),
            )
        ),
    ],
)
def test_shapes(arch, n, d, V, kept, window):
    """Stripes within what was kept and behind it, and tails of all of them."""
    numbers = Numbers(ignoring(random_case(n, d, V, BF16, scale=3.0)), RL, RL)
    token_stats.check(numbers, run(numbers, arch, kept, window=window))


@pytest.mark.parametrize(
    ("which", "ignored", "arch"),
    [
        pytest.param(*each, marks=[] if each in (("given ids", "some", "sm_90a"), RL_BESIDE) else [full])
        for each in itertools.product(
            ("entropy", "cap", "own", "smoothing and class weights", "given ids"),
            ("some", "none", "all"),
            ("sm_90a", "sm_100a"),
        )
    ],
)
def test_dlogits_beside_dweight(which, ignored, arch, compacting, monkeypatch):
    """Of pieces of 128 classes, by spare warps of the GEMM of the piece before; the last has 73."""
    monkeypatch.setattr(overlap, "pieces", pieces_of(128))
    numbers = losses()[which]
    case = numbers.case
    target = {"some": case.target, "none": torch.arange(21), "all": torch.full((21,), case.ignore_index)}
    numbers = replace(numbers, case=replace(case, target=target[ignored]))
    if isinstance(numbers.temperature, torch.Tensor):
        numbers = replace(numbers, temperature=numbers.temperature.nan_to_num(1.0))
    if which == "given ids":
        numbers = replace(numbers, topk_ids=given_ids(numbers.case, 40))
    found = run(numbers, arch, 201, overwrites=True)
    # Of the forward, dweight of two pieces, and dinput.
    assert sum("Gemm" in name for name in found.emulator.launched) == 4
    token_stats.check(numbers, found)


@full
@both
def test_dlogits_beside_a_dweight_that_is_added(arch, monkeypatch):
    monkeypatch.setattr(overlap, "pieces", pieces_of(128))
    numbers = losses()["entropy"]
    before = torch.randn_like(numbers.case.linear_weight, dtype=torch.float32)
    found = run(numbers, arch, 201, out=before, overwrites=True)
    assert sum("Gemm" in name for name in found.emulator.launched) == 4
    dinput, total, _ = found.gradients
    assert total is not None
    found.gradients = dinput, (total - before).to(BF16), None
    token_stats.check(numbers, found)


@both
def test_tokens_and_classes_of_many_pieces(arch, monkeypatch):
    """More patches than spare warps, and tokens and classes that fill neither these nor the pieces."""
    monkeypatch.setattr(overlap, "pieces", pieces_of(640))
    numbers = Numbers(ignoring(random_case(70, 8, 1300, BF16, scale=3.0)), RL, RL)
    found = run(numbers, arch, 1300, overwrites=True, sms=2)
    assert sum("Gemm" in name for name in found.emulator.launched) == 5
    token_stats.check(numbers, found)


@pytest.mark.parametrize("window", [128, pytest.param(130, marks=full)])
@pytest.mark.parametrize(
    ("which", "arch"),
    [
        ("given ids", "sm_100a"),
        pytest.param("given ids", "sm_90a", marks=full),
        # By default in test_mutations.py, which compares what it mutates with float64.
        pytest.param("class weights", "sm_100a", marks=full),
        pytest.param("class weights", "sm_90a", marks=full),
    ],
)
def test_numbers_of_classes_in_stripes(which, arch, window):
    """What each class or some have of their own, in stripes as those of test_shapes."""
    case = ignoring(random_case(41, 72, 300, BF16, scale=3.0))
    if which == "class weights":
        weight = torch.linspace(0, 2, 300)
        numbers = Numbers(case, ("logprob", "total_nll"), label_smoothing=0.9, class_weight=weight)
    else:
        bias = torch.linspace(-2, 2, 300).to(BF16)
        numbers = Numbers(case, TOP, TOP, topk_ids=given_ids(case, 70), linear_bias=bias)
    token_stats.check(numbers, run(numbers, arch, 256, window=window, overwrites=True))


@pytest.mark.parametrize(
    ("arch", "ignored"),
    [
        pytest.param(*each, marks=[] if each == ("sm_90a", "some") else [full])
        for each in itertools.product(("sm_90a", "sm_100a"), ("some", "none", "all", "most", "all but one"))
    ],
)
def test_compacted_rows(arch, ignored, compacting):
    """Ignored rows of nan are not read; ids and a bias's gradient are of the others."""
    n = 150
    case = random_case(n, 72, 270, BF16, scale=3.0)
    at = torch.arange(n)
    every = {
        "some": at % 3 == 1,
        "none": at < 0,
        "all": at >= 0,
        "most": at % 11 != 3,
        "all but one": at != 77,
    }
    where = every[ignored]
    hidden = case.input.clone()
    target = torch.where(where, case.ignore_index or -100, case.target)
    temperature = torch.linspace(0.5, 2, n).masked_fill(where, torch.nan)
    case = replace(case, input=hidden, target=target)
    names, bias = (*RL, "topk_logprob", "lse"), torch.linspace(-2, 2, 270).to(BF16)
    ids = given_ids(case, 5)
    numbers = Numbers(case, names, names, temperature=temperature, topk_ids=ids, linear_bias=bias)
    poisoned = replace(case, input=hidden.masked_fill(where.unsqueeze(1), torch.nan))
    overwrites = ignored in ("some", "all", "all but one")
    with mock.patch.object(Topk, "of", wraps=Topk.of) as sorting:
        found = run(replace(numbers, case=poisoned), arch, 270, window=128, overwrites=overwrites)
    # The backward has the forward's order.
    assert sorting.call_count == 1
    assert any("Gather" in name for name in found.emulator.launched)
    token_stats.check(numbers, found)


@full
@both
@pytest.mark.parametrize("overwrites", [False, True])
@token_stats.each_need
def test_one_gradient_and_one_that_is_added(arch, needs, overwrites):
    numbers = losses()["entropy"]
    token_stats.check_needs(numbers, functools.partial(run, overwrites=overwrites), arch, 201, needs)


@pytest.mark.parametrize(
    ("which", "arch"),
    [pytest.param(*each, marks=full) for each in itertools.product(CORNERS, ("sm_90a", "sm_100a"))],
)
def test_corners(which, arch):
    names = (*RL, "lse")
    numbers = Numbers(CORNERS[which](), names, names)
    token_stats.check(numbers, run(numbers, arch, numbers.case.linear_weight.shape[0]))


@full
@both
@pytest.mark.parametrize(
    ("height", "cap"), [(60.0, 30.0), (300.0, 30.0), (1e4, 50.0), (60.0, 2.0), (3.0, 1e4), (3.0, 0.05)]
)
def test_logits_about_their_cap(arch, height, cap):
    """The slope is of logits as they were kept."""
    case = scaled(ignoring(random_case(21, 72, 201, BF16, scale=4.0)), height)
    numbers = Numbers(case, RL, RL, softcap=cap)
    token_stats.check(numbers, run(numbers, arch, 201))


@full
@both
def test_columns_of_minus_infinity(arch):
    """Half of the logits, and all of four units."""
    case = minus_infinity(random_case(20, 64, 300, BF16), 128)
    numbers = Numbers(case, RL, RL)
    found = run(numbers, arch, 300)
    _, exact = token_stats.by_torch(numbers, torch.float64, rounded=False)
    _, plain = token_stats.by_torch(numbers, torch.float32, rounded=True)
    dinput, dweight, _ = found.gradients
    assert dinput is not None
    assert dweight is not None
    # What 0 times -inf makes of dinput stays in its feature.
    assert_close("dinput", dinput[:, 1:], exact["dinput"][:, 1:], plain["dinput"][:, 1:].bfloat16())
    assert_close("dweight", dweight, exact["dweight"], plain["dweight"].bfloat16())


@full
@both
def test_a_target_out_of_range_spoils_its_own_row(arch):
    case = ignoring(random_case(20, 64, 137, BF16))
    case.target[3], case.target[5] = 137, -3
    dinput, dweight, _ = run(Numbers(case, RL, RL), arch, 137).gradients
    assert dinput is not None
    assert dweight is not None
    assert torch.equal(dinput.isnan().any(1), (torch.arange(20) == 3) | (torch.arange(20) == 5))
    assert bool(dweight.isnan().all())


@blackwell_first
def test_rows_beyond_fp16_become_nan(arch):
    """And no others: not with logits that are far below the row's largest."""
    case = random_case(20, 72, 140, BF16)
    hidden, weight = torch.zeros_like(case.input), torch.zeros_like(case.linear_weight)
    hidden[:, 0], weight[:, 0] = 256.0, 1.0
    hidden[::2, 1], weight[70:, 1] = 256.0, -1.0
    far = torch.arange(20) % 4 == 2
    # Of every fourth row all logits lie below -65504, of every fourth other one half of them.
    hidden[far, 0] = -(2.0**17)
    hidden[::4, 1] = 2.0**17
    case = replace(case, input=hidden + case.input * 1e-3, linear_weight=weight + case.linear_weight * 1e-3)
    numbers = Numbers(case, RL, RL)
    found = run(numbers, arch, 140)
    dinput = found.gradients[0]
    assert dinput is not None
    assert torch.equal(
        dinput.isnan().any(1), far & (numbers.upstream["entropy"] != 0) | dinput.isnan().all(1)
    )
    assert bool(dinput[far].isnan().all())
    assert not bool(dinput[~far].isnan().any())


@full
@both
def test_two_backwards_have_the_same_bits(arch):
    numbers = losses()["every number"]
    one, other = (run(numbers, arch, 201, window=128).gradients[:2] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None)


@hopper_first
def test_errors_beside_recomputing(arch):
    """Of the gradients against float64: at most a quarter more, of confident rows and of flat ones."""
    for scale in (0.02, 1.0, 8.0):
        numbers = Numbers(random_case(24, 64, 384, BF16, scale=scale), RL, RL)
        _, exact = token_stats.by_torch(numbers, torch.float64, rounded=False)
        kept, again = run(numbers, arch, 384), token_stats.run(numbers, arch)
        for i, name in enumerate(("dinput", "dweight")):
            mine, theirs = (
                (found.gradients[i].double() - exact[name]).norm()  # pyright: ignore
                for found in (kept, again)
            )
            assert mine <= 1.25 * theirs, (scale, name)


@full
@both
@pytest.mark.parametrize("softcap", [4.0, LogCap(2.0).key], ids=["softcap", "own"])
@pytest.mark.parametrize("seed", range(20))
def test_any_schedule_of_warps(arch, seed, softcap):
    """A LogitTerm in every case, a softcap in some."""
    n, V = 30 + 7 * seed, 190 + 37 * seed
    case = ignoring(random_case(n, 72 + 8 * (seed % 3), V, BF16, scale=6.0, seed=seed))
    numbers = Numbers(
        case,
        (*RL, *PLAIN) if seed % 3 else (*RL, "lse"),
        RL if seed % 3 else (*RL, "lse"),
        temperature=torch.linspace(0.3, 3, n) if seed % 4 == 1 else 0.8,
        softcap=softcap if seed % 5 < 2 or softcap < 0 else None,
        linear_bias=torch.linspace(-1, 1, V).to(BF16) if seed % 4 == 2 else None,
    )
    if seed % 3 == 0:
        names = (*numbers.outputs, "topk_logprob")
        ids = given_ids(case, 3 + 3 * seed)
        numbers = replace(numbers, outputs=names, differentiated=names, topk_ids=ids)
    needs = {"need_dinput": seed % 7 != 3, "need_dweight": seed % 7 != 5}
    kept, window = V if seed % 2 else max(V // 256, 1) * 128, 128 if seed % 3 == 1 else 0
    needs["overwrites"] = seed % 4 > 1
    token_stats.check(numbers, run(numbers, arch, kept, seed=seed, window=window, **needs))
