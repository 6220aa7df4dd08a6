"""The forward on the emulator: launch/ as on a GPU, its kernels executed here, against float64."""

from __future__ import annotations

import functools
import gc
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from cute_lce.arch import Gpu, KernelConfig
from cute_lce.launch import KERNELS
from cute_lce.plan import forward as plans
from cute_lce.plan.kernels import Key
from cute_lce.plan.problem import Limits, round_up
from tests import emulator, passes, store
from tests.device import planned_for
from tests.numerics import Case, assert_close, random_case

BF16, FP16 = torch.bfloat16, torch.float16


@functools.cache
def emulated(key: Key) -> emulator.Emulated:
    """The kernels of a key, bound to the emulator."""
    found = emulator.load(store.compiled(key))
    # It stays, and its hundred thousand objects would slow down every later collection.
    gc.collect()
    gc.freeze()
    return found


def _products(instructions: Counter) -> int:
    return sum(count for name, count in instructions.items() if "wgmma.mma" in name or "tcgen05.mma" in name)


@dataclass
class Emulator:
    """What stands for the compiled functions, and what they counted.

    resident: CTAs at once. program: what every key gets; None: the key's kernels.
    """

    seed: int = 0
    resident: int = 16
    program: emulator.Emulated | None = None
    results: list[emulator.Result] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)

    def get(self, key: Key) -> Callable[..., None]:
        self.keys.append(key)
        bound = self.program or emulated(key)

        def function(*args) -> None:
            result = emulator.run(bound, *args, seed=self.seed, resident=self.resident)
            late = [launch.kernel for launch in result.launches if not launch.by_pdl]
            # Of dweight, where dinput's is in another call.
            assert not late or (len(late) == 1 and "Gemm" in late[0]), late
            self.results.append(result)

        return function

    @property
    def products(self) -> list[int]:
        """Instructions of tensor cores, of a warp each, of every launch that has some."""
        launches = (by_warp.values() for result in self.results for by_warp in result.by_launch)
        counts = (sum(_products(warp) for warp in warps) for warps in launches)
        return [count for count in counts if count]

    @property
    def launched(self) -> list[str]:
        return [each.kernel for result in self.results for each in result.launches]


@dataclass
class Run:
    """What a forward gave, its plan, and what the emulator counted."""

    loss: torch.Tensor
    row_max: torch.Tensor
    row_sum: torch.Tensor
    num_valid: torch.Tensor
    plan: plans.ForwardPlan
    counts: emulator.Result


def forward(
    case: Case,
    config: KernelConfig,
    *,
    sms: int = 4,
    window: int = 0,
    seed: int = 0,
    reduction: str = "none",
    paced: bool | None = None,
    group: int | None = None,
    resident: int = 16,
    program: emulator.Emulated | None = None,
) -> Run:
    """A forward with the emulator in place of the GPU; memory that nobody writes holds nan.

    sms: of the device that the plan is for. paced, group: instead of the plan's. resident: CTAs at once.
    program: of the same config, with other PTX.
    """
    n, d = case.input.shape
    gpu, V = Gpu(config.arch, sms), case.linear_weight.shape[0]
    chosen = plans.plan(gpu, n, round_up(d, 8), V, Limits(window), config)
    gemm = chosen.gemm._replace(
        paced=chosen.gemm.paced if paced is None else int(paced),
        group=chosen.gemm.group if group is None else group,
    )
    chosen = replace(chosen, gemm=gemm)
    counts = Emulator(seed, resident, program)
    with planned_for(gpu, counts, chosen), emulator.known_allocations():
        results = passes.forward(KERNELS, case, reduction=reduction, window=window)
    return Run(results.loss, *passes.statistics_of(results), chosen, *counts.results)


def reference(case: Case, dtype: torch.dtype):
    """(loss, lse, the target's logit, valid) of each row in `dtype`."""
    logits = case.input.to(dtype) @ case.linear_weight.to(dtype).mT
    valid = case.target != case.ignore_index
    lse = logits.logsumexp(1)
    picked = logits.gather(1, case.target.long().where(valid, 0).unsqueeze(1))[:, 0]
    return (lse - picked).where(valid, 0), lse, picked, valid


def check(case: Case, run: Run) -> None:
    """Loss and statistics against float64."""
    expected, baseline = reference(case, torch.float64), reference(case, torch.float32)
    assert_close("loss", run.loss, expected[0], baseline[0])
    lse = run.row_max.double() + run.row_sum.double().log()
    assert_close("lse", lse.float(), expected[1], baseline[1])
    # What exponentials are relative to: near lse, and the target's logit if it has most of the sum.
    far = (run.row_max - expected[1]).abs()
    assert bool(far.le(1.5 + 1e-6 * expected[1].abs()).all())
    most = expected[3] & (expected[0] < 0.99 * math.log(2))
    assert_close(
        "row_max", run.row_max.where(most, 0), expected[2].where(most, 0), baseline[2].where(most, 0)
    )
    assert int(run.num_valid) == int(expected[3].sum())


def rows(case: Case, which: torch.Tensor) -> Case:
    """The case of some of its rows."""
    return replace(case, input=case.input[which], target=case.target[which])


def rows_of(run: Run, which: torch.Tensor) -> Run:
    """What a forward gave for some of its rows, none of the others ignored."""
    return replace(
        run,
        loss=run.loss[which],
        row_max=run.row_max[which],
        row_sum=run.row_sum[which],
        num_valid=run.num_valid - int((~which).sum()),
    )


def ignoring(case: Case) -> Case:
    target = case.target.clone()
    target[1::3] = case.ignore_index
    return replace(case, target=target)


def scaled(case: Case, scale: float) -> Case:
    """Logits whose largest are about +-scale."""
    logits = case.input.float() @ case.linear_weight.float().mT
    return replace(case, linear_weight=case.linear_weight * (scale / logits.abs().max()))


def last_column(case: Case) -> Case:
    return replace(case, target=torch.full_like(case.target, case.linear_weight.shape[0] - 1))


def offset(case: Case, by: float) -> Case:
    """All logits of about `by` and more."""
    hidden, weight = case.input.clone(), case.linear_weight.clone()
    hidden[:, 0], weight[:, 0] = 1, by
    return replace(case, input=hidden, linear_weight=weight)


def sloped(case: Case, first: float, last: float) -> Case:
    """Every other row's logits rise, or fall, from class to class, by so many nats from about `first` on."""
    hidden, weight = case.input.clone(), case.linear_weight.clone()
    hidden[:, 0] = torch.arange(len(hidden)) % 2
    weight[:, 0] = torch.linspace(first, last, len(weight))
    return replace(case, input=hidden, linear_weight=weight)


def confident(case: Case, above: float) -> Case:
    """Rows along their targets' own columns, whose logits stand about so much above the others."""
    weight = case.linear_weight.float()
    along = weight[case.target] / weight[case.target].norm(dim=1, keepdim=True) ** 2
    return replace(case, input=(above * along).to(case.input.dtype))


def sick_rows(case: Case, which: list[int]) -> Case:
    """A nan in each of these rows."""
    hidden = case.input.clone()
    hidden[which, case.input.shape[1] // 2] = torch.nan
    return replace(case, input=hidden)


def minus_infinity(case: Case, first_tile: int) -> Case:
    """Every other logit and a whole tile of them -inf, the first columns too; targets are finite."""
    hidden, weight = case.input.clone(), case.linear_weight.clone()
    hidden[:, 0] = 1
    weight[::2, 0] = -torch.inf
    weight[:first_tile, 0] = -torch.inf
    V = weight.shape[0]
    finite = torch.arange(first_tile | 1, V, 2)
    return replace(case, input=hidden, linear_weight=weight, target=finite[case.target % len(finite)])


CORNERS = {
    "ragged": lambda: random_case(140, 72, 201, BF16),
    "ragged, fp16": lambda: random_case(140, 72, 201, FP16),
    "whole tiles": lambda: random_case(128, 64, 256, BF16),
    "one token": lambda: random_case(1, 64, 257, BF16),
    "one class": lambda: random_case(130, 64, 1, BF16),
    "V below a tile": lambda: random_case(129, 40, 7, BF16),
    "V one above a tile": lambda: random_case(40, 64, 129, BF16),
    "d of one 16-byte row": lambda: random_case(64, 8, 200, BF16),
    "d padded": lambda: random_case(64, 37, 200, BF16),
    "d of many k tiles": lambda: random_case(40, 1000, 150, BF16),
    "ignored rows": lambda: ignoring(random_case(140, 64, 200, BF16)),
    "all ignored": lambda: replace(random_case(70, 64, 200, BF16), target=torch.full((70,), -100)),
    "targets in the last column": lambda: last_column(random_case(140, 64, 257, BF16)),
    "int32 targets": lambda: replace(
        random_case(40, 64, 200, BF16), target=random_case(40, 64, 200, BF16).target.int()
    ),
    "logits of +-1e4": lambda: scaled(random_case(70, 64, 200, BF16), 1e4),
    "logits of +-1e4, fp16": lambda: scaled(random_case(70, 64, 200, FP16, scale=8), 1e4),
    "logits of +-60": lambda: scaled(random_case(70, 64, 200, BF16), 60),
    "common offset of 300": lambda: offset(random_case(70, 64, 200, BF16), 300),
    "common offset of -60": lambda: offset(random_case(70, 64, 200, BF16), -60),
    "rising logits": lambda: sloped(random_case(70, 64, 700, BF16), 0, 300),
    "falling logits": lambda: sloped(random_case(70, 64, 700, BF16), 300, -300),
    "logits that rise from -200": lambda: sloped(random_case(70, 64, 700, BF16), -200, 30),
    "confident rows": lambda: confident(random_case(70, 256, 300, BF16), 12),
    "common offset of -10000, fp16": lambda: offset(random_case(70, 64, 200, FP16), -10000),
}
