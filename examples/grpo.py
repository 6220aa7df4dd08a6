"""GRPO on a toy reward with TRL's trainer, whose log-probabilities cute_lce computes without logits.

The model is a small Llama made from its configuration, with random weights: nothing is downloaded. A token
is a letter, a prompt is two of them, and the reward of a completion is the part of its letters that are
--letter. One line is cute_lce's, `trl.install()`. The program prints the mean reward of the first and the
last quarter of the steps, and ends with status 1 when it has not risen. It needs
`pip install '.[integrations]'`.

    python3 -m examples.grpo
"""

from __future__ import annotations

import argparse
import string
import sys
import tempfile
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from cute_lce.commands.terminal import positive
from cute_lce.integrations import trl
from examples.small_llama import config_of, training_options

LETTERS = string.ascii_lowercase
POSITIONS = 64
SPECIAL = ("<pad>", "<bos>", "<eos>")


def letters_tokenizer() -> PreTrainedTokenizerFast:
    model = models.WordLevel({token: i for i, token in enumerate((*SPECIAL, *LETTERS))}, unk_token="<pad>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def train(args: argparse.Namespace) -> list[float]:
    """The mean rewards of all steps."""
    torch.manual_seed(args.seed)
    config = config_of(args, POSITIONS, pad_token_id=0, bos_token_id=1, eos_token_id=2)

    def reward(completions: list[str], **others: Any) -> list[float | None]:
        return [text.count(args.letter) / args.length for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            **training_options(args, folder),
            num_generations=args.batch,
            max_completion_length=args.length,
        )
        trainer = GRPOTrainer(
            model=LlamaForCausalLM(config),
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_list(
                [{"prompt": one + other} for one in LETTERS for other in LETTERS]
            ),
            processing_class=letters_tokenizer(),
        )
        trainer.remove_callback(PrinterCallback)
        trl.install()
        try:
            trainer.train()
        finally:
            trl.uninstall()
    return [float(entry["reward"]) for entry in trainer.state.log_history if "reward" in entry]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.grpo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=positive, default=40, help="training steps (%(default)s)")
    add("--batch", type=positive, default=16, help="completions in a step, all of one prompt (%(default)s)")
    add("--length", type=positive, default=8, help="most tokens in a completion (%(default)s)")
    add("--letter", default="e", help="the letter that the reward counts (%(default)s)")
    add("--d", type=positive, default=64, help="hidden size (%(default)s)")
    add("--layers", type=positive, default=1, help="decoder layers (%(default)s)")
    add("--heads", type=positive, default=4, help="attention heads (%(default)s)")
    add("--vocab-size", type=positive, default=29, help="classes of the model, at least 29 (%(default)s)")
    add("--lr", type=float, default=3e-3, help="learning rate (%(default)s)")
    add("--seed", type=int, default=0, help="seed of the weights and of the data (%(default)s)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cuda", "cpu"), default=device, help="(%(default)s)")
    args = parser.parse_args(argv)
    if args.batch < 2:
        parser.error(f"--batch: got {args.batch}, want at least 2: rewards are compared with each other")
    if args.length > POSITIONS - 2:
        parser.error(f"--length: got {args.length}, want at most {POSITIONS - 2}")
    if args.letter not in tuple(LETTERS):
        parser.error(f"--letter: got {args.letter!r}, want one of {LETTERS}")
    if args.d % (2 * args.heads):
        parser.error(f"--d: got {args.d}, want a multiple of twice --heads, {args.heads}")
    classes = len(SPECIAL) + len(LETTERS)
    if args.vocab_size < classes:
        parser.error(f"--vocab-size: got {args.vocab_size}, want at least {classes}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    rewards = train(args)
    quarter = max(len(rewards) // 4, 1)
    first, last = fmean(rewards[:quarter]), fmean(rewards[-quarter:])
    print(f"reward {first:.3f} -> {last:.3f} in {len(rewards)} steps")
    return int(not last > first)


if __name__ == "__main__":
    sys.exit(main())
