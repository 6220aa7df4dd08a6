"""What torch's FLOP counter sees of a call: the matrix products that are executed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import cute_lce
from cute_lce.ops import inner

n, d, V = 64, 20, 300
UNIT = n * d * V


def counted(needs: tuple[bool, ...] = (True, True), call: Any = None, **options: Any) -> float:
    """Of forward and backward, in units of n d V."""
    hidden, weight = (
        torch.ones(rows, d, requires_grad=need) for rows, need in zip((n, V), needs, strict=True)
    )
    target = torch.arange(n)
    with FlopCounterMode(display=False) as counter:
        found: Any = (call or cute_lce.linear_cross_entropy)(hidden, weight, target, **options)
        if not isinstance(found, Tensor):
            found = sum(each.sum() for each in found if each is not None)
        if any(needs):
            found.sum().backward()
    return counter.get_total_flops() / UNIT


TERMS = {"z_loss": 0.1, "linear_bias": torch.ones(V)}


@pytest.mark.parametrize("terms", [{}, TERMS], ids=["plain", "terms"])
@pytest.mark.parametrize(
    ("schedule", "both", "one", "forward"),
    [("recompute", 8, 6, 2), ("keep", 6, 4, 2), ("grad_in_forward", 6, 4, 2)],
)
def test_each_schedule(schedule, both, one, forward, terms):
    for needs, want in (
        ((True, True), both),
        ((True, False), one),
        ((False, True), one),
        ((False,) * 2, forward),
    ):
        assert counted(needs, schedule=schedule, **terms) == want


def test_a_part_that_is_kept():
    flops = counted(schedule="keep", workspace_mb=0.1, window=64)
    # Of each column that is not kept 2 more.
    assert 6 < flops < 8
    assert round(V - (flops - 6) * V / 2) % 64 == 0


def test_numbers_of_tokens():
    outputs = "logprob", "entropy", "topk_logprob"
    ids = torch.zeros(n, 3, dtype=torch.int64)
    for schedule, want in (("recompute", 8), ("keep", 6)):
        options = {"outputs": outputs, "topk_ids": ids, "schedule": schedule}
        assert counted(call=cute_lce.linear_logprob, **options) == want
    assert counted(call=cute_lce.linear_logprob) == 8


def test_heads_and_samples():
    def heads(hidden, weight, target):
        return cute_lce.linear_cross_entropy(hidden, [weight, weight], torch.stack((target, target), -1))

    def sampled(hidden, weight, target):
        return cute_lce.sampled_linear_cross_entropy(hidden, weight, target, torch.arange(60))

    assert counted(call=heads) == 16
    assert counted(call=sampled) == pytest.approx(8 * 60 / V)


def test_a_backward_alone():
    """Of an eager forward."""
    hidden, weight = torch.ones(n, d, requires_grad=True), torch.ones(V, d, requires_grad=True)
    loss = cute_lce.linear_cross_entropy(hidden, weight, torch.arange(n), schedule="recompute")
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == 6 * UNIT


def test_an_op_with_a_number_as_a_tensor():
    operands = torch.ones(n, d), torch.ones(V, d), torch.arange(n)
    number = torch.tensor(0.7, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        inner.twins[inner.forward].op(number, *operands, "mean", -100, 0.5, 0, 0)
    assert counter.get_total_flops() == 2 * UNIT


def test_every_op_with_a_product_has_a_formula():
    import cute_lce.parallel  # noqa: F401

    free = {"scale_gradients"}
    for op, twin in inner.twins.items():
        name = op.name().partition("::")[2]
        if name not in free:
            assert op.overloadpacket in flop_registry, name
            assert twin.op.overloadpacket in flop_registry, name


@pytest.mark.parametrize("first", ["cute_lce", "torch.utils.flop_counter"])
def test_either_import_may_come_first(first):
    code = (
        f"import importlib.util, {first}, cute_lce, torch\n"
        "importlib.util.find_spec('torch.utils.flop_counter')\n"
        "from torch.utils.flop_counter import flop_registry\n"
        "print(torch.ops.cute_lce.forward in flop_registry)"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "True"
