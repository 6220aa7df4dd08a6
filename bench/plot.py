"""Plot the multiple of the floor by number of tokens: ours and the peers', forward and forward + backward.

    python3 -m bench.plot                  # of each GPU, its bench/results/*_random*.json together
    python3 -m bench.plot bench/results/h200_random11.json --out random11.png

Each shape is a point; a line joins the geometric means of the shapes between one power of two and the next.
Points of short calls (`bench.summary`) are small, are in no line and do not stretch the axis: one that lies
beyond it is an arrow with its number. The figure is readable without colour.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import summary
from bench.summary import Result
from cute_lce.measure import records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"

# Ours, and what a peer's names begin with: (provider, label, marker, colour, line). Of a peer's several
# pipelines the fastest at a shape is drawn. Colours differ in lightness too.
SERIES = (
    (summary.OURS, "cute_lce", "o", "#000000", "-"),
    ("torch_compile", "torch.compile of eager", "s", "#a83232", "--"),
    ("quack", "quack, fastest chunk", "^", "#5b9bd5", "-."),
    ("liger_cute_flce", "Liger, CuTe FLCE", "D", "#7f9f3f", ":"),
    ("liger_triton", "Liger, Triton", "v", "#b0a030", ":"),
    ("liger_cute_scaled_ce", "Liger, CuTe scaled CE", "h", "#c07030", (0, (1, 1))),
    ("cce", "CCE", "P", "#9f7fbf", (0, (5, 1, 1, 1, 1, 1))),
    ("torch_eager", "torch eager", "x", "#a0a0a0", (0, (1, 3))),
    ("torch_f_lce", "F.linear_cross_entropy", "*", "#60a0a0", (0, (3, 5))),
)
FINE_TICKS = (0.85, 0.95, 1.05, 1.15)  # besides, if the axis is short
TICKS = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0)


def octaves(results: Sequence[Result]) -> list[tuple[float, float]]:
    """(tokens, multiple), each the geometric mean over the shapes between two powers of two."""
    groups: dict[int, list[Result]] = {}
    for result in results:
        groups.setdefault(int(math.log2(result["n"])), []).append(result)
    return [
        (geometric_mean(r["n"] for r in group), geometric_mean(map(summary.times, group)))
        for _, group in sorted(groups.items())
    ]


def draw_series(axes: Axes, results: Sequence[Result], ours: bool, label: str, style: dict[str, Any]) -> None:
    marker, colour, line = style["marker"], style["colour"], style["line"]
    face = colour if ours or marker in "x*" else "none"
    for short in (False, True):
        points = [result for result in results if summary.is_short(result) == short]
        axes.scatter(
            [result["n"] for result in points],
            [summary.times(result) for result in points],
            s=8 if short else 26,
            marker=marker,
            facecolors=face,
            edgecolors=None if marker == "x" else colour,
            color=colour if marker == "x" else None,
            linewidths=0.9,
            alpha=0.9 if ours else 0.75,
            zorder=3 if ours else 2,
        )
    means = octaves([result for result in results if not summary.is_short(result)])
    axes.plot(
        *zip(*means, strict=True) if means else ([], []),
        color=colour,
        linestyle=line,
        linewidth=1.8 if ours else 1.2,
        marker=marker,
        markersize=5,
        markerfacecolor=face,
        # The legend shows marker and line; on the line itself there are no markers.
        markevery=[],
        label=label,
        zorder=3 if ours else 2,
    )


def beyond(
    panels: Sequence[Axes], results: Sequence[Result], high: float
) -> Iterator[tuple[Axes, int, float, str]]:
    """(panel, tokens, multiple, colour) of each point above the axis."""
    for axes, step in zip(panels, summary.PASSES, strict=True):
        for provider, _, _, colour, _ in SERIES:
            for result in summary.measured(results, provider).values():
                if result["pass"] == step and summary.times(result) > high:
                    yield axes, result["n"], summary.times(result), colour


def draw(results: Sequence[Result]) -> Figure:
    """The figure of bench.run's results of one GPU.

    Raises:
        ValueError: there are none, or they are of several GPUs.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    comparable = summary.comparable(results)
    gpus = sorted({result["gpu"] for result in comparable})
    if len(gpus) != 1:
        raise ValueError(f"results: got those of {', '.join(gpus) or 'no GPU'}, want bench.run's of one")
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(1, len(summary.PASSES), sharex=True, sharey=True)
    tokens, long, every, shapes = [1024], [1.0], [1.0], set()
    for axes, (step, title) in zip(panels, summary.PASSES.items(), strict=True):
        for provider, label, marker, colour, line in SERIES:
            found = [
                result for result in summary.measured(comparable, provider).values() if result["pass"] == step
            ]
            if found:
                style = {"marker": marker, "colour": colour, "line": line}
                draw_series(axes, found, provider == summary.OURS, label, style)
                tokens += [result["n"] for result in found]
                every += map(summary.times, found)
                long += [summary.times(result) for result in found if not summary.is_short(result)]
                shapes |= {summary.where(result) for result in found}
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens")
        axes.grid(color="#d8d8d8", linewidth=0.6)
        axes.set_axisbelow(True)
    low, high = min(every) / 1.04, max(long) * 1.06
    first = panels[0]
    first.set_ylim(low, high)
    for axes, x, multiple, colour in beyond(panels, comparable, high):
        axes.annotate(
            f"{multiple:.1f}",
            (x, high / 1.01),
            xytext=(0, -11),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color=colour,
            arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 0.6},
        )
    ticks = (*TICKS, *FINE_TICKS) if high / low < 1.7 else TICKS
    first.yaxis.set_major_locator(FixedLocator(sorted(tick for tick in ticks if low <= tick <= high)))
    first.yaxis.set_minor_locator(NullLocator())
    first.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    powers = range(2 * int(math.log2(min(tokens)) / 2), math.ceil(math.log2(max(tokens))) + 1, 2)
    first.xaxis.set_major_locator(FixedLocator([2**power for power in powers]))
    first.xaxis.set_minor_locator(NullLocator())
    first.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    first.set_ylabel("time / time of cuBLAS's GEMMs")
    # What either panel shows.
    labelled = dict(
        pair[::-1] for axes in panels for pair in zip(*axes.get_legend_handles_labels(), strict=True)
    )
    panels[-1].legend(labelled.values(), labelled.keys(), loc="upper right", frameon=True, framealpha=0.95)
    when = dates_of(comparable)
    small = f"small points: floor under {summary.LEAST_FLOOR_MS} ms"
    figure.suptitle(f"{gpus[0]}, bf16, {len(shapes)} shapes, {when}; {small}", fontsize=10)
    return figure


class Point(NamedTuple):
    tokens: int
    value: float


MARKERS = {
    1024: ("o", "#000000"),
    4096: ("s", "#303030"),
    8192: ("^", "#585858"),
    16384: ("D", "#808080"),
    32768: ("x", "#000000"),
}
"""Of the numbers of tokens in the paper's grid."""


def draw_strips(
    axes: Axes, names: Sequence[str], points: Mapping[str, Sequence[Point]], numbers: Mapping[str, str]
) -> dict[str, Any]:
    """A row for each name, the first on top: its points, and beside the panel its number. Returns the legend:
    label -> what it belongs to. Raises ValueError for other numbers of tokens than the paper's."""
    for tokens in {point.tokens for each in points.values() for point in each} - set(MARKERS):
        raise ValueError(f"results: got {tokens} tokens, want {', '.join(map(str, MARKERS))}")
    labelled: dict[str, Any] = {}
    for place, (tokens, (marker, colour)) in enumerate(MARKERS.items()):
        # The fewer tokens, the higher in its row.
        shift = 0.12 * (place - (len(MARKERS) - 1) / 2)
        found = [
            (point.value, row + shift)
            for row, name in enumerate(names)
            for point in points.get(name, ())
            if point.tokens == tokens
        ]
        if found:
            label = f"{tokens} tokens"
            colours = {"color": colour} if marker == "x" else {"facecolors": "none", "edgecolors": colour}
            labelled[label] = axes.scatter(
                *zip(*found, strict=True), s=18, marker=marker, linewidths=0.8, label=label, **colours
            )
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    right = axes.get_yaxis_transform()
    for row, name in enumerate(names):
        axes.text(1.01, row, numbers.get(name, "-"), transform=right, va="center", fontsize=8)
        axes.axhspan(row - 0.5, row + 0.5, color="#f0f0f0" if row % 2 else "#ffffff", zorder=0)
    axes.grid(axis="x", color="#d0d0d0", linewidth=0.6)
    axes.set_axisbelow(True)
    return labelled


def dates_of(results: Iterable[Result]) -> str:
    """The day, or the first and the last, on which they were measured."""
    dates = sorted(result["date"][:10] for result in results)
    return dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"


def add_legend(figure: Figure, labelled: dict[str, Any], title: str) -> None:
    """One legend below all panels, of label -> what it belongs to, and a title above them."""
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=5, fontsize=8)
    figure.suptitle(title, fontsize=10)


def save(figure: Figure, path: Path) -> None:
    """Write the figure; the same results give the same file."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "cute_lce"}):
        figure.savefig(path, dpi=150, metadata=metadata)


def save_figures(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    kept: Sequence[str],
    draw: Callable[[Sequence[Result]], Figure],
    ending: str = "",
    name: Callable[[Path], str] = lambda file: file.stem,
) -> int:
    """A figure of each file, or of all in --out. kept: the ends of the names of those that are taken where
    none is given. ending: of the figure's name, after the file's, or after `name`, by which several files
    may be in one figure."""
    parser.add_argument("files", nargs="*", type=Path, metavar="JSON", help="kept results of bench.run")
    parser.add_argument("--out", type=Path, help="PNG or SVG of all files (PNGs in docs/figures)")
    args = parser.parse_args(argv)
    folder = ROOT / "bench" / "results"
    files = args.files or sorted(file for end in kept for file in folder.glob(f"*{end}"))
    if not files:
        print(f"no bench/results/*{' or *'.join(kept)} is kept")
        return 0
    groups: dict[Path, list[Path]] = {}
    for file in files:
        groups.setdefault(args.out or FIGURES / f"{name(file)}{ending}.png", []).append(file)
    for out, group in groups.items():
        try:
            save(draw(records.read(group)), out)
        except ValueError as error:
            parser.error(str(error))
        print(out)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return save_figures(
        parser, argv, ["_random*.json"], draw, name=lambda file: re.sub("_random.*", "_random", file.stem)
    )


if __name__ == "__main__":
    sys.exit(main())
