"""On a GPU that has kernels: dweight added to a buffer of the caller's, and grad_in_forward."""

from __future__ import annotations

import pytest
import torch

from cute_lce import linear_cross_entropy
from cute_lce.implementation import Accumulated
from cute_lce.launch import KERNELS
from cute_lce.options import LossOptions
from cute_lce.plan.problem import MIB
from cute_lce.streaming import STREAMING
from tests.device import accepted
from tests.gpu.test_forward import device_case, needs_kernels, poisoned
from tests.numerics import Case, assert_close, random_case, with_bad_ignored_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = [*needs_kernels, poisoned]
dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
# n, d, V: few tokens and many, ragged in every direction; d no multiple of 8, of 64, of a tile.
SHAPES = [(16, 768, 50257), (193, 2880, 20109), (300, 77, 1003), (1100, 1024, 32003), (4097, 2304, 5000)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))


@pytest.fixture(autouse=True)
def _memory():
    yield
    torch.cuda.empty_cache()


def ragged(shape: tuple[int, int, int], dtype: torch.dtype) -> Case:
    """Every third token ignored."""
    case = device_case(*shape, dtype)
    case.target[::3] = case.ignore_index
    return case


def train(case: Case, dloss: torch.Tensor, **options) -> tuple[torch.Tensor, ...]:
    """loss, dinput, and dweight or None."""
    hidden, weight = (t.detach().requires_grad_() for t in (case.input, case.linear_weight))
    loss = linear_cross_entropy(hidden, weight, case.target, **options)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight), dloss, allow_unused=True)


@shapes
@dtypes
@pytest.mark.parametrize("out_dtype", [FP32, BF16], ids=["to fp32", "to bf16"])
@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
def test_dweight_is_added(shape, dtype, out_dtype, schedule):
    case = ragged(shape, dtype)
    # As large as the gradient.
    out = (torch.randn(case.linear_weight.shape, device="cuda") * (shape[0] / shape[2]) ** 0.5).to(out_dtype)
    before, dloss = out.double(), case.upstream("sum")
    _, dinput, dweight = train(case, dloss.float(), reduction="sum", schedule=schedule, grad_weight_out=out)
    assert dweight is None
    expected, plain = case.expected(dloss, "sum"), case.baseline(dloss, "sum")
    assert_close("dinput", dinput, expected[1], plain[1])
    total = (before + plain[2].double()).to(out_dtype)
    assert_close("sum", out, before + expected[2], total)


@pytest.mark.parametrize("shape", [*SHAPES, (6001, 520, 9003)], ids=lambda s: "-".join(map(str, s)))
@dtypes
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_grad_in_forward(shape, dtype, reduction):
    """In one chunk, and in as many as the least workspace makes, up to four."""
    case = ragged(shape, dtype)
    dloss = case.upstream(reduction)
    expected = case.expected(dloss, reduction)
    plain = case.baseline(dloss, reduction, rounded_dlogits=True)

    def call(workspace):
        options = {"reduction": reduction, "schedule": "grad_in_forward", "workspace_mb": workspace}
        return train(case, dloss.float(), **options)

    for workspace in (None, accepted(call)):
        found = call(workspace)
        for name, mine, want, base in zip(("loss", "dinput", "dweight"), found, expected, plain, strict=True):
            # Rows of one upstream gradient share the rounding of the target's entry, which may be small in
            # one of the two by chance.
            assert_close(name, mine, want, base, rounding=torch.finfo(dtype).eps / 4)


@dtypes
def test_a_frozen_weight_takes_any_upstream(dtype):
    case = ragged((1100, 1024, 32003), dtype)
    dloss = case.upstream("none")
    hidden = case.input.detach().requires_grad_()

    def call(workspace):
        options = {"reduction": "none", "schedule": "grad_in_forward", "workspace_mb": workspace}
        return linear_cross_entropy(hidden, case.linear_weight, case.target, **options)

    loss = call(accepted(call, 64))
    (dinput,) = torch.autograd.grad(loss, hidden, dloss.float())
    assert_close("dinput", dinput, case.expected(dloss, "none")[1], case.baseline(dloss, "none")[1])


def test_bad_ignored_rows_change_nothing():
    case = ragged((600, 512, 5003), BF16)
    nans, zeros = with_bad_ignored_rows(case)
    dloss = torch.ones((), device="cuda")
    found = train(nans, dloss, schedule="grad_in_forward")
    expected, plain = zeros.expected(dloss.double(), "mean"), zeros.baseline(dloss.double(), "mean")
    for name, mine, want, base in zip(("loss", "dinput", "dweight"), found, expected, plain, strict=True):
        assert_close(name, mine, want, base)


@dtypes
@pytest.mark.parametrize("added", [None, FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("d", [8, 1000, 9000])
def test_the_backwards_products_are_torchs(dtype, added, d):
    """Equal where they are written; where they are added torch may round the product first."""
    dinput, dweight = torch.randn(300, d, device="cuda"), torch.randn(501, d, device="cuda")
    accumulated = Accumulated(torch.empty(0), torch.tensor(7, device="cuda"), dinput, dweight)
    target = torch.zeros(300, dtype=torch.int64, device="cuda")
    before = None if added is None else torch.randn(501, d, device="cuda").to(added)
    found = []
    for implementation in (KERNELS, STREAMING):
        out = None if before is None else before.clone()
        upstream = torch.tensor(3.0, device="cuda")
        first, second = implementation.scale_gradients(
            upstream, target, accumulated, LossOptions(), dtype, out
        )
        found.append((first, second if out is None else out))
    (mine, other), (plain, other_plain) = found
    assert torch.equal(mine, plain)
    if added is None:
        assert torch.equal(other, other_plain)
    else:
        torch.testing.assert_close(other, other_plain, rtol=torch.finfo(added).eps, atol=1e-6)


@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
def test_the_same_bits_again(schedule):
    case = ragged((1100, 1024, 32003), BF16)
    found = []
    for _ in range(3):
        out = torch.ones(case.linear_weight.shape, device="cuda")
        loss, dinput, _ = train(
            case, torch.ones((), device="cuda"), schedule=schedule, grad_weight_out=out, workspace_mb=400
        )
        found.append((loss, dinput, out))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("out_dtype", [FP32, BF16], ids=["to fp32", "to bf16"])
def test_no_temporary_of_the_weights_size(out_dtype):
    """Beyond the workspace and dinput nothing is allocated."""
    case = random_case(256, 512, 100003, BF16).to("cuda")
    out = torch.zeros(case.linear_weight.shape, dtype=out_dtype, device="cuda")
    dloss = torch.ones((), device="cuda")

    def call(workspace):
        train(case, dloss, schedule="recompute", workspace_mb=workspace, grad_weight_out=out)

    workspace = accepted(call, 32)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(workspace)
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < (workspace + 1) * MIB < case.linear_weight.nbytes


@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
def test_a_captured_graph_adds_at_every_replay(schedule):
    case = ragged((600, 512, 5003), BF16)
    hidden, weight = (t.detach().requires_grad_() for t in (case.input, case.linear_weight))
    out = torch.zeros(weight.shape, device="cuda")

    def step() -> torch.Tensor:
        loss = linear_cross_entropy(hidden, weight, case.target, schedule=schedule, grad_weight_out=out)
        return torch.autograd.grad(loss, (hidden, weight), allow_unused=True)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dinput = step()
    out.zero_()
    for _ in range(3):
        graph.replay()
    dloss = torch.ones((), device="cuda").double()
    expected, plain = case.expected(dloss, "mean"), case.baseline(dloss, "mean")
    assert_close("dinput", dinput, expected[1], plain[1])
    assert_close("sum", out, 3 * expected[2], 3 * plain[2])
