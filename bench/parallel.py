"""Time calls over several GPUs of one host, compare them with the whole call on one GPU, and measure how much
of their collectives other kernels hide.

Each repetition runs every case, in a new random order that is the same on all ranks, and a case's time in a
repetition is its slowest rank's, but for one that ranks run alone. `ms` is the time of a call in a row of
them, of HOT_SECONDS, behind as many that are not timed: GPUs at their power limit run at another clock after
a pause than in a training job. `ms_idle` is the time of one call, behind the same, for which the GPU waits.
On a CPU a row is one call. Efficiency is per GPU, by `ms`: the time of the whole call on one GPU, divided by
ranks times the case's time. GPUs of a host differ by some percent, so each of them runs the whole call, one
after the other, and the mean of their times counts; `each` is compared on every rank with its own time alone,
and the worst counts. In a row of `each` the ranks meet only before it: the slowest one's last calls may run
beside idle GPUs. The workspace is each GPU's. Results are a JSON list with one object for each case and
shape; bench/results/README.md explains the keys.

    python3 -m bench.parallel --ranks 2 --out bench/results/h200x2_parallel.json
    python3 -m bench.parallel --ranks 2 --shapes 2048,4096,131072 --cases alone tp tp_serial --quick
    python3 -m bench.parallel --show bench/results/h200x2_parallel.json
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from bench import shapes
from bench.inputs import DTYPES, make_inputs
from cute_lce import linear_cross_entropy
from cute_lce.commands.terminal import new_file
from cute_lce.measure import records
from cute_lce.measure.timing import FLUSH_BYTES, peak_extra_bytes, relative_rms, synchronize
from cute_lce.parallel import tensor
from cute_lce.parallel.collectives import Begun, gather

Meet = Callable[[], object]
"""Waits for all ranks, on the host: a GPU that waits in a collective is not idle."""
KEYS = (
    *("gpu", "ranks", "case", "schedule", "reduction", "n", "d", "vocab", "dtype", "pass", "workspace_mb"),
    *("ms", "ms_min", "ms_max", "ms_idle", "efficiency", "extra_mib", "hidden_share"),
    *("err_loss", "err_dh", "err_dw"),
    *("versions", "date", "command"),
)
CASES = {
    "alone": "the whole call on one GPU, the others idle; each in turn",
    "each": "the whole call on every GPU at once, without collectives, as under DDP's no_sync",
    "shard": "a shard of the vocabulary on every GPU at once, without collectives",
    "shard_meet": "the same, and a gather of three numbers of every token between forward and backward",
    "tp": "the vocabulary in shards",
    "tp_serial": "the same, where dweight waits for dinput's sum over the ranks",
    "tp_partial": "the same, without dinput's sum over the ranks",
    "tp_sequence": "the vocabulary in shards and the tokens in slices",
    "tp_forward": "the forward alone, the vocabulary in shards",
    "alone_forward": "the forward alone on one GPU; each in turn",
}
ENVIRONMENT = {
    # No multicast over NVLink.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass(frozen=True)
class Setting:
    """What the ranks run. shape: n,d,V of the whole."""

    shape: shapes.Shape
    cases: tuple[str, ...]
    schedule: str
    reduction: str
    dtype: str
    workspace_mb: float
    sm_margin: int | None
    reps: int


@contextmanager
def serial() -> Iterator[None]:
    """While active, a sum over the ranks is over before anything behind it begins."""

    start = tensor.start_sum

    def waited(*arguments: Any, **options: Any) -> Begun:
        begun = start(*arguments, **options)
        begun.wait()
        return begun

    with mock.patch.object(tensor, "start_sum", waited):
        yield


class Step:
    """One case of a setting on this rank."""

    def __init__(self, case: str, setting: Setting, device: torch.device):
        shape, group = setting.shape, dist.group.WORLD
        assert group is not None
        rank, ranks = group.rank(), group.size()
        whole = make_inputs(shape, DTYPES[setting.dtype], "untrained", device)
        self.case, self.rank = case, rank
        self.is_alone = case.startswith("alone")
        # How many times the ranks meet for it: each runs it while the others are idle, or all at once.
        self.turns = ranks if self.is_alone else 1
        options: dict[str, Any] = {}
        hidden, weight, target = whole.hidden, whole.weight, whole.target
        if _is_sharded(case):
            weight = weight.chunk(ranks)[rank]
        if case.startswith("shard"):
            target = target % len(weight)
        # What waits for the slowest rank between the passes.
        self.between: Callable[[], object] | None = None
        if case == "shard_meet":
            self.between = partial(gather, hidden.new_zeros(3 * len(hidden), dtype=torch.float32), group)
        if case.startswith("tp"):
            options["tp_group"], options["sm_margin"] = group, setting.sm_margin
        if case == "tp_sequence":
            hidden = hidden.chunk(ranks)[rank]
            options["sequence_dim"] = 0
        if case == "tp_partial":
            options["grad_input"] = "partial"
        self.hidden = hidden.clone().requires_grad_(not case.endswith("forward"))
        self.weight = weight.clone().requires_grad_(not case.endswith("forward"))
        self.target = target
        self.upstream = whole.upstream if setting.reduction == "none" else None
        self.run = partial(
            linear_cross_entropy,
            schedule=setting.schedule,
            reduction=setting.reduction,
            workspace_mb=setting.workspace_mb,
            **options,
        )

    def loss_and_gradients(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        loss = self.run(self.hidden, self.weight, self.target)
        if self.between is not None:
            self.between()
        if loss.requires_grad:
            loss.backward(self.upstream)
        gradients = self.hidden.grad, self.weight.grad
        self.hidden.grad = self.weight.grad = None
        return loss.detach(), *gradients

    def is_turn(self, turn: int) -> bool:
        return self.turns == 1 or turn == self.rank

    def __call__(self) -> None:
        if self.case == "tp_serial":
            with serial():
                self.loss_and_gradients()
        else:
            self.loss_and_gradients()


HOT_SECONDS = 0.4
"""Seconds of calls in a row that are timed; as many go before them."""


def calls_in_a_row(step: Step, device: torch.device) -> int:
    """How many take about HOT_SECONDS, the same on every rank; one on a CPU."""
    if device.type != "cuda":
        return 1
    synchronize(device)
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(3):
        step()
    synchronize(device)
    seconds = torch.tensor((time.perf_counter() - begun) / 3, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return math.ceil(HOT_SECONDS / float(seconds))


def time_steps(
    steps: Sequence[Step], calls: Sequence[int], reps: int, device: torch.device, meet: Meet, *, is_idle: bool
) -> Tensor:
    """Milliseconds of a call by rank, step and repetition. calls: in a row, by step. is_idle: of one call,
    for which the GPU waits, behind a row."""
    meeting = torch.zeros(1, device=device)
    flush = torch.empty(FLUSH_BYTES if device.type == "cuda" else 1, dtype=torch.int8, device=device)
    draw = random.Random(0)
    spans: list[list[tuple[_Mark, _Mark]]] = [[] for _ in steps]
    counts = [1 if is_idle else count for count in calls]
    for repetition in range(reps + 1):
        order = draw.sample(range(len(steps)), len(steps))
        for i, turn in ((at, turn) for at in order for turn in range(steps[at].turns)):
            step, own_turn = steps[i], steps[i].is_turn(turn)
            begin, end = (_Mark(device) for _ in range(2))
            for _ in range(calls[i] if own_turn else 0):
                step()
            if is_idle:
                synchronize(device)
                flush.zero_()
                dist.all_reduce(meeting)
            if own_turn:
                begin.record()
                for _ in range(counts[i]):
                    step()
                end.record()
            # One step is on the device at a time: an idle rank's next one would begin early.
            synchronize(device)
            meet()
            if repetition and own_turn:
                spans[i].append((begin, end))
    own = torch.tensor(
        [
            [begin.elapsed_time(end) / count for begin, end in each]
            for each, count in zip(spans, counts, strict=True)
        ],
        dtype=torch.float64,
        device=device,
    )
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return torch.stack(every).cpu()


class _Mark:
    """A moment: a CUDA event's, or the wall clock's."""

    def __init__(self, device: torch.device):
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def elapsed_time(self, end: _Mark) -> float:
        if self.event is not None and end.event is not None:
            return self.event.elapsed_time(end.event)
        return (end.seconds - self.seconds) * 1e3


def hidden_share(step: Step, device: torch.device) -> float | None:
    """The part of the time of the collectives of dinput's sum in which another kernel runs on this rank's
    GPU; None: there are none, or no GPU."""
    if device.type != "cuda" or not step.case.startswith("tp"):
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        synchronize(device)
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events() or []
        if str(event.device_type).endswith("CUDA") and event.time_range.end > event.time_range.start
    ]
    collectives = sorted((start, end, name) for name, start, end in kernels if "nccl" in name.lower())
    # A sum and the gather behind it.
    first = next((start for start, _, name in collectives if "reduce" in name.lower()), None)
    if first is None:
        return None
    others = sorted((start, end) for name, start, end in kernels if "nccl" not in name.lower())
    covered = total = 0.0
    for start, end, _ in collectives:
        if start < first:
            continue
        total, upto = total + end - start, start
        for a, b in others:
            covered += max(min(b, end) - max(a, upto), 0)
            upto = max(upto, min(b, end))
    return covered / total


def compare(step: Step, whole: Step) -> dict[str, float]:
    """Errors relative to the whole call's results, on this rank's part."""
    loss, dh, dw = step.loss_and_gradients()
    want_loss, want_dh, want_dw = whole.loss_and_gradients()
    found = {"err_loss": relative_rms(loss, want_loss)}
    rank, ranks = step.rank, dist.get_world_size()
    for key, got, want in (("err_dh", dh, want_dh), ("err_dw", dw, want_dw)):
        if got is None or want is None or (key == "err_dh" and step.case == "tp_partial"):
            continue
        own = want if got.shape == want.shape else want.chunk(ranks)[rank]
        found[key] = relative_rms(got, own)
    return found


def measure(setting: Setting, device: torch.device, meet: Meet) -> list[dict[str, Any]]:
    """The results of a setting, the same on every rank."""
    steps = [Step(case, setting, device) for case in setting.cases]
    for step in steps:
        for _ in range(2):
            step()
        synchronize(device)
        dist.barrier()
    errors = [{}] * len(steps)
    if any(step.case.startswith("tp") for step in steps):
        whole = Step("each", setting, device)
        errors = [compare(step, whole) if step.case.startswith("tp") else {} for step in steps]
        del whole
    extra = []
    for step in steps:
        gradients = 0 if step.case.endswith("forward") else step.hidden.nbytes + step.weight.nbytes
        extra.append(max(0, peak_extra_bytes(step, device) - gradients) / 2**20)
        dist.barrier()
    calls = [calls_in_a_row(step, device) for step in steps]
    times = time_steps(steps, calls, setting.reps, device, meet, is_idle=False)
    idle = None
    if device.type == "cuda":
        idle = time_steps(steps, calls, setting.reps, device, meet, is_idle=True)
    shares = []
    for step in steps:
        shares.append(hidden_share(step, device))
        dist.barrier()
    alone = {step.case: each for step, each in zip(steps, times.unbind(1), strict=True) if step.is_alone}
    ranks, shape = dist.get_world_size(), setting.shape
    results = []
    for i, step in enumerate(steps):
        base = alone.get(_base(step.case))
        each = _of_ranks(times[:, i], is_alone=step.is_alone)
        waiting = None if idle is None else _of_ranks(idle[:, i], is_alone=step.is_alone)
        results.append(
            {
                "ranks": ranks,
                "case": step.case,
                "schedule": setting.schedule,
                "reduction": setting.reduction,
                "n": shape.n,
                "d": shape.d,
                "vocab": shape.vocab,
                "dtype": setting.dtype,
                "pass": "fwd" if step.case.endswith("forward") else "fwd_bwd",
                "workspace_mb": setting.workspace_mb,
                "ms": statistics.median(each),
                "ms_min": min(each),
                "ms_max": max(each),
                "ms_idle": None if waiting is None else statistics.median(waiting),
                "efficiency": None if base is None else _efficiency(step.case, times[:, i], base),
                "extra_mib": extra[i],
                "hidden_share": shares[i],
                **{
                    key: records.finite_or_text(errors[i].get(key))
                    for key in ("err_loss", "err_dh", "err_dw")
                },
            }
        )
    return results


def _is_sharded(case: str) -> bool:
    """Whether each rank has a part of the vocabulary."""
    return case.startswith(("tp", "shard"))


def _base(case: str) -> str:
    """The case that it is compared with."""
    return "alone_forward" if case.endswith("forward") else "alone"


def _of_ranks(times: Tensor, *, is_alone: bool) -> list[float]:
    """A case's times by repetition, of times by rank and repetition: the slowest rank's, or, where each rank
    runs it alone, the mean."""
    return (times.mean(0) if is_alone else times.amax(0)).tolist()


def _efficiency(case: str, times: Tensor, alone: Tensor) -> float:
    """Per GPU, of times by rank and repetition. alone: those of the whole call."""
    if case == "each":
        return float((alone.quantile(0.5, dim=1) / times.quantile(0.5, dim=1)).min())
    shared = times.shape[0] if _is_sharded(case) else 1
    of_case = _of_ranks(times, is_alone=case.startswith("alone"))
    return statistics.median(_of_ranks(alone, is_alone=True)) / (shared * statistics.median(of_case))


def run_rank(
    rank: int,
    ranks: int,
    meeting: str,
    meet: Barrier,
    device_type: str,
    settings: list[Setting],
    command: str,
    out: Path | None,
):
    """A rank's process; the first one writes and prints the results. meeting: the file by which they make a
    group."""
    on_gpu = device_type == "cuda"
    device = torch.device(f"cuda:{rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=300),
        device_id=device if on_gpu else None,
    )
    results: list[dict[str, Any]] = []
    for setting in settings:
        found = measure(setting, device, meet.wait)
        origin = records.provenance(device, command)
        results += [{key: {**origin, **each}[key] for key in KEYS} for each in found]
        if rank == 0 and out:
            records.write(out, results)
    if rank == 0:
        print(table(results), flush=True)
    # None leaves while another still needs it.
    dist.barrier()
    dist.destroy_process_group()


def table(results: Sequence[dict[str, Any]]) -> str:
    """One line a result."""
    rows = [
        (
            "shape",
            "reduction",
            "case",
            "ms",
            "min",
            "max",
            "idle",
            "efficiency",
            "hidden",
            "extra MiB",
            "err dH",
        )
    ]
    for r in results:
        number = "{:.3f}".format
        rows.append(
            (
                *(f"{r['n']},{r['d']},{r['vocab']}", r["reduction"], r["case"]),
                *(number(r["ms"]), number(r["ms_min"]), number(r["ms_max"])),
                "-" if r["ms_idle"] is None else number(r["ms_idle"]),
                "-" if r["efficiency"] is None else number(r["efficiency"]),
                "-" if r["hidden_share"] is None else f"{r['hidden_share']:.0%}",
                f"{r['extra_mib']:.0f}",
                "-" if not isinstance(r["err_dh"], float) else f"{r['err_dh']:.1e}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="bench.parallel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--ranks", type=int, default=2, help="processes, each with its own GPU (%(default)s)")
    found.add_argument("--shapes", nargs="+", default=["8192,4096,131072", "2048,4096,131072"], help="n,d,V")
    found.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), help="see bench/results/README.md (all)"
    )
    found.add_argument("--schedule", default="auto", help="(%(default)s)")
    found.add_argument("--reduction", nargs="+", default=["mean"], choices=("mean", "sum", "none"))
    found.add_argument("--dtype", default="bf16", choices=DTYPES)
    found.add_argument("--workspace-mb", type=float, default=2400, help="of each GPU (%(default)s)")
    found.add_argument("--sm-margin", type=int, help="sm_margin of the calls")
    found.add_argument("--max-ctas", type=int, help="NCCL_MAX_CTAS, for all groups")
    found.add_argument("--reps", type=int, default=30, help="repetitions (%(default)s)")
    found.add_argument("--quick", action="store_true", help="5 repetitions")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--out", type=new_file, help="JSON file for the results")
    found.add_argument("--show", nargs="+", type=Path, help="print stored results, measure nothing")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    if args.show:
        print(table(records.read(args.show)))
        return 0
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        print(f"--ranks: got {args.ranks}, want at most the {torch.cuda.device_count()} CUDA devices here")
        return 1
    os.environ.update(ENVIRONMENT)
    if args.max_ctas is not None:
        os.environ["NCCL_MAX_CTAS"] = str(args.max_ctas)
    settings = [
        Setting(
            *(shape, tuple(args.cases), args.schedule, reduction, args.dtype),
            *(args.workspace_mb, args.sm_margin, 5 if args.quick else args.reps),
        )
        for text in args.shapes
        for shape in shapes.parse(text)
        for reduction in args.reduction
    ]
    command = "python3 -m bench.parallel " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder, "meeting"))
        meet = get_context("spawn").Barrier(args.ranks)
        spawn(
            run_rank,
            (args.ranks, meeting, meet, args.device, settings, command, args.out),
            nprocs=args.ranks,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
