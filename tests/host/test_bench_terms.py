"""bench.terms on a CPU: every term beside the plain call, and what a schedule refuses says so."""

from __future__ import annotations

import json

import pytest
import torch

from bench import terms
from bench.inputs import make_inputs
from bench.shapes import Shape

SMALL = ["--shapes", "24,16,130", "--seconds", "0.01", "--device", "cpu"]


def test_a_few(tmp_path, capsys):
    out = tmp_path / "terms.json"
    some = ["--terms", "plain", "softcap", "--pass", "fwd_bwd"]
    assert terms.main([*SMALL, *some, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    results = json.loads(out.read_text())
    assert [r["term"] for r in results] == ["plain", "softcap"]
    for result in results:
        assert list(result) == list(terms.KEYS)
        assert result["error"] is None
        assert result["times"] == result["ms"] / result["plain_ms"]
        assert result["floor_ms"] > 0
    assert terms.main(["--show", str(out)]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("term", terms.TERMS)
def test_every_term_runs(term: str):
    inputs = make_inputs(Shape(24, 16, 130), torch.float32, "untrained", torch.device("cpu"))
    terms.Step(term, inputs, "auto", backward=True)()


def test_what_fails_says_so(tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("schedule: got 'keep'\nand more")

    monkeypatch.setitem(terms.TERMS, "softcap", fail)
    out = tmp_path / "terms.json"
    assert terms.main([*SMALL, "--terms", "softcap", "--pass", "fwd", "--out", str(out)]) == 0
    (result,) = json.loads(out.read_text())
    assert result["error"] == "ValueError: schedule: got 'keep'"
    assert result["ms"] is None
