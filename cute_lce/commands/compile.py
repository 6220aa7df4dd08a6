"""`cute-lce compile`: every kernel that calls may need, into the cache."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from ..arch import ARCHITECTURES
from ..arguments import MORE_PARTS
from ..compile import cache
from ..plan.kernels import Key, MergeKey, Terms, kernels
from .terminal import positive


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "compile",
        help="compile kernels into the cache; needs no GPU, but the same kind of CPU as where they will run",
    )
    command.add_argument(
        "--arch",
        choices=tuple(ARCHITECTURES),
        required=True,
        help="sm_90a: H100, H200; sm_100a: B200; sm_103a: B300",
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
        default=["none"],
        metavar="NAME",
        help="for calls with a grad_weight_out of these dtypes: one or more of none, float32 (also for "
        "grad_in_forward), bfloat16, float16 (none)",
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
    command.add_argument("--jobs", type=positive, help="number of processes that compile (one for each core)")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile every kernel that calls may need, on a machine with or without a GPU."""
    print(f"into {cache.cache_dir()}", flush=True)
    added = ["" if name == "none" else name for name in args.grad_weight_out]
    types = [*itertools.product(args.dtype, args.target_dtype, added)]
    every = [kernels(args.arch, *names, terms_of(args, names[0])) for names in types]
    keys = [*dict.fromkeys(itertools.chain(*every))]
    if args.tp_group:
        keys += [MergeKey(args.arch, name) for name in args.target_dtype]
    started = time.perf_counter()
    try:
        for seconds, key in compiled(keys, min(args.jobs or cores(), len(keys))):
            print(f"{seconds:6.2f} s  {key}", flush=True)
    except OSError as error:
        print(f"cute-lce compile: {error}", file=sys.stderr)
        return 1
    print(f"{len(keys)} kernels in {time.perf_counter() - started:.1f} s")
    return 0


def terms_of(args: argparse.Namespace, dtype: str) -> Terms:
    """Of the job's calls with operands of a dtype."""
    logits = ("linear_bias",) * args.linear_bias
    logits += ("softcap",) if args.softcap else ("logit_scale",) if args.logit_scale else ()
    if args.temperatures:
        logits = (*logits, "row_scale")
    weights = ("class_weight",) if args.class_weights and args.label_smoothing else ()
    sums = {
        "entropy": args.entropy,
        "squares": args.log_sum_sq_probs,
        "total": args.label_smoothing,
        "logits": args.mean_logit,
        "argmax": args.argmax,
    }
    topk = ("topk",) * args.topk
    statistics = *logits, *weights, *(term for term in MORE_PARTS if sums[term])
    forward = *statistics, *topk
    smooth_cap = args.softcap and args.label_smoothing
    keeps = None
    of_logits = any((args.entropy, args.log_sum_sq_probs, args.label_smoothing, args.lse, args.topk))
    if not of_logits:
        keeps = *forward, *("proportion",) * args.z_loss
    more = *("gap",) * args.entropy, *("uniform",) * args.label_smoothing, *weights, *topk
    numbers = args.lse, args.log_sum_sq_probs, args.mean_logit, args.argmax
    if more or any((*numbers, args.linear_bias, args.softcap, args.z_loss, args.temperatures)):
        more = "coefficients", *more
    bias = ("bias_gradient",) * args.linear_bias
    backwards = [(*logits, *more, *bias)]
    if keeps is not None:
        backwards.append((*("coefficients",) * args.linear_bias, *bias) if more else logits)
    elif dtype == "bfloat16" and not smooth_cap:
        keeps = *statistics, "kept_logits", *topk
        backwards.append((*logits, *more, "kept_logits", *bias))
    return Terms(forward, keeps, tuple(dict.fromkeys(backwards)))


def compiled(keys: Sequence[Key], jobs: int) -> Iterator[tuple[float, Key]]:
    """Compile the keys in `jobs` processes, or here if 1; yields (seconds, key) as each is there."""
    if jobs == 1:
        yield from map(_compile, keys)
        return
    # Fresh processes: torch and the DSL have threads, which a fork would not copy.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            for done in as_completed([pool.submit(_compile, key) for key in keys]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _compile(key: Key) -> tuple[float, Key]:
    started = time.perf_counter()
    cache.get(key)
    return time.perf_counter() - started, key


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
