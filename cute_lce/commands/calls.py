"""Tiny calls of each schedule on each device, beside float64: what `cute-lce doctor` runs."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from .. import reference
from ..functional import linear_cross_entropy
from ..logprob import linear_logprob
from ..measure.timing import relative_rms, synchronize
from ..ops.select import implementation
from ..streaming import STREAMING

# No multiples of a tile, and rows that TMA reads in place.
N, D, VOCAB = 300, 264, 1999
TEMPERATURE = 0.7
SCHEDULES = ("recompute", "keep", "grad_in_forward")
KINDS = ("forward", *SCHEDULES, "logprob", "tp_group")
FLOORS = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-20}
"""Of a result's bound, beside twice torch's error: one rounding of 16-bit results, sums in float32."""


class Call(NamedTuple):
    """kind: of KINDS; all but "forward" with a backward, and a third of the targets ignored. "tp_group" is a
    call over a group of one rank, which makes collectives and merges shards as more do."""

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
    upstream = torch.randn(N, generator=generator)
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
    """The call's results: each token's number or their mean, and both gradients unless it is "forward"."""
    if kind == "forward":
        with torch.no_grad():
            return [numbers(hidden, weight, target, kind)]
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    found = numbers(*leaves, target, kind)
    # Any upstream gradient where the schedule takes one.
    given = upstream.to(found) if found.ndim else torch.ones_like(found)
    return [found.detach(), *torch.autograd.grad(found, leaves, given)]


def _reduction(kind: str) -> str:
    return "mean" if kind == "grad_in_forward" else "none"


def _ours(hidden: Tensor, weight: Tensor, target: Tensor, kind: str) -> Tensor:
    if kind == "logprob":
        found = linear_logprob(hidden, weight, target, temperature=TEMPERATURE).logprob
        assert found is not None
        return found
    options: dict[str, Any] = {"reduction": _reduction(kind)}
    if kind in SCHEDULES:
        options["schedule"] = kind
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
    if kind == "logprob":
        found = reference.linear_logprob(hidden, weight, target, temperature=TEMPERATURE).logprob
        assert found is not None
        return found
    return reference.linear_cross_entropy(hidden, weight, target, reduction=_reduction(kind))


def _torch(hidden: Tensor, weight: Tensor, target: Tensor, kind: str) -> Tensor:
    logits = F.linear(hidden, weight).float()
    if kind == "logprob":
        return -F.cross_entropy(logits / TEMPERATURE, target, reduction="none")
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
