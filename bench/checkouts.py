"""Time two checkouts' calls in turn: whether a change has made any of the tables' rows slower.

Each checkout runs in a process of its own, and both take turns on the GPU: in a turn one of them times its
call and the floor, cuBLAS's GEMMs, in alternation, while the other waits. What heats the GPU, or lowers its
clock, does so to both. Of the other checkout only linear_cross_entropy with `workspace_mb` and `softcap` is
used.

    git worktree add --detach /tmp/before 4f78a72
    python3 -m bench.checkouts --other /tmp/before 4f78a72 --out h100_rows.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import shapes
from cute_lce.commands.terminal import new_file, positive
from cute_lce.measure import records

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("n", "d", "vocab", "workspace_mb", "frozen", "pass")


class Worker:
    """The process of one checkout."""

    def __init__(self, checkout: Path, device: str):
        """checkout: where its `cute_lce` lies."""
        self._checkout = checkout.resolve()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.checkout_worker", device, str(self._checkout)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        """Have it do one thing, as checkout_worker.Served. Raises RuntimeError if it fails or has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        found = json.loads(answer) if answer else {"failed": f"its process ended, {self._process.wait()}"}
        if "failed" in found:
            raise RuntimeError(f"{self._checkout}: {do} {arguments}: {found['failed']}")
        return found["found"]

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()


def rows(of: Sequence[shapes.Shape], budgets: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
    """What is timed: forward + backward with each of a shape's budgets, the forward where that is none.

    budgets: MiB, instead of the shapes' own.
    """
    for shape in of:
        sizes = {"n": shape.n, "d": shape.d, "vocab": shape.vocab}
        for budget in budgets or [budget for budget, _ in shape.bars]:
            step = "fwd" if budget is None else "fwd_bwd"
            yield {**sizes, "workspace_mb": budget, "frozen": shape.frozen or None, "pass": step}


def compare(row: dict[str, Any], old: Worker, new: Worker, seconds: float, turns: int) -> dict[str, float]:
    """Milliseconds of both checkouts' calls, and as multiples of the floor beside each: medians of turns."""
    both = {"old": old, "new": new}
    for worker in both.values():
        worker.ask("prepare", **row)
    # What is not counted brings the GPU to the heat that the turns have.
    for worker in both.values():
        worker.ask("time", seconds=seconds)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in both}
    for turn in range(turns):
        for name in itertools.islice(itertools.cycle(both), turn % 2, turn % 2 + 2):
            found[name].append(both[name].ask("time", seconds=seconds))
    for worker in both.values():
        worker.ask("release")
    result = {}
    for name, times in found.items():
        result[f"{name}_ms"] = statistics.median(ms for ms, _ in times)
        result[f"{name}_x"] = statistics.median(ms / floor for ms, floor in times)
    return {key: round(value, 5) for key, value in result.items()}


def line(result: dict[str, Any]) -> str:
    what = " ".join(str(result[key]) for key in KEYS)
    ratios = [result[f"new_{unit}"] / result[f"old_{unit}"] for unit in ("x", "ms")]
    return (
        f"{what:52} {result['old_x']:.3f} {result['new_x']:.3f}  {ratios[0]:.3f}  of ms {ratios[1]:.3f}"
        f"  {result['old_ms']:.3f} {result['new_ms']:.3f}"
    )


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.checkouts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--other", nargs=2, metavar=("PATH", "COMMIT"), help="the checkout to compare with, and its name")
    add("--shapes", nargs="+", default=["forward", "backward"], help="as of bench.run (%(default)s)")
    add("--workspace-mb", nargs="+", type=positive, help="of forward + backward (the tables' own; else none)")
    add("--softcap", type=float, help="of every call (none)")
    add("--seconds", type=float, default=0.1, help="timed seconds of a turn (%(default)s)")
    add("--turns", type=positive, default=9, help="of each checkout (%(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    add("--out", type=new_file, help="JSON file for the results, written after each row")
    add("--show", nargs="+", type=Path, metavar="JSON", help="print stored results, measure nothing")
    args = parser.parse_args(argv)
    if args.show is None and args.other is None:
        parser.error("--other: missing; want a checkout's path and its commit")
    try:
        args.shapes = [shape for text in args.shapes for shape in shapes.parse(text)]
    except ValueError as error:
        parser.error(str(error))
    for row in rows(args.shapes, args.workspace_mb):
        if row["frozen"] and row["pass"] == "fwd":
            parser.error(f"--workspace-mb: missing; want one for the gradient with a frozen {row['frozen']}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.show:
        for result in records.read(args.show):
            print(line(result))
        return 0
    command = f"python3 -m bench.checkouts {shlex.join(sys.argv[1:] if argv is None else argv)}"
    path, commit = args.other
    results = []
    with (
        contextlib.closing(Worker(Path(path), args.device)) as old,
        contextlib.closing(Worker(ROOT, args.device)) as new,
    ):
        for row in rows(args.shapes, args.workspace_mb):
            if args.softcap is not None:
                row["softcap"] = args.softcap
            found = compare(row, old, new, args.seconds, args.turns)
            result = {**row, "old": commit, **found, **records.provenance(torch.device(args.device), command)}
            results.append(result)
            print(line(result), flush=True)
            if args.out is not None:
                records.write(args.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
