"""The figures of the paper's grid: its panels, the providers beside ours, and their errors."""

from __future__ import annotations

import pytest

from bench import error_figure, grid, shapes, speed_up_figure
from cute_lce.measure import records
from tests.host.test_bench import result_of


def results() -> list[dict]:
    """torch.compile is too slow for the axis at 65536 classes."""
    return [
        result_of(step, n, times, provider=provider, vocab=vocab, extra_mib=extra)
        for step in ("fwd", "fwd_bwd")
        for n in (1024, 4096)
        for vocab in (32768, 65536)
        for provider, times, extra in (
            ("cute_lce", 0.9, 0.0),
            ("torch_compile", 1.2 if vocab == 32768 else 4.5, 4096.0),
        )
    ]


def test_a_panel_for_each_number_of_tokens():
    figure = grid.draw(results())
    assert len(figure.axes) == len(grid.ROWS) * 2
    forward = figure.axes[0]
    assert forward.get_title() == "1024 tokens"
    lines = {line.get_label(): [*map(float, line.get_ydata())] for line in forward.get_lines()}  # pyright: ignore
    assert lines["cute_lce"] == [0.9, 0.9]
    assert lines["torch.compile of eager"] == [1.2, grid.MOST_TIMES]
    assert [text.get_text() for text in forward.texts] == ["1", "1"]
    memory = figure.axes[2 * len(figure.axes) // len(grid.ROWS)]
    # Nothing at all has no logarithm.
    assert min(memory.get_lines()[0].get_ydata()) == grid.LEAST_MIB  # pyright: ignore


def strips(axes) -> dict[str, list[tuple[float, float]]]:
    """Name -> (tokens, value) of its points: a marker is of so many tokens."""
    names = [label.get_text() for label in axes.figure.axes[0].get_yticklabels()]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for points, label in zip(*axes.get_legend_handles_labels(), strict=True):
        for value, row in points.get_offsets().tolist():
            found[names[round(row)]].append((int(label.split()[0]), float(f"{value:.6g}")))
    return found


def test_each_peer_beside_ours():
    peer = result_of("fwd", 1024, 1.8, provider="quack_base", vocab=32768)
    failed = peer | {"provider": "cce", "ms": None, "floor_ms": None, "failed": "E: no"}
    figure = speed_up_figure.draw([*results(), peer, failed])
    forward, both = figure.axes
    over = 1.33333
    most = speed_up_figure.MOST
    compiled = [(1024, over), (1024, most), (4096, over), (4096, most)]
    assert strips(forward) == {"torch_compile": compiled, "quack_base": [(1024, 2.0)]}
    assert strips(both) == {"torch_compile": compiled, "quack_base": []}
    # The mean is of what was measured, and not of what is drawn.
    assert [text.get_text() for text in forward.texts] == [f"{(1.2 * 4.5) ** 0.5 / 0.9:.2f}", "2.00"]
    assert [text.get_text() for text in both.texts] == [f"{(1.2 * 4.5) ** 0.5 / 0.9:.2f}", "-"]


def test_the_errors_of_each_provider():
    def of(provider: str, n: int, *errors: float) -> dict:
        return result_of("fwd_bwd", n, 1.0, provider=provider) | dict(
            zip(error_figure.ERRORS, errors, strict=True)
        )

    ours = [of("cute_lce", 1024, 3e-7, 2e-3, 3e-3), of("cute_lce", 4096, 2e-7, 2e-3, 4e-3)]
    none = result_of("fwd", 1024, 1.0, provider="quack_base") | dict.fromkeys(error_figure.ERRORS)
    figure = error_figure.draw([of("cce", 1024, 1e-7, 1e-2, 1e-3), *ours, none])
    loss, _, weight = figure.axes
    assert strips(loss) == {"cute_lce, auto": [(1024, 3e-7), (4096, 2e-7)], "cce": [(1024, 1e-7)]}
    assert [text.get_text() for text in weight.texts] == ["4.0e-03", "1.0e-03"]


@pytest.mark.parametrize("figure", [grid, speed_up_figure, error_figure])
def test_a_figure_is_of_one_gpu_and_the_same_each_time(figure, tmp_path, capsys):
    errors = dict.fromkeys(error_figure.ERRORS, 1e-3)
    found = [result | errors for result in results()]
    kept, out = tmp_path / "gpu_paper.json", tmp_path / "a.png"
    records.write(kept, found)
    drawn = []
    for _ in range(2):
        assert figure.main([str(kept), "--out", str(out)]) == 0
        assert capsys.readouterr().out.strip() == str(out)
        drawn.append(out.read_bytes())
    assert len(drawn[0]) > 10_000
    assert drawn[0] == drawn[1]
    for change in ({"gpu": "other GPU"}, {"reduction": "none"}):
        with pytest.raises(ValueError, match=r"^results: got those of"):
            figure.draw([*found, result_of("fwd", 1024, 1.0) | errors | change])
    with pytest.raises(ValueError, match=r"^results: got 20 tokens, want 1024, "):
        speed_up_figure.draw([*found, result_of("fwd", 20, 1.0), result_of("fwd", 20, 1.0, "quack_base")])


def test_the_papers_shapes_are_those_it_reports():
    assert {(shape.n, shape.vocab) for shape in shapes.parse("paper")} == set(grid.PUBLISHED)
