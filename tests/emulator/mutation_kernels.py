"""The kernels whose synchronisation is mutated, how each result is checked, and why some mutations cannot
be found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from . import hopper_forward
from .host import Emulated, build, known_allocations
from .mutate import RULES, Mutation, entry_of, mutations


@dataclass(frozen=True)
class Subject:
    """reasons: (pattern of the statement, what was done, why it cannot be found); `check` runs it and
    compares; `entries` says of a kernel's name whether it is mutated, `rules` how. every: of how many
    mutations one is tried."""

    name: str
    build: Callable[[str], Emulated]
    check: Callable[[Emulated, int], bool]
    seeds: range = range(6)
    least_mutations: int = 1
    missed: int = 0  # how many cannot be found
    reasons: list[tuple[str, str, str]] = field(default_factory=list)
    entries: Callable[[str], bool] = lambda name: True
    rules: list[tuple[str, str, str | None]] = field(default_factory=lambda: RULES)
    every: int = 1

    def mutates(self, ptx: str) -> Callable[[Mutation], bool]:
        """Whether a mutation is of one of the subject's kernels, and tried."""
        own = [each for each in mutations(ptx, self.rules) if self.entries(entry_of(ptx, each.line))]
        tried = {(each.line, each.what) for each in own[:: self.every]}
        return lambda mutation: (mutation.line, mutation.what) in tried

    def reason(self, mutation: Mutation) -> str | None:
        for pattern, what, why in self.reasons:
            if re.search(pattern, mutation.before) and re.search(what, mutation.what):
                return why
        return None


TAIL = (
    r"mbarrier\.try_wait",
    "always succeeds",
    "The producer's tail waits only keep its CTA alive until the consumers have arrived; here something later"
    " keeps it alive anyway.",
)
RELINQUISH = (
    r"tcgen05\.relinquish",
    "relinquish",
    "Equivalent: without it another CTA of this SM allocates only when this one has ended; here no CTA waits"
    " for another of its SM (test_without_relinquish_two_ctas_of_an_sm_take_turns).",
)
MEETS = (
    r"bar\.sync\s+(2|%r\d+), 128",
    "removed",
    "Before a group's warps write their statistics to shared memory they meet, since one may not have read"
    " those of the run before yet; here all wait for a tile in between.",
)
GLOBAL_FENCE = (
    r"fence\.acq_rel\.gpu",
    "fence removed",
    "Orders global memory between CTAs; the emulator's is sequentially consistent (README, limits).",
)
TWO_FENCES = (
    r"fence\.mbarrier_init",
    "fence removed",
    "The kernel has two of these fences in a row, and either makes all mbarriers visible.",
)
# Of GEMMs whose epilogues have `scarce_registers` (gemm_sm90.py).
LOOP_FENCE = (
    r"wgmma\.fence",
    "removed",
    "The first k tile's fence has ordered the accumulators, which WGMMAs alone access until the tile ends.",
)


def _close(out: torch.Tensor, reference: torch.Tensor) -> bool:
    return bool(((out.double() - reference).norm() / reference.norm()).item() < 1e-6)


def _gemm_check(m: int, n: int, k: int):
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(m, k, generator=g).bfloat16(), torch.randn(n, k, generator=g).bfloat16()
    reference = a.double() @ b.double().T

    def check(emulated: Emulated, seed: int) -> bool:
        out = torch.full((m, n), float("nan"))
        emulated.run(a, b, out, seed=seed)
        return _close(out, reference)

    return check


def _wgmma(cluster):
    def make(folder):
        import cutlass  # pyright: ignore[reportMissingImports]

        from .hardware import kernels_sm90

        return build(kernels_sm90.compile_gemm(cutlass.BFloat16, (64, 64, 64), cluster, folder=folder))

    return make


def _tcgen05(**config):
    def make(folder):
        import cutlass  # pyright: ignore[reportMissingImports]

        from . import kernels_sm100

        return build(kernels_sm100.compile_gemm(cutlass.BFloat16, folder=folder, **config))

    return make


def _scale(folder):
    import cutlass  # pyright: ignore[reportMissingImports]

    from .hardware import kernels_sm90

    return build(kernels_sm90.compile_scale(cutlass.BFloat16, (32, 64), False, folder))


def _scale_check(emulated: Emulated, seed: int) -> bool:
    x = torch.randn(150, 104, generator=torch.Generator().manual_seed(2)).bfloat16()
    out = torch.full_like(x, float("nan"))
    emulated.run(x, out, seed=seed)
    return torch.equal(out, 2 * x)


def _row_sum(folder):
    from .hardware import kernels_sm90

    return build(kernels_sm90.compile_row_sum(folder))


def _row_sum_check(emulated: Emulated, seed: int) -> bool:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(3))
    out = torch.full((5,), float("nan"))
    emulated.run(x, out, seed=seed)
    return _close(out, x.double().sum(1))


def _forward_check(pingpong: bool):
    tensors = hopper_forward.inputs()
    expected = hopper_forward.reference(*tensors)

    def check(emulated: Emulated, seed: int) -> bool:
        def function(*args):
            emulated.run(*args, seed=seed)

        with known_allocations():
            results = hopper_forward.call(function, pingpong, *tensors)
        error = (results.double() - expected).abs()
        return bool((error <= 1e-5 * expected.abs().clamp(min=1)).all())

    return check


KERNELS = [
    Subject("row sum through shared memory", _row_sum, _row_sum_check, least_mutations=2),
    Subject("TMA load, scale, TMA store", _scale, _scale_check, least_mutations=20, missed=2, reasons=[TAIL]),
    Subject(
        "wgmma GEMM", _wgmma((1, 1)), _gemm_check(64, 64, 320), least_mutations=18, missed=2, reasons=[TAIL]
    ),
    Subject(
        "wgmma GEMM, cluster 2x1, multicast",
        _wgmma((2, 1)),
        _gemm_check(128, 64, 320),
        least_mutations=20,
        missed=1,
        reasons=[TAIL],
    ),
    Subject(
        "tcgen05 GEMM",
        _tcgen05(),
        _gemm_check(128, 256, 136),
        least_mutations=25,
        missed=4,
        reasons=[TAIL, RELINQUISH],
    ),
    Subject(
        "tcgen05 GEMM, CTA pair",
        _tcgen05(pair=True),
        _gemm_check(256, 256, 136),
        least_mutations=30,
        missed=6,
        reasons=[TAIL, RELINQUISH, TWO_FENCES],
    ),
    Subject(
        "tcgen05 GEMM, two CTA pairs, multicast",
        _tcgen05(pair=True, cluster_n=2),
        _gemm_check(256, 512, 72),
        least_mutations=30,
        missed=5,
        reasons=[TAIL, RELINQUISH, TWO_FENCES],
    ),
    *(
        Subject(
            f"the Hopper forward, {'ping-pong' if pingpong else 'cooperative'}",
            lambda folder, pingpong=pingpong: build(hopper_forward.trace(pingpong, folder)),
            _forward_check(pingpong),
            seeds=range(3),
            least_mutations=25,
            missed=4,
            reasons=[TAIL, GLOBAL_FENCE, LOOP_FENCE, MEETS],
            # Kernels that this call does not launch: it neither compacts nor paces.
            entries=lambda entry: not re.search("Gather|_clear", entry),
        )
        for pingpong in (False, True)
    ),
]
