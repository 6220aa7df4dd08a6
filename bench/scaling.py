"""The efficiency of calls over the GPUs of a host: a model, and a figure of it beside what was measured.

    python3 -m bench.scaling        # docs/figures/h200_parallel.png of bench/results/h200x*_parallel.json
    python3 -m bench.scaling --overlap      # docs/parallel.md's table of what that GEMM can hide

Over R ranks a call takes a part of the time on one, what every rank repeats, and what its collectives add:

    T / R + BESIDE n d + START + margin C + max(C - G, 0) + A

C is the time of the sum of the gradient by input, which takes the share `margin` of a GPU's SMs from the GEMM
of the weight's gradient, of G; A that of the gather of hidden states, of `sequence_dim` alone. Efficiency is
T over R times that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.plot import FIGURES, ROOT, save
from bench.shapes import parse_one
from cute_lce.measure import records
from cute_lce.parallel.collectives import DEFAULT_CTAS
from cute_lce.plan.overlap import WIRE, sum_bytes, sum_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMS = 132
BESIDE = 20 / 3.5e12
"""Seconds for each of the n d elements of hidden states: 20 bytes more of DRAM than a rank's share. The
copies of the scaled rows and fp32 sums take 6; the others are fitted. No token is ignored."""
START = 30e-6
"""Seconds of the gather of statistics, their merge, and kernels that begin."""
GEMM_RATE = 2 * 8192 * 4096 * 65536 / 5.89e-3
"""FLOPs a second of the GEMM of the weight's gradient, cuBLAS on an H200."""
CASES = {"tp": ("vocabulary in shards", "o", "-"), "tp_sequence": ("tokens in slices too", "s", "--")}
MOST_RANKS = 8
OVERLAP_RANKS = (2, 4, 8, 72)


def seconds(alone: float, n: int, d: int, ranks: int, *, sliced: bool) -> float:
    """A call's, whose whole takes `alone` seconds on one GPU."""
    if ranks == 1:
        return alone
    collective = sum_seconds(n, d, 2, ranks, DEFAULT_CTAS, scatters=sliced)
    margin = DEFAULT_CTAS / SMS
    gemm = alone / 3 / ranks / (1 - margin)
    gathered = 2 * n * d * (ranks - 1) / ranks / WIRE if sliced else 0.0
    repeated = BESIDE * n * d + START
    return alone / ranks + repeated + margin * collective + max(collective - gemm, 0) + gathered


def efficiency(alone: float, n: int, d: int, ranks: int, *, sliced: bool) -> float:
    return alone / ranks / seconds(alone, n, d, ranks, sliced=sliced)


def token_bytes(d: int, ranks: int) -> int:
    """What a rank sends for each token of the group, forward and backward, with 16-bit hidden states; with
    sequence_dim the gather of hidden states takes the place of that of the gradient by input."""
    return 12 * (ranks - 1) + sum_bytes(1, d, 2, ranks, scatters=False)


def overlap(n: int, d: int, vocab: int, ranks: int, *, is_local: bool) -> tuple[float, float]:
    """(G, C): seconds of the GEMM of the weight's gradient on the SMs that the sum leaves, of a shard that is
    kept whole, and of that sum."""
    gemm = 2 * n * d * vocab / ranks / GEMM_RATE / (1 - DEFAULT_CTAS / SMS)
    return gemm, sum_seconds(n, d, 2, ranks, DEFAULT_CTAS, scatters=False, is_local=is_local)


def overlap_rows(n: int, d: int, vocab: int) -> list[list[str]]:
    """For each number of ranks: bytes a token, G, and over NVLink, then between hosts, C and the part of it
    that G can hide."""
    rows = []
    for ranks in OVERLAP_RANKS:
        row = [str(ranks), str(token_bytes(d, ranks))]
        for is_local in (True, False):
            gemm, collective = overlap(n, d, vocab, ranks, is_local=is_local)
            row += [f"{gemm * 1e3:.2f}"] * is_local
            row += [f"{collective * 1e3:.2f}", f"{min(gemm / collective, 1):.0%}"]
        rows.append(row)
    return rows


def measured(results: Sequence[dict[str, Any]], case: str) -> list[tuple[float, dict[str, Any]]]:
    """(seconds of the whole call on one GPU, result) of a case."""

    def key(result: dict[str, Any]) -> tuple:
        names = "ranks", "n", "d", "vocab", "dtype", "reduction", "schedule", "workspace_mb"
        return tuple(result[name] for name in names)

    alone = {key(result): result["ms"] / 1e3 for result in results if result["case"] == "alone"}
    return [(alone[key(result)], result) for result in results if result["case"] == case]


def draw(results: Sequence[dict[str, Any]]) -> Figure:
    """Efficiency by the number of GPUs, a panel a shape; lines are the model. Raises ValueError for results
    of several GPUs or none."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    gpus = sorted({result["gpu"] for result in results})
    if len(gpus) != 1:
        raise ValueError(f"results: got those of {', '.join(gpus) or 'no GPU'}, want bench.parallel's of one")
    shapes = sorted({(r["n"], r["d"], r["vocab"]) for r in results}, reverse=True)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    ranks = [2**power for power in range(MOST_RANKS.bit_length())]
    for axes, shape in zip(panels, shapes, strict=True):
        n, d, vocab = shape
        for (case, (label, marker, line)), colour in zip(CASES.items(), ("#000000", "#5b9bd5"), strict=True):
            found = [each for each in measured(results, case) if (each[1]["n"], *shape[1:]) == shape]
            if not found:
                continue
            alone = sum(whole for whole, _ in found) / len(found)
            sliced = case == "tp_sequence"
            model = [efficiency(alone, n, d, count, sliced=sliced) for count in ranks]
            axes.plot(ranks, model, line, color=colour, linewidth=1.2, label=f"{label}: model")
            axes.scatter(
                [result["ranks"] for _, result in found],
                [result["efficiency"] for _, result in found],
                marker=marker,
                color=colour,
                zorder=3,
                label=f"{label}: measured",
            )
        axes.set_title(f"{n} tokens, d {d}, V {vocab}", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(ranks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("GPUs")
        axes.grid(color="#d8d8d8", linewidth=0.6)
        axes.set_axisbelow(True)
    panels[0].set_ylim(0.7, 1.02)
    panels[0].set_ylabel("efficiency per GPU")
    panels[0].legend(loc="lower left", fontsize=8)
    date = max(result["date"][:10] for result in results)
    figure.suptitle(f"{gpus[0]}, one host, NVLink, forward and backward, {date}", fontsize=10)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="JSON", help="kept results of bench.parallel")
    parser.add_argument("--out", type=Path, default=FIGURES / "h200_parallel.png", help="PNG or SVG")
    parser.add_argument("--overlap", metavar="n,d,V", nargs="?", const="8192,4096,131072", help="the table")
    args = parser.parse_args(argv)
    if args.overlap:
        try:
            shape = parse_one(args.overlap)
        except ValueError as error:
            parser.error(str(error))
        rows = overlap_rows(shape.n, shape.d, shape.vocab)
        print(*(f"| {' | '.join(row)} |" for row in rows), sep="\n")
        return 0
    files = args.files or sorted((ROOT / "bench" / "results").glob("h200x*_parallel.json"))
    try:
        save(draw(records.read(files)), args.out)
    except ValueError as error:
        parser.error(str(error))
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
