"""Numbers of each token and the gradients by them: launch/ on the emulator, and torch with logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cute_lce.implementation import Request, Stats, StatsOperands, StatsOptions, StatsSaved, StatsUpstream
from cute_lce.launch import STATISTICS
from cute_lce.plan.problem import Limits
from tests.emulated.backward import device
from tests.emulated.forward import Emulator
from tests.numerics import Case, assert_close

NAMES = ("dinput", "dweight", "dbias")


@dataclass(frozen=True)
class Numbers:
    """Which numbers of a case, and of which logits; differentiated: those with an upstream gradient."""

    case: Case
    outputs: tuple[str, ...] = ("logprob",)
    differentiated: tuple[str, ...] = ("logprob",)
    linear_bias: Tensor | None = None
    class_weight: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: Tensor | float = 1.0

    @property
    def options(self) -> StatsOptions:
        number = self.temperature if isinstance(self.temperature, float) else 1.0
        return StatsOptions(self.case.ignore_index, self.logit_scale, self.softcap, number, self.outputs)

    @property
    def operands(self) -> StatsOperands:
        """In memory that the emulator knows."""
        case = self.case
        temperature = self.temperature if isinstance(self.temperature, Tensor) else None
        others = (
            None if each is None else each.clone()
            for each in (self.linear_bias, self.class_weight, temperature)
        )
        return StatsOperands(case.input.clone(), case.linear_weight.clone(), case.target.clone(), *others)

    @property
    def upstream(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(7)
        n = len(self.case.target)
        found = {name: torch.randn(n, generator=generator) * 3 for name in self.differentiated}
        for each in found.values():
            each[::4] = 0
        return found


@dataclass
class Run:
    stats: Stats
    gradients: tuple[Tensor | None, ...]
    emulator: Emulator


def run(
    numbers: Numbers,
    arch: str,
    *,
    window: int = 0,
    sms: int = 4,
    seed: int = 0,
    out: Tensor | None = None,
    need_dinput: bool = True,
    need_dweight: bool = True,
) -> Run:
    """Both passes of launch/."""
    options, request = (
        numbers.options,
        Request(Limits(window), need_dinput=need_dinput, need_dweight=need_dweight),
    )
    request = request._replace(need_dbias=numbers.linear_bias is not None)
    with device(arch, sms, seed) as counts:
        operands = numbers.operands
        stats = STATISTICS.forward(operands, options, request)
        assert stats.row_max is not None
        assert stats.row_sum is not None
        saved = StatsSaved(stats.row_max, stats.row_sum, stats.mean_gap, stats.kept, stats.target_logit)
        upstream = StatsUpstream(**{name: each.clone() for name, each in numbers.upstream.items()})
        total = None if out is None else out.clone()
        gradients = STATISTICS.backward(upstream, operands, saved, options, request, total)
    return Run(stats, gradients if total is None else (gradients[0], total, gradients[2]), counts)


def by_torch(
    numbers: Numbers, wide: torch.dtype, *, rounded: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the numbers, the gradients by NAMES) with logits in `wide`; rounded: with dlogits rounded to the
    operands' dtype, as every implementation does whose products have narrow operands."""
    case, dtype = numbers.case, numbers.case.input.dtype
    hidden, weight = case.input.to(wide), case.linear_weight.to(wide)
    ignored = case.target.long() == case.ignore_index
    temperature = numbers.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.to(wide).masked_fill(ignored, 1)
    product = (hidden @ weight.mT).requires_grad_()
    z = product if numbers.linear_bias is None else product + numbers.linear_bias.to(wide)
    z = z * numbers.logit_scale
    if numbers.softcap is not None:
        z = numbers.softcap * (z / numbers.softcap).tanh()
    z = z / (temperature.unsqueeze(1) if isinstance(temperature, Tensor) else temperature)
    each = z.log_softmax(1)
    own = case.target.long().masked_fill(ignored, 0).unsqueeze(1)
    every = 1 if numbers.class_weight is None else numbers.class_weight.to(wide)
    values = {
        "logprob": each.gather(1, own).squeeze(1),
        "lse": z.logsumexp(1),
        "entropy": -(each.exp() * each.masked_fill(each == -torch.inf, 0)).sum(1),
        "total_nll": -(each * every).sum(1),
    }
    values = {name: value.masked_fill(ignored, 0) for name, value in values.items()}
    total = torch.stack(
        [(values[name] * given.to(wide)).sum() for name, given in numbers.upstream.items()]
    ).sum()
    (dproduct,) = torch.autograd.grad(total, product)
    dbias, factor = dproduct.sum(0), 1.0
    if rounded:
        if dtype is torch.float16:
            factor = dproduct.abs().amax(1, keepdim=True).clamp(min=1e-30)
        dproduct = (dproduct / factor).to(dtype).to(wide)
    gradients = factor * (dproduct @ weight), dproduct.mT @ (factor * hidden), dbias
    return {name: value.detach() for name, value in values.items()}, dict(zip(NAMES, gradients, strict=True))


def check(numbers: Numbers, found: Run) -> None:
    """The numbers and the gradients against float64."""
    values, gradients = by_torch(numbers, torch.float64, rounded=False)
    plain_values, plain_gradients = by_torch(numbers, torch.float32, rounded=True)
    for name in numbers.outputs:
        mine = getattr(found.stats, name)
        assert mine is not None
        assert_close(name, mine, values[name], plain_values[name])
    for name, mine in zip(NAMES, found.gradients, strict=True):
        if mine is not None:
            assert mine.dtype is numbers.case.input.dtype
            assert_close(name, mine, gradients[name], plain_gradients[name].to(mine.dtype))


def unlike(numbers: Numbers, **changes) -> Numbers:
    """The same of other logits."""
    return replace(numbers, **changes)
