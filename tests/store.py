"""What tests compile, on disk: each thing once, whichever of pytest-xdist's workers needs it first.

An entry is a folder whose name is a hash of everything that its content depends on. Its lock is held while
it is made: another worker that needs it waits, and finds it complete. Entries stay for later sessions, up to
MOST_BYTES of those that were used last.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from cute_lce.compile import cache
from cute_lce.plan.kernels import Key
from tests.tracing import trace

MOST_BYTES = 2 << 30
PTX, CUBIN, OBJECT = "module.ptx", "module.cubin", "host.o"
"""The files of what was compiled: device code, and the host function with it."""
FUNCTION = "stored"
"""The host function's name in OBJECT."""


def entry(identity: Iterable[object], make: Callable[[Path], object]) -> Path:
    """The folder of what `make` writes into an empty one. identity: everything that it depends on."""
    name = hashlib.sha256(repr(tuple(identity)).encode()).hexdigest()[:32]
    path = folder() / name
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_dir():
            # Beside it, so that what is renamed is complete. What fails leaves nothing.
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as making:
                content = Path(making, "content")
                content.mkdir()
                make(content)
                content.rename(path)
        os.utime(path.with_suffix(".lock"))
    return path


@functools.cache
def folder() -> Path:
    """That of all entries, the user's own; without the oldest ones."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cute_lce_tests"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    delete_oldest(path, MOST_BYTES)
    return path


def delete_oldest(path: Path, most: int) -> None:
    """Delete the entries that were used before the last `most` bytes of them."""
    total = 0
    for old in sorted(path.glob("*.lock"), key=_used, reverse=True):
        used = _used(old)
        total += sum(map(_bytes, old.with_suffix("").glob("*")))
        if total > most:
            # Another session may use the entry, or be about to do the same. The lock stays: it is one inode.
            with open(old, "a") as lock, contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _used(old) == used:
                    shutil.rmtree(old.with_suffix(""), ignore_errors=True)


def _used(path: Path) -> float:
    return path.stat().st_mtime


def _bytes(path: Path) -> int:
    """Of a file; 0 where it is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def compiled(key: Key, launches: tuple[str, ...] = ()) -> Path:
    """The folder of a key's files, which `export` writes. launches: see tracing.trace."""
    name = cache.file_name(key)  # A hash of the key, of the package's sources and of all versions.
    identity = name, _own(), *launches
    return entry(identity, lambda path: export(trace(key, options(path), launches), path))


def options(path: Path) -> str:
    """Of a compile whose result is exported to `path`."""
    return f"--keep-ptx --keep-cubin --dump-dir {path}"


def export(module, path: Path) -> None:
    """Write what the DSL compiled with `options`: device code, and the host function as an object file."""
    for dumped in path.iterdir():
        dumped.unlink()
    (path / PTX).write_text(module.__ptx__)
    (path / CUBIN).write_bytes(module.__cubin__)
    module.export_to_c(str(path / OBJECT), function_name=FUNCTION, export_only_tvm_ffi_symbols=True)


@functools.cache
def _own() -> str:
    """A hash of how entries are made."""
    sources = [Path(__file__), Path(__file__).with_name("tracing.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
