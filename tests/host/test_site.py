"""The site of `make docs`: it builds without a warning and has every document and every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cute_lce
from cute_lce import parallel

ROOT = Path(__file__).resolve().parents[2]
# As make docs.
SPHINX = (sys.executable, "-m", "sphinx", "-M", "html", "docs")
STRICT = ("-W", "--keep-going", "-n", "-q")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run([*SPHINX, folder, *STRICT], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "html"


def test_every_document_is_a_page_that_another_leads_to(site):
    pages = {page.name: page.read_text(encoding="utf-8") for page in site.glob("*.html")}
    for document in (ROOT / "docs").glob("*.md"):
        name = f"{document.stem}.html"
        assert any(f'href="{name}' in text for other, text in pages.items() if other != name), name


def test_every_public_name_is_documented(site):
    text = (site / "api.html").read_text(encoding="utf-8")
    wanted = [f"cute_lce.{name}" for name in cute_lce.__all__ if name != "__version__"]
    wanted += [f"cute_lce.parallel.{name}" for name in parallel.__all__]
    wanted += [
        f"module-cute_lce.integrations.{name}"
        for name in ("automodel", "megatron", "torchtitan", "transformers", "trl", "verl")
        if (ROOT / "cute_lce" / "integrations" / f"{name}.py").exists()
    ]
    assert set(wanted) <= set(re.findall(r'id="((?:module-)?cute_lce\.[\w.]+)"', text))
    for command in ("info", "plan", "compile", "doctor", "bench", "report"):
        assert f"usage: cute-lce {command} " in text
    for op in ("linear_cross_entropy", "linear_logprob"):
        assert f"cute_lce::fused_{op}(" in text


def test_words_are_found_by_the_search(site):
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert '"grad_in_forward"' in index or "grad_in_forward:" in index


def test_make_docs_builds_the_same_way():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (command,) = re.findall(r"python -m sphinx (.*)$", text, flags=re.MULTILINE)
    assert command.split() == [*SPHINX[3:], "docs/_build", *STRICT]
