"""Plot how many times as long as ours each provider's calls take, a point for each shape of the paper's grid.

    python3 -m bench.speed_up_figure                     # each bench/results/*_paper.json, *_paper_none.json

Compared are multiples of the floor, which ran in turn with each: not all of a file was measured on one day.
Ours is the largest measured budget of schedule "auto".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING

from bench import summary
from bench.grid import kind_of
from bench.plot import Point, add_legend, dates_of, draw_strips, save_figures
from bench.summary import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 3.0
"""What is more is drawn as so much."""


def draw(results: Sequence[Result]) -> Figure:
    """The figure of bench.run's results of one GPU, d and reduction. Raises ValueError for others."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    found = summary.comparable(results)
    kind = kind_of(found)
    points = {step: speed_ups(found, step) for step in summary.PASSES}
    over = points["fwd_bwd"]
    names = sorted(
        {name for each in points.values() for name in each}, key=lambda name: _mean(over.get(name))
    )
    figure = Figure(figsize=(11, 0.3 * len(names) + 1.7), layout="constrained")
    panels = figure.subplots(1, len(points), sharey=True, squeeze=False)[0]
    labelled = {}
    for axes, (step, of_step) in zip(panels, points.items(), strict=True):
        axes.set_xscale("log")
        means = {name: f"{_mean(each):.2f}" for name, each in of_step.items()}
        drawn = {
            name: [each._replace(value=min(each.value, MOST)) for each in each_of]
            for name, each_of in of_step.items()
        }
        labelled |= draw_strips(axes, names, drawn, means)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.xaxis.set_major_locator(FixedLocator([0.9, 1, 1.1, 1.2, 1.5, 2, 2.5, MOST]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_title(summary.PASSES[step], fontsize=10)
        axes.set_xlabel("times as long as cute_lce")
    title = f"{kind}, {dates_of(found)}; {MOST:g}: that or more; beside it the geometric mean over the shapes"
    add_legend(figure, labelled, title)
    return figure


def speed_ups(found: Sequence[Result], step: str) -> dict[str, list[Point]]:
    """Provider -> (tokens, its multiple of the floor / ours) of each shape."""
    of_step = [result for result in found if result["pass"] == step]
    ours = summary.measured(of_step, summary.OURS)
    points: dict[str, list[Point]] = {}
    for result in of_step:
        own = ours.get(summary.key_of(result))
        if result["provider"] != summary.OURS and not result.get("failed") and own is not None:
            each = Point(result["n"], summary.times(result) / summary.times(own))
            points.setdefault(result["provider"], []).append(each)
    return points


def _mean(points: Sequence[Point] | None) -> float:
    return geometric_mean(point.value for point in points) if points else float("inf")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.speed_up_figure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return save_figures(parser, argv, ["_paper.json", "_paper_none.json"], draw, "_speed_up")


if __name__ == "__main__":
    sys.exit(main())
