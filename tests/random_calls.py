"""Calls that are drawn: ragged sizes, both narrow dtypes, schedules, budgets, windows, layouts, ignored rows.

A number is a call, the same on every machine; its operands' values are drawn on the device that it runs on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from cute_lce import linear_cross_entropy
from tests.gpu.test_forward import misaligned, odd_pitch, transposed
from tests.numerics import Case, assert_close

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda matrix: matrix,
    "odd pitch": odd_pitch,
    "transposed": transposed,
    "misaligned": misaligned,
}
WIDTHS = (64, 128, 256, 768, 1024, 2048, 2880)  # of models, small enough for float64


@dataclass(frozen=True)
class RandomCall:
    """One call.

    budget: None, or where workspace_mb lies between the least that is accepted (0) and what holds every logit
    (1), on a logarithmic scale. ignored: the share of rows that are, at random. layouts: of input and of
    linear_weight. strided: the targets are every other element. need: which gradients are needed, of input
    and of linear_weight. scale: standard deviation of the logits.
    """

    seed: int
    n: int
    d: int
    V: int
    dtype: torch.dtype
    target_dtype: torch.dtype
    reduction: str
    schedule: str
    budget: float | None
    window: int | None
    ignored: float
    ignore_index: int
    layouts: tuple[str, str]
    strided: bool
    need: tuple[bool, bool]
    scale: float


def draw(seed: int, most: tuple[int, int, int] = (2048, 3072, 20000)) -> RandomCall:
    """The call of this number. most: tokens, features and classes; tokens and classes are log-uniform."""
    random = Random(seed)

    def log_uniform(low: float, high: float) -> int:
        return round(math.exp(random.uniform(math.log(low), math.log(high))))

    n, V = log_uniform(1, most[0]), log_uniform(40, most[2])
    widths = (
        8 * random.randint(1, max(most[1] // 16, 1)),
        random.randint(8, max(most[1] // 2, 8)),
        random.choice([width for width in WIDTHS if width <= most[1]]),
        random.randint(max(most[1] // 3, 8), most[1]),
    )
    dtype = random.choice((torch.bfloat16, torch.bfloat16, torch.float16))
    return RandomCall(
        seed=seed,
        n=n,
        d=random.choice(widths),
        V=V,
        dtype=dtype,
        target_dtype=random.choice((torch.int64,) * 5 + (torch.int32,)),
        reduction=random.choice(("mean", "sum", "none")),
        schedule=random.choice(("auto", "recompute", "keep")),
        budget=random.choice((None, None, 0.0, random.random(), random.random(), 1.0)),
        window=random.choice((None, None, None, random.randint(V // 12 + 1, V + 200))),
        ignored=random.choice((0.0, 0.0, 0.1, 0.5, 0.9, 1.0) if seed % 4 == 0 else (0.0, 0.2, 0.6)),
        ignore_index=random.choice((-100, -100, 0, V - 1, V + 7)),
        layouts=(
            random.choice(("rows",) * 6 + tuple(LAYOUTS)),
            random.choice(("rows",) * 6 + tuple(LAYOUTS)),
        ),
        strided=random.random() < 0.2,
        need=random.choice(((True, True),) * 6 + ((True, False), (False, True))),
        scale=random.choice((1.0, 1.0, 3.0)),
    )


def make(call: RandomCall, device: str) -> Case:
    generator = torch.Generator(device).manual_seed(call.seed)

    def normal(rows: int, size: float) -> Tensor:
        values = torch.randn(rows, call.d, generator=generator, device=device)
        return (values * size).to(call.dtype)

    hidden, weight = normal(call.n, 1.0), normal(call.V, call.scale / call.d**0.5)
    target = torch.randint(0, call.V, (call.n,), generator=generator, device=device)
    # A class that is ignore_index is no target by chance.
    target[target == call.ignore_index] = call.V // 2
    chance = torch.rand(call.n, generator=generator, device=device)
    target[chance < call.ignored] = call.ignore_index
    target = target.to(call.target_dtype)
    if call.strided:
        target = torch.stack((target, target), dim=1)[:, 0]
    first, second = (LAYOUTS[layout] for layout in call.layouts)
    return Case(first(hidden), second(weight), target, call.ignore_index)


def workspace_of(call: RandomCall, case: Case) -> float | None:
    """The workspace_mb that call.budget means."""
    if call.budget is None:
        return None
    try:
        run(call, case, 2.0**-20)
        least = 2.0**-20
    except ValueError as refusal:
        found = re.search(r"^workspace_mb: got .*, want at least ([\d.]+)", str(refusal))
        if found is None:
            raise
        least = float(found[1])
    ample = max(least, 1 + 3 * call.n * (call.V + 8 * call.d) / 2**20)
    return least * (ample / least) ** call.budget


def run(
    call: RandomCall,
    case: Case,
    workspace_mb: float | None,
    function: Callable[..., Tensor] = linear_cross_entropy,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(loss, dinput, dlinear_weight), a gradient None where none is needed."""
    hidden = case.input.detach().requires_grad_(call.need[0])
    weight = case.linear_weight.detach().requires_grad_(call.need[1])
    loss = function(
        hidden,
        weight,
        case.target,
        reduction=call.reduction,
        ignore_index=case.ignore_index,
        schedule=call.schedule,
        workspace_mb=workspace_mb,
        window=call.window,
    )
    loss.backward(case.upstream(call.reduction).float())
    return loss.detach(), hidden.grad, weight.grad


def sums_rounding(call: RandomCall, case: Case, loss: Tensor) -> float:
    """The relative error of the loss by the rounding of its logits' sums, which the baseline, of widened
    operands, has less of: tensor cores add 16 products at a time and truncate each sum in float32. Twice what
    that makes of a logit, and some for the logarithm of the sum.

    loss: in float64.
    """
    valid = max(int((case.target != case.ignore_index).sum()), 1)
    size = {"mean": loss, "sum": loss / valid, "none": loss.norm() / valid**0.5}[call.reduction]
    return (call.d / 16 + 8) * 2.0**-23 * call.scale / max(float(size), 2.0**-10)


def check(call: RandomCall, device: str, function: Callable[..., Tensor] = linear_cross_entropy) -> None:
    """Compare all that the call gives with float64."""
    workspace_mb: float | None = None
    try:
        case = make(call, device)
        workspace_mb = workspace_of(call, case)
        found = run(call, case, workspace_mb, function)
        upstream = case.upstream(call.reduction)
        expected = case.expected(upstream, call.reduction)
        baseline = case.baseline(upstream, call.reduction)
        rounding = sums_rounding(call, case, expected[0])
        assert_close("loss", found[0], expected[0], baseline[0], rounding=rounding)
        for i, name in ((1, "dinput"), (2, "dlinear_weight")):
            gradient = found[i]
            assert (gradient is not None) == call.need[i - 1], f"{name}: needed or not, got the other"
            if gradient is not None:
                assert gradient.dtype is call.dtype
                assert_close(name, gradient, expected[i], baseline[i])
    except Exception as error:
        raise AssertionError(
            f"{call}, workspace_mb={workspace_mb}: {type(error).__name__}: {error}"
        ) from error


def check_same_bits(call: RandomCall, device: str) -> None:
    """Two runs give equal bits, whatever memory they have."""
    case = make(call, device)
    workspace_mb = workspace_of(call, case)
    first = run(call, case, workspace_mb)
    # The first run's results are held: the second's memory lies elsewhere.
    second = run(call, case, workspace_mb)
    for name, one, other in zip(("loss", "dinput", "dlinear_weight"), first, second, strict=True):
        same = (one is None and other is None) or (
            one is not None and other is not None and torch.equal(one, other)
        )
        assert same, f"{call}, workspace_mb={workspace_mb}: {name} has other bits in a second run"


def check_all(checked: Callable[[RandomCall, str], None], calls: Iterable[RandomCall], device: str) -> None:
    """Check every call, and say of all that fail how."""
    failed = []
    for call in calls:
        try:
            checked(call, device)
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, "\n".join([f"{len(failed)} calls fail", *failed])
