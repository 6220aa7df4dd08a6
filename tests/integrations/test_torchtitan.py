"""torchtitan's own hook class and its head, on one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.integrations.torchtitan_cases import D, V, batch, expected, make
from tests.numerics import assert_close

pytest.importorskip("torchtitan", reason="torchtitan is not installed (extra integrations)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_gradients(dtype):
    inputs, weight, labels = batch(dtype)
    loss_fn, model = make(weight)
    leaf = inputs.clone().requires_grad_()
    hidden = model(leaf)
    hidden.retain_grad()
    loss, metrics = loss_fn(hidden, labels, torch.tensor(11), positions=torch.arange(8))
    assert metrics == {}
    assert "forward" not in vars(model.lm_head)
    loss.backward()

    def by_torch(kind: torch.dtype) -> tuple[Tensor, ...]:
        # From the hidden states as they were rounded.
        leaves = [each.detach().to(kind, copy=True).requires_grad_() for each in (hidden, weight)]
        logits = (leaves[0] @ leaves[1].T).transpose(1, 2)
        total = nn.functional.cross_entropy(logits, labels, reduction="sum") / 11
        return total.detach(), *torch.autograd.grad(total, leaves)

    found = loss.detach(), hidden.grad, model.lm_head.weight.grad
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for name, got, want, plain in zip(
        ("loss", "dhidden", "dweight"), found, by_torch(torch.float64), by_torch(wide), strict=True
    ):
        assert got is not None
        assert_close(name, got, want, plain.to(got.dtype))
    assert leaf.grad is not None
    assert leaf.grad.any()


def test_it_is_torchtitans_own_loss():
    """ChunkedLossWrapper's loss and gradients, and in validation."""
    from torchtitan.components.loss import ChunkedLossWrapper

    inputs, weight, labels = batch(torch.float32)
    _, model = make(weight)
    ours = make(weight)[0]
    theirs = ChunkedLossWrapper.Config(num_chunks=4).build(compile_config=None)
    found = []
    for loss_fn in (ours, theirs):
        loss_fn.set_lm_head(model.lm_head)
        model.zero_grad()
        leaf = inputs.clone().requires_grad_()
        loss, _ = loss_fn(model(leaf), labels, torch.tensor(14.0))
        loss.backward()
        with torch.no_grad():
            validation, _ = loss_fn(model(inputs), labels)
        found.append((loss.detach(), validation, leaf.grad, model.lm_head.weight.grad))
    for one, other in zip(*found, strict=True):
        assert one.any()
        torch.testing.assert_close(one, other)
    want, plain = (expected(torch.float32, kind, 14.0) for kind in (torch.float64, torch.float32))
    assert_close("loss", found[0][0], want[0][0], plain[0][0])


def test_a_bias_is_followed():
    inputs, weight, labels = batch(torch.float64)
    loss_fn, model = make(weight)
    model.lm_head.bias = nn.Parameter(torch.linspace(-2, 2, V, dtype=torch.float64))
    hidden = model(inputs)
    want = nn.functional.cross_entropy(model.lm_head(hidden).transpose(1, 2), labels, reduction="sum")
    loss, _ = loss_fn(hidden, labels)
    torch.testing.assert_close(loss, want)
    (dbias,) = torch.autograd.grad(loss, model.lm_head.bias)
    torch.testing.assert_close(dbias, torch.autograd.grad(want, model.lm_head.bias)[0])


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0), torch.tensor([0.0]), np.int64(0), np.float32(0)])
def test_no_valid_token(count):
    """A count of 0 gives zeros; the same count of others divides."""
    inputs, weight, labels = batch(torch.float32)
    loss_fn, model = make(weight)
    hidden = model(inputs).detach().requires_grad_()
    for each in (labels, torch.full_like(labels, -100)):
        loss, _ = loss_fn(hidden, each, count)
        dhidden, dweight = torch.autograd.grad(loss, (hidden, model.lm_head.weight))
        assert loss.dtype is torch.float32
        assert loss.item() == 0
        assert not dhidden.any()
        assert not dweight.any()
    want, _ = loss_fn(hidden, labels)
    torch.testing.assert_close(loss_fn(hidden, labels, count + 8)[0], want / 8)


def test_a_forward_that_was_replaced_later(monkeypatch):
    inputs, weight, labels = batch(torch.float32)
    loss_fn, model = make(weight)
    hidden, head = model(inputs), model.lm_head
    monkeypatch.setattr(head, "forward", lambda hidden: hidden, raising=False)
    with pytest.raises(ValueError, match=r"^lm_head: got Linear, whose forward may change the logits"):
        loss_fn(hidden, labels)
    monkeypatch.undo()
    monkeypatch.setattr(type(head), "forward", lambda self, hidden: hidden)
    with pytest.raises(ValueError, match=r"^lm_head: got Linear, whose forward may change the logits"):
        loss_fn(hidden, labels)


def test_refused():
    from torchtitan.components.loss import MSELoss

    from cute_lce.integrations.torchtitan import FusedLoss

    class Capped(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).tanh()

    loss: Any = FusedLoss.Config().build(compile_config=None)
    for head in (Capped(D, V), nn.RMSNorm(D)):
        with pytest.raises(ValueError, match=f"^lm_head: got {type(head).__name__}"):
            loss.set_lm_head(head)
    with pytest.raises(ValueError, match=r"^lm_head: got none"):
        loss(torch.zeros(1, 1, D), torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^loss_fn: got MSELoss"):
        FusedLoss.Config(loss_fn=MSELoss.Config()).build()
    for wrong in (-1, float("nan"), torch.ones(2)):
        loss_fn = make(torch.zeros(V, D))[0]
        with pytest.raises(ValueError, match=r"^global_valid_tokens: got"):
            loss_fn(torch.zeros(1, 1, D), torch.zeros(1, 1, dtype=torch.int64), wrong)
    loss = FusedLoss.Config(schedule="fast").build()
    loss.set_lm_head(nn.Linear(D, V))
    with pytest.raises(ValueError, match=r"^schedule: got 'fast'"):
        loss(torch.zeros(1, 1, D), torch.zeros(1, 1, dtype=torch.int64))
    head: Any = nn.Linear(D, V)
    loss = FusedLoss.Config().build()
    loss.set_lm_head(head)
    head.register_forward_hook(lambda module, given, logits: 2 * logits)
    with pytest.raises(ValueError, match=r"^lm_head: got a forward hook"):
        loss(torch.zeros(1, 1, D), torch.zeros(1, 1, dtype=torch.int64))
