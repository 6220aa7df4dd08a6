"""The documents' blocks of python, by the kernels."""

import pytest
import torch

from tests import documents

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("block", documents.blocks(""), ids=str)
def test_a_python_block_runs(block):
    documents.run(block, "cuda", torch.bfloat16)
