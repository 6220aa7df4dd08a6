"""The integrations over a group: one spawn of two ranks for all of them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.distributed import ranks
from tests.integrations import megatron_cases, test_verl

# The machines with GPUs may lack megatron-core, which needs nothing else there.
CASES = (test_verl.sharded, *(megatron_cases.CASES if find_spec("megatron") else ()))


def check(backend: str) -> None:
    failed = {case: found for case, found in ranks.run(2, backend, CASES).items() if found}
    assert not failed, "\n\n".join(f"{case}: {found}" for case, found in failed.items())


def test_gloo():
    assert set(megatron_cases.CASES) < set(CASES)
    check("gloo")


@pytest.mark.gpu_multi
def test_nccl():
    check("nccl")
