"""The text that the example trains on: the standard library of the Python that runs it."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# Not part of every installation, not Python's own, or tables rather than text.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
)
END_OF_FILE = "<|endoftext|>"


def source_files(root: Path) -> list[Path]:
    """The Python sources under `root`, in an order that is the same wherever the same files are."""
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted((f for f in files if not SKIPPED_FOLDERS & set(f.parts)), key=lambda f: f.as_posix())


def read_texts(root: Path, files: Sequence[Path]) -> list[str]:
    return [(root / f).read_text(encoding="utf-8", errors="replace") for f in files]


def build_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """A byte-level byte-pair vocabulary of `vocab_size` entries, the first of them END_OF_FILE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_FILE], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """All texts as one int64 vector of token ids, END_OF_FILE (id 0) after each."""
    ids: list[int] = []
    for encoded in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        ids.extend(encoded.ids)
        ids.append(0)
    return torch.tensor(ids, dtype=torch.int64)


@dataclass(frozen=True)
class Corpus:
    train: torch.Tensor  # (tokens,) int64
    valid: torch.Tensor  # (tokens,) int64
    vocab_size: int

    @classmethod
    def of_standard_library(cls, vocab_size: int) -> Corpus:
        root = Path(sysconfig.get_path("stdlib"))
        files = source_files(root)
        if len(files) < 40:
            raise SystemExit(
                f"train_lm: only {len(files)} Python sources under {root}; at least 40 are needed"
            )
        valid_files = files[::20]
        train_files = sorted(set(files) - set(valid_files), key=lambda f: f.as_posix())
        train_texts = read_texts(root, train_files)
        tokenizer = build_tokenizer(train_texts, vocab_size)
        return cls(
            train=encode(tokenizer, train_texts),
            valid=encode(tokenizer, read_texts(root, valid_files)),
            vocab_size=tokenizer.get_vocab_size(),
        )


def batches(
    ids: torch.Tensor, batch: int, length: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of (tokens, next tokens), each (batch, length) int64, drawn at random places."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(ids) - length, (batch,), generator=generator)
        window = ids[starts[:, None] + offsets]
        yield window[:, :-1], window[:, 1:]
