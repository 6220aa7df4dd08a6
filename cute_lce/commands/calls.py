"""Tiny calls of each kind on each device, beside float64: what `cute-lce doctor` runs."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from .. import reference
from ..functional import linear_cross_entropy
from ..logit_term import LogitTerm
from ..logprob import linear_logprob
from ..measure.timing import relative_rms, synchronize
from ..ops.select import implementation
from ..options import TokenStats
from ..streaming import STREAMING

# No multiples of a tile, and rows that TMA reads in place.
N, D, VOCAB = 300, 264, 1999
TOPK = 3
FLOORS = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
SUM_FLOOR = 2.0**-20
"""Of a result's bound, beside twice torch's error: one rounding of 16-bit results; sums in float32."""
DIFFERENTIABLE = ("logprob", "entropy", "lse", "topk_logprob")
"""Of linear_logprob's outputs."""


@dataclass(frozen=True)
class Squashed(LogitTerm):
    """x / (1 + |x| / cap)."""

    cap: float

    def logit(self, x, ops):
        return x / (1 + ops.abs(x) / self.cap)

    def slope(self, z, ops):
        return (1 - ops.abs(z) / self.cap) * (1 - ops.abs(z) / self.cap)


class Kind(NamedTuple):
    """A call. terms: arguments that the definition has too; tensors: names of further ones, which are in
    Given.more. how: arguments of ours alone. outputs: of linear_logprob, whose call it then is. added: the
    dtype of a grad_weight_out. gradients: whether there is a backward. heads: whether the vocabulary is
    divided into two heads. over_group: whether it is a call over a group of one rank, which makes collectives
    and merges shards as more do."""

    terms: Mapping[str, Any] = {}
    tensors: tuple[str, ...] = ()
    how: Mapping[str, Any] = {}
    outputs: tuple[str, ...] = ()
    added: torch.dtype | None = None
    gradients: bool = True
    heads: bool = False
    over_group: bool = False


WARM = {"temperature": 0.7}
KINDS = {
    "forward": Kind(gradients=False),
    "recompute": Kind(how={"schedule": "recompute"}),
    "keep": Kind(how={"schedule": "keep"}),
    "grad_in_forward": Kind({"reduction": "mean"}, how={"schedule": "grad_in_forward"}),
    "grad_weight_out, float32": Kind(added=torch.float32),
    "grad_weight_out, bfloat16": Kind(added=torch.bfloat16),
    "softcap": Kind({"softcap": 2.0, "z_loss": 0.01}, how={"schedule": "recompute"}),
    "LogitTerm": Kind({"softcap": Squashed(2.0)}),
    "linear_bias": Kind(tensors=("linear_bias",)),
    "class weights": Kind(tensors=("weight",)),
    "label_smoothing": Kind({"label_smoothing": 0.2}),
    "several heads": Kind(heads=True),
    "logprob": Kind(WARM, outputs=("logprob",)),
    "entropy": Kind(WARM, outputs=("logprob", "entropy")),
    "topk_ids": Kind(WARM, ("topk_ids",), outputs=("logprob", "topk_logprob")),
    "statistics": Kind(outputs=("lse", "argmax", "is_top1", "log_sum_sq_probs", "mean_logit")),
    "tp_group": Kind(over_group=True),
}


class Call(NamedTuple):
    """kind: of KINDS."""

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


class Given(NamedTuple):
    """hidden (N, D), weight (VOCAB, D), target (N,), upstream (N (1 + TOPK),); exact (N, VOCAB): the
    log-probabilities in float64. more: further tensors, by the names of their arguments. A third of the
    targets is ignored, another is the class with the largest logit."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    upstream: Tensor
    exact: Tensor
    more: dict[str, Tensor]

    @classmethod
    def random(cls, dtype: torch.dtype) -> Given:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(N, D, generator=generator).to(dtype)
        weight = (torch.randn(VOCAB, D, generator=generator) / D**0.5).to(dtype)
        exact = F.linear(hidden.double(), weight.double()).log_softmax(-1)
        target = torch.randint(VOCAB, (N,), generator=generator)
        target[::3] = -100
        target[1::3] = exact[1::3].argmax(-1)
        more = {
            "linear_bias": torch.randn(VOCAB, generator=generator).to(dtype),
            "weight": torch.rand(VOCAB, generator=generator) + 0.5,
            "topk_ids": torch.randint(VOCAB, (N, TOPK), generator=generator),
        }
        return cls(hidden, weight, target, torch.randn(N * (1 + TOPK), generator=generator), exact, more)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Given:
        hidden, weight, target, upstream, exact = map(change, self[:5])
        more = {name: change(each) for name, each in self.more.items()}
        return Given(hidden, weight, target, upstream, exact, more)


def answer(call: Call) -> Answer:
    """Make a call, and compare it."""
    device, dtype, kind = torch.device(call.device), getattr(torch, call.dtype), KINDS[call.kind]
    given = Given.random(dtype)
    there = given.changed(lambda each: each.to(device))
    started = time.perf_counter()
    with _nan_memory(), _group_of_one(device) if kind.over_group else contextlib.nullcontext():
        found = _results(kind, _ours, there)
        synchronize(device)
    seconds = time.perf_counter() - started
    doubled = given.changed(lambda each: each.double() if each.is_floating_point() else each)
    wanted = _results(kind, _definition, doubled)
    plain = _results(kind, _torch, there)
    worst = (-1.0, 0.0, 0.0)
    for got, torchs, want in zip(found, plain, wanted, strict=True):
        bound = 2 * relative_rms(torchs.cpu(), want) + FLOORS.get(got.dtype, SUM_FLOOR)
        error = relative_rms(got.cpu(), want)
        worst = max(worst, (math.inf if math.isnan(error) else error / bound, error, bound))
    by = "streaming path" if implementation(device, dtype) is STREAMING else "kernels"
    return Answer(by, worst[1], worst[2], seconds)


Numbers = Callable[[Kind, Given, dict[str, Any]], list[Tensor]]
"""What a kind of call returns, the losses or linear_logprob's outputs; the last argument is of ours alone."""


def _results(kind: Kind, numbers: Numbers, given: Given) -> list[Tensor]:
    """What the call returns, and its gradients."""
    own = dict(kind.how)
    if kind.over_group:
        own["tp_group"] = distributed.group.WORLD
    if not kind.gradients:
        with torch.no_grad():
            return numbers(kind, given, own)
    buffer = None
    if kind.added is not None:
        buffer = own["grad_weight_out"] = given.weight.to(kind.added, copy=True)
    hidden, weight = (each.detach().requires_grad_() for each in given[:2])
    bias = [given.more[name].detach().requires_grad_() for name in kind.tensors if name == "linear_bias"]
    more = given.more | {"linear_bias": bias[0]} if bias else given.more
    given = given._replace(hidden=hidden, weight=weight, more=more)
    found = numbers(kind, given, own)
    slopes = [each for each in found if each.requires_grad]
    sizes = [each.numel() for each in slopes]
    upstream = [
        part.to(each).view_as(each)
        for part, each in zip(given.upstream[: sum(sizes)].split(sizes), slopes, strict=True)
    ]
    # With a grad_weight_out autograd has none by the weight.
    dhidden, dweight, *dbias = torch.autograd.grad(
        slopes, [hidden, weight, *bias], upstream, allow_unused=True, materialize_grads=True
    )
    if buffer is not None and numbers is _ours:
        dweight = buffer
    elif buffer is not None:
        dweight = dweight.double() + buffer.double()
        dweight = dweight if numbers is _definition else dweight.to(buffer.dtype)
    return [*(each.detach() for each in found), dhidden, dweight, *dbias]


def _ours(kind: Kind, given: Given, own: dict[str, Any]) -> list[Tensor]:
    weight, target = _heads(kind, given)
    terms = {**_terms(kind, given), **own}
    if kind.outputs:
        found = linear_logprob(given.hidden, given.weight, target, outputs=kind.outputs, **terms)
        return _outputs(kind, given, found)
    return [linear_cross_entropy(given.hidden, weight, target, **terms)]


def _definition(kind: Kind, given: Given, _: dict[str, Any]) -> list[Tensor]:
    weight, target = _heads(kind, given)
    terms = _terms(kind, given)
    if kind.outputs:
        return _outputs(kind, given, reference.linear_logprob(given.hidden, given.weight, target, **terms))
    if isinstance(weight, Tensor):
        return [reference.linear_cross_entropy(given.hidden, weight, target, **terms)]
    pairs = zip(weight, target.unbind(-1), strict=True)
    return [torch.stack([reference.linear_cross_entropy(given.hidden, *pair, **terms) for pair in pairs], -1)]


def _torch(kind: Kind, given: Given, own: dict[str, Any]) -> list[Tensor]:
    """The definition, of logits in the operands' dtype, which are its hidden states."""
    logits = F.linear(given.hidden, given.weight).float()
    return _definition(kind, given._replace(hidden=logits, weight=torch.eye(VOCAB).to(logits)), own)


def _terms(kind: Kind, given: Given) -> dict[str, Any]:
    reduction = {} if kind.outputs else {"reduction": "none"}
    return {**reduction, **kind.terms, **{name: given.more[name] for name in kind.tensors}}


def _heads(kind: Kind, given: Given) -> tuple[Tensor | tuple[Tensor, ...], Tensor]:
    """The weight and the target, or those of two heads: a tuple and (N, 2)."""
    weight, target = given.weight, given.target
    if not kind.heads:
        return weight, target
    first = VOCAB // 2
    targets = torch.stack((target, target.roll(1)), -1)
    return weight.split((first, VOCAB - first)), targets.where(targets < 0, targets % first)


def _outputs(kind: Kind, given: Given, found: TokenStats) -> list[Tensor]:
    """What is compared: of an argmax the log-probability, since two classes may be as likely."""
    numbers = []
    for name in kind.outputs:
        number = getattr(found, name)
        if name == "argmax":
            number = given.exact.gather(-1, number.unsqueeze(-1)).squeeze(-1)
        numbers.append(number if name in DIFFERENTIABLE else number.detach().double())
    return numbers


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
