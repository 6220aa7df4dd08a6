"""Forward and backward on the emulator: launch.py as on a GPU, the kernels executed here, against float64.

Only two things of the package are replaced: which device there is, and where compiled functions come from.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from cute_lce import compiled, launch
from cute_lce import plan as plans
from tests import emulator
from tests.gpu.sanitize import forget_device
from tests.numerics import Case, assert_close


@functools.cache
def emulated(key: tuple) -> emulator.Emulated:
    """The kernels of a key of `compiled`, bound to the emulator."""
    with tempfile.TemporaryDirectory() as folder:
        return emulator.build(compiled.trace(key, f"--keep-ptx --dump-dir {folder}"))


@dataclass
class Emulator:
    """What stands for the compiled functions, and what they counted."""

    seed: int = 0
    results: list[emulator.Result] = field(default_factory=list)
    keys: list[tuple] = field(default_factory=list)

    def get(self, key: tuple):
        self.keys.append(key)
        bound = emulated(key)

        def function(*args):
            self.results.append(emulator.run(bound, *args, seed=self.seed))

        return function

    @property
    def launched(self) -> list[str]:
        return [each.kernel for result in self.results for each in result.launches]


class device:
    """While active, launch's functions on CPU tensors run an emulated device of `sms` SMs."""

    def __init__(self, arch: str, sms: int, seed: int = 0):
        self.arch, self.sms, self.emulator = arch, sms, Emulator(seed)

    def __enter__(self) -> Emulator:
        self._patch = pytest.MonkeyPatch()
        self._memory = emulator.known_allocations()
        self._memory.__enter__()
        forget_device()
        self._patch.setattr(launch, "_architecture", lambda _: (self.arch, self.sms))
        self._patch.setattr(compiled, "_functions", self.emulator)
        return self.emulator

    def __exit__(self, *error):
        self._patch.undo()
        forget_device()
        return self._memory.__exit__(*error)


def narrow_plans(patch: pytest.MonkeyPatch) -> None:
    """Narrow tiles, and few stages so that rings wrap: an emulated tile costs by its columns."""
    configs, gradients = plans.configs, plans.gradient_config
    forget_plans()

    def narrow(config: plans.KernelConfig) -> plans.KernelConfig:
        if plans.is_blackwell(config.arch):
            return replace(config, tile_n=128, stages=3)
        # A multicast wants whole halves of 64 columns of an operand whose rows are not along k.
        return replace(config, tile_n=128, stages=3) if config.tile_n == 256 else replace(config, stages=2)

    def narrow_logits(config: plans.KernelConfig) -> plans.KernelConfig:
        if plans.is_blackwell(config.arch):
            return narrow(config)
        return replace(config, tile_n=64, stages=3)

    patch.setattr(plans, "configs", lambda arch: tuple(map(narrow_logits, configs(arch))))
    patch.setattr(plans, "gradient_config", lambda arch: narrow(gradients(arch)))
    patch.setattr(plans, "STRIPE_MULTIPLE", 128)


def forget_plans() -> None:
    plans.forward.cache_clear()
    plans.backward.cache_clear()


@dataclass
class Run:
    """What a forward and a backward gave, the columns that were kept, and what the emulator counted."""

    loss: Tensor
    dinput: Tensor | None
    dweight: Tensor | None
    kept_columns: int
    emulator: Emulator


def train(
    case: Case,
    arch: str,
    *,
    reduction: str = "none",
    dloss: Tensor | None = None,
    kept_columns: int = 0,
    window: int = 0,
    workspace: int = 0,
    need_dinput: bool = True,
    need_dweight: bool = True,
    sms: int = 4,
    seed: int = 0,
) -> Run:
    """launch.forward (or forward_keep) and launch.backward.

    dloss: the upstream gradient in any dtype and with any strides; None: the case's. kept_columns: whole
    tiles, or V.
    """
    upstream = case.upstream(reduction) if dloss is None else dloss
    with device(arch, sms, seed) as counts:
        operands = (case.input, case.linear_weight, case.target)
        options = (case.ignore_index, reduction, window, workspace)
        if kept_columns:
            loss, *statistics = launch.forward_keep(*operands, *options, kept_columns)
        else:
            loss, *statistics = launch.forward(*operands, *options)
            statistics += [None, None]
        # A strided or expanded float32 vector goes in as it is; others are converted as autograd would.
        upstream = upstream if upstream.dtype is torch.float32 else upstream.float()
        saved = [None if tensor is None else tensor.clone() for tensor in statistics]
        # Known to the emulator: what was made before it was active.
        upstream = _known(upstream)
        arguments = [upstream, *operands, *statistics, *options, need_dinput, need_dweight]
        dinput, dweight = launch.backward(*arguments)
        for before, after in zip(saved, statistics, strict=True):
            if before is not None:
                same = (before == after) | (before.isnan() & after.isnan())
                assert bool(same.all()), "the backward wrote to what the forward saved"
    return Run(loss, dinput, dweight, kept_columns, counts)


def _known(tensor: Tensor) -> Tensor:
    """The tensor with its strides, in memory that the emulator knows."""
    base = torch.full((max(tensor.untyped_storage().nbytes() // tensor.element_size(), 1),), torch.nan)
    copy = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    if all(tensor.stride()):
        copy.copy_(tensor)
    elif tensor.numel():
        base[tensor.storage_offset()] = tensor.flatten()[0]
    return copy


def check(case: Case, run: Run, *, reduction: str = "none", dloss: Tensor | None = None) -> None:
    """Loss and gradients against float64; the bound is that of a GPU's dlogits, rounded once."""
    upstream = case.upstream(reduction) if dloss is None else dloss.double()
    expected = case.expected(upstream, reduction)
    baseline = case.baseline(upstream, reduction, rounded_dlogits=True)
    assert_close("loss", run.loss, expected[0], baseline[0])
    for name, mine, want, plain in (
        ("dinput", run.dinput, expected[1], baseline[1]),
        ("dweight", run.dweight, expected[2], baseline[2]),
    ):
        if mine is not None:
            assert mine.dtype is case.input.dtype
            assert_close(name, mine, want, plain)
