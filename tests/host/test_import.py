"""`import cute_lce` needs nothing but torch and takes little longer."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_loads_no_compiler_and_no_driver():
    loaded = run("import sys, cute_lce; print(*sys.modules)").split()
    roots = {name.split(".")[0] for name in loaded}
    assert "torch" in roots
    before = {name.split(".")[0] for name in run("import sys, torch; print(*sys.modules)").split()}
    assert not (roots - before) & {"cutlass", "nvidia_cutlass_dsl", "tvm_ffi", "cuda", "triton"}
    assert "cutlass" not in roots
    assert run("import cute_lce, torch; print(torch.cuda.is_initialized())").strip() == "False"


def test_import_costs_little_more_than_torch():
    """Timed inside one process, after torch: what is left is the package's own."""
    code = """
import time, torch
start = time.perf_counter()
import cute_lce
print(time.perf_counter() - start)
"""
    assert min(float(run(code)) for _ in range(3)) < 0.1


def test_ops_are_registered_by_the_import():
    names = "fused_linear_cross_entropy forward forward_keep backward grad_in_forward scale_gradients"
    code = f"import torch, cute_lce; print(all(hasattr(torch.ops.cute_lce, n) for n in {names.split()!r}))"
    assert run(code).strip() == "True"


def test_targets_are_checked_on_request():
    """CUTE_LCE_CHECK_TARGETS=1 is read at the import, and costs nothing on a CPU, which checks anyway."""
    code = """
import os
os.environ["CUTE_LCE_CHECK_TARGETS"] = {!r}
from cute_lce import ops
print(ops.CHECK_TARGETS)
"""
    assert [run(code.format(value)).strip() for value in ("1", "0", "")] == ["True", "False", "False"]
