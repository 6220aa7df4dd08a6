"""The commands on a GPU that has kernels."""

from __future__ import annotations

import json

import torch

from cute_lce import cli
from cute_lce.commands import calls
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


def test_bench_has_a_verdict(capsys):
    assert cli.main(["bench", "--n", "4096", "--d", "2048", "--vocab", "65536"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "times as fast as torch" in lines[-1]


def test_a_report_without_tests(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert cli.main(["report", "--out", str(path), "--no-tests"]) == 0
    found = json.loads(path.read_text())
    assert [section["well"] for section in found["sections"]] == [True, True]
    assert torch.cuda.get_device_name() == found["gpu"]
    capsys.readouterr()
