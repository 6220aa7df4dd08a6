"""Errors of log-probabilities and entropies in rows whose target has almost all of the probability.

Half of the rows are confident, and all is float32 from bfloat16 operands, on a CPU. With R the sum of
exp(z - z_y) over all classes v but the target y, the target's probability is 1 / (1 + R), and what the loss
and the target's gradient are made of is R itself:

    torch         z.log_softmax, and autograd
    cute_lce      linear_logprob on the streaming path, whose sum 1 + R holds R to 2^-24 at best
    others alone  -log1p(R), and R / (1 + R) for 1 - p

The reference is the last in float64.

    python3 -m bench.confident --out bench/results/cpu_confident.json
    python3 -m bench.confident --show bench/results/cpu_confident.json
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
from bench.inputs import Inputs, make_inputs
from cute_lce import linear_logprob
from cute_lce.commands.terminal import new_file
from cute_lce.measure import records
from cute_lce.measure.timing import relative_rms

WAYS = ("torch", "cute_lce", "others alone")
TEMPERATURES = (1.0, 0.8, 0.7, 0.6, 0.5)
OUTPUTS = ("logprob", "entropy")
Found = tuple[tuple[Tensor, Tensor], dict[str, Tensor]]
"""logprob and entropy (n,); dH (n, d) for an upstream of 1 to one of them, and to both."""


def gradients_of(numbers: Sequence[Tensor], leaf: Tensor) -> dict[str, Tensor]:
    sums = dict(zip(OUTPUTS, numbers, strict=True)) | {"both": numbers[0] + numbers[1]}
    return {
        name: torch.autograd.grad(each.sum(), leaf, retain_graph=True)[0].detach()
        for name, each in sums.items()
    }


def by_torch(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> Found:
    leaf = hidden.detach().requires_grad_()
    logprobs = (leaf @ weight.T / temperature).log_softmax(1)
    numbers = logprobs.gather(1, target.unsqueeze(1)).squeeze(1), -(logprobs.exp() * logprobs).sum(1)
    return (numbers[0].detach(), numbers[1].detach()), gradients_of(numbers, leaf)


def by_ours(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> Found:
    leaf = hidden.detach().requires_grad_()
    found = linear_logprob(leaf, weight, target, temperature=temperature, outputs=OUTPUTS)
    assert found.logprob is not None
    assert found.entropy is not None
    numbers = found.logprob, found.entropy
    return (numbers[0].detach(), numbers[1].detach()), gradients_of(numbers, leaf)


def by_others(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> Found:
    """Relative to the largest of the target's logit and the others'."""
    z, column = hidden @ weight.T / temperature, target.unsqueeze(1)
    of_target = z.gather(1, column)
    others = z.scatter(1, column, -torch.inf)
    row_max = z.amax(1, keepdim=True)
    exponentials, gap = (others - row_max).exp(), z - row_max
    rest, own = exponentials.sum(1, keepdim=True), (of_target - row_max).exp()
    total = rest + own
    # log(total), where the target leads from what it lacks to 1.
    log_total = torch.where(own == 1, rest.log1p(), total.log())
    mean_gap = -((exponentials * gap).sum(1, keepdim=True) + own * (of_target - row_max)) / total
    logprob, entropy = -(log_total + (row_max - of_target)), log_total + mean_gap
    softmax = exponentials / total
    by_logprob = (-softmax).scatter(1, column, rest / total)
    by_entropy = (-softmax * (gap + mean_gap)).scatter(
        1, column, -own / total * (of_target - row_max + mean_gap)
    )
    dlogits = {"logprob": by_logprob, "entropy": by_entropy, "both": by_logprob + by_entropy}
    gradients = {name: each @ weight / temperature for name, each in dlogits.items()}
    return (logprob.squeeze(1), entropy.squeeze(1)), gradients


BY: dict[str, Callable[[Tensor, Tensor, Tensor, float], Found]] = {
    "torch": by_torch,
    "cute_lce": by_ours,
    "others alone": by_others,
}


def measure(inputs: Inputs, temperature: float, way: str) -> dict[str, Any]:
    """Relative RMS errors in the confident half of the rows, and of dH of all rows. rms_logprob: of the
    confident rows; largest: the largest error of one of their numbers, in nats."""
    hidden, weight, target = inputs.hidden, inputs.weight, inputs.target
    exact, wants = by_others(hidden.double(), weight.double(), target, temperature)
    numbers, gradients = BY[way](hidden.float(), weight.float(), target, temperature)
    half = slice(0, len(target) // 2)
    found: dict[str, Any] = {"rms_logprob": exact[0][half].square().mean().sqrt().item()}
    for name, got, want in zip(OUTPUTS, numbers, exact, strict=True):
        found[f"err_{name}"] = relative_rms(got[half], want[half])
    pairs = list(zip(numbers, exact, strict=True))
    found["largest"] = max((got.double() - want)[half].abs().max().item() for got, want in pairs)
    for name, want in wants.items():
        found[f"err_dh_{name}"] = relative_rms(gradients[name][half], want[half])
        found[f"err_dh_{name}_all"] = relative_rms(gradients[name], want)
    return found


def show(results: Sequence[dict[str, Any]]) -> None:
    keys = ("err_logprob", "err_entropy", "largest", "err_dh_logprob", "err_dh_entropy", "err_dh_both")
    keys += ("err_dh_both_all",)
    print("temperature, way".ljust(24) + "".join(key.rjust(18) for key in keys))
    for result in results:
        label = f"{result['temperature']:g}, {result['way']}"
        print(label.ljust(24) + "".join(f"{result[key]:.1e}".rjust(18) for key in keys))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.confident", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="192,1024,32000", help="n,d,V (%(default)s)")
    parser.add_argument("--out", type=new_file, help="JSON file for the results")
    parser.add_argument("--show", type=Path, nargs="+", help="print stored results, measure nothing")
    args = parser.parse_args(arguments)
    if args.show:
        show(records.read(args.show))
        return 0
    device = torch.device("cpu")
    command = shlex.join(["python3", "-m", "bench.confident", *(arguments or sys.argv[1:])])
    try:
        shape = shapes.parse_one(args.shape)
    except ValueError as error:
        parser.error(str(error))
    inputs = make_inputs(shape, torch.bfloat16, "mixed", device)
    results = [
        {"n": shape.n, "d": shape.d, "vocab": shape.vocab, "temperature": temperature, "way": way}
        | measure(inputs, temperature, way)
        | records.provenance(device, command)
        for temperature in TEMPERATURES
        for way in WAYS
    ]
    if args.out:
        records.write(args.out, results)
    show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
