"""The public call at 200 random shapes, with random arguments, against float64; and its bits, run after run.

`tests/random_calls.py` draws them. A single one, by its number: check(draw(17), "cuda").
"""

from __future__ import annotations

import pytest
import torch

from tests.random_calls import check, check_all, check_same_bits, draw

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_empty")]

CALLS, BATCH = 200, 10
REPEATED = 20  # further calls, which are made twice


@pytest.fixture(autouse=True)
def _memory():
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("first", range(0, CALLS, BATCH))
def test_random_calls(first):
    check_all(check, map(draw, range(first, first + BATCH)), "cuda")


@pytest.mark.parametrize("first", range(CALLS, CALLS + REPEATED, 5))
def test_random_calls_have_the_same_bits_run_after_run(first):
    check_all(check_same_bits, map(draw, range(first, first + 5)), "cuda")
