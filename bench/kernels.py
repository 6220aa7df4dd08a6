"""Times of single passes by configuration: what the cost model (cute_lce/plan/cost.py) is calibrated with.

    python3 -m bench.kernels --shapes random:3:30 --out bench/results/tuning/h200_kernels.json
    python3 -m bench.kernels --shapes 22,3584,256000 --windows 36 66 --out h200_windows.json
    python3 -m bench.kernels --shapes 1024,4096,131072 --passes dweight --cool --out h100_cool.json
    python3 -m bench.kernels --passes forward keep --sustained 0.1 --out h100_sustained.json

A row is one pass of one shape with one configuration: "forward"; "keep", the forward that keeps everything;
"dinput" and "dweight", each from what was kept; "logits", dlogits and dinput of one stripe. Its time includes
all of the pass's kernels, not only the GEMM, behind cuBLAS's GEMM of the logits; with --cool cool_ms is the
time behind some 8 ms without work, with --sustained sustained_ms that of passes back to back, at the power
limit. `chosen` marks the plan's choice. tile_m, tile_n: rows of A, here classes or features, and of B in a
tile. parts: windows of a forward, splits of dinput's k.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from bench.inputs import make_inputs
from bench.shapes import Shape, parse
from cute_lce.arch import KernelConfig
from cute_lce.arguments import Operands
from cute_lce.commands.terminal import new_file
from cute_lce.compile import cache
from cute_lce.implementation import Request, Saved
from cute_lce.launch.backward import KernelBackward
from cute_lce.launch.device import gpu_of
from cute_lce.launch.forward import KernelForward
from cute_lce.measure.floor import Floor
from cute_lce.measure.records import provenance, write
from cute_lce.measure.timing import Timing, time_cool, time_interleaved, time_sustained
from cute_lce.options import LossOptions
from cute_lce.plan import backward, forward
from cute_lce.plan.candidates import Candidate, candidates, faster_splits
from cute_lce.plan.cost import Gemm
from cute_lce.plan.kernels import BackwardKey, ForwardKey, Key
from cute_lce.plan.plans import BackwardConfigs
from cute_lce.plan.problem import Limits, Problem, ceil_div
from cute_lce.plan.schedule import UNLIMITED

LOSS = LossOptions("mean")
LIMITS = Limits(0, UNLIMITED)
ALTERNATIVES = 2  # configurations beside the chosen one
MOST_LOGITS = 6 * 10**9  # n V of shapes that are kept
SUSTAINED_ROUNDS = 2
GRADIENTS = ("dinput", "logits", "dweight")
PASSES = ("forward", "keep", *GRADIENTS)


class Calibration:
    """The passes of one shape."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        windows: Sequence[int] = (),
        asked: Sequence[str] = PASSES,
    ):
        """windows: numbers of them with which to time the chosen forward, beside that of its plan; then
        nothing else is timed. asked: the passes to time; a backward's need one that keeps."""
        self.shape, self.gpu, self.windows, self.asked = shape, gpu_of(device), windows, asked
        self.problem = Problem(shape.n, shape.d, shape.vocab)
        self.configs = self.gpu.row.configs_for(shape.n, 0)
        self.found = candidates(self.gpu, self.problem)
        self.chosen_forward = [
            forward.choose_config(self.gpu, *self.problem[:3], keeps, 0) for keeps in (False, True)
        ]

    def _some(self, configs: tuple[KernelConfig, ...], chosen: KernelConfig) -> list[KernelConfig]:
        """The chosen configuration and those beside it; all of them where tiles are side by side."""
        if configs[0].cluster_n > 1:
            return list(configs)
        at = configs.index(chosen)
        first = max(0, min(at - ALTERNATIVES // 2, len(configs) - ALTERNATIVES - 1))
        return list(configs[first : first + ALTERNATIVES + 1])

    def passes(self) -> Iterator[tuple[str, KernelConfig, bool]]:
        """(pass, configuration, whether it is chosen), of those that are asked for."""
        if self.windows:
            yield "forward", self.chosen_forward[0], True
            return
        keeps_for_gradients = not {*GRADIENTS}.isdisjoint(self.asked)
        for kind, config, is_chosen in self._every_pass():
            if kind in self.asked or (kind == "keep" and is_chosen and keeps_for_gradients):
                yield kind, config, is_chosen

    def _every_pass(self) -> Iterator[tuple[str, KernelConfig, bool]]:
        _, dhidden, dweight = self.found.gemms(self.shape.vocab).configs
        logits, *_ = self.found.gemms(0).configs
        keeps = self.shape.n * self.shape.vocab <= MOST_LOGITS
        for kind, chosen in zip(("forward", "keep")[: 1 + keeps], self.chosen_forward, strict=False):
            configs = forward.configs_for(self.gpu, self.shape.n, kind == "keep", 0)
            for config in self._some(configs, chosen):
                yield kind, config, config == chosen
        if keeps:
            for config in self._some(self.configs.tokens, logits):
                yield "dinput", config, config == dhidden
                yield "logits", config, config == logits
            for config in self.configs.dhidden:
                yield "dinput", config, config == dhidden
            for config in self.configs.dweight:
                yield "dweight", config, config == dweight

    def splits(self, config: KernelConfig) -> int:
        """The best number of splits of dinput's k."""
        n, d, vocab = self.problem[:3]
        return faster_splits(Gemm(self.gpu, config, n * d * vocab), d, n, vocab)[-1]

    def configs_of(self, kind: str, config: KernelConfig) -> BackwardConfigs:
        """Of a backward's pass."""
        kept = 0 if kind == "logits" else self.shape.vocab
        tokens, dhidden, dweight = self.found.gemms(kept).configs
        if kind == "dweight":
            return tokens, dhidden, config
        if kind == "logits" and config == tokens:
            return tokens, dhidden, dweight
        return *next(pair for pair in self.configs.pairs if pair[1] == config), dweight

    def key(self, kind: str, config: KernelConfig) -> Key:
        if kind in ("forward", "keep"):
            return ForwardKey(config, keeps=kind == "keep")
        return BackwardKey(*self.configs_of(kind, config))


class Timed:
    """The passes of a shape as functions."""

    def __init__(self, calibration: Calibration, device: torch.device):
        self.calibration, shape = calibration, calibration.shape
        inputs = make_inputs(shape, torch.bfloat16, "untrained", device)
        self.inputs = inputs
        self.operands = Operands(inputs.hidden, inputs.weight, inputs.target)
        self.dloss = torch.ones((), device=device)
        self.saved: Saved | None = None

    def forward(self, kind: str, config: KernelConfig, windows: int = 0) -> tuple[Callable[[], object], int]:
        """windows: about how many; 0: as many as are planned."""
        shape = self.calibration.shape
        kept = shape.vocab if kind == "keep" else 0
        limits = Limits(ceil_div(shape.vocab, windows), UNLIMITED) if windows else LIMITS
        plan = forward.plan(self.calibration.gpu, shape.n, shape.d, shape.vocab, limits, config, kept)
        prepared = KernelForward(self.operands, LOSS, Request(LIMITS, kept), plan)

        def run() -> None:
            results = prepared.statistics(self.operands, LOSS)
            if kept and self.saved is None:
                _, row_max, row_sum, num_valid, kept_columns, kept_scale = results
                assert row_max is not None
                assert row_sum is not None
                assert num_valid is not None
                self.saved = Saved(*self.operands, row_max, row_sum, num_valid, kept_columns, kept_scale)

        return run, plan.gemm.windows

    def backward(self, kind: str, config: KernelConfig) -> tuple[Callable[[], object], int]:
        """Of a shape whose "keep" has run."""
        calibration, shape = self.calibration, self.calibration.shape
        configs = calibration.configs_of(kind, config)
        kept = 0 if kind == "logits" else shape.vocab
        needs = kind != "dweight", kind == "dweight"
        problem = calibration.problem._replace(need_dinput=needs[0], need_dweight=needs[1])
        splits = 1
        if needs[0]:
            splits = calibration.splits(configs[1])
        candidate = Candidate(0, 0, 0 if kept else shape.vocab, splits)
        plan = backward.build(calibration.gpu, problem, kept, configs, candidate)
        saved = self.saved
        assert saved is not None
        prepared = KernelBackward(self.operands, LOSS, Request(LIMITS, kept, *needs), plan)
        return lambda: prepared.dinput(self.dloss, saved, LOSS), splits


def rows(
    calibration: Calibration,
    device: torch.device,
    seconds: float,
    cool: bool = False,
    sustained: float | None = None,
) -> Iterator[dict[str, object]]:
    """cool: time each pass on a cool GPU too, and cuBLAS's of the logits. sustained: both back to back too,
    for so many seconds in a round."""
    shape, timed = calibration.shape, Timed(calibration, device)
    labels: list[dict[str, object]] = []
    functions: list[Callable[[], object]] = [Floor(timed.inputs.hidden, timed.inputs.weight, False)]

    def add(
        kind: str, config: KernelConfig, chosen: bool, function: Callable[[], object], parts: int
    ) -> None:
        functions.append(function)
        labels.append(
            {
                "pass": kind,
                "n": shape.n,
                "d": shape.d,
                "vocab": shape.vocab,
                "tile_m": config.tile_m,
                "tile_n": config.tile_n,
                "cluster": [config.cluster_m, config.cluster_n],
                "pingpong": config.pingpong,
                "parts": parts,
                "chosen": chosen,
            }
        )

    for kind, config, chosen in calibration.passes():
        build = timed.forward if kind in ("forward", "keep") else timed.backward
        function, planned = build(kind, config)
        if kind == "keep" and timed.saved is None:
            function()
        add(kind, config, chosen, function, planned)
        for count in calibration.windows:
            function, parts = timed.forward(kind, config, count)
            if parts != planned:
                add(kind, config, False, function, parts)
    budget = seconds * len(functions)
    floor, *times = time_interleaved(functions, device, budget_s=budget, runs=1)
    more: dict[str, list[Timing]] = {}
    if cool:
        more["cool"] = time_cool(functions, device, budget_s=budget)
    if sustained is not None:
        more["sustained"] = time_sustained(functions, device, seconds=sustained, rounds=SUSTAINED_ROUNDS)
    for i, (label, timing) in enumerate(zip(labels, times, strict=True)):
        row = {**label, "ms": round(timing.ms, 4), "logits_floor_ms": round(floor.ms, 4)}
        for name, timings in more.items():
            row[f"{name}_ms"] = round(timings[1 + i].ms, 4)
            row[f"{name}_logits_floor_ms"] = round(timings[0].ms, 4)
        yield row


def compile_key(key: Key) -> None:
    cache.get(key)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.kernels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["random:3:30"], help="as in bench.run (%(default)s)")
    parser.add_argument(
        "--windows", type=int, nargs="+", default=(), help="time only the chosen forward, with so many too"
    )
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES, help="(all)")
    parser.add_argument("--cool", action="store_true", help="time each pass on a cool GPU too")
    parser.add_argument(
        "--sustained",
        type=float,
        metavar="SECONDS",
        help="time each pass back to back too, twice for so long: from 0.1 on at the power limit",
    )
    parser.add_argument("--seconds", type=float, default=0.03, help="timed seconds of a pass (%(default)s)")
    parser.add_argument("--jobs", type=int, default=15, help="number of processes that compile (%(default)s)")
    parser.add_argument("--out", type=new_file, required=True, help="JSON file for the results")
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    shapes = [shape for text in args.shapes for shape in parse(text)]
    found = [Calibration(shape, device, args.windows, args.passes) for shape in shapes]
    keys = list(dict.fromkeys(each.key(kind, config) for each in found for kind, config, _ in each.passes()))
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        list(pool.map(compile_key, keys))
    origin = provenance(device, shlex.join(["python3", "-m", "bench.kernels", *sys.argv[1:]]))
    result: list[dict[str, object]] = []
    for each in found:
        try:
            found_rows = rows(each, device, args.seconds, args.cool, args.sustained)
            result += [{**row, **origin} for row in found_rows]
        except torch.OutOfMemoryError:
            print(f"{each.shape}: does not fit")
        write(args.out, result)
        torch.cuda.empty_cache()
    print(f"{len(result)} rows in {args.out}")


if __name__ == "__main__":
    main()
