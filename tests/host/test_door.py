"""What the public calls make of values of other kinds: NumPy's scalars are numbers; what is no dense tensor
where one is wanted is refused by its name, with the way out."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cute_lce
from cute_lce import LinearCrossEntropy, LinearLogprob, linear_cross_entropy, linear_logprob, options
from cute_lce.scalars import python_number
from tests.logit_terms import LogCap

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]
N, D, V, K, M = 4, 16, 37, 3, 5
generator = torch.Generator().manual_seed(62)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def classes(*shape: int) -> Tensor:
    return torch.randint(V, shape, generator=generator)


ONE: dict[str, Any] = {
    "input": normal(N, D),
    "linear_weight": normal(V, D),
    "target": torch.tensor([3, 0, 36, 7]),
}
HEADS: dict[str, Any] = {"input": normal(N, D), "linear_weight": normal(K, V, D), "target": classes(N, K)}
LISTED: dict[str, Any] = {**HEADS, "linear_weight": list(normal(K, V, D))}
SAMPLED: dict[str, Any] = {**ONE, "sampled_ids": classes(M)}
LOSS = {"linear_bias": (V,), "weight": (V,), "token_weight": (N,), "denominator": ()}
LOSSES = {"linear_bias": (K, V), "weight": (K, V), "token_weight": (N, K), "denominator": (K,)}


def without(tensors: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


class Call:
    """A public call. operands: what it needs; tensors: names and shapes of further ones, beside some of which
    others are given."""

    def __init__(self, run: Callable, operands: dict[str, Any], tensors: dict[str, tuple], **beside: dict):
        self.run, self.operands, self.tensors, self.beside = run, operands, tensors, beside

    def good(self, name: str) -> Any:
        if name in self.operands:
            return self.operands[name]
        return classes(*self.tensors[name]) if name == "topk_ids" else torch.ones(self.tensors[name])

    def __call__(self, **changes: Any) -> Any:
        (name,) = changes
        given = {**self.operands, **self.beside.get(name, {}), **changes}
        if name == "grad_weight_out":
            weight = given["linear_weight"]
            listed = isinstance(weight, list)
            given["linear_weight"] = (
                [each.clone().requires_grad_() for each in weight]
                if listed
                else weight.clone().requires_grad_()
            )
        return self.run(**given)


TOPK = {"topk_ids": {"outputs": ("topk_logprob",)}}
LOG_Q = {"sampled_log_q": {"target_log_q": torch.zeros(N)}, "target_log_q": {"sampled_log_q": torch.zeros(M)}}
CALLS = {
    "one head": Call(linear_cross_entropy, ONE, {**LOSS, "grad_weight_out": (V, D)}),
    "heads": Call(linear_cross_entropy, HEADS, {**LOSSES, "grad_weight_out": (K, V, D)}),
    "listed heads": Call(linear_cross_entropy, LISTED, {**LOSSES, "grad_weight_out": (K, V, D)}),
    "logprob": Call(
        linear_logprob, ONE, {"linear_bias": (V,), "temperature": (N,), "topk_ids": (N, 2)}, **TOPK
    ),
    "sampled": Call(
        cute_lce.sampled_linear_cross_entropy,
        SAMPLED,
        {**without(LOSS, "weight"), "sampled_log_q": (M,), "target_log_q": (N,)},
        **LOG_Q,
    ),
    "module": Call(LinearCrossEntropy(D, V), without(ONE, "linear_weight"), without(LOSS, "linear_bias")),
    "module of heads": Call(
        LinearCrossEntropy(D, V, num_heads=K), without(HEADS, "linear_weight"), without(LOSSES, "linear_bias")
    ),
    "logprob's module": Call(
        LinearLogprob(D, V, outputs=("topk_logprob",)), without(ONE, "linear_weight"), {"topk_ids": (N, 2)}
    ),
}
ARGUMENTS = [
    (call, name)
    for call, subject in CALLS.items()
    for name in (*subject.operands, *subject.tensors)
    if name in ("input", "target", "linear_weight", "sampled_ids") or name in subject.tensors
]


def nested(tensor: Tensor) -> Tensor:
    rows = tensor.reshape(-1, 1)
    return torch.nested.nested_tensor([rows[:1], rows[:2]])


def jagged(tensor: Tensor) -> Tensor:
    rows = tensor.reshape(-1, 1)
    return torch.nested.nested_tensor([rows[:1], rows[:2]], layout=torch.jagged)


def quantised(tensor: Tensor) -> Tensor:
    return torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)


def every(convert: Callable[[Tensor], Any], value: Tensor | list[Tensor]) -> Any:
    """Of a tensor, or of each in a list."""
    return [convert(each) for each in value] if isinstance(value, list) else convert(value)


KINDS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "ndarray": (Tensor.numpy, r"got ndarray, want .*: torch\.from_numpy\(\w+\) is one"),
    "list": (
        lambda t: t.tolist() if t.dim() else [1.0],
        r"got list, want .*: torch\.as_tensor\(\w+\) is one",
    ),
    "str": (lambda t: "abc", "got str, want "),
    "nested": (nested, "got a nested tensor, want a dense tensor"),
    "jagged": (jagged, "got a nested tensor, want a dense tensor"),
    "sparse": (lambda t: t.reshape(-1, 1).to_sparse(), r"got layout torch\.sparse_coo, want a dense tensor"),
    "complex": (lambda t: t.to(torch.complex64), "got torch.complex64, want "),
    "int16": (lambda t: t.to(torch.int16), "got torch.int16, want "),
    "quantised": (quantised, "got torch.qint8, want "),
}


@pytest.mark.parametrize(("call", "name"), ARGUMENTS)
def test_what_is_no_such_tensor_is_refused(call: str, name: str):
    subject = CALLS[call]
    for convert, message in KINDS.values():
        with pytest.raises((TypeError, ValueError), match=f"^{name}: {message}"):
            subject(**{name: every(convert, subject.good(name))})
    with pytest.raises(ValueError, match=r"^\w+: got device (meta|cpu), want \w+'s device, (meta|cpu)$"):
        subject(**{name: every(lambda t: t.to("meta"), subject.good(name))})
    if name in ("input", "linear_weight", "sampled_ids") or (name == "target" and "module" not in call):
        with pytest.raises(TypeError, match=f"^{name}: got NoneType, want a torch.Tensor"):
            subject(**{name: None})


def test_the_one_on_another_device_is_named():
    for name in ONE:
        with pytest.raises(ValueError, match=f"^{name}: got device meta, want "):
            linear_cross_entropy(**{**ONE, name: ONE[name].to("meta")})


def test_a_module_refuses_what_it_makes_no_logits_of():
    for module in (LinearCrossEntropy(D, V), LinearCrossEntropy(D, V, softcap=2.0)):
        with pytest.raises(TypeError, match="input: got ndarray"):
            module(ONE["input"].numpy())


def test_a_buffer_of_heads_is_refused_by_what_the_caller_gave():
    """(3, 3, 6) in float32: the second head lies 72 bytes behind the first."""
    weight = normal(3, 3, 6).requires_grad_()
    whole = torch.zeros(3, 3, 6)
    call: dict[str, Any] = {"input": normal(N, 6), "linear_weight": weight, "target": classes(N, 3) % 3}
    with pytest.raises(
        ValueError, match=rf"shape \(3, 3, 6\), .* and address {whole.data_ptr():#x}, want"
    ) as error:
        linear_cross_entropy(**call, grad_weight_out=whole)
    assert "a list with a tensor for each head" in str(error.value)
    buffers = [torch.zeros(3, 6) for _ in range(3)]
    linear_cross_entropy(**call, grad_weight_out=buffers).sum().backward()
    wanted = torch.autograd.grad(linear_cross_entropy(**call).sum(), weight)[0]
    torch.testing.assert_close(torch.stack(buffers), wanted)


def test_one_head_is_counted_as_one():
    heads = {**HEADS, "linear_weight": HEADS["linear_weight"][:1]}
    for changes in ({}, {"target": classes(N, 1), "weight": [None, None]}):
        with pytest.raises(ValueError, match="want") as error:
            linear_cross_entropy(**{**heads, **changes})
        assert "1 heads" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "missing"), [("sampled_log_q", "target_log_q"), ("target_log_q", "sampled_log_q")]
)
def test_a_log_q_alone_is_refused_by_its_name(given: str, missing: str):
    log_q = torch.zeros(M if given == "sampled_log_q" else N)
    with pytest.raises(ValueError, match=f"^{given}: got a tensor without a {missing}, want both or neither"):
        CALLS["sampled"].run(**SAMPLED, **{given: log_q})


# ----------------------------------------------------------------------------------------------------------
# NumPy's scalars


def of_loss(**given: Any) -> Tensor:
    return linear_cross_entropy(**ONE, **given)


def of_heads(**given: Any) -> Tensor:
    return linear_cross_entropy(**HEADS, **given)


def of_module(**given: Any) -> Tensor:
    module = LinearCrossEntropy(D, V, **given)
    module.weight.data.copy_(ONE["linear_weight"])
    for name, value in given.items():
        setattr(module, name, value)
    assert all(type(getattr(module, name)) in (int, float) for name in given)
    return module(ONE["input"], ONE["target"])


def of_logprob(**given: Any) -> Tensor:
    stats = linear_logprob(**ONE, outputs=("logprob", "entropy"), **given)
    assert stats.logprob is not None
    return stats.logprob


def of_sampled(**given: Any) -> Tensor:
    return cute_lce.sampled_linear_cross_entropy(**SAMPLED, **given)


def of_transform(**given: Any) -> Tensor:
    """Which something intercepts."""
    return torch.func.grad(lambda hidden: linear_cross_entropy(**{**ONE, "input": hidden}, **given))(
        ONE["input"]
    )


LOSS_NUMBERS = {
    "logit_scale": 0.5,
    "label_smoothing": 0.25,
    "softcap": 2.0,
    "z_loss": 0.5,
    "ignore_index": 3,
    "window": 16,
    "workspace_mb": 2,
}
NUMBERS: dict[Callable[..., Tensor], dict[str, float]] = {
    of_loss: {**LOSS_NUMBERS, "denominator": 5},
    of_heads: {**LOSS_NUMBERS, "denominator": 5},
    of_module: LOSS_NUMBERS,
    of_logprob: {**without(LOSS_NUMBERS, "label_smoothing", "z_loss"), "temperature": 0.5},
    of_sampled: {"logit_scale": 0.5, "denominator": 5, "ignore_index": 3, "window": 2},
    of_transform: {**LOSS_NUMBERS, "denominator": 5},
}


@pytest.mark.parametrize(("call", "name"), [(call, name) for call in NUMBERS for name in NUMBERS[call]])
def test_a_numpy_scalar_is_the_number_of_its_value(call: Callable[..., Tensor], name: str):
    number = NUMBERS[call][name]
    wanted = call(**{name: number})
    floats = np.float16, np.float32, np.float64, Fraction
    for kind in (np.int64, np.uint8) if isinstance(number, int) else floats:
        assert torch.equal(call(**{name: kind(number)}), wanted), kind
    if name not in ("window", "workspace_mb"):
        assert not torch.equal(call(), wanted)


def test_a_term_of_your_own_has_numpy_fields():
    half: Any = np.float32(0.5)
    yes: Any = np.bool_(True)
    assert torch.equal(of_loss(softcap=LogCap(half)), of_loss(softcap=LogCap(0.5)))
    assert LogCap(half).key == LogCap(0.5).key
    with pytest.raises(TypeError, match=r"^LogCap\.cap: got bool, want a number"):
        LogCap(yes)


def test_numpy_bools_are_bools():
    weight, out = ONE["linear_weight"].clone().requires_grad_(), torch.zeros(V, D)
    call: dict[str, Any] = {**ONE, "linear_weight": weight}
    yes: Any = np.bool_(True)
    no: Any = np.bool_(False)
    gradients = []
    for dummy in (yes, no):
        loss = linear_cross_entropy(**call, grad_weight_out=out, grad_weight_dummy=dummy)
        gradients += torch.autograd.grad(loss, weight, allow_unused=True)
    assert gradients[0] is not None
    assert gradients[1] is None
    assert torch.equal(linear_cross_entropy(**ONE, grad_weight_dummy=no), of_loss())
    ids = ONE["target"][:1].repeat(3)
    losses = [
        cute_lce.sampled_linear_cross_entropy(**ONE, sampled_ids=ids, remove_accidental_hits=removes)
        for removes in (True, False, yes, no)
    ]
    assert losses[:2] == losses[2:]
    assert losses[0] != losses[1]
    stats = linear_logprob(**call, outputs=("entropy",), entropy_grad=no)
    assert stats.entropy is not None
    assert not stats.entropy.requires_grad
    for name in ("logit_scale", "z_loss", "ignore_index", "denominator"):
        with pytest.raises(TypeError, match=f"^{name}: got bool, want "):
            of_loss(**{name: np.bool_(True)})


@pytest.mark.parametrize("value", [np.ones(2), np.array(0.5), torch.tensor(0.5), Decimal("0.5"), 1j, "a"])
def test_what_is_no_number_is_refused(value: object):
    kind = type(value).__name__
    for name in without(LOSS_NUMBERS, "window", "workspace_mb", "ignore_index"):
        for call in (of_loss, of_heads, of_transform):
            with pytest.raises(TypeError, match=f"^{name}: got {kind}, want a number") as error:
                call(**{name: value})
            assert hasattr(value, "item") == str(error.value).endswith(f": {name}.item() is one")
    for name in ("window", "workspace_mb", "ignore_index"):
        with pytest.raises(TypeError, match=f"^{name}: got {kind}, want "):
            of_loss(**{name: value})


def test_torch_compile_leaves_a_numpy_scalar_to_python():
    """Which is an array to it: with graph breaks the call has the right value."""

    def step(given: dict[str, Any]) -> Tensor:
        return linear_cross_entropy(**ONE, **given)

    run = torch.compile(step, backend="eager")
    for given in (
        {"logit_scale": np.float32(0.5)},
        {"z_loss": np.float64(0.5)},
        {"denominator": np.int64(5)},
    ):
        torch.testing.assert_close(run(given), step(given))


def test_python_numbers_stay_what_they_are():
    big = Fraction(10**400)
    for value in (1, True, 0.5, None, "a", big, Decimal(1)):
        assert python_number(value) is value
    assert type(python_number(np.int8(3))) is int
    assert type(options.LossOptions("mean", np.int64(3), np.float32(0.5)).logit_scale) is float  # pyright: ignore
