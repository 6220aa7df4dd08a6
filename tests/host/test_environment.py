"""The environment's variables: what each may be, and where another value is refused."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cute_lce import environment
from tests import forked

BOOLEANS = ("CUTE_LCE_CHECK_TARGETS", "CUTE_LCE_CHECK_RANKS")
WORKSPACE, IMPLEMENTATION = "CUTE_LCE_WORKSPACE_MB", "CUTE_LCE_IMPLEMENTATION"
BAD = [
    *((name, value, "1, true, yes or on") for name in BOOLEANS for value in ("abc", "2", "-1", "tru")),
    *((WORKSPACE, value, "a positive number of MiB") for value in ("many", "0", "-5", "nan", "inf", "1 GiB")),
    *((IMPLEMENTATION, value, "'auto' or 'streaming'") for value in ("kernels", "stream", "1")),
]


def read(monkeypatch: pytest.MonkeyPatch, name: str, value: str | None) -> dict[str, Any]:
    """The module's values in a process with this variable."""
    for each in (*BOOLEANS, WORKSPACE, IMPLEMENTATION):
        monkeypatch.delenv(each, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    return runpy.run_path(environment.__file__)


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("1", "true", "yes", "on", "True", "YES", "On", " 1 "), True),
        (("0", "false", "no", "off", "False", "NO", "Off", "", " ", None), False),
    ],
    ids=["on", "off"],
)
def test_a_boolean_has_a_few_spellings(
    name: str, values: tuple[str | None, ...], expected: bool, monkeypatch
):
    for value in values:
        found = read(monkeypatch, name, value)
        assert found[name.removeprefix("CUTE_LCE_")] is expected, value
        assert not found["REFUSED"], value


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (WORKSPACE, "300.5", 300.5),
        (WORKSPACE, "", None),
        (IMPLEMENTATION, "streaming", "streaming"),
        (IMPLEMENTATION, "Auto", "auto"),
        (IMPLEMENTATION, "", "auto"),
    ],
)
def test_a_variable_is_read(name: str, value: str, expected: object, monkeypatch):
    found = read(monkeypatch, name, value)
    assert found[name.removeprefix("CUTE_LCE_")] == expected
    assert not found["REFUSED"]


@pytest.mark.parametrize(("name", "value", "want"), BAD)
def test_another_value_is_refused_by_name(name: str, value: str, want: str, monkeypatch):
    found = read(monkeypatch, name, value)
    with pytest.raises(ValueError, match=f"^{name}: got '{re.escape(value)}', want {want}"):
        found["check"]()


IMPORT = """
import torch, cute_lce
print("imported")
a = torch.ones(2, 4), torch.ones(3, 4), torch.tensor([0, 1])
"""
CALLS = {
    "linear_cross_entropy": "cute_lce.linear_cross_entropy(*a, workspace_mb=9)",
    "linear_logprob": "cute_lce.linear_logprob(*a, outputs=('entropy',))",
    "sampled": "cute_lce.sampled_linear_cross_entropy(*a, torch.tensor([2]))",
    "module": "cute_lce.LinearCrossEntropy(4, 3)(a[0], a[2])",
}
COMMAND = "import sys; from cute_lce import cli; sys.exit(cli.main(['info']))"
# Each variable with a call, and each call with a variable.
REFUSALS = [*zip((*BOOLEANS, WORKSPACE, IMPLEMENTATION), CALLS, strict=True)]


@pytest.fixture(scope="module")
def runs() -> list[subprocess.CompletedProcess[str]]:
    programs = [({name: "abc"}, IMPORT + CALLS[call]) for name, call in REFUSALS]
    return forked.run([*programs, ({WORKSPACE: "abc", BOOLEANS[0]: "2"}, COMMAND)])


@pytest.mark.parametrize(("number", "name"), [(i, name) for i, (name, _) in enumerate(REFUSALS)])
def test_the_first_call_refuses_and_not_the_import(number: int, name: str, runs):
    run = runs[number]
    assert (run.returncode, run.stdout) == (1, "imported\n")
    assert run.stderr.strip().splitlines()[-1].startswith(f"ValueError: {name}: got 'abc', want ")


def test_commands_refuse_all_of_them(runs):
    run = runs[-1]
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "cute-lce: CUTE_LCE_CHECK_TARGETS: got '2', want 1, true, yes or on, or 0, false, no or off; "
        "CUTE_LCE_WORKSPACE_MB: got 'abc', want a positive number of MiB, or no such variable\n"
    )


def test_they_are_read_in_one_place():
    package = Path(environment.__file__).parent
    readers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"(environ\.get\(|getenv\(|environ\[)\s*\"CUTE_LCE_\w+\"(?!\] =)", path.read_text())
    }
    assert readers == {"environment.py"}
