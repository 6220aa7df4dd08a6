"""The ops as torch.library sees them: opcheck, compile, autocast, the choice of an implementation."""

from __future__ import annotations

import inspect
import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import cute_lce
from cute_lce import launch, linear_cross_entropy, ops, streaming
from cute_lce.implementation import Backward, Forward, Implementation, Results, Saved, Statistics
from cute_lce.launch import KERNELS
from cute_lce.ops import prepared
from cute_lce.options import ComputeOptions, LossOptions, defaults, fields
from cute_lce.plan.problem import Problem
from cute_lce.streaming import STREAMING, Streaming, products
from tests import numerics
from tests.numerics import assert_close, random_case

OPS = torch.ops.cute_lce
SCHEDULES = ("recompute", "keep", "grad_in_forward")
OPERANDS = ["input", "linear_weight", "target"]
STATISTICS = ["row_max", "row_sum", "num_valid"]
LIMITS = ["window", "workspace"]
NEEDED = ["need_dinput", "need_dweight"]


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
    torch.library.opcheck(OPS.forward.default, (*operands, reduction, -100, 1.0, 0, 0))
    for kept in (0, 64, 100):
        torch.library.opcheck(OPS.forward_keep.default, (*operands, reduction, -100, 1.0, 0, 0, kept))


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck_backward(reduction, needed):
    hidden, weight, target = sample(torch.bfloat16, False)
    loss, *statistics, kept, scale = OPS.forward_keep(hidden, weight, target, reduction, -100, 1.0, 0, 0, 64)
    dloss = torch.ones_like(loss)
    for what in ((None, None), (kept, scale)):
        arguments = (dloss, hidden, weight, target, *statistics, *what, reduction, -100, 1.0, 0, 0, *needed)
        torch.library.opcheck(OPS.backward.default, arguments)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_opcheck_grad_in_forward(needed, requires_grad):
    operands = sample(torch.bfloat16, False)
    for tensor, need in zip(operands, needed, strict=False):
        tensor.requires_grad_(requires_grad and need)
    arguments = (*operands, "mean", -100, 1.0, 0, 0, *needed)
    torch.library.opcheck(OPS.grad_in_forward.default, arguments)
    loss, *saved = OPS.grad_in_forward(*(t.detach() for t in operands), *arguments[3:])
    torch.library.opcheck(
        OPS.scale_gradients.default, (loss, operands[2], *saved, "mean", -100, 1.0, torch.bfloat16, *needed)
    )


def test_inner_ops_refuse_double_backward():
    hidden, weight, target = sample()
    loss, *statistics = OPS.forward(hidden, weight, target, "mean", -100, 1.0, 0, 0)
    dinput, _ = OPS.backward(
        torch.ones_like(loss),
        hidden,
        weight,
        target,
        *statistics,
        None,
        None,
        "mean",
        -100,
        1.0,
        0,
        0,
        True,
        True,
    )
    with pytest.raises(RuntimeError, match="double backward"):
        dinput.sum().backward()
    loss, *saved = OPS.grad_in_forward(hidden, weight, target, "mean", -100, 1.0, 0, 0, True, True)
    dloss = torch.ones((), requires_grad=True)
    arguments = (target, *(t.detach() for t in saved), "mean", -100, 1.0, torch.float32, True, True)
    dinput, _ = OPS.scale_gradients(dloss, *arguments)
    with pytest.raises(RuntimeError, match="double backward"):
        dinput.sum().backward()


@pytest.mark.parametrize("name", [*STATISTICS[:2], "kept", "kept_scale"])
def test_the_backward_refuses_the_derivative_by_any_tensor(name):
    hidden, weight, target = sample(requires_grad=False)
    loss, *others = OPS.forward_keep(hidden, weight, target, "mean", -100, 1.0, 0, 0, 64)
    given = dict(zip([*STATISTICS, "kept", "kept_scale"], others, strict=True))
    given[name].requires_grad_()
    arguments = (torch.ones_like(loss), hidden, weight, target, *given.values(), "mean", -100, 1.0, 0, 0)
    for gradient in OPS.backward(*arguments, True, True):
        with pytest.raises(RuntimeError, match="double backward"):
            gradient.sum().backward()


@pytest.mark.parametrize("name", ["dinput_accumulator", "dweight_accumulator"])
def test_scale_gradients_refuses_the_derivative_by_its_accumulators(name):
    operands = sample(requires_grad=False)
    loss, *saved = OPS.grad_in_forward(*operands, "mean", -100, 1.0, 0, 0, True, True)
    names = ["num_valid", "dinput_accumulator", "dweight_accumulator", "source"]
    given = dict(zip(names, saved, strict=True))
    given[name].requires_grad_()
    arguments = (torch.ones_like(loss), operands[2], *given.values(), "mean", -100, 1.0, torch.float32)
    for gradient in OPS.scale_gradients(*arguments, True, True):
        with pytest.raises(RuntimeError, match="double backward"):
            gradient.sum().backward()


def test_only_the_loss_is_differentiable():
    operands = sample()
    for name, more in (("forward", ()), ("forward_keep", (64,)), ("grad_in_forward", (True, True))):
        loss, *others = getattr(OPS, name)(*operands, "mean", -100, 1.0, 0, 0, *more)
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
    # With dynamic=True dynamo first tries the terms' numbers as inputs, and leaves an empty graph.
    assert len([graph for graph in graphs if "cute_lce" in graph.code]) == 1


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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_changing_windows(backend):
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=backend)
    for window in (3, 4, 5):
        random_case(13, 8, 100, torch.float32).check(compiled, window=window)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_a_window_of_the_shapes(backend):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=backend, dynamic=True)
    def call(hidden, weight, target, **options):
        return linear_cross_entropy(hidden, weight, target, window=hidden.shape[0] + 1, **options)

    for n in (13, 14, 20):
        random_case(n, 8, 100, torch.float32).check(call)


class Head(torch.nn.Module):
    def __init__(self, options: dict[str, Any]):
        super().__init__()
        self.options = options

    def forward(self, hidden, weight, target, reduction="mean", ignore_index=-100):
        return linear_cross_entropy(
            hidden, weight, target, reduction=reduction, ignore_index=ignore_index, **self.options
        )


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"schedule": "keep"}, None),
        ({"schedule": "keep", "window": 64}, None),
        ({"schedule": "recompute"}, None),
        ({"schedule": "grad_in_forward"}, None),
        ({"schedule": "keep", "workspace_mb": 1}, 1000),
    ],
)
def test_export_with_a_dynamic_batch(options, most, strict, monkeypatch):
    """One program for every n: it keeps all columns, some and none."""
    V, kept = 300, []
    if most is None:
        # Small enough that few tokens reach it.
        monkeypatch.setattr(streaming.memory, "DEFAULT_WORKSPACE", 1 << 20)
    case = random_case(13, 24, V, torch.float32)
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    n = torch.export.Dim("n", min=2, max=most)
    shapes = ({0: n}, None, {0: n})
    exported = torch.export.export(
        Head(options), (hidden, weight, case.target), dynamic_shapes=shapes, strict=strict
    )
    module = exported.module()

    def call(hidden, weight, target, **options):
        return module(hidden, weight, target)

    with Watching() as watching:
        for tokens in (13, 800, 900 if most else 2500):
            random_case(tokens, 24, V, torch.float32, seed=tokens).check(call)
            kept.append(choose_kept(tokens, 24, V, options))
    if options["schedule"] == "keep":
        assert kept[0] == V
        assert 0 < kept[1] < V
        assert most or kept[2] == 0
        # Exported, the public op is one node, which decides when it runs.
        assert watching.seen.count("cute_lce::forward_keep") == sum(columns > 0 for columns in kept)


def choose_kept(n: int, d: int, V: int, options: dict[str, Any]) -> int:
    compute = ComputeOptions(**options)
    problem = Problem(n, d, V)
    return STREAMING.choose(
        problem, torch.float32, torch.device("cpu"), compute.schedule, "mean", compute.limits
    )[1]


def test_compile_inductor(fresh_inductor):
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
    original = products.mm

    def mm(*operands):
        seen.append(torch.is_autocast_enabled("cpu"))
        return original(*operands)

    for module in (streaming.forward, streaming.backward, streaming.grad_in_forward):
        monkeypatch.setattr(module, "mm", mm)
    hidden, weight, target = sample()
    for schedule in SCHEDULES:
        with torch.autocast("cpu", torch.bfloat16):
            before = len(seen)
            linear_cross_entropy(hidden, weight, target, schedule=schedule).backward()
            assert torch.is_autocast_enabled("cpu")
            assert len(seen) > before
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


class OtherForward:
    """Statistics in float64, about another reference than the maximum, which is as good."""

    def __init__(self, operands, loss, request):
        self.request = request
        self.phases = []

    def statistics(self, operands, loss):
        self.phases.append("statistics")
        hidden, weight, target = operands
        logits = hidden.double() @ weight.double().mT
        row_max = logits.amax(1) + 1
        row_sum = (logits - row_max[:, None]).exp().sum(1)
        num_valid = (target != loss.ignore_index).sum()
        # Not the loss yet: that is what finish is for.
        return Results(num_valid, row_max.float(), row_sum.float(), num_valid)

    def finish(self, operands, loss, results):
        self.phases.append("finish")
        hidden, weight, target = operands
        logits = hidden.double() @ weight.double().mT
        picked = logits.gather(1, target.clamp(min=0)[:, None])[:, 0]
        rows = results.row_sum.double().log() + (results.row_max.double() - picked)
        valid = target != loss.ignore_index
        return results._replace(loss=(rows[valid].sum() / valid.sum()).float())


class Other(Streaming):
    """streaming's passes, but for the forward."""

    def __init__(self):
        self.forwards = []

    def forward(self, operands, loss, request):
        self.forwards.append((operands.hidden.shape[0], OtherForward(operands, loss, request)))
        return self.forwards[-1][1]


def serve_with(monkeypatch, other, dtype=torch.float32):
    """Have `other` serve the CPU's tensors of this dtype; what was prepared for others is forgotten."""
    monkeypatch.setattr(prepared, "cache", {})
    monkeypatch.setitem(ops.select._picked, (torch.device("cpu"), dtype), other)


def test_another_implementation_is_picked_and_mixed(monkeypatch):
    """A forward from elsewhere hands its statistics to the streaming backward."""
    other = Other()
    serve_with(monkeypatch, other)
    numerics.make("ignored", torch.float32).check(
        linear_cross_entropy, schedule="recompute", window=100, workspace_mb=5
    )
    ((n, forward),) = other.forwards
    assert (n, forward.request.limits) == (41, (100, 5 << 20))
    assert (forward.request.kept_columns, forward.request.statistics) == (0, True)
    assert forward.phases == ["statistics", "finish"]


def test_streaming_is_said_once_a_device(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(ops.select, "_picked", {})
    ops.select._log_streaming.cache_clear()
    with caplog.at_level(logging.WARNING, logger="cute_lce"):
        for dtype in (torch.float16, torch.float32, torch.float16):
            assert ops.implementation(torch.device("cuda", 0), dtype) is STREAMING
    assert [record.getMessage() for record in caplog.records] == [
        "cuda:0 (Tesla T4, compute capability 7.5): no kernels for it here, the streaming path serves it"
    ]
    ops.select._log_streaming.cache_clear()


def parameters_of(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def methods_of(protocol: type) -> dict[str, list[str]]:
    """Name -> parameters, of what a Protocol asks for."""
    return {
        name: parameters_of(member)
        for name, member in vars(protocol).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


@pytest.mark.parametrize(
    ("protocol", "has"),
    [
        (Implementation, STREAMING),
        (Implementation, KERNELS),
        (Statistics, streaming.STATISTICS),
        (Forward, streaming.forward.StreamingForward),
        (Forward, launch.forward.KernelForward),
        (Forward, launch.forward.EmptyForward),
        (Backward, streaming.backward.StreamingBackward),
        (Backward, launch.backward.KernelBackward),
        (Backward, launch.backward.EmptyBackward),
    ],
)
def test_the_protocols_methods_are_there(protocol, has):
    """With the Protocol's parameters in its order: some are passed by position, some by name."""
    wanted = methods_of(protocol)
    assert wanted
    assert {name: parameters_of(getattr(has, name)) for name in wanted} == wanted


# ----------------------------------------------------------------------------------------------------------
# Options: how they travel, and what is prepared for them


def test_only_the_reduction_of_the_loss_is_static():
    assert {name for name, field in fields(LossOptions).items() if field.static} == {"reduction"}
    assert all(field.static for field in fields(ComputeOptions).values())
    assert LossOptions("sum", 3).static == LossOptions("sum", 4).static
    assert LossOptions("sum", 3).static != LossOptions("none", 3).static
    # But for which terms there are, for which kernels are compiled.
    assert LossOptions(logit_scale=2.0).static == LossOptions(logit_scale=3.0).static != LossOptions().static


@pytest.mark.parametrize("need_dweight", [True, False])
@pytest.mark.parametrize("schedule", ["auto", *SCHEDULES])
def test_numbers_of_the_loss_are_in_no_key(monkeypatch, schedule, need_dweight):
    """Calls with different ignore_index share what is prepared, and each has its own values."""
    monkeypatch.setattr(prepared, "cache", {})
    case = random_case(41, 24, 300, torch.float32)
    case.target[::3], case.target[1::3] = 3, 7
    cases = [replace(case, ignore_index=ignore_index) for ignore_index in (3, 7, -100)]
    assert len({float(each.expected()[0]) for each in cases}) == 3
    for each in cases:
        each.check(linear_cross_entropy, schedule=schedule, need_dweight=need_dweight)
        assert len(prepared.cache) == 1
    with torch.no_grad():
        for each in cases:
            loss = linear_cross_entropy(
                each.input, each.linear_weight, each.target, ignore_index=each.ignore_index, schedule=schedule
            )
            assert_close("loss", loss, each.expected()[0], each.baseline()[0])
            assert len(prepared.cache) == 2


@pytest.mark.parametrize(
    "changed",
    [{"reduction": "sum"}, {"schedule": "keep"}, {"workspace_mb": 3}, {"window": 100}],
    ids=lambda changed: next(iter(changed)),
)
def test_what_is_static_is_prepared_anew(monkeypatch, changed):
    monkeypatch.setattr(prepared, "cache", {})
    case = random_case(41, 24, 300, torch.float32)
    for _ in range(2):
        case.check(linear_cross_entropy)
        case.check(linear_cross_entropy, **changed)
        assert len(prepared.cache) == 2


def arguments_of(op) -> dict[str, tuple[str, Any]]:
    """Name -> (type, default) of an op's arguments."""
    inside = str(op._schema).partition("(")[2].partition(") -> ")[0]
    texts = [text.partition("=")[0].split() for text in inside.split(", ") if text != "*"]
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
    return {name: (type_, defaults[name]) for type_, name in texts}


def test_the_public_ops_schema_names_every_option():
    """With the types of Python's function and its defaults, as keywords."""
    op = OPS.fused_linear_cross_entropy.default
    options = defaults()
    assert options == {
        "reduction": "mean",
        "ignore_index": -100,
        "logit_scale": 1.0,
        "label_smoothing": 0.0,
        "softcap": None,
        "z_loss": 0.0,
        "schedule": "auto",
        "workspace_mb": None,
        "window": None,
    }
    keywords = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    tensors = ["linear_bias", "weight", "token_weight", "denominator"]
    assert keywords == [*tensors, *options]
    found = arguments_of(op)
    assert [*found] == ["input", "linear_weight", "target", *tensors, *options]
    assert all(found[name] == ("Tensor?", None) for name in tensors)
    assert {name: default for name, (_, default) in found.items() if name in options} == options
    types = {name: type_ for name, (type_, _) in found.items() if name in options}
    assert types == {
        "reduction": "str",
        "ignore_index": "SymInt?",
        "label_smoothing": "Scalar",
        "logit_scale": "Scalar",
        "softcap": "Scalar?",
        "z_loss": "Scalar",
        "schedule": "str",
        "workspace_mb": "float?",
        "window": "SymInt?",
    }
    for call in (linear_cross_entropy, cute_lce.LinearCrossEntropy):
        given = inspect.signature(call).parameters
        assert {name: given[name].default for name in options} == options
        assert all(given[name].kind is inspect.Parameter.KEYWORD_ONLY for name in options)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        # What the schema excludes is torch's to refuse; it makes ints of bools before the op sees them.
        ("reduction", None, RuntimeError, "'str' for argument 'reduction' .* found type 'NoneType'"),
        ("reduction", 1, RuntimeError, "'str' for argument 'reduction' .* found type 'int'"),
        ("ignore_index", "3", RuntimeError, r"'Optional\[int\]' for argument 'ignore_index' .* 'str'"),
        ("ignore_index", 1.5, RuntimeError, r"'Optional\[int\]' for argument 'ignore_index' .* 'float'"),
        ("schedule", None, RuntimeError, "'str' for argument 'schedule' .* found type 'NoneType'"),
        ("schedule", 1, RuntimeError, "'str' for argument 'schedule' .* found type 'int'"),
        ("workspace_mb", "1", RuntimeError, r"'Optional\[float\]' for argument 'workspace_mb' .* 'str'"),
        ("window", "64", RuntimeError, r"'Optional\[int\]' for argument 'window' .* found type 'str'"),
        ("window", 2.0, RuntimeError, r"'Optional\[int\]' for argument 'window' .* found type 'float'"),
        ("reduction", "batchmean", ValueError, "reduction: got 'batchmean', want one of 'mean'"),
        ("schedule", "fast", ValueError, "schedule: got 'fast', want one of 'auto'"),
        ("workspace_mb", 0, ValueError, "workspace_mb: got 0.0, want"),
        ("workspace_mb", float("nan"), ValueError, "workspace_mb: got nan, want"),
        ("window", 0, ValueError, "window: got 0, want"),
    ],
)
def test_the_public_op_refuses_by_name(name, value, error, message, watched):
    op = OPS.fused_linear_cross_entropy
    hidden, weight, target = sample()
    with Watching() if watched else nullcontext(), pytest.raises(error, match=message):
        op(hidden, weight, target, **{name: value})


@pytest.mark.parametrize(
    ("name", "before", "behind"),
    [
        ("forward", OPERANDS, LIMITS),
        ("forward_keep", OPERANDS, [*LIMITS, "kept_columns"]),
        ("backward", ["dloss", *OPERANDS, *STATISTICS, "kept", "kept_scale"], [*LIMITS, *NEEDED]),
        ("grad_in_forward", OPERANDS, [*LIMITS, *NEEDED]),
    ],
)
def test_the_inner_ops_schemas_name_every_field_of_the_loss(name, before, behind):
    found = arguments_of(getattr(OPS, name).default)
    assert [*found] == [*before, *LossOptions._fields, *behind]
    types = {key: found[key][0] for key in LossOptions._fields}
    assert types == {"reduction": "str", "ignore_index": "SymInt", "logit_scale": "float"}
    assert all(default is None for _, default in found.values())
    if name == "backward":
        assert [argument for argument in found if argument in Saved._fields or argument in OPERANDS] == [
            *OPERANDS,
            *Saved._fields[len(OPERANDS) :],
        ]


def test_module_exports():
    assert set(cute_lce.__all__) == {
        "LinearCrossEntropy",
        "LinearLogprob",
        "LogitTerm",
        "LossOptions",
        "TokenStats",
        "__version__",
        "linear_cross_entropy",
        "linear_logprob",
        "sampled_linear_cross_entropy",
    }


def test_a_number_of_the_loss_stays_symbolic_under_compile():
    """Other values of ignore_index compile nothing anew, once it has been seen to change."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(linear_cross_entropy, fullgraph=True, backend=counter)
    hidden, weight, target = sample()
    target[4] = 1
    for ignored in (-100, 0, 3, 5, 7, 2):
        loss = call(hidden, weight, target, ignore_index=ignored, reduction="none")
        expected = linear_cross_entropy(hidden, weight, target, ignore_index=ignored, reduction="none")
        torch.testing.assert_close(loss, expected)
    assert counter.frame_count <= 2
