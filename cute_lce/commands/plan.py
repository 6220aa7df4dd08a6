"""`cute-lce plan`: how the kernels would do a forward and a backward, and the floors of their times."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from ..arch import ARCHITECTURES, Gpu, KernelConfig, architecture
from ..options import SCHEDULES, ComputeOptions, with_default_workspace
from ..plan import backward, cost, epilogues, forward, grad_in_forward, schedule
from ..plan.problem import Limits, Problem
from .terminal import positive, print_table


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "plan", help="predict how the kernels run a forward and a backward: plan, time, memory, lower bounds"
    )
    for option, text in (("--n", "tokens"), ("--d", "hidden size"), ("--vocab", "vocabulary")):
        command.add_argument(option, type=positive, required=True, help=text)
    command.add_argument(
        "--arch",
        choices=tuple(ARCHITECTURES),
        required=True,
        help="; ".join(f"{name}: {', '.join(_gpus(name))}" for name in ARCHITECTURES),
    )
    command.add_argument("--gpu", help="which of the architecture's GPUs (default: the first listed)")
    command.add_argument(
        "--window", type=positive, help="columns of a window or stripe (default: chosen from the sizes)"
    )
    command.add_argument(
        "--dtype",
        choices=("bfloat16", "float16"),
        default="bfloat16",
        help="dtype of the operands (%(default)s)",
    )
    command.add_argument(
        "--schedule", choices=SCHEDULES, default="auto", help="the call's schedule (%(default)s)"
    )
    command.add_argument("--workspace-mb", type=float, help="the call's workspace_mb (2304)")
    command.add_argument("--frozen", choices=("hidden", "weight"), help="an operand that needs no gradient")
    command.add_argument(
        "--grad-weight-out", action="store_true", help="the call adds its gradient by weight to a buffer"
    )
    command.add_argument("--sms", type=positive, help="number of SMs (that of a whole GPU)")
    command.set_defaults(run=run, refuse=command.error)


def run(args: argparse.Namespace) -> int:
    """Print the plans of one forward and of one forward and backward, and the least work of each."""
    gpus = _gpus(args.arch)
    if args.gpu is not None and args.gpu not in gpus:
        args.refuse(f"--gpu: got {args.gpu}, want one of {', '.join(gpus)}")
    model = gpus.index(args.gpu or gpus[0])
    gpu = Gpu(args.arch, args.sms or architecture(args.arch).sms, model=model)
    needed = args.frozen != "hidden", args.frozen != "weight"
    adds = args.grad_weight_out and needed[1]
    problem = Problem(args.n, args.d, args.vocab, args.dtype == "float16", *needed, adds=adds)
    try:
        given = ComputeOptions(args.schedule, args.workspace_mb, args.window)
        limits = with_default_workspace(given).limits
        inference = forward.plan(gpu, args.n, args.d, args.vocab, Limits(window=limits.window))
        if args.schedule == "grad_in_forward":
            grad_in_forward.check_workspace(gpu, problem, limits)
            _show_forward(args, gpu, inference)
            _show_chunks(gpu, problem, grad_in_forward.plan(gpu, problem, limits))
            return 0
        found, kept = schedule.choose(gpu, problem, args.schedule, limits)
        training = backward.plan(gpu, problem, kept, limits)
    except ValueError as error:
        # The message begins with the name of an argument of the Python call.
        print(f"cute-lce plan: {error}", file=sys.stderr)
        return 1
    _show_forward(args, gpu, inference)
    _show_backward(args, gpu, problem, found, training)
    _show_prediction(args, gpu, problem, training, limits)
    return 0


def _gpus(arch: str) -> list[str]:
    """The GPUs of an architecture by name."""
    return [sheet.gpu for sheet in architecture(arch).data_sheets]


def _show_forward(args: argparse.Namespace, gpu: Gpu, chosen: forward.ForwardPlan) -> None:
    config = chosen.config
    print("config, which the forward's kernel is compiled for")
    rows = [(field.name, str(getattr(config, field.name))) for field in dataclasses.fields(config)]
    print_table(rows, indent=2)

    device = gpu.row
    print("what it takes of an SM, of what there is")
    budgets = [("shared memory", f"{config.shared_memory:,} of {device.shared_memory:,} bytes")]
    if device.tmem_columns:
        budgets.append(("tensor memory", f"{config.tmem_columns} of {device.tmem_columns} columns"))
    busy = chosen.gemm.clusters * config.cluster_size
    print_table([*budgets, ("SMs", f"{busy} of {gpu.sms}")], indent=2)

    print("plan of the forward, where nothing needs a gradient")
    sizes = {"n": chosen.n, "d": chosen.d, "vocab": chosen.vocab}
    rounds = {"rounds": chosen.rounds, "ideal_rounds": chosen.ideal_rounds}
    rows = [("GPU", gpu.sheet.gpu)]
    rows += [(name, str(value)) for name, value in {**sizes, **chosen.gemm._asdict(), **rounds}.items()]
    rows.append(("window", f"{chosen.window} columns"))
    rows.append(("busiest cluster", f"{chosen.rounds / chosen.ideal_rounds:.3f} of an even share"))
    rows.append(("workspace", f"{chosen.workspace_floats * 4 / 2**20:.2f} MiB"))
    seconds = cost.forward_seconds(gpu, Problem(chosen.n, chosen.d, chosen.vocab), chosen)
    rows.append(("predicted", f"{seconds * 1e3:.3f} ms"))
    gemm = cost.Gemm(gpu, config, chosen.n * chosen.d * chosen.vocab)
    rows.append(("bound by", gemm.bound(chosen.vocab, chosen.n, chosen.d, epilogues.STATISTICS)))
    print_table(rows, indent=2)

    # Both operands and the targets are read once, and each token's loss is written; operands are 16-bit.
    least_bytes = 2 * (args.n + args.vocab) * args.d + (8 + 4) * args.n
    _show_floor("what a forward costs", args, gpu, "2 n d V", args.vocab, least_bytes, "each operand once")


def _show_backward(
    args: argparse.Namespace, gpu: Gpu, problem: Problem, found: str, chosen: backward.BackwardPlan
) -> None:
    """The backward's plan, as `launch` makes it. found: its schedule."""
    n, d, vocab, kept = problem.n, problem.d, problem.vocab, chosen.kept
    need_dinput, need_dweight = problem.need_dinput, problem.need_dweight
    recomputed = len(chosen.stripes) - (kept > 0)
    chunks = "none: dinput is summed over the stripes"
    if chosen.chunks:
        chunks = f"{len(chosen.chunks)} of {chosen.chunks[0].tokens} tokens, from which dinput is computed"
    print("plan of the backward")
    rows = [
        ("schedule", found),
        ("kept", f"{kept} columns"),
        ("recomputed", f"{vocab - kept} columns in {recomputed} stripes"),
        ("stripe", f"{chosen.columns} columns"),
        ("chunks", chunks),
        ("workspace", f"{chosen.workspace / 2**20:.2f} MiB at most, with what the forward keeps"),
        ("GEMM of logits", _describe(chosen.tokens) if recomputed or chosen.chunks else "none"),
        ("GEMM of dinput", _describe(chosen.dhidden) if need_dinput else "none"),
        ("splits of dinput", str(chosen.splits) if need_dinput else "none"),
        ("GEMM of dweight", _describe(chosen.dweight) if need_dweight else "none"),
    ]
    print_table(rows, indent=2)

    # The forward's logits, those that are recomputed, and the gradients.
    sweeps = (recomputed > 0) + (len(chosen.chunks) > 0)
    columns = vocab + sweeps * (vocab - kept) + (need_dinput + need_dweight) * vocab
    terms = " + ".join(["V", *["(V - kept)"] * sweeps, *["V"] * (need_dinput + need_dweight)])
    gradients = (n if need_dinput else 0) + (vocab if need_dweight else 0)
    # What is kept is written once, and read by each gradient's GEMM.
    kept_bytes = 2 * n * kept * (1 + need_dinput + need_dweight)
    least_bytes = 2 * (2 * (n + vocab) + gradients) * d + (8 + 4) * n + kept_bytes
    _show_floor(
        *("what forward and backward cost", args, gpu, f"2 n d ({terms})", columns, least_bytes),
        "each operand once a pass, the gradients once, what is kept once a GEMM",
    )


def _show_chunks(gpu: Gpu, problem: Problem, chosen: grad_in_forward.GradInForwardPlan) -> None:
    """grad_in_forward's plan, as `launch` makes it, and what it is predicted to take."""
    n, d, vocab = problem.n, problem.d, problem.vocab
    print("plan of the backward, which the forward does")
    tokens = chosen.tokens[0]
    forwards, backwards, *_ = chosen.chunks[tokens]
    last = "" if chosen.tokens[-1] == tokens else f", the last of {chosen.tokens[-1]}"
    rows = [
        ("schedule", "grad_in_forward"),
        ("chunks", f"{len(chosen.tokens)} of {tokens} tokens{last}"),
        ("workspace", f"{chosen.bytes / 2**20:.2f} MiB beyond the results, with the accumulators"),
        ("GEMM of logits", _describe(forwards.config)),
        ("GEMM of dinput", _describe(backwards.dhidden) if problem.need_dinput else "none"),
        ("splits of dinput", str(backwards.splits) if problem.need_dinput else "none"),
        ("GEMM of dweight", _describe(backwards.dweight) if problem.need_dweight else "none"),
    ]
    print_table(rows, indent=2)

    print("what forward and backward are predicted to take")
    seconds = grad_in_forward.seconds_of(gpu, problem, chosen.clocks)
    floor = seconds / cost.floor_seconds(gpu, problem)
    rows = [("both", f"{seconds * 1e3:.3f} ms, {floor:.2f} times its GEMMs alone")]
    gemm = cost.Gemm(gpu, backwards.dhidden, n * d * vocab)
    if problem.need_dinput:
        bound = gemm.bound(d, tokens, vocab, epilogues.SUMS, backwards.splits)
        rows.append(("dinput bound by", bound))
    if problem.need_dweight:
        gemm = cost.Gemm(gpu, backwards.dweight, n * d * vocab)
        rows.append(("dweight bound by", gemm.bound(vocab, d, tokens, grad_in_forward.ADDED)))
    print_table(rows, indent=2)


def _show_prediction(
    args: argparse.Namespace, gpu: Gpu, problem: Problem, chosen: backward.BackwardPlan, limits: Limits
) -> None:
    """What the cost model predicts (plan/cost.py), and what it says of other workspaces."""
    n, d, vocab = problem.n, problem.d, problem.vocab
    predicted = schedule.predict(gpu, problem, args.schedule, limits)
    seconds = cost.backward_seconds(gpu, problem, chosen)
    gemms = cost.Gemms(*(cost.Gemm(gpu, config, n * d * vocab) for config in chosen.configs))
    rows = [
        ("forward", f"{(predicted.seconds - seconds) * 1e3:.3f} ms"),
        ("backward", f"{seconds * 1e3:.3f} ms"),
        ("both", f"{predicted.seconds * 1e3:.3f} ms, {_times(predicted, predicted.seconds)}"),
        ("with any workspace", f"{predicted.best * 1e3:.3f} ms, {_times(predicted, predicted.best)}"),
    ]
    if not limits.window:
        least = schedule.least_workspace(gpu, problem, args.schedule, limits) / 2**20
        helpful = schedule.helpful_workspace(gpu, problem, args.schedule, limits) / 2**20
        most = _times(predicted, schedule.HELPFUL * predicted.best)
        rows.append(("least workspace", f"{least:.2f} MiB"))
        rows.append(("helpful workspace", f"{helpful:.2f} MiB, from which it is at most {most}"))
    instead = None
    if args.schedule == "auto" and not problem.adds:
        instead = grad_in_forward.predict_auto(gpu, problem, limits)
    if instead is not None:
        calls = 'eager calls with "mean" or "sum"' if problem.need_dweight else "eager calls"
        text = f'{instead.seconds * 1e3:.3f} ms, {_times(predicted, instead.seconds)}: "auto" in {calls}'
        rows.append(("grad_in_forward", text))
    bounds: dict[str, str] = {}
    for each, tall in [*((c.stripe, c.tokens) for c in chosen.chunks), *((s, n) for s in chosen.stripes)]:
        if each.first >= chosen.kept:
            bounds.setdefault("logits", gemms.tokens.bound(each.columns, tall, d, epilogues.DLOGITS))
        if problem.need_dinput:
            splits = each.dhidden.splits
            epilogue = epilogues.dinput_epilogue(splits)
            bounds.setdefault("dinput", gemms.dhidden.bound(d, tall, each.columns, epilogue, splits))
        if problem.need_dweight and tall == n:
            bounds.setdefault("dweight", gemms.dweight.bound(each.columns, d, n, epilogues.DWEIGHT))
    rows += [(f"{name} bound by", bound) for name, bound in bounds.items()]
    print("what forward and backward are predicted to take")
    print_table(rows, indent=2)


def _times(predicted: schedule.Prediction, seconds: float) -> str:
    return f"{seconds / predicted.floor:.2f} times its GEMMs alone"


def _describe(config: KernelConfig) -> str:
    return (
        f"tiles {config.tile_m} x {config.tile_n} x {config.tile_k}, clusters {config.cluster_m} x "
        f"{config.cluster_n}, {config.stages} stages"
    )


def _show_floor(
    what: str, args: argparse.Namespace, gpu: Gpu, formula: str, columns: int, least_bytes: int, of: str
) -> None:
    """Print the least work of a pass: GEMMs over `columns` columns of the vocabulary, and bytes."""
    sheet = gpu.sheet
    flops = 2 * args.n * args.d * columns
    peak = sheet.flops * min(1.0, gpu.sms / sheet.sms)
    compute_ms, memory_ms = flops / peak * 1e3, least_bytes / sheet.memory * 1e3
    print(f"{what} at least, on {sheet.gpu} by its data sheet")
    print_table(
        [
            ("FLOP", f"{flops:.3e} ({formula})"),
            ("least bytes", f"{least_bytes:.3e} ({of})"),
            ("compute", f"{compute_ms:.3f} ms at {peak / 1e12:.1f} TFLOP/s"),
            ("memory", f"{memory_ms:.3f} ms at {sheet.memory / 1e12:.2f} TB/s"),
            ("floor", f"{max(compute_ms, memory_ms):.3f} ms"),
        ],
        indent=2,
    )
