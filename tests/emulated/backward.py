"""Forward and backward on the emulator: launch/ as on a GPU, the kernels executed here, against float64.

Only two things of the package are replaced: which device there is, and where compiled functions come from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from cute_lce import arch as architectures
from cute_lce.arch import Gpu
from cute_lce.launch import KERNELS
from cute_lce.plan import candidates, gemm
from cute_lce.plan import forward as forward_plans
from tests import emulator, passes
from tests.device import forget_plans, planned_for
from tests.emulated.forward import Emulator
from tests.numerics import Case, assert_close, negated


@contextlib.contextmanager
def device(arch: str, sms: int, seed: int = 0, resident: int = 16) -> Iterator[Emulator]:
    """While active, launch/ runs CPU tensors on an emulated device of `sms` SMs; resident: CTAs at once."""
    counts = Emulator(seed, resident)
    with emulator.known_allocations(), planned_for(Gpu(arch, sms), counts):
        yield counts


def narrow_plans(
    patch: pytest.MonkeyPatch,
    *,
    tile_n: int = 64,
    splits: int = 0,
    paced: bool | None = None,
    tall: bool = False,
) -> None:
    """Narrow tiles, and few stages so that rings wrap: an emulated tile costs by its columns.

    tile_n: of the GEMMs whose B are tokens. splits: of dhidden's k; 0: as planned, which is 1 below 1024
    columns. paced: whether clusters pace, every other k tile; None: as planned. tall: whether
    dhidden's GEMM has Hopper's tiling of its own, which is then as narrow. Forwards have none of their own.
    """
    forget_plans()
    for name, row in architectures.ARCHITECTURES.items():
        changed = {"stages": 3} if paced is None else {"stages": 3, "pace": 2}
        narrow = tuple(
            replace(
                each,
                tokens=tuple(
                    dict.fromkeys(replace(tiling, tile_n=tile_n, **changed) for tiling in each.tokens)
                ),
                # Two slices of 64 columns of an operand whose rows are not along k.
                dweight=tuple(replace(tiling, tile_n=128, **changed) for tiling in each.dweight),
                dhidden=tuple(
                    replace(tiling, tile_n=tile_n, **changed) for tiling in row.tilings[-1].dhidden if tall
                ),
                forward=(),
            )
            for each in row.tilings
        )
        patch.setitem(architectures.ARCHITECTURES, name, replace(row, tilings=narrow))
    if tall:
        every = property(
            lambda found: [(each, own) for each in found.tokens for own in found.dhidden or (each,)]
        )
        patch.setattr(architectures.Configs, "pairs", every)
    patch.setattr(candidates, "STRIPE_MULTIPLE", 128)
    if paced is not None:
        for module in (gemm, forward_plans):
            patch.setattr(module, "is_paced", lambda *_: paced)
    if splits:
        patch.setattr(candidates, "LEAST_DEPTH", 1)
        patch.setattr(candidates.Candidates, "_two_sweeps", lambda self: ())
        tokens = candidates._tokens
        patch.setattr(candidates, "_tokens", lambda *call, **kept: (*tokens(*call, **kept)[:2], [splits]))


def half_boxes(patch: pytest.MonkeyPatch, tile_n: int) -> None:
    """Forwards with tiles of so many tokens, an odd multiple of 8, side by side."""
    chosen = forward_plans.choose_config
    changed = {"tile_n": tile_n, "cluster_m": 1, "cluster_n": 2}
    patch.setattr(forward_plans, "choose_config", lambda *call: replace(chosen(*call), **changed))


@dataclass
class Run:
    """What a forward and a backward gave, the columns that were kept, what the emulator counted, and what was
    kept, with its rows' factors."""

    loss: Tensor
    dinput: Tensor | None
    dweight: Tensor | None
    kept_columns: int
    emulator: Emulator
    kept_scale: Tensor | None = None
    kept: Tensor | None = None


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
    resident: int = 16,
    out: Tensor | None = None,
) -> Run:
    """Both passes of launch/. out: what dweight is added to; the Run has the sum.

    dloss: the upstream gradient in any dtype and with any strides; None: the case's. kept_columns: whole
    tiles, or V.
    """
    upstream = case.upstream(reduction) if dloss is None else dloss
    options = {"reduction": reduction, "window": window, "workspace": workspace}
    with device(arch, sms, seed, resident) as counts:
        results = passes.forward(KERNELS, case, kept_columns=kept_columns, **options)
        num_valid = passes.statistics_of(results)[2]
        assert int(num_valid) == int((case.target.long() != case.ignore_index).sum())
        # A strided or expanded float32 vector goes in as it is; others are converted as autograd would.
        upstream = upstream if upstream.dtype is torch.float32 else upstream.float()
        saved = [None if tensor is None else tensor.clone() for tensor in results]
        # Known to the emulator: what was made before it was active.
        upstream = negated(known(upstream)) if upstream.is_neg() else known(upstream)
        needed = {"need_dinput": need_dinput, "need_dweight": need_dweight}
        total = None if out is None else known(out)
        dinput, dweight = passes.backward(KERNELS, case, upstream, results, out=total, **needed, **options)
        if total is not None:
            assert dweight is None
            dweight = total
        for before, after in zip(saved, results, strict=True):
            if before is not None and after is not None:
                same = (before == after) | (before.isnan() & after.isnan())
                assert bool(same.all()), "the backward wrote to what the forward saved"
    return Run(results.loss, dinput, dweight, kept_columns, counts, results.kept_scale, results.kept)


def known(tensor: Tensor) -> Tensor:
    """The tensor with its strides, in memory that the emulator knows."""
    count = max(tensor.untyped_storage().nbytes() // tensor.element_size(), 1)
    between = torch.nan if tensor.is_floating_point() else -100
    base = torch.full((count,), between, dtype=tensor.dtype)
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
