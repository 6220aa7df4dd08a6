"""What a measurement says of its origin."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from cute_lce.measure import records


def git(folder: Path, *arguments: str) -> str:
    name = "-c", "user.name=a", "-c", "user.email=a@b.c"
    command = ["git", "-C", str(folder), *name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.delenv("CUTE_LCE_COMMIT", raising=False)
    assert records.commit(tmp_path) is None
    git(tmp_path, "init")
    assert records.commit(tmp_path) is None  # It has none yet.
    file = tmp_path / "file"
    file.write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "a")
    git(tmp_path, "tag", "-m", "a", "v1")
    found = git(tmp_path, "rev-parse", "--short", "HEAD")
    (tmp_path / "untracked").write_text("a")
    assert records.commit(tmp_path) == found
    file.write_text("b")
    assert records.commit(tmp_path) == f"{found}-dirty"
    # A package that is installed inside another's checkout.
    (tmp_path / "site-packages").mkdir()
    assert records.commit(tmp_path / "site-packages") is None
    monkeypatch.setenv("CUTE_LCE_COMMIT", "abc-dirty")
    assert records.commit(tmp_path / "site-packages") == "abc-dirty"
    assert records.commit(tmp_path) == f"{found}-dirty"


def test_every_measurement_has_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_LCE_COMMIT", "abc")
    monkeypatch.setattr(records, "ROOT", tmp_path)
    records.versions.cache_clear()
    try:
        assert records.provenance(torch.device("cpu"), "a command")["versions"]["commit"] == "abc"
    finally:
        records.versions.cache_clear()


def test_a_file_keeps_results_as_they_were_and_what_a_run_shares_once(tmp_path: Path):
    first, second = ({"gpu": gpu, "versions": {"torch": "2"}, "command": "a"} for gpu in ("H100", "H200"))
    results = [{**first, "ms": 1.5}, {**second, "ms": "nan"}, {**first, "ms": 2.0}, {"ms": None, "run": 7}]
    path = tmp_path / "folder" / "kept.json"
    records.write(path, results)
    assert records.read([path]) == results
    assert records.read([path, path]) == [*results, *results]
    assert path.read_text(encoding="utf-8").count("H100") == 1
    assert [each.name for each in path.parent.iterdir()] == ["kept.json"]
    records.write(path, [])
    assert records.read([path]) == []


def test_another_file_is_refused_by_its_name(tmp_path: Path):
    path = tmp_path / "list.json"
    path.write_text('[{"ms": 1.0}]')
    with pytest.raises(ValueError, match=r"list\.json: want results as records\.write keeps them"):
        records.read([path])
