"""Time forwards in other tiles, windows or groups, or without pacing, in turn with the plan's and cuBLAS.

    python3 -m bench.forwards --shapes 32768,4096,262144 --tries group=11 group=13 tile=192x1 --out FILE
    python3 -m bench.forwards --shapes random:11:30 --tries paced=0 --seconds 1 --sustained 0.1 --out FILE

A try changes the plan: tile=TOKENSxSIDE (tokens of a tile, and how many tiles of tokens are side by side in a
cluster) or tile=TOKENSxSIDExCLASSES, whose windows and groups are planned for it; length=TILES of a window,
group=COLUMNS of tiles, paced=0 or 1. Times are of calls in turn with the product, and with --sustained also
back to back; `ratio` is that to the plan's in turn, `error` its standard error over the turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from bench.inputs import make_inputs
from bench.shapes import Shape, parse
from cute_lce.arch import Gpu, KernelConfig
from cute_lce.arguments import Operands
from cute_lce.commands.terminal import new_file, positive
from cute_lce.implementation import Request
from cute_lce.launch.device import gpu_of
from cute_lce.launch.forward import KernelForward
from cute_lce.measure.floor import Floor
from cute_lce.measure.records import provenance, write
from cute_lce.measure.timing import Interleaved, time_sustained
from cute_lce.options import LossOptions
from cute_lce.plan import forward
from cute_lce.plan.plans import ForwardPlan
from cute_lce.plan.problem import Limits, ceil_div

LOSS = LossOptions("mean")
NAMES = ("tile", "length", "group", "paced")
SUSTAINED_ROUNDS = 7


def tried(text: str) -> dict[str, str]:
    """A try by its names. Raises ValueError for any but NAMES, each once, and for numbers out of range."""
    parts = [part.partition("=") for part in text.split(",")]
    found = {name: value for name, _, value in parts}
    if len(found) < len(parts) or not found.keys() <= {*NAMES}:
        raise ValueError(f"--tries: got {text}, want some of {', '.join(NAMES)}, each once")
    for name in found.keys() - {"tile"}:
        if not found[name].isdecimal() or (int(found[name]) > 1 if name == "paced" else int(found[name]) < 1):
            want = "0 or 1" if name == "paced" else "a positive number"
            raise ValueError(f"--tries: got {name}={found[name]} in {text}, want {want}")
    return found


def planned(gpu: Gpu, shape: Shape, changes: dict[str, str]) -> ForwardPlan:
    """The forward's plan with these changes; of a length or group that exceeds all tiles, all of them. Raises
    ValueError for a tile that no forward has."""
    sizes = shape.n, shape.d, shape.vocab
    config = _config(gpu, shape, changes["tile"]) if "tile" in changes else forward.plan(gpu, *sizes).config
    window = int(changes.get("length", 0)) * config.cluster_rows
    # The plan's own tiles are chosen without a window.
    plan = forward.plan(gpu, *sizes, Limits(window), config)
    grid = plan.gemm
    if "group" in changes:
        grid = grid._replace(group=min(int(changes["group"]), ceil_div(shape.n, config.cluster_columns)))
    return dataclasses.replace(plan, gemm=grid._replace(paced=int(changes.get("paced", grid.paced))))


def _config(gpu: Gpu, shape: Shape, text: str) -> KernelConfig:
    every = gpu.row.configs_for(shape.n, 0, gpu.widths).forwards(False)
    by_tile = {f"{each.tile_n}x{each.cluster_n}x{each.tile_m}": each for each in every}
    found = by_tile.get(text) or by_tile.get(f"{text}x128")
    if found is None:
        raise ValueError(f"--tries: got tile={text}, want one of {', '.join(by_tile)}")
    return found


def rows(
    shape: Shape,
    plans: Sequence[ForwardPlan],
    device: torch.device,
    seconds: float,
    turns: int,
    sustained: float | None,
) -> Iterator[dict[str, object]]:
    """A row for each plan, of which the first is what is chosen. seconds: of all turns; sustained: of a call
    in a round."""
    inputs = make_inputs(shape, torch.bfloat16, "untrained", device)
    operands = Operands(inputs.hidden, inputs.weight, inputs.target)

    def call(plan: ForwardPlan) -> Callable[[], object]:
        prepared = KernelForward(operands, LOSS, Request(), plan)
        return lambda: prepared.statistics(operands, LOSS)

    calls = [Floor(inputs.hidden, inputs.weight, False), *map(call, plans)]
    interleaved = Interleaved(calls, device)
    once = sum(times[0] for times in interleaved.times(1))
    reps = max(1, round(seconds * 1e3 / once / turns))
    medians = [[statistics.median(times) for times in interleaved.times(reps)] for _ in range(turns)]
    floor_ms, *found = (statistics.median(times) for times in zip(*medians, strict=True))
    behind = time_sustained(calls, device, seconds=sustained, rounds=SUSTAINED_ROUNDS) if sustained else []
    for i, (plan, ms) in enumerate(zip(plans, found, strict=True), 1):
        ratios, config, grid = [turn[i] / turn[1] for turn in medians], plan.config, plan.gemm
        row: dict[str, object] = {"n": shape.n, "d": shape.d, "vocab": shape.vocab}
        row |= {"tile_m": config.tile_m, "tile_n": config.tile_n}
        row["cluster"] = [config.cluster_m, config.cluster_n]
        row |= {name: getattr(grid, name) for name in ("windows", "tiles_per_window", "group", "paced")}
        row |= {"chosen": i == 1, "ms": round(ms, 4), "floor_ms": round(floor_ms, 4)}
        row["ratio"] = round(statistics.median(ratios), 4)
        row["error"] = round(statistics.stdev(ratios) / turns**0.5, 4)
        if behind:
            row["sustained_ms"] = round(behind[i].ms, 4)
            row["sustained_floor_ms"] = round(behind[0].ms, 4)
        yield row


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.forwards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", nargs="+", default=["forward"], help="as of bench.run (%(default)s)")
    add("--tries", nargs="+", required=True, help="what to change in the plan, each beside it")
    add("--seconds", type=float, default=1.0, help="timed seconds of all turns (%(default)s)")
    add("--turns", type=positive, default=10, help="two or more (%(default)s)")
    add("--sustained", type=float, metavar="SECONDS", help="time each call back to back too, for so long")
    add("--out", type=new_file, required=True, help="JSON file for the results, written after each shape")
    args = parser.parse_args(argv)
    try:
        args.shapes = [shape for text in args.shapes for shape in parse(text)]
        args.tries = [tried(text) for text in args.tries]
        if args.turns < 2:
            raise ValueError(f"--turns: got {args.turns}, want at least 2, whose times give an error")
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    device = torch.device("cuda", torch.cuda.current_device())
    command = f"python3 -m bench.forwards {shlex.join(sys.argv[1:] if argv is None else argv)}"
    gpu = gpu_of(device).serving((), "forward")
    try:
        # Of all shapes before any is timed.
        plans = [[planned(gpu, shape, changes) for changes in ({}, *args.tries)] for shape in args.shapes]
    except ValueError as error:
        sys.exit(f"bench.forwards: {error}")
    origin, results = provenance(device, command), []
    for shape, of_shape in zip(args.shapes, plans, strict=True):
        for row in rows(shape, of_shape, device, args.seconds, args.turns, args.sustained):
            results.append({**row, **origin})
            print(" ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        write(args.out, results)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
