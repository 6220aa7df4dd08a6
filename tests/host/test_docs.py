"""The documents: links lead somewhere, the files that they name exist, and their examples run."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import cute_lce

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/*.md", "bench/**/*.md", "tests/**/*.md") for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:cute_lce|bench|examples|tests|docs)/[\w./-]+\.(?:py|md|json|toml))`")


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_named_files_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    for link in LINK.findall(text):
        if link.startswith(("https://", "http://")):
            continue
        file, _, anchor = link.partition("#")
        target = document.parent / file if file else document
        assert target.exists(), f"{link}: there is no {target}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{link}: no such heading"
    for file in FILE.findall(text):
        assert (ROOT / file).exists(), f"{file} is named but not there"


def test_the_first_screen_of_the_readme():
    screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:24])
    for wanted in ("make demo", "make test", "cute_lce.linear_cross_entropy(", "It runs on", "#status"):
        assert wanted in screen


def test_the_losses_of_ones_own_run():
    text = (ROOT / "docs/losses.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    hidden = torch.randn(8, 32, requires_grad=True)
    scope = {
        "cute_lce": cute_lce,
        "hidden": hidden,
        "weight": torch.randn(128, 32),
        "target": torch.randint(128, (8,)),
        "negatives": torch.randint(128, (8, 5)),
    }
    exec(compile(block, "losses.md", "exec"), scope)
    assert torch.isfinite(scope["loss"])
    assert hidden.grad is not None
    assert hidden.grad.any()


def test_the_readmes_examples_run():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) >= 2
    torch.manual_seed(0)
    d, vocab = 4096, 128256
    for block in blocks:
        # The same lines with sizes that a test can afford.
        small = block.replace(str(d), "32").replace(str(vocab), "128")
        hidden = torch.randn(2, 8, 32, requires_grad=True)
        embedding = nn.Embedding(128, 32)
        lm_head = nn.Linear(32, 128, bias=False)
        scope = {
            "torch": torch,
            "cute_lce": cute_lce,
            "hidden": hidden,
            "embedding": embedding,
            "lm_head": lm_head,
            "weight": lm_head.weight,
            "target": torch.randint(128, (2, 8)),
            "advantages": torch.randn(2, 8),
        }
        exec(compile(small, "README.md", "exec"), scope)
        assert torch.isfinite(scope["loss"])
        assert hidden.grad is not None
