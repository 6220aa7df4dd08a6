"""Tensor and sequence parallelism over processes: gloo on a CPU, and NCCL on as many GPUs as there are."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time

import pytest
import torch

from cute_lce import linear_cross_entropy
from tests.distributed import ranks, tensor_cases

GLOO = {2: tensor_cases.CASES, 3: (tensor_cases.uneven_shards, tensor_cases.targets_in_no_shard)}


@functools.cache
def outcomes(count: int, backend: str) -> dict[str, str]:
    """One spawn a number of ranks."""
    return ranks.run(count, backend, GLOO[count] if backend == "gloo" else tensor_cases.CASES)


@pytest.mark.parametrize(
    ("count", "case"),
    [
        pytest.param(count, case.__name__, marks=pytest.mark.xdist_group(f"gloo-{count}"))
        for count, cases in GLOO.items()
        for case in cases
    ],
)
def test_gloo(count: int, case: str):
    found = outcomes(count, "gloo")[case]
    assert not found, found


@pytest.mark.gpu_multi
@pytest.mark.xdist_group("nccl")
@pytest.mark.parametrize("case", [case.__name__ for case in tensor_cases.CASES])
def test_nccl(case: str):
    found = outcomes(torch.cuda.device_count(), "nccl")[case]
    assert not found, found


def _call_with_one_rank_gone(rank: int, port: int, queue) -> None:
    here = ranks.begin(rank, 2, port, "gloo", timeout_s=8)
    if rank == 1:
        os._exit(0)
    hidden, weight, target = torch.randn(4, 8), torch.randn(8, 8), torch.zeros(4, dtype=torch.int64)
    try:
        linear_cross_entropy(hidden, weight, target, tp_group=here.group)
    except RuntimeError as error:
        queue.put(str(error))


@pytest.mark.xdist_group("gloo-2")
def test_a_rank_that_dies_leaves_an_error():
    """Within the group's timeout, and torch's own."""
    context = multiprocessing.get_context("spawn")
    queue, port = context.Queue(), ranks.free_port()
    processes = [
        context.Process(target=_call_with_one_rank_gone, args=(rank, port, queue)) for rank in range(2)
    ]
    begun = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert time.monotonic() - begun < 60
    assert "remote worker" in queue.get(timeout=1)
