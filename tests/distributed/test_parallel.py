"""Tensor, sequence and data parallelism over processes: gloo on a CPU, NCCL on as many GPUs as there are."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence

import pytest
import torch

from cute_lce import linear_cross_entropy
from tests.distributed import (
    dtensor_cases,
    dtensor_term_cases,
    logprob_cases,
    number_cases,
    ranks,
    replica_cases,
    tensor_cases,
    term_cases,
)

CASES = (
    *tensor_cases.CASES,
    *dtensor_cases.CASES,
    *dtensor_term_cases.CASES,
    *logprob_cases.CASES,
    *number_cases.CASES,
    *term_cases.CASES,
    *replica_cases.CASES,
    *dtensor_cases.LAST_CASES,
)
GLOO = {
    2: CASES,
    3: (
        logprob_cases.numbers_of_shards,
        number_cases.every_number,
        number_cases.numbers_of_slices,
        term_cases.terms_of_classes,
        term_cases.terms_of_a_users_own,
        replica_cases.replicas,
        tensor_cases.uneven_shards,
        tensor_cases.compacted_tokens,
        tensor_cases.targets_in_no_shard,
        dtensor_cases.a_sharded_weight,
        dtensor_term_cases.terms_beside_a_sharded_weight,
    ),
    4: (
        tensor_cases.uneven_shards,
        tensor_cases.losses_of_any_number_of_ranks,
        tensor_cases.slices_of_tokens,
        number_cases.every_number,
        number_cases.numbers_of_slices,
        dtensor_cases.fully_sharded_and_tensor_parallel,
        dtensor_cases.tokens_and_vocabulary_sharded,
        dtensor_cases.one_dimension_split_twice,
        dtensor_cases.ops_on_two_dimensions,
        dtensor_term_cases.terms_on_two_dimensions,
        dtensor_term_cases.numbers_of_dtensors,
    ),
}


def check(count: int, backend: str, cases: Sequence[ranks.Case]) -> None:
    """One spawn for all cases of a number of ranks, in one test: each worker of several would spawn."""
    failed = {case: found for case, found in ranks.run(count, backend, cases).items() if found}
    assert not failed, "\n\n".join(f"{case}: {found}" for case, found in failed.items())


@pytest.mark.parametrize("count", GLOO)
def test_gloo(count: int):
    check(count, "gloo", GLOO[count])


@pytest.mark.gpu_multi
def test_nccl():
    check(torch.cuda.device_count(), "nccl", (*CASES, *tensor_cases.GPU_CASES, *number_cases.GPU_CASES))


def _call_with_one_rank_gone(rank: int, meeting: str, queue) -> None:
    here = ranks.begin(rank, 2, meeting, "gloo", timeout_s=8)
    if rank == 1:
        os._exit(0)
    hidden, weight, target = torch.randn(4, 8), torch.randn(8, 8), torch.zeros(4, dtype=torch.int64)
    try:
        linear_cross_entropy(hidden, weight, target, tp_group=here.group)
    except RuntimeError as error:
        queue.put(str(error))


def test_a_rank_that_dies_leaves_an_error(tmp_path):
    """Within the group's timeout, and torch's own."""
    context = multiprocessing.get_context("spawn")
    queue, meeting = context.Queue(), str(tmp_path / "meeting")
    processes = [
        context.Process(target=_call_with_one_rank_gone, args=(rank, meeting, queue)) for rank in range(2)
    ]
    begun = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert time.monotonic() - begun < 60
    assert "remote worker" in queue.get(timeout=1)
