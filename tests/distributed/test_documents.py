"""The examples of docs/parallel.md, each as torchrun would run it on two processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import ranks

ROOT = Path(__file__).resolve().parents[2]


def examples() -> list[str]:
    text = (ROOT / "docs/parallel.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def _run(rank: int, ports: list[int], queue) -> None:
    torch.set_num_threads(1)
    # Without GPUs, whatever the machine has: tests of those have a marker.
    os.environ.update(CUDA_VISIBLE_DEVICES="", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1")
    for number, (example, port) in enumerate(zip(examples(), ports, strict=True)):
        os.environ["MASTER_PORT"] = str(port)
        scope: dict = {"__name__": "__main__"}
        try:
            exec(compile(example, f"docs/parallel.md, example {number + 1}", "exec"), scope)
            assert not dist.is_initialized()
            assert torch.isfinite(scope["loss"])
            queue.put((rank, number, ""))
        except BaseException:
            queue.put((rank, number, traceback.format_exc()))
            raise


def test_every_example_runs_on_two_ranks():
    count = len(examples())
    assert count == 4
    context = multiprocessing.get_context("spawn")
    queue, ports = context.Queue(), [ranks.free_port() for _ in range(count)]
    processes = [context.Process(target=_run, args=(rank, ports, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    found = (
        [queue.get(timeout=1) for _ in range(2 * count)] if all(p.exitcode == 0 for p in processes) else []
    )
    if not found:
        errors = []
        while not queue.empty():
            errors.append(queue.get(timeout=1))
        pytest.fail("\n".join(text for _, _, text in errors if text) or "a process ended without an error")
    assert sorted((rank, number) for rank, number, _ in found) == [
        (rank, number) for rank in range(2) for number in range(count)
    ]
