"""Time calls with terms, and linear_logprob's outputs, beside the same call without and cuBLAS's GEMMs.

Each term's call alternates with the plain one and with the floor, in an order drawn anew; `times` is the
term's median over the plain call's of the same schedule.

    python3 -m bench.terms --out bench/results/h200_terms.json
    python3 -m bench.terms --shapes 8192,2048,131072 --terms softcap entropy
    python3 -m bench.terms --show bench/results/h200_terms.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import shapes
from bench.inputs import DTYPES, Inputs, make_inputs
from cute_lce import linear_cross_entropy, linear_logprob
from cute_lce.measure import records
from cute_lce.measure.floor import Floor
from cute_lce.measure.timing import peak_extra_bytes, time_interleaved

KEYS = (
    *("gpu", "term", "schedule", "n", "d", "vocab", "dtype", "pass", "ms", "ms_min", "ms_max"),
    *("plain_ms", "floor_ms", "times", "extra_mib", "error", "versions", "date", "command"),
)
Call = Callable[[Tensor, Tensor, Inputs, str], Tensor]
PLAIN = "plain"


def _of_inputs(options: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
    """Options, those that are functions of the inputs called."""
    return {name: value(inputs) if callable(value) else value for name, value in options.items()}


def _loss(**options: Any) -> Call:
    def call(hidden: Tensor, weight: Tensor, inputs: Inputs, schedule: str) -> Tensor:
        given = _of_inputs(options, inputs)
        return linear_cross_entropy(hidden, weight, inputs.target, schedule=schedule, **given)

    return call


def _logprob(*outputs: str, **options: Any) -> Call:
    def call(hidden: Tensor, weight: Tensor, inputs: Inputs, schedule: str) -> Tensor:
        given = _of_inputs(options, inputs)
        stats = linear_logprob(hidden, weight, inputs.target, outputs=outputs, schedule=schedule, **given)
        # Every output has an upstream gradient of its own.
        return torch.stack([getattr(stats, name).flatten() for name in outputs]).sum(0)

    return call


def _ones(inputs: Inputs) -> Tensor:
    return torch.ones_like(inputs.target, dtype=torch.float32)


def _classes(inputs: Inputs) -> Tensor:
    return torch.ones(inputs.weight.shape[0], device=inputs.weight.device)


def _bias(inputs: Inputs) -> Tensor:
    return torch.zeros_like(inputs.weight[:, 0]).requires_grad_()


TERMS: dict[str, Call] = {
    PLAIN: _loss(),
    "logit_scale": _loss(logit_scale=0.5),
    "denominator": _loss(denominator=4096.0),
    "token_weight": _loss(token_weight=_ones),
    "class weights": _loss(weight=_classes),
    "z_loss": _loss(z_loss=1e-4),
    "label_smoothing": _loss(label_smoothing=0.1),
    "softcap": _loss(softcap=30.0),
    "linear_bias": _loss(linear_bias=_bias),
    "softcap, scale, z_loss": _loss(softcap=30.0, logit_scale=0.5, z_loss=1e-4),
    "logprob": _logprob("logprob"),
    "logprob, lse": _logprob("logprob", "lse"),
    "logprob, entropy": _logprob("logprob", "entropy"),
    "logprob, entropy, temperature": _logprob("logprob", "entropy", temperature=0.7),
    "logprob, temperatures": _logprob("logprob", temperature=_ones),
}


class Step:
    """A term's call: a forward, or with both gradients."""

    def __init__(self, term: str, inputs: Inputs, schedule: str, *, backward: bool):
        self.call, self.inputs, self.schedule, self.backward = TERMS[term], inputs, schedule, backward
        self.hidden = inputs.hidden.detach().requires_grad_(backward)
        self.weight = inputs.weight.detach().requires_grad_(backward)

    def __call__(self) -> None:
        loss = self.call(self.hidden, self.weight, self.inputs, self.schedule)
        if self.backward:
            torch.autograd.grad(loss.sum(), (self.hidden, self.weight))


def measure(
    shape: shapes.Shape, terms: Sequence[str], step: str, schedule: str, seconds: float, device: torch.device
) -> list[dict[str, Any]]:
    """A result a term; `error` says why it has no numbers."""
    inputs, backward = make_inputs(shape, DTYPES["bf16"], "untrained", device), step == "fwd_bwd"
    floor = Floor(inputs.hidden, inputs.weight, backward)
    plain, results = Step(PLAIN, inputs, schedule, backward=backward), []
    for term in terms:
        result: dict[str, Any] = dict.fromkeys(KEYS)
        result |= {"term": term, "schedule": schedule, "pass": step, "dtype": "bf16"}
        result |= {"n": shape.n, "d": shape.d, "vocab": shape.vocab}
        run = Step(term, inputs, schedule, backward=backward)
        try:
            result["extra_mib"] = peak_extra_bytes(run, device) / 2**20
            own, other, gemms = time_interleaved([run, plain, floor], device, budget_s=seconds)
        except (RuntimeError, ValueError) as error:
            result["error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
        else:
            result |= {"ms": own.ms, "ms_min": own.ms_min, "ms_max": own.ms_max}
            result |= {"plain_ms": other.ms, "floor_ms": gemms.ms, "times": own.ms / other.ms}
        results.append(result)
    return results


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'n, d, V, pass, schedule':46} {'term':30} {'ms':>9} {'x plain':>8} {'x floor':>8} {'MiB':>8}"]
    for r in results:
        where = f"{r['n']}, {r['d']}, {r['vocab']}, {r['pass']}, {r['schedule']}"
        if r["error"]:
            lines.append(f"{where:46} {r['term']:30} {r['error']}")
            continue
        numbers = f"{r['ms']:9.3f} {r['times']:8.3f} {r['ms'] / r['floor_ms']:8.3f} {r['extra_mib']:8.0f}"
        lines.append(f"{where:46} {r['term']:30} {numbers}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="bench.terms", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--shapes", nargs="+", default=["8192,4096,131072"])
    found.add_argument("--terms", nargs="+", choices=TERMS, default=list(TERMS))
    found.add_argument(
        "--pass", dest="passes", nargs="+", choices=("fwd", "fwd_bwd"), default=["fwd", "fwd_bwd"]
    )
    found.add_argument("--schedule", nargs="+", default=["auto"], choices=("auto", "recompute", "keep"))
    found.add_argument("--seconds", type=float, default=1.0, help="of a term's measurement (%(default)s)")
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--out", type=Path, help="write the results there")
    found.add_argument("--show", type=Path, nargs="+", help="print kept results, measure nothing")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    if args.show:
        print(table(records.read(args.show)))
        return 0
    device = torch.device(args.device)
    command = shlex.join(["python3", "-m", "bench.terms", *(arguments or sys.argv[1:])])
    results: list[dict[str, Any]] = []
    for shape in (each for text in args.shapes for each in shapes.parse(text)):
        for step in args.passes:
            for schedule in args.schedule:
                found = measure(shape, args.terms, step, schedule, args.seconds, device)
                origin = records.provenance(device, command)
                results += [result | origin for result in found]
                if args.out:
                    records.write(args.out, results)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
