"""`cute-lce bench`: this loss beside torch's, on this machine, in under a minute."""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import linear_cross_entropy
from ..measure.floor import Floor
from ..measure.records import describe_device
from ..measure.timing import peak_extra_bytes, synchronize, time_interleaved
from .terminal import Refused, mebibytes, positive

DTYPES = ("bfloat16", "float16", "float32")
OURS = "cute_lce"
PASSES = ("forward", "forward and backward")
SECONDS = 3.0
"""Timed, of each pass."""
CPU_SECONDS = 35.0
CPU_ROUNDS = 12
"""How many times as long as a call of each pass and row a bench takes about: eight of them, the GEMMs alone,
and what the profiler adds."""
PROBE_SECONDS = 0.2
FAILURES = (RuntimeError, ImportError, OSError, ValueError)
"""Of a loss; the others are timed."""
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """n tokens, hidden size d, vocabulary; dtype: of the operands. None: what the device is for."""

    n: int
    d: int
    vocab: int
    dtype: str | None = None


GPU_SHAPE, CPU_SHAPE = Shape(8192, 4096, 128256), Shape(1024, 512, 32768)


class Row(NamedTuple):
    """A loss in one pass.

    ms: of a call, the median. x_gemms: multiples of its GEMMs alone, by torch. mib: peak memory beyond
    operands and gradients. failed: why there are no numbers; empty: there are.
    """

    name: str
    timed: str
    ms: float = 0.0
    x_gemms: float = 0.0
    mib: float = 0.0
    failed: str = ""


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "bench", help="compare time and memory of this loss with torch's on this machine, in under a minute"
    )
    names = ("--n", "tokens"), ("--d", "hidden size"), ("--vocab", "vocabulary")
    for (option, text), gpu, cpu in zip(names, GPU_SHAPE[:3], CPU_SHAPE[:3], strict=True):
        command.add_argument(option, type=positive, help=f"{text} ({gpu} on a GPU, {cpu} on a CPU)")
    command.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the operands (bfloat16 on a GPU, float32 on a CPU)"
    )
    command.add_argument("--device", choices=("cuda", "cpu"), help="where to run (a GPU if there is one)")
    command.add_argument("--workspace-mb", type=mebibytes, help="cute_lce's workspace_mb (2304)")
    command.add_argument("--compile", action="store_true", help="also measure torch.compile: a minute more")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a row for each loss and pass, and the verdict; 1 if ours failed."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise Refused("--device: got cuda, want cpu: there is no usable CUDA device")
    device = default_device() if args.device is None else torch.device(args.device)
    usual = GPU_SHAPE if device.type == "cuda" else CPU_SHAPE
    shape = Shape(args.n or usual.n, args.d or usual.d, args.vocab or usual.vocab, args.dtype)
    found = measure(shape, device, workspace_mb=args.workspace_mb, compiled=args.compile)
    print("\n".join(found.lines()))
    return 0 if all(not row.failed for row in found.rows if row.name == OURS) else 1


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Found(NamedTuple):
    """What was measured. asked: the tokens that were asked for."""

    shape: Shape
    asked: int
    device: str
    rows: list[Row]

    def lines(self) -> list[str]:
        """A table and the verdict."""
        n, d, vocab, dtype = self.shape
        lines = [f"n = {n}, d = {d}, V = {vocab}, {dtype}, on {self.device}"]
        if n < self.asked:
            lines.append(f"({n} tokens instead of {self.asked}: more would take longer than a minute here)")
        lines.append(f"{'':16}{'':20}{'ms':>10}  {'x GEMMs':>8}  {'extra MiB':>10}")
        for row in self.rows:
            numbers = f"{row.ms:8.2f}  {row.x_gemms:8.2f}  {row.mib:10.0f}"
            lines.append(f"{row.name:16}{row.timed:20}  {row.failed or numbers}")
        return [*lines, self.verdict()]

    def verdict(self) -> str:
        """One line: ours beside the faster of torch's."""
        own, *others = [row for row in self.rows if row.timed == PASSES[1]]
        if own.failed:
            return f"{OURS} failed: {own.failed}"
        took = f"{own.ms:.2f} ms and {own.mib:.0f} MiB beyond operands and gradients"
        served = [row for row in others if not row.failed]
        if not served:
            return f"forward and backward: {OURS} takes {took}; torch cannot ({others[0].failed})"
        best = min(served, key=lambda row: row.ms)
        speed = f"{best.ms / own.ms:.2f} times as fast as {best.name} ({best.ms:.2f} ms, {best.mib:.0f} MiB)"
        return f"forward and backward: {OURS} takes {took}, {speed}"


def measure(
    shape: Shape,
    device: torch.device,
    *,
    workspace_mb: float | None = None,
    compiled: bool = False,
) -> Found:
    """Time every loss in turn with its GEMMs. On a CPU n is cut to what is done within a minute.

    Raises Refused where the operands do not fit into memory.
    """
    dtype = shape.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    asked, shape = shape.n, shape._replace(dtype=dtype)
    kind: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype)}
    torch.manual_seed(0)
    with _fits(shape):
        weight = (torch.randn(shape.vocab, shape.d, **kind) * shape.d**-0.5).requires_grad_()
        if device.type == "cpu":
            shape = shape._replace(n=_tokens_in_time(shape.n, weight))
        hidden, target = _tokens(shape.n, weight)
    rows = []
    for timed in PASSES:
        calls = {
            name: functools.partial(_call, timed, loss, hidden, weight, target)
            for name, loss in _losses(workspace_mb, compiled).items()
        }
        with _fits(shape):
            floor = Floor(hidden.detach(), weight.detach(), timed == PASSES[1])
        gradients = hidden.nbytes + weight.nbytes if timed == PASSES[1] else 0
        rows += _rows(timed, calls, floor, device, gradients)
    return Found(shape, asked, describe_device(device), rows)


@contextlib.contextmanager
def _fits(shape: Shape) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        why = str(error).splitlines()[0][:200]
        raise Refused(
            f"--n, --d, --vocab: got {', '.join(map(str, shape[:3]))}, want fewer: no memory ({why})"
        ) from None


def _tokens(n: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(hidden (n, d), which needs a gradient, target (n,))"""
    vocab, d = weight.shape
    hidden = torch.randn(n, d, device=weight.device, dtype=weight.dtype).requires_grad_()
    return hidden, torch.randint(vocab, (n,), device=weight.device)


def _losses(workspace_mb: float | None, compiled: bool) -> dict[str, Loss]:
    """Ours, and torch's as it is written where there is no fused one."""
    losses: dict[str, Loss] = {
        OURS: functools.partial(linear_cross_entropy, workspace_mb=workspace_mb),
        "torch": _eager,
    }
    if compiled:
        losses["torch.compile"] = torch.compile(_eager, dynamic=False)
    return losses


def _eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def _call(timed: str, loss: Loss, hidden: Tensor, weight: Tensor, target: Tensor) -> object:
    if timed == PASSES[0]:
        with torch.no_grad():
            return loss(hidden, weight, target)
    return torch.autograd.grad(loss(hidden, weight, target), (hidden, weight))


def _rows(
    timed: str, calls: dict[str, Callable[[], object]], floor: Floor, device: torch.device, gradients: int
) -> list[Row]:
    """gradients: bytes of what a call returns."""
    rows = {}
    for name, call in calls.items():
        try:
            call()  # Compiles, and allocates what a process allocates once.
            extra = peak_extra_bytes(call, device) - gradients
            rows[name] = Row(name, timed, mib=max(0, extra) / 2**20)
        except FAILURES as error:
            rows[name] = Row(name, timed, failed=f"{type(error).__name__}: {str(error).splitlines()[0][:90]}")
    synchronize(device)
    able = [name for name, row in rows.items() if not row.failed]
    times = time_interleaved([floor, *(calls[name] for name in able)], device, budget_s=SECONDS)
    for name, timing in zip(able, times[1:], strict=True):
        rows[name] = rows[name]._replace(ms=timing.ms, x_gemms=timing.ms / times[0].ms)
    return list(rows.values())


def _tokens_in_time(n: int, weight: Tensor) -> int:
    """As many of n tokens as this CPU takes in time, judged by calls with one and with some of them."""

    def seconds(tokens: int) -> float:
        hidden, target = _tokens(tokens, weight)
        times = []
        # Of two, as another process may have had the cores meanwhile.
        for _ in range(2):
            started = time.perf_counter()
            for timed in PASSES:
                for loss in _losses(None, False).values():
                    with contextlib.suppress(*FAILURES):
                        _call(timed, loss, hidden, weight, target)
            times.append(time.perf_counter() - started)
        return min(times)

    allowed = CPU_SECONDS / CPU_ROUNDS
    once = taken = seconds(1)
    tokens = 1
    while tokens < n and taken < allowed and taken - once < PROBE_SECONDS:
        tokens = min(4 * tokens, n)
        taken = seconds(tokens)
    if taken < allowed and tokens == n:
        return n
    if once >= allowed or tokens == 1:
        return 1
    return max(1, min(n, int((allowed - once) / (taken - once) * (tokens - 1))))
