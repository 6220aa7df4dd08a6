"""The project's own files agree: tools are pinned once, and every way to check runs these pins."""

import importlib.metadata
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import sweeps

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


@pytest.mark.parametrize("pattern", sweeps.LONG)
def test_a_long_sweep_is_of_tests_that_are_there(pattern):
    found = re.fullmatch(r"(\w+/\w+\.py)::([a-z]\w+)?.*", pattern)
    assert found
    assert re.search(rf"^def {found[2] or 'test'}", text(f"tests/{found[1]}"), flags=re.MULTILINE)


class Case:
    """What of a pytest.Function is looked at."""

    def __init__(self, test: str, **values):
        self.path, self.originalname, self.callspec = Path("a.py"), test, SimpleNamespace(params=values)


def test_by_default_each_value_of_a_parameter_is_in_a_case():
    every: list[Any] = [Case("f", a=a, b=b) for a in range(2) for b in "xyzw"] + [Case("g", a=1)]
    long = sweeps.beyond_each_value(every)
    short = [each for each in every if each not in long]
    found = [tuple(each.callspec.params.values()) for each in short]
    assert found == [(0, "x"), (0, "z"), (1, "y"), (1, "w"), (1,)]
