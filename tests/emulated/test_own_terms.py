"""What a LogitTerm's functions make of any number in a kernel, against torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_lce import LogitTerm
from cute_lce.arguments import with_terms
from cute_lce.logit_term import kernel_term, numbers_of
from cute_lce.torch_ops import logit_of, slope_of
from tests import emulator
from tests.emulated import own_terms
from tests.logit_terms import LogCap

INF, NAN = torch.inf, torch.nan
SIZES = torch.cat([torch.logspace(-37, 37, 75), torch.linspace(0.01, 3, 299), torch.linspace(4, 87, 84)])
ODD = torch.tensor([NAN, INF, -INF, 0.0, 1.0, -1.0, 2.0**125, -(2.0**125), 2.0**-126, -(2.0**-126)])


def functions_of(logit: Callable, slope: Callable) -> LogitTerm:
    body: dict[str, Any] = {"logit": logit, "slope": slope, "__annotations__": {"three": "float"}}
    kind: Any = dataclass(frozen=True)(type("Two", (LogitTerm,), body))
    return kind(3.0)


# Each with what errors may be of: the result, 1, and the argument's size times the result.
FUNCTIONS = {
    "log1p and tanh": (
        functions_of(lambda self, x, ops: ops.log1p(x), lambda self, z, ops: ops.tanh(z)),
        ((2.0**-21, 0.0, 0.0), (2.0**-21, 0.0, 0.0)),
    ),
    "log and exp": (
        functions_of(lambda self, x, ops: ops.log(x), lambda self, z, ops: ops.exp(z)),
        ((2.0**-22, 2.0**-22, 0.0), (2.0**-22, 0.0, 2.0**-23)),
    ),
    "sqrt and abs": (
        functions_of(lambda self, x, ops: ops.sqrt(x), lambda self, z, ops: ops.abs(-z)),
        ((2.0**-24, 0.0, 0.0), (0.0, 0.0, 0.0)),
    ),
    "the lesser and the greater": (
        functions_of(
            lambda self, x, ops: ops.minimum(x, self.three), lambda self, z, ops: ops.maximum(self.three, z)
        ),
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
    ),
    "quotients and comparisons": (
        functions_of(
            lambda self, x, ops: x / self.three + 1 / self.three,
            lambda self, z, ops: ops.where(z > self.three, 1.0, ops.where(z == 1, 2, self.three)) * 2,
        ),
        ((2.0**-22, 2.0**-22, 0.0), (0.0, 0.0, 0.0)),
    ),
    "a term": (LogCap(3.0), ((2.0**-21, 0.0, 0.0), (2.0**-21, 0.0, 2.0**-23))),
}


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.emulator_full)])
@pytest.mark.parametrize("which", FUNCTIONS)
def test_functions_of_any_number(which, arch, tmp_path):
    term, bounds = FUNCTIONS[which]
    x = torch.cat([-SIZES.flip(0), SIZES, ODD])
    x = torch.cat([x, x[-1:].expand(-len(x) % 32)])
    out = torch.full((2, len(x)), 7.0)
    loss = with_terms((kernel_term(term),))(reduction=0, ignore_index=-100, **numbers_of(term, 1.0, 1.0))
    emulator.run(emulator.build(own_terms.compile_term(term, arch, str(tmp_path))), loss, x.clone(), out)
    for found, function, bound in zip(out, (logit_of, slope_of), bounds, strict=True):
        check(x, found, function(term, x.double()), *bound)


def check(x: Tensor, found: Tensor, want: Tensor, of_result: float, of_one: float, of_both: float) -> None:
    # One beyond float32's range is infinite, one below that of its normal numbers may be 0.
    want = want.float().double()
    finite = want.isfinite()
    torch.testing.assert_close(found[~finite].double(), want[~finite], equal_nan=True)
    x, found, want = x[finite], found[finite], want[finite]
    bound = want.abs() * (of_result + of_both * x.abs().clamp(max=128)) + of_one
    outside = (found.double() - want).abs() > bound + 2.0**-126 * (of_result > 0)
    assert not bool(outside.any()), torch.stack([x.double(), found.double(), want], 1)[outside]
