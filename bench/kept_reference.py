"""How many rows of a shard are raised or rescaled when "keep" takes their reference K from a column of the
shard, as it does where the target is in another shard, or from the target's logit, simulated.

Logits of a row are normal, of a standard deviation; the target's is in another shard, and in confident rows
raised by 20. K, raises and rescaling are those of cute_lce/kernels/keep.py, with the formulas of
cute_lce/maths.py in float64; everything is kept.

    python3 -m bench.kept_reference --out bench/results/cpu_kept_reference.json
    python3 -m bench.kept_reference --show bench/results/cpu_kept_reference.json
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cute_lce import maths
from cute_lce.commands.terminal import new_file
from cute_lce.measure import records

SHAPE = (1024, 131072)
"""Rows, and classes of the whole vocabulary."""
RANKS = 2
DEVIATIONS = (1.0, 3.0, 6.0, 12.0)
"""Of a row's logits."""
ROWS = {"untrained": 0.0, "confident": 20.0}
"""By how much the target's logit is raised."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
REFERENCES = ("column", "target")
"""Whose logit K is made of: the first class's of the shard, or the target's."""
KEY = ("dtype", "rows", "deviation")


def reference_of(logit: Tensor, shard: Tensor, kept: maths.KeptRange) -> Tensor:
    """K (n,) of rows, as kernels.keep.References has it. logit (n,): whose it is made of; shard (n, V)."""
    guess, vocab = logit * maths.LOG2_E, shard.shape[1]
    if kept.samples:
        at = [vocab * (2 * k - 1) // (2 * kept.samples) for k in range(1, kept.samples + 1)]
        flat = shard[:, at].amin(1) * maths.LOG2_E + math.log2(vocab)
        guess = torch.maximum(guess, flat)
    return (guess - kept.below).clamp(-kept.far, kept.far).floor()


def is_raised(highest: Tensor, reference: Tensor, kept: maths.KeptRange) -> Tensor:
    """(n,) bool: whether a logit exceeds K by more than the type has room for."""
    return maths.raise_steps(highest, reference, kept, _fma, torch.ceil) > 0


def _fma(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


def measure(deviation: float, above: float) -> dict[tuple[str, str], tuple[int, int]]:
    """(dtype, reference) -> how many rows are raised in the sweep, and how many rescaled at its end."""
    n, vocab = SHAPE
    columns = vocab // RANKS
    generator = torch.Generator().manual_seed(0)
    found: dict[tuple[str, str], tuple[int, int]]
    found = {(dtype, which): (0, 0) for dtype in DTYPES for which in REFERENCES}
    step = 64
    for _ in range(0, n, step):
        logits = torch.randn(step, vocab, generator=generator).double() * deviation
        logits[:, -1] += above
        shard, target, lse = logits[:, :columns], logits[:, -1], logits.logsumexp(1)
        for dtype, which in found:
            kept = maths.KEPT_RANGES[DTYPES[dtype]]
            reference = reference_of(shard[:, 0] if which == "column" else target, shard, kept)
            raised = is_raised(shard.amax(1), reference, kept)
            # The row's sum is that of all shards.
            rescaled = raised | is_raised(lse, reference, kept)
            before = found[dtype, which]
            found[dtype, which] = before[0] + int(raised.sum()), before[1] + int(rescaled.sum())
    return found


def show(results: Sequence[dict[str, Any]]) -> None:
    print("dtype, rows, deviation".ljust(28) + "".join(which.rjust(16) for which in REFERENCES))
    for key in dict.fromkeys(tuple(r[name] for name in KEY) for r in results):
        of = {r["reference"]: r for r in results if key == tuple(r[name] for name in KEY)}
        cells = [f"{of[which]['raised']}, {of[which]['rescaled']}" for which in REFERENCES]
        print(", ".join(map(str, key)).ljust(28) + "".join(cell.rjust(16) for cell in cells))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.kept_reference", description="Rows that are raised.")
    parser.add_argument("--out", type=new_file, help="JSON file for the results")
    parser.add_argument("--show", type=Path, nargs="+", help="print stored results, measure nothing")
    args = parser.parse_args(arguments)
    if args.show:
        show(records.read(args.show))
        return 0
    command = shlex.join(["python3", "-m", "bench.kept_reference", *(arguments or sys.argv[1:])])
    counts = {(rows, each): measure(each, above) for rows, above in ROWS.items() for each in DEVIATIONS}
    n, vocab = SHAPE
    results = [
        {
            "n": n,
            "vocab": vocab,
            "ranks": RANKS,
            "dtype": dtype,
            "rows": rows,
            "deviation": deviation,
            "reference": which,
            "raised": counts[rows, deviation][dtype, which][0],
            "rescaled": counts[rows, deviation][dtype, which][1],
            **records.provenance(torch.device("cpu"), command),
        }
        for dtype in DTYPES
        for rows in ROWS
        for deviation in DEVIATIONS
        for which in REFERENCES
    ]
    if args.out:
        records.write(args.out, results)
    show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
