"""megatron-core's hook on one process; on two ranks, with its own models: test_two_ranks.py."""

from __future__ import annotations

import pytest
import torch

from tests.integrations import megatron_layer_cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_process(device, dtype):
    megatron_layer_cases.check(device, dtype, None, None, sequence_parallel=False)
