"""Time K heads with shared hidden states: one call for all, K calls, and the GEMMs of one pass over them.

    heads        linear_cross_entropy(hidden, [weight, ...], target)
    calls        linear_cross_entropy(hidden, weight, target) for each, one backward of the losses' sum
    GEMMs        those of every head, as cuBLAS does them, one head after the other
    one pass     those of the heads' weights in one matrix of K V rows

All are timed in alternation, in random order; the losses are means, with gradients of the hidden states and
of each weight.

    python3 -m bench.heads --out bench/results/h200_heads.json
    python3 -m bench.heads --show bench/results/h200_heads.json
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import shapes
from bench.inputs import make_inputs
from cute_lce import linear_cross_entropy
from cute_lce.commands.terminal import new_file
from cute_lce.measure import records
from cute_lce.measure.floor import Floor
from cute_lce.measure.timing import Call, peak_extra_bytes, time_interleaved

PASSES = ("fwd", "fwd_bwd")
SHAPES = ("8192,4096,32768", "2048,2048,8192")
HEADS = (2, 4, 8)
OURS = ("heads", "calls")
WAYS = ("GEMMs", "one pass", *OURS)
KEY = ("n", "d", "vocab", "heads", "pass")


def losses_of(way: str, options: dict[str, Any]) -> Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]:
    """The sum of the heads' losses. way: of OURS. target (n, K)."""

    def of_heads(hidden: Tensor, weights: Sequence[Tensor], target: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, list(weights), target, **options).sum()

    def of_calls(hidden: Tensor, weights: Sequence[Tensor], target: Tensor) -> Tensor:
        pairs = zip(weights, target.unbind(1), strict=True)
        return torch.stack([linear_cross_entropy(hidden, *pair, **options) for pair in pairs]).sum()

    return of_heads if way == "heads" else of_calls


def measure(
    shape: shapes.Shape, heads: int, backward: bool, device: torch.device, seconds: float, schedule: str
) -> list[dict[str, Any]]:
    """Each way's times and memory; those of the GEMMs are without what they multiply."""
    inputs = make_inputs(replace(shape, vocab=heads * shape.vocab), torch.bfloat16, "untrained", device)
    every = inputs.weight.split(shape.vocab)
    target = torch.stack([(inputs.target + k) % shape.vocab for k in range(heads)], 1)
    leaves = [each.detach().clone().requires_grad_(backward) for each in (inputs.hidden, *every)]
    floors = [Floor(inputs.hidden, weight, backward) for weight in every]
    calls: dict[str, Call] = {
        "GEMMs": lambda: [floor() for floor in floors],
        "one pass": Floor(inputs.hidden, inputs.weight, backward),
    }
    # Each head has what is enough to keep everything, in one call as in K.
    enough = shapes.ample(shape)
    for way in OURS:
        workspace = heads * enough if way == "heads" else enough
        loss = losses_of(way, {"schedule": schedule, "workspace_mb": workspace})

        def call(loss=loss) -> None:
            found = loss(leaves[0], leaves[1:], target)
            if backward:
                found.backward()
                for leaf in leaves:
                    leaf.grad = None

        calls[way] = call
    gradients = sum(leaf.nbytes for leaf in leaves) if backward else 0
    extra = {way: peak_extra_bytes(calls[way], device) - gradients for way in OURS}
    timings = time_interleaved([calls[way] for way in WAYS], device, budget_s=seconds * len(WAYS))
    return [
        {
            "way": way,
            "schedule": schedule if way in OURS else None,
            "ms": timing.ms,
            "ms_min": timing.ms_min,
            "ms_max": timing.ms_max,
            "extra_mib": max(0, extra[way]) / 2**20 if way in OURS else None,
        }
        for way, timing in zip(WAYS, timings, strict=True)
    ]


def show(results: Sequence[dict[str, Any]]) -> None:
    """A line for each case: milliseconds, and those of ours as multiples of both kinds of GEMMs."""
    print("n, d, V of a head, heads, pass".ljust(36) + "".join(way.rjust(28) for way in WAYS))
    for key in dict.fromkeys(tuple(result[name] for name in KEY) for result in results):
        times = {r["way"]: r["ms"] for r in results if tuple(r[name] for name in KEY) == key}
        cells = [
            f"{times[way]:.3f}"
            + (f" x {times[way] / times['GEMMs']:.3f}, {times[way] / times['one pass']:.3f}") * (way in OURS)
            for way in WAYS
        ]
        print(", ".join(map(str, key)).ljust(36) + "".join(cell.rjust(28) for cell in cells), flush=True)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.heads", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", nargs="+", default=SHAPES, help=f"n,d,V of a head ({' '.join(SHAPES)})")
    add("--heads", nargs="+", type=int, default=HEADS, help=f"({' '.join(map(str, HEADS))})")
    add("--pass", nargs="+", dest="passes", default=PASSES, choices=PASSES, help="(both)")
    add("--schedule", default="auto", choices=("auto", "recompute", "keep"), help="(%(default)s)")
    add("--seconds", type=float, default=0.5, help="timed seconds of one measurement (%(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    add("--out", type=new_file, help="JSON file for the results, written after each case")
    add("--show", nargs="+", type=Path, metavar="JSON", help="print stored results, measure nothing")
    args = parser.parse_args(argv)
    try:
        args.shapes = [shape for text in args.shapes for shape in shapes.parse(text)]
    except ValueError as error:
        parser.error(str(error))
    if min(args.heads) < 1:
        parser.error(f"--heads: got {min(args.heads)}, want at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.show:
        show(records.read(args.show))
        return 0
    command = f"python3 -m bench.heads {shlex.join(sys.argv[1:] if argv is None else argv)}"
    device, results = torch.device(args.device), []
    for shape, heads, step in itertools.product(args.shapes, args.heads, args.passes):
        case = {"n": shape.n, "d": shape.d, "vocab": shape.vocab, "heads": heads, "pass": step}
        found = measure(shape, heads, step == "fwd_bwd", device, args.seconds, args.schedule)
        new = [case | measured | records.provenance(device, command) for measured in found]
        results += new
        if args.out is not None:
            records.write(args.out, results)
        show(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
