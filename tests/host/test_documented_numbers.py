"""The measured numbers in README.md and docs (measurements, tuning, arguments, algorithm, parallel, losses)
are those of bench/results.

A comment before each table names the file, or all files, that it is made from, and the function below that
makes its rows:

    <!-- bench/results/h100_forward.json: forward -->

`python -m tests.host.test_documented_numbers` prints every table's rows and every checked sentence.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench import grid, shapes, summary
from bench.accumulation import WAYS
from bench.kept_logits import WAYS as SIMULATED
from bench.kept_reference import REFERENCES
from bench.partial import WAYS as ADDED
from cute_lce.measure.records import read

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
README, MEASUREMENTS, TUNING = "README.md", "docs/measurements.md", "docs/tuning.md"
ARGUMENTS = "docs/arguments.md"
ALGORITHM, PARALLEL = "docs/algorithm.md", "docs/parallel.md"
LOSSES = "docs/losses.md"
SOURCE = re.compile(r"<!-- bench/results/([\w/*]+\.json): (\w+) -->")
UNKEPT = "<!-- printed, not kept -->"

Record = dict[str, Any]
# A cell as it is printed. None: nothing was measured, and the document says why in words.
Cell = str | None
Rows = list[list[Cell]]


@cache
def records(file: str) -> list[Record]:
    return read([RESULTS / file])


def find(file: str, **fields: Any) -> Record | None:
    """The record with these fields, the first of several; None where there is none, or where it failed."""
    matches = (
        r
        for r in records(file)
        if all(r[name] == value for name, value in fields.items()) and not r.get("failed")
    )
    return next(matches, None)


def get(file: str, **fields: Any) -> Record:
    record = find(file, **fields)
    assert record is not None, f"{file}: no record with {fields}"
    return record


def ratio(record: Record) -> float:
    """A time as a multiple of its floor."""
    return record["ms"] / record["floor_ms"]


def at(shape: shapes.Shape) -> dict[str, int]:
    return {"n": shape.n, "d": shape.d, "vocab": shape.vocab}


def sizes(shape: shapes.Shape) -> str:
    return f"{shape.n}, {shape.d}, {shape.vocab}"


def met(ratios: Iterable[float], bar: float) -> str:
    return "yes" if all(round(value, 3) <= bar for value in ratios) else "no"


# Tables: a function for each, the name of its file -> rows


def forward(file: str) -> Rows:
    rows: Rows = []
    for shape in shapes.FORWARD:
        ours = get(file, provider="cute_lce", **at(shape))
        quack = find(file, provider="quack_chunk8k", **at(shape))
        ((_, bar),) = shape.bars
        assert bar is not None
        rows.append(
            [
                sizes(shape),
                f"{ours['ms']:.2f}",
                f"{ours['floor_ms']:.2f}",
                f"**{ratio(ours):.3f}**",
                f"{bar:.2f}",
                met([ratio(ours)], bar),
                f"{ratio(quack):.3f}" if quack else None,
                f"{ours['extra_mib']:.1f}",
            ]
        )
    return rows


def sustained(file: str) -> Rows:
    ours = [record for record in records(file) if record["provider"] == "cute_lce"]
    rows: Rows = []
    for record in ours:
        where = {name: record[name] for name in ("n", "d", "vocab")}
        quack = get(file, provider="quack_chunk8k", **where)
        rows.append([", ".join(map(str, where.values())), f"**{ratio(record):.3f}**", f"{ratio(quack):.3f}"])
    return rows


def trained(file: str, shape: shapes.Shape, workspace: float | None) -> list[Record]:
    """Ours with both gradients, or with one, for "mean" and "none"."""
    return [
        next(
            record
            for record in records(file)
            if record["provider"] == "cute_lce"
            and all(record[name] == size for name, size in at(shape).items())
            and (record["workspace_mb"], record["reduction"]) == (workspace, reduction)
            # Before records said what is frozen: errors are missing of what is.
            and record.get("frozen", None if record["err_dw"] else "weight") == (shape.frozen or None)
        )
        for reduction in ("mean", "none")
    ]


def backward(file: str) -> Rows:
    rows: Rows = []
    for shape in shapes.BACKWARD:
        for workspace, bar in () if shape.frozen else shape.bars:
            assert bar is not None
            mean, none = trained(file, shape, workspace)
            rows.append(
                [
                    sizes(shape),
                    str(workspace),
                    f"{mean['ms']:.2f}",
                    f"**{ratio(mean):.3f}**",
                    f"**{ratio(none):.3f}**",
                    f"{bar:.2f}",
                    met([ratio(mean), ratio(none)], bar),
                    f"{mean['extra_mib']:.0f}",
                    f"{mean['err_loss']:.0e}",
                    f"{mean['err_dh']:.1e}",
                    f"{mean['err_dw']:.1e}",
                ]
            )
    return rows


def frozen(file: str) -> Rows:
    """Against the floor of the call that forms both gradients; the record's own leaves dW out."""
    shape = next(shape for shape in shapes.BACKWARD if shape.frozen)
    floors = three_gemms(file)
    rows: Rows = []
    for workspace, bar in shape.bars:
        assert bar is not None
        pair = trained(file, shape, workspace)
        ratios = [record["ms"] / floor for record, floor in zip(pair, floors, strict=True)]
        assert met(ratios, bar) == "yes"
        rows.append(
            [
                str(workspace),
                ", ".join(f"{record['ms']:.2f}" for record in pair),
                ", ".join(f"{value:.3f}" for value in ratios),
                f"{bar:.2f}",
                f"{pair[0]['extra_mib']:.0f}",
            ]
        )
    return rows


def three_gemms(file: str) -> list[float]:
    """The floors of "mean" and "none" at the first shape of the backward's table."""
    shape = shapes.BACKWARD[0]
    return [record["floor_ms"] for record in trained(file, shape, shape.bars[0][0])]


PEERS = (
    "liger_cute_flce",
    "quack_chunk8k",
    "torch_compile",
    "torch_eager_bf16ce",
    "liger_cute_scaled_ce",
    "liger_triton",
)


def peers(file: str) -> Rows:
    """x the three GEMMs, and MiB; each shape with "mean" and "none"."""
    rows: Rows = []
    for place, name in enumerate(("**cute_lce**, more memory", "**cute_lce**, less memory")):
        pairs = [
            trained(file, shape, (shape.bars[0], shape.bars[-1])[place][0]) for shape in shapes.BACKWARD[:2]
        ]
        rows.append([name, *(f"**{ratio(r):.3f}**, {r['extra_mib']:.0f}" for pair in pairs for r in pair)])
    for provider in PEERS:
        found = [
            find(file, provider=provider, reduction=reduction, **at(shape))
            for shape in shapes.BACKWARD[:2]
            for reduction in ("mean", "none")
        ]
        rows.append([provider, *(f"{ratio(r):.3f}, {r['extra_mib']:.0f}" if r else None for r in found)])
    return rows


NAMES = {
    "liger_cute_flce": ("Liger-Kernel", "liger-kernel"),
    "liger_cute_scaled_ce": ("Liger-Kernel", "liger-kernel"),
    "liger_triton": ("Liger-Kernel", "liger-kernel"),
    "quack_chunk8k": ("quack", "quack-kernels"),
    "torch_compile": ("torch", "torch"),
    "torch_eager_bf16ce": ("torch", "torch"),
}
"""Provider -> its package as it is called, and as `versions` has it."""


def readme(file: str) -> Rows:
    """Of `peers` the first shape and "mean", with the packages' versions."""
    shape = shapes.BACKWARD[0]
    rows: Rows = []
    for workspace, _ in (shape.bars[0], shape.bars[-1]):
        ours, _ = trained(file, shape, workspace)
        rows.append([f"**cute_lce**, `workspace_mb={workspace}`", *_time_and_memory(ours)])
    for provider in PEERS:
        record = get(file, provider=provider, reduction="mean", **at(shape))
        name, package = NAMES[provider]
        version = record["versions"][package].partition("+")[0]
        rows.append([f"{name} {version}, `{provider}`", *_time_and_memory(record)])
    return rows


def _time_and_memory(record: Record) -> list[str]:
    return [f"{record['ms']:.1f}", f"{ratio(record):.3f}", f"{record['extra_mib']:.0f}"]


ERRORS = (
    *(("fp32 operands", None, None), ("cute_lce", "recompute", None)),
    *(("cute_lce", "keep", 16128), ("cute_lce", "keep", 32000)),
    *((name, None, None) for name in ("torch_eager_fp32ce", "torch_eager_bf16ce", "torch_compile")),
    *((name, None, None) for name in ("quack_chunk8k", "quack_base", "liger_triton", "liger_cute_flce")),
    *((name, None, None) for name in ("liger_cute_scaled_ce", "cce", "cce_exact")),
)
REGIMES = ("untrained", "mixed", "confident", "jump_50", "jump_100", "jump_300")
MULTIPLES = ("x_loss", "x_dh", "x_dw")


def errors(file: str) -> Rows:
    rows: Rows = []
    for provider, schedule, kept in ERRORS:
        name = provider if schedule is None else f"**{provider}** {schedule}"
        if kept is not None:
            name += f" {kept / 32000:.0%}"
        cells: list[Cell] = [name]
        for regime in REGIMES:
            parts = [
                record
                for record in records(file)
                if (record["provider"], record["schedule"], record["kept"]) == (provider, schedule, kept)
                and (record["regime"], record["reduction"], record["n"]) == (regime, "mean", 1152)
            ]
            cells.append(", ".join(_worst(record[key] for record in parts) for key in MULTIPLES))
        rows.append(cells)
    return rows


TERM_NAMES = {
    "cute_lce": "**cute_lce**",
    "torch_eager_fp32ce": "torch, 16-bit logits",
    "torch_compile": "torch.compile, 16-bit logits",
    "liger_cute_scaled_ce": "Liger's scaled loss",
    "liger_cute_flce": "Liger's CuTe loss",
    "liger_triton": "Liger's Triton loss",
    "cce": "CCE, with its filter",
    "cce_exact": "CCE, exact",
    "trl": "TRL",
    "verl": "verl",
}


def term_errors(file: str) -> Rows:
    """By terms and provider, of each regime."""
    found: Rows = []
    regimes = [regime for regime in REGIMES[:3] if any(r["regime"] == regime for r in records(file))]
    for given in dict.fromkeys(record["terms"] for record in records(file)):
        here = [record for record in records(file) if record["terms"] == given]
        for provider, name in TERM_NAMES.items():
            mine = [record for record in here if record["provider"] == provider]
            if not mine:
                continue
            cells: list[Cell] = [given, name]
            for regime in regimes:
                parts = [r for r in mine if r["regime"] == regime and r["failed"] is None]
                cells.append(", ".join(_worst(r[key] for r in parts) for key in MULTIPLES) if parts else "-")
            found.append(cells)
    return found


def _worst(values: Iterable[float | str | None]) -> str:
    """The largest of the parts that have the error, nan where one of them is not finite."""
    numbers = [float(value) for value in values if value is not None]
    return "nan" if any(number != number for number in numbers) else f"{max(numbers):.3g}"


HOST_TIMES = (
    *(("cute_lce", "auto", None), ("cute_lce", "recompute", 8), ("cute_lce", "keep", None)),
    *((name, None, None) for name in ("torch_eager_bf16ce", "torch_compile", "quack_base", "quack_chunk8k")),
    *((name, None, None) for name in ("cce", "liger_cute_flce", "liger_triton")),
)


def host_time(file: str) -> Rows:
    rows: Rows = []
    for provider, schedule, stripes in HOST_TIMES:
        name = provider if schedule is None else f"**{provider}** {schedule}"
        name += "" if stripes is None else f", {stripes} stripes"
        found = [
            get(file, provider=provider, schedule=schedule, stripes=stripes, **{"pass": step})
            for step in ("fwd", "fwd_grad", "bwd")
        ]
        rows.append([name, *(f"{record['us']:.1f}, {record['launches']}" for record in found)])
    return rows


def host_side(file: str) -> Rows:
    cases = {
        "fwd": "forward without a gradient",
        "recompute fwd_grad": "forward, recompute",
        "keep fwd_grad": "forward, keep",
        "recompute bwd": "backward, recompute, 1 stripe",
        "keep bwd": "backward, keep",
        "8 stripes fwd_grad": "forward, recompute, 8 windows",
        "8 stripes bwd": "backward, recompute, 8 stripes",
    }
    found = [(name, get(file, case=case)) for case, name in cases.items()]
    # Of minimum, 5th percentile, first quartile and median the third.
    return [[name, str(record["before"][2]), str(record["after"][2])] for name, record in found]


def ranges(file: str) -> Rows:
    """bench.summary's, without the bars."""
    return [[*row[:5], *row[7:10]] for row in summary.range_rows(records(file))]


def beside(file: str) -> Rows:
    """bench.summary's of each peer, without the bars and the short calls."""
    return [[*row[:5]] for row in summary.peer_rows(records(file))]


def accumulation(file: str) -> Rows:
    """The sum's error, by rows, batches and way."""
    names = {
        "untrained": "untrained",
        "mixed": "the first half of the batches confident",
        "confident": "confident",
    }
    kinds = dict.fromkeys((record["rows"], record["batches"]) for record in records(file))
    found: Rows = []
    for rows, batches in kinds:
        errors = [get(file, rows=rows, batches=batches, way=way)["err_dw"] for way in WAYS]
        found.append([names[rows], str(batches), *(f"{each:.1e}".replace("e-0", "e-") for each in errors)])
    return found


def kept_logits(file: str) -> Rows:
    """Errors of both gradients, by operands' dtype, the logits' deviation and way."""
    found: Rows = []
    for dtype, deviation in dict.fromkeys((each["dtype"], each["deviation"]) for each in records(file)):
        cells = []
        for way in SIMULATED:
            record = find(file, dtype=dtype, deviation=deviation, way=way)
            errors = [record["err_dh"], record["err_dw"]] if record else []
            cells.append(", ".join(f"{each:.1e}".replace("e-0", "e-") for each in errors) or "-")
        found.append([dtype, f"{deviation:g}", *cells])
    return found


def partial(file: str) -> Rows:
    """Errors of the gradient by input, by rows, ranks and way."""
    found: Rows = []
    for rows, ranks in dict.fromkeys((each["rows"], each["ranks"]) for each in records(file)):
        errors = [get(file, rows=rows, ranks=ranks, way=way)["err_dh"] for way in ADDED]
        found.append([rows, str(ranks), *(f"{each:.2e}".replace("e-0", "e-") for each in errors)])
    return found


def kept_reference(file: str) -> Rows:
    """Rows that are raised, and rescaled, by type, rows, the logits' deviation and whose logit K is of."""
    found: Rows = []
    names = "dtype", "rows", "deviation"
    for key in dict.fromkeys(tuple(each[name] for name in names) for each in records(file)):
        of = [get(file, reference=which, **dict(zip(names, key, strict=True))) for which in REFERENCES]
        cells = [f"{each['raised']}, {each['rescaled']}" for each in of]
        found.append([*key[:2], f"{key[2]:g}", *cells])
    return found


def confident(file: str) -> Rows:
    """Errors in confident rows, by temperature and way: of the numbers, and of dH for each and for both."""
    rows: Rows = []
    for record in records(file):
        if record["temperature"] not in (1.0, 0.7, 0.5):
            continue
        groups = ("err_logprob", "err_entropy"), [f"err_dh_{name}" for name in ("logprob", "entropy", "both")]
        cells = [", ".join(f"{record[key]:.1e}".replace("e-0", "e-") for key in keys) for keys in groups]
        last = (f"{record[key]:.1e}".replace("e-0", "e-") for key in ("largest", "err_dh_both_all"))
        rows.append([f"{record['temperature']:g}", record["way"], *cells, *last])
    return rows


def of_two_commits(file: str) -> Rows:
    """Every record: multiples of the floor by both commits, their ratio, and that of the times."""
    return [
        [
            f"{record['n']}, {record['d']}, {record['vocab']}",
            {"fwd": "forward", "fwd_bwd": "both"}[record["pass"]]
            + (", weight frozen" if record["frozen"] else ""),
            str(record["workspace_mb"] or ""),
            f"{record['old_x']:.3f}",
            f"{record['new_x']:.3f}",
            f"{record['new_x'] / record['old_x']:.3f}",
            f"{record['new_ms'] / record['old_ms']:.3f}",
        ]
        for record in records(file)
    ]


def groups(file: str) -> Rows:
    """Of forwards in the plan's tiles, other groups of columns: their times relative to the plan's, in turn
    and back to back; of several measurements the mean."""
    found: dict[tuple, list[Record]] = {}
    plan: Record = {}
    for record in records(file):
        if record["chosen"]:
            plan = record
        same = ("n", "tile_n", "tile_m", "windows", "paced")
        if record["group"] != plan["group"] and all(record[key] == plan[key] for key in same):
            key = record["n"], record["d"], record["vocab"], plan["group"], record["group"]
            found.setdefault(key, []).append(record)
    kinds = "ratio", "sustained_ratio"
    return [
        [
            f"{n}, {d}, {vocab}",
            f"{of[0]['windows']} of {of[0]['tiles_per_window']}",
            str(planned),
            str(group),
            *(f"{statistics.mean(record[kind] for record in of):.3f}" for kind in kinds),
        ]
        for (n, d, vocab, planned, group), of in found.items()
    ]


def by_three_gemms(file: str) -> Rows:
    """Every record: what it is of, and its time as a multiple of three GEMMs of all tokens; a floor that
    lacks a frozen operand's is taken to be two of the three."""
    found: Rows = []
    for record in records(file):
        gemms = record["floor_ms"] * (1.5 if record.get("frozen") else 1)
        what = [record["schedule"], record["reduction"]]
        what += [f"{record['frozen']} frozen"] if record.get("frozen") else []
        what += [f"added to {record['grad_weight_out']}"] if record.get("grad_weight_out") else []
        what += [f"ignored {record['ignored']}"] if record.get("ignored") else []
        found.append(
            [
                f"{record['n']}, {record['d']}, {record['vocab']}",
                ", ".join(what),
                str(record["workspace_mb"]),
                f"{record['ms']:.2f}",
                f"{record['ms'] / gemms:.3f}",
                f"{record['extra_mib']:.0f}",
            ]
        )
    return found


def budgets(file: str) -> Rows:
    """Forward and backward of both gradients, by workspace."""
    return [
        [str(workspace), f"{record['ms']:.2f}", f"{ratio(record):.3f}", f"{record['extra_mib']:.0f}"]
        for workspace, _ in shapes.BACKWARD[0].bars
        for record in [get(file, workspace_mb=workspace, **{"pass": "fwd_bwd"}, **at(shapes.BACKWARD[0]))]
    ]


def over_gpus(file: str) -> Rows:
    """Times and per-GPU efficiencies of calls over several GPUs."""
    return [
        [
            f"{record['n']}, {record['d']}, {record['vocab']}",
            record["case"],
            f"{record['ms']:.2f}",
            f"{record['ms_idle']:.2f}",
            f"{record['efficiency']:.3f}",
            f"{record['extra_mib']:.0f}",
        ]
        for record in records(file)
    ]


def by_terms(file: str) -> Rows:
    """Calls with terms: times, as multiples of the GEMMs, and of the call's without any."""
    plain = {record["pass"]: record for record in records(file) if record["terms"] is None}
    return [
        [
            record["terms"] or "none",
            "forward" if record["pass"] == "fwd" else "both",
            f"{record['ms']:.2f}",
            f"{ratio(record):.3f}",
            f"{record['ms'] / plain[record['pass']]['ms']:.3f}",
        ]
        for record in records(file)
    ]


def by_budget(file: str) -> Rows:
    """Calls with terms, x the GEMMs and x the call without any: "auto" in each workspace, and recomputed."""
    ways = dict.fromkeys((record["schedule"], record["workspace_mb"]) for record in records(file))
    least = min(workspace for _, workspace in ways)
    ways = [way for way in ways if way[0] == "auto" or way[1] == least]
    rows: Rows = []
    for passes, given in dict.fromkeys((record["pass"], record["terms"]) for record in records(file)):
        row: list[Cell] = [given or "none", "forward" if passes == "fwd" else "both"]
        for schedule, workspace in ways:
            same = {"pass": passes, "schedule": schedule, "workspace_mb": workspace}
            mine, plain = (get(file, terms=terms, **same) for terms in (given, None))
            row.append(f"{ratio(mine):.3f}, {mine['ms'] / plain['ms']:.3f}")
        rows.append(row)
    return rows


TWO_FORMATS = "2026-11-29"
REPLACED = ("topk=64", "topk=8", "logprob,lse,topk=8", "label_smoothing=0.1")
"""Terms whose calls kept something else before that day."""


def back_to_back(file: str) -> Rows:
    """Calls with terms, each of a file's runs x the call without any; and the first run's x the GEMMs."""
    rows: Rows = []
    for terms in dict.fromkeys(record["terms"] for record in records(file)):
        if terms in REPLACED and records(file)[0]["date"] < TWO_FORMATS:
            continue
        row: list[Cell] = [terms or "none"]
        for d, passes in itertools.product((4096, 2048), ("fwd", "fwd_bwd")):
            mine, plain = (
                [
                    each
                    for each in records(file)
                    if (each["terms"], each["d"], each["pass"]) == (given, d, passes)
                ]
                for given in (terms, None)
            )
            assert len(mine) == len(plain) > 1
            multiples = " ".join(
                f"{each['ms'] / other['ms']:.3f}" for each, other in zip(mine, plain, strict=True)
            )
            row.append(f"{multiples}; {ratio(mine[0]):.3f}")
        rows.append(row)
    return rows


def by_heads(file: str) -> Rows:
    """Several heads: milliseconds of each way, and of one call as a multiple of the heads' GEMMs."""
    keys = ("n", "d", "vocab", "heads", "pass")
    rows: Rows = []
    for case in dict.fromkeys(tuple(record[key] for key in keys) for record in records(file)):
        ms = {
            way: get(file, way=way, **dict(zip(keys, case, strict=True)))["ms"]
            for way in ("GEMMs", "one pass", "heads", "calls")
        }
        n, d, vocab, heads, passes = case
        rows.append(
            [
                f"{n}, {d}, {vocab}",
                str(heads),
                "forward" if passes == "fwd" else "both",
                *(f"{each:.2f}" for each in ms.values()),
                f"{ms['heads'] / ms['GEMMs']:.3f}",
            ]
        )
    return rows


def term_peers(file: str) -> Rows:
    """By terms and provider: the forward's time, that of both passes, and memory."""
    rows: Rows = []
    for given in dict.fromkeys(record["terms"] for record in records(file)):
        ways = dict.fromkeys((r["provider"], r["workspace_mb"]) for r in records(file) if r["terms"] == given)
        for provider, workspace in ways:
            same = {"terms": given, "provider": provider, "workspace_mb": workspace}
            forward, both = (get(file, **same, **{"pass": step}) for step in ("fwd", "fwd_bwd"))
            name = (
                f"{TERM_NAMES[provider]}, `workspace_mb={workspace}`" if workspace else TERM_NAMES[provider]
            )
            times = (f"{record['ms']:.1f}, {ratio(record):.3f}" for record in (forward, both))
            rows.append([given, name, *times, f"{both['extra_mib']:.0f}"])
    return rows


COSTS = {
    "`logit_scale`": "logit_scale=0.5",
    "`softcap`": "softcap=30",
    "`softcap`, a `LogitTerm`": "log_cap=30",
    "`linear_bias`": "linear_bias",
    "`weight`": "weight",
    "`label_smoothing`": "label_smoothing=0.1",
    "`z_loss`": "z_loss=1e-4",
    "`token_weight`": "token_weight",
    "`denominator`": "denominator=100",
    "`logprob`": "logprob",
    "`logprob`, a tensor of temperatures": "logprob,temperatures",
    "`logprob`, `lse`": "logprob,lse",
    "`logprob`, `entropy`": "logprob,entropy",
    "the same at temperature 0.7": "logprob,entropy,temperature=0.7",
    "the same with `entropy_grad=False`": "logprob,entropy_read,temperature=0.7",
    "`topk_logprob` of 64 ids": "topk=64",
    "`topk_logprob` of 8 ids": "topk=8",
    "`logprob`, `argmax`, `is_top1`, `mean_logit`": "logprob,argmax,is_top1,mean_logit",
}
"""A row's name -> its --terms."""
COST_FILES = (
    "h200_terms",
    "h200_kept_logits",
    "h200_topk",
    "h100_sustained_terms",
    "h100_sustained_losses",
    "h200_sustained_losses",
)
"""What the names of files with such rows begin with; `sustained`: measured back to back."""
IN_LOG_CAP = ("log_cap=30", "logprob,argmax,is_top1,mean_logit")
"""Rows that are looked up in h200_log_cap*.json too: in one of these the call without terms was slow."""


def term_costs(pattern: str) -> Rows:
    """The time of a call with a term as a multiple of the call's without, forward and both passes: with all
    columns kept ("auto" in the largest workspace of a file), and recomputed; d = 4096 and 2048. Of several
    files the newest."""
    found: dict[tuple, tuple[str, float]] = {}
    for path in RESULTS.glob(pattern):
        terms = [*COSTS.values()] if path.name.startswith(COST_FILES) else []
        terms = [*IN_LOG_CAP] if path.name.startswith("h200_log_cap") else terms
        for key, (date, multiple) in _multiples(path.name, terms).items():
            kept_logits = date >= TWO_FORMATS or path.name.startswith("h200_kept_logits")
            if key[0] in REPLACED and key[1] == "auto" and not kept_logits:
                continue
            found[key] = max(found.get(key, ("", 0.0)), (date, multiple))
    rows: Rows = []
    for name, terms in COSTS.items():
        row: list[Cell] = [name]
        for d, schedule in itertools.product((4096, 2048), ("auto", "recompute")):
            measured = [found.get((terms, schedule, d, step)) for step in ("fwd", "fwd_bwd")]
            row.append(", ".join(f"{each[1]:.3f}" for each in measured if each) or "not measured")
        rows.append(row)
    return rows


def _multiples(file: str, asked: list[str]) -> dict[tuple, tuple[str, float]]:
    """(terms, schedule, d, pass) -> (date, time as a multiple of that without terms)."""
    calls: dict[tuple, Record] = {}
    for record in records(file) if asked else ():
        if (record["n"], record["vocab"]) == (8192, 131072) and not record["failed"]:
            terms = frozenset((record["terms"] or "none").split(","))
            key = record["schedule"], record["d"], record["pass"]
            calls[(terms, *key, record["workspace_mb"])] = record
    found: dict[tuple, tuple[str, float]] = {}
    # Later ones, of more memory, remain.
    for (terms, *key, workspace), record in sorted(calls.items(), key=lambda each: each[0][-1] or 0):
        for text in asked:
            if terms == frozenset(text.split(",")):
                plain = calls[(frozenset(["none"]), *key, workspace)]
                found[(text, *key)] = record["date"], record["ms"] / plain["ms"]
    return found


def offset_errors(file: str) -> Rows:
    """The smoothed loss's error, "none", and as a multiple of the yardstick's."""
    names = {
        "float32 logits of tensor cores": ("fp32 logits", None),
        "float32 operands": ("fp32 operands", None),
        "recomputed": ("cute_lce", "recompute"),
    }
    found = {
        (record["provider"], record["schedule"], record["regime"]): record
        for record in records(file)
        if (record["reduction"], record["terms"], record["part"]) == ("none", "label_smoothing=0.1", "all")
    }
    rows: Rows = []
    for name, (provider, schedule) in names.items():
        both = [found[provider, schedule, f"offset_{height}"] for height in (100, 10000)]
        rows.append([name, *(f"{each['err_loss']:.1e}, {each['x_loss']:.3f}" for each in both)])
    return rows


def by_floor(file: str) -> Rows:
    """Ours and the others, each pass of each shape."""
    return [
        [
            f"{record['n']}, {record['d']}, {record['vocab']}",
            "forward" if record["pass"] == "fwd" else "both",
            record["provider"],
            *(["fails", "-"] if record["failed"] else [f"{record['ms']:.2f}", f"{ratio(record):.3f}"]),
        ]
        for record in records(file)
    ]


def paper(file: str) -> Rows:
    """The paper's shapes: ours and the fastest peer of each pass, and the paper's own forward."""
    rows: Rows = []
    found = [record for record in records(file) if not record["failed"]]
    for n, vocab in sorted({(record["n"], record["vocab"]) for record in found}):
        row: list[Cell] = [f"{n}, {vocab}"]
        for step in ("fwd", "fwd_bwd"):
            here = [r for r in found if (r["n"], r["vocab"], r["pass"]) == (n, vocab, step)]
            ours = [r for r in here if r["provider"] == summary.OURS and r["schedule"] == "auto"]
            peers = [r for r in here if r["provider"] != summary.OURS]
            if ours:
                fastest = min(peers, key=ratio)
                row += [f"{ours[0]['ms']:.2f}, {ratio(ours[0]):.3f}"]
                row += [f"{fastest['provider']} {fastest['ms']:.2f}, {ratio(fastest):.3f}"]
            else:
                row += ["-", "-"]
        rows.append([*row, f"{grid.PUBLISHED[n, vocab].fused_ms:.2f}"])
    return rows


def paper_errors(file: str) -> Rows:
    """Provider -> its worst relative errors over the paper's shapes."""
    rows: Rows = []
    found = [r for r in records(file) if not r["failed"] and r["pass"] == "fwd_bwd"]
    for name in dict.fromkeys(record["provider"] for record in found):
        worst = [_worst(r[key] for r in found if r["provider"] == name) for key in ERROR_KEYS]
        rows.append([name, *worst])
    return rows


ERROR_KEYS = "err_loss", "err_dh", "err_dw"


def by_step(file: str) -> Rows:
    """A model's training step with each head and loss."""
    return [
        [
            str(record["vocab"]),
            record["provider"] + (f", {record['workspace_mb']:.0f} MiB" if record["workspace_mb"] else ""),
            f"{record['ms']:.1f}",
            f"{record['tokens_per_s']:.0f}",
            f"{100 * record['loss_share']:.0f}%",
            f"{record['peak_mib']:.0f}",
            str(record["largest_batch"] or "-"),
        ]
        for record in records(file)
    ]


def readme_step(file: str) -> Rows:
    """The same for the README: milliseconds and GiB of each size of the vocabulary."""
    ways = dict.fromkeys((record["provider"], record["workspace_mb"]) for record in records(file))
    rows: Rows = []
    for provider, workspace in ways:
        found = [r for r in records(file) if (r["provider"], r["workspace_mb"]) == (provider, workspace)]
        name = f"**cute_lce**, `workspace_mb={workspace:.0f}`" if workspace else STEP_NAMES[provider]
        cells = [f"{record['ms']:.1f}, {record['peak_mib'] / 1024:.1f}" for record in found]
        rows.append([name, *cells])
    return rows


STEP_NAMES = {
    "without head": "no head, no loss",
    "torch_eager_fp32ce": "torch, eager",
    "torch_compile": "torch.compile of head and loss",
    "liger_triton": "Liger-Kernel",
    "cce": "Apple's CCE, with its filter",
}


def streaming(file: str) -> Rows:
    """Shape and dtype, eager torch in ms, and as multiples of it the peers and ours by schedule."""
    shapes = dict.fromkeys((r["n"], r["d"], r["vocab"], r["dtype"]) for r in records(file))
    rows: Rows = []
    for n, d, V, dtype in shapes:
        mine = [r for r in records(file) if (r["n"], r["d"], r["vocab"], r["dtype"]) == (n, d, V, dtype)]
        eager = min(r["ms"] for r in mine if r["provider"] == "torch_eager_fp32ce")
        ours = [r for r in mine if r["provider"] == "cute_lce"]

        def best(chosen: list[Record], eager: float = eager) -> Cell:
            return f"{min(r['ms'] for r in chosen) / eager:.2f}" if chosen else None

        peers = [
            best([r for r in mine if r["provider"] == peer])
            for peer in ("torch_compile", "liger_triton", "cce")
        ]
        by_schedule = [
            best([r for r in ours if r["schedule"] == schedule and r["workspace_mb"] is None])
            for schedule in ("auto", "recompute", "grad_in_forward")
        ]
        worst = max(ours, key=lambda r: r["ms"])
        rows.append(
            [
                f"{n}, {d}, {V}, {dtype}",
                f"{eager:.1f}",
                *peers,
                *by_schedule,
                f"{worst['ms'] / eager:.2f}, {worst['schedule']}, {worst['workspace_mb'] or 'default'}",
            ]
        )
    return rows


TABLES: dict[str, Callable[[str], Rows]] = {
    function.__name__: function
    for function in (
        forward,
        streaming,
        sustained,
        backward,
        frozen,
        peers,
        readme,
        of_two_commits,
        groups,
        errors,
        term_errors,
        host_time,
        host_side,
        ranges,
        beside,
        accumulation,
        kept_logits,
        partial,
        kept_reference,
        confident,
        by_three_gemms,
        budgets,
        over_gpus,
        by_terms,
        by_budget,
        back_to_back,
        by_heads,
        term_peers,
        term_costs,
        offset_errors,
        by_floor,
        paper,
        paper_errors,
        by_step,
        readme_step,
    )
}


# Sentences that quote a file


def sentences() -> list[tuple[str, str]]:
    """(document, what it says), up to line breaks."""
    host = [
        get("h100_host_time.json", provider="cute_lce", schedule="auto", **{"pass": step})["us"]
        for step in ("fwd", "fwd_grad", "bwd")
    ]
    mean, none = three_gemms("h100_backward.json")
    found = records("h100_errors.json")
    ours = [
        max(record[key] for record in found if record["provider"] == "cute_lce" and record[key] is not None)
        for key in MULTIPLES
    ]
    stored = ("torch_eager_fp32ce", "torch_eager_bf16ce", "torch_compile", "quack_base", "liger_triton")
    confident = _worst_of(stored, "confident", ("x_dh", "x_dw"))
    jumping = _worst_of(stored, "jump_", ("x_dw",))
    steps = [get("h100_finetune.json", provider=name) for name in ("fused", "torch")]
    apart = max(abs(a - b) / b for a, b in zip(*(step["losses"] for step in steps), strict=True))
    return [
        (
            MEASUREMENTS,
            f"{steps[0]['ms']:.1f} ms a step, with torch's loss {steps[1]['ms']:.1f}, "
            f"losses at most {apart:.1e}",
        ),
        (README, "{:.0f} us without a gradient, {:.0f} with one, {:.0f} for a backward".format(*host)),
        (MEASUREMENTS, f'({mean:.2f} ms for "mean", {none:.2f} for "none";'),
        (MEASUREMENTS, "at most {:.2f}, {:.2f} and {:.2f} in all of the file".format(*ours)),
        (
            MEASUREMENTS,
            f"{min(confident):.0f} to {max(confident):.0f} times the yardstick's error on confident",
        ),
        (MEASUREMENTS, f"and {min(jumping):.0f} to {max(jumping):.0f} times in the entries of dW"),
    ]


def over_ranks() -> list[tuple[str, str]]:
    """Sentences of docs/parallel.md: (document, what it says)."""
    gains, hidden = {}, {}
    for ranks in (2, 4):
        file = f"h200x{ranks}_parallel.json"
        found = [get(file, case=case, n=n) for n in (8192, 2048) for case in ("tp", "tp_partial")]
        gains[ranks] = [f"{1 - less['ms'] / tp['ms']:.1%}" for tp, less in (found[:2], found[2:])]
        hidden[ranks] = [f"{each['hidden_share']:.0%}" for each in found[::2]]
    gathers = [
        us / get("h200x2_parallel.json", case="tp_sequence", n=n)["ms"] / 10
        for us, n in ((157, 8192), (54, 2048))
    ]
    error = {
        (way, ranks): [
            r["err_dh"] for r in records("cpu_partial.json") if (r["way"], r["ranks"]) == (way, ranks)
        ]
        for way in ADDED
        for ranks in (2, 4)
    }
    wide, narrow = (
        sorted(
            part / whole
            for ranks in counts
            for whole, part in zip(error["reduced", ranks], error[way, ranks], strict=True)
        )
        for way, counts in (("partial, summed in fp32", (2, 4)), ("partial, summed in bf16", (4,)))
    )
    texts = [
        f"on two H200s {gains[2][0]} with 8192 tokens and {gains[2][1]} with 2048",
        f"On four it is {gains[4][0]} and {gains[4][1]}",
        f"Other kernels ran in {hidden[2][0]} and {hidden[2][1]} of the sum's time on two, and in "
        f"{hidden[4][0]} and {hidden[4][1]} on four",
        f"printed, not kept), {gathers[0]:.1f} and {gathers[1]:.1f}% of a call",
        f"have {wide[0]:.2f} to {wide[-1]:.2f} times the error",
        f"{narrow[0]:.1f} to {narrow[-1]:.1f} times over four ranks",
    ]
    return [(PARALLEL, text) for text in texts]


def by_use() -> list[tuple[str, str]]:
    """Sentences of docs/arguments.md: (document, what it says)."""
    shape, both = at(shapes.BACKWARD[0]), {"pass": "fwd_bwd"}
    default = get("h200_tables.json", workspace_mb=None, **both, **shape)
    added, returned = (
        ratio(get("h200_grad_weight_out.json", grad_weight_out=where)) for where in ("fp32", None)
    )
    masked, prompts, most, none = (
        ratio(get("h200_ignored.json", reduction="mean", ignored=each))
        for each in ("random:0.5", "prompt:0.5", "random:0.9", None)
    )
    tokens = ratio(get("h200_ignored.json", reduction="none", ignored=None))
    frozen = {"frozen": "weight", "reduction": "mean"}
    formed = get("h200_grad_in_forward.json", schedule="grad_in_forward", **frozen)
    recomputed = get("h200_grad_in_forward_before.json", schedule="auto", **frozen)
    # Before records said what is frozen: the floor does.
    kept = min(
        (r for r in records("h200_tables.json") if r["pass"] == "fwd_bwd" and r["workspace_mb"] == 2355),
        key=lambda record: record["floor_ms"],
    )
    alone, shared = (
        get("h200x2_parallel.json", case=case, n=shapes.BACKWARD[0].n) for case in ("alone", "tp")
    )
    found = [
        f"{default['ms']:.2f} ms, {ratio(default):.3f} times the GEMMs, with {default['extra_mib']:.0f} MiB",
        f"{added:.3f} times the GEMMs, where returning it takes {returned:.3f}",
        f"at random a call takes {masked:.3f} times the GEMMs of all tokens, with half as prompts "
        f"{prompts:.3f}, with 90% at random {most:.3f}, and with none {none:.3f}",
        f"a random upstream gradient takes {tokens:.3f} times the GEMMs",
        f"takes {formed['ms']:.2f} ms with {formed['extra_mib']:.0f} MiB. A workspace that keeps all columns "
        f"takes {kept['ms']:.2f} ms with {kept['extra_mib']:.0f} MiB, and computing the logits twice "
        f"{recomputed['ms']:.2f} ms with {recomputed['extra_mib']:.0f} MiB",
        f"a call takes {shared['ms']:.2f} ms with {shared['extra_mib']:.0f} MiB on each, where one alone "
        f"takes {alone['ms']:.2f} ms",
    ]
    long = {"n": 32768, "d": 4096, "vocab": 262144}
    for file, workspace, schedule in (
        ("h200_tables.json", 1126, "auto"),
        ("h200_tables.json", 5632, "auto"),
        ("h200_grad_in_forward.json", 5837, "grad_in_forward"),
    ):
        record = get(file, workspace_mb=workspace, schedule=schedule, **both, **long)
        (line,) = (row for _, rows in tables_of(ARGUMENTS) for row in rows if row[0] == str(workspace))
        found.append(f"| {workspace} | {line[1]} | {ratio(record):.3f} |")
    return [(ARGUMENTS, each) for each in found]


def _worst_of(providers: tuple[str, ...], regime: str, keys: tuple[str, ...]) -> list[float]:
    """The largest error over the parts, of each provider, shape, reduction, regime and key."""
    worst: dict[tuple, float] = {}
    for record in records("h100_errors.json"):
        for key in keys:
            if (
                record["provider"] in providers
                and record["regime"].startswith(regime)
                and record[key] is not None
            ):
                case = record["provider"], record["n"], record["reduction"], record["regime"], key
                worst[case] = max(worst.get(case, 0.0), float(record[key]))
    return list(worst.values())


# What is checked


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def tables_of(document: str) -> list[tuple[str, list[list[str]]]]:
    """(the line before the table, its rows) of every table, without the two lines of its head."""
    found: list[tuple[str, list[list[str]]]] = []
    lines = ["", *text_of(document).splitlines()]
    for above, line in pairwise(lines):
        if line.startswith("|"):
            if not above.startswith("|"):
                found.append((above, []))
            found[-1][1].append([cell.strip() for cell in line.strip().strip("|").split(" | ")])
    return [(above, rows[2:]) for above, rows in found]


MADE = [
    (document, match[1], match[2], rows)
    for document in (README, MEASUREMENTS, TUNING, ARGUMENTS, ALGORITHM, PARALLEL, LOSSES)
    for above, rows in tables_of(document)
    if (match := SOURCE.fullmatch(above))
]


@pytest.mark.parametrize(("document", "file", "name", "rows"), MADE, ids=[made[2] for made in MADE])
def test_a_table_has_the_numbers_of_its_file(document, file, name, rows):
    expected = TABLES[name](file)
    assert len(rows) == len(expected), f"{document}: {name} has {len(rows)} rows, want {len(expected)}"
    for row, cells in zip(rows, expected, strict=True):
        assert len(row) == len(cells), row
        for cell, want in zip(row, cells, strict=True):
            if want is None:
                assert not re.search(r"\d", cell), f"{document}: {row}: {cell!r} is not in {file}"
            else:
                assert cell == want, f"{document}: {row}: got {cell!r}, {file} gives {want!r}"


def test_every_table_of_measurements_says_where_it_is_from():
    assert set(TABLES) == {made[2] for made in MADE}
    for above, rows in tables_of(MEASUREMENTS):
        assert SOURCE.fullmatch(above) or above == UNKEPT, f"{above!r} before the table of {rows[0]}"


@pytest.mark.parametrize(("document", "sentence"), [*sentences(), *by_use(), *over_ranks()])
def test_a_sentence_has_the_numbers_of_its_file(document, sentence):
    assert sentence in " ".join(text_of(document).split())


def test_the_machine_and_its_software_are_those_of_the_files():
    text = " ".join(text_of(MEASUREMENTS).split())
    for _, file, name, _ in MADE:
        # Each file that a pattern matches has a table of its own.
        for record in records(file) if "*" not in file else ():
            versions = record["versions"]
            if "driver" not in versions:
                assert record["gpu"].startswith("cpu")
                continue
            for wanted in (
                record["gpu"],
                f"driver {versions['driver']}",
                f"torch {versions['torch']}",
                f"CuTe DSL {versions['nvidia-cutlass-dsl']}",
                record["date"][:10],
            ):
                assert wanted in text, f"{name}: {wanted} of {file}"


if __name__ == "__main__":
    for _, file, name, _ in MADE:
        print(f"\n{file}: {name}")
        for row in TABLES[name](file):
            print(f"| {' | '.join('...' if cell is None else cell for cell in row)} |")
    print(
        *(f"{document}: {sentence}" for document, sentence in [*sentences(), *by_use(), *over_ranks()]),
        sep="\n",
    )
