"""Numbers of each token and the gradients by them: launch/ on the emulator, and torch with logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_lce.implementation import (
    Request,
    RowLoss,
    Stats,
    StatsOperands,
    StatsOptions,
    StatsSaved,
    StatsUpstream,
)
from cute_lce.launch import STATISTICS
from cute_lce.logit_term import term_of
from cute_lce.options import TermOptions
from cute_lce.plan.problem import Limits
from cute_lce.torch_ops import logit_of
from tests.emulated.backward import device
from tests.emulated.forward import Emulator, offset, scaled
from tests.numerics import Case, assert_close, jumping, random_case

NAMES = ("dinput", "dweight", "dbias")
PLAIN = ("log_sum_sq_probs", "mean_logit", "argmax", "is_top1")
"""Without a gradient."""
TEMPERATURES = torch.linspace(0.3, 3, 21)
TEMPERATURES[1] = torch.nan
"""Of 21 tokens, of which `ignoring` ignores that one."""
CORNERS = {
    "common offset of 10000": lambda: offset(random_case(20, 64, 137, torch.bfloat16), 10000),
    "logits of +-60": lambda: scaled(random_case(20, 64, 201, torch.bfloat16), 60),
    "logits of +-1e4": lambda: scaled(random_case(20, 64, 201, torch.bfloat16, scale=8), 1e4),
    "rows that rise": lambda: jumping(
        random_case(20, 64, 201, torch.bfloat16, scale=4.0), {20: 100.0, 150: 300.0}, slice(0, None, 2)
    ),
    "hardly any logit differs": lambda: random_case(20, 64, 201, torch.bfloat16, scale=0.02),
}


def repeating(case: Case) -> Case:
    """Each class again in its thread, in its warp and in other tiles: the first of equal ones wins."""
    weight = case.linear_weight.clone()
    half = len(weight) // 2
    weight[8:16], weight[16:32] = weight[:8], weight[:16]
    weight[64:96] = weight[:32]
    weight[half : 2 * half] = weight[:half]
    target = torch.where(torch.arange(len(case.target)) % 2 == 0, case.target, case.target % half)
    case = replace(case, linear_weight=weight, target=target)
    top = (case.input.double() @ weight.double().mT).argmax(1)
    return replace(case, target=torch.where(torch.arange(len(top)) % 3 == 0, top, target))


def given_ids(case: Case, K: int, seed: int = 0) -> Tensor:
    """Some the target, some equal, neighbours on both sides of a unit's end, the last class, and no class."""
    n, V = len(case.target), len(case.linear_weight)
    ids = torch.randint(V, (n, K), generator=torch.Generator().manual_seed(seed))
    ids[::2, 0] = case.target.long()[::2]
    ids[1::3, 1], ids[2::3, -1] = ids[1::3, 0], V - 1
    ids[::5] = (torch.arange(K) + 252) % V
    ids[3::7, K // 2], ids[4::7, 2] = -5, V + seed
    return ids


@dataclass(frozen=True)
class Numbers:
    """Which numbers of a case, and of which logits; differentiated: those with an upstream gradient."""

    case: Case
    outputs: tuple[str, ...] = ("logprob",)
    differentiated: tuple[str, ...] = ("logprob",)
    linear_bias: Tensor | None = None
    class_weight: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None  # or a LogitTerm's key
    temperature: Tensor | float = 1.0
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    entropy_grad: bool = True
    topk_ids: Tensor | None = None

    @property
    def options(self) -> StatsOptions:
        number = self.temperature if isinstance(self.temperature, float) else 1.0
        logits = self.case.ignore_index, self.logit_scale, self.softcap, number
        return StatsOptions(*logits, self.outputs, self.z_loss, self.label_smoothing, self.entropy_grad)

    @property
    def is_loss(self) -> bool:
        """Whether a RowLoss of the numbers is differentiated, whose upstream gradient is logprob's."""
        return self.z_loss != 0 or self.label_smoothing != 0

    def row_losses(self, values: dict[str, Tensor]) -> Tensor:
        """Of the numbers; class weights are the targets' too."""
        own = None
        if self.class_weight is not None:
            ignored = self.case.target == self.case.ignore_index
            own = self.class_weight.to(values["logprob"])[self.case.target.long().masked_fill(ignored, 0)]
            own = own.masked_fill(ignored, 0)
        terms = TermOptions(self.label_smoothing, None, self.z_loss)
        stats, classes = Stats(**values), self.case.linear_weight.shape[0]
        return RowLoss(terms, own, None).losses(-values["logprob"], stats, classes)

    @property
    def operands(self) -> StatsOperands:
        """In memory that the emulator knows."""
        case = self.case
        temperature = self.temperature if isinstance(self.temperature, Tensor) else None
        others = (
            None if each is None else each.clone()
            for each in (self.linear_bias, self.class_weight, temperature, self.topk_ids)
        )
        return StatsOperands(case.input.clone(), case.linear_weight.clone(), case.target.clone(), *others)

    @property
    def upstream(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(7)
        n = len(self.case.target)
        shapes = {"topk_logprob": () if self.topk_ids is None else self.topk_ids.shape}
        found = {
            name: torch.randn(shapes.get(name, (n,)), generator=generator) * 3 for name in self.differentiated
        }
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
    kept_columns: int = 0,
    stats: Stats | None = None,
    overwrites: bool = False,
) -> Run:
    """Both passes of launch/, or, given what a forward of these numbers returned, the backward alone.
    overwrites: what was kept."""
    options = numbers.options
    request = Request(Limits(window), kept_columns, need_dinput=need_dinput, need_dweight=need_dweight)
    request = request._replace(need_dbias=numbers.linear_bias is not None, overwrites=overwrites)
    with device(arch, sms, seed) as counts:
        operands = numbers.operands
        if stats is None:
            stats = STATISTICS.forward(operands, options, request)
        else:  # in memory that the emulator knows
            stats = Stats(*(None if each is None else each.clone() for each in stats))
        assert stats.row_max is not None
        assert stats.row_sum is not None
        saved = StatsSaved(**{name: getattr(stats, name) for name in StatsSaved._fields})
        before = [None if each is None else each.clone() for each in saved]
        upstream = StatsUpstream(**_upstream(numbers, stats))
        total = None if out is None else out.clone()
        gradients = STATISTICS.backward(upstream, operands, saved, options, request, total)
    for name, one, other in zip(StatsSaved._fields, before, saved, strict=True):
        if overwrites and name == "kept":
            assert other is not None
            assert (other.untyped_storage().nbytes() == 0) is (other.dtype is torch.float16)
        elif one is not None and other is not None:
            same = (one == other) | (one.isnan() & other.isnan())
            assert bool(same.all()), "the backward wrote to what the forward saved"
    return Run(stats, gradients if total is None else (gradients[0], total, gradients[2]), counts)


def _upstream(numbers: Numbers, stats: Stats) -> dict[str, Tensor]:
    given = {name: each.clone() for name, each in numbers.upstream.items()}
    if not numbers.is_loss:
        return given
    leaves = {name: getattr(stats, name).detach().requires_grad_() for name in numbers.outputs}
    losses = numbers.row_losses(leaves)
    found = torch.autograd.grad(losses, [*leaves.values()], given["logprob"])
    return dict(zip(leaves, found, strict=True))


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
    term = term_of(numbers.softcap)
    if term is not None:
        z = logit_of(term, z)
    elif numbers.softcap is not None:
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
        "log_sum_sq_probs": each.exp().square().sum(1).log(),
        "mean_logit": z.mean(1),
        "argmax": z.argmax(1),
    }
    values = {name: value.masked_fill(ignored, 0) for name, value in values.items()}
    if numbers.topk_ids is not None:
        ids, V = numbers.topk_ids.long(), case.linear_weight.shape[0]
        values["topk_logprob"] = each.gather(1, ids.clamp(0, V - 1))
        nothing = (ids < 0) | (ids >= V) | ignored.unsqueeze(1)
        values["topk_logprob"] = values["topk_logprob"].masked_fill(nothing, 0)
    values["is_top1"] = (values["argmax"] == case.target) & ~ignored
    upstream = {name: given.to(wide) for name, given in numbers.upstream.items()}
    if numbers.is_loss:
        own = {name: values[name] for name in numbers.outputs}
        total = (numbers.row_losses(own) * upstream["logprob"]).sum()
    else:
        total = torch.stack([(values[name] * given).sum() for name, given in upstream.items()]).sum()
    (dproduct,) = torch.autograd.grad(total, product)
    dbias, factor = dproduct.sum(0), 1.0
    if rounded:
        if dtype is torch.float16:
            factor = dproduct.abs().amax(1, keepdim=True).clamp(min=1e-30)
        dproduct = (dproduct / factor).to(dtype).to(wide)
    gradients = factor * (dproduct @ weight), dproduct.mT @ (factor * hidden), dbias
    return {name: value.detach() for name, value in values.items()}, dict(zip(NAMES, gradients, strict=True))


def agree(name: str, mine: Tensor, expected: Tensor, plain: Tensor) -> None:
    """A number; integers are equal."""
    if mine.is_floating_point():
        assert_close(name, mine, expected, plain)
    else:
        assert mine.dtype is expected.dtype
        assert torch.equal(mine, expected), name


each_need = pytest.mark.parametrize(
    "needs", [{"need_dinput": False}, {"need_dweight": False}, {"out": torch.float32}]
)


def check_needs(
    numbers: Numbers, passes: Callable[..., Run], arch: str, kept: int, needs: dict[str, Any]
) -> None:
    """One gradient alone, or dweight added to a matrix: needs, one of each_need. passes: as `run`, with how
    many columns are kept."""
    if "out" not in needs:
        check(numbers, passes(numbers, arch, kept, **needs))
        return
    before = torch.randn_like(numbers.case.linear_weight, dtype=needs["out"])
    found = passes(numbers, arch, kept, out=before)
    dinput, total, _ = found.gradients
    assert total is not None
    found.gradients = dinput, (total - before).to(numbers.case.input.dtype), None
    check(numbers, found)


def check(numbers: Numbers, found: Run) -> None:
    """The numbers and the gradients against float64."""
    values, gradients = by_torch(numbers, torch.float64, rounded=False)
    plain_values, plain_gradients = by_torch(numbers, torch.float32, rounded=True)
    for name in numbers.outputs:
        mine = getattr(found.stats, name)
        assert mine is not None
        agree(name, mine, values[name], plain_values[name])
    for name, mine in zip(NAMES, found.gradients, strict=True):
        if mine is not None:
            assert mine.dtype is numbers.case.input.dtype
            assert_close(name, mine, gradients[name], plain_gradients[name].to(mine.dtype))


def unlike(numbers: Numbers, **changes) -> Numbers:
    """The same of other logits."""
    return replace(numbers, **changes)
