"""NeMo Automodel's loss, by the signature of its class: Automodel itself is not installed here."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.numerics import assert_close, random_case

HOOK = "nemo_automodel.components.loss.linear_ce"
OURS = "cute_lce.integrations.automodel"


class FusedLinearCrossEntropy(nn.Module):
    """What of Automodel's class ours follows: its constructor, its attributes, and what gathers a weight."""

    def __init__(
        self,
        ignore_index: int = -100,
        logit_softcapping: float = 0,
        reduction: str = "sum",
        impl: str = "cce",
    ):
        super().__init__()
        self.ignore_index, self.logit_softcapping = ignore_index, logit_softcapping
        self.reduction, self.impl = reduction, impl

    @staticmethod
    def materialize_lm_weight(lm_weight: Tensor, *, grad_reduce_group: Any = None) -> Tensor:
        assert grad_reduce_group == "the group"
        return lm_weight.clone()

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group: Any = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor:
        raise AssertionError("Automodel's own forward was called")


@pytest.fixture
def module(monkeypatch) -> Any:
    name = ""
    for part in HOOK.split("."):
        name = f"{name}.{part}".lstrip(".")
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[HOOK].FusedLinearCrossEntropy = FusedLinearCrossEntropy  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    yield importlib.import_module(OURS)
    sys.modules.pop(OURS, None)


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    case = random_case(24, 32, 150, dtype, scale=3.0)
    case.target[[2, 11]] = -100
    return case.input.view(2, 12, 32), case.linear_weight, case.target.view(2, 12)


def by_torch(dtype, options: dict, hidden: Tensor, weight: Tensor, labels: Tensor, **arguments: Any):
    """(loss, dhidden, dweight) by its contract, with the logits."""
    leaves = [each.to(dtype, copy=True).requires_grad_() for each in (hidden, weight)]
    logits = leaves[0] @ leaves[1].T
    cap = options.get("logit_softcapping", 0)
    logits = cap * (logits / cap).tanh() if cap else logits
    each = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    weights = arguments.get("loss_weights")
    total = (each if weights is None else each * weights.to(dtype)).sum()
    if options.get("reduction") == "mean":
        total = total / (labels != -100).sum()
    total = total / arguments.get("num_label_tokens", 1)
    return total.detach(), *torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, {}),
        ({"reduction": "mean"}, {}),
        ({"logit_softcapping": 5.0}, {"num_label_tokens": 17}),
        ({}, {"num_label_tokens": 22, "loss_weights": torch.linspace(0, 2, 24).view(2, 12)}),
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values_and_gradients(module, device, dtype, options, arguments):
    hidden, weight, labels = tensors(dtype)
    given = [each.to(device) for each in (hidden, weight)]
    leaves = [each.clone().requires_grad_() for each in given]
    loss = module.FusedLinearCrossEntropy(**options)(leaves[0], labels.to(device), leaves[1], **arguments)
    found = loss.detach(), *torch.autograd.grad(loss, leaves)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    expected, baseline = (
        by_torch(kind, options, hidden, weight, labels, **arguments) for kind in (torch.float64, wide)
    )
    for name, got, want, plain in zip(("loss", "dhidden", "dweight"), found, expected, baseline, strict=True):
        # Products of narrow operands on a GPU take dlogits that are rounded.
        rounding = 2.0**-8 if got.is_cuda and got.dtype is torch.bfloat16 else 0.0
        assert_close(name, got.cpu(), want, plain.to(got.dtype), rounding=rounding)


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0), torch.tensor(0.0), np.int64(0), np.float32(0)])
def test_no_tokens_give_zeros(module, count):
    hidden, weight, labels = tensors(torch.float32)
    leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
    loss_fn = module.FusedLinearCrossEntropy()
    for each in (labels, torch.full_like(labels, -100)):
        loss = loss_fn(leaves[0], each, leaves[1], num_label_tokens=count)
        assert loss.dtype is torch.float32
        assert loss.item() == 0
        assert not any(gradient.any() for gradient in torch.autograd.grad(loss, leaves))
    got = loss_fn(hidden, labels, weight, num_label_tokens=count + 17)
    torch.testing.assert_close(got, loss_fn(hidden, labels, weight) / 17)
    with pytest.raises(ValueError, match=r"^num_label_tokens: got -1, want a finite number"):
        loss_fn(hidden, labels, weight, num_label_tokens=-1)


def test_a_sharded_weight_is_gathered_by_automodel(module):
    hidden, weight, labels = tensors(torch.float32)
    weight.device_mesh = None  # pyright: ignore[reportAttributeAccessIssue]
    loss = module.FusedLinearCrossEntropy()
    assert loss(hidden, labels, weight, grad_reduce_group="the group").isfinite()


def test_it_is_automodels_class_and_signature(module):
    assert issubclass(module.FusedLinearCrossEntropy, FusedLinearCrossEntropy)
    ours, theirs = (
        [(name, each.default) for name, each in inspect.signature(kind.forward).parameters.items()]
        for kind in (module.FusedLinearCrossEntropy, FusedLinearCrossEntropy)
    )
    assert ours == theirs


@pytest.mark.parametrize("name", ["num_label_tokens", "loss_weights"])
def test_refused(module, name):
    hidden, weight, labels = tensors(torch.float32)
    with pytest.raises(ValueError, match=f"^{name}: got one with reduction='mean'"):
        module.FusedLinearCrossEntropy(reduction="mean")(hidden, labels, weight, **{name: torch.ones(2, 12)})


def test_without_automodel():
    with pytest.raises(ImportError, match="want NeMo Automodel"):
        importlib.import_module(OURS)
