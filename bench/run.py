"""Measure linear cross entropy side by side: ours, torch's and the peers', beside the GEMMs they need.

Every measurement alternates with its floor, cuBLAS's GEMMs at the same shape: the logits for a forward, and
those of the two gradients too for forward + backward. Errors are relative RMS against float64, the gradients'
on a sample of rows and of vocabulary entries. Results are a JSON list with one object a measurement;
bench/results/README.md says what each key means.

    python3 -m bench.run --shapes forward --providers cute_lce --out bench/results/h100_forward.json
    python3 -m bench.run --shapes backward --pass fwd_bwd --reduction mean none --workspace-mb table
    python3 -m bench.run --shapes 8192,4096,131072 --providers all --quick
    python3 -m bench.run --shapes forward --providers cute_lce quack_chunk8k --sustained 0.4
    python3 -m bench.run --show bench/results/*.json
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import providers, records, shapes
from bench.floor import Floor
from bench.inputs import DTYPES, ROWS, Inputs, Reference, make_inputs
from bench.timing import Call, Timing, peak_extra_bytes, relative_rms, time_interleaved, time_sustained

KEYS = (
    *("gpu", "provider", "schedule", "reduction", "n", "d", "vocab", "dtype", "pass"),
    *("ms", "ms_min", "ms_max"),
    *("workspace_mb", "floor_ms", "extra_mib", "err_loss", "err_dh", "err_dw", "sustained_s"),
    *("versions", "date", "command"),
)


# One measurement.


@dataclass(frozen=True)
class Case:
    provider: str
    schedule: str | None
    reduction: str
    workspace_mb: int | None

    def __str__(self) -> str:
        options = [self.schedule, None if self.workspace_mb is None else f"{self.workspace_mb} MiB"]
        return " ".join([self.reduction, self.provider, *(text for text in options if text is not None)])


def cases(shape: shapes.Shape, args: argparse.Namespace) -> Iterator[Case]:
    """Every combination that is asked for, in the order in which it is measured."""
    for reduction in args.reduction:
        for provider in args.providers:
            if provider != "cute_lce":
                yield Case(provider, None, reduction, None)
                continue
            # No budgets at all stand for the table's: each shape brings its own.
            budgets = args.workspace_mb or [budget for budget, _ in shape.bars]
            for schedule in args.schedule:
                for budget in budgets:
                    yield Case(provider, schedule, reduction, budget)


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
    function = providers.make(case.provider, request)
    hidden, weight, target = inputs.hidden.detach(), inputs.weight.detach(), inputs.target
    upstream = inputs.upstream if case.reduction == "none" else None
    if floor.backward:
        hidden.requires_grad_(shape.frozen != "hidden")
        weight.requires_grad_(shape.frozen != "weight")

    def forward() -> Tensor:
        with torch.no_grad():
            return function(hidden, weight, target)

    def forward_backward() -> Tensor:
        hidden.grad = weight.grad = None
        loss = function(hidden, weight, target)
        loss.backward(None if upstream is None else upstream.to(loss.dtype))
        return loss.detach()

    call: Call = forward_backward if floor.backward else forward
    loss = forward_backward() if floor.backward else forward()
    errors: dict[str, float | None] = {"err_loss": None, "err_dh": None, "err_dw": None}
    if reference is not None:
        errors["err_loss"] = relative_rms(loss, reference.loss(case.reduction))
        grad_scale = torch.full_like(inputs.upstream, 1 / shape.n) if upstream is None else upstream
        if hidden.grad is not None:
            errors["err_dh"] = relative_rms(hidden.grad[reference.rows], reference.dh(grad_scale))
        if weight.grad is not None:
            errors["err_dw"] = relative_rms(weight.grad[reference.columns], reference.dw(grad_scale))
    del loss

    gradients = sum(t.grad.nbytes for t in (hidden, weight) if t.grad is not None)
    hidden.grad = weight.grad = None
    extra = peak_extra_bytes(call, hidden.device) - gradients
    hidden.grad = weight.grad = None
    return call, {"extra_mib": max(0, extra) / 2**20, **errors}


def timed(timing: Timing, floor: Timing) -> dict[str, float]:
    """The keys of a call's time beside its floor's."""
    return {"ms": timing.ms, "ms_min": timing.ms_min, "ms_max": timing.ms_max, "floor_ms": floor.ms}


def measure(
    shape: shapes.Shape,
    inputs: Inputs,
    reference: Reference | None,
    floor: Floor,
    args: argparse.Namespace,
    label: str,
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The cases of a shape and pass, each with the measured keys of its result; one that fails is said."""
    device, sustained = inputs.hidden.device, args.sustained
    waiting: list[tuple[Case, Call, dict[str, Any]]] = []
    for case in cases(shape, args):
        try:
            call, measured = check(case, shape, inputs, reference, floor, args)
            if sustained is not None:
                waiting.append((case, call, measured))
                continue
            budget_s, max_reps = (0.15, 5) if args.quick else (args.seconds, 50)
            floor_time, timing = time_interleaved((floor, call), device, budget_s=budget_s, max_reps=max_reps)
            del call
            yield case, measured | timed(timing, floor_time)
        except providers.Unavailable as reason:
            print(f"{label} {case}: left out, {reason}", flush=True)
        except Exception as error:  # A peer that fails is a finding; the other measurements go on.
            print(f"{label} {case}: FAILED, {type(error).__name__}: {str(error)[:300]}", flush=True)
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if sustained is not None and waiting:
        calls = [floor, *(call for _, call, _ in waiting)]
        floor_time, *timings = time_sustained(calls, device, seconds=sustained)
        for (case, _, measured), timing in zip(waiting, timings, strict=True):
            yield case, measured | timed(timing, floor_time)


# Results.


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
    """The results as text, a line each."""

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
                r["schedule"] or "-",
                text(r["workspace_mb"], "d"),
                *(text(r[key], ".3f") for key in ("ms", "ms_min", "ms_max")),
                text(r["ms"] / r["floor_ms"], ".3f"),
                text(bar(r), ".2f"),
                text(r["floor_ms"], ".3f"),
                text(r["extra_mib"], ".1f"),
                *(text(r[key], ".1e") for key in ("err_loss", "err_dh", "err_dw")),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


# The program.


def run(args: argparse.Namespace, command: str) -> list[dict[str, Any]]:
    device = args.device
    results = records.read([args.out]) if args.append and args.out.exists() else []
    kept = len(results)
    print(f"{records.describe_device(device)}; {records.versions()}", flush=True)
    for shape in args.shapes:
        started = time.perf_counter()
        inputs = make_inputs(shape, DTYPES[args.dtype], args.rows, device)
        reference = None if args.no_errors else Reference(inputs)
        for name in args.passes:
            backward = name == "fwd_bwd"
            floor = Floor(inputs, backward, shape.frozen)
            for case, measured in measure(shape, inputs, reference, floor, args, f"{shape} {name}"):
                result = {
                    "provider": case.provider,
                    "schedule": case.schedule,
                    "reduction": case.reduction,
                    "n": shape.n,
                    "d": shape.d,
                    "vocab": shape.vocab,
                    "dtype": args.dtype,
                    "pass": name,
                    "workspace_mb": case.workspace_mb,
                    "sustained_s": args.sustained,
                    **records.provenance(device, command),
                    **{key: records.finite_or_text(value) for key, value in measured.items()},
                }
                results.append({key: result[key] for key in KEYS})
                times = result["ms"] / result["floor_ms"]
                print(f"{shape} {name} {case}: {result['ms']:.3f} ms, x {times:.3f}", flush=True)
                if args.out is not None:
                    records.write(args.out, results)
            del floor
        del inputs, reference
        print(f"{shape}: {time.perf_counter() - started:.1f} s in all", flush=True)
    return results[kept:]


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
    add("--pass", nargs="+", dest="passes", default=["fwd"], choices=("fwd", "fwd_bwd"))
    add("--schedule", nargs="+", default=["auto"], choices=providers.SCHEDULES, help="of cute_lce")
    add("--reduction", nargs="+", default=["mean"], choices=("mean", "none"))
    add(
        "--workspace-mb",
        nargs="+",
        default=["default"],
        help="of cute_lce, in MiB: numbers, default, or table (what the shape's row is measured with)",
    )
    add("--window", type=int, help="of cute_lce, in vocabulary entries")
    add("--dtype", default="bf16", choices=tuple(DTYPES))
    add("--rows", default="untrained", choices=ROWS, help="how sure the tokens are (%(default)s)")
    add("--device", default="auto", help="auto, cuda or cpu (%(default)s: a GPU if there is one)")
    add("--seconds", type=float, default=0.5, help="timed seconds of one measurement (%(default)s)")
    add(
        "--sustained",
        type=float,
        metavar="SECONDS",
        help="time each call back to back for so long, in rounds of random order with the floor, caches warm",
    )
    add("--quick", action="store_true", help="few repetitions")
    add("--no-errors", action="store_true", help="leave out the float64 reference")
    add("--out", type=Path, help="JSON file for the results, written after each measurement")
    add("--append", action="store_true", help="keep what --out already holds")
    add("--show", nargs="+", type=Path, metavar="JSON", help="print kept results and measure nothing")
    args = parser.parse_args(argv)
    if args.show:
        return args
    if args.append and args.out is None:
        parser.error("--append needs --out")
    if args.shapes is None:
        args.shapes = ["tiny" if args.device == "cpu" or not torch.cuda.is_available() else "forward"]
    try:
        args.providers = providers.names(args.providers)
        args.shapes = [shape for text in args.shapes for shape in shapes.parse(text)]
        if args.workspace_mb == ["table"]:
            args.workspace_mb = []  # Each shape brings its own.
        args.workspace_mb = [None if text == "default" else int(text) for text in args.workspace_mb]
    except ValueError as error:
        parser.error(str(error))
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(args.device)
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
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
