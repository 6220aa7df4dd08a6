"""linear_cross_entropy's grad_weight_out and grad_weight_dummy, on the streaming path."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_lce import linear_cross_entropy
from tests.numerics import Case, assert_close, negated, random_case, with_bad_ignored_rows

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
WAYS = [("recompute", "none"), ("keep", "mean"), ("grad_in_forward", "mean"), ("auto", "sum")]
ways = pytest.mark.parametrize(("schedule", "reduction"), WAYS, ids=[schedule for schedule, _ in WAYS])
N, D, V = 40, 24, 100


def operands(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, weight = (t.detach().clone().requires_grad_() for t in (case.input, case.linear_weight))
    return hidden, weight, case.target


def buffer(dtype: torch.dtype, shape: tuple[int, ...] = (V, D)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@ways
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize("out_dtype", [FP32, BF16, None], ids=["float32", "bfloat16", "weight's"])
def test_the_gradient_is_added(schedule: str, reduction: str, dtype, out_dtype):
    """In fp32, rounded once, with input's gradient as without it; a second backward adds again."""
    case = random_case(N, D, V, dtype)
    hidden, weight, target = operands(case)
    out = buffer(out_dtype or dtype)
    before, dloss = out.double().clone(), case.upstream(reduction)
    loss = linear_cross_entropy(
        hidden, weight, target, reduction=reduction, schedule=schedule, grad_weight_out=out
    )
    loss.backward(dloss.to(loss.dtype), retain_graph=True)
    assert weight.grad is None
    _, dinput, dweight = case.expected(dloss, reduction)
    _, plain_dinput, plain = case.baseline(dloss, reduction)
    rounding = 2.0**-8 if out.dtype is BF16 else 2.0**-11 if out.dtype is FP16 else 2.0**-22
    assert_close("sum", out, before + dweight, (before + plain.double()).to(out.dtype), rounding=rounding)
    assert hidden.grad is not None
    assert_close("dinput", hidden.grad, dinput, plain_dinput)
    if out.dtype is not BF16 or dtype is BF16:
        difference = (out.double() - before) - dweight
        assert difference.norm() < 0.05 * dweight.norm(), "nothing, or something else, was added"
    once = out.double().clone()
    loss.backward(dloss.to(loss.dtype))
    assert_close("twice", out, once + dweight, (once + plain.double()).to(out.dtype), rounding=rounding)


def test_a_frozen_input_and_no_gradient_at_all():
    case = random_case(N, D, V, FP32)
    hidden, weight, target = operands(case)
    out = buffer(FP32)
    before = out.clone()
    loss = linear_cross_entropy(hidden.detach(), weight, target, grad_weight_out=out)
    loss.backward()
    assert_close("sum", out, before.double() + case.expected(1.0, "mean")[2], out)
    after = out.clone()
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, target, grad_weight_out=out)
    assert torch.equal(out, after)


def test_what_accumulate_grad_does_with_the_dummy():
    """Without a .grad it makes a dense one, of its own for every call; a .grad that is there keeps its bits
    and its memory; without the dummy there is none."""
    case = random_case(N, D, V, FP32)
    hidden, weight, target = operands(case)
    out = buffer(FP32)
    linear_cross_entropy(hidden, weight, target, grad_weight_out=out).backward()
    assert weight.grad is None
    linear_cross_entropy(hidden, weight, target, grad_weight_out=out, grad_weight_dummy=True).backward()
    first = weight.grad
    assert first is not None
    assert first.is_contiguous()
    assert not first.any()
    first.fill_(3.0)
    linear_cross_entropy(hidden, weight, target, grad_weight_out=out, grad_weight_dummy=True).backward()
    assert weight.grad is first
    assert bool((first == 3.0).all())
    weight.grad = None
    linear_cross_entropy(hidden, weight, target, grad_weight_out=out, grad_weight_dummy=True).backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() != first.data_ptr()
    assert not weight.grad.any()


def test_hooks_on_the_weight():
    """They get None, and zeros with the dummy."""
    hidden, weight, target = operands(random_case(N, D, V, FP32))
    seen = []
    handle = weight.register_hook(seen.append)
    linear_cross_entropy(hidden, weight, target, grad_weight_out=buffer(FP32)).backward()
    assert seen == [None]
    handle.remove()
    seen.clear()
    weight.register_hook(lambda grad: seen.append(grad.shape))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.shape))
    linear_cross_entropy(
        hidden, weight, target, grad_weight_out=buffer(FP32), grad_weight_dummy=True
    ).backward()
    assert seen == [(V, D), (V, D)]


def test_a_tied_embedding_gets_its_own_gradient():
    case = random_case(N, D, V, FP32)
    _, weight, target = operands(case)
    tokens = torch.arange(N) % V
    out = torch.zeros(V, D)
    for dummy in (False, True):
        weight.grad = None
        hidden = torch.nn.functional.embedding(tokens, weight)
        linear_cross_entropy(
            hidden, weight, target, grad_weight_out=out.zero_(), grad_weight_dummy=dummy
        ).backward()
        whole = weight.detach().clone().requires_grad_()
        linear_cross_entropy(torch.nn.functional.embedding(tokens, whole), whole, target).backward()
        assert weight.grad is not None
        assert whole.grad is not None
        torch.testing.assert_close(weight.grad + out, whole.grad)
        assert weight.grad.any()


def test_heads_and_micro_batches_add_in_any_order():
    case = random_case(N, D, V, FP32)
    hidden, weight, target = operands(case)
    parts = [slice(0, 7), slice(7, 20), slice(20, 40)]
    cases = [Case(case.input[part], case.linear_weight, case.target[part]) for part in parts]
    wanted = torch.stack([each.expected(1.0, "sum")[2] for each in cases]).sum(0)
    for order in ((0, 1, 2), (2, 0, 1)):
        out = torch.zeros(V, D)
        losses = [
            linear_cross_entropy(hidden[p], weight, target[p], reduction="sum", grad_weight_out=out)
            for p in parts
        ]
        for i in order:
            losses[i].backward(retain_graph=True)
        assert_close("sum", out, wanted, out)
        out.zero_()
        torch.stack(losses).sum().backward()
        assert_close("sum", out, wanted, out)


def test_the_buffer_may_change_between_forward_and_backward():
    case = random_case(N, D, V, FP32)
    hidden, weight, target = operands(case)
    out = buffer(FP32)
    loss = linear_cross_entropy(hidden, weight, target, grad_weight_out=out)
    out.fill_(2.0)
    loss.backward()
    assert_close("sum", out, 2.0 + case.expected(1.0, "mean")[2], out)


def test_a_buffer_that_is_freed_or_resized_meanwhile_is_refused():
    case = random_case(N, D, V, FP32)
    hidden, weight, target = operands(case)

    def freed(out):
        out.untyped_storage().resize_(0)

    def moved(out):
        out.set_(torch.zeros(V * D + 1)[1:].view(V, D))

    def reshaped(out):
        out.set_(torch.zeros(V - 1, D))

    def cast(out):
        out.data = out.data.to(torch.int64)

    for change in (freed, moved, reshaped, cast):
        out = buffer(FP32)
        loss = linear_cross_entropy(hidden, weight, target, grad_weight_out=out)
        change(out)
        with pytest.raises(
            RuntimeError, match="grad_weight_out: got in the backward a tensor that was resized"
        ):
            loss.backward()


def test_who_saved_the_buffer_is_told():
    hidden, weight, target = operands(random_case(N, D, V, FP32))
    out = buffer(FP32)
    scale = torch.ones((), requires_grad=True)
    saved = (out * scale).sum()
    linear_cross_entropy(hidden, weight, target, grad_weight_out=out).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.parametrize("schedule", ["recompute", "grad_in_forward"])
@pytest.mark.parametrize(("dtype", "out_dtype"), [(FP32, FP32), (FP32, BF16), (BF16, FP32), (FP64, FP64)])
def test_no_temporary_of_the_weights_size(schedule, dtype, out_dtype):
    """The largest tensor that a backward makes, in bytes."""
    case = random_case(32, 256, 60000, dtype)
    hidden, weight, target = operands(case)
    out = buffer(out_dtype, (60000, 256))
    # A window of the weight is converted where a CPU cannot multiply its dtype.
    options = {"schedule": schedule, "window": 4096 if dtype is BF16 else None}
    loss = linear_cross_entropy(hidden, weight, target, grad_weight_out=out, **options)
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.untyped_storage() is not out.untyped_storage():
                fresh = found.untyped_storage().data_ptr() not in known
                largest = max(largest, found.untyped_storage().nbytes() if fresh else 0)
            return found

    saved = [t for t in loss.grad_fn.saved_tensors if t is not None]  # pyright: ignore
    known = {t.untyped_storage().data_ptr() for t in (out, weight, hidden, *saved)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cute_lce.ops.plain.is_in_torch_dispatch_mode", lambda: False)
        with Largest():
            loss.backward()
    assert 0 < largest <= 9 * 2**20 < weight.nbytes


def test_ignored_rows_add_nothing():
    nans, zeros = with_bad_ignored_rows(random_case(N, D, V, FP32))
    out = torch.zeros(V, D)
    hidden, weight, target = operands(nans)
    linear_cross_entropy(hidden, weight, target, grad_weight_out=out).backward()
    assert_close("sum", out, zeros.expected(1.0, "mean")[2], out)
    out.fill_(1.0)
    linear_cross_entropy(hidden, weight, torch.full_like(target, -100), grad_weight_out=out).backward()
    assert bool((out == 1.0).all())


@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
@pytest.mark.parametrize("dloss", [torch.nan, torch.inf])
def test_what_flows_into_ignored_rows_does_not_matter(schedule: str, dloss: float):
    """By row with a frozen weight; and into a mean of no valid row."""
    case = random_case(N, D, V, FP32)
    hidden, weight, target = operands(case)
    target[::3] = -100
    upstream = torch.ones(N)
    upstream[::3] = dloss
    loss = linear_cross_entropy(hidden, weight.detach(), target, reduction="none", schedule=schedule)
    (dinput,) = torch.autograd.grad(loss, hidden, upstream)
    wanted = Case(case.input, case.linear_weight, target).expected(torch.ones(N).double(), "none")[1]
    assert_close("dinput", dinput, wanted, dinput)
    out = torch.ones(V, D)
    nothing = torch.full_like(target, -100)
    loss = linear_cross_entropy(hidden, weight, nothing, schedule=schedule, grad_weight_out=out)
    (dinput,) = torch.autograd.grad(loss, hidden, torch.tensor(dloss), retain_graph=True)
    assert not dinput.any()
    loss.backward(torch.tensor(dloss))
    assert bool((out == 1.0).all())


def test_under_autocast_the_weight_keeps_its_dtype():
    case = random_case(N, D, V, FP32)
    hidden, weight, target = operands(case)
    out = torch.zeros(V, D)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, target, grad_weight_out=out)
    loss.backward()
    assert weight.grad is None
    rounded = random_case(N, D, V, FP32)
    rounded = Case(rounded.input.bfloat16(), rounded.linear_weight.bfloat16(), rounded.target)
    assert_close("sum", out, rounded.expected(1.0, "mean")[2], rounded.baseline(1.0, "mean")[2])


def test_double_backward_is_refused():
    hidden, weight, target = operands(random_case(N, D, V, FP32))
    for schedule in ("recompute", "grad_in_forward"):
        loss = linear_cross_entropy(hidden, weight, target, schedule=schedule, grad_weight_out=buffer(FP32))
        with pytest.raises(RuntimeError, match="double"):
            torch.autograd.grad(loss, hidden, create_graph=True)


def refused(change, error: type[Exception], message: str):
    return pytest.param(change, error, message, id=message)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        refused(lambda w: {"grad_weight_out": 1}, TypeError, "got int, want a torch.Tensor or None"),
        refused(lambda w: {"grad_weight_out": buffer(FP16)}, TypeError, "got torch.float16, want one of"),
        refused(
            lambda w: {"grad_weight_out": buffer(FP32, (V, D + 1))}, ValueError, r"got shape \(100, 25\)"
        ),
        refused(
            lambda w: {"grad_weight_out": buffer(FP32, (D, V)).T}, ValueError, "want a contiguous tensor"
        ),
        refused(lambda w: {"grad_weight_out": negated(buffer(FP32))}, ValueError, "lazily negated, want"),
        refused(
            lambda w: {"grad_weight_out": buffer(FP32, (V * D + 1,))[1:].view(V, D)},
            ValueError,
            "multiple of 16 bytes",
        ),
        refused(lambda w: {"grad_weight_out": buffer(FP32).to("meta")}, ValueError, "got device meta"),
        refused(
            lambda w: {"grad_weight_out": buffer(FP32).requires_grad_()}, ValueError, "requires a gradient"
        ),
        refused(lambda w: {"grad_weight_out": w.detach()}, ValueError, "got memory of linear_weight"),
        refused(lambda w: {"grad_weight_out": buffer(FP32).to_sparse()}, ValueError, "got layout"),
        refused(
            lambda w: {"grad_weight_out": buffer(FP32), "grad_weight_dummy": 1},
            TypeError,
            "grad_weight_dummy: got int, want a bool",
        ),
        refused(lambda w: {"grad_weight_dummy": True}, ValueError, "grad_weight_dummy: got True without"),
    ],
)
def test_bad_arguments_are_refused(change, error: type[Exception], message: str):
    hidden, weight, target = operands(random_case(N, D, V, FP32))
    with pytest.raises(error, match=message) as raised:
        linear_cross_entropy(hidden, weight, target, **change(weight))
    assert str(raised.value).startswith("grad_weight_")


# Nested tensors are a prototype, of which torch warns once a process.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_overlapping_memory_is_refused_and_types_come_first():
    memory = torch.zeros(V * D + N * D + 16)
    _, weight, target = operands(random_case(N, D, V, FP32))
    out, hidden = memory[: V * D].view(V, D), memory[V * D - 8 : V * D - 8 + N * D].view(N, D)
    with pytest.raises(ValueError, match="grad_weight_out: got memory of input"):
        linear_cross_entropy(hidden, weight, target, grad_weight_out=out)
    linear_cross_entropy(memory[V * D :][: N * D].view(N, D), weight, target, grad_weight_out=out)
    with pytest.raises(ValueError, match="grad_weight_out: got memory of target"):
        linear_cross_entropy(
            torch.zeros(N, D), weight, out.view(torch.int64).flatten()[:N], grad_weight_out=out
        )
    sparse = weight.detach().to_sparse().requires_grad_()
    with pytest.raises(ValueError, match="linear_weight: got layout"):
        linear_cross_entropy(hidden, sparse, target, grad_weight_out=out)
    nested = torch.nested.nested_tensor([torch.zeros(3, D), torch.zeros(2, D)])
    with pytest.raises(ValueError, match="input: got a nested tensor"):
        linear_cross_entropy(nested, weight, target, grad_weight_out=out)
    with pytest.raises(ValueError, match="grad_weight_out: got a nested tensor"):
        linear_cross_entropy(hidden, weight, target, grad_weight_out=nested)
    with pytest.raises(TypeError, match=r"^input: got list, want a torch.Tensor"):
        linear_cross_entropy([1.0], weight, target, grad_weight_out=out)  # pyright: ignore[reportArgumentType]
    with torch.inference_mode():
        out = buffer(FP32)
    with pytest.raises(ValueError, match="made in inference mode"):
        linear_cross_entropy(hidden, weight, target, grad_weight_out=out)


def test_a_frozen_weight_is_refused():
    hidden, weight, target = operands(random_case(N, D, V, FP32))
    with pytest.raises(ValueError, match="grad_weight_out: got a tensor for a linear_weight that needs no"):
        linear_cross_entropy(hidden, weight.detach(), target, grad_weight_out=buffer(FP32))


def test_transforms_and_graphs_are_refused():
    case = random_case(N, D, V, FP32)
    hidden, weight, target = operands(case)
    out = torch.zeros(V, D)

    def call(hidden):
        return linear_cross_entropy(hidden, weight, target, grad_weight_out=out)

    with pytest.raises(ValueError, match="grad_weight_out: got a call that something intercepts"):
        torch.func.grad(call)(hidden.detach())
    for fullgraph in (True, False):
        with pytest.raises(Exception, match="grad_weight_out: got a call that something intercepts"):
            torch.compile(call, fullgraph=fullgraph, backend="eager")(hidden)
    loss = call(hidden)
    with pytest.raises(RuntimeError, match="grad_weight_out: got a backward that something intercepts"):
        torch.autograd.grad(loss, hidden, torch.ones(2), is_grads_batched=True)
    assert not out.any()
