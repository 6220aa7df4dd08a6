"""Plot each provider's errors against float64, a point for each shape of the paper's grid.

python3 -m bench.error_figure                        # each bench/results/*_paper_errors.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.grid import kind_of
from bench.plot import Point, add_legend, dates_of, draw_strips, save_figures
from bench.summary import OURS, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ERRORS = {"err_loss": "loss", "err_dh": "gradient by the input", "err_dw": "gradient by the weight"}


def draw(results: Sequence[Result]) -> Figure:
    """The figure of bench.run's results, of one GPU, d and reduction, that have errors. Raises ValueError for
    others."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    found = [result for result in results if all(result.get(key) is not None for key in ERRORS)]
    kind = kind_of(found)
    points: dict[str, dict[str, list[Point]]] = {key: {} for key in ERRORS}
    for result in found:
        for key, of_key in points.items():
            of_key.setdefault(name_of(result), []).append(Point(result["n"], float(result[key])))
    worst = {
        key: {name: max(point.value for point in each) for name, each in of_key.items()}
        for key, of_key in points.items()
    }
    names = sorted(worst["err_dw"], key=lambda name: (not name.startswith(OURS), worst["err_loss"][name]))
    figure = Figure(figsize=(11, 0.3 * len(names) + 1.7), layout="constrained")
    panels = figure.subplots(1, len(ERRORS), sharey=True, squeeze=False)[0]
    labelled = {}
    for axes, (key, title) in zip(panels, ERRORS.items(), strict=True):
        axes.set_xscale("log")
        labelled |= draw_strips(
            axes, names, points[key], {name: f"{each:.1e}" for name, each in worst[key].items()}
        )
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if key != "err_loss" else (1,)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
        axes.tick_params(axis="x", labelsize=8)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("relative RMS error")
    add_legend(figure, labelled, f"{kind}, {dates_of(found)}; beside it the largest over the shapes")
    return figure


def name_of(result: Result) -> str:
    """The provider, and a schedule of ours."""
    return result["provider"] if result["schedule"] is None else f"{result['provider']}, {result['schedule']}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.error_figure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return save_figures(parser, argv, ["_paper_errors.json"], draw)


if __name__ == "__main__":
    sys.exit(main())
