"""The commands on a GPU that has kernels."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys

import torch

from cute_lce import cli
from cute_lce.commands import calls
from cute_lce.measure import timing
from cute_lce.measure.timing import time_interleaved
from tests.gpu.test_forward import needs_kernels

pytestmark = needs_kernels


def test_doctor_finds_all_well(capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all is well"
    for dtype in ("bfloat16", "float16"):
        for kind in calls.KINDS:
            (line,) = [line for line in lines if f"cuda:0 {dtype} {kind} " in line]
            assert "PASS" in line
            assert "kernels" in line


CALL = """
import sys
from pathlib import Path
import torch
import cute_lce
from cute_lce.compile import cache
cache.CARRIED = Path(sys.argv[1])
torch.manual_seed(0)
kind = {"dtype": torch.bfloat16, "device": "cuda"}
hidden, weight = torch.randn(300, 256, **kind), torch.randn(5000, 256, **kind) / 16
target = torch.randint(5000, (300,), device="cuda")
hidden.requires_grad_()
weight.requires_grad_()
for schedule in ("recompute", "keep", "grad_in_forward"):
    loss = cute_lce.linear_cross_entropy(hidden, weight, target, schedule=schedule)
    dinput, dweight = torch.autograd.grad(loss, (hidden, weight))
    wanted = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().mT, target)
    expected = torch.autograd.grad(wanted, (hidden, weight))
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-4, atol=0)
    for got, want in zip((dinput, dweight), expected, strict=True):
        assert (got - want).norm() < 2e-2 * want.norm()
print("cutlass" in sys.modules)
"""


def test_calls_load_carried_kernels(tmp_path):
    """What one process compiled, another finds beside the package, without cutlass and without a folder."""
    carried, cached = tmp_path / "carried", tmp_path / "cached"
    carried.mkdir()
    for folder, imports in ((cached, "True"), (tmp_path / "never", "False")):
        environment = {**os.environ, "CUTE_LCE_CACHE_DIR": str(folder)}
        if folder != cached:
            environment["CC"] = "no-such-compiler"
            for path in cached.glob("*.so"):
                shutil.copy(path, carried)
        command = [sys.executable, "-c", CALL, str(carried)]
        found = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (found.returncode, found.stdout.split()) == (0, [imports]), found.stderr
    assert len(list(carried.iterdir())) >= 3
    assert not (tmp_path / "never").exists()


def test_bench_has_a_verdict(capsys):
    assert cli.main(["bench", "--n", "4096", "--d", "2048", "--vocab", "65536"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "times as fast as torch" in lines[-1]


def test_a_report_without_tests(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert cli.main(["report", "--out", str(path), "--no-tests"]) == 0
    found = json.loads(path.read_text())
    assert [section["well"] for section in found["sections"]] == [True, True, True]
    assert torch.cuda.get_device_name() == found["gpu"]
    capsys.readouterr()


def test_each_of_several_timed_calls_follows_the_floor():
    order: list[int] = []
    several = [functools.partial(order.append, i) for i in range(4)]
    time_interleaved(several, torch.device("cuda"), budget_s=0.001, runs=2, max_reps=1)
    # Each has run before, and how long the host takes for it was looked at.
    timed = order[(1 + timing.HOST_RUNS) * len(several) :]
    assert timed[::2] == [0] * (len(timed) // 2)
    assert sorted(timed[1::2]) == sorted(list(range(4)) * 3)
