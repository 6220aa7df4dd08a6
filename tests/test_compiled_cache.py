"""The cache of compiled kernels: its keys, and what it does about files that are not what they should be."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cute_lce import compiled
from cute_lce import plan as plans
from cute_lce.plan import KernelConfig
from tests import cubin

CONFIG = KernelConfig("sm_90a", tile_m=64, tile_n=64, warpgroups=1, pingpong=False, cluster_m=1, stages=2)
KEY = cubin.forward_key(CONFIG)

# Runs in a process of its own: loads or compiles KEY, prints what was needed for it.
LOAD = f"""
import sys, time
import torch
from cute_lce import compiled
from cute_lce.plan import KernelConfig
start = time.perf_counter()
function = compiled.forward({CONFIG!r}, "bfloat16", "int64")
seconds = time.perf_counter() - start
assert callable(function)
assert function is compiled.forward({CONFIG!r}, "bfloat16", "int64")
print("cutlass" in sys.modules, seconds)
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with KEY's file, compiled by another process."""
    folder = tmp_path_factory.mktemp("filled")
    imported, _ = load(folder)
    assert imported, "a miss that did not compile"
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it that this process uses, with nothing in memory."""
    copy = tmp_path / "cache"
    shutil.copytree(filled, copy)
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(copy))
    monkeypatch.setattr(compiled, "_functions", {})
    return copy


def start(folder: Path) -> subprocess.Popen:
    environment = {**os.environ, "CUTE_LCE_CACHE_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", LOAD],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[bool, float]:
    """(whether cutlass was imported, seconds until the function was there)."""
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    imported, seconds = out.split()
    return imported == "True", float(seconds)


def load(folder: Path) -> tuple[bool, float]:
    return finish(start(folder))


def only_file(folder: Path) -> Path:
    """The folder's only file, and nothing beside it: no lock, no temporary folder."""
    (path,) = folder.iterdir()
    assert path.suffix == ".so"
    return path


# ----------------------------------------------------------------------------------------------------------
# Keys


def variants():
    """(what differs, key) for every field of the key."""
    yield "target dtype", cubin.forward_key(CONFIG, target_dtype="int32")
    yield "dtype", cubin.forward_key(CONFIG, "float16")
    yield "kind", ("backward", *KEY[1:])
    for field in dataclasses.fields(KernelConfig):
        value = getattr(CONFIG, field.name)
        other = "sm_100a" if field.name == "arch" else (not value if type(value) is bool else value + 1)
        yield field.name, cubin.forward_key(dataclasses.replace(CONFIG, **{field.name: other}))


def test_every_field_is_in_the_key():
    digests = {what: compiled._digest(key) for what, key in variants()}
    assert len(digests) == 3 + len(dataclasses.fields(KernelConfig))
    assert len({*digests.values(), compiled._digest(KEY)}) == len(digests) + 1


def test_equal_keys_have_equal_names():
    again = cubin.forward_key(dataclasses.replace(CONFIG))
    assert compiled._digest(KEY) == compiled._digest(again)


def test_versions_sources_and_host_are_in_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fresh = compiled._environment.__wrapped__
    before = fresh()
    with monkeypatch.context() as patch:
        for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
            version = compiled.importlib.metadata.version
            patch.setattr(
                compiled.importlib.metadata,
                "version",
                lambda n, name=name, v=version: v(n) + "x" * (n == name),
            )
            assert fresh() != before
            patch.undo()
        for name in ("machine", "system"):
            patch.setattr(compiled.platform, name, lambda: "another")
            assert fresh() != before
            patch.undo()
    assert fresh() == before

    package = Path(compiled.__file__).parent
    copy = tmp_path / "cute_lce"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(compiled, "__file__", str(copy / "compiled.py"))
    assert fresh() == before, "where the package lies does not matter"
    sources = [*copy.glob("kernels/*.py"), copy / "plan.py", copy / "compiled.py"]
    assert len(sources) > 6
    for source in sources:
        original = source.read_bytes()
        source.write_bytes(original + b"\n")
        assert fresh() != before, source.name
        source.write_bytes(original)
    (copy / "kernels" / "another.py").write_text("")
    assert fresh() != before


def test_where_files_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(tmp_path / "explicit"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compiled.cache_dir() == tmp_path / "explicit"
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", "")
    assert compiled.cache_dir() == tmp_path / "xdg" / "cute_lce"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiled.cache_dir() == tmp_path / ".cache" / "cute_lce"


# ----------------------------------------------------------------------------------------------------------
# Hits


def test_a_hit_imports_no_cutlass_and_takes_well_under_a_second(filled: Path):
    before = only_file(filled).stat()
    found = [load(filled) for _ in range(3)]
    assert not any(imported for imported, _ in found)
    assert min(seconds for _, seconds in found) < 0.3
    after = only_file(filled).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_hit_compiles_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "_build", None)
    function = compiled.forward(*KEY[1:])
    shutil.rmtree(folder)
    assert compiled.forward(*KEY[1:]) is function, "the second look finds it in memory"


# ----------------------------------------------------------------------------------------------------------
# Files that are not what they should be


def truncate(share: float):
    return lambda content: content[: int(len(content) * share)]


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


SPOILED = {
    "empty": lambda content: b"",
    "text": lambda content: b"not a library\n",
    "without its last byte": lambda content: content[:-1],
    "cut inside the headers": lambda content: content[:100],
    # The loader would map these, and the process would end with SIGBUS.
    "cut early": truncate(0.05),
    "cut in the middle": truncate(0.4),
    "cut late": truncate(0.9),
    "one bit": flip,
    "longer": lambda content: content + b"\0",
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_spoiled_file_is_a_miss_and_is_replaced(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    path = only_file(folder)
    good = path.read_bytes()
    path.write_bytes(SPOILED[how](good))
    assert path.read_bytes() != good
    builds = []

    def build(key: tuple, where: Path) -> None:
        builds.append(key)
        assert where == path
        where.with_suffix(".new").write_bytes(good)
        os.replace(where.with_suffix(".new"), where)

    monkeypatch.setattr(compiled, "_build", build)
    with caplog.at_level(logging.WARNING, "cute_lce"):
        assert callable(compiled.forward(*KEY[1:]))
    assert builds == [KEY]
    assert str(path) in caplog.text
    assert only_file(folder).read_bytes() == good


def test_another_keys_file_is_a_miss(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A library that loads well, under the name of another key: it would run the wrong kernel."""
    other = cubin.forward_key(CONFIG, "float16")
    path = only_file(folder)
    path.rename(folder / f"{compiled._digest(other)}.so")
    called = []
    monkeypatch.setattr(compiled, "_build", lambda *arguments: called.append(arguments))
    with pytest.raises(RuntimeError, match="just compiled and cannot be loaded"):
        compiled.forward(*other[1:])
    assert len(called) == 1


def test_a_spoiled_file_is_compiled_again(folder: Path):
    path = only_file(folder)
    path.write_bytes(b"")
    assert load(folder)[0], "a miss that did not compile"
    assert only_file(folder).stat().st_size > 10_000
    assert not load(folder)[0]


# ----------------------------------------------------------------------------------------------------------
# Processes


def test_eight_processes_at_once(tmp_path: Path):
    """All of them miss; each gets its function, and one good file and nothing else is left."""
    folder = tmp_path / "does" / "not" / "exist yet"
    processes = [start(folder) for _ in range(8)]
    assert any(finish(process)[0] for process in processes)
    only_file(folder)
    assert not load(folder)[0]


def test_nothing_is_left_when_a_compile_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_functions", {})

    class Object:
        def export_to_c(self, path, **options):
            Path(path).write_bytes(b"not an object")

    monkeypatch.setattr(compiled, "trace", lambda key: Object())
    with pytest.raises(RuntimeError, match="could not link"):
        compiled.forward(*KEY[1:])
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"no-such-compiler: not found.*set CC"):
        compiled.forward(*KEY[1:])
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_swept_after_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_functions", {})
    monkeypatch.setattr(compiled, "trace", lambda key: 1 / 0)
    old, fresh, other = (
        tmp_path / name for name in (".compiling-old", ".compiling-fresh", "somebody's folder")
    )
    for path, age in ((old, 2), (fresh, 0.5), (other, 2)):
        path.mkdir()
        (path / "kernel.o").write_bytes(b"half of it")
        then = time.time() - 3600 * age
        os.utime(path, (then, then))
    with pytest.raises(ZeroDivisionError):
        compiled.forward(*KEY[1:])
    assert {path.name for path in tmp_path.iterdir()} == {fresh.name, other.name}

    # Another process may remove it first.
    old.mkdir()
    os.utime(old, (0, 0))
    stat = Path.stat

    def gone(self, **options):
        if self == old:
            os.rmdir(old)
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", gone)
    compiled._sweep(tmp_path)
    assert not os.path.exists(old)


def test_the_configs_of_plans_are_compiled_from_one_place():
    """Nothing but `compiled` calls the DSL's compiler."""
    package = Path(compiled.__file__).parent
    callers = [path.name for path in package.rglob("*.py") if "cute.compile(" in path.read_text()]
    assert set(callers) <= {"forward.py", "backward.py"}
    assert plans.configs("sm_90a")
