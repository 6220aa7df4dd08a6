"""The documents' blocks of Python that need a framework, on a CPU."""

import pytest
import torch

from tests import documents

pytest.importorskip("transformers", reason="transformers is not installed (extra integrations)")


@pytest.mark.parametrize("block", documents.blocks("integrations"), ids=str)
def test_a_python_block_runs(block):
    documents.run(block, "cpu", torch.float32)
