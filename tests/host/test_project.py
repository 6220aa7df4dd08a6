"""The project's own files agree: tools are pinned once, and every way to check runs these pins."""

import importlib.metadata
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ruff", "pyright")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_is_pinned_once_and_that_is_what_runs(tool):
    # Extras, such as pyright[nodejs], are no part of a version.
    pins = re.findall(rf'^    "{tool}(?:\[\w+\])?==([\d.]+)"', text("pyproject.toml"), flags=re.MULTILINE)
    assert pins == [importlib.metadata.version(tool)]
    for name in (".pre-commit-config.yaml", ".github/workflows/check.yml", "Makefile"):
        assert not re.search(rf"{tool}\S*\s*[=@:]+\s*v?\d", text(name)), f"{name} pins {tool} anew"


def test_hooks_before_a_commit_run_the_tools_of_the_environment():
    hooks = text(".pre-commit-config.yaml")
    entries = re.findall(r"^ +entry: (\S+)", hooks, flags=re.MULTILINE)
    assert {Path(entry).name for entry in entries} == set(TOOLS)
    assert all(entry == f".venv/bin/{Path(entry).name}" for entry in entries)
    assert re.findall(r"^ +language: (\S+)", hooks, flags=re.MULTILINE) == ["system"] * len(entries)
    assert re.findall(r"repo: (\S+)", hooks) == ["local"]


def test_the_workflow_checks_the_oldest_python_that_is_supported():
    workflow, project = text(".github/workflows/check.yml"), text("pyproject.toml")
    (oldest,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    (versions,) = re.findall(r"python: \[(.*)\]", workflow)
    assert versions.split(", ")[0] == f'"{oldest}"'
    assert re.findall(r"run: (.+)", workflow) == ["make check"]
    assert re.findall(r"^exec (.+)$", text(".ci/run"), flags=re.MULTILINE) == ["make check"]


def test_tests_of_the_same_kernels_have_one_worker(request):
    """As pytest-xdist, where it distributes by groups, reads them: behind the last bracket of an id."""
    distributes = request.config.getoption("loadgroup", default=False)
    for item in request.session.items:
        for mark in item.iter_markers("xdist_group"):
            assert not set("@[]").intersection(mark.args[0]), item.nodeid
            assert item.nodeid.endswith(f"@{mark.args[0]}") or not distributes, item.nodeid
