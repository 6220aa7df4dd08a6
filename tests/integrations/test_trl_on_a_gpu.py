"""What stands in for TRL's function, on a GPU: it needs no TRL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_lce import reference
from cute_lce.integrations import trl
from cute_lce.integrations.trl import OUTPUTS, LogProb
from tests.numerics import assert_close

pytestmark = pytest.mark.gpu


def operands(n: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight, targets."""
    generator = torch.Generator().manual_seed(n)
    hidden, weight = (torch.randn(rows, 64, generator=generator).to(dtype).cuda() for rows in (n, 1000))
    targets = torch.randint(1000, (n,), generator=generator).cuda()
    return hidden.requires_grad_(), weight.div(4).requires_grad_(), targets


def numbers(hidden: Tensor, weight: Tensor, targets: Tensor, names: tuple[str, ...]) -> list[Tensor]:
    """By the definition: the numbers, then the gradients of the log-probabilities' sum."""
    leaves = [each.detach().to(hidden.dtype).requires_grad_() for each in (hidden, weight)]
    stats: Any = reference.linear_logprob(leaves[0], leaves[1], targets, temperature=0.7)
    found = [getattr(stats, OUTPUTS[name]) for name in names]
    return [*found, *torch.autograd.grad(stats.logprob.sum(), leaves)]


@pytest.mark.parametrize("names", [("log_probs",), ("log_probs", "entropy"), tuple(OUTPUTS)], ids=str)
def test_numbers_and_gradients(names: tuple[str, ...]):
    """By whatever serves them, kernels or the streaming path; each number of tokens is another."""
    for n in (1, 37, 300):
        hidden, weight, targets = operands(n)
        found = LogProb.apply(hidden, weight, None, targets, 0.7, 32768, None, 1.0, names)
        gradients = torch.autograd.grad(found.logprobs.sum(), (hidden, weight))
        own = [each for each in found if each is not None]
        exact = numbers(hidden.double(), weight.double(), targets, names)
        plain = numbers(hidden.float(), weight.float(), targets, names)
        for name, one, want, baseline in zip(
            (*names, "dH", "dW"), [*own, *gradients], exact, plain, strict=True
        ):
            if name == "is_top1":
                assert torch.equal(one, want)
            else:
                assert_close(f"{name} of {n}", one, want.detach(), baseline.to(one.dtype))


def test_nothing_waits_for_the_device():
    hidden, weight, targets = operands(300)

    def step() -> None:
        found = LogProb.apply(hidden, weight, None, targets, 0.7, 32768, None, 1.0, ("log_probs", "entropy"))
        found.logprobs.sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_float32_is_told():
    hidden, weight, targets = operands(5, torch.float32)
    trl._warn_of_float32.cache_clear()
    with pytest.warns(UserWarning, match="cast_lm_head_to_fp32"):
        LogProb.apply(hidden, weight, None, targets, 1.0, 32768)
