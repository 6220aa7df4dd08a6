"""The integrations over a group: one spawn of two ranks for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.distributed import ranks
from tests.integrations import megatron_cases, megatron_layer_cases, test_verl, torchtitan_cases

CASES = (test_verl.sharded, *megatron_layer_cases.CASES)
FRAMEWORKS = {"megatron": megatron_cases.CASES, "torchtitan": torchtitan_cases.CASES}


def check(backend: str, cases: Sequence[ranks.Case]) -> None:
    failed = {case: found for case, found in ranks.run(2, backend, cases).items() if found}
    assert not failed, "\n\n".join(f"{case}: {found}" for case, found in failed.items())


def test_gloo():
    for name in FRAMEWORKS:
        pytest.importorskip(name, reason=f"{name} is not installed (extra integrations)")
    check("gloo", (*CASES, *(case for cases in FRAMEWORKS.values() for case in cases)))


@pytest.mark.gpu_multi
def test_nccl():
    check("nccl", CASES)


@pytest.mark.gpu_multi
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_nccl_in(name):
    pytest.importorskip(name, reason=f"{name} is not installed (extra integrations)")
    check("nccl", FRAMEWORKS[name])
