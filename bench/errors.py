"""Compare the errors of loss, dH and dW against float64: those of cute_lce, torch and the peers, in bf16.

The yardstick is the error with fp32 logits (bf16 operands multiplied into fp32), dlogits rounded once to
bf16, and gradients accumulated in fp32 and rounded once; ours must stay within BARS times it. Errors are
relative RMS over the whole loss and both whole gradients, on rows of several kinds:

    untrained   logits of standard deviation 1
    mixed       in half of the rows the target's logit is 20 higher
    confident   the same in all rows
    jump_H      in every eighth row the logits of three columns are H higher
    offset_H    all logits are H higher; with --regimes alone

and over parts, since small errors would not show in the whole: the entries of dW that are no row's target
("no target"), the rows and columns that jump ("jumping"), and all others ("others"). Printed is each error as
a multiple of its yardstick, the largest over the parts; --parts prints all.

    python3 -m bench.errors --out bench/results/h100_errors.json
    python3 -m bench.errors --shapes 1000,1024,32003 --providers cute_lce torch_eager_bf16ce cce
    python3 -m bench.errors --show bench/results/h100_errors.json

Ends with status 1 if one of ours fails or misses a bar; a peer that fails or refuses says so in its row.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import providers, shapes, terms
from bench.yardstick import DTYPE, REGIMES, USUAL, Problem, Results, by_fp32_logits
from cute_lce import ops
from cute_lce.commands.terminal import new_file
from cute_lce.measure import records
from cute_lce.plan.problem import Limits
from cute_lce.plan.problem import Problem as Sizes

# The first is what nobody's divisibility suits; the second is served by most peers. Neither n nor V is a
# power of two.
SHAPES = {"cuda": ("1000,1024,32003", "1152,1024,32000"), "cpu": ("100,64,1003",)}

YARDSTICK = "fp32 logits"
BARS = {"err_loss": 2.0, "err_dh": 1.5, "err_dw": 1.8}
"""What ours may be, as a multiple of the yardstick's error."""

ERRORS = tuple(BARS)
MULTIPLES = tuple(key.replace("err", "x") for key in ERRORS)
KEYS = (
    *("gpu", "provider", "schedule", "kept", "workspace_mb", "reduction", "n", "d", "vocab", "dtype"),
    *("terms", "regime", "part", *ERRORS, *MULTIPLES, "failed"),
    *("versions", "date", "command"),
)


# Who is compared.


@dataclass(frozen=True)
class Candidate:
    """A way to the loss and its gradients. kept: columns, of cute_lce's "keep"."""

    provider: str
    schedule: str | None = None
    kept: int | None = None
    workspace_mb: float | None = None

    def __str__(self) -> str:
        words = [self.provider, self.schedule, None if self.kept is None else f"({self.kept} columns)"]
        return " ".join(word for word in words if word)


def budget(shape: shapes.Shape, device: torch.device, share: float) -> tuple[float, int]:
    """(workspace_mb, columns) with which "keep" keeps as near to `share` of the vocabulary as can be."""
    choose = ops.implementation(device, DTYPE).choose
    sizes = Sizes(shape.n, shape.d, shape.vocab)
    wanted = share * shape.vocab
    best: tuple[float, int] | None = None
    # From 64 KiB in steps of 2%, beyond all that anyone would keep.
    for step in range(900):
        workspace = int(65536 * 1.02**step)
        try:
            kept = choose(sizes, DTYPE, device, "keep", "mean", Limits(workspace=workspace))[1]
        except ValueError:
            continue  # Too little for anything.
        if best is None or abs(kept - wanted) < abs(best[1] - wanted):
            best = workspace / 2**20, kept
        if kept == shape.vocab:
            break
    if best is None:
        raise RuntimeError(f"{shape}: no workspace is enough to keep anything")
    return best


def candidates(
    names: Sequence[str], shape: shapes.Shape, device: torch.device, has_terms: bool
) -> Iterator[Candidate]:
    for name in names:
        if name != "cute_lce":
            yield Candidate(name)
            continue
        yield Candidate(name, "recompute")
        if has_terms:  # What is kept of these needs other budgets.
            yield Candidate(name, "keep", shape.vocab, shapes.ample(shape))
            continue
        for share in (0.5, 1.0):
            workspace_mb, kept = budget(shape, device, share)
            yield Candidate(name, "keep", kept, workspace_mb)


def results_of(function: providers.LossFn, problem: Problem) -> Results:
    hidden, weight = (t.detach().clone().requires_grad_() for t in (problem.hidden, problem.weight))
    loss = function(hidden, weight, problem.target)
    loss.backward(problem.upstream.to(loss.dtype) if problem.reduction == "none" else None)
    if hidden.grad is None or weight.grad is None:
        raise RuntimeError("gave no gradient")
    return loss.detach().view(problem.loss_shape), hidden.grad, weight.grad


def compare(call: Callable[[Problem], Results], problem: Problem) -> Iterator[dict[str, Any]]:
    """The measured keys of a candidate's results, a dictionary a part; one without a part if it fails."""
    try:
        found = problem.errors(call(problem))
    except Exception as error:  # A peer that fails is a finding; the others go on.
        # Some compilers colour their messages.
        words = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split()
        text = f"{type(error).__name__}: {' '.join(words)[:300]}"
        yield {"part": "all", "failed": text}
        return
    for part, errors in found.items():
        measured: dict[str, Any] = {"part": part, "failed": None}
        for key, error in errors.items():
            measured[key] = error
            yardstick = problem.yardstick[part][key]
            if error is not None and yardstick is not None:
                measured[key.replace("err", "x")] = error / yardstick if yardstick > 0 else None
        yield measured


def misses(result: dict[str, Any], yardstick: dict[str, dict[str, float | None]]) -> list[str]:
    """What a result of ours lacks, in words; `yardstick`: part -> its errors."""
    if result["failed"] is not None:
        return [f"failed, {result['failed']}"]
    found = []
    for key, most in BARS.items():
        error, unit = result[key], yardstick[result["part"]][key]
        # A nan is no less than anything.
        if error is not None and unit is not None and not error <= most * unit:
            found.append(f"{key} {error:.2e}, want at most {most:g} x {unit:.2e}")
    return found


# The program.


def _title(result: dict[str, Any]) -> str:
    terms = f", {result['terms']}" if result.get("terms") else ""
    return f"n {result['n']}, d {result['d']}, V {result['vocab']}, {result['reduction']}{terms}"


def _name(result: dict[str, Any]) -> str:
    kept = "" if result["kept"] is None else f"{result['kept'] / result['vocab']:.0%}"
    return " ".join(word for word in (result["provider"], result["schedule"], kept) if word)


def _grouped(results: Sequence[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> dict[Any, list]:
    groups: dict[Any, list] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


def _form(value: Any, form: str) -> str:
    return "-" if value is None else value if isinstance(value, str) else format(value, form)


def _size(value: float | str) -> float:
    """To compare by: text stands for what is not finite, and nothing is worse than nan."""
    return math.inf if math.isnan(float(value)) else float(value)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Multiples of the yardstick, the largest over the parts: a line a candidate, a column a regime."""
    bars = "/".join(f"{bar:g}" for bar in BARS.values())
    lines = []
    for title, group in _grouped(results, _title).items():
        lines += ["", f"{title}: loss/dH/dW as multiples of {YARDSTICK}; bars of ours {bars}"]
        regimes = [regime for regime in REGIMES if any(r["regime"] == regime for r in group)]
        rows = [["", *regimes]]
        for name, of_name in _grouped(group, _name).items():
            cells = []
            for regime in regimes:
                parts = [r for r in of_name if r["regime"] == regime]
                failed = [r["failed"] for r in parts if r["failed"] is not None]
                if failed:
                    cells.append("-" if failed[0].startswith(providers.Unavailable.__name__) else "fails")
                    continue
                values = ([r[key] for r in parts if r[key] is not None] for key in MULTIPLES)
                cells.append("/".join(_form(max(v, key=_size, default=None), ".3g") for v in values))
            rows.append([name, *cells])
            if name == YARDSTICK:
                whole = {r["regime"]: r for r in of_name if r["part"] == "all"}
                values = ["/".join(_form(whole[g][key], ".0e") for key in ERRORS) for g in regimes]
                rows.append(["  its errors, of the whole", *values])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            lines.append("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())
        for name, of_name in _grouped([r for r in group if r["failed"] is not None], _name).items():
            lines += [f"{name}: {text}" for text in dict.fromkeys(r["failed"] for r in of_name)]
    return "\n".join(lines)


def table_of_parts(results: Sequence[dict[str, Any]]) -> str:
    """Every error and its multiple of the yardstick: a line a candidate, regime and part."""
    lines = []
    for (title, regime), group in _grouped(results, lambda r: (_title(r), r["regime"])).items():
        lines += ["", f"{title}, {regime}", f"  {'':30}{'part':12}{'loss':>18}{'dH':>18}{'dW':>18}"]
        for r in group:
            if r["failed"] is not None:
                lines.append(f"  {_name(r):30}{r['failed']}")
                continue
            cells = (
                f"{_form(r[error], '.1e')} {'x' + _form(r[times], '.3g') if r[error] is not None else '':9}"
                for error, times in zip(ERRORS, MULTIPLES, strict=True)
            )
            lines.append(f"  {_name(r):30}{r['part']:12}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def calls(
    args: argparse.Namespace, shape: shapes.Shape, some: Problem
) -> Iterator[tuple[Candidate, Callable[[Problem], Results]]]:
    """Who is compared, each with what computes its results; the yardstick first. some: a problem."""
    on_gpu = args.device.type == "cuda"
    yield Candidate(YARDSTICK), lambda problem: by_fp32_logits(problem, widen=not on_gpu)
    if on_gpu:
        # How much of it are the sums of tensor cores.
        yield Candidate("fp32 operands"), lambda problem: by_fp32_logits(problem, widen=True)
    for candidate in candidates(args.providers, shape, args.device, some.given is not None):
        request = providers.Request(
            some.reduction, candidate.schedule or "auto", candidate.workspace_mb, logits=shape.n * shape.vocab
        )
        # Made once for all regimes: some compile.
        make = functools.cache(functools.partial(_function, candidate.provider, request, some))
        yield candidate, lambda problem, make=make: results_of(make(), problem)


def _function(provider: str, request: providers.Request, some: Problem) -> providers.LossFn:
    if some.given is None:
        return providers.make(provider, request)
    return terms.loss(provider, some.given, request, some.hidden, some.weight)


def run_all(args: argparse.Namespace, command: str) -> tuple[list[dict[str, Any]], list[str]]:
    """(results, what ours missed)."""
    results: list[dict[str, Any]] = []
    missed: list[str] = []
    print(f"{records.describe_device(args.device)}; {records.versions()}", flush=True)
    for shape, reduction, given in itertools.product(args.shapes, args.reduction, args.terms):
        problems = [Problem(shape, regime, reduction, args.device, given) for regime in args.regimes]
        for candidate, call in calls(args, shape, problems[0]):
            started = time.perf_counter()
            failures = []
            for problem in problems:
                what = dataclasses.asdict(candidate) | {"reduction": reduction, "regime": problem.regime}
                what |= {"n": shape.n, "d": shape.d, "vocab": shape.vocab, "dtype": "bf16", "terms": given}
                for measured in compare(call, problem):
                    result = dict.fromkeys(KEYS) | what | measured | records.provenance(args.device, command)
                    if candidate.provider == "cute_lce":
                        words = (shape, reduction, given or "", candidate, problem.regime)
                        label = f"{' '.join(map(str, words))}, {result['part']}"
                        missed += [f"{label}: {text}" for text in misses(result, problem.yardstick)]
                    failures += [result["failed"]] if result["failed"] else []
                    results.append({key: records.finite_or_text(value) for key, value in result.items()})
            gc.collect()
            seconds = time.perf_counter() - started
            print(f"{shape} {reduction} {candidate}: {seconds:.1f} s", *failures[:1], flush=True)
            if args.out is not None:
                records.write(args.out, results)
    return results, missed


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.errors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", nargs="+", help=f"n,d,V ({' '.join(SHAPES['cuda'])}; on a CPU {' '.join(SHAPES['cpu'])})")
    add("--providers", nargs="+", default=["all"], metavar="NAME", help="all, or names of bench.run's")
    add("--reduction", nargs="+", default=["mean", "none"], choices=("mean", "none"))
    add(
        "--terms",
        nargs="+",
        default=["none"],
        metavar="TERMS",
        help="none, or what bench.run's option means, but for weight, denominator and log_cap",
    )
    add("--regimes", nargs="+", default=list(USUAL), choices=REGIMES)
    add("--device", default="auto", help="auto, cuda or cpu (%(default)s: a GPU if there is one)")
    add("--out", type=new_file, help="JSON file for the results, written after each provider")
    add("--parts", action="store_true", help="print every error, by parts")
    add("--show", nargs="+", type=Path, metavar="JSON", help="print kept results and measure nothing")
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(args.device)
    try:
        args.providers = providers.names(args.providers)
        texts = args.shapes or SHAPES[args.device.type]
        args.shapes = [shape for text in texts for shape in shapes.parse(text)]
        args.terms = terms.of_option(args.terms)
        for text in args.terms:
            if text is not None:
                terms.check_logits(text)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    show = table_of_parts if args.parts else table
    if args.show:
        kept = records.read(args.show)
        print(show([result for result in kept if "regime" in result]))
        return 0
    words = sys.argv[1:] if argv is None else argv
    results, missed = run_all(args, f"python3 -m bench.errors {shlex.join(words)}")
    print(show(results))
    print()
    if missed:
        print("OURS MISS THEIR BARS", *missed, sep="\n  ")
        return 1
    print("ours are within their bars" if "cute_lce" in args.providers else "ours were not measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
