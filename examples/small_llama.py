"""What the Hugging Face examples share: a small Llama's configuration, and a trainer that writes nothing."""

from __future__ import annotations

import argparse
from typing import Any

from transformers import LlamaConfig


def config_of(args: argparse.Namespace, positions: int, **special: Any) -> LlamaConfig:
    """Of --vocab-size, --d, --layers and --heads. special: ids of special tokens."""
    return LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.d,
        intermediate_size=3 * args.d,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=positions,
        **special,
    )


def training_options(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Of --device, --steps, --batch, --lr and --seed: TrainingArguments that log every step and save none."""
    cpu = args.device == "cpu"
    return {
        "output_dir": folder,
        "use_cpu": cpu,
        "bf16": not cpu,
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch,
        "learning_rate": args.lr,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": args.seed,
    }
