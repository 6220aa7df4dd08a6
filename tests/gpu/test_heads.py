"""On a GPU that has kernels: several heads in one call are their calls, and the sum of their gradients."""

from __future__ import annotations

import pytest
import torch

from cute_lce import linear_cross_entropy
from tests.gpu.test_forward import needs_kernels, poisoned
from tests.numerics import relative_error

pytestmark = [*needs_kernels, poisoned]


@pytest.mark.parametrize("schedule", ["auto", "recompute", "keep", "grad_in_forward"])
@pytest.mark.parametrize("stacked", [False, True])
def test_heads(stacked, schedule):
    n, d, sizes = 1100, 1024, [32003] * 3 if stacked else [32003, 512, 9001]
    generator = torch.Generator("cuda").manual_seed(0)
    kind = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    hidden = torch.randn(n, d, **kind).requires_grad_()
    weights = [(torch.randn(size, d, **kind) / 32).requires_grad_() for size in sizes]
    target = torch.stack([torch.arange(n, device="cuda") * 7919 % size for size in sizes], -1)
    target[::5, 1] = -100
    leaves = weights
    if stacked:
        leaves = [torch.stack([weight.detach() for weight in weights]).requires_grad_()]
    given = leaves[0] if stacked else leaves
    losses = linear_cross_entropy(hidden, given, target, schedule=schedule, reduction="sum")
    dinput, *dweights = torch.autograd.grad(losses.sum(), [hidden, *leaves])
    total = torch.zeros(n, d, device="cuda", dtype=torch.float64)
    for k, weight in enumerate(weights):
        alone = linear_cross_entropy(hidden, weight, target[:, k], schedule=schedule, reduction="sum")
        own, dweight = torch.autograd.grad(alone, [hidden, weight])
        total += own.double()
        # By the plans of another workspace the order of sums may differ.
        torch.testing.assert_close(losses[k], alone, rtol=1e-5, atol=0)
        found = dweights[0][k] if stacked else dweights[k]
        assert relative_error(found, dweight.double()) < 2.0**-8
    # A rounding of each head's, and one of the sum.
    assert relative_error(dinput, total) < 2.0**-7.5


def test_does_not_synchronise():
    hidden = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(2, 4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(4096, (512, 2), device="cuda")
    linear_cross_entropy(hidden, weight, target).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(hidden, weight, target).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
