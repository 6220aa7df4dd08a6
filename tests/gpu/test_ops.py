"""The public call on a CUDA device, with whatever implementation serves it: kernels or the streaming path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

from cute_lce import LinearCrossEntropy, linear_cross_entropy, ops
from cute_lce.plan.problem import NO_LIMITS, Problem
from tests import numerics
from tests.device import accepted
from tests.numerics import (
    CASES,
    DTYPES,
    Case,
    assert_close,
    check_bad_rows,
    random_case,
    with_bad_rows,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_empty")]

NARROW = (torch.bfloat16, torch.float16)
REDUCTIONS = ("mean", "sum", "none")
SCHEDULES = ("auto", "recompute", "keep", "grad_in_forward")


def serves(schedule: str, case: Case, reduction: str = "mean", need_dweight: bool = True) -> bool:
    """Whether the device's implementation takes an explicit request, or refuses it by name."""
    (V, d), dtype = case.linear_weight.shape, case.input.dtype
    problem = Problem(case.target.numel(), d, V, dtype is torch.float16, need_dweight=need_dweight)
    implementation = ops.implementation(case.input.device, dtype)
    try:
        implementation.choose(problem, dtype, case.input.device, schedule, reduction, NO_LIMITS)
    except ValueError as refusal:
        if not str(refusal).startswith("schedule:"):
            raise
        return False
    return True


# ----------------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_inputs(name, dtype, reduction):
    numerics.make(name, dtype, "cuda").check(linear_cross_entropy, reduction=reduction)


@pytest.mark.parametrize("window", [None, 128, 384, 100000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_and_windows(schedule, dtype, window):
    for name in ("ignored", "jumps", "gpt2"):
        case = numerics.make(name, dtype, "cuda")
        for reduction in ("mean", "none"):
            need_dweight = not (schedule == "grad_in_forward" and reduction == "none")
            if serves(schedule, case, reduction, need_dweight):
                case.check(
                    linear_cross_entropy,
                    schedule=schedule,
                    reduction=reduction,
                    window=window,
                    need_dweight=need_dweight,
                )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("n", "d", "V"),
    [
        (1, 8, 8),
        (127, 64, 255),
        (128, 128, 256),
        (129, 72, 257),
        (300, 2880, 1000),
        (513, 520, 3001),
        (64, 256, 50257),
        (41, 64, 151936),
        (33, 128, 201088),
        (70, 64, 262144),
    ],
)
def test_shapes(n, d, V, dtype):
    case = random_case(n, d, V, dtype, seed=n).to("cuda")
    case.target[0] = V - 1
    case.check(linear_cross_entropy)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("need_dinput", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_frozen(schedule, need_dinput, dtype):
    case = numerics.make("ignored", dtype, "cuda")
    if serves(schedule, case):
        case.check(
            linear_cross_entropy, schedule=schedule, need_dinput=need_dinput, need_dweight=not need_dinput
        )


@pytest.mark.parametrize("dtype", NARROW)
def test_upstream_expanded_and_strided(dtype):
    case = numerics.make("ignored", dtype, "cuda")
    n = case.target.numel()
    dloss = torch.tensor(-1.5, dtype=torch.float64, device="cuda")
    case.check(linear_cross_entropy, reduction="none", dloss=dloss.expand(n))
    dloss = torch.linspace(-1, 3, 2 * n, device="cuda").double()
    case.check(linear_cross_entropy, reduction="none", dloss=dloss[::2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_tokens(dtype):
    weight = torch.randn(300, 64, device="cuda").to(dtype).requires_grad_()
    hidden = torch.zeros(0, 64, device="cuda", dtype=dtype, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64, device="cuda")
    for reduction in REDUCTIONS:
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction)
        assert loss.shape == ((0,) if reduction == "none" else ())
        (dweight,) = torch.autograd.grad(loss.sum(), weight)
        assert not loss.any()
        assert not dweight.any()


def test_float16_mean_of_many_tokens():
    """upstream / n is under float16's range: nothing may be flushed to zero."""
    case = random_case(65536, 64, 512, torch.float16).to("cuda")
    case.check(linear_cross_entropy, dloss=torch.tensor(1.0, dtype=torch.float64, device="cuda"))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sum_of_many_rows(reduction):
    case = random_case(65536, 64, 300, torch.bfloat16).to("cuda")
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target, reduction=reduction)
    assert abs(float(loss) / float(case.expected(1.0, reduction)[0]) - 1) < 1e-6


def test_common_offset_costs_nothing():
    for name in ("offset_300", "offset_10000"):
        case = numerics.make(name, torch.bfloat16, "cuda")
        rows = linear_cross_entropy(case.input, case.linear_weight, case.target, reduction="none")
        expected, _, _ = case.expected(1.0, "none")
        assert float(((rows.double() - expected) / expected).abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
def test_nan_and_infinity_stay_in_their_rows(dtype):
    case = numerics.make("ragged", dtype, "cuda")
    case.input[5, 3] = float("nan")
    case.input[20, 0] = float("inf")
    hidden = case.input.requires_grad_()
    rows = linear_cross_entropy(hidden, case.linear_weight, case.target, reduction="none")
    rows.backward(torch.ones_like(rows))
    assert hidden.grad is not None
    bad = torch.zeros(37, dtype=torch.bool, device="cuda")
    bad[5] = bad[20] = True
    assert torch.equal(rows.isfinite(), ~bad)
    assert torch.equal(hidden.grad.isfinite().all(1), ~bad)


@pytest.mark.parametrize("sick", [(), (0, 5, 39)], ids=["finite gradients", "rows of nan"])
@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bad_rows_change_no_other(schedule, dtype, sick):
    impossible = (3, 17, 38)
    case = with_bad_rows(random_case(40, 64, 900, dtype).to("cuda"), sick, impossible)
    if not serves(schedule, case, "sum"):
        return
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, case.target, reduction="sum", schedule=schedule)
    loss.backward()
    assert loss.isnan() if sick else loss.isposinf()
    plain = Case(hidden.detach(), weight.detach(), case.target)
    found = None, hidden.grad, weight.grad
    check_bad_rows(plain, sick, impossible, found, torch.ones(40, device="cuda"))


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
def test_minus_infinity(dtype):
    case = random_case(140, 8, 900, dtype).to("cuda")
    case.input.abs_()
    case.linear_weight[:700] = -float("inf")
    case.target.remainder_(200).add_(700)
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target)
    rest = Case(case.input, case.linear_weight[700:], case.target - 700)
    assert_close("loss", loss, rest.expected()[0], rest.baseline()[0])


def test_large_logits():
    case = random_case(64, 64, 500, torch.bfloat16, scale=2500.0).to("cuda")
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target)
    assert_close("loss", loss, case.expected()[0], case.baseline()[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_retained_graph_with_other_upstreams(schedule):
    case = numerics.make("ignored", torch.bfloat16, "cuda")
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, case.target, schedule=schedule)
    for upstream in (1.0, -3.0, 0.5):
        dloss = torch.tensor(upstream, device="cuda")
        got = torch.autograd.grad(loss, (hidden, weight), dloss, retain_graph=True)
        expected, baseline = case.expected(upstream), case.baseline(upstream)
        assert_close("dinput", got[0], expected[1], baseline[1])
        assert_close("dlinear_weight", got[1], expected[2], baseline[2])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_checkpoint(schedule):
    case = numerics.make("ragged", torch.bfloat16, "cuda")

    def call(hidden, weight, target, **options):
        def body(h, w):
            return linear_cross_entropy(h, w, target, schedule=schedule, **options)

        return checkpoint(body, hidden, weight, use_reentrant=False)

    case.check(call)


def test_same_bits_run_after_run():
    case = random_case(1000, 256, 5003, torch.bfloat16).to("cuda")
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    runs = []
    for _ in range(5):
        loss = linear_cross_entropy(hidden, weight, case.target)
        runs.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


# ----------------------------------------------------------------------------------------------------------
# Targets


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
@pytest.mark.parametrize("bad", [-1, 130, 2**31 - 1, -(2**31), 2**62, -(2**62)])
@pytest.mark.parametrize("gradient", [1.0, 0.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bad_target_gives_nan(schedule, gradient, bad, dtype):
    case = random_case(9, 16, 130, dtype).to("cuda")
    case.target[4] = bad
    case.target[6] = -100
    expected = torch.zeros(9, dtype=torch.bool, device="cuda")
    expected[4] = True
    for reduction in ("mean", "none"):
        hidden = case.input.detach().requires_grad_()
        weight = case.linear_weight.detach()
        weight.requires_grad_(schedule != "grad_in_forward" or reduction != "none")
        if not serves(schedule, case, reduction, weight.requires_grad):
            continue
        loss = linear_cross_entropy(hidden, weight, case.target, reduction=reduction, schedule=schedule)
        loss.backward(torch.full_like(loss, gradient))
        if reduction == "none":
            assert torch.equal(loss.isnan(), expected)
        else:
            assert loss.isnan()
        assert hidden.grad is not None
        assert torch.equal(hidden.grad.isnan().all(1), expected)
        assert torch.equal(hidden.grad.isnan().any(1), expected)
        if weight.requires_grad:
            assert weight.grad is not None
            assert weight.grad.isnan().all()


@pytest.mark.parametrize(("bad", "fails"), [(5, False), (-100, False), (50, True), (-1, True)])
def test_targets_are_checked_on_request(bad, fails):
    """In a process of its own: a device-side assertion ends what the process can do with the device."""
    code = f"""
import torch, cute_lce
hidden = torch.randn(8, 16, device="cuda").bfloat16()
target = torch.arange(8, device="cuda")
target[3] = {bad}
cute_lce.linear_cross_entropy(hidden, torch.randn(50, 16, device="cuda").bfloat16(), target)
torch.cuda.synchronize()
"""
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CUTE_LCE_CHECK_TARGETS": "1"},
        capture_output=True,
        text=True,
    )
    assert (process.returncode != 0) == fails, process.stderr
    assert ("target: found a class outside [0, 50)" in process.stderr) == fails, process.stderr


# ----------------------------------------------------------------------------------------------------------
# Streams, graphs, synchronisation, compile, autocast


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_host_synchronisation(schedule, dtype):
    case = numerics.make("ignored", dtype, "cuda")
    if not serves(schedule, case):
        pytest.skip(f"{schedule} is refused by name for {dtype}")
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    # The first call may compile and load.
    linear_cross_entropy(hidden, weight, case.target, schedule=schedule).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for reduction in REDUCTIONS if schedule != "grad_in_forward" else ("mean", "sum"):
            loss = linear_cross_entropy(hidden, weight, case.target, reduction=reduction, schedule=schedule)
            loss.backward(torch.ones_like(loss))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_side_stream(schedule, dtype):
    """Operands made on a side stream behind a queue of work, and used there at once."""
    case = random_case(300, 128, 3001, dtype).to("cuda")
    if not serves(schedule, case):
        pytest.skip(f"{schedule} is refused by name for {dtype}")
    case.check(linear_cross_entropy, schedule=schedule)  # What is compiled, and allocated, comes first.
    slow = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            slow = slow @ slow * 1e-2
        nothing = (slow * 0).nan_to_num(0, 0, 0).sum()
        late = Case((case.input + nothing).to(dtype), (case.linear_weight + nothing).to(dtype), case.target)
        hidden, weight = late.input.requires_grad_(), late.linear_weight.requires_grad_()
        loss = linear_cross_entropy(hidden, weight, late.target, schedule=schedule)
        gradients = torch.autograd.grad(loss, (hidden, weight))
    stream.synchronize()
    expected, baseline = case.expected(), case.baseline()
    got = (loss.detach(), *gradients)
    for name, mine, want, plain in zip(("loss", "dinput", "dweight"), got, expected, baseline, strict=True):
        assert_close(name, mine, want, plain)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cuda_graph(schedule, dtype):
    """Captured once, replayed with other inputs, also with other counts of ignored rows."""
    first, second = (random_case(100, 64, 1023, dtype, seed).to("cuda") for seed in (0, 1))
    second.target[::3] = -100
    hidden = first.input.clone().requires_grad_()
    weight = first.linear_weight.clone().requires_grad_()
    target = first.target.clone()
    if not serves(schedule, first):
        pytest.skip(f"{schedule} is refused by name for {dtype}")

    def step():
        loss = linear_cross_entropy(hidden, weight, target, schedule=schedule)
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for case in (second, first):
        with torch.no_grad():
            hidden.copy_(case.input)
            weight.copy_(case.linear_weight)
            target.copy_(case.target)
        graph.replay()
        torch.cuda.synchronize()
        expected, baseline = case.expected(), case.baseline()
        for mine, want, plain in zip(results, expected, baseline, strict=True):
            assert_close("replayed", mine.detach(), want, plain)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_compile_fullgraph(schedule, backend, fresh_inductor):
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=backend, dynamic=True)
    for n in (37, 64, 129):
        random_case(n, 64, 300, torch.bfloat16, seed=n).to("cuda").check(compiled, schedule=schedule)


@pytest.mark.parametrize("schedule", ["recompute", "keep"])
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_compile_with_cuda_graphs_in_a_fresh_process(mode, schedule, tmp_path):
    """The first call of all runs in a graph's memory pool, where nothing that it caches may stay."""
    code = f"""
import torch
from torch._dynamo.utils import counters
from cute_lce import linear_cross_entropy
from tests.numerics import random_case

compiled = torch.compile(linear_cross_entropy, fullgraph=True, mode={mode!r})
for seed in range(6):
    case = random_case(200, 64, 1001, torch.bfloat16, seed=seed).to("cuda")
    case.target[:seed] = -100
    for reduction in ("mean", "none"):
        torch.compiler.cudagraph_mark_step_begin()
        case.check(compiled, schedule={schedule!r}, reduction=reduction)
assert not counters["inductor"]["cudagraph_skips"], counters["inductor"]
print("all steps done")
"""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.endswith("all steps done\n"), process.stdout


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_batched_gradients(reduction, dtype):
    case = numerics.make("ignored", dtype, "cuda")
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, case.target, reduction=reduction)
    batch = torch.stack([case.upstream(reduction), -0.5 * case.upstream(reduction)])
    got = torch.autograd.grad(loss, (hidden, weight), batch.float(), is_grads_batched=True)
    for i, dloss in enumerate(batch):
        expected, baseline = case.expected(dloss, reduction), case.baseline(dloss, reduction)
        assert_close("dinput", got[0][i], expected[1], baseline[1])
        assert_close("dlinear_weight", got[1][i], expected[2], baseline[2])


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
@pytest.mark.parametrize("schedule", SCHEDULES[:3])
def test_func(schedule, dtype):
    """vjp, whose pullback runs when the transform has ended, and gradients of each sample."""
    case = numerics.make("ignored", dtype, "cuda")
    if not serves(schedule, case):
        pytest.skip(f"{schedule} is refused by name for {dtype}")

    def call(hidden, weight):
        return linear_cross_entropy(hidden, weight, case.target, schedule=schedule)

    expected, baseline = case.expected(-2.5), case.baseline(-2.5)
    loss, pull, *_ = torch.func.vjp(call, case.input, case.linear_weight)
    for mine, want, plain in zip((loss, *pull(torch.full_like(loss, -2.5))), expected, baseline, strict=True):
        assert_close("vjp", mine, want, plain)
    twice = torch.stack([case.input, case.input])
    per_sample = torch.vmap(torch.func.grad(call, (0, 1)), (0, None))(twice, case.linear_weight)
    expected, baseline = case.expected(), case.baseline()
    for name, mine, want, plain in zip(
        ("dinput", "dweight"), per_sample, expected[1:], baseline[1:], strict=True
    ):
        for sample in mine:
            assert_close(name, sample, want, plain)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
def test_forward_mode_is_refused(dtype):
    case = numerics.make("ignored", dtype, "cuda")
    with pytest.raises(RuntimeError, match="no forward-mode differentiation"):
        torch.func.jvp(
            lambda hidden: linear_cross_entropy(hidden, case.linear_weight, case.target),
            (case.input,),
            (torch.ones_like(case.input),),
        )


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
def test_trace(dtype):
    first, second = numerics.make("ragged", dtype, "cuda"), numerics.make("ignored", dtype, "cuda")
    traced: Any = torch.jit.trace(linear_cross_entropy, (first.input, first.linear_weight, first.target))
    kinds = [node.kind() for node in traced.graph.nodes()]
    assert kinds.count("cute_lce::fused_linear_cross_entropy") == 1
    assert not any(kind.startswith("aten::") for kind in kinds)
    for case in (first, second):
        case.check(lambda *operands, **_: traced(*operands))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
def test_autocast(dtype, compiled, fresh_inductor):
    case = random_case(200, 64, 1001, torch.float32).to("cuda")
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    torch._dynamo.reset()
    call = torch.compile(linear_cross_entropy, fullgraph=True) if compiled else linear_cross_entropy
    # torch 2.11's cache of compiled graphs leaves autocast's dtype out of its key: F.linear compiled under
    # bf16 and then under float16 gives bf16 again.
    with functorch_config.patch(enable_autograd_cache=False), torch.autocast("cuda", dtype):
        loss = call(hidden, weight, case.target)
        assert loss.dtype is torch.float32
        loss.backward()
    narrow = Case(case.input.detach().to(dtype), case.linear_weight.detach().to(dtype), case.target)
    expected, baseline = narrow.expected(), narrow.baseline()
    assert_close("loss", loss.detach(), expected[0], baseline[0])
    for tensor, want, plain in zip((hidden, weight), expected[1:], baseline[1:], strict=True):
        assert tensor.grad is not None
        assert tensor.grad.dtype is torch.float32
        assert_close("gradient", tensor.grad.to(dtype), want, plain)


@pytest.mark.parametrize("dtype", NARROW)
def test_opcheck(dtype):
    case = numerics.make("ignored", dtype, "cuda")
    operands = case.input.requires_grad_(), case.linear_weight.requires_grad_(), case.target
    for schedule in SCHEDULES:
        if serves(schedule, case):
            torch.library.opcheck(
                torch.ops.cute_lce.fused_linear_cross_entropy.default, operands, {"schedule": schedule}
            )


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs a second CUDA device")
@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
def test_device_that_is_not_current(dtype):
    assert torch.cuda.current_device() == 0
    numerics.make("ragged", dtype, "cuda:1").check(linear_cross_entropy)


def test_devices_are_not_mixed():
    hidden, weight = torch.randn(4, 8, device="cuda"), torch.randn(10, 8)
    with pytest.raises(ValueError, match="linear_weight: got device cpu"):
        linear_cross_entropy(hidden, weight, torch.arange(4, device="cuda"))
    with pytest.raises(ValueError, match="target: got device cpu"):
        linear_cross_entropy(hidden, weight.cuda(), torch.arange(4))


# ----------------------------------------------------------------------------------------------------------
# Memory


def peak_extra(case: Case, **options) -> int:
    """Peak bytes over forward and backward, less the two gradients."""
    hidden, weight = case.input.detach().requires_grad_(), case.linear_weight.detach().requires_grad_()

    def step():
        hidden.grad = weight.grad = None
        linear_cross_entropy(hidden, weight, case.target, **options).backward()

    # What the first call compiles, loads or reserves is not counted.
    step()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    results = hidden.nbytes + weight.nbytes
    return torch.cuda.max_memory_allocated() - before - results


@pytest.mark.parametrize("workspace_mb", [96, 200])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
def test_workspace_is_a_promise(dtype, schedule, workspace_mb):
    case = random_case(2048, 256, 32768, dtype).to("cuda")
    if serves(schedule, case):
        if dtype in NARROW:
            workspace_mb = accepted(
                lambda mb: peak_extra(case, schedule=schedule, workspace_mb=mb), workspace_mb
            )
        assert peak_extra(case, schedule=schedule, workspace_mb=workspace_mb) <= workspace_mb * 2**20


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
def test_forward_has_no_logits(dtype):
    case = random_case(2048, 256, 32768, dtype).to("cuda")
    with torch.no_grad():
        linear_cross_entropy(case.input, case.linear_weight, case.target, workspace_mb=32)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(case.input, case.linear_weight, case.target, workspace_mb=32)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 32 << 20 < 2048 * 32768 * 2


def test_module_trains():
    torch.manual_seed(0)
    head = LinearCrossEntropy(64, 1000, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, 1000, (256,), device="cuda")
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.05)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = head(hidden, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert losses[-1] < 0.2 * losses[0]
