"""What every kept measurement says of its origin, and the files that keep measurements."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import math
import platform
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import environment

PACKAGES = (
    *("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "quack-kernels", "liger-kernel"),
    "cut-cross-entropy",
)


ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def versions() -> dict[str, str | None]:
    """What was measured: packages, driver, a digest of our sources, and their commit."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            found["driver"] = subprocess.run(
                query, capture_output=True, text=True, check=True
            ).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            found["driver"] = "unknown"
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    found["cute_lce"] = f"sources {digest.hexdigest()[:12]}"
    found["commit"] = commit(ROOT)
    if environment.IMPLEMENTATION != "auto":
        found["implementation"] = environment.IMPLEMENTATION
    return found


def commit(root: Path) -> str | None:
    """The short hash of the checkout `root`, ending in -dirty if files that git tracks differ from it; None
    if root is none. A copy without git's folder has it from CUTE_LCE_COMMIT in the environment."""
    # Not that of a repository around it, where the package is installed.
    if not (root / ".git").exists():
        return environment.commit() or None
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def provenance(device: torch.device, command: str) -> dict[str, Any]:
    """The keys that say of a result where it is from."""
    return {
        "gpu": describe_device(device),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
    }


def finite_or_text(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are kept as text."""
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


ORIGIN = ("gpu", "versions", "command")
"""Keys whose values the results of a run share, which a file has once. Each result has a date of its own."""


def write(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Keep results: {"origins": [what those of a run share, ...], "rows": [the rest, and "origin", the number
    of theirs, ...]}, a line each. Replaces the file as a whole: a run that is killed while it writes leaves
    the results of before. No result has a key "origin"."""
    origins: dict[str, int] = {}
    rows = []
    for result in results:
        shared = {key: result[key] for key in ORIGIN if key in result}
        number = origins.setdefault(json.dumps(shared, allow_nan=False), len(origins))
        rest = {key: value for key, value in result.items() if key not in shared}
        assert "origin" not in rest
        rows.append(json.dumps({"origin": number, **rest}, allow_nan=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(f'{{"origins": [{_lines(origins)}], "rows": [{_lines(rows)}]}}\n', encoding="utf-8")
    part.replace(path)


def _lines(each: Iterable[str]) -> str:
    return "\n" + ",\n".join(each) + "\n"


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """All results of several files, as they were measured."""
    return [result for path in paths for result in _read(path)]


def _read(path: Path) -> Iterator[dict[str, Any]]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: want JSON, got {error}") from None
    if not isinstance(kept, dict) or set(kept) != {"origins", "rows"}:
        raise ValueError(
            f'{path}: want results as records.write keeps them, {{"origins": [...], "rows": [...]}}'
        )
    for row in kept["rows"]:
        yield {**kept["origins"][row.pop("origin")], **row}
