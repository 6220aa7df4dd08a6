"""Time a training step of a Llama model with each provider's head and loss in turn.

The model is Hugging Face's Llama with random weights in bfloat16, untied, trained by fused AdamW on random
tokens. Its body is the same for all and runs eagerly; only head and loss differ. "without head", a mean of
the hidden states, shows what head and loss take. Each repetition runs every provider once, in a new random
order. `peak_mib` is a step's peak memory beyond weights, their gradients and the optimizer's state.

    python3 -m bench.step --out bench/results/h200_step.json
    python3 -m bench.step --vocab 262144 --largest            # also the largest batch
    python3 -m bench.step --show bench/results/h200_step.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import providers
from cute_lce.commands.terminal import mebibytes, new_file, positive
from cute_lce.measure import records
from cute_lce.measure.timing import synchronize, time_back_to_back

MIB = 2**20
WITHOUT_HEAD = "without head"
PEERS = ("torch_eager_fp32ce", "torch_compile", "liger_triton", "cce")
BUDGETS = (300.0, 1024.0, 2304.0)
"""MiB of ours."""


class Way(NamedTuple):
    """Who computes head and loss. workspace_mb: of cute_lce's."""

    provider: str
    workspace_mb: float | None = None

    def __str__(self) -> str:
        return self.provider if self.workspace_mb is None else f"{self.provider} {self.workspace_mb:.0f} MiB"


class Sizes(NamedTuple):
    """Of a model and its batches. batch: sequences of `length` tokens in a step."""

    d: int
    layers: int
    inner: int
    heads: int
    vocab: int
    length: int
    batch: int


class Trainer:
    """A model and its optimizer; `step` trains it with a provider's loss."""

    def __init__(self, sizes: Sizes, device: torch.device):
        from transformers import LlamaConfig, LlamaForCausalLM

        self.sizes, self.device = sizes, device
        config = LlamaConfig(
            vocab_size=sizes.vocab,
            hidden_size=sizes.d,
            intermediate_size=sizes.inner,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=max(1, sizes.heads // 4),
            max_position_embeddings=sizes.length,
            tie_word_embeddings=False,
            use_cache=False,
        )
        torch.manual_seed(0)
        with device:
            model: Any = LlamaForCausalLM(config)
        model.bfloat16()
        self.body, self.head = model.model, model.lm_head
        self.parameters = sum(each.numel() for each in model.parameters())
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
        self.model = model.train()
        for each in model.parameters():
            each.grad = torch.zeros_like(each)
        self.optimizer.step()
        gc.collect()
        self.held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def batch(self, sequences: int) -> tuple[Tensor, Tensor]:
        """Tokens, and as targets the next ones."""
        shape = sequences, self.sizes.length + 1
        tokens = torch.randint(self.sizes.vocab, shape, device=self.device)
        return tokens[:, :-1], tokens[:, 1:]

    def step(self, loss: providers.LossFn | None, sequences: int) -> Tensor:
        """Its loss. loss None: there is no head. Gradients are zeroed in place, and are no step's own."""
        tokens, target = self.batch(sequences)
        hidden = self.body(input_ids=tokens).last_hidden_state.flatten(0, 1)
        weight = self.head.weight
        value = hidden.float().mean() if loss is None else loss(hidden, weight, target.flatten())
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return value.detach()


@contextlib.contextmanager
def out_of_memory() -> Iterator[list[str]]:
    """Collects what is raised where a provider does not fit, or ours its budget. What it held is free behind
    the `with`, after `free`: until then the error keeps the frames that it was raised through."""
    found: list[str] = []
    try:
        yield found
    except (torch.OutOfMemoryError, ValueError) as error:
        if isinstance(error, ValueError) and not str(error).startswith("workspace_mb: "):
            raise
        found.append(str(error).partition("\n")[0])


def free() -> None:
    """Memory that nothing refers to any more, also in cycles."""
    gc.collect()
    torch.cuda.empty_cache()


def peak_mib(trainer: Trainer, run: Callable[[], Any]) -> float | None:
    """Of a run; None: there is no GPU."""
    if trainer.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(trainer.device)
    run()
    synchronize(trainer.device)
    return (torch.cuda.max_memory_allocated(trainer.device) - trainer.held) / MIB


def losses_of(ways: Sequence[Way], sizes: Sizes) -> dict[Way, providers.LossFn | str | None]:
    """A provider that is not there has a text that says why."""
    found: dict[Way, providers.LossFn | str | None] = {}
    for way in ways:
        logits = sizes.batch * sizes.length * sizes.vocab
        request = providers.Request(workspace_mb=way.workspace_mb, logits=logits)
        try:
            found[way] = None if way.provider == WITHOUT_HEAD else providers.make(way.provider, request)
        except providers.Unavailable as error:
            found[way] = str(error)
    return found


def measure(sizes: Sizes, ways: Sequence[Way], reps: int, device: torch.device) -> list[dict[str, Any]]:
    """One result a way; `error` says why it has no numbers."""
    trainer = Trainer(sizes, device)
    losses = losses_of(ways, sizes)
    errors = {way: loss for way, loss in losses.items() if isinstance(loss, str)}
    runs: dict[Way, Callable[[], Any]] = {
        way: lambda loss=loss: trainer.step(loss, sizes.batch)
        for way, loss in losses.items()
        if not isinstance(loss, str)
    }
    peaks: dict[Way, float | None] = {}
    first: dict[Way, float] = {}
    for way, run in list(runs.items()):
        with out_of_memory() as failed:
            for _ in range(2):
                run()
            torch.manual_seed(1)
            first[way] = float(run())
            peaks[way] = peak_mib(trainer, run)
        if failed:
            errors[way] = failed[0]
            del runs[way]
            free()
    times: dict[Way, list[float]] = {way: [] for way in runs}
    draw = random.Random(0)
    for _ in range(reps):
        for way in draw.sample(list(runs), len(runs)):
            times[way].append(time_back_to_back(runs[way], 1, device))
    medians = {way: statistics.median(each) for way, each in times.items()}
    without = next((ms for way, ms in medians.items() if way.provider == WITHOUT_HEAD), None)
    tokens = sizes.batch * sizes.length
    results = []
    for way in ways:
        ms = medians.get(way)
        results.append(
            {
                "provider": way.provider,
                "workspace_mb": way.workspace_mb,
                **sizes._asdict(),
                "parameters": trainer.parameters,
                "ms": ms,
                "ms_min": min(times[way]) if ms else None,
                "ms_max": max(times[way]) if ms else None,
                "tokens_per_s": tokens / ms * 1e3 if ms else None,
                "loss_share": None if ms is None or without is None else 1 - without / ms,
                "peak_mib": peaks.get(way),
                "loss": first.get(way),
                "largest_batch": None,
                "largest_error": None,
                "error": errors.get(way),
            }
        )
    return results


class Largest(NamedTuple):
    """The most sequences that a step fits, and why it fits no more; error None: the extrapolation says so."""

    sequences: int | None
    error: str | None = None


def largest(sizes: Sizes, ways: Sequence[Way], device: torch.device) -> dict[Way, Largest]:
    """Of each way: from the peaks of two sizes, and then tried; None: it does not fit sizes.batch."""
    trainer, found = Trainer(sizes, device), {}
    capacity = torch.cuda.get_device_properties(device).total_memory - trainer.held
    for way, loss in losses_of(ways, sizes).items():
        if isinstance(loss, str) or way.provider == WITHOUT_HEAD:
            continue

        def run(sequences: int, loss: providers.LossFn | None = loss) -> None:
            torch.cuda.empty_cache()
            trainer.step(loss, sequences)
            synchronize(device)

        peaks = []
        with out_of_memory() as failed:
            for sequences in (sizes.batch // 2, sizes.batch):
                run(sequences)
                peak = peak_mib(trainer, lambda run=run, count=sequences: run(count))
                assert peak is not None
                peaks.append(peak * MIB)
        if failed:
            found[way] = Largest(None, failed[0])
            free()
            continue
        slope = (peaks[1] - peaks[0]) / (sizes.batch - sizes.batch // 2)
        # The allocator's fragments, the context and the libraries take some.
        most = int((0.94 * capacity - peaks[0]) / slope) + sizes.batch // 2
        found[way] = most_that_fits(run, sizes.batch, most)
        free()
    return found


def most_that_fits(run: Callable[[int], object], least: int, most: int) -> Largest:
    """The largest number up to `most` that run accepts, if it accepts fewer wherever it accepts more; it
    accepts `least`."""
    most = max(least, most)
    refused, tried, error = most + 1, most, None
    while least < tried < refused:
        with out_of_memory() as failed:
            run(tried)
        if failed:
            refused, error = tried, failed[0]
            free()
        else:
            least = tried
        tried = (least + refused) // 2
    return Largest(least, error)


def table(results: Sequence[dict[str, Any]]) -> str:
    rows = [("V", "head and loss", "ms", "tokens/s", "share", "peak MiB", "loss", "largest batch")]
    for r in results:
        way = Way(r["provider"], r["workspace_mb"])
        if r["ms"] is None:
            rows.append((str(r["vocab"]), str(way), r["error"] or "", "", "", "", "", ""))
            continue
        share = "" if r["loss_share"] is None else f"{r['loss_share']:.1%}"
        peak = "" if r["peak_mib"] is None else f"{r['peak_mib']:.0f}"
        speed = f"{r['ms']:.1f}", f"{r['tokens_per_s']:.0f}"
        rows.append(
            (
                str(r["vocab"]),
                str(way),
                *speed,
                share,
                peak,
                f"{r['loss']:.4f}",
                str(r["largest_batch"] or ""),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="bench.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--vocab",
        type=positive,
        nargs="+",
        default=[32768, 128256, 262144],
        help="vocabularies (%(default)s)",
    )
    found.add_argument("--d", type=positive, default=2048, help="hidden size (%(default)s)")
    found.add_argument("--layers", type=positive, default=16, help="decoder layers (%(default)s)")
    found.add_argument("--inner", type=positive, default=8192, help="features inside an MLP (%(default)s)")
    found.add_argument("--heads", type=positive, default=32, help="attention heads (%(default)s)")
    found.add_argument("--length", type=positive, default=2048, help="tokens in a sequence (%(default)s)")
    found.add_argument("--batch", type=positive, default=4, help="sequences in a step (%(default)s)")
    found.add_argument("--reps", type=positive, default=10, help="repetitions (%(default)s)")
    found.add_argument("--peers", nargs="*", default=list(PEERS), choices=[*providers.PROVIDERS])
    found.add_argument(
        "--workspace-mb",
        type=mebibytes,
        nargs="*",
        default=list(BUDGETS),
        help="of cute_lce, in MiB (%(default)s)",
    )
    found.add_argument("--largest", action="store_true", help="also find the largest batch (needs a GPU)")
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--out", type=new_file, help="JSON file for the results")
    found.add_argument("--show", type=Path, nargs="+", help="print stored results, measure nothing")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    if args.show:
        print(table(records.read(args.show)))
        return 0
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser().error(f"--device: got {args.device}, but torch finds no GPU")
    if args.d % args.heads:
        parser().error(f"--heads: got {args.heads}, want a divisor of --d, {args.d}")
    if args.largest and device.type != "cuda":
        parser().error("--largest: it needs a GPU")
    command = shlex.join(["python3", "-m", "bench.step", *(arguments or sys.argv[1:])])
    ways = [
        Way(WITHOUT_HEAD),
        *(Way("cute_lce", budget) for budget in args.workspace_mb),
        *map(Way, args.peers),
    ]
    results: list[dict[str, Any]] = []
    for vocab in args.vocab:
        sizes = Sizes(args.d, args.layers, args.inner, args.heads, vocab, args.length, args.batch)
        found = measure(sizes, ways, args.reps, device)
        origin = records.provenance(device, command)
        if args.out:
            records.write(args.out, [*results, *({**origin, **result} for result in found)])
        free()
        if args.largest:
            fits = largest(sizes, ways, device)
            for result in found:
                most = fits.get(Way(result["provider"], result["workspace_mb"]), Largest(None))
                result |= {"largest_batch": most.sequences, "largest_error": most.error}
            free()
        results += [{**origin, **result} for result in found]
        if args.out:
            records.write(args.out, results)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
