"""Measure what a call costs the host: the time until it returns, while the device is still working.

Shapes are small, so that the device keeps up and no queue fills. Times are in microseconds: each of three
runs gives the median, over many groups of calls, of a group's mean; reported are the median, minimum and
maximum of the three. Between groups, outside the measured time, the host waits for the device. There are
three passes: fwd, a forward under no_grad; fwd_grad, one that a backward may follow; bwd, that backward
alone, with both gradients. For cute_lce the backward is measured with one stripe, with several, and with
everything kept. Calls over a group of one rank, with a sharded vocabulary and with sliced tokens too, run
every collective.

    python3 -m bench.host_time --out bench/results/h100_host_time.json
    python3 -m bench.host_time --shape 64,256,1000 --providers cute_lce torch_eager_bf16ce
    python3 -m bench.host_time --show bench/results/h100_host_time.json
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench import providers, shapes
from bench.inputs import DTYPES, Inputs, make_inputs
from cute_lce.commands.terminal import new_file
from cute_lce.measure import records
from cute_lce.measure.timing import Call, Timing, synchronize

GROUP = 20
STRIPES = 8
PASSES = ("fwd", "fwd_grad", "bwd")
# Some of them are the same but for a chunk of tokens, and all of these shapes' tokens fit one.
PROVIDERS = tuple(name for name in providers.PROVIDERS if name not in ("quack_chunk2k", "quack_chunk4k"))
KEYS = (
    *("gpu", "provider", "schedule", "stripes", "group", "reduction", "n", "d", "vocab", "dtype", "pass"),
    *("launches", "us", "us_min", "us_max", "versions", "date", "command"),
)
US = 1e6


@dataclass(frozen=True)
class Case:
    """stripes: into how many cute_lce's `window` divides the vocabulary; None: the argument is not given.
    group: what is sharded over a group, of GROUPS; None: there is none."""

    provider: str
    schedule: str | None = None
    stripes: int | None = None
    group: str | None = None

    def __str__(self) -> str:
        stripes = None if self.stripes is None else f"{self.stripes} stripe{'s' * (self.stripes > 1)}"
        return " ".join(word for word in (self.provider, self.schedule, stripes, self.group) if word)


GROUPS: dict[str | None, dict[str, Any]] = {None: {}, "tp": {}, "sp": {"sequence_dim": 0}}
"""What is sharded over a group -> the call's arguments beside tp_group."""
OURS = (
    Case("cute_lce", "auto"),
    Case("cute_lce", "recompute", 1),
    Case("cute_lce", "recompute", STRIPES),
    Case("cute_lce", "keep"),
    Case("cute_lce", "auto", group="tp"),
    Case("cute_lce", "auto", group="sp"),
)


@dataclass(frozen=True)
class Calls:
    """A provider's passes over the same tensors. `losses` makes what so many calls of `backward` take."""

    forward: Call
    forward_with_grad: Callable[[], Tensor]
    backward: Callable[[Tensor], object]

    def timed(self, name: str, calls: int) -> list[Call]:
        """So many calls of a pass, with all made that they need and that is not measured."""
        if name == "bwd":
            losses = [self.forward_with_grad() for _ in range(calls)]
            return [lambda loss=loss: self.backward(loss) for loss in losses]
        return [self.forward if name == "fwd" else self.forward_with_grad] * calls


def make_calls(case: Case, shape: shapes.Shape, inputs: Inputs, reduction: str) -> Calls:
    request = providers.Request(
        reduction,
        case.schedule or "auto",
        window=None if case.stripes is None else -(-shape.vocab // case.stripes),
        logits=shape.n * shape.vocab,
    )
    function = providers.make(case.provider, request)
    if case.group is not None:
        function = functools.partial(function, tp_group=_group(inputs.hidden.device), **GROUPS[case.group])
    hidden, weight = (t.detach().requires_grad_() for t in (inputs.hidden, inputs.weight))
    upstream = torch.ones((), device=hidden.device).expand(() if reduction == "mean" else (shape.n,))

    def forward() -> Tensor:
        with torch.no_grad():
            return function(hidden, weight, inputs.target)

    def forward_with_grad() -> Tensor:
        return function(hidden, weight, inputs.target)

    ones = upstream.to(forward_with_grad().dtype)

    def backward(loss: Tensor) -> object:
        return torch.autograd.grad(loss, (hidden, weight), ones)

    return Calls(forward, forward_with_grad, backward)


def _group(device: torch.device) -> dist.ProcessGroup:
    """The group of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
            rank=0,
            world_size=1,
            device_id=torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None,
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def host_microseconds(make: Callable[[int], list[Call]], device: torch.device, groups: int) -> Timing:
    """Host time of one call in us. `make` makes so many calls; three runs of `groups` groups."""
    for call in make(3):
        call()
    medians = []
    for _ in range(3):
        found = []
        for _ in range(groups):
            calls = make(GROUP)
            synchronize(device)
            start = time.perf_counter()
            for call in calls:
                call()
            found.append((time.perf_counter() - start) / GROUP * US)
            synchronize(device)
        medians.append(statistics.median(found))
    return Timing.of_runs(medians)


def launches(make: Callable[[int], list[Call]], device: torch.device) -> int | None:
    """What one call launches: kernels, copies and fills; None where nobody counts them."""
    if device.type != "cuda":
        return None
    (call,) = make(1)
    synchronize(device)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    try:
        with torch.profiler.profile(activities=activities) as profile:
            call()
            synchronize(device)
        events: list[Any] = list(profile.events() or ())
    except RuntimeError as error:
        print(f"launches are not counted: {error}")
        return None
    # An operator's CPU event and the kernel that it launched are events of their own.
    return sum(event.device_type.name == "CUDA" for event in events) or None


def cases(names: Sequence[str]) -> Iterator[Case]:
    for name in names:
        yield from OURS if name == "cute_lce" else (Case(name),)


def measure(args: argparse.Namespace, command: str) -> list[dict[str, Any]]:
    (shape,) = args.shape
    inputs = make_inputs(shape, DTYPES[args.dtype], "untrained", args.device)
    found: list[tuple[Case, str, Timing, Callable[[int], list[Call]]]] = []
    for case in cases(args.providers):
        try:
            calls = make_calls(case, shape, inputs, args.reduction)
        except Exception as error:  # A peer that fails is a finding; the others go on.
            print(f"{case}: left out, {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        for name in PASSES:
            try:
                make = functools.partial(calls.timed, name)
                found.append((case, name, host_microseconds(make, args.device, args.groups), make))
            except Exception as error:
                print(f"{case} {name}: FAILED, {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        print(case, *(f"{timing.ms:.1f}" for c, _, timing, _ in found if c is case), "us", flush=True)
    results = []
    # Behind all timings: what counts the launches slows those that follow.
    for case, name, timing, make in found:
        result = dataclasses.asdict(case) | records.provenance(args.device, command)
        result |= {"reduction": args.reduction, "n": shape.n, "d": shape.d, "vocab": shape.vocab}
        result |= {"dtype": args.dtype, "pass": name, "launches": launches(make, args.device)}
        # The fields are of whatever unit was measured.
        result |= {"us": timing.ms, "us_min": timing.ms_min, "us_max": timing.ms_max}
        results.append({key: result[key] for key in KEYS})
    return results


def bar(result: dict[str, Any]) -> float | None:
    """The microseconds below which ours should stay."""
    if result["provider"] != "cute_lce" or result["dtype"] == "fp32":
        return None
    if result.get("group"):
        return {"fwd": 140, "fwd_grad": 150, "bwd": 250}[result["pass"]]
    if result["pass"] == "bwd":
        return None if result["launches"] is None else 100 + 5 * result["launches"]
    return {"fwd": 40, "fwd_grad": 60}[result["pass"]]


def table(results: Sequence[dict[str, Any]]) -> str:
    """A line a measurement: name, then for each pass the time, its extremes, launches and bar."""
    lines = [f"{'us':34}" + "".join(f"{f'{name} (min-max), launches, bar':>44}" for name in PASSES)]
    grouped: dict[str, dict[str, dict[str, Any]]] = {}
    for r in results:
        case = Case(r["provider"], r["schedule"], r["stripes"], r.get("group"))
        label = f"{r['n']},{r['d']},{r['vocab']} {case}"
        grouped.setdefault(label, {})[r["pass"]] = r
    for label, passes in grouped.items():
        cells = []
        for name in PASSES:
            r = passes.get(name)
            if r is None:
                cells.append("-")
                continue
            text = f"{r['us']:.1f} ({r['us_min']:.1f}-{r['us_max']:.1f})"
            text += f", {'-' if r['launches'] is None else r['launches']}"
            cells.append(text + (f", {bar(r):.0f}" if bar(r) is not None else ", -"))
        lines.append(f"{label:34}" + "".join(f"{cell:>44}" for cell in cells))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.host_time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", default="128,256,1024", help="n,d,V (%(default)s)")
    add("--providers", nargs="+", default=list(PROVIDERS), choices=tuple(providers.PROVIDERS), metavar="NAME")
    add("--reduction", default="mean", choices=("mean", "none"))
    add("--dtype", default="bf16", choices=tuple(DTYPES))
    add("--device", default="auto", help="auto, cuda or cpu (%(default)s: a GPU if there is one)")
    add("--groups", type=int, default=50, help=f"groups of {GROUP} calls in each of 3 runs (%(default)s)")
    add("--out", type=new_file, help="JSON file for the results")
    add("--show", nargs="+", type=Path, metavar="JSON", help="print kept results and measure nothing")
    args = parser.parse_args(argv)
    if args.show:
        kept = records.read(args.show)
        print(table([result for result in kept if "us" in result]))
        return 0
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(args.device)
    try:
        args.shape = shapes.parse(args.shape)
        if len(args.shape) != 1:
            raise ValueError(f"shape must be n,d,V, got {len(args.shape)} shapes")
    except ValueError as error:
        parser.error(f"--shape: {error}")
    print(f"{records.describe_device(args.device)}; {records.versions()}", flush=True)
    words = sys.argv[1:] if argv is None else argv
    ours = not dist.is_initialized()
    results = measure(args, f"python3 -m bench.host_time {shlex.join(words)}")
    if ours and dist.is_initialized():
        dist.destroy_process_group()
    if args.out is not None:
        records.write(args.out, results)
    print(table(results))
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
