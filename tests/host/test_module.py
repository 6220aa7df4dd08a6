"""LinearCrossEntropy: an nn.Linear whose forward is the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cute_lce import LinearCrossEntropy, LossOptions, linear_cross_entropy
from tests import numerics


def test_is_a_linear():
    head = LinearCrossEntropy(16, 50, dtype=torch.float64)
    assert isinstance(head, nn.Linear)
    assert [name for name, _ in head.named_parameters()] == ["weight"]
    assert head.weight.shape == (50, 16)
    assert head.weight.dtype is torch.float64
    linear = nn.Linear(16, 50, bias=False, dtype=torch.float64)
    linear.load_state_dict(head.state_dict())
    assert torch.equal(linear.weight, head.weight)


def test_same_start_as_a_linear():
    torch.manual_seed(5)
    head = LinearCrossEntropy(16, 50)
    torch.manual_seed(5)
    assert torch.equal(head.weight, nn.Linear(16, 50, bias=False).weight)


def test_forward_passes_every_option():
    case = numerics.make("leading", torch.float32)
    case.target[0, 0, 0] = 7
    options = {"reduction": "none", "ignore_index": 7, "schedule": "keep", "workspace_mb": 2, "window": 64}
    head = LinearCrossEntropy(24, 77, **options)
    with torch.no_grad():
        head.weight.copy_(case.linear_weight)
    case.target[case.target == -100] = 7
    loss = head(case.input, case.target)
    assert torch.equal(loss, linear_cross_entropy(case.input, head.weight, case.target, **options))
    loss.sum().backward()
    assert head.weight.grad is not None
    assert "keep" in repr(head)


def test_forward_passes_every_term():
    case = numerics.make("leading", torch.float32)
    options: dict[str, Any] = {"label_smoothing": 0.1, "logit_scale": 0.5, "softcap": 8.0, "z_loss": 0.1}
    head: Any = LinearCrossEntropy(24, 77, bias=True, **options)
    assert [name for name, _ in head.named_parameters()] == ["weight", "bias"]
    tensors = {"weight": torch.rand(77), "token_weight": torch.rand(case.target.shape), "denominator": 7}
    loss = head(case.input, case.target, **tensors)
    options |= {"linear_bias": head.bias, **tensors}
    assert torch.equal(loss, linear_cross_entropy(case.input, head.weight, case.target, **options))
    loss.backward()
    assert head.bias.grad is not None
    assert head.bias.grad.any()
    assert "softcap=8.0" in repr(head)
    assert "bias=True" in repr(head)
    head.softcap = None
    assert head.terms.softcap is None


def test_workspace_is_passed():
    head = LinearCrossEntropy(24, 77, workspace_mb=0.0001)
    case = numerics.make("leading", torch.float32)
    with pytest.raises(ValueError, match=r"workspace_mb: got 9\.9\d*e-05, want at least 0\."):
        head(case.input, case.target)


def test_tied_embedding_trains():
    torch.manual_seed(0)
    embedding = nn.Embedding(40, 16)
    head = LinearCrossEntropy(16, 40)
    head.weight = embedding.weight
    tokens = torch.arange(40)
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.05)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = head(embedding(tokens), tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing: got 1\.5"),
        ({"softcap": 0.0}, ValueError, r"softcap: got 0\.0"),
        ({"logit_scale": None}, TypeError, "logit_scale: got NoneType"),
        ({"reduction": "max"}, ValueError, "reduction: got 'max'"),
        ({"schedule": "max"}, ValueError, "schedule: got 'max'"),
        ({"reduction": 1}, TypeError, "reduction: got int"),
        ({"schedule": None}, TypeError, "schedule: got NoneType"),
        ({"ignore_index": 0.5}, TypeError, "ignore_index: got float"),
        ({"ignore_index": True}, TypeError, "ignore_index: got bool"),
        ({"workspace_mb": "1"}, TypeError, "workspace_mb: got str"),
        ({"workspace_mb": True}, TypeError, "workspace_mb: got bool"),
        ({"workspace_mb": -1}, ValueError, "workspace_mb: got -1"),
        ({"window": 64.0}, TypeError, "window: got float"),
        ({"window": True}, TypeError, "window: got bool"),
        ({"window": 0}, ValueError, "window: got 0"),
    ],
)
def test_refused(options, error, message):
    with pytest.raises(error, match=message):
        LinearCrossEntropy(4, 5, **options)


def test_options_are_frozen_data():
    options = LossOptions(ignore_index=None)
    assert options == LossOptions("mean", -100)
    assert hash(options) == hash(LossOptions())
    with pytest.raises(AttributeError):
        options.reduction = "sum"  # pyright: ignore[reportAttributeAccessIssue]
