"""What tests compile is made once, by whoever needs it first, and is complete as soon as it is there."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import store


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "folder", lambda: tmp_path)
    return tmp_path


def test_an_entry_is_made_once_for_all_that_wait(folder: Path):
    made = []

    def make(path: Path) -> None:
        made.append(path)
        time.sleep(0.2)
        (path / "file").write_text("content")

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: (store.entry(["a", 1], make) / "file").read_text(), range(4)))
    assert found == ["content"] * 4
    assert len(made) == 1
    store.entry(["a", 2], make)
    assert len(made) == 2


def test_what_fails_leaves_nothing(folder: Path):
    def fail(path: Path) -> None:
        (path / "half").write_text("content")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        store.entry(["a"], fail)
    assert [path.suffix for path in folder.iterdir()] == [".lock"]
    assert store.entry(["a"], lambda path: None).is_dir()


def test_the_last_used_stay(folder: Path):
    entries = [store.entry([i], lambda path: Path(path, "file").write_bytes(bytes(100))) for i in range(3)]
    for age, entry in enumerate(entries):
        os.utime(entry.with_suffix(".lock"), (1000 - age, 1000 - age))
    store.entry([2], lambda path: pytest.fail("made again"))
    store.delete_oldest(folder, 200)
    assert [entry.is_dir() for entry in entries] == [True, False, True]
