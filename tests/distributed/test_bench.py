"""bench.parallel, over two processes of a CPU."""

from __future__ import annotations

import json

from bench import parallel


def test_every_case_is_measured_and_right(tmp_path, capfd):
    out = tmp_path / "results.json"
    asked = ["--device", "cpu", "--shapes", "64,32,256", "--dtype", "fp32", "--reps", "1", "--out", str(out)]
    assert parallel.main(asked) == 0
    results = json.loads(out.read_text())
    assert [result["case"] for result in results] == list(parallel.CASES)
    for result in results:
        assert tuple(result) == parallel.KEYS
        assert 0 < result["ms_min"] <= result["ms"] <= result["ms_max"]
        assert result["efficiency"] > 0
        compared = {key: result[key] for key in ("err_loss", "err_dh", "err_dw") if result[key] is not None}
        assert bool(compared) == result["case"].startswith("tp")
        assert all(error < 1e-5 for error in compared.values())
    assert capfd.readouterr().out.rstrip().endswith(parallel.table(results))
    assert parallel.main(["--show", str(out)]) == 0
    assert parallel.main(["--ranks", "99"]) == 1
