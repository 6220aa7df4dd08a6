"""The command `cute-lce`: what is installed and what it would do."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import itertools
import multiprocessing
import os
import platform
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from cute_lce.arch import ARCHITECTURES, Gpu, KernelConfig, architecture
from cute_lce.compile import cache
from cute_lce.options import ComputeOptions, with_default_workspace
from cute_lce.plan import backward, cost, forward, schedule
from cute_lce.plan.kernels import Key, MergeKey, kernels
from cute_lce.plan.problem import Limits, Problem

PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python")


def _print_table(rows: Iterable[tuple[str, str]], indent: int = 0) -> None:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{'':{indent}}{name:{width}}  {value}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# info


def info(args: argparse.Namespace) -> int:
    """Print versions, the devices, and which implementation serves a call on each, with the reason."""
    import torch

    import cute_lce

    versions = {package: _version(package) for package in PACKAGES}
    versions["torch"] = f"{torch.__version__}, built for CUDA {torch.version.cuda or 'none'}"
    _print_table(
        [
            ("cute_lce", cute_lce.__version__),
            ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
            *versions.items(),
        ]
    )
    print()
    _print_table([*_paths(), ("compiled kernels", _cache())])
    return 0


def _cache() -> str:
    folder = cache.cache_dir()
    if os.path.lexists(folder) and not os.path.isdir(folder):
        return f"none: {folder} is no folder"
    sizes = []
    # Other processes may remove what was listed.
    with contextlib.suppress(OSError):
        for file in folder.glob("*.so"):
            with contextlib.suppress(OSError):
                sizes.append(file.stat().st_size)
    return f"{len(sizes)} in {folder}, {sum(sizes) / 2**20:.1f} MiB"


def _paths() -> list[tuple[str, str]]:
    """(device and dtype, the implementation there and why) for the CPU and every CUDA device."""
    import torch

    from cute_lce.ops.select import DTYPES, implementation
    from cute_lce.streaming import STREAMING

    rows = [("cpu", "streaming path: the kernels are for GPUs")]
    if not torch.cuda.is_available():
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "no usable CUDA device"
        return [*rows, ("cuda", f"not there: {reason}")]
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        major, minor = torch.cuda.get_device_capability(device)
        properties = torch.cuda.get_device_properties(device)
        name, sms = properties.name, properties.multi_processor_count
        rows.append((str(device), f"{name}, compute capability {major}.{minor}, {sms} SMs"))
        served = [dtype for dtype in DTYPES if implementation(device, dtype) is not STREAMING]
        for dtype in DTYPES:
            if dtype in served:
                path = "kernels"
            elif served:
                path = f"streaming path: the kernels take {' and '.join(map(_dtype, served))}"
            else:
                path = f"streaming path: no kernels for compute capability {major}.{minor}"
            rows.append((f"{device} {_dtype(dtype)}", path))
    return rows


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


# plan


def show_plan(args: argparse.Namespace) -> int:
    """Print the plans of one forward and of one forward and backward, and the least work of each."""
    gpu = Gpu(args.arch, args.sms or architecture(args.arch).sms)
    needed = args.frozen != "hidden", args.frozen != "weight"
    problem = Problem(args.n, args.d, args.vocab, args.dtype == "float16", *needed)
    try:
        given = ComputeOptions(args.schedule, args.workspace_mb, args.window)
        limits = with_default_workspace(given).limits
        inference = forward.plan(gpu, args.n, args.d, args.vocab, Limits(window=limits.window))
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


def _show_forward(args: argparse.Namespace, gpu: Gpu, chosen: forward.ForwardPlan) -> None:
    config = chosen.config
    print("config, which the forward's kernel is compiled for")
    rows = [(field.name, str(getattr(config, field.name))) for field in dataclasses.fields(config)]
    _print_table(rows, indent=2)

    device = gpu.row
    print("what it takes of an SM, of what there is")
    budgets = [("shared memory", f"{config.shared_memory:,} of {device.shared_memory:,} bytes")]
    if device.tmem_columns:
        budgets.append(("tensor memory", f"{config.tmem_columns} of {device.tmem_columns} columns"))
    busy = chosen.gemm.clusters * config.cluster_size
    _print_table([*budgets, ("SMs", f"{busy} of {gpu.sms}")], indent=2)

    print("plan of the forward, where nothing needs a gradient")
    sizes = {"n": chosen.n, "d": chosen.d, "vocab": chosen.vocab}
    rounds = {"rounds": chosen.rounds, "ideal_rounds": chosen.ideal_rounds}
    rows = [(name, str(value)) for name, value in {**sizes, **chosen.gemm._asdict(), **rounds}.items()]
    rows.append(("window", f"{chosen.window} columns"))
    rows.append(("busiest cluster", f"{chosen.rounds / chosen.ideal_rounds:.3f} of an even share"))
    rows.append(("workspace", f"{chosen.workspace_floats * 4 / 2**20:.2f} MiB"))
    _print_table(rows, indent=2)

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
        ("GEMM of dinput", _describe(chosen.tokens) if need_dinput else "none"),
        ("splits of dinput", str(chosen.splits) if need_dinput else "none"),
        ("GEMM of dweight", _describe(chosen.dweight) if need_dweight else "none"),
    ]
    _print_table(rows, indent=2)

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


def _show_prediction(
    args: argparse.Namespace, gpu: Gpu, problem: Problem, chosen: backward.BackwardPlan, limits: Limits
) -> None:
    """What the cost model predicts (plan/cost.py), and what it says of other workspaces."""
    n, d, vocab = problem.n, problem.d, problem.vocab
    predicted = schedule.predict(gpu, problem, args.schedule, limits)
    seconds = cost.backward_seconds(gpu, problem, chosen)
    tokens, dweight = (cost.Gemm(gpu, config, n * d * vocab) for config in (chosen.tokens, chosen.dweight))
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
    bounds: dict[str, str] = {}
    for each, tall in [*((c.stripe, c.tokens) for c in chosen.chunks), *((s, n) for s in chosen.stripes)]:
        if each.first >= chosen.kept:
            bounds.setdefault("logits", tokens.bound(each.columns, tall, d, cost.EXPONENTIALS))
        if problem.need_dinput:
            splits = each.dhidden.splits
            epilogue = cost.dinput_epilogue(splits)
            bounds.setdefault("dinput", tokens.bound(d, tall, each.columns, epilogue, splits))
        if problem.need_dweight and tall == n:
            bounds.setdefault("dweight", dweight.bound(each.columns, d, n, cost.DWEIGHT))
    rows += [(f"{name} bound by", bound) for name, bound in bounds.items()]
    print("what forward and backward are predicted to take")
    _print_table(rows, indent=2)


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
    sheet = gpu.row.data_sheet
    flops = 2 * args.n * args.d * columns
    peak = sheet.flops * min(1.0, gpu.sms / sheet.sms)
    compute_ms, memory_ms = flops / peak * 1e3, least_bytes / sheet.memory * 1e3
    print(f"{what} at least, on {sheet.gpu} by its data sheet")
    _print_table(
        [
            ("FLOP", f"{flops:.3e} ({formula})"),
            ("least bytes", f"{least_bytes:.3e} ({of})"),
            ("compute", f"{compute_ms:.3f} ms at {peak / 1e12:.1f} TFLOP/s"),
            ("memory", f"{memory_ms:.3f} ms at {sheet.memory / 1e12:.2f} TB/s"),
            ("floor", f"{max(compute_ms, memory_ms):.3f} ms"),
        ],
        indent=2,
    )


# compile


def fill_cache(args: argparse.Namespace) -> int:
    """Compile every kernel that calls may need, on a machine with or without a GPU."""
    print(f"into {cache.cache_dir()}", flush=True)
    added = ["" if name == "none" else name for name in args.grad_weight_out]
    types = itertools.product(args.dtype, args.target_dtype, added)
    terms = ("logit_scale",) if args.logit_scale else ()
    keys = [*dict.fromkeys(key for names in types for key in kernels(args.arch, *names, terms))]
    if args.tp_group:
        keys += [MergeKey(args.arch, name) for name in args.target_dtype]
    started = time.perf_counter()
    try:
        for seconds, key in _compiled(keys, min(args.jobs or _cores(), len(keys))):
            print(f"{seconds:6.2f} s  {key}", flush=True)
    except OSError as error:
        print(f"cute-lce compile: {error}", file=sys.stderr)
        return 1
    print(f"{len(keys)} kernels in {time.perf_counter() - started:.1f} s")
    return 0


def _compiled(keys: Sequence[Key], jobs: int) -> Iterator[tuple[float, Key]]:
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


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# The command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cute-lce", description="Fused linear cross entropy: what is installed and what it would do."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser("info", help="versions, devices, and the path that a call takes on each")
    command.set_defaults(run=info)

    command = commands.add_parser(
        "plan", help="how the kernels would do a forward and a backward, and the floors of their times"
    )
    for option, text in (("--n", "tokens"), ("--d", "hidden size"), ("--vocab", "vocabulary")):
        command.add_argument(option, type=_positive, required=True, help=text)
    command.add_argument("--arch", choices=tuple(ARCHITECTURES), required=True)
    command.add_argument("--window", type=_positive, help="columns of a window or stripe (chosen)")
    command.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="(%(default)s)")
    schedules = ("auto", "recompute", "keep")
    command.add_argument("--schedule", choices=schedules, default="auto", help="(%(default)s)")
    command.add_argument("--workspace-mb", type=float, help="MiB that a call may allocate (2304)")
    command.add_argument("--frozen", choices=("hidden", "weight"), help="the operand without a gradient")
    command.add_argument("--sms", type=_positive, help="SMs of the device (the architecture's)")
    command.set_defaults(run=show_plan)

    command = commands.add_parser(
        "compile",
        help="fill the cache of compiled kernels; needs no GPU, but the host architecture that will use them",
    )
    command.add_argument("--arch", choices=tuple(ARCHITECTURES), required=True)
    for option, text in (("--d", "hidden size"), ("--vocab", "vocabulary")):
        command.add_argument(option, type=_positive, help=f"{text}: any, the kernels serve every size")
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
        help="backwards that add to a grad_weight_out: one or more of none, float32 (grad_in_forward's too), "
        "bfloat16, float16 (none)",
    )
    command.add_argument(
        "--logit-scale",
        action="store_true",
        help="kernels of calls with a logit_scale, or a temperature, other than 1, whatever its value",
    )
    command.add_argument("--tp-group", action="store_true", help="kernels of calls with a tp_group, too")
    command.add_argument("--jobs", type=_positive, help="processes that compile (one for each core)")
    command.set_defaults(run=fill_cache)
    return parser


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, want a whole number of at least 1")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    if sys.stdout is None:
        # It was closed, as by `>&-`.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        try:
            args = _parser().parse_args(argv)
            return args.run(args)
        finally:
            sys.stdout.flush()
    except OSError as error:
        # Python flushes again at exit: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            # The reader closed the pipe, as `head` does.
            return 128 + signal.SIGPIPE
        print(f"cute-lce: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
