"""Peak memory on a CPU, from the allocator's own events: these fail where logits appear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from cute_lce import linear_cross_entropy, linear_logprob
from cute_lce.plan.problem import MIB
from cute_lce.streaming.memory import CPU_LOGITS_BYTES, ROW_BYTES
from tests.logit_terms import LogCap

n, d, V = 512, 32, 32768
LOGITS = n * V * 4


def measure(function) -> tuple[int, int]:
    """(peak, largest allocation) in bytes of what function allocates, over what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    del result
    events = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    memory: list[Any] = [event for event in events if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns())]
    live = peak = 0
    for size in sizes:
        live += size
        peak = max(peak, live)
    assert sizes
    return peak, max(sizes)


def operands(dtype, need_dinput=True, need_dweight=True):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(n, d, generator=generator).to(dtype).requires_grad_(need_dinput),
        torch.randn(V, d, generator=generator).to(dtype).requires_grad_(need_dweight),
        torch.randint(0, V, (n,), generator=generator),
    )


def infer(tensors, **options) -> tuple[int, int]:
    with torch.no_grad():
        return measure(lambda: linear_cross_entropy(*tensors, **options))


def results(dtype, need_dinput=True, need_dweight=True) -> int:
    return (n * d * need_dinput + V * d * need_dweight) * dtype.itemsize


def train(dtype, needed=(True, True), reduction="mean", **options):
    hidden, weight, target = operands(dtype, *needed)

    def step():
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, **options)
        loss.backward(torch.ones_like(loss))

    return measure(step)


def test_the_measure_sees_logits():
    """The canonical loss holds the logits three times; a single one is enough to be seen."""
    hidden, weight, target = operands(torch.float32)
    peak, largest = measure(lambda: F.cross_entropy(F.linear(hidden, weight), target).backward())
    assert peak > 2 * LOGITS
    assert largest >= LOGITS
    peak, _ = measure(lambda: (hidden.detach() @ weight.detach().mT).amax(1))
    assert LOGITS <= peak < 1.1 * LOGITS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_forward_holds_one_window(dtype):
    wide = max(dtype.itemsize, 4)
    for window in (64, 1024):
        peak, largest = infer(operands(dtype), window=window)
        widened = 0 if dtype.itemsize >= 4 else (n + window) * d * wide
        assert largest <= max(n * window * wide, n * d * wide)
        assert peak <= n * window * wide + widened + ROW_BYTES * n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_recompute_holds_one_window(dtype, needed):
    """O(n window + window d + n d) in float32, and V d only when the weight's gradient is wanted."""
    wide = max(dtype.itemsize, 4)
    for window in (64, 1024):
        peak, largest = train(dtype, needed, window=window, schedule="recompute")
        extra = peak - results(dtype, *needed)
        assert extra <= (n * window + 2 * window * d + 3 * n * d) * wide + 2 * ROW_BYTES * n
        assert largest <= max(n * window * wide, n * d * wide, results(dtype, *needed))


@pytest.mark.parametrize("schedule", ["auto", "recompute"])
def test_default_window_is_a_fraction_of_the_logits(schedule):
    peak, _ = train(torch.float32, schedule=schedule)
    assert peak - results(torch.float32) < LOGITS / 4


@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
def test_frozen_weight_has_no_buffer_of_its_size(schedule):
    # float32 has V d = 4 MiB; the least of grad_in_forward is 16 tokens of logits, 2 MiB.
    for reduction in ("mean", "none"):
        peak, _ = train(
            torch.float32, (True, False), reduction, schedule=schedule, window=64, workspace_mb=2.5
        )
        assert peak < 2.6 * MIB < V * d * 4


# By default a workspace with each reduction in float32, and with one of them in the others, whose windows and
# kept columns are counted in the same way; the long sweep has all.
@pytest.mark.parametrize(
    ("workspace_mb", "dtype", "reduction"),
    [
        pytest.param(
            workspace_mb,
            dtype,
            reduction,
            marks=[]
            if dtype is torch.float32 or reduction == ("mean", "none")[(i + j) % 2]
            else pytest.mark.emulator_full,
        )
        for i, workspace_mb in enumerate((2, 8.5, 32, 200))
        for j, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64))
        for reduction in ("mean", "none")
    ],
)
def test_keep_holds_no_more_than_the_workspace(dtype, reduction, workspace_mb):
    peak, largest = train(dtype, reduction=reduction, schedule="keep", workspace_mb=workspace_mb)
    extra = peak - results(dtype)
    assert extra <= workspace_mb * MIB
    # It is used, too: what is kept is what the windows leave.
    if workspace_mb in (8.5, 32):
        assert largest > (workspace_mb * 0.5 - 1) * MIB
    if workspace_mb == 200:
        assert largest == n * V * max(dtype.itemsize, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_recompute_holds_no_more_than_the_workspace(dtype, needed):
    for workspace_mb in (1.2, 2, 5):
        peak, _ = train(dtype, needed, schedule="recompute", workspace_mb=workspace_mb)
        assert peak - results(dtype, *needed) <= workspace_mb * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_grad_in_forward_holds_one_chunk(dtype):
    wide = max(dtype.itemsize, 4)
    accumulators = (n + V) * d * wide
    least = (accumulators + 16 * V * wide) / MIB
    for workspace_mb in (least * 1.5, least * 4):
        peak, largest = train(dtype, schedule="grad_in_forward", workspace_mb=workspace_mb)
        assert peak - results(dtype) <= workspace_mb * MIB
        assert largest < LOGITS
    # The accumulators stay from forward to backward; a chunk does not.
    hidden, weight, target = operands(dtype)
    loss = linear_cross_entropy(hidden, weight, target, schedule="grad_in_forward")
    peak, _ = measure(loss.backward)
    assert peak <= results(dtype) + 2 * CPU_LOGITS_BYTES


@pytest.mark.parametrize("schedule", ["keep", "grad_in_forward"])
def test_nothing_is_kept_without_a_gradient(schedule):
    peak, _ = infer(operands(torch.float32), schedule=schedule, window=64)
    assert peak < 2 * n * 64 * 4


def test_tokens_do_not_multiply_the_vocabulary():
    """Twice the vocabulary: the same workspace."""
    hidden, weight, target = operands(torch.float32)
    half, _ = infer((hidden, weight[: V // 2], target % (V // 2)), window=64)
    assert half == infer((hidden, weight, target), window=64)[0]


@pytest.mark.parametrize("softcap", [9.0, LogCap(9.0)], ids=str)
@pytest.mark.parametrize("schedule", ["recompute", "keep", "grad_in_forward"])
def test_terms_hold_no_more_than_the_workspace(schedule, softcap):
    """All of them, and windows of logits at a time: several copies of each are alive."""
    terms: dict[str, Any] = {"label_smoothing": 0.1, "softcap": softcap, "z_loss": 0.1, "logit_scale": 0.7}
    terms |= {"weight": torch.rand(V), "token_weight": torch.rand(n)}
    workspace_mb = 48
    peak, largest = train(torch.float32, schedule=schedule, workspace_mb=workspace_mb, **terms)
    assert peak <= results(torch.float32) + workspace_mb * MIB
    assert largest < LOGITS


@pytest.mark.parametrize("schedule", ["recompute", "keep"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_terms_of_few_tokens_hold_no_more_than_the_workspace(dtype, schedule):
    """Each window of the weight's gradient is larger than that of the logits."""
    few, wide, columns, workspace_mb = 16, 1024, 8192, 4
    hidden = torch.randn(few, wide).to(dtype).requires_grad_()
    weight = torch.randn(columns, wide).to(dtype).requires_grad_()
    target = torch.randint(0, columns, (few,))
    options: dict[str, Any] = {"schedule": schedule, "workspace_mb": workspace_mb, "label_smoothing": 0.1}
    peak, _ = measure(lambda: linear_cross_entropy(hidden, weight, target, **options).backward())
    assert peak <= (few + columns) * wide * dtype.itemsize + workspace_mb * MIB


def test_numbers_of_tokens_hold_a_few_windows():
    hidden, weight, target = operands(torch.float32)
    names = ("logprob", "entropy", "lse", "argmax", "log_sum_sq_probs")

    def step():
        found: Any = linear_logprob(hidden, weight, target, outputs=names)
        (found.logprob + found.entropy).sum().backward()

    peak, _ = measure(step)
    assert peak <= results(torch.float32) + 6 * CPU_LOGITS_BYTES
