"""What the gradient by input loses where each rank rounds its part of it, `grad_input="partial"`.

The vocabulary is in equal shards over processes of a CPU (gloo), which run the streaming implementation.
Errors are relative RMS of the whole gradient by input, against the same in float64.

    python3 -m bench.partial --out bench/results/cpu_partial.json
    python3 -m bench.partial --show bench/results/cpu_partial.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from bench.inputs import DTYPES, make_inputs
from bench.shapes import Shape, parse_one
from cute_lce import linear_cross_entropy, reference
from cute_lce.commands.terminal import new_file
from cute_lce.measure import records
from cute_lce.measure.timing import relative_rms

ROWS = ("untrained", "confident")
WAYS = {
    "reduced": None,
    "partial, summed in fp32": torch.float32,
    "partial, summed in bf16": torch.bfloat16,
}
"""How the ranks' parts become one gradient, and the type in which a caller adds up what was rounded."""
KEY = ("n", "d", "vocab", "dtype", "rows", "ranks")


def gradients(shape: Shape, rows: str) -> dict[str, Tensor]:
    """Way -> dinput (n, d) in bfloat16, the same on every rank."""
    group = dist.group.WORLD
    assert group is not None
    inputs = make_inputs(shape, DTYPES["bf16"], rows, torch.device("cpu"))
    shard = inputs.weight.chunk(group.size())[group.rank()]
    found = {}
    for way, dtype in WAYS.items():
        hidden = inputs.hidden.clone().requires_grad_()
        loss = linear_cross_entropy(
            *(hidden, shard, inputs.target),
            reduction="sum",
            tp_group=group,
            grad_input="partial" if dtype else "reduced",
        )
        (gradient,) = torch.autograd.grad(loss, hidden)
        if dtype:
            gradient = gradient.to(dtype)
            dist.all_reduce(gradient, group=group)
        found[way] = gradient.to(hidden.dtype)
    return found


def run_rank(rank: int, ranks: int, meeting: str, shape: Shape, command: str, out: str) -> None:
    """A rank's process; the first one writes the results. meeting: the file by which ranks meet."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    results = []
    for rows in ROWS:
        found = gradients(shape, rows)
        if rank:
            continue
        inputs = make_inputs(shape, DTYPES["bf16"], rows, torch.device("cpu"))
        wide = inputs.hidden.double(), inputs.weight.double()
        _, exact, _ = reference.gradients(*wide, inputs.target, 1.0, reduction="sum")
        key = shape.n, shape.d, shape.vocab, "bf16", rows, ranks
        results += [
            {
                **dict(zip(KEY, key, strict=True)),
                "way": way,
                "err_dh": relative_rms(gradient, exact),
                **records.provenance(torch.device("cpu"), command),
            }
            for way, gradient in found.items()
        ]
    if rank == 0:
        records.write(Path(out), results)
    # None leaves while another still needs it.
    dist.barrier()
    dist.destroy_process_group()


def measure(shape: Shape, ranks: int, command: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out, meeting = Path(folder, "results.json"), str(Path(folder, "meeting"))
        spawn(run_rank, (ranks, meeting, shape, command, str(out)), nprocs=ranks)
        return records.read([out])


def show(results: Sequence[dict[str, Any]]) -> None:
    print("n, d, V, type, rows, ranks".ljust(40) + "".join(way.rjust(26) for way in WAYS))
    for key in dict.fromkeys(tuple(r[name] for name in KEY) for r in results):
        cells = {r["way"]: r["err_dh"] for r in results if key == tuple(r[name] for name in KEY)}
        print(", ".join(map(str, key)).ljust(40) + "".join(f"{cells[way]:.2e}".rjust(26) for way in WAYS))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.partial", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes (2 4)")
    parser.add_argument("--shape", default="512,512,8192", help="n,d,V of the whole (%(default)s)")
    parser.add_argument("--out", type=new_file, help="JSON file for the results")
    parser.add_argument("--show", type=Path, nargs="+", help="print stored results, measure nothing")
    args = parser.parse_args(arguments)
    if args.show:
        show(records.read(args.show))
        return 0
    try:
        shape = parse_one(args.shape)
    except ValueError as error:
        parser.error(str(error))
    command = shlex.join(["python3", "-m", "bench.partial", *(arguments or sys.argv[1:])])
    results = [each for ranks in args.ranks for each in measure(shape, ranks, command)]
    if args.out:
        records.write(args.out, results)
    show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
