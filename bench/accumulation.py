"""What the weight's gradient loses over micro-batches: rounded each time, or added to a buffer.

Each of the micro-batches has tokens of its own; their losses are summed. The error is relative RMS of the sum
of all gradients by the weight, against the same in float64. On a CPU the streaming implementation computes.

    python3 -m bench.accumulation --out bench/results/cpu_accumulation.json
    python3 -m bench.accumulation --show bench/results/cpu_accumulation.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.inputs import ROWS, make_inputs
from bench.shapes import Shape
from cute_lce import linear_cross_entropy, reference
from cute_lce.commands.terminal import new_file
from cute_lce.measure import records

WAYS = {
    "autograd": None,
    "grad_weight_out bfloat16": torch.bfloat16,
    "grad_weight_out float32": torch.float32,
}
"""How gradients are added up: in a bfloat16 .grad, or in a buffer of the dtype."""
KEY = ("n", "d", "vocab", "rows", "batches")


def measure(shape: Shape, batches: int, rows: str, device: torch.device) -> dict[str, list[float]]:
    """Way -> the error after each micro-batch. shape: of a micro-batch."""
    inputs = make_inputs(Shape(shape.n * batches, shape.d, shape.vocab), torch.bfloat16, rows, device)
    exact = torch.zeros(shape.vocab, shape.d, dtype=torch.float64, device=device)
    weights = {way: inputs.weight.clone().requires_grad_() for way in WAYS}
    buffers = {
        way: torch.zeros(weight.shape, dtype=WAYS[way], device=device) if WAYS[way] else None
        for way, weight in weights.items()
    }
    errors: dict[str, list[float]] = {way: [] for way in WAYS}
    for hidden, target in zip(inputs.hidden.split(shape.n), inputs.target.split(shape.n), strict=True):
        wide = inputs.weight.double().requires_grad_()
        loss = reference.linear_cross_entropy(hidden.double(), wide, target, reduction="sum")
        exact += torch.autograd.grad(loss, wide)[0]
        for way, weight in weights.items():
            out = buffers[way]
            linear_cross_entropy(hidden, weight, target, reduction="sum", grad_weight_out=out).backward()
            found = weight.grad if out is None else out
            assert found is not None
            errors[way].append(float((found.double() - exact).norm() / exact.norm()))
    return errors


def show(results: Sequence[dict[str, Any]]) -> None:
    print("n, d, V, rows, after".ljust(36) + "".join(way.rjust(26) for way in WAYS))
    for key in dict.fromkeys(tuple(r[name] for name in KEY) for r in results):
        cells = {r["way"]: r["err_dw"] for r in results if key == tuple(r[name] for name in KEY)}
        print(", ".join(map(str, key)).ljust(36) + "".join(f"{cells[way]:.2e}".rjust(26) for way in WAYS))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.accumulation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=16, help="micro-batches (%(default)s)")
    parser.add_argument("--shape", default="512,512,8192", help="n,d,V of a micro-batch (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=new_file, help="JSON file for the results")
    parser.add_argument("--show", type=Path, nargs="+", help="print stored results, measure nothing")
    args = parser.parse_args(arguments)
    if args.show:
        show(records.read(args.show))
        return 0
    device = torch.device(args.device)
    n, d, vocab = map(int, args.shape.split(","))
    shape = Shape(n, d, vocab)
    command = shlex.join(["python3", "-m", "bench.accumulation", *(arguments or sys.argv[1:])])
    results = [
        {
            "n": shape.n,
            "d": shape.d,
            "vocab": shape.vocab,
            "rows": rows,
            "way": way,
            "batches": batches,
            "err_dw": errors[batches - 1],
            **records.provenance(device, command),
        }
        for rows in ROWS
        for way, errors in measure(shape, args.batches, rows, device).items()
        for batches in sorted({1, args.batches})
    ]
    if args.out:
        records.write(args.out, results)
    show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
