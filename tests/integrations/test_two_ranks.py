"""The integrations over a group: one spawn of two ranks for all of them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.distributed import ranks
from tests.integrations import megatron_cases, test_verl, torchtitan_cases

PACKAGES = {"megatron": megatron_cases.CASES, "torchtitan": torchtitan_cases.CASES}
"""A machine with GPUs, whose packages are given, may lack these."""
INSTALLED = [name for name in PACKAGES if find_spec(name)]
CASES = (test_verl.sharded, *(case for name in INSTALLED for case in PACKAGES[name]))


def check(backend: str) -> None:
    failed = {case: found for case, found in ranks.run(2, backend, CASES).items() if found}
    assert not failed, "\n\n".join(f"{case}: {found}" for case, found in failed.items())


def test_gloo():
    assert list(PACKAGES) == INSTALLED
    check("gloo")


@pytest.mark.gpu_multi
def test_nccl():
    check("nccl")
