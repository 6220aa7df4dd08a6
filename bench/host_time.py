"""Measure what a call costs the host: the time until it returns, with the device left to work behind.

Shapes are small, so that the device keeps up and no queue fills. Microseconds, the median over many groups of
calls; the device is waited for between groups, outside the measured time.

    python3 -m bench.host_time --shape 128,256,1024
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from bench import providers, run, shapes
from bench.timing import Call, synchronize

GROUP = 10


def host_microseconds(call: Call, device: torch.device, groups: int) -> float:
    """Host time of one `call`: the median over `groups` groups of the mean in a group."""
    for _ in range(3):
        call()
    found = []
    for _ in range(groups):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(GROUP):
            call()
        found.append((time.perf_counter() - start) / GROUP * 1e6)
    return statistics.median(found)


def measure(
    shape: shapes.Shape, request: providers.Request, name: str, args: argparse.Namespace
) -> list[float]:
    """Microseconds of a forward without grad, a forward with grad, and forward + backward."""
    inputs = run.make_inputs(shape, run.DTYPES[args.dtype], "untrained", args.device)
    function = providers.make(name, request)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()

    def forward() -> Tensor:
        return function(hidden, weight, inputs.target)

    def forward_without_grad() -> Tensor:
        with torch.no_grad():
            return forward()

    def forward_backward() -> None:
        hidden.grad = weight.grad = None
        loss = forward()
        loss.backward(torch.ones_like(loss))

    calls = (forward_without_grad, forward, forward_backward)
    return [host_microseconds(call, args.device, args.groups) for call in calls]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.host_time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", default="128,256,1024", help="n,d,V (%(default)s)")
    add("--providers", nargs="+", default=["cute_lce"], choices=tuple(providers.PROVIDERS), metavar="NAME")
    add("--schedule", nargs="+", default=["auto"], choices=providers.SCHEDULES, help="of cute_lce")
    add("--reduction", default="mean", choices=("mean", "none"))
    add("--dtype", default="bf16", choices=tuple(run.DTYPES))
    add("--device", default="auto", help="auto, cuda or cpu (%(default)s: a GPU if there is one)")
    add("--groups", type=int, default=100, help=f"groups of {GROUP} calls (%(default)s)")
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(args.device)
    try:
        (shape,) = shapes.parse(args.shape)
    except ValueError as error:
        parser.error(f"--shape: {error}")

    print(f"{run.describe_device(args.device)}, {shape}, {args.dtype}: host time of a call in us")
    print(f"{'':32}{'no grad':>10}{'grad':>10}{'with backward':>15}")
    for name in args.providers:
        for schedule in args.schedule if name == "cute_lce" else ("",):
            label = f"{name} {schedule}".strip()
            request = providers.Request(args.reduction, schedule or "auto", logits=shape.n * shape.vocab)
            try:
                found = measure(shape, request, name, args)
            except providers.Unavailable as reason:
                print(f"{label:32}left out, {reason}")
                continue
            print(f"{label:32}{found[0]:10.1f}{found[1]:10.1f}{found[2]:15.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
