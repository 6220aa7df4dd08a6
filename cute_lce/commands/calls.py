"""Tiny calls of each schedule on each device, beside float64: what `cute-lce doctor` runs."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from .. import reference
from ..functional import linear_cross_entropy
from ..logprob import linear_logprob
from ..measure.timing import relative_rms, synchronize
from ..ops.select import implementation
from ..options import TokenStats
from ..streaming import STREAMING

# No multiples of a tile, and rows that TMA reads in place.
N, D, VOCAB = 300, 264, 1999
TEMPERATURE, SOFTCAP, Z_LOSS = 0.7, 2.0, 0.01
SCHEDULES = ("recompute", "keep", "grad_in_forward")
KINDS = ("forward", *SCHEDULES, "softcap", "logprob", "entropy", "tp_group")
OUTPUTS = {"logprob": ("logprob",), "entropy": ("logprob", "entropy")}
"""Of linear_logprob, in the calls that are its."""
FLOORS = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-20}
"""Of a result's bound, beside twice torch's error: one rounding of 16-bit results, sums in float32."""


class Call(NamedTuple):
    """kind: of KINDS; all but "forward" with a backward, and a third of the targets ignored. "softcap" has a
    z_loss too; "entropy" is of linear_logprob for logprob and entropy. "tp_group" is a call over a group of
    one rank, which makes collectives and merges shards as more do."""

    device: str
    dtype: str
    kind: str


class Answer(NamedTuple):
    """by: what served the call. error, bound: the largest relative RMS error of its results by its bound,
    against float64. seconds: of the first call, compiling included."""

    by: str
    error: float
    bound: float
    seconds: float

    @property
    def right(self) -> bool:
        return self.error <= self.bound


def calls() -> Iterator[Call]:
    """Of the first GPU of each kind, or of the CPU if there is no GPU."""
    devices = {}
    for index in range(torch.cuda.device_count()):
        devices.setdefault(torch.cuda.get_device_name(index), f"cuda:{index}")
    for device in devices.values() or ("cpu",):
        for dtype in ("bfloat16", "float16", "float32") if device != "cpu" else ("bfloat16", "float32"):
            for kind in KINDS:
                yield Call(device, dtype, kind)


def answer(call: Call) -> Answer:
    """Make a call, and compare it."""
    device, dtype = torch.device(call.device), getattr(torch, call.dtype)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator).to(dtype)
    weight = (torch.randn(VOCAB, D, generator=generator) / D**0.5).to(dtype)
    target = torch.randint(VOCAB, (N,), generator=generator)
    target[::3] = -100
    upstream = torch.randn(2, N, generator=generator)
    operands = [each.to(device) for each in (hidden, weight, target, upstream)]

    started = time.perf_counter()
    with _nan_memory(), _group_of_one(device) if call.kind == "tp_group" else contextlib.nullcontext():
        found = _results(call.kind, _ours, *operands)
        synchronize(device)
    seconds = time.perf_counter() - started
    wanted = _results(call.kind, _definition, hidden.double(), weight.double(), target, upstream)
    plain = _results(call.kind, _torch, *operands)
    worst = (-1.0, 0.0, 0.0)
    for got, torchs, want in zip(found, plain, wanted, strict=True):
        bound = 2 * relative_rms(torchs.cpu(), want) + FLOORS[got.dtype]
        error = relative_rms(got.cpu(), want)
        worst = max(worst, (math.inf if math.isnan(error) else error / bound, error, bound))
    by = "streaming path" if implementation(device, dtype) is STREAMING else "kernels"
    return Answer(by, worst[1], worst[2], seconds)


Loss = Callable[[Tensor, Tensor, Tensor, str], Tensor]


def _results(
    kind: str, numbers: Loss, hidden: Tensor, weight: Tensor, target: Tensor, upstream: Tensor
) -> list[Tensor]:
    """The call's results: each token's numbers or their mean, and both gradients unless it is "forward"."""
    if kind == "forward":
        with torch.no_grad():
            return [numbers(hidden, weight, target, kind)]
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    found = numbers(*leaves, target, kind)
    given = upstream.to(found).flatten()[: found.numel()].view_as(found)
    return [found.detach(), *torch.autograd.grad(found, leaves, given)]


def _numbers(found: TokenStats, outputs: Sequence[str]) -> Tensor:
    """(N,), or a row of each where there are several."""
    numbers = torch.stack([getattr(found, name) for name in outputs])
    return numbers if len(outputs) > 1 else numbers[0]


def _terms(kind: str) -> dict[str, Any]:
    return {"softcap": SOFTCAP, "z_loss": Z_LOSS} if kind == "softcap" else {}


def _reduction(kind: str) -> str:
    return "mean" if kind == "grad_in_forward" else "none"


def _ours(hidden: Tensor, weight: Tensor, target: Tensor, kind: str) -> Tensor:
    if kind in OUTPUTS:
        outputs = OUTPUTS[kind]
        found = linear_logprob(hidden, weight, target, temperature=TEMPERATURE, outputs=outputs)
        return _numbers(found, outputs)
    options: dict[str, Any] = {"reduction": _reduction(kind), **_terms(kind)}
    if kind in SCHEDULES:
        options["schedule"] = kind
    if kind == "softcap":
        options["schedule"] = "recompute"
    if kind == "tp_group":
        options["tp_group"] = distributed.group.WORLD
    return linear_cross_entropy(hidden, weight, target, **options)


@contextlib.contextmanager
def _group_of_one(device: torch.device) -> Iterator[None]:
    """torch.distributed's default group, of this process alone."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=distributed.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
        rank=0,
        world_size=1,
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _definition(hidden: Tensor, weight: Tensor, target: Tensor, kind: str) -> Tensor:
    if kind in OUTPUTS:
        found = reference.linear_logprob(hidden, weight, target, temperature=TEMPERATURE)
        return _numbers(found, OUTPUTS[kind])
    return reference.linear_cross_entropy(hidden, weight, target, reduction=_reduction(kind), **_terms(kind))


def _torch(hidden: Tensor, weight: Tensor, target: Tensor, kind: str) -> Tensor:
    logits = F.linear(hidden, weight).float()
    if kind == "softcap":
        logits = SOFTCAP * (logits / SOFTCAP).tanh()
        squares = Z_LOSS * logits.logsumexp(-1).square()
        return F.cross_entropy(logits, target, reduction="none") + squares.masked_fill(target < 0, 0)
    if kind in OUTPUTS:
        each = (logits / TEMPERATURE).log_softmax(-1)
        entropy = -(each.exp() * each).sum(-1).masked_fill(target < 0, 0)
        own = -F.nll_loss(each, target, reduction="none")
        return _numbers(TokenStats(own, entropy), OUTPUTS[kind])
    return F.cross_entropy(logits, target, reduction=_reduction(kind))


@contextlib.contextmanager
def _nan_memory() -> Iterator[None]:
    """New memory is nan, so that what is not written is seen."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
