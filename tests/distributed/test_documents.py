"""The documents' blocks for torchrun, each as it would run them on two processes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback

import pytest
import torch
import torch.distributed as dist

from tests import documents
from tests.distributed import ranks


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def _run(rank: int, device: str, ports: list[int], queue) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(ranks.QUIET)
    if device == "cpu":
        os.environ.update(CUDA_VISIBLE_DEVICES="")
    for number, (block, port) in enumerate(zip(documents.blocks("torchrun"), ports, strict=True)):
        os.environ["MASTER_PORT"] = str(port)
        scope: dict = {"__name__": "__main__"}
        try:
            exec(block.compile(block.text), scope)
            assert not dist.is_initialized()
            assert torch.isfinite(scope["loss"])
            queue.put((rank, number, ""))
        except BaseException:
            queue.put((rank, number, traceback.format_exc()))
            raise


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu_multi)])
def test_every_block_runs_on_two_ranks(device):
    count = len(documents.blocks("torchrun"))
    assert count >= 4
    context = multiprocessing.get_context("spawn")
    queue, ports = context.Queue(), [_free_port() for _ in range(count)]
    processes = [context.Process(target=_run, args=(rank, device, ports, queue)) for rank in range(2)]
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
