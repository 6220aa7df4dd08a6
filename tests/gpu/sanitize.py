"""What compute-sanitizer runs: the kernels on small shapes, every configuration, both dtypes.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    run="python3 -m tests.gpu.sanitize"
    options="--error-exitcode 9 --kernel-name kns=cutlass"
    compute-sanitizer --tool memcheck $options --report-api-errors no $run
    compute-sanitizer --tool racecheck $options $run
    compute-sanitizer --tool racecheck --kernel-name kns=sm90 $run --baseline

Of the wheels nvidia-cuda-sanitizer-api, 13.5.25 has all parts of the tool; those up to 13.2.87 lack its
launchers. API errors are the DSL's, which asks an older driver for functions of its own CUDA version.
PYTORCH_NO_CUDA_MEMORY_CACHING gives each tensor an allocation of its own, so that memcheck sees where it
ends. --baseline runs torch.mm on the same shapes, whose Hopper kernels are CUTLASS's: a finding that it has
too is the tool's. --only runs a part: forwards, backwards, numbers of tokens with their gradients,
grad_in_forward and gradients added to a buffer, or compacted tokens.
What is computed is compared with float64: a run that fails has computed something else.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch

from cute_lce import launch
from cute_lce.arch import Gpu, KernelConfig
from cute_lce.launch import KERNELS
from cute_lce.plan import forward as plans
from cute_lce.plan import memory
from cute_lce.plan.problem import Limits, round_up
from tests import passes
from tests.device import forget_plans, planned_for
from tests.gpu.test_accumulate import test_dweight_is_added, test_grad_in_forward
from tests.gpu.test_backward import Kept, Trained, some_ignored
from tests.gpu.test_rows import SCHEDULES, test_which_are_valid
from tests.gpu.test_terms import KEPT_LOGITS, test_the_kernels_topk, test_what_is_kept_for_numbers
from tests.numerics import Case, jumping, random_case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FEW = 4  # SMs that a plan is told of, so that each cluster has several runs

# Ragged in every direction; several windows and runs a cluster; one token and one class; whole tiles.
SHAPES = [(300, 72, 1000, 192), (1, 8, 1, 0), (256, 128, 384, 0), (700, 200, 2000, 400)]


def forward(case: Case, config: KernelConfig, window: int, sms: int) -> None:
    """One forward of a configuration, checked to a digit or two: the tests check the numbers."""
    gpu, (n, d), V = Gpu(config.arch, sms), case.input.shape, case.linear_weight.shape[0]
    plan = plans.plan(gpu, n, round_up(d, 8), V, Limits(window), config)
    with planned_for(gpu, forward=plan):
        loss = passes.forward(KERNELS, case, reduction="mean", window=window).loss
    expected = torch.nn.functional.cross_entropy(
        case.input.float() @ case.linear_weight.float().T, case.target
    )
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)


@dataclass(frozen=True)
class Step:
    """One forward and backward.

    kept: the type, and the share of the vocabulary that the forward keeps, of which whole tiles are kept.
    window: columns of a stripe that is not kept, 0: one stripe. jumps: column -> how far every eighth row's
    logit there lies above the others, so that references are raised.
    """

    n: int
    d: int
    V: int
    kept: Kept
    window: int
    reduction: str
    jumps: tuple[tuple[int, float], ...] = ()

    def case(self) -> Case:
        case = random_case(self.n, self.d, self.V, self.kept.dtype)
        if self.jumps:
            case = jumping(case, dict(self.jumps), slice(0, None, 8))
        return some_ignored(case) if self.n > 1 else case

    def run(self, case: Case) -> None:
        """Loss and both gradients against float64, by the rule of all tests."""
        Trained(case, self.kept, self.reduction, self.window).check()


# Every kernel of the backward and of the forward that keeps, and every branch that writes to memory: one
# stripe and several with a ragged last, which go through the sum of dinput; nothing, some and all kept.
STEPS = [
    Step(300, 72, 1000, Kept(0), 384, "none"),
    Step(300, 72, 1000, Kept(0, FP16), 384, "mean"),
    Step(300, 72, 1001, Kept(1), 0, "mean"),
    Step(140, 200, 2000, Kept(0.5), 500, "none"),
    Step(140, 200, 2000, Kept(0, FP16), 0, "none"),
    Step(140, 72, 1000, Kept(1), 0, "none", jumps=((20, 100.0), (900, 300.0))),
    Step(140, 72, 1000, Kept(1, FP16), 0, "none", jumps=((20, 20.0), (900, 50.0))),
    Step(140, 200, 2000, Kept(0.5, FP16), 500, "mean"),
    Step(256, 128, 768, Kept(1), 0, "sum"),
    Step(1, 8, 7, Kept(1), 0, "none"),
    Step(1, 8, 7, Kept(0, FP16), 0, "mean"),
]


def forwards(gpu: Gpu) -> None:
    """Every configuration, with as many clusters as runs, and with so few that each has several."""
    for n, d, V, window in SHAPES:
        for dtype in (BF16, FP16):
            case = random_case(n, d, V, dtype).to("cuda")
            case.target[1::3] = case.ignore_index
            for config in gpu.row.forward_configs:
                for few in (gpu.sms, FEW):
                    forward(case, config, window, few)
            torch.cuda.synchronize()
            _done(f"n {n}, d {d}, V {V}, window {window}, {dtype}")


def backwards(gpu: Gpu) -> None:
    for step in STEPS:
        case = step.case().to("cuda")
        for few in (gpu.sms, FEW):
            with planned_for(gpu._replace(sms=few)):
                step.run(case)
        torch.cuda.synchronize()
        _done(str(step))


def numbers(gpu: Gpu) -> None:
    """linear_logprob's outputs and gradients, of kept logits and of recomputed ones."""
    for few in (gpu.sms, FEW):
        with planned_for(gpu._replace(sms=few)):
            for which in KEPT_LOGITS:
                test_what_is_kept_for_numbers(which, (300, 96, 1003), None)
                _done(f"{which}, {few} SMs")
            test_the_kernels_topk(BF16, 64)
            _done(f"topk_logprob, {few} SMs")


def added(gpu: Gpu) -> None:
    """grad_in_forward in one chunk and in several, and dweight added to a buffer, with ignored rows: d is a
    multiple of 8, or operands and gradients are padded."""
    for few in (gpu.sms, FEW):
        with planned_for(gpu._replace(sms=few)):
            for shape in ((300, 72, 1003), (300, 77, 1003)):
                for dtype in (BF16, FP16):
                    test_grad_in_forward(shape, dtype, "mean")
                    _done(f"grad_in_forward, {shape}, {dtype}, {few} SMs")
                    for schedule in ("recompute", "keep", "grad_in_forward"):
                        for out in (FP32, BF16):
                            test_dweight_is_added(shape, dtype, out, schedule)
                        _done(f"grad_weight_out, {schedule}, {shape}, {dtype}, {few} SMs")


@contextlib.contextmanager
def compacting() -> Iterator[None]:
    """While active, tokens are compacted at any size."""
    forget_plans()
    with contextlib.ExitStack() as stack:
        stack.callback(forget_plans)
        stack.enter_context(mock.patch.multiple(memory, LEAST_COMPACTED=0, LEAST_VOCAB=0))
        yield


def compacted(gpu: Gpu) -> None:
    """Some rows ignored, all, and all but one, of nan and inf, with every schedule."""
    for few in (gpu.sms, FEW):
        with compacting(), planned_for(gpu._replace(sms=few)):
            for schedule in SCHEDULES:
                for which in ("random", "none", "one"):
                    for dtype in (BF16, FP16):
                        test_which_are_valid(which, "mean", schedule, dtype)
                _done(f"compacted tokens, {schedule}, {few} SMs")


def baseline() -> None:
    for n, d, V, _ in SHAPES:
        for dtype in (BF16, FP16):
            case = random_case(n, d, V, dtype).to("cuda")
            dlogits = torch.mm(case.input, case.linear_weight.T)
            torch.mm(dlogits, case.linear_weight)
            torch.mm(dlogits.T, case.input)
            torch.cuda.synchronize()
            _done(f"torch.mm, n {n}, d {d}, V {V}, {dtype}")


def _done(what: str) -> None:
    print(f"{time.process_time():6.1f} s  {what}: done", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tests.gpu.sanitize", description="Small runs for compute-sanitizer."
    )
    parser.add_argument("--baseline", action="store_true", help="torch.mm instead of the kernels")
    parts = {"forward": forwards, "backward": backwards, "numbers": numbers}
    parts |= {"added": added, "compacted": compacted}
    parser.add_argument("--only", choices=parts, help="one part")
    args = parser.parse_args()
    gpu = launch.device.gpu_of(torch.device("cuda", 0))
    if args.baseline:
        baseline()
        return
    for name, run in parts.items():
        if args.only in (None, name):
            run(gpu)


if __name__ == "__main__":
    main()
