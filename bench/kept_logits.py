"""What an entropy's gradients lose when the forward keeps logits for the backward, simulated.

Operands have 16 bits, products are in float64, and dlogits are rounded once to the operands' type. The ways
differ in the logits of which dlogits are made: `recompute` has them in float32; `logits` as the kernels keep
them, as distances in float16 from the largest of 32 classes; `exponentials` as powers in bfloat16. Errors are
relative RMS against float64.

    python3 -m bench.kept_logits --out bench/results/cpu_kept_logits.json
    python3 -m bench.kept_logits --show bench/results/cpu_kept_logits.json
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.inputs import DTYPES
from cute_lce.arguments import UNIT
from cute_lce.commands.terminal import new_file
from cute_lce.measure import records

SHAPE = (96, 48, 32768)
DEVIATIONS = (0.02, 0.3, 1.0, 3.0, 8.0)
"""Of a row's logits."""
EXPONENT = {torch.bfloat16: 0, torch.float16: 15}
"""dlogits are rounded as multiples of 2 to minus this."""


def logits_kept(z: Tensor) -> Tensor:
    units = z.view(len(z), -1, UNIT)
    note = units.amax(-1, keepdim=True).half().float()
    return (note - (note - units).half().float()).view_as(z)


def exponentials_kept(z: Tensor) -> Tensor:
    """Relative to a power of two near a logit, as near the target's."""
    power = (z[:, :1] * math.log2(math.e)).floor()
    kept = torch.exp2(z * math.log2(math.e) - power).bfloat16()
    return (kept.double().log2() + power) * math.log(2)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "recompute": lambda z: z,
    "logits": logits_kept,
    "exponentials": exponentials_kept,
}


def dlogits(z: Tensor, lse: Tensor, entropy: Tensor) -> Tensor:
    """Of the sum of the rows' entropies: -p (log p + H), with the statistics of the forward."""
    logprob = z.double() - lse
    return -logprob.exp() * (logprob + entropy)


def measure(dtype: torch.dtype, deviation: float) -> dict[str, tuple[float, float]]:
    """Way -> the errors of dinput and dlinear_weight."""
    n, d, vocab = SHAPE
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, d, generator=generator).to(dtype).double()
    hidden = (torch.randn(n, d, generator=generator) * deviation / d**0.5).to(dtype).double()
    z = hidden @ weight.T
    lse = z.logsumexp(1, keepdim=True)
    logprob = z - lse
    entropy = -(logprob.exp() * logprob).sum(1, keepdim=True)
    exact = dlogits(z, lse, entropy)
    scale = 2.0 ** EXPONENT[dtype]
    found = {}
    for way, kept in WAYS.items():
        if way == "exponentials" and dtype != torch.bfloat16:
            continue
        rounded = (dlogits(kept(z.float()), lse, entropy) * scale).to(dtype).double() / scale
        pairs = (rounded @ weight, exact @ weight), (rounded.T @ hidden, exact.T @ hidden)
        found[way] = tuple(float((got - want).norm() / want.norm()) for got, want in pairs)
    return found


def show(results: Sequence[dict[str, Any]]) -> None:
    print("dtype, deviation".ljust(20) + "".join(way.rjust(22) for way in WAYS))
    for key in dict.fromkeys((r["dtype"], r["deviation"]) for r in results):
        of = {r["way"]: r for r in results if key == (r["dtype"], r["deviation"])}
        cells = [f"{of[way]['err_dh']:.1e}, {of[way]['err_dw']:.1e}" if way in of else "-" for way in WAYS]
        print(", ".join(map(str, key)).ljust(20) + "".join(cell.rjust(22) for cell in cells))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.kept_logits", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=new_file, help="JSON file for the results")
    parser.add_argument("--show", type=Path, nargs="+", help="print stored results, measure nothing")
    args = parser.parse_args(arguments)
    if args.show:
        show(records.read(args.show))
        return 0
    command = shlex.join(["python3", "-m", "bench.kept_logits", *(arguments or sys.argv[1:])])
    n, d, vocab = SHAPE
    results = [
        {
            "n": n,
            "d": d,
            "vocab": vocab,
            "dtype": dtype,
            "deviation": deviation,
            "way": way,
            "err_dh": dh,
            "err_dw": dw,
            **records.provenance(torch.device("cpu"), command),
        }
        for dtype in ("bf16", "fp16")
        for deviation in DEVIATIONS
        for way, (dh, dw) in measure(DTYPES[dtype], deviation).items()
    ]
    if args.out:
        records.write(args.out, results)
    show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
