"""The kernel of grad_in_forward's backward, executed: products of random accumulators against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cute_lce.implementation import Accumulated
from cute_lce.launch import KERNELS
from cute_lce.options import LossOptions
from tests.emulated.backward import device, known

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
both = pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
pytestmark = pytest.mark.usefixtures("poisoned_empty")


def accumulator(rows: int, d: int) -> Tensor:
    """Every third row zeros."""
    found = torch.randn((rows, d), generator=torch.Generator().manual_seed(rows))
    found[1::3] = 0
    return found


def scaled(
    dloss: Tensor,
    dinput: Tensor | None,
    dweight: Tensor | None,
    *,
    arch: str = "sm_90a",
    reduction: str = "mean",
    valid: int = 7,
    dtype: torch.dtype = BF16,
    out: Tensor | None = None,
    target: Tensor | None = None,
    source: Tensor | None = None,
    launches: int = 1,
) -> tuple[Tensor | None, Tensor | None]:
    """out: what dweight's product is added to; the sum is returned in its place. target: of the tokens;
    None: none is ignored. source: Accumulated's."""
    rows = 0 if dinput is None else len(dinput)
    target = torch.zeros(rows, dtype=torch.int64) if target is None else target
    with device(arch, 2) as counts:
        given = [None if each is None else known(each) for each in (dinput, dweight, source)]
        accumulated = Accumulated(dloss, torch.tensor(valid).clone(), *given)
        # logit_scale is in the accumulators.
        loss = LossOptions(reduction, logit_scale=0.5)
        total = None if out is None else known(out)
        found = KERNELS.scale_gradients(known(dloss), known(target), accumulated, loss, dtype, total)
        assert sum("Multiply" in name for name in counts.launched) == launches == len(counts.launched)
    for before, after in zip((dinput, dweight, source), given, strict=True):
        if before is not None and after is not None:
            assert torch.equal(before.nan_to_num(7), after.nan_to_num(7)), "it wrote to what it read"
    if total is None:
        return found
    assert found[1] is None
    return found[0], total


def assert_rounded(mine: Tensor | None, want: Tensor, dtype: torch.dtype = BF16) -> None:
    """Within a rounding of a float64 number, and of one to float32 before."""
    assert mine is not None
    assert mine.dtype is dtype
    assert mine.shape == want.shape
    bound = want.abs() * (torch.finfo(dtype).eps / 2 + 2 * torch.finfo(FP32).eps) + 1e-30
    assert bool(((mine.double() - want).abs() <= bound).all())


# d: one part of a thread, and several with a ragged end.
@both
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("d", [8, 72, 4360])
def test_both_gradients_of_a_mean(arch: str, dtype: torch.dtype, d: int):
    dinput, dweight = accumulator(5, d), accumulator(4, d)
    first, second = scaled(torch.tensor(3.0), dinput, dweight, arch=arch, dtype=dtype)
    assert_rounded(first, dinput.double() * (3 / 7), dtype)
    assert_rounded(second, dweight.double() * (3 / 7), dtype)


@pytest.mark.parametrize("needed", ["dinput", "dweight"])
def test_one_gradient_of_a_sum(needed: str):
    given = accumulator(5, 72)
    pair = (given, None) if needed == "dinput" else (None, given)
    found = scaled(torch.tensor(-2.0), *pair, reduction="sum")
    mine, none = found if needed == "dinput" else found[::-1]
    assert none is None
    assert_rounded(mine, given.double() * -2)


@pytest.mark.parametrize("stride", [0, 1, 3])
def test_a_number_for_each_row(stride: int):
    base = torch.randn(16, generator=torch.Generator().manual_seed(5))
    dloss = base.as_strided((5,), (stride,))
    dinput = accumulator(5, 72)
    mine, _ = scaled(dloss, dinput, None, reduction="none")
    assert_rounded(mine, dinput.double() * dloss.double().unsqueeze(1))


# One chunk of 8 more than a thread's 1, 2 or 3.
@pytest.mark.parametrize("d", [1096, 2120, 3144])
def test_ends_of_rows(d: int):
    dinput, dweight = accumulator(3, d), accumulator(4, d)
    dloss = torch.tensor([1.0, 2.0, 3.0])
    mine, _ = scaled(dloss, dinput, None, reduction="none")
    assert_rounded(mine, dinput.double() * dloss.double().unsqueeze(1))
    first, second = scaled(torch.tensor(3.0), dinput, dweight, reduction="sum")
    assert_rounded(first, dinput.double() * 3)
    assert_rounded(second, dweight.double() * 3)


@both
@pytest.mark.parametrize("target", [torch.int64, torch.int32], ids=["int64", "int32"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_flows_into_ignored_rows_does_not_matter(
    arch: str, bad: float, stride: int, target: torch.dtype
):
    """What flows into others does, even if they are zeros: 0 times nan is nan."""
    dinput = accumulator(6, 72)
    dinput[3, 0] = 0.0  # beside numbers
    dloss = torch.tensor([1.0, bad, 1.0, bad, bad, 1.0])
    # Ignored: a row of zeros, whose neighbours in memory are not.
    classes = torch.full((6 * stride,), 5, dtype=target)
    classes[4 * stride] = -100
    mine, _ = scaled(dloss, dinput, None, arch=arch, reduction="none", target=classes[::stride])
    want = dinput.double() * dloss.double().unsqueeze(1)
    want[4] = 0
    assert mine is not None
    assert torch.equal(mine.isnan(), want.isnan())
    assert mine[1].isnan().all()
    good = [0, 2, 4, 5]
    assert_rounded(mine[good], want[good])


@both
@pytest.mark.parametrize("d", [72, 77])
def test_rows_of_tokens_in_another_order(arch: str, d: int):
    """The valid tokens' first; what the others hold does not matter, nor what flows into them. Features that
    are no multiple of 8 are torch's."""
    rows = accumulator(6, d)
    rows[4:] = math.nan
    source = torch.tensor([0, 2, 3, 5, 1, 4], dtype=torch.int32)
    target = torch.tensor([7, -100, 7, 7, -100, 7])
    dloss = torch.tensor([1.0, math.nan, 3.0, 4.0, math.inf, 6.0])
    mine, _ = scaled(
        dloss,
        rows,
        None,
        arch=arch,
        reduction="none",
        valid=4,
        target=target,
        source=source,
        launches=int(d % 8 == 0),
    )
    want = torch.zeros(6, d, dtype=torch.float64)
    want[[0, 2, 3, 5]] = rows[:4].double() * torch.tensor([1.0, 3.0, 4.0, 6.0]).unsqueeze(1)
    assert_rounded(mine, want)


def test_ignore_index_is_compared_as_int64():
    """A class that is ignore_index but for its upper half, and one that is its lower half, are not it."""
    dinput = torch.zeros(3, 8)
    for target in (torch.tensor([-100 + (1 << 32), 0xFFFFFF9C, -100]), torch.tensor([100, -101, -100]).int()):
        mine, _ = scaled(torch.tensor(math.nan), dinput, None, reduction="sum", target=target)
        assert mine is not None
        assert mine.isnan().any(1).tolist() == [True, True, False]


def test_nan_accumulators_stay():
    dinput, dweight = accumulator(3, 72), accumulator(4, 72)
    dinput[1, 70] = dweight[2, 3] = math.nan
    for found, place in zip(scaled(torch.tensor(1.0), dinput, dweight), ((1, 70), (2, 3)), strict=True):
        assert found is not None
        assert int(found.isnan().sum()) == 1
        assert found[place].isnan()


@pytest.mark.parametrize("dloss", [1.0, math.nan])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_valid_rows(reduction: str, dloss: float):
    """As if the upstream gradient were 0, whatever it is."""
    zeros = torch.zeros((3, 72))
    for found in scaled(torch.tensor(dloss), zeros, zeros[:2].clone(), reduction=reduction, valid=0):
        assert found is not None
        assert not found.any()
    before = torch.ones((2, 72))
    _, out = scaled(torch.tensor(dloss), None, zeros[:2].clone(), reduction=reduction, valid=0, out=before)
    assert out is not None
    assert torch.equal(out, before)


@both
@pytest.mark.parametrize("out_dtype", [FP32, BF16, FP16], ids=["to fp32", "to bf16", "to fp16"])
@pytest.mark.parametrize("d", [72, 4360])
def test_dweight_is_added(arch: str, out_dtype: torch.dtype, d: int):
    dinput, dweight = accumulator(3, d), accumulator(4, d)
    before = accumulator(4, d).flip(0).to(out_dtype)
    first, out = scaled(torch.tensor(3.0), dinput, dweight, arch=arch, out=before)
    assert out is not None
    assert_rounded(first, dinput.double() * (3 / 7))
    want = before.double() + dweight.double() * (3 / 7)
    error = (out.double() - want).abs()
    largest = torch.maximum(before.double().abs(), dweight.double().abs())
    assert bool((error <= want.abs() * torch.finfo(out_dtype).eps / 2 + largest * 2e-7 + 1e-7).all())


def test_features_that_are_no_multiple_of_8_are_torchs():
    dinput, dweight = accumulator(5, 77), accumulator(4, 77)
    first, second = scaled(torch.tensor(3.0), dinput, dweight, launches=0)
    assert_rounded(first, dinput.double() * (3 / 7))
    assert_rounded(second, dweight.double() * (3 / 7))
