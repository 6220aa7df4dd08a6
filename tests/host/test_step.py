"""bench.step on a CPU: every way trains the same model, and a provider that is not there says so."""

from __future__ import annotations

import json
import math

from bench import step

SMALL = [
    "--vocab",
    "512",
    "--d",
    "64",
    "--layers",
    "1",
    "--inner",
    "128",
    "--heads",
    "4",
    "--length",
    "32",
    "--batch",
    "2",
    "--reps",
    "2",
    "--device",
    "cpu",
]


def test_a_small_model(tmp_path, capsys):
    out = tmp_path / "step.json"
    peers = ["--peers", "torch_eager_fp32ce", "liger_triton", "--workspace-mb", "16"]
    assert step.main([*SMALL, *peers, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    results = {result["provider"]: result for result in json.loads(out.read_text())}
    assert list(results) == ["without head", "cute_lce", "torch_eager_fp32ce", "liger_triton"]
    # Of a model that is not trained yet.
    for name in ("cute_lce", "torch_eager_fp32ce"):
        assert abs(results[name]["loss"] - math.log(512)) < 0.1
        assert results[name]["tokens_per_s"] > 0
        assert results[name]["loss_share"] == 1 - results["without head"]["ms"] / results[name]["ms"]
    assert results["liger_triton"]["ms"] is None
    assert "not installed" in results["liger_triton"]["error"]
    assert "not installed" in printed
    assert step.main(["--show", str(out)]) == 0
    assert capsys.readouterr().out == printed
