"""The python blocks of README.md and docs, and how they are run.

A block stands alone: it has the names of `names` below, and its sizes are reduced to those. Its fence may say

    python torchrun         a file of its own, for two processes (tests/distributed/test_documents.py)
    python integrations     it needs a framework (tests/integrations/test_documents.py)
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import cute_lce

ROOT = Path(__file__).resolve().parents[1]
SITE = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
"""The documents whose blocks are run."""
FENCE = re.compile(r"^```python ?([^\n]*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
KINDS = ("", "torchrun", "integrations")
"""What a fence says after "python"."""
D, VOCAB = 32, 128
SMALL = {"4096": str(D), "128256": str(VOCAB)}


class Block(NamedTuple):
    """A python block: its document, the line of its fence, which of KINDS it is, its text."""

    document: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    def compile(self, text: str) -> Any:
        """Code whose tracebacks have the document's lines."""
        return compile("\n" * self.line + text, str(ROOT / self.document), "exec")


def blocks(kind: str) -> list[Block]:
    """All blocks of one of KINDS."""
    return [block for document in SITE for block in _blocks(document) if block.kind == kind]


def _blocks(document: Path) -> list[Block]:
    text, name = document.read_text(encoding="utf-8"), document.relative_to(ROOT).as_posix()
    found = [
        Block(name, text.count("\n", 0, match.start()) + 1, *match.groups()) for match in FENCE.finditer(text)
    ]
    for block in found:
        assert block.kind in KINDS, f"{block}: got {block.kind!r}, want one of {', '.join(map(repr, KINDS))}"
    return found


def names(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """What a block finds: modules, a head, and a batch of 2 x 8 tokens."""
    torch.manual_seed(0)
    kind = {"device": device, "dtype": dtype}
    lm_head = nn.Linear(D, VOCAB, bias=False, **kind)
    lm_head.weight.main_grad = torch.zeros(VOCAB, D, device=device)  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "torch": torch,
        "cute_lce": cute_lce,
        "hidden": torch.randn(2, 8, D, **kind).requires_grad_(),
        "lm_head": lm_head,
        "weight": lm_head.weight,
        "embedding": nn.Embedding(VOCAB, D, **kind),
        "target": torch.randint(VOCAB, (2, 8), device=device),
        "advantages": torch.randn(2, 8, device=device),
        "negatives": torch.randint(VOCAB, (2, 8, 5), device=device),
    }


def run(block: Block, device: str, dtype: torch.dtype, **more: Any) -> None:
    """Run a block with `names` and more; its numbers must be finite, a backward must leave a gradient."""
    scope = names(device, dtype) | more
    leaves = [scope["hidden"], scope["weight"], scope["embedding"].weight]
    text = block.text
    for size, small in SMALL.items():
        text = re.sub(rf"\b{size}\b", small, text)
    exec(block.compile(text), scope)
    for name, value in scope.items():
        for tensor in value if isinstance(value, tuple) else (value,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                assert torch.isfinite(tensor).all(), f"{block}: {name}"
    if "backward(" in text:
        leaves += [each for each in scope.values() if isinstance(each, Tensor) and each.is_leaf]
        models = [each for each in scope.values() if isinstance(each, nn.Module)]
        leaves += [each for model in models for each in model.parameters()]
        grown = [leaf.grad for leaf in leaves] + [leaves[1].main_grad]
        assert any(each is not None and each.isfinite().all() and each.any() for each in grown), str(block)
