"""bench.checkouts: two checkouts' calls in turn, here on a CPU, the other one a package of a few lines."""

from __future__ import annotations

import sys
import weakref

import pytest
import torch

from bench import checkout_worker, checkouts, shapes
from cute_lce.measure.records import read

SLOW = """
import time

import torch.nn.functional as F


def linear_cross_entropy(hidden, weight, target, **given):
    assert given == {GIVEN}
    print("beside the answers")
    time.sleep(0.2)
    return F.cross_entropy(F.linear(hidden, weight), target)
"""


def checkout(folder, given="{}"):
    (folder / "cute_lce").mkdir()
    (folder / "cute_lce" / "__init__.py").write_text(SLOW.replace("{GIVEN}", given))
    return ["--other", str(folder), "slow", "--device", "cpu", "--turns", "3", "--seconds", "0.01"]


@pytest.mark.parametrize(("budget", "softcap"), [(None, None), (64, None), (64, 30.0)])
def test_each_process_times_its_own_checkout(budget, softcap, tmp_path, capsys):
    options = {"workspace_mb": budget, "softcap": softcap}
    given = str({name: option for name, option in options.items() if option is not None})
    argv = [*checkout(tmp_path, given), "--shapes", "tiny", "--out", str(out := tmp_path / "rows.json")]
    argv += [] if budget is None else ["--workspace-mb", str(budget)]
    argv += [] if softcap is None else ["--softcap", str(softcap)]
    assert checkouts.main(argv) == 0
    (result,) = read([out])
    assert result["old"] == "slow"
    assert result["pass"] == ("fwd" if budget is None else "fwd_bwd")
    assert (result["n"], result["workspace_mb"], result.get("softcap")) == (shapes.TINY[0].n, budget, softcap)
    assert result["old_ms"] > 200 > result["new_ms"] > 0
    assert result["old_x"] > result["new_x"] > 0
    printed = capsys.readouterr().out
    assert checkouts.main(["--show", str(out)]) == 0
    assert capsys.readouterr().out == printed


def test_tables_bring_their_budgets():
    found = [*checkouts.rows([*shapes.FORWARD[:1], *shapes.BACKWARD[-1:]])]
    assert [(row["pass"], row["workspace_mb"], row["frozen"]) for row in found] == [
        ("fwd", None, None),
        ("fwd_bwd", 2355, "weight"),
        ("fwd_bwd", 307, "weight"),
    ]


def test_a_checkout_without_the_package_is_none(tmp_path):
    argv = ["--other", str(tmp_path), "none", "--device", "cpu", "--shapes", "tiny"]
    with pytest.raises(
        RuntimeError, match=f"^{tmp_path}: prepare .*cute_lce: got .*, want one in {tmp_path}"
    ):
        checkouts.main(argv)


def test_a_relative_path_and_a_frozen_operand(tmp_path, monkeypatch):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    argv = checkout(folder, "{'workspace_mb': 64}")
    monkeypatch.chdir(tmp_path / "a")
    argv[argv.index("--other") + 1] = "b"
    out = tmp_path / "rows.json"
    argv += ["--shapes", "48,32,517,weight", "--workspace-mb", "64", "--out", str(out)]
    assert checkouts.main(argv) == 0
    (result,) = read([out])
    assert result["frozen"] == "weight"
    assert result["old_ms"] > 200 > result["new_ms"] > 0


def test_a_call_that_fails_is_named(tmp_path):
    with pytest.raises(RuntimeError, match=f"^{tmp_path}: prepare .*'vocab': 517.*AssertionError"):
        checkouts.main([*checkout(tmp_path, "{'no such': 1}"), "--shapes", "tiny"])


def test_a_process_that_ends_is_named(tmp_path):
    argv = checkout(tmp_path)
    (tmp_path / "cute_lce" / "__init__.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(RuntimeError, match=f"^{tmp_path}: prepare .*its process ended, 3"):
        checkouts.main([*argv, "--shapes", "tiny"])


def test_a_released_case_is_freed(monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    worker = checkout_worker.Served(torch.device("cpu"), checkouts.ROOT)
    (row,) = checkouts.rows(shapes.TINY)
    worker.prepare(**row)
    freed = weakref.ref(worker._case)
    worker.release()
    assert freed() is None


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--turns", "0"], "--turns: got 0"),
        (["--workspace-mb", "0"], "--workspace-mb: got 0"),
        (["--shapes", "48,32,517,weight"], "--workspace-mb: missing"),
    ],
)
def test_what_cannot_be_timed_is_refused(argv, said, capsys):
    with pytest.raises(SystemExit):
        checkouts.main(["--other", ".", "none", "--shapes", "tiny", *argv])
    assert said in capsys.readouterr().err


def test_the_other_checkout_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        checkouts.main(["--shapes", "tiny"])
    assert "--other: missing; want a checkout's path and its commit" in capsys.readouterr().err
