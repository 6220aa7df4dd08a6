"""Train a small language model on Python's own sources, once with cute_lce's loss and once with torch's.

The text is the standard library of the interpreter that runs this program, so every machine has it. A
byte-pair vocabulary is built from the training files; each twentieth file is kept for validation. Both runs
start from the same seed and see the same batches; they differ in the output layer alone:

    fused       cute_lce.LinearCrossEntropy(d, V)(hidden, target)
    canonical   F.cross_entropy(F.linear(hidden, weight), target)

The program ends with status 1 when the two disagree: the first losses by more than a relative 1e-5, the norms
of their gradients by more than 1%, or the final validation losses by more than 0.5%. It writes curves.png,
losses.csv and summary.json into --out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Both are read when torch starts: cuBLAS is deterministic only with a fixed workspace, and the profiler that
# counts a CPU's memory prints two lines a use unless it is told not to.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch import nn
from tqdm import tqdm

from cute_lce.measure.timing import peak_extra_bytes, synchronize
from examples.corpus import Corpus, batches
from examples.language_model import CanonicalHead, FusedHead, LanguageModel

FIRST_LOSSES = 20
FIRST_LOSSES_TOLERANCE = 1e-5
VALIDATION_TOLERANCE = 5e-3
# Adam and clipping undo a gradient that is wrong by a factor, so its norm counts too. The rounding of the
# output layer's operands and gradients leaves a mark on it, so the bound is wide.
GRADIENT_TOLERANCE = 1e-2


# The training.


@dataclass
class Run:
    """What one training run gave. Losses in nats per token."""

    name: str
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)  # over all parameters, before clipping
    valid: list[tuple[int, float]] = field(default_factory=list)  # (steps done, validation loss)
    tokens_per_second: float = 0.0
    loss_peak_mib: float = 0.0
    seconds: float = 0.0


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A linear rise over the first steps, then a cosine down to a tenth.

    The rise is slow enough that no step is unstable: an unstable one makes much of the two runs' rounding.
    """
    warmup = max(1, min(50, steps // 3))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def validation_loss(model: LanguageModel, corpus: Corpus, args: argparse.Namespace) -> float:
    """The mean loss over the first `args.valid_batches` batches of validation text, read in order."""
    size = args.batch * args.length
    count = max(1, min(args.valid_batches, (len(corpus.valid) - 1) // size))
    total = 0.0
    for i in range(count):
        text = corpus.valid[i * size : (i + 1) * size + 1].to(args.device)
        total += model(text[:-1].view(args.batch, -1), text[1:].view(args.batch, -1)).item()
    return total / count


def loss_peak_mib(model: LanguageModel, tokens: torch.Tensor, target: torch.Tensor) -> float:
    """MiB that the output layer holds at most in forward and backward, beyond its inputs and the two
    gradients."""
    with torch.no_grad():
        hidden = model.hidden(tokens).flatten(0, 1)
    hidden.requires_grad_()
    target = target.flatten()

    def loss_and_gradients() -> None:
        hidden.grad = model.head.weight.grad = None
        model.head(hidden, target).backward()

    loss_and_gradients()
    hidden.grad = model.head.weight.grad = None
    gradients = (hidden.numel() + model.head.weight.numel()) * 4
    peak = peak_extra_bytes(loss_and_gradients, hidden.device)
    model.zero_grad(set_to_none=True)
    return max(0, peak - gradients) / 2**20


def train(name: str, head: nn.Linear, corpus: Corpus, args: argparse.Namespace) -> Run:
    model = LanguageModel(corpus.vocab_size, args.d, args.layers, args.heads, args.length, head)
    model.initialise(args.seed)
    model.to(args.device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    source = batches(corpus.train, args.batch, args.length, args.seed)
    run = Run(name)
    tokens, target = (t.to(args.device) for t in next(source))
    run.loss_peak_mib = loss_peak_mib(model, tokens, target)

    started = time.perf_counter()
    training_seconds = 0.0
    evaluate_at = {round(args.steps * i / args.evaluations) for i in range(1, args.evaluations + 1)}
    # A terminal sees the bar move; a log gets a line every ten seconds.
    interval = 0.1 if sys.stderr.isatty() else 10.0
    with tqdm(
        total=args.steps, desc=f"{name:9}", unit="step", mininterval=interval, dynamic_ncols=True
    ) as bar:
        for step in range(args.steps):
            step_started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args.steps, args.lr)
            loss = model(tokens, target)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            run.losses.append(loss.item())
            run.gradient_norms.append(norm.item())
            tokens, target = (t.to(args.device) for t in next(source))
            synchronize(args.device)
            training_seconds += time.perf_counter() - step_started
            if step + 1 in evaluate_at:
                run.valid.append((step + 1, validation_loss(model, corpus, args)))
            shown = {"loss": f"{run.losses[-1]:.3f}"}
            if run.valid:
                shown["valid"] = f"{run.valid[-1][1]:.3f}"
            bar.set_postfix(shown, refresh=False)
            bar.update()
    run.tokens_per_second = args.steps * args.batch * args.length / training_seconds
    run.seconds = time.perf_counter() - started
    return run


# The comparison.


def relative_difference(a: float, b: float) -> float:
    """|a - b| relative to `b`; infinite when either is not a finite number, so that a NaN cannot agree."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / abs(b)


@dataclass(frozen=True)
class Verdict:
    """How far the two runs are apart, and whether that is near enough."""

    first_losses: float  # the largest relative difference among the first losses
    first_gradients: float  # the same of the norms of their gradients
    valid: float  # the relative difference of the final validation losses
    fell: bool  # whether the fused run learned at all

    @classmethod
    def of(cls, fused: Run, canonical: Run) -> Verdict:
        def first(of_fused: list[float], of_canonical: list[float]) -> float:
            pairs = zip(of_fused[:FIRST_LOSSES], of_canonical[:FIRST_LOSSES], strict=True)
            return max(relative_difference(a, b) for a, b in pairs)

        return cls(
            first_losses=first(fused.losses, canonical.losses),
            first_gradients=first(fused.gradient_norms, canonical.gradient_norms),
            valid=relative_difference(fused.valid[-1][1], canonical.valid[-1][1]),
            fell=fused.valid[-1][1] < fused.losses[0],
        )

    @property
    def agrees(self) -> bool:
        return (
            self.first_losses <= FIRST_LOSSES_TOLERANCE
            and self.first_gradients <= GRADIENT_TOLERANCE
            and self.valid <= VALIDATION_TOLERANCE
        )

    @property
    def good(self) -> bool:
        return self.agrees and self.fell


def plot(path: Path, runs: Sequence[Run]) -> bool:
    """Draw the loss curves; False when matplotlib is not there."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=150)
    styles = (
        {"color": "#d95f02", "linewidth": 3.0, "alpha": 0.55},
        {"color": "#1b4f8a", "linewidth": 1.0},
    )
    for run, style in zip(runs, styles, strict=True):
        axes.plot(range(1, len(run.losses) + 1), run.losses, label=f"{run.name}, training", **style)
        steps, losses = zip(*run.valid, strict=True)
        mark = {"color": style["color"], "markerfacecolor": "none", "markersize": 3 + 2 * style["linewidth"]}
        axes.plot(steps, losses, "o", label=f"{run.name}, validation", **mark)
    axes.set(
        xlabel="step", ylabel="loss (nats per token)", title="The same model, with and without the logits"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True


def report(out: Path, fused: Run, canonical: Run, verdict: Verdict, args: argparse.Namespace) -> None:
    """Write the files and print the table."""
    out.mkdir(parents=True, exist_ok=True)
    rows = ["step,fused,canonical"]
    rows += [
        f"{i},{a!r},{b!r}" for i, (a, b) in enumerate(zip(fused.losses, canonical.losses, strict=True), 1)
    ]
    (out / "losses.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    options = {
        key: str(value) if isinstance(value, (Path, torch.device, torch.dtype)) else value
        for key, value in vars(args).items()
    }
    summary = {"options": options, "runs": [asdict(fused), asdict(canonical)], "verdict": asdict(verdict)}
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    drawn = plot(out / "curves.png", (canonical, fused))

    print(f"\n{'':34}{'fused':>12}{'canonical':>12}")
    for label, unit, values in (
        ("first loss", "nats", (fused.losses[0], canonical.losses[0])),
        ("final validation loss", "nats", (fused.valid[-1][1], canonical.valid[-1][1])),
        ("speed", "tokens/s", (fused.tokens_per_second, canonical.tokens_per_second)),
        ("peak memory of the loss", "MiB", (fused.loss_peak_mib, canonical.loss_peak_mib)),
    ):
        digits = 4 if unit == "nats" else 1
        print(f"{f'{label} ({unit})':34}{values[0]:12.{digits}f}{values[1]:12.{digits}f}")
    print(f"\nlargest relative differences; the first two over {min(FIRST_LOSSES, args.steps)} steps")
    for label, found, allowed in (
        ("losses", verdict.first_losses, FIRST_LOSSES_TOLERANCE),
        ("norms of their gradients", verdict.first_gradients, GRADIENT_TOLERANCE),
        ("final validation loss", verdict.valid, VALIDATION_TOLERANCE),
    ):
        print(f"{label:34}{found:12.1e}  (allowed {allowed:.0e})")
    if drawn:
        print(f"\ncurves: {out / 'curves.png'}")
    else:
        print(f"\nmatplotlib is missing, so there is no plot; the losses: {out / 'losses.csv'}")
    print(f"all numbers: {out / 'summary.json'}")
    print("the two runs agree" if verdict.agrees else "THE TWO RUNS DISAGREE")
    if not verdict.fell:
        print("THE LOSS DID NOT FALL: more --steps, or another --lr")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train_lm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=150, help="training steps of each run (%(default)s)")
    add("--batch", type=int, default=8, help="sequences in a batch (%(default)s)")
    add("--length", type=int, default=128, help="tokens in a sequence (%(default)s)")
    add("--d", type=int, default=256, help="hidden size (%(default)s)")
    add("--layers", type=int, default=4, help="decoder layers (%(default)s)")
    add("--heads", type=int, default=4, help="attention heads (%(default)s)")
    add("--vocab", type=int, default=8192, help="byte-pair vocabulary (%(default)s)")
    add("--lr", type=float, default=1.5e-3, help="peak learning rate (%(default)s)")
    add("--seed", type=int, default=0, help="seed of the weights and of the batches (%(default)s)")
    add("--evaluations", type=int, default=5, help="how often the validation loss is taken (%(default)s)")
    add("--valid-batches", type=int, default=8, help="batches in one validation loss (%(default)s)")
    add("--schedule", default="auto", help="schedule of the fused loss (%(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s: a GPU if there is one)")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="operands of the output layer (%(default)s: bfloat16 on a GPU, float32 on a CPU)",
    )
    add("--out", type=Path, default=Path("build/demo"), help="folder for the results (%(default)s)")
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "length", "d", "layers", "heads", "vocab", "evaluations", "valid_batches"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.d % (2 * args.heads):
        parser.error(f"--d must be a multiple of twice --heads, got {args.d} and {args.heads}")
    if args.vocab < 300:
        parser.error(f"--vocab must be at least 300 (the 256 bytes and some pairs), got {args.vocab}")
    args.evaluations = min(args.evaluations, args.steps)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(args.device)
    if args.dtype == "auto":
        args.dtype = "bfloat16" if args.device.type == "cuda" else "float32"
    args.dtype = getattr(torch, args.dtype)
    return args


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """The same bits run after run, as far as torch can; torch's settings are put back at the end."""
    settings = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        getattr(settings, "fill_uninitialized_memory"),  # noqa: B009
        torch.backends.cuda.matmul.allow_tf32,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling every torch.empty costs time and proves nothing here.
    setattr(settings, "fill_uninitialized_memory", False)  # noqa: B010
    torch.backends.cuda.matmul.allow_tf32 = False
    attention = contextlib.nullcontext()
    if device.type == "cuda":
        # The fast attention kernels add up gradients in no fixed order.
        attention = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    try:
        with attention:
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        setattr(settings, "fill_uninitialized_memory", before[2])  # noqa: B010
        torch.backends.cuda.matmul.allow_tf32 = before[3]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    started = time.perf_counter()
    corpus = Corpus.of_standard_library(args.vocab)
    print(
        f"{len(corpus.train):,} training and {len(corpus.valid):,} validation tokens, vocabulary "
        f"{corpus.vocab_size:,}, in {time.perf_counter() - started:.1f} s\n"
        f"{args.layers} layers of {args.d} on {args.device}, {args.batch * args.length:,} tokens a step, "
        f"operands of the output layer in {args.dtype}",
        flush=True,
    )
    with deterministic(args.device):
        fused = train("fused", FusedHead(args.d, corpus.vocab_size, args.dtype, args.schedule), corpus, args)
        canonical = train("canonical", CanonicalHead(args.d, corpus.vocab_size, args.dtype), corpus, args)
    verdict = Verdict.of(fused, canonical)
    report(args.out, fused, canonical, verdict, args)
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main())
