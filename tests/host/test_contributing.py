"""What CONTRIBUTING.md shows as the change that adds a term is that change: it applies, and it works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

CALLS = """
import torch
import cute_lce
from cute_lce import reference

hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
target = torch.arange(9)


def gradients(loss):
    return loss.double(), *(g.double() for g in torch.autograd.grad(loss, (hidden, weight)))


operands = hidden.double(), weight.double(), target
expected = gradients(reference.linear_cross_entropy(*operands, entropy_bonus=0.3))
plain = gradients(reference.linear_cross_entropy(*operands))
assert all(not torch.allclose(a, b, rtol=1e-2) for a, b in zip(expected, plain, strict=True))
compiled = torch.compile(cute_lce.linear_cross_entropy, fullgraph=True, backend="aot_eager")
module = cute_lce.LinearCrossEntropy(8, 50, entropy_bonus=0.3)
module.weight = torch.nn.Parameter(weight.detach())
for schedule in ("recompute", "keep", "grad_in_forward"):
    for call in (cute_lce.linear_cross_entropy, torch.ops.cute_lce.fused_linear_cross_entropy, compiled):
        found = gradients(call(hidden, weight, target, entropy_bonus=0.3, schedule=schedule))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
torch.testing.assert_close(module(hidden, target).double(), expected[0], rtol=1e-4, atol=1e-6)
"""


def test_the_documented_change_adds_a_term(tmp_path):
    text = ROOT.joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"```diff\n(.*?)```", text, flags=re.DOTALL)
    files = re.findall(r"^\+\+\+ b/(.*)$", diff, flags=re.MULTILINE)
    assert len(files) == len(set(files)) <= 5
    shutil.copytree(ROOT / "cute_lce", tmp_path / "cute_lce", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "--unidiff-zero", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    subprocess.run([sys.executable, "-c", CALLS], cwd=tmp_path, check=True)
