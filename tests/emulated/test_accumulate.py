"""dweight added to a matrix of the caller's, and grad_in_forward, executed: launch/'s own host side, both
architectures' PTX emulated, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_lce.launch import KERNELS
from cute_lce.plan import grad_in_forward as plans
from tests import passes
from tests.emulated.backward import device, known, train
from tests.emulated.forward import ignoring
from tests.numerics import Case, assert_close, random_case, with_bad_ignored_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

full = pytest.mark.emulator_full
both = pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
hopper_first = pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=full)])
pytestmark = pytest.mark.usefixtures("poisoned_empty", "narrow")


# ----------------------------------------------------------------------------------------------------------
# Added to a matrix


def check_added(case: Case, arch: str, out_dtype: torch.dtype, **how) -> None:
    """dweight added to random numbers, and input's gradient as without."""
    d, V = case.input.shape[1], case.linear_weight.shape[0]
    # As large as the gradient: neither hides the other's error.
    before = (8 * torch.randn((V, d), generator=torch.Generator().manual_seed(2))).to(out_dtype)
    run = train(case, arch, out=before, **how)
    dloss = case.upstream("none")
    _, dinput, dweight = case.expected(dloss, "none")
    _, plain_dinput, plain = case.baseline(dloss, "none", rounded_dlogits=True)
    total = (before.double() + plain.double()).to(out_dtype)
    assert run.dweight is not None
    assert run.dweight.dtype is out_dtype
    assert_close("sum", run.dweight, before.double() + dweight, total)
    assert run.dinput is not None
    assert_close("dinput", run.dinput, dinput, plain_dinput)


# n, d, V: the last box of a row ragged or whole, one tile or several, of few tokens and of many.
SHAPES = [(70, 104, 260), (70, 104, 390), (40, 128, 130), (200, 72, 270)]


@both
@pytest.mark.parametrize(
    ("kept", "out_dtype"),
    [(0, FP32), (None, BF16), pytest.param(0, BF16, marks=full), pytest.param(None, FP32, marks=full)],
    ids=["recompute-to fp32", "keep-to bf16", "recompute-to bf16", "keep-to fp32"],
)
@pytest.mark.parametrize(
    "shape",
    [SHAPES[0], *(pytest.param(s, marks=full) for s in SHAPES[1:])],
    ids=lambda s: "-".join(map(str, s)),
)
def test_dweight_is_added(arch: str, out_dtype: torch.dtype, kept: int | None, shape: tuple[int, int, int]):
    n, d, V = shape
    kept_columns = V if kept is None else kept
    check_added(
        ignoring(random_case(n, d, V, BF16)), arch, out_dtype, kept_columns=kept_columns, window=130, sms=2
    )


@hopper_first
@pytest.mark.parametrize("out_dtype", [FP32, pytest.param(BF16, marks=full)], ids=["to fp32", "to bf16"])
def test_float16s_dweight_is_added(arch: str, out_dtype: torch.dtype):
    check_added(ignoring(random_case(70, 72, 200, FP16)), arch, out_dtype, window=130, sms=2)


@both
@pytest.mark.parametrize("out_dtype", [FP32, BF16], ids=["to fp32", "to bf16"])
def test_features_that_are_no_multiple_of_8(arch: str, out_dtype: torch.dtype):
    check_added(random_case(40, 77, 130, BF16), arch, out_dtype)


@pytest.mark.parametrize("out_dtype", [FP32, pytest.param(BF16, marks=full)], ids=["to fp32", "to bf16"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=full) for seed in range(2, 20))])
def test_schedules_of_warps(out_dtype: torch.dtype, seed: int):
    """Equal bits: every element is added to once in a launch."""
    case = random_case(70, 136, 390, BF16)
    out = torch.randn((390, 136), generator=torch.Generator().manual_seed(3)).to(out_dtype)
    first, other = (
        train(case, "sm_90a", out=out, window=260, sms=2 + 2 * (s % 2), seed=s).dweight for s in (0, seed)
    )
    assert first is not None
    assert other is not None
    assert torch.equal(first, other)


# ----------------------------------------------------------------------------------------------------------
# grad_in_forward


@pytest.fixture
def small_chunks():
    """Chunks of 64 tokens at most."""
    choices = plans._choices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "_choices", lambda *call: [c for c in choices(*call) if c.chunk <= 64])
        yield


def gradients(
    case: Case, arch: str, reduction: str, dloss: Tensor | None = None, seed: int = 0, sms: int = 2, **needs
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(loss, dinput, dweight) of grad_in_forward and its backward."""
    upstream = case.upstream(reduction) if dloss is None else dloss
    with device(arch, sms, seed) as counts:
        found = passes.grad_in_forward(KERNELS, case, reduction=reduction, **needs)
        assert sum("Gemm" in name for name in counts.launched) >= 2
        gathered, copied = (sum(f"rows{n}" in name for name in counts.launched) for n in ("Gather", "Copy"))
        assert gathered == 1
        assert copied == sum("Finish" in name for name in counts.launched) - 1
        kept = [None if tensor is None else tensor.clone() for tensor in found]
        scaled = KERNELS.scale_gradients(
            known(upstream.float()), case.target, found, passes.loss_of(case, reduction), case.input.dtype
        )
    for before, after in zip(kept, found, strict=True):
        if before is not None and after is not None:
            assert torch.equal(before.nan_to_num(7), after.nan_to_num(7)), "the backward wrote to what it had"
    return found.loss, *scaled


def check(case: Case, arch: str, reduction: str = "mean", of: Case | None = None, **options) -> None:
    """Against float64; of: the case that is right, where it is another."""
    loss, dinput, dweight = gradients(case, arch, reduction, **options)
    of = of or case
    dloss = of.upstream(reduction)
    expected, plain = of.expected(dloss, reduction), of.baseline(dloss, reduction, rounded_dlogits=True)
    assert_close("loss", loss, expected[0], plain[0])
    for name, mine, want, base in (
        ("dinput", dinput, expected[1], plain[1]),
        ("dweight", dweight, expected[2], plain[2]),
    ):
        assert (mine is not None) == options.get(f"need_{name}", True)
        if mine is not None:
            assert mine.dtype is case.input.dtype
            assert_close(name, mine, want, base)


dtypes_of_architectures = pytest.mark.parametrize(
    ("dtype", "arch"),
    [(BF16, "sm_90a"), (FP16, "sm_90a"), (BF16, "sm_100a"), pytest.param(FP16, "sm_100a", marks=full)],
    ids=["bf16-sm_90a", "fp16-sm_90a", "bf16-sm_100a", "fp16-sm_100a"],
)


@dtypes_of_architectures
@pytest.mark.parametrize("reduction", ["mean", pytest.param("sum", marks=full)])
def test_chunks(arch: str, dtype: torch.dtype, reduction: str, small_chunks):
    """Two whole ones and a ragged one, ignored rows in each."""
    check(ignoring(random_case(150, 136, 390, dtype)), arch, reduction)


@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=full)], ids=["bf16", "fp16"])
def test_logit_scale(dtype: torch.dtype, small_chunks):
    case = ignoring(random_case(100, 72, 260, dtype, scale=4.0))
    check(replace(case, logit_scale=0.37), "sm_90a", "sum")


@dtypes_of_architectures
def test_a_frozen_weight_takes_any_upstream(arch: str, dtype: torch.dtype, small_chunks):
    check(ignoring(random_case(100, 72, 260, dtype)), arch, "none", need_dweight=False)


@both
def test_a_frozen_input(arch: str, small_chunks):
    check(random_case(100, 72, 260, BF16), arch, need_dinput=False)


@hopper_first
@pytest.mark.parametrize("shape", [(1, 72, 130), (64, 77, 127), (65, 64, 129), (130, 8, 260)], ids=str)
def test_shapes(arch: str, shape: tuple[int, int, int], small_chunks):
    check(random_case(*shape, BF16), arch)


@both
@pytest.mark.parametrize("splits", [2, pytest.param(3, marks=full)])
def test_splits(arch: str, splits: int, monkeypatch, small_chunks):
    monkeypatch.setattr(plans, "faster_splits", lambda *_: [1, splits])
    check(ignoring(random_case(100, 136, 390, BF16)), arch)


@hopper_first
@pytest.mark.parametrize("which", ["all ignored", "a chunk ignored", "one valid"])
def test_ignored_rows(arch: str, which: str, small_chunks):
    """The first chunk writes even where it has no valid row; bad values of ignored rows change nothing."""
    case = random_case(100, 72, 260, BF16)
    target = case.target.clone()
    rows = {"all ignored": slice(None), "a chunk ignored": slice(0, 64), "one valid": slice(1, None)}[which]
    target[rows] = case.ignore_index
    nans, zeros = with_bad_ignored_rows(replace(case, target=target))
    check(nans, arch, of=zeros)


def test_a_bad_target_makes_its_row_nan(small_chunks):
    case = random_case(100, 72, 260, BF16)
    target = case.target.clone()
    target[[3, 99]] = torch.tensor([260, -1])
    loss, dinput, dweight = gradients(replace(case, target=target), "sm_90a", "sum")
    assert loss.isnan()
    assert dinput is not None
    assert dweight is not None
    sick = torch.zeros(100, dtype=torch.bool)
    sick[[3, 99]] = True
    assert torch.equal(dinput.isnan().all(1), sick)
    assert torch.equal(dinput.isnan().any(1), sick)
    assert dweight.isnan().all()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=full) for seed in range(2, 20))])
def test_the_same_bits_in_every_schedule(seed: int, small_chunks):
    case = ignoring(random_case(100, 136, 390, BF16))
    first = gradients(case, "sm_90a", "mean")
    other = gradients(case, "sm_90a", "mean", seed=seed, sms=2 + 2 * (seed % 2))
    for name, a, b in zip(("loss", "dinput", "dweight"), first, other, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b), name


def test_no_rows():
    case = random_case(0, 72, 260, BF16)
    with device("sm_90a", 2):
        found = passes.grad_in_forward(KERNELS, case)
    assert found.dinput is not None
    assert found.dweight is not None
    assert found.dinput.shape == (0, 72)
    assert not found.dweight.any()
