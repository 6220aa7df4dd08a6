"""The site that `make docs` builds, from the root of the repository: sphinx, with myst for the markdown."""

from __future__ import annotations

import contextlib
import io
import os
import re
import textwrap
from pathlib import Path

import torch

import cute_lce
from cute_lce import cli

project = "cute_lce"
version = release = cute_lce.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme_options = {"page_width": "1240px", "body_max_width": "none", "sidebar_width": "230px"}
html_show_copyright = False
# "auto" keeps the quotes that can be pasted.
smartquotes = False

# Math, and anchors of headings, as on GitHub.
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 4

# `x` in a docstring is code, and "a, b: text" below Args is about both.
default_role = "code"
napoleon_use_param = False
autodoc_typehints_format = "short"
# Frameworks need not be there, and types in signatures lead nowhere: a build asks no other site.
autodoc_mock_imports = [
    "accelerate",
    "megatron",
    "nemo_automodel",
    "peft",
    "torchtitan",
    "transformers",
    "trl",
]
nitpick_ignore_regex = [("py:class", ".*")]

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/results/README.md": "results.md",
    "examples/README.md": "examples.md",
    "tests/emulator/README.md": "emulator.md",
}
"""Documents outside docs -> the pages that include them."""
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Example|Examples):")
MARKUP = re.compile(r"[*|]|(?<=\w)_(?!\w)")
DOCUMENT = re.compile(r"(?<![\w/`])docs/([\w-]+)\.md")


def retarget(text: str, folder: str) -> str:
    """The text of a document in a folder of the repository, with links that are right in docs."""

    def link(match: re.Match) -> str:
        file = os.path.normpath(os.path.join(folder, match[1]))
        return "](" + PAGES.get(file, os.path.relpath(file, "docs"))

    return LINK.sub(link, text)


# What a line `@name@` of api.rst stands for


def integrations() -> str:
    """Each module of cute_lce.integrations but those that others import."""
    files = sorted(Path("cute_lce", "integrations").glob("[a-z]*.py"))
    used = {name for file in files for name in re.findall(r"^from \.(\w+) import", file.read_text(), re.M)}
    names = [f"cute_lce.integrations.{file.stem}" for file in files if file.stem not in used]
    part = "{0}\n{1}\n\n.. automodule:: {0}\n   :members:\n"
    return "\n".join(part.format(name, '"' * len(name)) for name in names)


def schemas() -> str:
    """The public ops', an argument a line."""
    ops = torch.ops.cute_lce
    found = [str(op.default._schema) for op in (ops.fused_linear_cross_entropy, ops.fused_linear_logprob)]
    return "\n".join(_literal(re.sub(r"(?<=[(,]) ?(?=\w+\??\[?\]? \w)", "\n    ", each)) for each in found)


def commands() -> str:
    """`cute-lce --help`, and that of each of its commands."""
    names = re.findall(r"^    (\w+)\b", _help(), flags=re.MULTILINE)
    return "\n".join(_literal(each) for each in (_help(), *map(_help, names)))


def _help(*command: str) -> str:
    printed = io.StringIO()
    # What argparse breaks lines by.
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([*command, "--help"])
    return printed.getvalue()


def _literal(text: str) -> str:
    return ".. code-block:: text\n\n" + textwrap.indent(text, "   ") + "\n"


# What sphinx calls


def read(app, page: str, source: list[str]) -> None:
    if page == "api":
        for part in (integrations, schemas, commands):
            source[0] = source[0].replace(f"@{part.__name__}@", part())
    else:
        source[0] = retarget(source[0], "docs")


def read_included(app, path, page: str, source: list[str]) -> None:
    source[0] = retarget(source[0], os.path.relpath((app.srcdir / path).resolve().parent))


def read_docstring(app, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text, but for `code` and napoleon's sections: what is indented stays as it is."""
    found: list[str] = []
    literal = section = False
    for line in lines:
        indented = line.startswith(" ")
        if line and not indented:
            literal, section = False, SECTION.fullmatch(line) is not None
        if indented and not (literal or section) and found[-1:] == [""]:
            literal = True
            found += ["::", ""]
        found.append(
            line if literal else DOCUMENT.sub(r":doc:`docs/\1.md </\1>`", MARKUP.sub(r"\\\g<0>", line))
        )
    lines[:] = found


def setup(app) -> None:
    app.connect("source-read", read)
    app.connect("include-read", read_included)
    # Before napoleon.
    app.connect("autodoc-process-docstring", read_docstring, priority=400)
