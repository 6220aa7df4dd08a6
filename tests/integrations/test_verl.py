"""The function that verl calls, against its contract: verl itself needs a GPU and what is not installed.

The contract was read in verl 0.9.1 (verl/utils/kernel): positional arguments, flat results, temperature on
the logits, entropy of softmax(logits), and with a group shards in rank order and a gradient by hidden of
which the caller takes the sum.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cute_lce.integrations import verl
from tests.distributed.calls import slice_of
from tests.distributed.ranks import Rank
from tests.numerics import assert_close, random_case

S, D, V, TEMPERATURE = 26, 32, 320, 0.7


def contract(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Any = 1.0) -> tuple[Tensor, Tensor]:
    """By its definition, with the logits."""
    logits = hidden.flatten(0, -2) @ weight.T / temperature
    each = logits.log_softmax(-1)
    valid = labels.flatten() != -100
    own = each.gather(1, labels.flatten().where(valid, 0).unsqueeze(1)).squeeze(1)
    return own * valid, -(each.exp() * each).sum(-1) * valid


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden (s, 1, d), weight, labels (1, s)), as its Megatron models have them."""
    case = random_case(S, D, V, dtype, scale=2.0)
    case.target[[3, 25]] = -100
    return case.input.unsqueeze(1), case.linear_weight, case.target.unsqueeze(0)


def by_the_contract(dtype: torch.dtype, reduction: str, upstream: tuple[Tensor, Tensor]):
    hidden, weight, labels = tensors(dtype)
    found = []
    for kind in (torch.float64, torch.float64 if dtype is torch.float64 else torch.float32):
        leaves = [each.to(kind).requires_grad_() for each in (hidden, weight)]
        logprobs, entropy = contract(leaves[0], leaves[1], labels, TEMPERATURE)
        logprobs = logprobs if reduction == "none" else getattr(logprobs, reduction)()
        dout = [one.to(kind) for one in upstream]
        found.append(
            (logprobs.detach(), entropy.detach(), *torch.autograd.grad((logprobs, entropy), leaves, dout))
        )
    return found


def upstream_of(reduction: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (S,) if reduction == "none" else ()
    return torch.randn(shape, generator=generator), torch.randn(S, generator=generator)


@pytest.mark.parametrize("reduction", verl.REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_process(device, dtype, reduction):
    hidden, weight, labels = (each.to(device) for each in tensors(dtype))
    leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
    logprobs, entropy = verl.linear_cross_entropy(leaves[0], leaves[1], labels, TEMPERATURE, reduction, None)
    upstream = upstream_of(reduction)
    expected, baseline = by_the_contract(dtype, reduction, upstream)
    assert entropy.shape == (S,)
    # Products of narrow operands on a GPU take dlogits that are rounded.
    narrow = device == "cuda" and dtype is torch.bfloat16
    dout = [one.to(out) for one, out in zip(upstream, (logprobs, entropy), strict=True)]
    gradients = torch.autograd.grad((logprobs, entropy), leaves, dout)
    for name, got, want, plain in zip(
        ("logprobs", "entropy", "dhidden", "dweight"),
        (logprobs.detach(), entropy.detach(), *gradients),
        expected,
        baseline,
        strict=True,
    ):
        assert got.dtype is (
            dtype if name in ("dhidden", "dweight") or dtype.itemsize == 8 else torch.float32
        )
        rounding = 2.0**-8 if narrow and name in ("dhidden", "dweight") else 0.0
        assert_close(name, got.cpu(), want, plain.to(got.dtype), rounding=rounding)


def temperatures() -> Tensor:
    return torch.linspace(0.4, 1.6, S)


@pytest.mark.parametrize("shape", [(S,), (1, S), (S, 1), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_temperature_of_each_token(dtype, shape):
    given = temperatures().reshape(shape) if shape else torch.tensor(TEMPERATURE)
    hidden, weight, labels = tensors(dtype)
    found = []
    call: Any
    for call, kind in ((contract, torch.float64), (contract, dtype), (verl.linear_cross_entropy, dtype)):
        leaves = [each.to(kind, copy=True).requires_grad_() for each in (hidden, weight)]
        used = given.to(kind).reshape(-1, 1) if call is contract else given
        results = call(*leaves, labels, used)
        gradients = torch.autograd.grad(results, leaves, [each.to(kind) for each in upstream_of("none")])
        found.append([each.detach() for each in (*results, *gradients)])
    for name, want, plain, got in zip(("logprobs", "entropy", "dhidden", "dweight"), *found, strict=True):
        assert_close(name, got, want, plain)


@pytest.mark.parametrize("temperature", [np.float64(0.5), torch.tensor(1), torch.ones(S, dtype=torch.int64)])
def test_other_kinds_of_temperature(temperature):
    hidden, weight, labels = tensors(torch.float32)
    number = 0.5 if isinstance(temperature, float) else 1.0
    found = verl.linear_cross_entropy(hidden, weight, labels, temperature)
    want = verl.linear_cross_entropy(hidden, weight, labels, number)
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reduction", verl.REDUCTIONS)
@pytest.mark.parametrize("n", [0, S])
def test_no_valid_token(reduction, n):
    hidden, weight, labels = tensors(torch.float32)
    leaves = [hidden[:n].clone().requires_grad_(), weight.clone().requires_grad_()]
    ignored = torch.full_like(labels[:, :n], -100)
    logprobs, entropy = verl.linear_cross_entropy(leaves[0], leaves[1], ignored, 1.0, reduction)
    assert logprobs.shape == ((n,) if reduction == "none" else ())
    assert not logprobs.any()
    assert not entropy.any()
    gradients = torch.autograd.grad(logprobs.sum() + entropy.sum(), leaves)
    assert not any(gradient.any() for gradient in gradients)


def sharded(here: Rank) -> None:
    for dtype in here.dtypes:
        hidden, weight, labels = (each.to(here.device) for each in tensors(dtype))
        leaf = hidden.clone().requires_grad_()
        shard = slice_of(weight, here, 0).clone().requires_grad_()
        found = verl.linear_cross_entropy(leaf, shard, labels, TEMPERATURE, "none", here.group)
        upstream = tuple(each.to(here.device) for each in upstream_of("none"))
        dout = [one.to(out.dtype) for one, out in zip(upstream, found, strict=True)]
        dhidden, dweight = torch.autograd.grad(found, (leaf, shard), dout)
        assert dhidden.shape == hidden.shape
        expected, baseline = by_the_contract(dtype, "none", upstream_of("none"))
        expected, baseline = ([each.to(here.device) for each in one] for one in (expected, baseline))
        for name, got, want, plain in zip(("logprobs", "entropy"), found, expected, baseline, strict=False):
            assert_close(name, got.detach(), want, plain)
        part = dhidden.clone()
        # What verl does with it, in hidden's dtype: each part was rounded, and so is the sum.
        dist.all_reduce(dhidden, group=here.group)
        assert not torch.equal(part, dhidden)
        # And on a GPU each part's dlogits were.
        rounding = 2.0**-7 if dtype is torch.bfloat16 else 0.0
        assert_close("dhidden", dhidden, expected[2], baseline[2].to(dtype), rounding=rounding)
        rows = [slice_of(one[3], here, 0) for one in (expected, baseline)]
        assert_close("dweight", dweight, rows[0], rows[1].to(dtype), rounding=rounding / 2)


def test_a_group_of_one_rank_is_none():
    hidden, weight, labels = tensors(torch.float32)
    group = dist.ProcessGroup(0, 1)  # pyright: ignore[reportCallIssue]
    for one, other in zip(
        verl.linear_cross_entropy(hidden, weight, labels, 1.0, "none", group),
        verl.linear_cross_entropy(hidden, weight, labels),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_its_signature():
    """Names, order and defaults of verl's own, which its models use positionally."""
    parameters = inspect.signature(verl.linear_cross_entropy).parameters
    assert [(name, each.default) for name, each in parameters.items()] == [
        ("hidden", inspect.Parameter.empty),
        ("weight", inspect.Parameter.empty),
        ("labels", inspect.Parameter.empty),
        ("temperature", 1.0),
        ("reduction", "none"),
        ("dist_process_group", None),
    ]


def test_installed(monkeypatch):
    """In the kernel's module and in those that have imported its function, which here are stubs."""
    for name in ("verl", "verl.utils", "verl.utils.kernel", verl._KERNEL, verl._CALLERS[0]):
        module = types.ModuleType(name)
        module.__path__ = []
        module.linear_cross_entropy = None  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, name, module)
    verl.install()
    for name in (verl._KERNEL, verl._CALLERS[0]):
        assert sys.modules[name].linear_cross_entropy is verl.linear_cross_entropy
    assert verl._CALLERS[1] not in sys.modules


def test_install_without_verl():
    with pytest.raises(ImportError, match=r"could not be imported, want verl \(pip install verl\)"):
        verl.install()


@pytest.mark.parametrize(
    ("name", "error", "arguments"),
    [
        ("temperature", TypeError, ("1",)),
        ("temperature", ValueError, (torch.ones(S - 1),)),
        ("temperature", ValueError, (0.0,)),
        ("reduction", ValueError, (1.0, "batchmean")),
        ("dist_process_group", TypeError, (1.0, "none", 3)),
        ("target", ValueError, (1.0, "none", None, 5)),
    ],
)
def test_refused(name, error, arguments):
    hidden, weight, labels = tensors(torch.float32)
    arguments, rest = arguments[:3], arguments[3:]
    call: Any = verl.linear_cross_entropy
    with pytest.raises(error, match=f"^{name}: got"):
        call(hidden, weight, labels[:, : S - sum(rest)], *arguments)
    for index, wrong in enumerate(("hidden", "weight", "labels")):
        operands: list[Any] = [hidden, weight, labels]
        operands[index] = [1]
        with pytest.raises(TypeError, match=f"^{wrong}: got list, want a tensor"):
            call(*operands)
    with pytest.raises(ValueError, match=r"^hidden: got shape \(\)"):
        call(torch.tensor(1.0), weight, labels)
    weight.device_mesh = None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="got a DTensor"):
        verl.linear_cross_entropy(hidden, weight, labels)
