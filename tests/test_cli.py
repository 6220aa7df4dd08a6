"""The command line: what it prints is what the package does."""

import subprocess
import sys

import pytest
import torch

import cute_lce
from cute_lce import cli, ops


def test_info_names_versions_and_the_cpu_path(capsys):
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"cute_lce {cute_lce.__version__}".split() in [line.split() for line in lines]
    torch_line = next(line for line in lines if line.startswith("torch "))
    assert torch.__version__ in torch_line
    cpu = next(line for line in lines if line.startswith("cpu "))
    assert "streaming path" in cpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_info_says_why_there_is_no_cuda(capsys):
    cli.main(["info"])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("cuda "))
    assert "not there: " in line


@pytest.mark.gpu
def test_info_agrees_with_the_dispatch(capsys):
    cli.main(["info"])
    lines = capsys.readouterr().out.splitlines()
    for dtype in ops.DTYPES:
        line = next(line for line in lines if line.startswith(f"cuda:0 {str(dtype).removeprefix('torch.')} "))
        streaming = ops.implementation(torch.device("cuda", 0), dtype).__name__ == "cute_lce.streaming"
        assert ("streaming path" in line) == streaming


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["info", "--no-such-option"]])
def test_a_wrong_call_ends_with_usage_and_status_2(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: cute-lce" in capsys.readouterr().err


def test_the_module_runs_as_a_program():
    run = subprocess.run(
        [sys.executable, "-m", "cute_lce.cli", "--help"], capture_output=True, text=True, check=True
    )
    assert "info" in run.stdout
