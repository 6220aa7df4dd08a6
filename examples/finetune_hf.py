"""Fine-tune a Hugging Face model with its Trainer, once with one line of cute_lce and once without.

The model is a Llama made from its configuration, with random weights: nothing is downloaded. A chat is a
stretch of the standard library of the interpreter that runs this program, a token a byte, whose first half is
the prompt and has no labels. Both runs start from the same weights and see the same chats:

    fused     cute_lce.integrations.transformers.patch(model), then as the other
    own       the model's own loss, by way of its logits

The program prints both curves' ends and the medians of their steps' times, and ends with status 1 when the
losses differ by more than --tolerance. It needs `pip install '.[integrations]'`.

    python3 -m examples.finetune_hf
    python3 -m examples.finetune_hf --d 2048 --layers 8 --heads 16 --length 2048 --batch 4 --vocab-size 128256
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from cute_lce.commands.terminal import positive
from cute_lce.integrations.transformers import patch
from cute_lce.measure.timing import synchronize
from examples.corpus import read_texts
from examples.small_llama import config_of, training_options

WARM_UP = 3


class Clock(TrainerCallback):
    """The milliseconds of each step."""

    def __init__(self, device: torch.device):
        self.device, self.times = device, []

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        synchronize(self.device)
        self.begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        synchronize(self.device)
        self.times.append(1e3 * (time.perf_counter() - self.begin))


def chats(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """As many as all steps take, (length,) each."""
    root = Path(sysconfig.get_path("stdlib"))
    text = "".join(read_texts(root, sorted(root.glob("*.py"))[:20])).encode()
    ids = torch.tensor(list(text), dtype=torch.int64)
    found = []
    for i in range(args.steps * args.batch * args.accumulate):
        start = 997 * i % (len(ids) - args.length)
        chat = ids[start : start + args.length]
        labels = chat.clone()
        labels[: int(args.prompt * args.length)] = -100
        found.append({"input_ids": chat, "labels": labels})
    return found


def train(fused: bool, args: argparse.Namespace) -> list[float]:
    """The losses of all steps."""
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(config_of(args, args.length))
    if fused:
        patch(model)
    with tempfile.TemporaryDirectory() as folder:
        options = training_options(args, folder)
        arguments = TrainingArguments(**options, gradient_accumulation_steps=args.accumulate)
        clock = Clock(torch.device(args.device))
        data: Any = chats(args)
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    milliseconds = statistics.median(clock.times[WARM_UP:] or clock.times)
    name = "fused" if fused else "own"
    print(f"{name:6} loss {losses[0]:.4f} -> {losses[-1]:.4f}, {milliseconds:.2f} ms a step", flush=True)
    return losses


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.finetune_hf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=positive, default=20, help="training steps (%(default)s)")
    add("--batch", type=positive, default=4, help="chats in a micro-batch (%(default)s)")
    add("--accumulate", type=positive, default=2, help="micro-batches in a step (%(default)s)")
    add("--length", type=positive, default=128, help="tokens in a chat (%(default)s)")
    add("--prompt", type=float, default=0.5, help="part of a chat that is masked (%(default)s)")
    add("--d", type=positive, default=128, help="hidden size (%(default)s)")
    add("--layers", type=positive, default=2, help="decoder layers (%(default)s)")
    add("--heads", type=positive, default=4, help="attention heads (%(default)s)")
    add("--vocab-size", type=positive, default=4096, help="classes of the model, at least 256 (%(default)s)")
    add("--lr", type=float, default=1e-3, help="learning rate (%(default)s)")
    add("--seed", type=int, default=0, help="seed of the weights and of the data (%(default)s)")
    add(
        "--tolerance",
        type=float,
        default=5e-3,
        help="largest relative difference of the losses (%(default)s)",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cuda", "cpu"), default=device, help="(%(default)s)")
    args = parser.parse_args(argv)
    if args.length < 2:
        parser.error(f"--length: got {args.length}, want at least 2: each token is predicted by those before")
    # This is also true for nan.
    if not 0 <= args.prompt < 1:
        parser.error(f"--prompt: got {args.prompt}, want a part in [0, 1)")
    if args.d % (2 * args.heads):
        parser.error(f"--d: got {args.d}, want a multiple of twice --heads, {args.heads}")
    if args.vocab_size < 256:
        parser.error(f"--vocab-size: got {args.vocab_size}, want at least 256: a token is a byte")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    fused, own = train(True, args), train(False, args)
    apart = max(abs(a - b) / abs(b) for a, b in zip(fused, own, strict=True))
    print(f"losses at most {apart:.1e} apart")
    return int(not apart <= args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
