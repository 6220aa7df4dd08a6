"""The cache of compiled kernels: its keys, and what it does about files that are not what they should be."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import cute_lce
from cute_lce.arch import KernelConfig, architecture
from cute_lce.compile import cache
from cute_lce.plan.kernels import BackwardKey, ForwardKey, Key, MultiplyKey
from tests.host.modules import closure

PACKAGE = Path(cute_lce.__file__).parent
CONFIG = dataclasses.replace(
    architecture("sm_90a").token_configs[0],
    tile_m=64,
    tile_n=64,
    warpgroups=1,
    pingpong=False,
    cluster_m=1,
    stages=2,
)
KEY = ForwardKey(CONFIG)

# Runs in a process of its own: loads or compiles KEY, prints what was needed for it.
LOAD = f"""
import sys, time
import torch
from cute_lce.arch import KernelConfig
from cute_lce.compile import cache
from cute_lce.plan.kernels import ForwardKey
key = {KEY!r}
start = time.perf_counter()
function = cache.get(key)
seconds = time.perf_counter() - start
assert callable(function)
assert function is cache.get(key)
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
    monkeypatch.setattr(cache, "_functions", {})
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
    """(what differs, key) for every field of the kinds of key."""
    other = dataclasses.replace(CONFIG, pace=0)
    backward = BackwardKey(CONFIG, CONFIG, CONFIG)
    yield "kind", backward
    for key in (KEY, backward, MultiplyKey("sm_90a")):
        for name, value in key._asdict().items():
            if name != "config":
                another = {"dtype": "float16", "target_dtype": "int32", "keeps": True}.get(name, other)
                assert another != value
                yield f"{name} of {type(key).__name__}", key._replace(**{name: another})
    for field in dataclasses.fields(KernelConfig):
        value = getattr(CONFIG, field.name)
        other = "sm_100a" if field.name == "arch" else (not value if type(value) is bool else value + 1)
        yield field.name, ForwardKey(dataclasses.replace(CONFIG, **{field.name: other}))


def test_every_field_is_in_the_key():
    digests = {what: cache._digest(key) for what, key in variants()}
    keys = (len(ForwardKey._fields) - 1) + len(BackwardKey._fields) + len(MultiplyKey._fields)
    assert len(digests) == 1 + keys + len(dataclasses.fields(KernelConfig))
    assert len({*digests.values(), cache._digest(KEY)}) == len(digests) + 1


def test_equal_keys_have_equal_names():
    again = ForwardKey(dataclasses.replace(CONFIG))
    assert cache._digest(KEY) == cache._digest(again)


def test_versions_sources_and_host_are_in_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fresh = cache._environment.__wrapped__
    before = fresh()
    with monkeypatch.context() as patch:
        for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
            version = cache.importlib.metadata.version
            patch.setattr(
                cache.importlib.metadata,
                "version",
                lambda n, name=name, v=version: v(n) + "x" * (n == name),
            )
            assert fresh() != before
            patch.undo()
        for name in ("machine", "system"):
            patch.setattr(cache.platform, name, lambda: "another")
            assert fresh() != before
            patch.undo()
    assert fresh() == before

    copy = tmp_path / "cute_lce"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "__file__", str(copy / "compile" / "cache.py"))
    assert fresh() == before, "where the package lies does not matter"
    sources = [*traced(copy), *copy.glob("compile/*.py")]
    assert len(sources) > 20
    for source in sources:
        original = source.read_bytes()
        source.write_bytes(original + b"\n")
        assert fresh() != before, source
        source.write_bytes(original)
    assert fresh() == before
    (copy / "kernels" / "another.py").write_text("")
    assert fresh() != before


def traced(package: Path) -> set[Path]:
    """The files that compiling a key imports."""
    return closure(package, [package / "compile" / "trace.py", *package.glob("kernels/**/*.py")])


def test_every_file_that_a_compile_imports_is_in_the_key():
    needed = {path.relative_to(PACKAGE).as_posix() for path in traced(PACKAGE)}
    assert {"arch.py", "arguments.py", "plan/kernels.py", "kernels/entry/types.py"} <= needed
    assert needed <= {path.relative_to(PACKAGE).as_posix() for path in cache.source_files(PACKAGE)}


def test_where_files_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(tmp_path / "explicit"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "explicit"
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", "")
    assert cache.cache_dir() == tmp_path / "xdg" / "cute_lce"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / ".cache" / "cute_lce"
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", "~/kernels")
    assert cache.cache_dir() == tmp_path / "kernels"


# ----------------------------------------------------------------------------------------------------------
# Hits


@pytest.mark.timing
def test_a_hit_imports_no_cutlass_and_takes_well_under_a_second(filled: Path):
    before = only_file(filled).stat()
    found = [load(filled) for _ in range(3)]
    assert not any(imported for imported, _ in found)
    assert min(seconds for _, seconds in found) < 0.3
    after = only_file(filled).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_hit_compiles_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "_build", None)
    function = cache.get(KEY)
    shutil.rmtree(folder)
    assert cache.get(KEY) is function, "the second look finds it in memory"


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

    def build(key: Key, where: Path) -> None:
        builds.append(key)
        assert where == path
        where.with_suffix(".new").write_bytes(good)
        os.replace(where.with_suffix(".new"), where)

    monkeypatch.setattr(cache, "_build", build)
    with caplog.at_level(logging.WARNING, "cute_lce"):
        assert callable(cache.get(KEY))
    assert builds == [KEY]
    assert str(path) in caplog.text
    assert only_file(folder).read_bytes() == good


def test_another_keys_file_is_a_miss(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A library that loads well, under the name of another key: it would run the wrong kernel."""
    other = ForwardKey(CONFIG, "float16")
    path = only_file(folder)
    path.rename(folder / f"{cache._digest(other)}.so")
    called = []
    monkeypatch.setattr(cache, "_build", lambda *arguments: called.append(arguments))
    with pytest.raises(RuntimeError, match="just compiled and cannot be loaded"):
        cache.get(other)
    assert len(called) == 1


def test_a_spoiled_file_is_compiled_again(folder: Path):
    path = only_file(folder)
    path.write_bytes(b"")
    assert load(folder)[0], "a miss that did not compile"
    assert only_file(folder).stat().st_size > 10_000
    assert not load(folder)[0]


# ----------------------------------------------------------------------------------------------------------
# Who may write what is loaded


@pytest.fixture
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch):
    def build(key: Key, path: Path) -> None:
        raise AssertionError(f"{path}: compiled")

    monkeypatch.setattr(cache, "_build", build)


def refusal(path: Path, mode: str, mend: str, owner: int | None = None) -> str:
    """The pattern of an error: a path, what was found there, what is wanted, and how to mend it."""
    user = os.geteuid()
    found = f"{path}: got owner {user if owner is None else owner} and mode {mode}, want a "
    return f"^{re.escape(found)}.* of owner {user} .*{re.escape(mend)}"


@pytest.mark.parametrize(
    ("mode", "shown"), [(0o770, "drwxrwx---"), (0o702, "drwx----w-"), (0o1777, "drwxrwxrwt")]
)
def test_a_folder_that_others_may_write_is_refused(
    mode: int, shown: str, folder: Path, nothing_is_compiled: None
):
    folder.chmod(mode)
    with pytest.raises(PermissionError, match=refusal(folder, shown, f"chmod go-w {folder}, or name a ")):
        cache.get(KEY)
    folder.chmod(0o755)
    assert callable(cache.get(KEY)), "others may read"


@pytest.mark.parametrize(("mode", "shown"), [(0o620, "-rw--w----"), (0o606, "-rw----rw-")])
def test_a_file_that_others_may_write_is_refused(
    mode: int, shown: str, folder: Path, nothing_is_compiled: None
):
    path = only_file(folder)
    path.chmod(mode)
    with pytest.raises(PermissionError, match=refusal(path, shown, "remove it, or name a folder")):
        cache.get(KEY)
    path.chmod(0o644)
    assert callable(cache.get(KEY)), "others may read"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file away")
def test_what_another_user_owns_is_refused_to_root_too(folder: Path, nothing_is_compiled: None):
    path = only_file(folder)
    os.chown(path, 1234, -1)
    with pytest.raises(PermissionError, match=refusal(path, "-rw-------", "remove it", 1234)):
        cache.get(KEY)
    os.chown(folder, 1234, -1)
    mend = "run; name a folder of your own in CUTE_LCE_CACHE_DIR"
    with pytest.raises(PermissionError, match=refusal(folder, "drwx------", mend, 1234)):
        cache.get(KEY)


def test_what_another_user_owns_is_refused(
    folder: Path, nothing_is_compiled: None, monkeypatch: pytest.MonkeyPatch
):
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match=refusal(folder, "drwx------", "; name a", owner)):
        cache.get(KEY)


def test_links(folder: Path, nothing_is_compiled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The folder may be a symbolic link, and is judged by where it leads; a file may not."""
    link = tmp_path / "link"
    link.symlink_to(folder)
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(link))
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match=refusal(link, "drwxrwxrwx", "chmod go-w")):
        cache.get(KEY)
    folder.chmod(0o700)
    path = only_file(folder)
    path.rename(tmp_path / "moved.so")
    path.symlink_to(tmp_path / "moved.so")
    with pytest.raises(PermissionError, match=refusal(link / path.name, "lrwxrwxrwx", "remove it")):
        cache.get(KEY)
    (tmp_path / "moved.so").replace(path)
    assert callable(cache.get(KEY))


def test_what_is_no_file_is_refused(folder: Path, nothing_is_compiled: None):
    path = only_file(folder)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(PermissionError, match=refusal(path, "prw-------", "remove it")):
        cache.get(KEY)


@pytest.mark.parametrize("which", ["file", "folder"])
def test_what_was_checked_is_what_is_loaded(which: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Another file, or folder, under the path by the time of the load: nobody looks there again."""
    path, seal = only_file(folder), cache._seal

    def exchange(name: str, library: bytes) -> bytes:
        if which == "folder":
            folder.rename(folder.with_name("away"))
            folder.mkdir()
        else:
            path.unlink()
        path.write_bytes(b"not a library")
        return seal(name, library)

    monkeypatch.setattr(cache, "_build", None)
    monkeypatch.setattr(cache, "_seal", exchange)
    assert callable(cache.get(KEY))


def test_libraries_loaded_in_turn_are_different_ones(tmp_path: Path):
    """dlopen gives the same library for the same path: no two may have one."""
    found = []
    for number in (1, 2):
        source, library = tmp_path / "kernel.c", tmp_path / "kernel.so"
        source.write_text(LIBRARY % number)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        found.append(cache._load_bytes("kernel", library.read_bytes())())
    assert found == [1, 2]


LIBRARY = """
#include <stdint.h>
struct any { int32_t type; int32_t zero; int64_t value; };
int __tvm_ffi_kernel(void *self, const struct any *arguments, int32_t count, struct any *result) {
    result->type = 1;  /* kTVMFFIInt */
    result->zero = 0;
    result->value = %d;
    return 0;
}
"""


@pytest.fixture
def seven(monkeypatch: pytest.MonkeyPatch):
    """What is compiled is a function that returns 7."""

    class Object:
        def export_to_c(self, path: str, **options):
            source = Path(path).with_suffix(".c")
            source.write_text(LIBRARY % 7)
            subprocess.run(["cc", "-fPIC", "-c", "-o", path, source], check=True)
            assert Path(path).parent.stat().st_mode & 0o777 == 0o700

    monkeypatch.setattr(cache, "_functions", {})
    monkeypatch.setattr(cache, "trace", lambda key: Object())


@pytest.mark.parametrize("mask", [0o002, 0o000])
def test_what_is_made_is_its_owners_alone(
    mask: int, seven: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever the umask; and what this makes, it takes."""
    folder = tmp_path / "grandparent" / "parent" / "cache"
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(folder))
    before = os.umask(mask)
    try:
        function: Any = cache.get(KEY)
    finally:
        os.umask(before)
    assert function() == 7
    for made in (folder, folder.parent, folder.parent.parent):
        assert made.stat().st_mode & 0o777 == 0o700
    assert only_file(folder).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("cc", "called"),
    [("", ["cc"]), (" ", ["cc"]), ("cc -O1", ["cc", "-O1"]), ("'cc' \"-O1\"", ["cc", "-O1"])],
)
def test_the_compiler_is_a_command(
    cc: str, called: list[str], seven: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", cc)
    run, commands = subprocess.run, []

    def noted(command: list[str], **options):
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(cache.subprocess, "run", noted)
    function: Any = cache.get(KEY)
    assert function() == 7
    assert commands[-1][: len(called) + 1] == [*called, "-shared"]


@pytest.mark.parametrize(
    ("place", "error", "found"),
    [
        ("file", FileExistsError, "{tmp}/file, which is no folder"),
        ("file/below/it", OSError, "{tmp}/file, which is no folder"),
        ("dangling", FileExistsError, "{tmp}/dangling, a symbolic link that leads nowhere"),
        ("dangling/below", FileExistsError, "{tmp}/dangling, a symbolic link that leads nowhere"),
        ("x" * 300, OSError, "'File name too long' from the system"),
        ("new/" + "x" * 300 + "/below", OSError, "'File name too long' from the system"),
    ],
)
def test_no_folder_can_be_there(
    place: str,
    error: type[OSError],
    found: str,
    nothing_is_compiled: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(tmp_path / place))
    monkeypatch.setattr(cache, "_functions", {})
    with pytest.raises(error) as caught:
        cache.get(KEY)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / place}: got {found.format(tmp=tmp_path)}, want a folder")
    assert message.endswith("name another in CUTE_LCE_CACHE_DIR")
    assert "Error" not in message


# ----------------------------------------------------------------------------------------------------------
# Processes


@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.emulator_full)])
def test_processes_at_once(count: int, tmp_path: Path):
    """All of them miss; each gets its function, and one good file and nothing else is left."""
    folder = tmp_path / "does" / "not" / "exist yet"
    processes = [start(folder) for _ in range(count)]
    # All of them are waited for, whoever was first.
    imported = [finish(process)[0] for process in processes]
    assert any(imported)
    only_file(folder)
    assert not load(folder)[0]


def test_nothing_is_left_when_a_compile_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_functions", {})

    class Object:
        def export_to_c(self, path, **options):
            Path(path).write_bytes(b"not an object")

    monkeypatch.setattr(cache, "trace", lambda key: Object())
    with pytest.raises(RuntimeError, match="could not link"):
        cache.get(KEY)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"no-such-compiler: not found.*set CC"):
        cache.get(KEY)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_swept_after_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_functions", {})
    monkeypatch.setattr(cache, "trace", lambda key: 1 / 0)
    old, fresh, other = (
        tmp_path / name for name in (".compiling-old", ".compiling-fresh", "somebody's folder")
    )
    for path, age in ((old, 2), (fresh, 0.5), (other, 2)):
        path.mkdir()
        (path / "kernel.o").write_bytes(b"half of it")
        then = time.time() - 3600 * age
        os.utime(path, (then, then))
    with pytest.raises(ZeroDivisionError):
        cache.get(KEY)
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
    cache._sweep(tmp_path)
    assert not os.path.exists(old)


def test_the_configs_of_plans_are_compiled_from_one_place():
    """Nothing but the entries, which nothing but `compile.trace` imports, calls the DSL's compiler."""

    def users(text: str) -> set[str]:
        files = PACKAGE.rglob("*.py")
        return {path.relative_to(PACKAGE).as_posix() for path in files if text in path.read_text()}

    entries = "forward", "backward", "multiply", "merge"
    assert users("cute.compile(") == {f"kernels/entry/{name}.py" for name in entries}
    assert users("compile_forward") == {"kernels/entry/forward.py", "compile/trace.py"}
    assert users("compile_backward") == {"kernels/entry/backward.py", "compile/trace.py"}
