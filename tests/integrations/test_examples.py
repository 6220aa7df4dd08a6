"""The examples of frameworks, and those that torchrun starts, at tiny sizes."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys

import pytest

from examples import fsdp2_tp, megatron_layer
from tests.documents import ROOT

TINY = "--steps 6 --batch 4 --length 16 --hidden 32 --layers 1 --vocab-size 64"


def torchrun(ranks: int, module: str, *arguments: str, device: str = "cpu") -> str:
    """What it printed. Its ranks are processes with one thread each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", module
    done = subprocess.run(
        [sys.executable, *command, *arguments, "--device", device],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_training(printed: str, sizes: str) -> None:
    found = re.fullmatch(rf"{sizes}: loss (\S+) -> (\S+), at most \S+ from one model's", printed.strip())
    assert found, printed
    assert float(found[2]) < float(found[1]) - 0.05


def test_fsdp2_tp():
    check_training(torchrun(4, "examples.fsdp2_tp", *TINY.split(), "--lr", "1e-2"), "2 x 2 ranks")


@pytest.mark.gpu_multi
def test_fsdp2_tp_on_gpus():
    printed = torchrun(2, "examples.fsdp2_tp", *TINY.split(), "--lr", "1e-2", device="cuda")
    check_training(printed, "1 x 2 ranks")


def test_megatron_layer():
    pytest.importorskip("megatron", reason="megatron-core is not installed (extra integrations)")
    arguments = (
        "--sequence-parallel --length 16 --hidden 32 --vocab-size 128 --dtype float32 --tolerance 1e-5"
    )
    assert "main_grad" in torchrun(2, "examples.megatron_layer", *arguments.split())


@pytest.mark.parametrize("example", [fsdp2_tp, megatron_layer])
def test_help_and_a_start_without_torchrun(example, capsys, monkeypatch):
    with pytest.raises(SystemExit, match=r"^0$"):
        example.main(["--help"])
    assert "torchrun --nproc-per-node" in capsys.readouterr().out
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="want torchrun to start it"):
        example.main([])


def test_finetune_hf(capsys):
    pytest.importorskip("transformers", reason="transformers is not installed (extra integrations)")
    from examples import finetune_hf

    sizes = "--steps 3 --batch 2 --length 32 --d 32 --layers 1 --vocab-size 256 --device cpu"
    assert finetune_hf.main(sizes.split()) == 0
    printed = re.findall(r"^(fused|own) +loss (\S+) -> (\S+),", capsys.readouterr().out, flags=re.MULTILINE)
    assert [name for name, *_ in printed] == ["fused", "own"]
    assert all(float(last) < float(first) for _, first, last in printed)
    assert finetune_hf.main([*sizes.split(), "--tolerance", "-1"]) == 1
    with pytest.raises(SystemExit, match=r"^0$"):
        finetune_hf.main(["--help"])
    assert "--accumulate" in capsys.readouterr().out


def test_grpo(capsys):
    pytest.importorskip("trl", reason="trl is not installed (extra integrations)")
    from examples import grpo

    assert grpo.main(["--steps", "10", "--lr", "1e-2", "--device", "cpu"]) == 0
    found = re.search(r"^reward (\S+) -> (\S+) in 10 steps$", capsys.readouterr().out, flags=re.MULTILINE)
    assert found
    assert float(found[2]) > float(found[1]) + 0.05
    with pytest.raises(SystemExit, match=r"^0$"):
        grpo.main(["--help"])
    assert "--letter" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("example", "options", "said"),
    [
        ("finetune_hf", "--steps 0", "--steps: got 0, want a whole number of at least 1"),
        ("finetune_hf", "--length 1", "--length: got 1, want at least 2"),
        ("finetune_hf", "--d 33", "--d: got 33, want a multiple of twice --heads, 4"),
        ("finetune_hf", "--prompt 1.0", "--prompt: got 1.0, want a part in [0, 1)"),
        ("finetune_hf", "--prompt nan", "--prompt: got nan, want a part in [0, 1)"),
        ("finetune_hf", "--vocab-size 255", "--vocab-size: got 255, want at least 256"),
        ("grpo", "--steps 0", "--steps: got 0, want a whole number of at least 1"),
        ("grpo", "--batch 1", "--batch: got 1, want at least 2"),
        ("grpo", "--length 63", "--length: got 63, want at most 62"),
        ("grpo", "--letter 7", "--letter: got '7', want one of abc"),
        ("grpo", "--d 33", "--d: got 33, want a multiple of twice --heads, 4"),
        ("grpo", "--vocab-size 28", "--vocab-size: got 28, want at least 29"),
        ("finetune", "--steps 0", "--steps: got 0, want a whole number of at least 1"),
        ("finetune", "--heads 3", "--d: got 128, want a multiple of twice --heads, 3"),
        ("finetune", "--prompt 1", "--prompt: got 1.0, want a part in [0, 1)"),
        ("finetune", "--text-vocab-size 9", "--text-vocab-size: got 9, want at least 300"),
        ("finetune", "--vocab-size 300", "--vocab-size: got 300, want at least --text-vocab-size, 4096"),
        ("fsdp2_tp", "--tp 3", "--tp: got 3, want a divisor of the number of ranks, 4"),
        ("fsdp2_tp", "--batch 3", "--batch: got 3, want a multiple of ranks / --tp, 2"),
        ("fsdp2_tp", "--hidden 20", "--hidden: got 20, want a multiple of twice --heads, 4"),
        ("fsdp2_tp", "--workspace-mb -1", "--workspace-mb: got -1, want a positive number"),
        (
            "megatron_layer",
            "--vocab-size 510",
            "--vocab-size: got 510, want a multiple of the",
        ),
        (
            "megatron_layer",
            "--sequence-parallel --length 6",
            "--length: got 6, want a multiple of the",
        ),
    ],
)
def test_arguments_that_no_model_takes_are_refused(example, options, said, capsys, monkeypatch):
    pytest.importorskip("trl", reason="trl is not installed (extra integrations)")
    monkeypatch.setenv("WORLD_SIZE", "4")
    module = importlib.import_module(f"examples.{example}")
    with pytest.raises(SystemExit, match=r"^2$"):
        module.main(options.split())
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_neighbours_that_are_not_installed_are_named(monkeypatch, capsys):
    from examples import neighbours

    monkeypatch.setattr(neighbours, "PACKAGES", ("torch", "quack-kernels", "no-such-package"))
    monkeypatch.setattr(
        neighbours.importlib.metadata, "distributions", lambda name: ["it"] * (name == "torch")
    )
    monkeypatch.setattr("sys.argv", ["neighbours"])
    with pytest.raises(SystemExit) as stopped:
        neighbours.main()
    assert stopped.value.code == 2
    wanted = "not installed: quack-kernels, no-such-package; pip install quack-kernels==0.6.5 no-such-package"
    assert wanted in capsys.readouterr().err
