"""The shape of the package: what imports what, and how much a function takes and a file holds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import cute_lce
from tests.host.modules import imported, modules

PACKAGE = Path(cute_lce.__file__).parent
MOST_LINES = 800
MOST_PARAMETERS = 12


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Some modules each of which imports the next, and the last the first; none: []."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return way[way.index(name) :]
        if name not in done:
            for other in sorted(edges[name]):
                if found := walk(other, [*way, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := walk(name, []))), [])


def test_circles_are_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b", "c"}, "b": set(), "c": {"d"}, "d": {"c"}}) == ["c", "d"]
    assert circle({"a": {"a"}}) == ["a"]


def test_imports_run_downwards():
    """No circle, those inside functions counted."""
    edges = {name: imported(PACKAGE, path) for name, path in modules(PACKAGE).items()}
    assert edges["cute_lce"] >= {"cute_lce.functional", "cute_lce.module"}
    assert "cute_lce.kernels.entry.forward" in edges["cute_lce.compile.trace"]
    assert "cute_lce.launch.forward" in edges["cute_lce.launch"]
    assert "cute_lce.arguments" in edges["cute_lce.kernels.entry.types"]
    found = circle(edges)
    assert not found, " imports ".join([*found, *found[:1]])


@pytest.mark.parametrize(
    ("room", "below"),
    [
        ("data_sheets", set()),
        ("widths", set()),
        ("arch", {"data_sheets", "widths"}),
        ("arguments", set()),
        ("plan", {"arch", "arguments"}),
        ("kernels", {"arch", "arguments", "logit_term", "maths"}),
        ("environment", set()),
        ("scalars", set()),
        ("compile", {"arch", "environment", "plan", "kernels"}),
        ("symbolic", set()),
        ("exchange", set()),
        (
            "streaming",
            {
                "arguments",
                "exchange",
                "implementation",
                "logit_term",
                "maths",
                "options",
                "plan",
                "symbolic",
                "torch_ops",
            },
        ),
        (
            "parallel",
            {
                "arguments",
                "environment",
                "exchange",
                "implementation",
                "logprob",
                "maths",
                "module",
                "ops",
                "options",
                "plan",
                "scalars",
            }
            | {"streaming", "symbolic"},
        ),
        (
            "launch",
            {"arch", "arguments", "compile", "data_sheets"}
            | {"exchange", "implementation", "maths", "options", "plan"}
            | {"logit_term", "streaming", "symbolic", "torch_ops"},
        ),
    ],
)
def test_what_a_room_may_import(room: str, below: set[str]):
    """Numbers know nothing of tensors, kernels nothing of torch, and none of them the ops."""
    inside = [(name, path) for name, path in modules(PACKAGE).items() if name.split(".")[1:2] == [room]]
    assert inside
    for name, path in inside:
        others = {other.split(".")[1] for other in imported(PACKAGE, path)} - {room}
        assert others <= below, f"{name} imports {others - below}"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Those of a method but self."""
    every = function.args
    named = [each.arg for each in (*every.posonlyargs, *every.args, *every.kwonlyargs)]
    return len(named) - (named[:1] in (["self"], ["cls"])) + bool(every.vararg) + bool(every.kwarg)


def test_parameters_are_counted():
    (first, second, third) = functions(
        ast.parse("def f(a, /, b, *, c): ...\ndef g(self, *a, b, **c): ...\nasync def h(): ...")
    )
    assert [parameters(function) for function in (first, second, third)] == [3, 3, 0]


PUBLIC_CALLS = {
    "functional.py: linear_cross_entropy",
    "logprob.py: linear_logprob",
    "ops/logprob.py: linear_logprob",
    "reference.py: linear_cross_entropy",
    "reference.py: sampled_linear_cross_entropy",
    "sampled.py: sampled_linear_cross_entropy",
}
"""Whose parameters are options of the call, by their names."""


def test_no_function_takes_many_parameters():
    """Groups go from one to the next whole."""
    found = [
        (f"{path.relative_to(PACKAGE).as_posix()}: {function.name}", parameters(function))
        for path in PACKAGE.rglob("*.py")
        for function in functions(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(found) > 200
    assert {name for name, count in found if count > MOST_PARAMETERS} == PUBLIC_CALLS


def test_no_file_is_long():
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert len(lines) > 50
    assert {path.name: count for path, count in lines.items() if count > MOST_LINES} == {}
