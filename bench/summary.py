"""Summarise stored results: multiples of the floor by number of tokens, ours and the peers'.

Only rows of `bench.run` in one dtype count, of calls where both operands need gradients. If ours was measured
with several budgets, the largest counts. A call is short if its floor takes less than 0.3 ms: launches
dominate it, so the microseconds above the floor are given instead of multiples.

    python3 -m bench.summary bench/results/h200_random11.json
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from cute_lce.measure import records

Result = dict[str, Any]
OURS = "cute_lce"
LEAST_FLOOR_MS = 0.3
MOST_ABOVE_US = 70
PASSES = {"fwd": "forward", "fwd_bwd": "forward + backward"}


@dataclass(frozen=True)
class Range:
    """Some numbers of tokens, and the multiples of the floor that ours may take there: (geometric mean,
    worst), either None where there is no bar; what must be reached, and what is aimed at."""

    step: str
    low: int
    high: int | None
    must: tuple[float | None, float]
    aim: tuple[float | None, float]

    def __str__(self) -> str:
        tokens = f"{self.low} to {self.high}" if self.high else f"{self.low} and more"
        return f"{PASSES[self.step]}, {tokens} tokens"

    def holds(self, result: Result) -> bool:
        return result["pass"] == self.step and self.low <= result["n"] <= (self.high or result["n"])


RANGES = (
    Range("fwd", 129, None, (0.98, 1.08), (0.95, 1.02)),
    Range("fwd", 1, 128, (None, 1.10), (None, 1.00)),
    Range("fwd_bwd", 16, 128, (None, 1.12), (None, 1.03)),
    Range("fwd_bwd", 129, 511, (None, 1.15), (None, 1.05)),
    Range("fwd_bwd", 512, None, (1.01, 1.06), (0.98, 1.02)),
)

# Peers whose time ours may exceed by so much at the most, from 512 tokens and below. Of a peer's several
# pipelines (quack's chunks) the fastest at a shape counts.
PEERS = ("torch_compile", "quack")
FEW_TOKENS = 512
MOST_OF_PEER, MOST_OF_PEER_FEW = 1.03, 1.05


def times(result: Result) -> float:
    """The multiple of the floor."""
    return result["ms"] / result["floor_ms"]


def above_us(result: Result) -> float:
    """Microseconds above the floor."""
    return (result["ms"] - result["floor_ms"]) * 1e3


def is_short(result: Result) -> bool:
    return result["floor_ms"] < LEAST_FLOOR_MS


def where(result: Result) -> str:
    return f"{result['n']}, {result['d']}, {result['vocab']}"


def key_of(result: Result) -> tuple:
    """What ours and a peer's result have in common."""
    return tuple(result[name] for name in ("gpu", "n", "d", "vocab", "pass", "reduction"))


def comparable(results: Iterable[Result], dtype: str = "bf16") -> list[Result]:
    """bench.run's rows of one dtype, whether they failed or not, without sustained and frozen ones."""

    def counts(result: Result) -> bool:
        if "floor_ms" not in result or result["dtype"] != dtype or result.get("sustained_s"):
            return False
        # Without the float64 reference both are None.
        frozen = result["pass"] == "fwd_bwd" and (result["err_dh"] is None) != (result["err_dw"] is None)
        return not frozen

    return [result for result in results if counts(result)]


def measured(results: Iterable[Result], provider: str) -> dict[tuple, Result]:
    """A result of each shape, pass and reduction: ours of schedule "auto" with the most workspace, of several
    such the last; of a peer the fastest of those whose name begins so."""
    found: dict[tuple, Result] = {}
    for result in results:
        if result.get("failed") or not result["provider"].startswith(provider):
            continue
        if provider == OURS and result["schedule"] != "auto":
            continue
        other = found.setdefault(key_of(result), result)
        better = (
            (result["workspace_mb"] or 0, result["date"]) >= (other["workspace_mb"] or 0, other["date"])
            if provider == OURS
            else times(result) < times(other)
        )
        if better:
            found[key_of(result)] = result
    return found


def _worst(results: Sequence[Result], size: Callable[[Result], float], form: str) -> tuple[str, str]:
    """(the largest, where it is)"""
    if not results:
        return "-", "-"
    result = max(results, key=size)
    found = format(size(result), form)
    return "0" if found == "-0" else found, where(result)


def _bars(bars: tuple[float | None, float]) -> str:
    mean, worst = bars
    return f"{worst:.2f}" if mean is None else f"{mean:.2f}, {worst:.2f}"


RANGE_HEAD = (
    *("", "shapes", "geometric mean", "worst", "at n, d, V", "must", "aim"),
    *("short calls", "us above the floor, worst", "at n, d, V", "met"),
)


def range_rows(results: Iterable[Result]) -> list[list[str]]:
    """A row a range of tokens, of ours: beside the bars, which are multiples of the floor where it takes 0.3
    ms and more, and 70 us above it in shorter calls."""
    ours = list(measured(comparable(results), OURS).values())
    rows = []
    for each in RANGES:
        inside = [result for result in ours if each.holds(result)]
        long = [result for result in inside if not is_short(result)]
        short = [result for result in inside if is_short(result)]
        mean = geometric_mean(map(times, long)) if long else None
        missed = [
            each.must[0] is not None and mean is not None and round(mean, 3) > each.must[0],
            any(round(times(result), 3) > each.must[1] for result in long),
            any(round(above_us(result)) > MOST_ABOVE_US for result in short),
        ]
        rows.append(
            [
                *(str(each), str(len(long)), "-" if mean is None else f"{mean:.3f}"),
                *_worst(long, times, ".3f"),
                *(_bars(each.must), _bars(each.aim), str(len(short))),
                *_worst(short, above_us, ".0f"),
                "-" if not inside else "no" if any(missed) else "yes",
            ]
        )
    return rows


PEER_HEAD = (
    *("", "shapes", "geometric mean", "worst", "at n, d, V", "most"),
    *("short calls", "worst", "at n, d, V", "met"),
)


def peer_rows(results: Iterable[Result]) -> list[list[str]]:
    """A row a peer, pass and range of tokens: our multiple of the floor divided by the peer's. Short calls
    have no bar here."""
    rows_of_run = comparable(results)
    ours = measured(rows_of_run, OURS)
    rows = []
    for peer in PEERS:
        theirs = measured(rows_of_run, peer)
        pairs = {id(ours[key]): times(ours[key]) / times(theirs[key]) for key in ours.keys() & theirs.keys()}
        for step, few in ((step, few) for step in PASSES for few in (True, False)):
            inside = [
                result
                for result in ours.values()
                if id(result) in pairs and result["pass"] == step and (result["n"] < FEW_TOKENS) == few
            ]
            if not inside:
                continue

            def ratio(result: Result, pairs: dict[int, float] = pairs) -> float:
                return pairs[id(result)]

            long = [result for result in inside if not is_short(result)]
            short = [result for result in inside if is_short(result)]
            most = MOST_OF_PEER_FEW if few else MOST_OF_PEER
            tokens = f"fewer than {FEW_TOKENS}" if few else f"{FEW_TOKENS} and more"
            rows.append(
                [
                    f"{peer}, {PASSES[step]}, {tokens} tokens",
                    str(len(long)),
                    f"{geometric_mean(map(ratio, long)):.3f}" if long else "-",
                    *_worst(long, ratio, ".3f"),
                    f"{most:.2f}",
                    str(len(short)),
                    *_worst(short, ratio, ".3f"),
                    "-" if not long else "no" if any(round(ratio(r), 3) > most for r in long) else "yes",
                ]
            )
    return rows


def failures(results: Iterable[Result]) -> list[str]:
    """A line each provider and kind of failure: how often, and the first one's text."""
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    for result in comparable(results):
        if result.get("failed"):
            kind = result["provider"], result["failed"].partition(":")[0]
            counts[kind] += 1
            first.setdefault(kind, f"at {where(result)}, {PASSES[result['pass']]}: {result['failed']}")
    return [
        f"{provider}, {counts[provider, kind]} times, first {text}"
        for (provider, kind), text in first.items()
    ]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(results: Sequence[Result]) -> str:
    """Both tables of each GPU, and what failed."""
    parts = []
    for gpu in dict.fromkeys(result["gpu"] for result in comparable(results)):
        of_gpu = [result for result in results if result["gpu"] == gpu]
        parts += [
            f"{gpu}. Ours as a multiple of cuBLAS's GEMMs, where these take {LEAST_FLOOR_MS} ms and more; in "
            f"shorter calls microseconds above them, of which there may be {MOST_ABOVE_US}",
            markdown(RANGE_HEAD, range_rows(of_gpu)),
        ]
        if peers := peer_rows(of_gpu):
            parts += ["Our time divided by the peer's", markdown(PEER_HEAD, peers)]
        if failed := failures(of_gpu):
            parts.append("\n".join(["Not measured", *failed]))
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.summary", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="JSON", help="kept results of bench.run")
    args = parser.parse_args(argv)
    text = summary(records.read(args.files))
    print(text or "no results of bench.run in bf16")
    return 0 if text else 1


if __name__ == "__main__":
    sys.exit(main())
