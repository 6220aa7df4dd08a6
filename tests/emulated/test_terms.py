"""Terms of the loss in the kernels, which are compiled for them, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from cute_lce.plan import memory
from cute_lce.plan.kernels import MergeKey
from tests.device import forget_plans
from tests.emulated.backward import check, narrow_plans, train
from tests.emulated.forward import ignoring
from tests.numerics import random_case

BF16, FP16 = torch.bfloat16, torch.float16
full = pytest.mark.emulator_full
pytestmark = pytest.mark.usefixtures("poisoned_empty")
hopper_first = pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=full)])


@pytest.fixture(autouse=True)
def _narrow(monkeypatch) -> Iterator[None]:
    narrow_plans(monkeypatch)
    yield
    forget_plans()


@hopper_first
@pytest.mark.parametrize(
    ("dtype", "kept", "reduction"),
    [
        (BF16, 0, "mean"),
        (BF16, 200, "none"),
        pytest.param(BF16, 128, "sum", marks=full),
        pytest.param(FP16, 0, "none", marks=full),
        pytest.param(FP16, 200, "mean", marks=full),
    ],
)
def test_logit_scale(arch, dtype, kept, reduction):
    case = replace(ignoring(random_case(20, 64, 200, dtype, scale=4.0)), logit_scale=0.37)
    run = train(case, arch, kept_columns=kept, reduction=reduction)
    check(case, run, reduction=reduction)
    assert {key.terms for key in run.emulator.keys if not isinstance(key, MergeKey)} == {("logit_scale",)}
    without = replace(case, logit_scale=1.0)
    with pytest.raises(AssertionError):
        check(without, run, reduction=reduction)


@hopper_first
@pytest.mark.parametrize("kept", [0, pytest.param(200, marks=full)])
def test_logit_scale_of_compacted_rows(arch, kept, monkeypatch):
    monkeypatch.setattr(memory, "LEAST_VOCAB", 0)
    monkeypatch.setattr(memory, "LEAST_COMPACTED", 0)
    forget_plans()
    case = replace(ignoring(random_case(20, 64, 200, BF16, scale=4.0)), logit_scale=0.37)
    run = train(case, arch, kept_columns=kept)
    check(case, run)
    assert any("Gather" in name for name in run.emulator.launched)
