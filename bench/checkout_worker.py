"""The process of one checkout that bench.checkouts times: commands come in and answers go out, a line each.

It imports that checkout's cute_lce, which may be of any age, and of the one that compares nothing but the
file of the floor.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

FLUSH_BYTES = 256 * 2**20
PASSES = 6
"""Over the buffer that evicts the operands from L2; the host enqueues a call while they run."""


class Case:
    """Both calls of a row: ours, and the floor."""

    def __init__(self, row: dict[str, Any], device: Any, floor: Any):
        import torch

        import cute_lce

        self._device, self._backward = device, row["pass"] == "fwd_bwd"
        n, d, vocab, frozen = row["n"], row["d"], row["vocab"], row["frozen"]
        draw = torch.Generator(device).manual_seed(0)
        hidden = torch.randn(n, d, device=device, generator=draw).bfloat16()
        weight = torch.empty(vocab, d, device=device, dtype=torch.bfloat16)
        for block in weight.split(65536):
            block.copy_(torch.randn(block.shape, device=device, generator=draw) * d**-0.5)
        target = torch.randint(vocab, (n,), device=device, generator=draw)
        given = {"workspace_mb": row["workspace_mb"]} if row["workspace_mb"] else {}
        if self._backward:
            hidden.requires_grad_(frozen != "hidden")
            weight.requires_grad_(frozen != "weight")

        def ours() -> None:
            with torch.set_grad_enabled(self._backward):
                loss = cute_lce.linear_cross_entropy(hidden, weight, target, **given)
            if self._backward:
                loss.backward()
                hidden.grad = weight.grad = None

        self._calls = floor(hidden.detach(), weight.detach(), self._backward, frozen or ""), ours
        flushed = FLUSH_BYTES if device.type == "cuda" else 1
        self._flush = torch.empty(flushed, dtype=torch.int8, device=device)
        for call in self._calls:
            call()
        self._reps(1)
        self._each = max(1e-3, sum(times[0] for times in self._reps(1)))

    def time(self, seconds: float) -> tuple[float, float]:
        """Medians, in milliseconds, of ours and of the floor."""
        times = self._reps(max(1, round(seconds * 1e3 / self._each)))
        return statistics.median(times[1]), statistics.median(times[0])

    def _reps(self, count: int) -> list[list[float]]:
        import torch

        if self._device.type != "cuda":
            found: list[list[float]] = [[], []]
            for _ in range(count):
                for call, times in zip(self._calls, found, strict=True):
                    start = time.perf_counter()
                    call()
                    times.append((time.perf_counter() - start) * 1e3)
            return found
        marks: list[list[Any]] = [[], []]
        for _ in range(count):
            for call, events in zip(self._calls, marks, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                for _ in range(PASSES):
                    self._flush.zero_()
                start.record()
                call()
                end.record()
                events.append((start, end))
        torch.cuda.synchronize()
        return [[start.elapsed_time(end) for start, end in events] for events in marks]


def load_floor(root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("floor", root / "cute_lce" / "measure" / "floor.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Floor


def main() -> None:
    # Answers go where this process was given its standard output; whatever else prints goes beside them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # The folder of this file, with the comparing checkout's modules, is none to import from.
    sys.path.pop(0)
    device_name, root, checkout = sys.argv[1:]
    import torch

    import cute_lce

    found_at = Path(cute_lce.__file__).resolve()

    device, floor = torch.device(device_name), load_floor(Path(root))
    case: Case | None = None
    for text in sys.stdin:
        command = json.loads(text)
        found: Any = None
        try:
            if Path(checkout).resolve() not in found_at.parents:
                raise ImportError(f"cute_lce: got {found_at}, want one in {checkout}")
            if command["do"] == "prepare":
                case = Case(command, device, floor)
            elif command["do"] == "time":
                assert case is not None
                found = case.time(command["seconds"])
            else:
                case = None
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            answer = {"found": found}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
