"""bench.checkouts: two checkouts' calls in turn, here on a CPU, the other one a package of a few lines."""

from __future__ import annotations

import pytest

from bench import checkouts, shapes
from cute_lce.measure.records import read

SLOW = """
import time

import torch.nn.functional as F


def linear_cross_entropy(hidden, weight, target, **given):
    assert given == {GIVEN}
    print("beside the answers")
    time.sleep(0.03)
    return F.cross_entropy(F.linear(hidden, weight), target)
"""


def checkout(folder, given="{}"):
    (folder / "cute_lce").mkdir()
    (folder / "cute_lce" / "__init__.py").write_text(SLOW.replace("{GIVEN}", given))
    return ["--other", str(folder), "slow", "--device", "cpu", "--turns", "3", "--seconds", "0.01"]


@pytest.mark.parametrize("budget", [None, 64])
def test_each_process_times_its_own_checkout(budget, tmp_path, capsys):
    given = "{}" if budget is None else f"{{'workspace_mb': {budget}}}"
    argv = [*checkout(tmp_path, given), "--shapes", "tiny", "--out", str(out := tmp_path / "rows.json")]
    argv += [] if budget is None else ["--workspace-mb", str(budget)]
    assert checkouts.main(argv) == 0
    (result,) = read([out])
    assert result["old"] == "slow"
    assert result["pass"] == ("fwd" if budget is None else "fwd_bwd")
    assert (result["n"], result["workspace_mb"]) == (shapes.TINY[0].n, budget)
    assert result["old_ms"] > 30 > result["new_ms"] > 0
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
    with pytest.raises(RuntimeError, match=f"cute_lce.*want one in {tmp_path}"):
        checkouts.main(argv)


def test_a_call_that_fails_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="AssertionError"):
        checkouts.main([*checkout(tmp_path, "{'no such': 1}"), "--shapes", "tiny"])


def test_the_other_checkout_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        checkouts.main(["--shapes", "tiny"])
    assert "--other: missing; want a checkout's path and its commit" in capsys.readouterr().err
