"""Plot the paper's grid: time and memory by the size of the vocabulary, a column for each number of tokens.

    python3 -m bench.run --shapes paper --pass fwd fwd_bwd --providers all --out h200_paper.json
    python3 -m bench.grid                                # each bench/results/*_paper.json, *_paper_none.json

Drawn are the largest of our measured budgets and each peer's fastest pipeline. Times are multiples of the
floor, whose milliseconds stand at the foot of the panels: in milliseconds the curves would coincide.
PUBLISHED has the paper's own measurements of its forward on a GB200 (its table 2); they are not drawn, since
they are of another GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import summary
from bench.plot import SERIES, add_legend, dates_of, save_figures
from bench.summary import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Published(NamedTuple):
    """Milliseconds and MB (10^6 bytes) of a forward, the weight among them, with logits and without."""

    ms: float
    fused_ms: float
    mb: int
    fused_mb: int


PUBLISHED = {
    (1024, 32768): Published(0.73, 0.69, 1064, 280),
    (1024, 65536): Published(1.40, 0.97, 2088, 536),
    (1024, 131072): Published(2.76, 1.27, 4136, 1048),
    (1024, 262144): Published(5.46, 1.83, 8232, 2072),
    (4096, 32768): Published(1.66, 1.16, 1904, 304),
    (4096, 65536): Published(3.34, 1.69, 3696, 561),
    (4096, 131072): Published(6.78, 2.86, 7280, 1073),
    (4096, 262144): Published(13.70, 5.22, 14448, 2099),
    (8192, 32768): Published(2.93, 1.70, 3024, 337),
    (8192, 65536): Published(6.08, 2.90, 5840, 593),
    (8192, 131072): Published(13.25, 5.58, 11472, 1107),
    (8192, 262144): Published(27.77, 10.79, 22736, 2133),
    (16384, 32768): Published(5.62, 3.43, 5264, 401),
    (16384, 65536): Published(12.41, 6.61, 10128, 659),
    (16384, 131072): Published(26.67, 13.20, 19856, 1173),
    (16384, 262144): Published(50.15, 25.43, 39312, 2203),
    (32768, 32768): Published(11.42, 7.00, 9744, 531),
    (32768, 65536): Published(25.64, 13.80, 18704, 790),
    (32768, 131072): Published(50.24, 27.06, 36624, 1307),
    (32768, 262144): Published(96.52, 53.61, 72464, 2342),
}
"""(tokens, V) -> what the paper reports of a GB200."""
TIMES = "times"
ROWS = (
    ("fwd", TIMES, "forward, time / GEMMs' time"),
    ("fwd_bwd", TIMES, "both, time / GEMMs' time"),
    ("fwd", "extra_mib", "forward, extra MiB"),
    ("fwd_bwd", "extra_mib", "both, extra MiB"),
)
"""(pass, what is drawn, label)"""
LEAST_MIB, MOST_TIMES = 1.0, 1.6
"""What is less, or more, is drawn as so much."""
LEAST_TIMES, FOOT = 0.8, 0.825
"""The lower end of the axis, and where the floor's milliseconds stand."""


def draw(results: Iterable[Result]) -> Figure:
    """The figure of bench.run's results of one GPU, d and reduction. Raises ValueError for others."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    found = summary.comparable(results)
    kind = kind_of(found)
    tokens = sorted({r["n"] for r in found})
    rows = [row for row in ROWS if any(r["pass"] == row[0] for r in found)]
    vocabularies = sorted({r["vocab"] for r in found})
    figure = Figure(figsize=(2.6 * len(tokens) + 1, 2.6 * len(rows) + 0.8), layout="constrained")
    panels = figure.subplots(len(rows), len(tokens), sharex=True, sharey="row", squeeze=False)
    for line, (step, key, title) in zip(panels, rows, strict=True):
        for axes, n in zip(line, tokens, strict=True):
            of_panel = [r for r in found if (r["pass"], r["n"]) == (step, n)]
            draw_panel(axes, of_panel, key)
            axes.set_xscale("log", base=2)
            axes.margins(x=0.1)
            axes.grid(color="#d8d8d8", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.xaxis.set_major_locator(FixedLocator(vocabularies))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1024:g}Ki"))
        line[0].set_ylabel(title)
    for axes, n in zip(panels[0], tokens, strict=True):
        axes.set_title(f"{n} tokens", fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel("V")
    labelled: dict[str, Any] = {}
    for axes in figure.axes:
        labelled |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    edges = f"{MOST_TIMES} and {LEAST_MIB:g} MiB: that or beyond; small numbers: the GEMMs' ms"
    add_legend(figure, labelled, f"{kind}, {dates_of(found)}; {edges}")
    return figure


def kind_of(found: Sequence[Result]) -> str:
    """What comparable results have in common, for a title. Raises ValueError for several GPUs, d or
    reductions."""
    kinds = sorted({f"{r['gpu']}, d {r['d']}, bf16, {r['reduction']}" for r in found})
    if len(kinds) != 1:
        raise ValueError(f"results: got those of {', '.join(kinds) or 'no GPU'}, want bench.run's of one")
    return kinds[0]


def draw_panel(axes: Axes, results: Sequence[Result], key: str) -> None:
    """A line for each provider: results of one pass and number of tokens."""

    def value(result: Result) -> float:
        if key == TIMES:
            return min(summary.times(result), MOST_TIMES)
        return max(result[key], LEAST_MIB)

    for provider, name, marker, colour, style in SERIES:
        of_provider = summary.measured(results, provider).values()
        points = sorted((r["vocab"], value(r)) for r in of_provider if r.get(key, 0) is not None)
        if not points:
            continue
        ours = provider == summary.OURS
        axes.plot(
            *zip(*points, strict=True),
            color=colour,
            marker=marker,
            markerfacecolor="none" if marker in "s^DvPh" else colour,
            linestyle=style,
            linewidth=1.6 if ours else 1.0,
            markersize=4,
            label=name,
            zorder=3 if ours else 2,
        )
    if key == TIMES:
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylim(LEAST_TIMES, MOST_TIMES * 1.03)
        for result in summary.measured(results, summary.OURS).values():
            text = f"{result['floor_ms']:.3g}"
            axes.text(result["vocab"], FOOT, text, ha="center", fontsize=7, color="#505050")
    else:
        axes.set_yscale("log")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.grid", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return save_figures(parser, argv, ["_paper.json", "_paper_none.json"], draw)


if __name__ == "__main__":
    sys.exit(main())
