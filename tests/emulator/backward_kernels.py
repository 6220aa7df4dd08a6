"""The backward's GEMMs and the forward that keeps, on both architectures, as subjects of mutations.

What is right is what the unchanged kernels give, which is compared with float64 first: equal bits, since
they promise the same bits in every schedule.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from .host import Emulated
from .mutation_kernels import GLOBAL_FENCE, RELINQUISH, TAIL, TWO_FENCES, Subject

# n, d, V, columns of a stripe. Three or more tiles and k tiles of each GEMM for the only cluster, so that
# rings wrap and each of Blackwell's accumulators is used again; two stripes, of which the second adds to the
# first's dinput.
SIZES = {"sm_90a": (140, 136, 260, 130), "sm_100a": (280, 136, 520, 260)}
KEPT = 128
SMS = 2
GEMMS = ("dlogits", "dinput", "dweight")

TCGEN05_FENCE = (
    r"tcgen05\.fence",
    "removed",
    "The PTX ISA asks for it; the emulator's barriers order tcgen05 operations without.",
)


def case(arch: str, keeps: bool):
    """Ignored rows; for what keeps also rows that rise above their reference in some columns."""
    from tests.emulated_forward import ignoring
    from tests.numerics import random_case
    from tests.test_gpu_backward import jumping

    plain = random_case(*SIZES[arch][:3], torch.bfloat16)
    return ignoring(jumping(plain, {20: 100.0, 200: 300.0}, slice(0, None, 8)) if keeps else plain)


@contextlib.contextmanager
def _emulating(arch: str, seed: int) -> Iterator:
    """launch's functions run the emulator, with narrow tiles, and what nobody writes is nan."""
    from tests.emulated_backward import device, forget_plans, narrow_plans

    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with pytest.MonkeyPatch.context() as patch:
        narrow_plans(patch)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with device(arch, SMS, seed) as counts:
                yield counts
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    forget_plans()


def _keep(arch: str, seed: int) -> tuple[tuple, list[Tensor]]:
    """(key, results) of a forward that keeps: the statistics, what is kept, and the rows' factors."""
    from cute_lce import launch

    this = case(arch, True)
    operands = (this.input, this.linear_weight, this.target, this.ignore_index)
    with _emulating(arch, seed) as counts:
        *statistics, kept, kept_scale = launch.forward_keep(*operands, "none", 0, 0, KEPT)
    return counts.keys[0], [*statistics, kept[:, :KEPT], kept_scale]


@functools.cache
def _statistics(arch: str) -> list[Tensor]:
    """row_max, row_sum and num_valid of the case, of which the mutated backward starts."""
    from cute_lce import launch

    this = case(arch, False)
    with _emulating(arch, 0):
        operands = (this.input, this.linear_weight, this.target, this.ignore_index)
        return [t.clone() for t in launch.forward(*operands, "none", 0, 0)[1:]]


def _backward(arch: str, seed: int) -> tuple[tuple, list[Tensor]]:
    """(key, results) of a backward in two stripes."""
    from cute_lce import launch

    this = case(arch, False)
    statistics = _statistics(arch)
    with _emulating(arch, seed) as counts:
        saved = [t.clone() for t in statistics]
        dloss = this.upstream("none").float()
        operands = (this.input, this.linear_weight, this.target)
        options = (this.ignore_index, "none", SIZES[arch][3], 0, True, True)
        arguments = [dloss, *operands, *saved, None, None, *options]
        gradients = launch.backward(*arguments)
    return counts.keys[0], [g for g in gradients if g is not None]


def _check_keep(arch: str, results: list[Tensor]) -> None:
    """What is kept, times the rows' factors, is softmax - onehot, 0 in ignored rows."""
    from tests.numerics import assert_close

    this = case(arch, True)
    valid = this.target != this.ignore_index
    kept, scale = results[-2:]
    dlogits = (this.input.double() @ this.linear_weight.double().T).softmax(1)
    dlogits[torch.arange(len(valid)), this.target.where(valid, 0)] -= 1
    wanted = dlogits[:, :KEPT].where(valid.unsqueeze(1), 0)
    assert_close("kept", kept.float() * scale.unsqueeze(1), wanted, wanted.bfloat16())


def _check_backward(arch: str, results: list[Tensor]) -> None:
    from tests.numerics import assert_close

    this = case(arch, False)
    dloss = this.upstream("none")
    _, *wanted = this.expected(dloss, "none")
    _, *plain = this.baseline(dloss, "none", rounded_dlogits=True)
    for name, mine, want, base in zip(("dinput", "dweight"), results, wanted, plain, strict=True):
        assert_close(name, mine, want, base)


def _same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _subject(arch: str, which: str, **options) -> Subject:
    """which: one of GEMMS, or "keep"."""
    run: Callable[[str, int], tuple[tuple, list[Tensor]]] = _keep if which == "keep" else _backward

    @functools.cache
    def expected() -> list[Tensor]:
        """Of the kernels as they are: the first call is before any mutation."""
        results = run(arch, 0)[1]
        (_check_keep if which == "keep" else _check_backward)(arch, results)
        return results

    def build(folder: str) -> Emulated:
        from tests.emulated_backward import emulated

        return emulated(run(arch, 0)[0])

    def check(program: Emulated, seed: int) -> bool:
        return _same(run(arch, seed)[1], expected())

    def mine(entry: str) -> bool:
        if which == "keep":
            return "Gemm" in entry or "Finish" in entry
        # The host function launches them in this order, with the scaling of rows behind the first.
        return re.search(rf"Gemm.*_{(0, 2, 3)[GEMMS.index(which)]}$", entry) is not None

    name = "the forward that keeps" if which == "keep" else f"the backward's GEMM of {which}"
    place = "Blackwell" if arch.startswith("sm_10") else "Hopper"
    return Subject(f"{name}, {place}", build, check, range(6), entries=mine, **options)


def subjects() -> list[Subject]:
    found = []
    for which in (*GEMMS, "keep"):
        found.append(_subject("sm_90a", which, least_mutations=20, missed=2, reasons=[TAIL, GLOBAL_FENCE]))
        found.append(
            _subject(
                "sm_100a",
                which,
                least_mutations=30,
                missed=10,
                reasons=[TAIL, RELINQUISH, TWO_FENCES, TCGEN05_FENCE],
            )
        )
    return found
