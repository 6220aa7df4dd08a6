"""`import cute_lce` needs nothing but torch and takes little longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cute_lce

COMPILERS = ("cutlass", "nvidia_cutlass_dsl", "tvm_ffi", "cuda", "triton")
FRAMEWORKS = ("transformers", "trl", "accelerate", "peft", "megatron", "torchtitan", "verl")


# An installed package has bytecode.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout


def test_import_loads_no_compiler_no_driver_and_no_framework():
    loaded = run("import sys, cute_lce; print(*sys.modules)").split()
    roots = {name.split(".")[0] for name in loaded}
    assert "torch" in roots
    before = {name.split(".")[0] for name in run("import sys, torch; print(*sys.modules)").split()}
    assert not (roots - before) & {*COMPILERS, *FRAMEWORKS}
    assert "cutlass" not in roots
    assert not any(name.startswith("cute_lce.integrations") for name in loaded)
    assert run("import cute_lce, torch; print(torch.cuda.is_initialized())").strip() == "False"


@pytest.mark.timing
def test_import_costs_little_more_than_torch():
    """Timed inside one process, after torch: what is left is the package's own. Its CPU time, which other
    processes disturb least, as a share of torch's, which depends on the machine as ours does."""
    code = """
import time
start = time.process_time()
import torch
middle = time.process_time()
import cute_lce
print((time.process_time() - middle) / (middle - start))
"""
    assert min(float(run(code)) for _ in range(3)) < 0.07


def test_plans_need_neither_torch_nor_cutlass():
    """All that decides: loaded without the package's own __init__, which imports torch."""
    package = Path(cute_lce.__file__).parent
    plans = [f"cute_lce.plan.{path.stem}" for path in package.glob("plan/*.py") if path.stem != "__init__"]
    assert len(plans) >= 7
    code = f"""
import importlib, sys, types
stub = sys.modules["cute_lce"] = types.ModuleType("cute_lce")
stub.__path__ = [{str(package)!r}]
for name in {["cute_lce.arch", "cute_lce.arguments", *plans]!r}:
    importlib.import_module(name)
from cute_lce.arch import Gpu
from cute_lce.plan import backward, forward, kernels, schedule
from cute_lce.plan.problem import Limits, Problem
gpu, problem, limits = Gpu("sm_90a", 132), Problem(4096, 4096, 128256), Limits(workspace=1 << 30)
assert forward.plan(gpu, *problem[:3]).rounds > 0
assert backward.plan(gpu, problem, 768, limits).stripes[0].columns == 768
assert schedule.choose(gpu, problem, "auto", limits)[1] > 0
assert len(set(kernels.kernels("sm_90a", "bfloat16", "int64"))) == 24 + 20 + 141 + 1
assert not {{"torch", "cutlass", "numpy"}} & set(sys.modules), set(sys.modules)
"""
    run(code)


def test_ops_are_registered_by_the_import():
    names = "fused_linear_cross_entropy forward forward_keep backward grad_in_forward scale_gradients"
    code = f"import torch, cute_lce; print(all(hasattr(torch.ops.cute_lce, n) for n in {names.split()!r}))"
    assert run(code).strip() == "True"
