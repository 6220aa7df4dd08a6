"""Fine-tune on chats whose prompts are masked, once with cute_lce's loss and once with torch's: step times.

A chat is a stretch of the standard library of the interpreter that runs this program: its first half is the
prompt, whose targets are ignored, the rest the answer. Both runs start from the same weights and see the same
chats; the output layer runs under autocast to bfloat16 on a GPU, in float32 on a CPU:

    fused     cute_lce.linear_cross_entropy(hidden, weight, target)
    torch     F.cross_entropy(F.linear(hidden, weight), target)

The program prints both curves' ends and the medians of their steps' times, and ends with status 1 when the
losses differ by more than --tolerance. --out keeps both runs in a JSON file. --vocab-size may exceed the
text's vocabulary, as models' do.

    python3 -m examples.finetune
    python3 -m examples.finetune --d 2048 --layers 6 --heads 16 --length 2048 --batch 8 --vocab-size 131072
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cute_lce import linear_cross_entropy
from cute_lce.commands.terminal import positive
from cute_lce.measure import records
from cute_lce.measure.timing import synchronize
from cute_lce.options import IGNORE_INDEX
from examples.corpus import Corpus, batches
from examples.language_model import LanguageModel

WARM_UP = 3


def torch_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


class Head(nn.Linear):
    """An output layer with one of the two losses."""

    def __init__(self, d: int, vocab_size: int, loss: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__(d, vocab_size, bias=False)
        self.loss = loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return self.loss(input, self.weight, target)


def train(
    name: str, loss: Callable[[Tensor, Tensor, Tensor], Tensor], corpus: Corpus, args: argparse.Namespace
) -> tuple[list[float], float]:
    """(the losses, the median milliseconds of a step)."""
    device = torch.device(args.device)
    head = Head(args.d, args.vocab_size, loss)
    model = LanguageModel(head.out_features, args.d, args.layers, args.heads, args.length, head)
    model.initialise(args.seed)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    source = batches(corpus.train, args.batch, args.length, args.seed)
    losses, times = [], []
    for _ in range(args.steps):
        tokens, target = next(source)
        target = target.clone()
        target[:, : int(args.prompt * args.length)] = IGNORE_INDEX
        tokens, target = tokens.to(device), target.to(device)
        synchronize(device)
        begin = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            found = model(tokens, target)
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - begin))
        losses.append(found.item())
    milliseconds = statistics.median(times[WARM_UP:] or times)
    print(f"{name:6} loss {losses[0]:.4f} -> {losses[-1]:.4f}, {milliseconds:.2f} ms a step", flush=True)
    return losses, milliseconds


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.finetune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=positive, default=30, help="training steps (%(default)s)")
    add("--batch", type=positive, default=4, help="chats in a step (%(default)s)")
    add("--length", type=positive, default=128, help="tokens in a chat (%(default)s)")
    add("--prompt", type=float, default=0.5, help="part of a chat that is masked (%(default)s)")
    add("--d", type=positive, default=128, help="hidden size (%(default)s)")
    add("--layers", type=positive, default=2, help="decoder layers (%(default)s)")
    add("--heads", type=positive, default=4, help="attention heads (%(default)s)")
    add(
        "--vocab-size",
        type=positive,
        default=4096,
        help="classes of the model (%(default)s)",
    )
    add(
        "--text-vocab-size",
        type=positive,
        default=4096,
        help="entries of the text's, of these (%(default)s)",
    )
    add("--lr", type=float, default=3e-4, help="learning rate (%(default)s)")
    add("--seed", type=int, default=0, help="seed of the weights and of the data (%(default)s)")
    add(
        "--tolerance",
        type=float,
        default=5e-3,
        help="largest relative difference of the losses (%(default)s)",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    add("--out", type=Path, help="JSON file for both runs' losses and times")
    args = parser.parse_args(argv)
    # This is also true for nan.
    if not 0 <= args.prompt < 1:
        parser.error(f"--prompt: got {args.prompt}, want a part in [0, 1)")
    if args.d % (2 * args.heads):
        parser.error(f"--d: got {args.d}, want a multiple of twice --heads, {args.heads}")
    if args.text_vocab_size < 300:
        got = args.text_vocab_size
        parser.error(f"--text-vocab-size: got {got}, want at least 300 (the 256 bytes and some pairs)")
    if args.vocab_size < args.text_vocab_size:
        got, text = args.vocab_size, args.text_vocab_size
        parser.error(f"--vocab-size: got {got}, want at least --text-vocab-size, {text}")
    return args


def kept(
    name: str, losses: Sequence[float], milliseconds: float, args: argparse.Namespace, command: str
) -> dict[str, Any]:
    """What --out keeps of a run."""
    sizes = ("steps", "batch", "length", "prompt", "d", "layers", "heads")
    return {
        "provider": name,
        **{size: getattr(args, size) for size in sizes},
        "vocab": args.vocab_size,
        "ms": milliseconds,
        "losses": [records.finite_or_text(loss) for loss in losses],
        **records.provenance(torch.device(args.device), command),
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    command = f"python3 -m examples.finetune {shlex.join(words)}"
    corpus = Corpus.of_standard_library(args.text_vocab_size)
    fused, fused_ms = train("fused", linear_cross_entropy, corpus, args)
    other, other_ms = train("torch", torch_loss, corpus, args)
    if args.out is not None:
        runs = ("fused", fused, fused_ms), ("torch", other, other_ms)
        records.write(args.out, [kept(*run, args, command) for run in runs])
    apart = max(abs(a - b) / abs(b) for a, b in zip(fused, other, strict=True))
    print(f"losses at most {apart:.1e} apart; torch takes {other_ms / fused_ms:.2f} times as long a step")
    return int(not apart <= args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
