"""Plot a training step: speed over peak memory, a panel for each size of the vocabulary.

    python3 -m bench.step --out h200_step.json
    python3 -m bench.step_figure                         # each bench/results/*_step.json

Up and to the left is better. The line joins our budgets; the dashed line is a step without head and loss, the
upper limit of speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.plot import SERIES, add_legend, dates_of, save_figures
from bench.step import WITHOUT_HEAD
from bench.summary import OURS, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(results: Sequence[Result]) -> Figure:
    """The figure of bench.step's results of one GPU and model. Raises ValueError for others."""
    from matplotlib.figure import Figure

    found = [r for r in results if r.get("tokens_per_s") and r["peak_mib"] is not None]
    kinds = sorted(
        {f"{r['gpu']}, {r['layers']} layers, d {r['d']}, {r['batch'] * r['length']} tokens" for r in found}
    )
    if len(kinds) != 1:
        raise ValueError(
            f"results: got those of {', '.join(kinds) or 'no GPU'}, want bench.step's of one model"
        )
    vocabularies = sorted({r["vocab"] for r in found})
    figure = Figure(figsize=(3.4 * len(vocabularies) + 0.4, 3.6), layout="constrained")
    panels = figure.subplots(1, len(vocabularies), squeeze=False)[0]
    labelled = {}
    for axes, vocab in zip(panels, vocabularies, strict=True):
        rows = [r for r in found if r["vocab"] == vocab]
        for provider, name, marker, colour, _ in SERIES:
            points = sorted(
                (r["peak_mib"] / 1024, r["tokens_per_s"] / 1e3)
                for r in rows
                if r["provider"].startswith(provider)
            )
            if points:
                (labelled[name],) = axes.plot(
                    *zip(*points, strict=True),
                    color=colour,
                    marker=marker,
                    markerfacecolor=colour if provider == OURS else "none",
                    markersize=7,
                    linestyle="-" if provider == OURS else "none",
                    label=name,
                )
        for without in (r for r in rows if r["provider"] == WITHOUT_HEAD):
            labelled["no head"] = axes.axhline(
                without["tokens_per_s"] / 1e3, color="#606060", linestyle="--", linewidth=0.9
            )
        axes.set_title(f"V = {vocab}", fontsize=10)
        axes.set_xlabel("peak memory of a step, GiB")
        axes.margins(0.12)
        axes.grid(color="#d8d8d8", linewidth=0.6)
        axes.set_axisbelow(True)
    panels[0].set_ylabel("thousand tokens a second")
    add_legend(figure, labelled, f"{kinds[0]} a step, {dates_of(found)}")
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.step_figure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return save_figures(parser, argv, ["_step.json"], draw)


if __name__ == "__main__":
    sys.exit(main())
