"""Functions of logits of one's own, in place of a softcap, by the streaming path."""

from __future__ import annotations

import copy
import itertools
import math
import os
import re
import subprocess
import sys
from dataclasses import InitVar, dataclass
from typing import Any

import pytest
import torch

from cute_lce import LinearCrossEntropy, LogitTerm, linear_cross_entropy, linear_logprob, reference
from cute_lce.logit_term import kernel_term
from tests.logit_terms import Exp, Knee, Line, LogCap, Same, SoftPlus, Tanh
from tests.numerics import assert_close, random_case

TERMS = LogCap(0.7), Tanh(2.0), Knee(0.5), SoftPlus(), Exp(), Line(2.0), Same()
each_term = pytest.mark.parametrize("term", TERMS, ids=lambda term: type(term).__name__)


def case(dtype: torch.dtype = torch.float64):
    found = random_case(9, 8, 31, dtype, scale=2.0)
    return found.input.clone().requires_grad_(), found.linear_weight.clone().requires_grad_(), found.target


@each_term
def test_losses_and_gradients(term):
    hidden, weight, target = case()
    target[2] = -100
    others = {"z_loss": 0.01, "label_smoothing": 0.1, "logit_scale": 0.6}
    for terms, reduction, schedule in itertools.product(
        ({}, others), ("mean", "none"), ("recompute", "keep", "grad_in_forward")
    ):
        if (reduction, schedule) == ("none", "grad_in_forward"):
            continue
        given: dict[str, Any] = {"softcap": term, "reduction": reduction, **terms}
        found = linear_cross_entropy(hidden, weight, target, schedule=schedule, window=11, **given)
        wanted = reference.linear_cross_entropy(hidden, weight, target, **given)
        assert torch.allclose(found, wanted, atol=1e-12)
        gradients = [torch.autograd.grad(each.sum(), (hidden, weight)) for each in (found, wanted)]
        for mine, other in zip(*gradients, strict=True):
            assert other.abs().max() > 1e-3
            assert torch.allclose(mine, other, atol=1e-12)
    plain = linear_cross_entropy(hidden, weight, target)
    differs = (plain - linear_cross_entropy(hidden, weight, target, softcap=term)).abs() > 1e-3
    assert bool(differs) == (term != Same())


@each_term
def test_gradcheck(term):
    hidden, weight, target = case()

    def numbers(hidden, weight):
        found = linear_logprob(
            *(hidden, weight, target),
            softcap=term,
            temperature=0.7,
            outputs=("logprob", "entropy", "topk_logprob"),
            topk_ids=torch.stack([target - 1, target, (target + 3) % 31], 1),
        )
        return tuple(each for each in found if each is not None)

    assert torch.autograd.gradcheck(numbers, (hidden, weight), atol=1e-6)


@each_term
def test_float32_has_its_own_precision(term):
    hidden, weight, target = case(torch.float32)
    wanted, plain = (
        reference.linear_logprob(hidden.to(wide), weight.to(wide), target, softcap=term)
        for wide in (torch.float64, torch.float32)
    )
    found = linear_logprob(hidden, weight, target, softcap=term, outputs=("logprob", "entropy"))
    for name in ("logprob", "entropy"):
        mine = getattr(found, name)
        assert mine.dtype is torch.float32
        assert_close(name, mine.detach(), getattr(wanted, name).detach(), getattr(plain, name).detach())


@each_term
def test_a_class_of_nan_spoils_every_row(term):
    """Also with a term that takes the lesser or the greater of two."""
    hidden, weight, target = case()
    weight = weight.detach().clone()
    weight[5] = torch.nan
    for call in (linear_cross_entropy, reference.linear_cross_entropy):
        assert bool(call(hidden, weight, target, softcap=term, reduction="none").isnan().all())


def test_tanh_is_a_softcap():
    hidden, weight, target = case()
    for one, other in zip(
        *(
            torch.autograd.grad(linear_cross_entropy(hidden, weight, target, softcap=cap), (hidden, weight))
            for cap in (Tanh(1.5), 1.5)
        ),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-12)


def test_in_a_graph_a_module_and_an_op():
    hidden, weight, target = case(torch.float32)
    term = LogCap(0.6)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    wanted = linear_cross_entropy(hidden, weight, target, softcap=term)
    assert torch.equal(compiled(hidden, weight, target, softcap=term), wanted)
    other = linear_cross_entropy(hidden, weight, target, softcap=LogCap(0.9))
    assert torch.equal(compiled(hidden, weight, target, softcap=LogCap(0.9)), other)
    head = LinearCrossEntropy(8, 31, softcap=term)
    with torch.no_grad():
        head.weight.copy_(weight)
    assert torch.equal(head(hidden, target), wanted)
    assert torch.allclose(head(hidden), reference.logits(hidden, weight, softcap=term))
    assert "softcap=LogCap(cap=0.6)" in repr(head)
    op = torch.ops.cute_lce.fused_linear_cross_entropy
    assert torch.equal(op(hidden, weight, target, softcap=term.key), wanted)


def test_a_key_is_of_values_and_of_functions():
    assert LogCap(0.5).key == LogCap(0.5).key != LogCap(0.25).key
    assert LogCap(0.5).key != Tanh(0.5).key
    assert kernel_term(LogCap(0.5)) == kernel_term(LogCap(0.25)) != kernel_term(Tanh(0.5))
    program = "from tests.logit_terms import LogCap; print(LogCap(0.5).key)"
    run = [sys.executable, "-c", program]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(run, capture_output=True, text=True, check=True, env=env)
    assert float(found.stdout) == LogCap(0.5).key

    @dataclass(frozen=True)
    class Twice(LogitTerm):
        cap: float

        def logit(self, x, ops):
            return 2 * x

        def slope(self, z, ops):
            return ops.where(z < 0, 2.0, 2.0)

    @dataclass(frozen=True)
    class Thrice(LogitTerm):
        cap: float

        def logit(self, x, ops):
            return 3 * x

        def slope(self, z, ops):
            return ops.where(z < 0, 3.0, 3.0)

    assert kernel_term(Twice(1.0)) != kernel_term(Thrice(1.0))


FACTOR = 3.0


def test_what_is_no_term():
    class Bare(LogitTerm):
        def logit(self, x, ops):
            return x

    with pytest.raises(TypeError, match=r"^Bare: got no dataclass"):
        Bare()

    @dataclass(frozen=True)
    class Half(LogitTerm):
        def logit(self, x, ops):
            return x

    with pytest.raises(TypeError, match=r"^Half: got no function slope"):
        Half()

    @dataclass(frozen=True)
    class Outside(LogitTerm):
        def logit(self, x, ops):
            return x * FACTOR

        def slope(self, z, ops):
            return z

    with pytest.raises(TypeError, match=r"^Outside\.logit: got one that reads 'FACTOR'"):
        Outside()
    with pytest.raises(TypeError, match=r"^LogCap\.cap: got str"):
        LogCap("3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"^LogCap\.cap: got bool"):
        LogCap(True)
    for cap in (math.nan, math.inf, -(10**400)):
        with pytest.raises(TypeError, match=rf"^LogCap\.cap: got {cap}, want a finite number"):
            LogCap(cap)
    largest = torch.finfo(torch.float32).max
    assert bool(linear_cross_entropy(*case(torch.float32), softcap=LogCap(largest)).isfinite())
    for cap in (1e39, -(2**128)):
        with pytest.raises(ValueError, match=rf"^LogCap\.cap: got {re.escape(str(cap))}, want a number in"):
            LogCap(cap)
    for softcap in (-12.0, -123456789.0):
        message = rf"^softcap: got {softcap}, want a positive, finite number, or a LogitTerm"
        for call in (linear_cross_entropy, reference.linear_cross_entropy):
            with pytest.raises(ValueError, match=message):
                call(*case(), softcap=softcap)
        arguments = *case(), *(None,) * 4, -100, 1.0, softcap, 1.0, ["logprob"], 0.0, 0.0, True, 0, 0, 0
        with pytest.raises(ValueError, match=message):
            torch.ops.cute_lce.token_stats(*arguments)
    with pytest.raises(TypeError, match=r"^softcap: got the class LogCap, want a number or a LogitTerm"):
        linear_cross_entropy(*case(), softcap=LogCap)  # pyright: ignore[reportArgumentType]


def functions_of(logit, slope=lambda self, z, ops: z) -> Any:
    """A term's class with these."""
    body = {"logit": logit, "slope": slope, "factor": 3.0, "twice": lambda self, x: 2 * x, "maximum": 5.0}
    return dataclass(frozen=True)(type("Odd", (LogitTerm,), {**body, "__annotations__": {"cap": "float"}}))


def imports(self, x, ops):
    import math

    return x * math.pi


def in_place(self, x, ops):
    x += 1
    return x


OUTSIDE = {
    "an operation in place": (in_place, r"the operator (\+=|INPLACE_ADD)"),
    "an attribute named like an operation": (
        lambda self, x, ops: ops.minimum(x, self.maximum),
        "'the fields' object has no attribute 'maximum'",
    ),
    "an attribute of its class": (lambda self, x, ops: x * self.factor, "reads 'factor'"),
    "a method": (lambda self, x, ops: self.twice(x), "reads 'twice'"),
    "a method of tensors": (lambda self, x, ops: x.sin(), "reads 'sin'"),
    "a static method": (staticmethod(lambda self, x, ops: x), "no function of"),
    "a class method": (classmethod(lambda self, x, ops: x), "no function of"),
    "a default": (lambda self, x, ops, k=3.0: x * k, "no function of"),
    "a function in it": (lambda self, x, ops: (lambda v: v * 2)(x), "a function in it"),
    "another's variable": (lambda self, x, ops: (lambda v: v * self.cap)(x), "want fields and ops"),
    "a module": (imports, "reads 'math'"),
    "a branch": (lambda self, x, ops: x if self.cap else 2 * x, "a branch"),
    "a power": (lambda self, x, ops: x**2, r"the operator (\*\*|POWER)"),
    "an element": (lambda self, x, ops: x[0], "the operator|want"),
    "an operation as a method": (lambda self, x, ops: x.exp(), "'a number' object has no attribute 'exp'"),
    "a field of ops": (lambda self, x, ops: ops.cap * x, "no attribute 'cap'"),
    "a negation": (lambda self, x, ops: ops.where(not x, x, 1.0), "a number as a condition"),
    "a negated comparison": (lambda self, x, ops: ops.where(not (x < 0), x, 1.0), "not of a comparison"),
    "an identity": (lambda self, x, ops: ops.where(x is self, x, 1.0), "IS_OP"),
    "a tuple": (lambda self, x, ops: (x, x), "BUILD_TUPLE"),
    "nothing": (lambda self, x, ops: None, "returns NoneType"),
    "a comparison of constants": (lambda self, x, ops: True, "returns bool"),
    "two arguments of exp": (lambda self, x, ops: ops.exp(x, x), "takes 1 positional argument"),
    "a number as a condition": (lambda self, x, ops: ops.where(x, x, 1.0), "number as a condition of where"),
    "a constant condition": (lambda self, x, ops: ops.where(True, x, 1.0), "bool as a condition of where"),
    "a sum of comparisons": (lambda self, x, ops: (x > 0) + (x > 1), r"for \+: 'a comparison' and"),
    "a comparison": (lambda self, x, ops: x > 0, "returns a comparison"),
    "a sum with ops": (lambda self, x, ops: x + ops, "unsupported operand"),
}


@pytest.mark.parametrize("which", OUTSIDE)
def test_functions_that_compute_more_than_arguments(which):
    logit, message = OUTSIDE[which]
    with pytest.raises(TypeError, match=rf"^Odd\.logit: got .*{message}"):
        functions_of(logit)(1.0)
    functions_of(lambda self, x, ops: x * self.cap)(1.0)


def test_what_a_class_may_not_have():
    with pytest.raises(TypeError, match=r"^Named: got a field named key"):
        type("Named", (LogitTerm,), {"__annotations__": {"key": "float"}})
    with pytest.raises(TypeError, match=r"^Late: got a __post_init__"):
        type("Late", (LogitTerm,), {"__post_init__": lambda self: None})
    body = {"logit": lambda self, x, ops: x, "slope": lambda self, z, ops: 1.0}
    kind = type("Bare", (LogitTerm,), {**body, "__annotations__": {"cap": "float"}})
    with pytest.raises(TypeError, match=r"^Bare: got no dataclass with an __init__"):
        dataclass(frozen=True, init=False)(kind)(1.0)
    kind = type("Early", (LogitTerm,), {**body, "__annotations__": {"cap": InitVar[float]}})
    with pytest.raises(TypeError, match=r"^Early: got an InitVar, want fields"):
        dataclass(frozen=True)(kind)(1.0)


IN_ANOTHER_PROCESS = """
import sys, torch
module, hidden, target, loss = torch.load(sys.argv[1], weights_only=False)
torch.testing.assert_close(module(hidden, target), loss)
print(repr(module.softcap))
"""


def test_a_module_in_another_process(tmp_path):
    """Which has made no such term."""
    module = LinearCrossEntropy(8, 20, softcap=LogCap(2.0))
    hidden, target = torch.randn(5, 8), torch.arange(5)
    loss = module(hidden, target).detach()
    assert module.softcap == LogCap(2.0)
    assert copy.deepcopy(module).softcap == LogCap(2.0)
    file = tmp_path / "module.pt"
    torch.save((module, hidden, target, loss), file)
    call = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(file)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(call, capture_output=True, text=True, check=True, env=env)
    assert found.stdout.strip() == "LogCap(cap=2.0)"
