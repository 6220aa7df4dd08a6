"""The process of one checkout that bench.checkouts times: commands come in and answers go out, a line each.

It imports that checkout's cute_lce, which may be of any age. Operands, the floor and the timing are those of
the checkout that compares, whose package is not imported: their files need nothing of it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.inputs import make_inputs
from bench.shapes import Shape

MEASURE = Path(__file__).resolve().parents[1] / "cute_lce" / "measure"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"checkouts_{name}", MEASURE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


floor, timing = _load("floor"), _load("timing")


def import_package(checkout: Path) -> ModuleType:
    """The checkout's cute_lce. Raises ImportError if another one is found."""
    sys.path.insert(0, str(checkout))
    package = importlib.import_module("cute_lce")
    if package.__file__ is None or checkout not in Path(package.__file__).resolve().parents:
        raise ImportError(f"cute_lce: got {package.__file__}, want one in {checkout}")
    return package


class Case:
    """Both calls of a row: the floor, and ours."""

    def __init__(self, row: dict[str, Any], device: torch.device, package: ModuleType):
        backward, frozen = row["pass"] == "fwd_bwd", row["frozen"] or ""
        shape = Shape(row["n"], row["d"], row["vocab"])
        inputs = make_inputs(shape, torch.bfloat16, "untrained", device)
        gemms = floor.Floor(inputs.hidden, inputs.weight, backward, frozen)
        hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
        options = {name: row.get(name) for name in ("workspace_mb", "softcap")}
        given = {name: option for name, option in options.items() if option is not None}
        if backward:
            hidden.requires_grad_(frozen != "hidden")
            weight.requires_grad_(frozen != "weight")

        def ours() -> None:
            with torch.set_grad_enabled(backward):
                loss = package.linear_cross_entropy(hidden, weight, inputs.target, **given)
            if backward:
                loss.backward()
                hidden.grad = weight.grad = None

        self._interleaved = timing.Interleaved((gemms, ours), device)
        # The second repetition: the first has what is done once.
        self._each_ms = [sum(times[0] for times in self._interleaved.times(1)) for _ in range(2)][1]

    def time(self, seconds: float) -> tuple[float, float]:
        """Medians, in milliseconds, of ours and of the floor."""
        reps = max(1, round(seconds * 1e3 / max(self._each_ms, 1e-3)))
        floor_ms, ms = map(statistics.median, self._interleaved.times(reps))
        return ms, floor_ms


class Served:
    """What is asked for by name, with arguments by name."""

    def __init__(self, device: torch.device, checkout: Path):
        self._device, self._package, self._case = device, import_package(checkout), None
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)

    def prepare(self, **row: Any) -> None:
        self._case = Case(row, self._device, self._package)

    def time(self, seconds: float) -> tuple[float, float]:
        assert self._case is not None
        return self._case.time(seconds)

    def release(self) -> None:
        self._case = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    # Answers go where this process was given its standard output; whatever else prints goes beside them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    device, checkout = torch.device(sys.argv[1]), Path(sys.argv[2])
    served: Served | None = None
    for text in sys.stdin:
        command = json.loads(text)
        try:
            served = served or Served(device, checkout)
            answer = {"found": getattr(served, command.pop("do"))(**command)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
