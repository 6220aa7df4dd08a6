"""The one comparison can fail."""

from __future__ import annotations

import math

import pytest
import torch

from tests import numerics
from tests.numerics import CASES, DTYPES, assert_close


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_planted_errors_fail(name, dtype):
    """Zeros, a nan, a wrong sign and a wrong row fail for every input, and plain torch passes."""
    case = numerics.make(name, dtype)
    for expected, baseline in zip(case.expected(3.0, "sum"), case.baseline(3.0, "sum"), strict=True):
        assert_close("baseline", baseline, expected, baseline)
        broken = baseline.clone()
        broken[(-1,) * broken.dim()] = math.nan
        with pytest.raises(AssertionError, match="not finite"):
            assert_close("nan", broken, expected, baseline)
        wrong = [baseline * 1.02, torch.zeros_like(baseline), -baseline]
        for tensor in wrong if expected.any() else [baseline + 1e-6]:
            with pytest.raises(AssertionError, match=r"relative error|want zeros"):
                assert_close("wrong", tensor, expected, baseline)
        with pytest.raises(AssertionError, match="shape"):
            assert_close("shape", baseline.unsqueeze(0), expected, baseline)


@pytest.mark.parametrize("name", ["ragged", "ignored", "confident"])
def test_a_forgotten_row_fails(name):
    case = numerics.make(name, torch.bfloat16)
    _, expected, _ = case.expected()
    _, baseline, _ = case.baseline()
    broken = baseline.clone()
    broken[int(expected.norm(dim=1).argmax())] = 0
    with pytest.raises(AssertionError, match="relative error"):
        assert_close("row", broken, expected, baseline)
