"""The figure of the paper's grid, from results of three sizes of the vocabulary."""

from __future__ import annotations

import json

import pytest

from bench import grid, shapes
from tests.host.test_bench import result_of


def results() -> list[dict]:
    return [
        result_of(step, n, times, provider=provider, vocab=vocab, extra_mib=extra)
        for step in ("fwd", "fwd_bwd")
        for n in (1024, 4096)
        for vocab in (32768, 65536)
        for provider, times, extra in (("cute_lce", 0.9, 0.0), ("torch_compile", 1.2, 4096.0))
    ]


def test_a_panel_for_each_number_of_tokens(tmp_path, capsys):
    figure = grid.draw(results())
    assert len(figure.axes) == len(grid.ROWS) * 2
    forward = figure.axes[0]
    assert forward.get_title() == "1024 tokens"
    lines = {line.get_label(): [*map(float, line.get_ydata())] for line in forward.get_lines()}  # pyright: ignore
    assert lines["cute_lce"] == [0.9, 0.9]
    assert lines["torch.compile of eager"] == [1.2, 1.2]
    memory = figure.axes[2 * len(figure.axes) // len(grid.ROWS)]
    # Nothing at all has no logarithm.
    assert min(memory.get_lines()[0].get_ydata()) == grid.LEAST_MIB  # pyright: ignore
    kept, out = tmp_path / "gpu_paper.json", tmp_path / "a.png"
    kept.write_text(json.dumps(results()))
    assert grid.main([str(kept), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.stat().st_size > 10_000
    with pytest.raises(ValueError, match=r"^results: got those of"):
        grid.draw([*results(), result_of("fwd", 20, 1.0, gpu="other GPU")])


def test_the_papers_shapes_are_those_it_reports():
    assert {(shape.n, shape.vocab) for shape in shapes.parse("paper")} == set(grid.PUBLISHED)
