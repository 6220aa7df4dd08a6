"""The documents: links lead somewhere, the files that they name exist, and their examples run."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

import cute_lce
from cute_lce import cli
from cute_lce.plan.kernels import BackwardKey, ForwardKey, kernels
from tests import documents

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "bench/**/*.md", "examples/*.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_row_has_the_cells_of_its_tables_head(document):
    """Cells beyond the head's are not shown."""
    cells = 0
    for line in document.read_text(encoding="utf-8").splitlines():
        found = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert found in (0, cells) or not cells, line
        cells = found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_line_but_a_tables_is_longer_than_150_characters(document):
    lines = enumerate(document.read_text(encoding="utf-8").splitlines(), 1)
    long = [number for number, line in lines if len(line) > 150 and not line.startswith("|")]
    assert not long


def test_the_first_screen_of_the_readme():
    screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:24])
    for wanted in ("make demo", "make test", "cute_lce.linear_cross_entropy(", "It runs on", "#status"):
        assert wanted in screen


def test_how_many_kernels_there_are():
    counts = []
    for arch in ("sm_90a", "sm_100a"):
        keys = kernels(arch, "bfloat16", "int64")
        forwards = [key.keeps for key in keys if isinstance(key, ForwardKey)]
        backwards = sum(isinstance(key, BackwardKey) for key in keys)
        counts.append((forwards.count(False), forwards.count(True), backwards))
        assert len(keys) == sum(counts[-1]) + 1
    (plain, keeping, backwards), blackwell = counts
    assert set(blackwell) == {7}
    kernels_md, tuning = (
        " ".join((ROOT / f"docs/{name}.md").read_text(encoding="utf-8").split())
        for name in ("kernels", "tuning")
    )
    says = (
        f"{plain} forwards, {keeping} that keep and {backwards} backwards on Hopper, 7 of each on Blackwell"
    )
    assert says in kernels_md
    assert f"of {plain} and {backwards} on Hopper" in tuning
    assert f"bfloat16 with int64 has {plain + keeping + backwards + 1}" in tuning


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_named_commands_exist(document, capsys):
    """At the beginning of a line or of `code`: make's targets, modules that are run, cute-lce's commands."""
    text = document.read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE)) <= set(targets)
    for module in re.findall(r"python3? -m ([a-z_]+(?:\.\w+)*)", text):
        assert importlib.util.find_spec(module), module
    for command in set(re.findall(r"(?:^|`)cute-lce ([a-z]+)", text, flags=re.MULTILINE)):
        with pytest.raises(SystemExit, match="0"):
            cli.main([command, "--help"])
        assert f"usage: cute-lce {command}" in capsys.readouterr().out


def test_the_readme_has_every_argument():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("| argument | |\n")[2].partition("\n\n")[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert named == set(inspect.signature(cute_lce.linear_cross_entropy).parameters)


def test_every_environment_variable_is_documented():
    text = (ROOT / "docs/tuning.md").read_text(encoding="utf-8")
    read = {
        name
        for file in (ROOT / "cute_lce").rglob("*.py")
        for name in re.findall(r"CUTE_LCE_[A-Z_]+", file.read_text(encoding="utf-8"))
    }
    assert read
    assert read == set(re.findall(r"^\| `(CUTE_LCE_[A-Z_]+)", text, flags=re.MULTILINE))


@pytest.mark.parametrize("block", documents.blocks(""), ids=str)
def test_a_python_block_runs(block):
    documents.run(block, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("loss = hidden.sum() / 0", "loss"),
        ("loss = linear_cross_entropy(hidden, weight, target)", "linear_cross_entropy"),
        ("loss = cute_lce.linear_cross_entropy(hidden.detach(), weight.detach(), target)  # backward()", "1"),
        ("assert weight.shape == (128256, 4096), weight.shape; loss = torch.ones(4096)[32]", "index 32"),
    ],
)
def test_a_block_that_is_wrong_is_found(text, error):
    with pytest.raises((AssertionError, IndexError, NameError), match=error):
        documents.run(documents.Block("README.md", 1, "", text), "cpu", torch.float32)
