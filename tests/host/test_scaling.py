"""The model of efficiency over GPUs, beside the kept measurements, and its figure."""

from __future__ import annotations

import pytest

from bench import scaling
from bench.plot import ROOT
from cute_lce.measure import records
from tests.host.test_documented_numbers import PARALLEL, tables_of

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


def test_the_documents_table_of_overlap_is_the_formulas(capsys):
    marker = "<!-- bench.scaling: overlap_rows(8192, 4096, 131072) -->"
    (rows,) = (rows for above, rows in tables_of(PARALLEL) if above == marker)
    assert rows == scaling.overlap_rows(8192, 4096, 131072)
    assert scaling.main(["--overlap"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"| {' | '.join(row)} |" for row in rows]


def test_the_overlap_falls_with_the_number_of_gpus():
    for is_local in (True, False):
        ratios = []
        for ranks in scaling.OVERLAP_RANKS:
            gemm, collective = scaling.overlap(8192, 4096, 131072, ranks, is_local=is_local)
            ratios.append(gemm / collective)
        assert ratios == sorted(ratios, reverse=True)
    # docs/parallel.md's quotient, without starts, roundings and the SMs that NCCL takes.
    gemm, collective = scaling.overlap(10**6, 10**5, 131072, 8, is_local=False)
    assert collective / gemm == pytest.approx(
        3 * 7 * scaling.GEMM_RATE / (131072 * 40e9) * 108 / 132, rel=0.1
    )
    # A profile on four H200s: 490 us for the sum, 34 for the rounding, 251 for the gather.
    assert scaling.overlap(8192, 4096, 131072, 4, is_local=True)[1] == pytest.approx(775e-6, rel=0.1)
    assert scaling.token_bytes(4096, 2) == 12 + 3 * 4096


def test_the_figure(tmp_path, capsys):
    out = tmp_path / "figure.png"
    assert scaling.main([*map(str, FILES), "--out", str(out)]) == 0
    assert out.stat().st_size > 10_000
    empty = tmp_path / "empty.json"
    records.write(empty, [])
    with pytest.raises(SystemExit):
        scaling.main([str(empty), "--out", str(out)])
