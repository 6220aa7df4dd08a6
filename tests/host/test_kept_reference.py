"""bench.kept_reference: K is the kernels', and rows are raised where their logits exceed it."""

from __future__ import annotations

import torch

from bench import kept_reference
from cute_lce.maths import KEPT_RANGES, LOG2_E
from cute_lce.measure import records


def test_references_are_those_of_the_kernels():
    shard = torch.zeros(3, 64, dtype=torch.float64)
    logit = torch.tensor([10.0, -10.0, 0.0], dtype=torch.float64)
    for name, want in (
        # The logit in base 2, rounded down.
        ("bfloat16", [14, -15, 0]),
        # At least what 64 classes of logit 0 sum to; 6 below.
        ("float16", [8, 0, 0]),
    ):
        assert kept_reference.reference_of(logit, shard, KEPT_RANGES[name]).tolist() == want


def test_rows_are_raised_beyond_the_headroom():
    for name, headroom in (("bfloat16", 64.0), ("float16", 15.5)):
        exceeds = torch.tensor([headroom - 0.1, headroom + 0.1], dtype=torch.float64)
        reference = torch.full_like(exceeds, 3.0)
        highest = (exceeds + reference) / LOG2_E
        found = kept_reference.is_raised(highest, reference, KEPT_RANGES[name])
        assert found.tolist() == [False, True]


def test_counts(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kept_reference, "SHAPE", (128, 2048))
    out = tmp_path / "results.json"
    assert kept_reference.main(["--out", str(out)]) == 0
    results = records.read([out])
    found = {tuple(r[name] for name in (*kept_reference.KEY, "reference")): r for r in results}
    assert len(found) == len(results) == 2 * 2 * len(kept_reference.DEVIATIONS) * 2
    assert all(0 <= r["raised"] <= r["rescaled"] <= r["n"] == 128 for r in results)
    assert found["bf16", "confident", 1.0, "column"]["rescaled"] == 0
    # The target's term alone lies some 25 in base 2 above what the shard's logits sum to, of which K knows.
    assert found["fp16", "confident", 1.0, "column"]["rescaled"] == 128
    assert found["fp16", "confident", 1.0, "target"]["rescaled"] == 0
    assert capsys.readouterr().out.count("fp16") == 2 * len(kept_reference.DEVIATIONS)
