"""The documents' blocks of Python that need a framework, on a CPU."""

import pytest
import torch

from tests import documents
from tests.integrations import megatron_layer_cases

pytest.importorskip("transformers", reason="transformers is not installed (extra integrations)")


@pytest.mark.parametrize("block", documents.blocks("integrations"), ids=str)
def test_a_python_block_runs(block):
    # GPTModel takes an output_processor from megatron-core 0.18 on, which Python 3.11 does not get.
    megatron = megatron_layer_cases.batch_of_model() if "output_processor" in block.text else {}
    documents.run(block, "cpu", torch.float32, **megatron)
