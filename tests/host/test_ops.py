"""The ops as torch.library sees them: opcheck, compile, autocast, the choice of an implementation."""

from __future__ import annotations

import logging
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cute_lce
from cute_lce import linear_cross_entropy, ops, streaming
from tests import numerics
from tests.numerics import assert_close, random_case

OPS = torch.ops.cute_lce
SCHEDULES = ("recompute", "keep", "grad_in_forward")


def sample(dtype=torch.float32, requires_grad=True):
    case = random_case(13, 8, 100, dtype)
    case.target[4] = -100
    return (
        case.input.requires_grad_(requires_grad),
        case.linear_weight.requires_grad_(requires_grad),
        case.target,
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("schedule", ["auto", *SCHEDULES])
def test_opcheck_public(schedule, reduction):
    hidden, weight, target = sample()
    if schedule == "grad_in_forward" and reduction == "none":
        weight = weight.detach()
    options = {"schedule": schedule, "reduction": reduction, "window": 64}
    torch.library.opcheck(OPS.fused_linear_cross_entropy.default, (hidden, weight, target), options)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_forward(dtype, reduction, requires_grad):
    operands = sample(dtype, requires_grad)
    torch.library.opcheck(OPS.forward.default, (*operands, -100, reduction, 0, 0))
    for kept in (64, 100):
        torch.library.opcheck(OPS.forward_keep.default, (*operands, -100, reduction, 0, 0, kept))


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck_backward(reduction, needed):
    hidden, weight, target = sample(torch.bfloat16, False)
    loss, *statistics, kept, reference = OPS.forward_keep(hidden, weight, target, -100, reduction, 0, 0, 64)
    dloss = torch.ones_like(loss)
    for what in ((None, None), (kept, reference)):
        arguments = (dloss, hidden, weight, target, *statistics, *what, -100, reduction, 0, 0, *needed)
        torch.library.opcheck(OPS.backward.default, arguments)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_opcheck_grad_in_forward(needed, requires_grad):
    operands = sample(torch.bfloat16, False)
    for tensor, need in zip(operands, needed, strict=False):
        tensor.requires_grad_(requires_grad and need)
    arguments = (*operands, -100, "mean", 0, 0, *needed)
    torch.library.opcheck(OPS.grad_in_forward.default, arguments)
    loss, *saved = OPS.grad_in_forward(*(t.detach() for t in operands), *arguments[3:])
    torch.library.opcheck(OPS.scale_gradients.default, (loss, *saved, "mean", torch.bfloat16, *needed))


def test_inner_ops_refuse_double_backward():
    hidden, weight, target = sample()
    loss, *statistics = OPS.forward(hidden, weight, target, -100, "mean", 0, 0)
    dinput, _ = OPS.backward(
        torch.ones_like(loss), hidden, weight, target, *statistics, None, None, -100, "mean", 0, 0, True, True
    )
    with pytest.raises(RuntimeError, match="double backward"):
        dinput.sum().backward()
    loss, *saved = OPS.grad_in_forward(hidden, weight, target, -100, "mean", 0, 0, True, True)
    dloss = torch.ones((), requires_grad=True)
    dinput, _ = OPS.scale_gradients(dloss, *(t.detach() for t in saved), "mean", torch.float32, True, True)
    with pytest.raises(RuntimeError, match="double backward"):
        dinput.sum().backward()


def test_only_the_loss_is_differentiable():
    operands = sample()
    for name, more in (("forward", ()), ("forward_keep", (64,)), ("grad_in_forward", (True, True))):
        loss, *others = getattr(OPS, name)(*operands, -100, "mean", 0, 0, *more)
        assert loss.requires_grad
        assert not any(tensor.requires_grad for tensor in others)


def test_schemas_are_functional():
    for name in ("fused_linear_cross_entropy", "forward", "forward_keep", "backward", "grad_in_forward"):
        schema = getattr(OPS, name).default._schema
        assert not schema.is_mutable
        assert all(argument.alias_info is None for argument in (*schema.arguments, *schema.returns))


class Watching(TorchDispatchMode):
    """Notes every op that is dispatched."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("schedule", "names"),
    [
        ("recompute", ["cute_lce::forward", "cute_lce::backward"]),
        ("keep", ["cute_lce::forward_keep", "cute_lce::backward"]),
        ("grad_in_forward", ["cute_lce::grad_in_forward", "cute_lce::scale_gradients"]),
    ],
)
def test_what_watches_the_dispatcher_sees_the_ops(schedule, names):
    """Plain eager calls run the bodies without the dispatcher; everything else goes through it."""
    with Watching() as watching:
        numerics.make("ignored", torch.float32).check(linear_cross_entropy, schedule=schedule)
    assert [name for name in watching.seen if name.startswith("cute_lce")] == names


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_meta_tensors(schedule, reduction):
    hidden = torch.empty(4, 5, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(20, 8, device="meta", dtype=torch.bfloat16)
    target = torch.empty(4, 5, device="meta", dtype=torch.int64)
    loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, schedule=schedule)
    assert loss.is_meta
    assert loss.dtype is torch.float32
    assert loss.shape == (target.shape if reduction == "none" else ())
    loss.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == hidden.shape


# ----------------------------------------------------------------------------------------------------------
# torch.compile


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("schedule", ["auto", *SCHEDULES])
def test_compile_fullgraph_with_dynamic_n(schedule, reduction):
    torch._dynamo.reset()
    frozen = schedule == "grad_in_forward" and reduction == "none"
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return compile_backend(graph, inputs)

    compile_backend = torch._dynamo.lookup_backend("aot_eager")

    @torch.compile(fullgraph=True, backend=backend, dynamic=True)
    def call(hidden, weight, target, **options):
        loss = linear_cross_entropy(hidden * 1.0, weight, target, schedule=schedule, **options)
        return loss * 2

    def doubled(hidden, weight, target, **options):
        return call(hidden, weight, target, **options) / 2

    for n in (37, 64, 129):
        case = random_case(n, 24, 300, torch.float32, seed=n)
        case.target[3] = -100
        case.check(doubled, reduction=reduction, need_dweight=not frozen)
    assert len(graphs) == 1


def test_compile_with_a_workspace_and_a_window():
    """What is kept has a size that depends on n; a change of n may not compile anew each time."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=backend, dynamic=True)
    for n in (500, 501, 640, 777, 900):
        case = random_case(n, 24, 300, torch.float32, seed=n)
        case.check(compiled, schedule="keep", workspace_mb=0.9, window=64)
    # All is kept, some is kept, nothing is kept.
    assert len(graphs) <= 3


def test_compile_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    for n in (37, 40):
        random_case(n, 24, 300, torch.bfloat16, seed=n).check(compiled)


def test_compiled_refusal_names_the_target():
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    hidden, weight, target = sample()
    with pytest.raises(ValueError, match="target: got 500 at token 0"):
        compiled(hidden, weight, target.fill_(500))


# ----------------------------------------------------------------------------------------------------------
# Autocast


def autocast_check(call, schedule):
    """bf16 operands, an accumulation in float32, float32 gradients for float32 leaves."""
    case = random_case(40, 64, 500, torch.float32)
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = call(hidden, weight, case.target, schedule=schedule)
        assert loss.dtype is torch.float32
        # The backward too runs under autocast here, as some training loops have it.
        loss.backward()
    narrow = numerics.Case(
        case.input.detach().bfloat16(), case.linear_weight.detach().bfloat16(), case.target
    )
    expected, baseline = narrow.expected(), narrow.baseline()
    assert_close("loss", loss.detach(), expected[0], baseline[0])
    for tensor, want, plain in zip((hidden, weight), expected[1:], baseline[1:], strict=True):
        assert tensor.grad is not None
        assert tensor.grad.dtype is torch.float32
        assert_close("gradient", tensor.grad.bfloat16(), want, plain)


@pytest.mark.parametrize("schedule", ["auto", *SCHEDULES])
def test_autocast(schedule):
    autocast_check(linear_cross_entropy, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autocast_compiled(schedule):
    torch._dynamo.reset()
    autocast_check(torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager"), schedule)


def test_bodies_run_without_autocast(monkeypatch):
    seen = []
    original = streaming._mm

    def mm(*operands):
        seen.append(torch.is_autocast_enabled("cpu"))
        return original(*operands)

    monkeypatch.setattr(streaming, "_mm", mm)
    hidden, weight, target = sample()
    for schedule in SCHEDULES:
        with torch.autocast("cpu", torch.bfloat16):
            linear_cross_entropy(hidden, weight, target, schedule=schedule).backward()
            assert torch.is_autocast_enabled("cpu")
    assert seen
    assert not any(seen)


def test_autocast_as_torch_casts():
    """float64 is left alone; narrow operands of two types meet in autocast's."""
    case = random_case(8, 16, 50, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_cross_entropy(case.input, case.linear_weight, case.target).dtype is torch.float64
        loss = linear_cross_entropy(case.input.float(), case.linear_weight.half(), case.target)
        with pytest.raises(TypeError, match=r"linear_weight: got torch\.bfloat16"):
            linear_cross_entropy(case.input, case.linear_weight.float(), case.target)
    rounded = numerics.Case(
        case.input.float().bfloat16(), case.linear_weight.half().bfloat16(), case.target
    ).expected()[0]
    torch.testing.assert_close(loss.double(), rounded, rtol=1e-6, atol=0)


# ----------------------------------------------------------------------------------------------------------
# The seam


def test_another_implementation_is_picked_and_mixed(monkeypatch):
    """A forward from elsewhere hands its statistics to the streaming backward."""
    calls = []
    module = types.ModuleType("kernels")
    module.__dict__.update({name: getattr(streaming, name) for name in dir(streaming) if name[0] != "_"})

    def forward(hidden, weight, target, ignore_index, reduction, window, workspace):
        calls.append((hidden.shape[0], window, workspace))
        logits = hidden.double() @ weight.double().mT
        row_max = logits.amax(1)
        # Statistics about another reference than the maximum are as good.
        row_max = row_max + 1
        row_sum = (logits - row_max[:, None]).exp().sum(1)
        rows = row_sum.log() + (row_max - logits.gather(1, target.clamp(min=0)[:, None])[:, 0])
        valid = target != ignore_index
        loss = rows[valid].sum() / valid.sum()
        return loss.float(), row_max.float(), row_sum.float(), valid.sum()

    module.__dict__["forward"] = forward
    monkeypatch.setitem(ops._implementations, (torch.device("cpu"), torch.float32), module)
    numerics.make("ignored", torch.float32).check(
        linear_cross_entropy, schedule="recompute", window=100, workspace_mb=5
    )
    assert calls == [(41, 100, 5 << 20)]


def test_streaming_is_said_once_a_device(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(ops, "_implementations", {})
    ops._log_streaming.cache_clear()
    with caplog.at_level(logging.WARNING, logger="cute_lce"):
        for dtype in (torch.float16, torch.float32, torch.float16):
            assert ops.implementation(torch.device("cuda", 0), dtype) is streaming
    assert [record.getMessage() for record in caplog.records] == [
        "cuda:0 (Tesla T4, compute capability 7.5): no kernels for it here, the streaming path serves it"
    ]
    ops._log_streaming.cache_clear()


def test_module_exports():
    assert set(cute_lce.__all__) == {
        "LinearCrossEntropy",
        "LossOptions",
        "__version__",
        "linear_cross_entropy",
    }
