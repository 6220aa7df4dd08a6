"""Measure linear cross entropy by cute_lce, by torch and by other packages (the peers), and the GEMMs alone.

Every measurement alternates with its floor, cuBLAS's GEMMs at the same shape: that of the logits for a
forward, and also those of the two gradients for forward + backward. Errors are relative RMS against float64;
those of the gradients are measured on a sample of rows and of vocabulary entries. Results are a JSON list
with one object for each measurement; bench/results/README.md explains the keys.

    python3 -m bench.run --shapes forward --providers cute_lce --out bench/results/h100_forward.json
    python3 -m bench.run --shapes backward --pass fwd_bwd --reduction mean none --workspace-mb table
    python3 -m bench.run --shapes 8192,4096,131072 --providers all --quick
    python3 -m bench.run --shapes forward --providers cute_lce quack_chunk8k --sustained 0.4
    python3 -m bench.run --shapes random:7:40 --pass fwd fwd_bwd --providers cute_lce torch_compile \\
        --repeat 3 --quick --no-errors --workspace-mb ample --deadline 500 --resume --out h200_random.json
    python3 -m bench.run --show bench/results/*.json
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import providers, shapes, terms
from bench.inputs import DTYPES, PROMPT, ROWS, Inputs, Reference, is_ignored, make_inputs
from cute_lce.commands.terminal import new_file
from cute_lce.measure import records
from cute_lce.measure.floor import Floor
from cute_lce.measure.timing import (
    Call,
    peak_extra_bytes,
    relative_rms,
    synchronize,
    time_interleaved,
    time_sustained,
)
from cute_lce.options import IGNORE_INDEX

KEYS = (
    *("gpu", "provider", "schedule", "reduction", "n", "d", "vocab", "dtype", "pass"),
    *("ms", "ms_min", "ms_max"),
    *("workspace_mb", "floor_ms", "extra_mib", "err_loss", "err_dh", "err_dw", "sustained_s"),
    *("frozen", "grad_weight_out", "ignored", "terms"),
    *("failed", "versions", "date", "command"),
)
# What tells one measurement from another.
IDENTITY = (
    *("provider", "schedule", "reduction", "n", "d", "vocab", "dtype", "pass", "workspace_mb"),
    *("sustained_s", "frozen", "grad_weight_out", "ignored", "terms"),
)
LATER = ("frozen", "grad_weight_out", "ignored", "terms")
"""Keys that results of before 2026-11-22 lack, of which nothing was frozen that --resume serves."""
NOT_BEGUN = "not begun"


# One measurement.


@dataclass(frozen=True)
class Case:
    provider: str
    schedule: str | None
    reduction: str
    workspace_mb: int | None
    grad_weight_out: str | None = None
    ignored: str | None = None
    terms: str | None = None

    def __str__(self) -> str:
        options = [self.schedule, None if self.workspace_mb is None else f"{self.workspace_mb} MiB"]
        options += [self.grad_weight_out and f"adds to {self.grad_weight_out}"]
        options += [self.ignored and f"ignores {self.ignored}", self.terms]
        return " ".join([self.reduction, self.provider, *(text for text in options if text is not None)])


Checked = tuple[Case, Call, dict[str, Any]]  # what is timed next, and what was measured of it so far


def cases(shape: shapes.Shape, args: argparse.Namespace) -> Iterator[Case]:
    """Every combination that is asked for, in the order in which it is measured."""
    for reduction, ignored, provider in itertools.product(args.reduction, args.ignored, args.providers):
        if provider != "cute_lce":
            for given in args.terms:
                yield Case(provider, None, reduction, None, None, ignored, given)
            continue
        # No budgets at all stand for the table's: each shape brings its own.
        budgets = args.workspace_mb or [budget for budget, _ in shape.bars]
        for schedule in args.schedule:
            for budget in budgets:
                mib = shapes.ample(shape) if budget == "ample" else budget
                for out, given in itertools.product(args.grad_weight_out, args.terms):
                    yield Case(provider, schedule, reduction, mib, out, ignored, given)


def check(
    case: Case,
    shape: shapes.Shape,
    inputs: Inputs,
    reference: Reference | None,
    floor: Floor,
    args: argparse.Namespace,
) -> tuple[Call, dict[str, Any]]:
    """Check and weigh one case: (the call to time, what was measured of it)."""
    request = providers.Request(
        case.reduction, case.schedule or "auto", case.workspace_mb, args.window, logits=shape.n * shape.vocab
    )
    hidden, weight, target = inputs.hidden.detach(), inputs.weight.detach(), inputs.target
    if case.terms is None:
        function = providers.make(case.provider, request)
    else:
        function = terms.loss(case.provider, case.terms, request, hidden, weight)
        reference = None
    valid = ~is_ignored(shape.n, case.ignored, target.device)
    target = target.where(valid, IGNORE_INDEX)
    upstream = inputs.upstream if case.reduction == "none" else None
    if floor.backward:
        hidden.requires_grad_(shape.frozen != "hidden")
        weight.requires_grad_(shape.frozen != "weight")
    if case.grad_weight_out is not None and weight.requires_grad:
        out = torch.zeros_like(weight, dtype=DTYPES[case.grad_weight_out], requires_grad=False)
        function = functools.partial(function, grad_weight_out=out)
    else:
        out = None

    def forward() -> Tensor:
        with torch.no_grad():
            return function(hidden, weight, target)

    def forward_backward() -> Tensor:
        loss = function(hidden, weight, target)
        loss.backward(None if upstream is None else upstream.to(loss.dtype))
        return loss.detach()

    def step() -> None:
        forward_backward()
        # Other cases are timed in turn with this one: none holds its gradients meanwhile.
        hidden.grad = weight.grad = None

    call: Call = step if floor.backward else forward
    loss = forward_backward() if floor.backward else forward()
    errors: dict[str, float | None] = {"err_loss": None, "err_dh": None, "err_dw": None}
    if reference is not None:
        errors["err_loss"] = relative_rms(loss, reference.loss(case.reduction, valid))
        grad_scale = torch.ones_like(inputs.upstream) / valid.sum() if upstream is None else upstream
        grad_scale = grad_scale.where(valid, 0.0)
        if hidden.grad is not None:
            errors["err_dh"] = relative_rms(hidden.grad[reference.rows], reference.dh(grad_scale))
        dweight = weight.grad if out is None else out
        if dweight is not None:
            errors["err_dw"] = relative_rms(dweight[reference.columns], reference.dw(grad_scale))
    del loss

    gradients = sum(t.grad.nbytes for t in (hidden, weight) if t.grad is not None)
    hidden.grad = weight.grad = None
    extra = peak_extra_bytes(call, hidden.device) - gradients
    return call, {"extra_mib": max(0, extra) / 2**20, **errors}


class CallFailed(Exception):
    """The call of this number raised what caused this."""


class DeviceLost(Exception):
    """A call has left the GPU unusable for this process."""


def failure(error: BaseException) -> dict[str, str]:
    """What the result of a case that failed says."""
    return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def release(device: torch.device) -> None:
    """Return memory that nothing holds. Raises DeviceLost if the device does not answer."""
    gc.collect()
    if device.type != "cuda":
        return
    try:
        synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLost(str(error).splitlines()[0]) from error


def _numbered(i: int, call: Call) -> None:
    try:
        call()
    except Exception as error:
        raise CallFailed(i) from error


def time_together(
    floor: Floor, waiting: list[Checked], device: torch.device, args: argparse.Namespace
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Time the cases in alternation with each other and the floor; if one fails, then without it again.

    waiting: the cases; empty afterwards.
    """
    while waiting:
        calls = [functools.partial(_numbered, i, call) for i, (_, call, _) in enumerate(waiting)]
        try:
            if args.sustained is not None:
                floor_time, *timings = time_sustained((floor, *calls), device, seconds=args.sustained)
            else:
                seconds, max_reps = (0.15, 5) if args.quick else (args.seconds, 50)
                floor_time, *timings = time_interleaved(
                    (floor, *calls),
                    device,
                    budget_s=seconds * len(waiting),
                    runs=args.repeat or 3,
                    max_reps=max_reps,
                )
        except CallFailed as failed:
            case, _, _ = waiting.pop(failed.args[0])
            found = failure(failed.__cause__ or failed)
        else:
            for (case, _, measured), timing in zip(waiting, timings, strict=True):
                times = {"ms": timing.ms, "ms_min": timing.ms_min, "ms_max": timing.ms_max}
                yield case, measured | times | {"floor_ms": floor_time.ms}
            waiting.clear()
            return
        yield case, found
        del calls
        release(device)


def measure(
    shape: shapes.Shape,
    inputs: Inputs,
    reference: Reference | None,
    floor: Floor,
    args: argparse.Namespace,
    asked: Sequence[Case],
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The cases of a shape and pass, each with the keys of its result; one that fails says how."""
    device = inputs.hidden.device
    waiting: list[Checked] = []
    for case in asked:
        found = None
        try:
            waiting.append((case, *check(case, shape, inputs, reference, floor, args)))
        except Exception as error:  # A peer that fails is a finding; the other measurements go on.
            found = failure(error)
        if found is not None:
            yield case, found
        elif args.sustained is None and args.repeat is None:
            yield from time_together(floor, waiting, device, args)
        release(device)
    yield from time_together(floor, waiting, device, args)


# Results.


class Results:
    """The results of a run, behind those that --out holds already; written after each measurement."""

    def __init__(self, args: argparse.Namespace, command: str):
        self.args, self.command = args, command
        keep = (args.append or args.resume) and args.out.exists()
        self._kept: list[dict[str, Any]] = records.read([args.out]) if keep else []
        self.new: list[dict[str, Any]] = []

    def _row(self, shape: shapes.Shape, name: str, case: Case) -> dict[str, Any]:
        row = dict.fromkeys(KEYS) | dataclasses.asdict(case) | {"pass": name}
        row |= {"n": shape.n, "d": shape.d, "vocab": shape.vocab, "dtype": self.args.dtype}
        return row | {"sustained_s": self.args.sustained, "frozen": shape.frozen or None}

    def lacks(self, shape: shapes.Shape, name: str, case: Case) -> bool:
        """Whether the case is to be measured; with --resume not if it was, or if it failed."""
        row = self._row(shape, name, case)
        return not self.args.resume or all(not_begun(kept) or differ(kept, row) for kept in self._kept)

    def add(self, shape: shapes.Shape, name: str, case: Case, found: dict[str, Any]) -> None:
        row = self._row(shape, name, case) | records.provenance(self.args.device, self.command)
        row |= {key: records.finite_or_text(value) for key, value in found.items()}
        self.new.append(row)
        self._kept = [kept for kept in self._kept if not not_begun(kept) or differ(kept, row)]
        label, failed = f"{shape} {name} {case}", row["failed"]
        if failed is None:
            print(f"{label}: {row['ms']:.3f} ms, x {row['ms'] / row['floor_ms']:.3f}", flush=True)
        elif failed.startswith(f"{providers.Unavailable.__name__}: "):
            print(f"{label}: left out, {failed.partition(': ')[2]}", flush=True)
        else:
            print(f"{label}: {failed if not_begun(row) else f'FAILED, {failed}'}", flush=True)

    def write(self) -> None:
        if self.args.out is not None:
            records.write(self.args.out, [*self._kept, *self.new])


def not_begun(row: dict[str, Any]) -> bool:
    return (row.get("failed") or "").startswith(NOT_BEGUN)


def differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether these are measurements of different things; bench.errors' rows differ from all."""
    return any(one.get(key, None if key in LATER else one) != other[key] for key in IDENTITY)


def bar(result: dict[str, Any]) -> float | None:
    """What issue tables ask of this measurement, as a multiple of the floor."""
    if result["provider"] != "cute_lce":
        return None
    table = shapes.FORWARD if result["pass"] == "fwd" else shapes.BACKWARD
    frozen = "weight" if result["pass"] == "fwd_bwd" and result["err_dw"] is None else ""
    for shape in table:
        if (shape.n, shape.d, shape.vocab, shape.frozen) == (
            result["n"],
            result["d"],
            result["vocab"],
            frozen,
        ):
            return dict(shape.bars).get(result["workspace_mb"])
    return None


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as text, a line each, and below them how those failed that did."""

    def text(value: Any, form: str) -> str:
        return "-" if value is None else value if isinstance(value, str) else format(value, form)

    header: tuple[str, ...] = (
        "n",
        "d",
        "V",
        "dtype",
        "pass",
        "reduction",
        "provider",
        "schedule",
        "budget MiB",
    )
    header += ("ms", "min", "max", "x floor", "bar", "floor ms", "extra MiB", "err loss", "err dH", "err dW")
    rows: list[tuple[str, ...]] = [header]
    for r in results:
        rows.append(
            (
                *(str(r[key]) for key in ("n", "d", "vocab", "dtype")),
                r["pass"] + (" sustained" if r.get("sustained_s") else ""),
                *(r[key] for key in ("reduction", "provider")),
                (r["schedule"] or "-")
                + (f" += {r['grad_weight_out']}" if r.get("grad_weight_out") else "")
                + (f" ignores {r['ignored']}" if r.get("ignored") else "")
                + (f" {r['terms']}" if r.get("terms") else ""),
                text(r["workspace_mb"], "d"),
                *(text(r[key], ".3f") for key in ("ms", "ms_min", "ms_max")),
                text(None if r["ms"] is None else r["ms"] / r["floor_ms"], ".3f"),
                text(bar(r), ".2f"),
                text(r["floor_ms"], ".3f"),
                text(r["extra_mib"], ".1f"),
                *(text(r[key], ".1e") for key in ("err_loss", "err_dh", "err_dw")),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for r in results:
        if r.get("failed"):
            what = (r["n"], r["d"], r["vocab"], r["pass"], r["reduction"], r["provider"])
            lines.append(f"{' '.join(map(str, what))}: {r['failed']}")
    return "\n".join(lines)


# The program.


def run(args: argparse.Namespace, command: str) -> list[dict[str, Any]]:
    device = args.device
    begun = time.perf_counter()
    results = Results(args, command)
    over = None  # Why no further shape is begun.
    print(f"{records.describe_device(device)}; {records.versions()}", flush=True)
    for shape in args.shapes:
        asked = {
            name: [case for case in cases(shape, args) if results.lacks(shape, name, case)]
            for name in args.passes
        }
        if args.deadline is not None and time.perf_counter() - begun >= args.deadline:
            over = over or f"{args.deadline:g} s had passed (--deadline)"
        if over is not None:
            for name, of_pass in asked.items():
                for case in of_pass:
                    results.add(shape, name, case, {"failed": f"{NOT_BEGUN}: {over}"})
            results.write()
            continue
        if not any(asked.values()):
            print(f"{shape}: measured before", flush=True)
            continue
        started = time.perf_counter()
        try:
            run_shape(shape, asked, results)
        except DeviceLost as error:
            over = f"the device was lost ({error})"
        print(f"{shape}: {time.perf_counter() - started:.1f} s in all", flush=True)
    return results.new


def run_shape(shape: shapes.Shape, asked: dict[str, list[Case]], results: Results) -> None:
    """Measure each pass's cases; what fails for all of them is the result of each that is left."""
    args = results.args
    waiting = dict.fromkeys((name, case) for name, of_pass in asked.items() for case in of_pass)
    why, lost = "", None
    try:
        inputs = make_inputs(shape, DTYPES[args.dtype], args.rows, args.device)
        reference = None if args.no_errors else Reference(inputs)
        for name, of_pass in asked.items():
            if of_pass:
                floor = Floor(inputs.hidden, inputs.weight, name == "fwd_bwd", shape.frozen)
                for case, found in measure(shape, inputs, reference, floor, args, of_pass):
                    del waiting[name, case]
                    results.add(shape, name, case, found)
                    results.write()
                del floor
    except DeviceLost as error:
        why, lost = f"{NOT_BEGUN}: the device was lost ({error})", error
    except Exception as error:  # The shape does not fit, say; the next may.
        why = failure(error)["failed"]
    for name, case in waiting:
        results.add(shape, name, case, {"failed": why})
    results.write()
    if lost is not None:
        raise lost


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    tables, names = ", ".join(shapes.TABLES), ", ".join(providers.PROVIDERS)
    add(
        "--shapes",
        nargs="+",
        help=f"{tables}, {shapes.RANDOM}, or n,d,V[,weight|hidden] (the frozen operand)",
    )
    add("--providers", nargs="+", default=["cute_lce"], metavar="NAME", help=f"all, or {names}")
    add("--pass", nargs="+", dest="passes", default=["fwd"], choices=("fwd", "fwd_bwd"), help="(fwd)")
    add(
        "--schedule",
        nargs="+",
        default=["auto"],
        choices=providers.SCHEDULES,
        help="cute_lce's schedules (auto)",
    )
    add("--reduction", nargs="+", default=["mean"], choices=("mean", "none"), help="(mean)")
    add(
        "--workspace-mb",
        nargs="+",
        default=["default"],
        help="cute_lce's, in MiB: numbers, default, ample (all that a shape can use), or table (what the "
        "shape's row in the table has) (default)",
    )
    add(
        "--grad-weight-out",
        nargs="+",
        default=["none"],
        choices=("none", "fp32", "bf16"),
        help="dtype of the buffer to which cute_lce adds dW; none: dW is returned (none)",
    )
    add(
        "--ignored",
        nargs="+",
        default=["none"],
        metavar="WHICH",
        help=f"tokens whose target is ignored: none, random:FRACTION, or prompt:FRACTION of each {PROMPT} "
        "tokens; the floor computes all",
    )
    add(
        "--terms",
        nargs="+",
        default=["none"],
        metavar="TERMS",
        help="none, softcap=30, z_loss=1e-4, label_smoothing=0.1, logprob,entropy,temperature=0.7 and other "
        "combinations (bench/terms.py), for cute_lce and for the peers that have them; bench.errors --terms "
        "measures their errors",
    )
    add("--window", type=int, help="cute_lce's, in vocabulary entries")
    add("--dtype", default="bf16", choices=tuple(DTYPES), help="(%(default)s)")
    add("--rows", default="untrained", choices=ROWS, help="how probable the targets are (%(default)s)")
    add("--device", default="auto", help="auto, cuda or cpu (%(default)s: a GPU if there is one)")
    add("--seconds", type=float, default=0.5, help="timed seconds of one measurement (%(default)s)")
    add(
        "--repeat",
        type=int,
        metavar="RUNS",
        help="time all cases of a shape and pass in alternation, in RUNS runs, and report their median "
        "(without: each case alone with the floor, in three runs)",
    )
    add(
        "--sustained",
        type=float,
        metavar="SECONDS",
        help="time each call back to back for SECONDS, in rounds of random order with the floor, caches warm",
    )
    add("--quick", action="store_true", help="few repetitions")
    add("--no-errors", action="store_true", help="leave out the float64 reference")
    add("--out", type=new_file, help="JSON file for the results, written after each measurement")
    add(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="begin no further shape after SECONDS; --out lists the shapes that were not begun",
    )
    add("--append", action="store_true", help="keep the results in --out, and add to them")
    add("--resume", action="store_true", help="keep the results in --out, and measure only what is missing")
    add("--show", nargs="+", type=Path, metavar="JSON", help="print stored results, measure nothing")
    args = parser.parse_args(argv)
    if args.show:
        return args
    for name in ("append", "resume"):
        if getattr(args, name) and args.out is None:
            parser.error(f"--{name} needs --out")
    if args.repeat is not None and (args.repeat < 1 or args.sustained is not None):
        parser.error(f"--repeat: got {args.repeat}, want at least 1 run, and no --sustained beside it")
    if args.shapes is None:
        args.shapes = ["tiny" if args.device == "cpu" or not torch.cuda.is_available() else "forward"]
    try:
        args.providers = providers.names(args.providers)
        args.shapes = [shape for text in args.shapes for shape in shapes.parse(text)]
        if args.workspace_mb == ["table"]:
            args.workspace_mb = []  # Each shape brings its own.
        args.ignored = [None if text == "none" else text for text in args.ignored]
        args.terms = terms.of_option(args.terms)
        for which in args.ignored:
            is_ignored(0, which, torch.device("cpu"))
        words: dict[str, Any] = {"default": None, "ample": "ample"}
        args.workspace_mb = [words[text] if text in words else int(text) for text in args.workspace_mb]
    except ValueError as error:
        parser.error(str(error))
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(args.device)
    args.grad_weight_out = [None if name == "none" else name for name in args.grad_weight_out]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.show:
        kept = records.read(args.show)
        # bench.errors and bench.host_time keep theirs in the same folder.
        print(table([result for result in kept if "floor_ms" in result]))
        return 0
    words = sys.argv[1:] if argv is None else argv
    results = run(args, f"python3 -m bench.run {shlex.join(words)}")
    print()
    print(table(results))
    return 0 if any(result["failed"] is None for result in results) or (args.resume and not results) else 1


if __name__ == "__main__":
    sys.exit(main())
