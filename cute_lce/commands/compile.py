"""`cute-lce compile`: every kernel that calls may need, into the cache."""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import time
from collections.abc import Sequence

from ..arch import ARCHITECTURES, of_capability
from ..compile import cache, machine, workers
from ..compile.progress import USUAL_SECONDS, Estimate
from ..plan.kernels import Flags, Key, MergeKey, kernels, terms_of
from .terminal import Refused, positive


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "compile",
        help="compile kernels into the cache; needs no GPU, but the same kind of CPU as where they will run",
    )
    command.add_argument(
        "--arch",
        choices=tuple(ARCHITECTURES),
        help="sm_90a: H100, H200; sm_100a: B200; sm_103a: B300 (that of the GPU that is there)",
    )
    command.add_argument(
        "--list", action="store_true", help="print the kernels, one a line, and compile nothing"
    )
    for option, text in (("--d", "hidden size"), ("--vocab", "vocabulary")):
        command.add_argument(
            option, type=positive, help=f"{text}; ignored, since the kernels serve every size"
        )
    for option, choices, default in (
        ("--dtype", ("bfloat16", "float16"), ["bfloat16"]),
        ("--target-dtype", ("int64", "int32"), ["int64"]),
    ):
        text = f"one or more of {', '.join(choices)} ({' '.join(default)})"
        command.add_argument(option, nargs="+", choices=choices, default=default, metavar="NAME", help=text)
    command.add_argument(
        "--grad-weight-out",
        nargs="+",
        choices=("none", "float32", "bfloat16", "float16"),
        metavar="NAME",
        help="for calls with a grad_weight_out of these dtypes: one or more of none, float32 (also for "
        "grad_in_forward), bfloat16, float16 (none float32; with an option for a term or an output none)",
    )
    command.add_argument(
        "--logit-scale",
        action="store_true",
        help="for calls with a logit_scale, or a temperature, other than 1, whatever its value",
    )
    command.add_argument(
        "--softcap",
        action="store_true",
        help="for calls with a softcap, whatever its value, and any logit_scale",
    )
    command.add_argument("--z-loss", action="store_true", help="for calls with a z_loss")
    for option, text in (
        ("--linear-bias", "for calls with a linear_bias that needs a gradient"),
        ("--label-smoothing", "for calls with label_smoothing"),
        ("--class-weights", "for calls with class weights and label_smoothing"),
        (
            "--entropy",
            "for linear_logprob's entropy, with a gradient, alone or with other outputs that are given here",
        ),
        ("--lse", "for linear_logprob's lse, with a gradient"),
        ("--log-sum-sq-probs", "for linear_logprob's log_sum_sq_probs"),
        ("--mean-logit", "for linear_logprob's mean_logit"),
        ("--argmax", "for linear_logprob's argmax and is_top1"),
        ("--topk", "for linear_logprob's topk_logprob, with a gradient"),
        ("--temperatures", "for linear_logprob with a tensor of temperatures"),
    ):
        command.add_argument(option, action="store_true", help=text)
    command.add_argument("--tp-group", action="store_true", help="also for calls with a tp_group")
    command.add_argument(
        "--jobs",
        type=positive,
        help="number of processes that compile (by cores, memory and CUTE_LCE_COMPILE_JOBS)",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile every kernel that calls may need, on a machine with or without a GPU."""
    keys = keys_of(args)
    if args.list:
        for key in keys:
            print(f"{key.arch} {key.words}")
        return 0
    try:
        return _compile(keys, args.jobs)
    except OSError as error:
        print(f"cute-lce compile: {error}", file=sys.stderr)
        return 1


def _compile(keys: Sequence[Key], jobs: int | None) -> int:
    folder, started = cache.cache_dir(), time.perf_counter()
    print(f"into {folder}", flush=True)
    missing = cache.missing(keys)
    there = len(keys) - len(missing)
    if there:
        print(f"{there} of {len(keys)} kernels are there", flush=True)
    if jobs is None:
        jobs = machine.jobs(len(missing))
    estimate = Estimate(len(missing))
    try:
        for done, key in enumerate(cache.compile_all(missing, jobs), 1):
            estimate.update(done, USUAL_SECONDS, jobs)
            print(f"{estimate}: {key.arch} {key.words}", flush=True)
    except KeyboardInterrupt:
        workers.end()
        kept = there + estimate.done
        print(
            f"cute-lce compile: interrupted; {kept} of {len(keys)} kernels are kept in {folder}",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT
    print(f"{len(keys)} kernels in {time.perf_counter() - started:.1f} s")
    return 0


def keys_of(args: argparse.Namespace) -> list[Key]:
    """The kernels that the options ask for, without compiling them."""
    arch = args.arch or _arch_here()
    flags = Flags(**{name: getattr(args, name) for name in Flags._fields})
    # What grad_in_forward adds to is float32; it serves no calls with terms.
    wanted = args.grad_weight_out or (["none"] if any(flags) else ["none", "float32"])
    added = ["" if name == "none" else name for name in wanted]
    types = [*itertools.product(args.dtype, args.target_dtype, added)]
    every = [kernels(arch, *names, terms_of(flags, names[0])) for names in types]
    keys = dict.fromkeys(itertools.chain(*every))
    if args.tp_group:
        keys |= dict.fromkeys(MergeKey(arch, name) for name in args.target_dtype)
    return list(keys)


def _arch_here() -> str:
    """Of the GPU that is there."""
    import torch

    row = of_capability(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    if row is None:
        raise Refused(
            "--arch: got none, and there is no GPU here that has kernels; want one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    return row.name
