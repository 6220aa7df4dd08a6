"""The package's modules and what each of them imports, read from the source without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path


def modules(package: Path) -> dict[str, Path]:
    """Dotted name -> file."""
    return {name_of(package, path): path for path in package.rglob("*.py")}


def name_of(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(package: Path, path: Path) -> set[str]:
    """The package's modules that a file names in an import, inside functions too.

    `from a import b` names a.b where that is a module, else a. Not among them: the __init__ files that Python
    runs on the way to a module, and what a name is made up for at run time.
    """
    known, here = modules(package), name_of(package, path)
    base = here if path.name == "__init__.py" else here.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = base.split(".")[: len(base.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            inside = {alias.name: f"{source}.{alias.name}" for alias in node.names}
            found |= {name if name in known else source for name in inside.values()}
    return found & known.keys()


def closure(package: Path, start: Iterable[Path]) -> set[Path]:
    """These files and all of the package that they import; no __init__ but those they begin with."""
    known = modules(package)
    found, waiting = set(), list(start)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            files = (known[name] for name in imported(package, path))
            waiting += [file for file in files if file.name != "__init__.py"]
    return found
