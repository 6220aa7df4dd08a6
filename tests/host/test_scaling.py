"""The model of efficiency over GPUs, beside the kept measurements, and its figure."""

from __future__ import annotations

import pytest

from bench import scaling
from bench.plot import ROOT
from cute_lce.measure import records

FILES = sorted((ROOT / "bench" / "results").glob("h200x*_parallel.json"))


@pytest.mark.parametrize("case", scaling.CASES)
def test_the_model_is_near_what_was_measured(case: str):
    points = scaling.measured(records.read(FILES), case)
    assert {result["ranks"] for _, result in points} >= {2, 4}
    for alone, result in points:
        sliced = case == "tp_sequence"
        found = scaling.efficiency(alone, result["n"], result["d"], result["ranks"], sliced=sliced)
        assert found == pytest.approx(result["efficiency"], rel=0.07)


def test_efficiency_falls_with_the_number_of_gpus():
    for sliced in (False, True):
        found = [scaling.efficiency(0.04, 8192, 4096, ranks, sliced=sliced) for ranks in (1, 2, 4, 8, 64)]
        assert found == sorted(found, reverse=True)
        assert found[0] == 1
    # A sum that is longer than the GEMM beside it counts.
    assert scaling.seconds(1e-3, 8192, 4096, 8, sliced=False) > 1e-3


def test_the_figure(tmp_path, capsys):
    out = tmp_path / "figure.png"
    assert scaling.main([*map(str, FILES), "--out", str(out)]) == 0
    assert out.stat().st_size > 10_000
    empty = tmp_path / "empty.json"
    empty.write_text("[]")
    with pytest.raises(SystemExit):
        scaling.main([str(empty), "--out", str(out)])
