"""What compute-sanitizer runs: the kernels on small shapes, every configuration, both dtypes.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck  --error-exitcode 9 --kernel-regex kns=cutlass python3 -m tests.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 9 --kernel-regex kns=cutlass python3 -m tests.sanitize
    compute-sanitizer --tool racecheck --kernel-regex kns=sm90 python3 -m tests.sanitize --baseline

The variable gives each tensor an allocation of its own, so that memcheck sees where it ends. --baseline
runs torch.mm on the same shapes, whose Hopper kernels are CUTLASS's: a finding that it has too is the
tool's.
"""

from __future__ import annotations

import argparse
from unittest import mock

import torch

from cute_lce import compiled, launch
from cute_lce import plan as plans
from tests.numerics import Case, random_case

# Ragged in every direction; several windows and runs a cluster; one token and one class; whole tiles.
SHAPES = [(300, 72, 1000, 192), (1, 8, 1, 0), (256, 128, 384, 0), (700, 200, 2000, 400)]


def forward(case: Case, config: plans.KernelConfig, window: int, sms: int) -> None:
    """One forward of a configuration, paced, checked to a digit or two: the tests check the numbers."""
    n, V = case.input.shape[0], case.linear_weight.shape[0]
    chosen = plans.forward(config.arch, n, case.input.shape[1], V, sms, window, config=config)
    dtype, target_dtype = (str(t.dtype).removeprefix("torch.") for t in (case.input, case.target))
    function = compiled.forward(config, dtype, target_dtype)
    with mock.patch.object(launch, "_prepare", return_value=(chosen, function)):
        loss = launch.forward(case.input, case.linear_weight, case.target, case.ignore_index, "mean", 0, 0)[0]
    expected = torch.nn.functional.cross_entropy(
        case.input.float() @ case.linear_weight.float().T, case.target
    )
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.sanitize", description="Small runs for compute-sanitizer.")
    parser.add_argument("--baseline", action="store_true", help="torch.mm instead of the kernels")
    args = parser.parse_args()
    arch, sms = launch._architecture(torch.device("cuda", 0))
    for n, d, V, window in SHAPES:
        for dtype in (torch.bfloat16, torch.float16):
            case = random_case(n, d, V, dtype).to("cuda")
            case.target[1::3] = case.ignore_index
            if args.baseline:
                torch.mm(case.input, case.linear_weight.T)
                continue
            for config in plans.configs(arch):
                # As many clusters as runs, and so few that each has several.
                for few in (sms, 4):
                    forward(case, config, window, few)
            torch.cuda.synchronize()
            print(f"n {n}, d {d}, V {V}, window {window}, {dtype}: done", flush=True)


if __name__ == "__main__":
    main()
