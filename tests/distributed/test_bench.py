"""bench.parallel and bench.partial, over two processes of a CPU."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import parallel, partial
from cute_lce.measure import records


def test_every_case_is_measured_and_right(tmp_path, capfd):
    out = tmp_path / "results.json"
    asked = ["--device", "cpu", "--shapes", "64,32,256", "--dtype", "fp32", "--reps", "1", "--out", str(out)]
    assert parallel.main(asked) == 0
    results = records.read([out])
    assert [result["case"] for result in results] == list(parallel.CASES)
    for result in results:
        assert sorted(result) == sorted(parallel.KEYS)
        assert 0 < result["ms_min"] <= result["ms"] <= result["ms_max"]
        assert result["efficiency"] > 0
        compared = {key: result[key] for key in ("err_loss", "err_dh", "err_dw") if result[key] is not None}
        assert bool(compared) == result["case"].startswith("tp")
        assert all(error < 1e-5 for error in compared.values())
    assert capfd.readouterr().out.rstrip().endswith(parallel.table(results))
    assert parallel.main(["--show", str(out)]) == 0
    assert parallel.main(["--ranks", "99"]) == 1


def test_a_part_that_is_rounded_has_an_error_of_its_own(tmp_path, capfd):
    out = tmp_path / "results.json"
    assert partial.main(["--ranks", "2", "--shape", "64,32,256", "--out", str(out)]) == 0
    results = records.read([out])
    assert [(r["rows"], r["way"]) for r in results] == [(r, w) for r in partial.ROWS for w in partial.WAYS]
    errors = {(r["rows"], r["way"]): r["err_dh"] for r in results}
    for rows in partial.ROWS:
        reduced, *parts = (errors[rows, way] for way in partial.WAYS)
        assert 2.0**-10 < reduced < 2.0**-8
        assert all(1.2 * reduced < part < 3 * reduced for part in parts)
    printed = capfd.readouterr().out
    assert partial.main(["--show", str(out)]) == 0
    assert capfd.readouterr().out in printed


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_call_in_a_row_is_timed(is_idle, monkeypatch):
    calls = []

    class Step:
        turns = 1

        def is_turn(self, turn: int) -> bool:
            return turn == 0

        def __call__(self) -> None:
            calls.append(time.sleep(0.02))

    one = SimpleNamespace(
        get_world_size=lambda: 1,
        all_reduce=lambda tensor: None,
        all_gather=lambda every, own: every[0].copy_(own),
    )
    monkeypatch.setattr(parallel, "dist", one)
    steps: list[Any] = [Step()]
    found = parallel.time_steps(steps, [3], 2, torch.device("cpu"), lambda: None, is_idle=is_idle)
    assert found.shape == (1, 1, 2)
    assert 20 <= float(found.min()) < 55
    assert len(calls) == 3 * (3 + (1 if is_idle else 3))


def test_efficiency_counts_every_rank_alone():
    alone = torch.tensor([[9.0, 10.0, 11.0], [12.0, 12.0, 12.0]])
    assert parallel._efficiency("alone", alone, alone) == 1
    assert parallel._efficiency("each", alone * torch.tensor([[1.0], [1.25]]), alone) == pytest.approx(0.8)
    # The slowest rank's time, of a mean of 11 on one.
    halves = torch.tensor([[5.0, 4.0, 4.0], [4.0, 5.5, 6.0]])
    assert parallel._efficiency("tp", halves, alone) == 1
