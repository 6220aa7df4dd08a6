"""The forward's kernels on a GPU that has them: sizes beyond 2^31, copies, caches, bits, host time.

What holds for every implementation on a CUDA device is in tests/gpu/test_ops.py; compute-sanitizer's runs
are in tests/gpu/sanitize.py.
"""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from cute_lce import launch, linear_cross_entropy, ops
from cute_lce.arch import architecture
from cute_lce.launch import KERNELS
from cute_lce.plan import forward as plans
from cute_lce.streaming import STREAMING
from tests import passes
from tests.numerics import Case, assert_close, negated, random_case

NARROW = (torch.bfloat16, torch.float16)
BF16 = torch.bfloat16

needs_kernels = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and launch.serves(torch.device("cuda", 0), BF16)),
        reason="no kernels for this device",
    ),
]
poisoned = pytest.mark.usefixtures("poisoned_empty")
pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def _memory():
    yield
    torch.cuda.empty_cache()


def call(case: Case, reduction: str = "none", window: int | None = None):
    """(loss, row_max, row_sum, num_valid) of the kernels."""
    results = passes.forward(KERNELS, case, reduction=reduction, window=window or 0)
    return results.loss, *passes.statistics_of(results)


def logits_of(hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """hidden @ weight.T in `dtype`, slab by slab of the vocabulary.

    float32 is torch's product of the narrow operands as they are: the tensor cores' sums round more than
    those of widened operands do, in proportion to their length. It is asked for as tensor cores take it,
    with 16-byte rows, and with so many rows and columns that whole sums fill the GPU: for smaller results
    cuBLAS splits a sum into parts, whose shorter sums round less.
    """
    slabs = weight.split(max(1, 2**27 // weight.shape[1]))
    if dtype is not torch.float32:
        return torch.cat([hidden.to(dtype) @ slab.to(dtype).mT for slab in slabs], dim=1)
    found = []
    whole = _at_least(FULL, torch.nn.functional.pad(hidden, (0, -hidden.shape[1] % 8)))
    for slab in slabs:
        columns = _at_least(FULL, torch.nn.functional.pad(slab, (0, -slab.shape[1] % 8)))
        found.append(torch.mm(whole, columns.mT, out_dtype=dtype)[: len(hidden), : len(slab)].clone())
    return torch.cat(found, dim=1)


FULL = 4096


def _at_least(rows: int, matrix: torch.Tensor) -> torch.Tensor:
    """The matrix's rows, repeated until there are as many."""
    return matrix.repeat(-(-rows // len(matrix)), 1)


def check_rows(case: Case, results, rows: list[int]) -> None:
    """Loss and statistics of some rows against float64."""
    loss, row_max, row_sum, _ = results
    hidden, target = case.input[rows], case.target[rows].long()
    found = {}
    for dtype in (torch.float64, torch.float32):
        logits = logits_of(hidden, case.linear_weight, dtype)
        lse = logits.logsumexp(1)
        picked = logits.gather(1, target.unsqueeze(1))[:, 0]
        sums = (logits - row_max[rows].to(dtype).unsqueeze(1)).exp().sum(1)
        found[dtype] = {"loss": lse - picked, "lse": lse, "row_sum": sums}
    actual_lse = row_max + row_sum.log()
    assert bool((row_max - actual_lse).abs().le(1.5).all())
    for name, actual in (("loss", loss), ("lse", actual_lse), ("row_sum", row_sum)):
        expected, baseline = found[torch.float64][name], found[torch.float32][name]
        assert_close(name, actual[rows], expected, baseline)


def device_case(n: int, d: int, V: int, dtype: torch.dtype, seed: int = 0) -> Case:
    """random_case made on the device: large ones take no time."""
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden = torch.empty(n, d, dtype=dtype, device="cuda").normal_(generator=generator)
    weight = torch.empty(V, d, dtype=dtype, device="cuda").normal_(0, d**-0.5, generator=generator)
    return Case(hidden, weight, torch.randint(0, V, (n,), generator=generator, device="cuda"))


# ----------------------------------------------------------------------------------------------------------
# Sizes


@poisoned
@pytest.mark.parametrize("dtype", NARROW)
def test_more_than_two_to_the_31_logits(dtype):
    n, V = 65536, 50257
    assert n * V > 2**31
    case = device_case(n, 64, V, dtype)
    edge = 2**31 // V
    case.target[edge - 1 : edge + 2] = V - 1
    check_rows(case, call(case), [0, 1, 127, 128, 32768, edge - 1, edge, edge + 1, n - 129, n - 1])


@poisoned
@pytest.mark.parametrize("dtype", NARROW)
def test_more_than_two_to_the_31_weights(dtype):
    V, d = 600_000, 4096
    assert V * d > 2**31
    case = device_case(256, d, V, dtype)
    edge = 2**31 // d
    case.target[:6] = torch.tensor([0, edge - 1, edge, edge + 1, V - 2, V - 1])
    case.linear_weight[V - 3] *= 8  # a maximum beyond the edge, so that a row that is read wrong is seen
    check_rows(case, call(case), [*range(12), 128, 255])


@poisoned
def test_more_than_two_to_the_31_inputs():
    n, d = 540_000, 4096
    assert n * d > 2**31
    case = device_case(n, d, 200, BF16)
    edge = 2**31 // d
    check_rows(case, call(case), [0, edge - 1, edge, edge + 1, n - 200, n - 1])


def test_extra_memory_of_the_largest_table_row():
    """(32768, 4096, 262144): under 100 MiB beyond the operands, and of those nothing is copied."""
    case = device_case(32768, 4096, 262144, BF16)
    linear_cross_entropy(case.input, case.linear_weight, case.target)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(case.input, case.linear_weight, case.target)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    print(f"extra memory at (32768, 4096, 262144): {extra / 2**20:.1f} MiB")
    assert extra < 100 << 20


# ----------------------------------------------------------------------------------------------------------
# Statistics, windows, bits


@poisoned
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    ("n", "d", "V"),
    [
        (1, 64, 50257),
        (127, 256, 7),
        (128, 256, 1),
        (257, 520, 1003),
        (2000, 4096, 3000),
        (5000, 1024, 151936),
    ],
)
def test_row_statistics(n, d, V, dtype):
    case = device_case(n, d, V, dtype, seed=n)
    check_rows(case, call(case), [*range(min(n, 300)), n - 1])


@poisoned
@pytest.mark.parametrize("window", [1, 192, 193, 5000, 10**9])
def test_windows(window):
    case = device_case(300, 256, 50257, BF16)
    check_rows(case, call(case, window=window), list(range(300)))


@poisoned
@pytest.mark.parametrize("index", range(len(architecture("sm_90a").forward_configs)))
@pytest.mark.parametrize("dtype", NARROW)
def test_every_config(index, dtype, monkeypatch):
    """Whichever a plan chooses at other sizes, paced and with few clusters too."""
    configs = launch.device.gpu_of(torch.device("cuda", 0)).row.forward_configs
    chosen = configs[index]
    monkeypatch.setattr(plans, "choose_config", lambda *_: chosen)
    try:
        for n, d, V in ((700, 4096, 40_000), (300, 64, 500), (1, 8, 1000)):
            plans.plan.cache_clear()
            case = device_case(n, d, V, dtype)
            check_rows(case, call(case), [*range(min(n, 200)), n - 1])
    finally:
        plans.plan.cache_clear()


@poisoned
@pytest.mark.parametrize(("n", "d", "V"), [(1000, 256, 5003), (4096, 4096, 32768), (128, 1024, 50257)])
def test_the_same_bits_in_every_run(n, d, V):
    case = device_case(n, d, V, BF16)
    first = call(case)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(call(case), first, strict=True))
    means = {float(call(case, "mean")[0]) for _ in range(10)}
    assert len(means) == 1


@poisoned
@pytest.mark.parametrize(("n", "d", "V"), [(1000, 256, 5003), (4096, 4096, 32768), (100, 1024, 50257)])
def test_the_same_bits_in_every_order_of_rows(n, d, V):
    case = device_case(n, d, V, BF16)
    order = torch.randperm(n, device="cuda")
    straight = call(case, window=4096)
    permuted = call(Case(case.input[order], case.linear_weight, case.target[order]), window=4096)
    for a, b in zip(straight[:3], permuted[:3], strict=True):
        assert torch.equal(a[order], b)


# ----------------------------------------------------------------------------------------------------------
# Operands that TMA cannot read, and dtypes without kernels


def moved(case: Case, how) -> Case:
    """The same call with both operands as `how` leaves them."""
    return Case(how(case.input), how(case.linear_weight), case.target)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers two bytes behind a 16-byte boundary."""
    storage = torch.empty(tensor.numel() + 8, dtype=tensor.dtype, device=tensor.device)
    view = storage[1 : 1 + tensor.numel()].view(tensor.shape)
    view.copy_(tensor)
    assert view.data_ptr() % 16
    return view


def odd_pitch(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.new_full((tensor.shape[0], tensor.shape[1] + 3), torch.nan)
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


@poisoned
@pytest.mark.parametrize("how", [misaligned, odd_pitch, transposed, negated])
def test_operands_that_tma_cannot_read_are_copied_and_said_once(how, caplog):
    launch.device._copied.clear()
    case = random_case(70, 64, 500, BF16).to("cuda")
    strange = moved(case, how)
    with caplog.at_level(logging.WARNING, "cute_lce"):
        for _ in range(3):
            strange.check(linear_cross_entropy)
    for name, tensor in (("input", strange.input), ("linear_weight", strange.linear_weight)):
        lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith(f"{name} of shape")]
        assert len(lines) == 1
        assert f"{tensor.numel() * 2} bytes" in lines[0]
    assert torch.equal(call(strange)[0], call(case)[0])


@poisoned
@pytest.mark.parametrize("d", [1, 7, 100, 4097])
@pytest.mark.parametrize("dtype", NARROW)
def test_features_that_are_no_multiple_of_8(d, dtype, caplog):
    launch.device._copied.clear()
    case = random_case(40, d, 700, dtype).to("cuda")
    with caplog.at_level(logging.WARNING, "cute_lce"):
        check_rows(case, call(case), list(range(40)))
        call(case)
    bytes_ = [rows * -(-d // 8) * 8 * 2 for rows in (40, 700)]
    assert [r.args[-1] for r in caplog.records if "padded copy" in r.msg] == bytes_  # pyright: ignore


@poisoned
def test_rows_of_a_larger_matrix_are_read_where_they_are(caplog):
    launch.device._copied.clear()
    case = random_case(70, 64, 500, BF16).to("cuda")
    wide = torch.full((70, 80), torch.nan, dtype=BF16, device="cuda")
    wide[:, 8:72] = case.input
    with caplog.at_level(logging.WARNING, "cute_lce"):
        results = call(Case(wide[:, 8:72], case.linear_weight, case.target))
    assert not caplog.records
    assert all(torch.equal(a, b) for a, b in zip(results, call(case), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes_take_the_streaming_path(dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    assert ops.implementation(device, dtype) is STREAMING
    assert all(ops.implementation(device, narrow) is KERNELS for narrow in NARROW)
    random_case(40, 64, 700, dtype).to("cuda").check(linear_cross_entropy)


# ----------------------------------------------------------------------------------------------------------
# Other processes

CALL = """
import sys, time
import torch
from cute_lce import linear_cross_entropy
hidden = torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)
weight = torch.zeros(1000, 64, device="cuda", dtype=torch.bfloat16)
target = torch.arange(4, device="cuda")
torch.cuda.synchronize()
start = time.perf_counter()
loss = linear_cross_entropy(hidden, weight, target)
torch.cuda.synchronize()
seconds = time.perf_counter() - start
assert abs(float(loss) - 6.907755) < 1e-5, float(loss)
print("cutlass" in sys.modules, seconds)
"""


def start(folder: Path) -> subprocess.Popen:
    environment = {**os.environ, "CUTE_LCE_CACHE_DIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", CALL], env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> tuple[bool, float]:
    """(whether cutlass was imported, seconds of the first call)."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    imported, seconds = out.split()
    return imported == "True", float(seconds)


@pytest.mark.timing
def test_a_second_processs_first_call(tmp_path):
    """Under 1 s after torch has initialised CUDA, without the compiler."""
    imported, cold = finish(start(tmp_path))
    assert imported
    found = [finish(start(tmp_path)) for _ in range(3)]
    warm = [f"{seconds:.3f}" for _, seconds in found]
    print(f"a process's first call: {cold:.2f} s with an empty cache, then {', '.join(warm)} s")
    assert not any(imported for imported, _ in found)
    assert max(seconds for _, seconds in found) < 1


def test_eight_processes_at_once(tmp_path):
    for process in [start(tmp_path) for _ in range(8)]:
        finish(process)
    assert len(list(tmp_path.iterdir())) == 1, "one kernel, and no temporary files"


# ----------------------------------------------------------------------------------------------------------
# Host time


def host_microseconds(function, batches: int = 15, calls: int = 200) -> float:
    """Host time of a call, the device left to work behind: the median of several batches."""
    for _ in range(50):
        function()
    found = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(found)


def eager_loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """torch's own, whose time on the host tells hosts apart."""
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


@pytest.mark.timing
@pytest.mark.parametrize(("grad", "most"), [(False, 0.6), (True, 0.75)])
def test_host_time(grad, most):
    """As a part of torch eager's, of a shape so small that the device keeps up, and no queue fills."""
    case = random_case(64, 64, 256, BF16).to("cuda")
    hidden, weight = case.input.requires_grad_(grad), case.linear_weight.requires_grad_(grad)
    taken = host_microseconds(lambda: linear_cross_entropy(hidden, weight, case.target))
    eager = host_microseconds(lambda: eager_loss(hidden, weight, case.target))
    print(f"host time of a call {'with' if grad else 'without'} grad: {taken:.1f} us, eager {eager:.1f} us")
    assert taken < most * eager
