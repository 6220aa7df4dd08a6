"""bench.step on a CPU: every way trains the same model, and a provider that is not there says so."""

from __future__ import annotations

import math
import weakref

import pytest

from bench import step, step_figure
from cute_lce.measure import records

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
    results = {result["provider"]: result for result in records.read([out])}
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


@pytest.mark.parametrize(("room", "most"), [(31, 31), (40, 31), (17, 31), (4, 31), (30, 31), (4, 3)])
def test_the_largest_batch_is_found_where_memory_is_no_line(room, most):
    """It was extrapolated to `most`, and `room` fit; 4 are known to."""
    tried, held = [], []

    class Held:
        """In a cycle, as an autograd graph may be."""

        def __init__(self):
            self.itself = self

    def run(sequences: int) -> None:
        tried.append(sequences)
        assert not any(each() for each in held), "what a refused try held is not free"
        activations = Held()
        if sequences > room:
            held.append(weakref.ref(activations))
            raise ValueError(f"workspace_mb: got 300, want at least {sequences}")

    found = step.most_that_fits(run, 4, most)
    assert found.sequences == max(4, min(room, most))
    assert found.error == (f"workspace_mb: got 300, want at least {room + 1}" if room < most else None)
    assert len(tried) == len(set(tried)) <= 6

    def fault(sequences: int) -> None:
        raise ValueError("another one")

    with pytest.raises(ValueError, match="another one"):
        step.most_that_fits(fault, 4, 31)


def result_of(provider: str, vocab: int, tokens_per_s: float, peak_mib: float, **others) -> dict:
    sizes = {"layers": 2, "d": 64, "batch": 2, "length": 32, "vocab": vocab}
    speed = {"tokens_per_s": tokens_per_s, "peak_mib": peak_mib, "date": "2026-11-22T00:00:00+00:00"}
    return {"gpu": "a GPU", "provider": provider, **sizes, **speed, **others}


def test_a_figure_has_a_panel_for_each_vocabulary(tmp_path, capsys):
    results = [
        result_of(provider, vocab, speed, peak)
        for vocab in (512, 1024)
        for provider, speed, peak in (
            (step.WITHOUT_HEAD, 4000.0, 1024.0),
            ("cute_lce", 3000.0, 2048.0),
            ("cute_lce", 2000.0, 1536.0),
            ("torch_compile", 2500.0, 4096.0),
        )
    ]
    figure = step_figure.draw(results)
    assert [axes.get_title() for axes in figure.axes] == ["V = 512", "V = 1024"]
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].get_lines()}  # pyright: ignore
    assert lines["cute_lce"] == [[1.5, 2.0], [2.0, 3.0]]
    assert lines["torch.compile of eager"] == [[4.0, 2.5]]
    kept, out = tmp_path / "gpu_step.json", tmp_path / "a.png"
    records.write(kept, results)
    assert step_figure.main([str(kept), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    with pytest.raises(ValueError, match=r"^results: got those of"):
        step_figure.draw([*results, result_of("cute_lce", 512, 1.0, 1.0, gpu="other GPU")])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vocab", "0"], "--vocab: got 0"),
        (["--reps", "0"], "--reps: got 0"),
        (["--workspace-mb", "-1"], "--workspace-mb: got -1"),
        (["--heads", "5", "--d", "32"], "--heads: got 5, want a divisor of --d, 32"),
        (["--device", "cpu", "--largest"], "--largest: it needs a GPU"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], said: str, capsys):
    with pytest.raises(SystemExit) as stopped:
        step.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
