"""What tests compile, on disk: each thing once, whichever of pytest-xdist's workers needs it first.

An entry is a folder whose name is a hash of everything that its content depends on. Its lock is held while
it is made: another worker that needs it waits, and finds it complete. Entries stay for later sessions; those
that none has used for three days are deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from cute_lce.compile import cache
from cute_lce.plan.kernels import Key
from tests.tracing import trace

KEPT_SECONDS = 3 * 24 * 3600
PTX, CUBIN, OBJECT = "module.ptx", "module.cubin", "host.o"
"""The files of what was compiled: device code, and the host function with it."""
FUNCTION = "stored"
"""The host function's name in OBJECT."""


def entry(identity: Iterable[str], make: Callable[[Path], None]) -> Path:
    """The folder of what `make` writes into an empty one. identity: everything that it depends on."""
    name = hashlib.sha256(repr(tuple(identity)).encode()).hexdigest()[:32]
    path = folder() / name
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_dir():
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as making:
                make(Path(making))
                os.rename(making, path)
                os.mkdir(making)  # For TemporaryDirectory to delete.
    os.utime(path)
    return path


@functools.cache
def folder() -> Path:
    """That of all entries, the user's own; emptied of old ones."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cute_lce_tests"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in path.iterdir():
        # Another session may be about to do the same.
        with contextlib.suppress(FileNotFoundError):
            if time.time() - old.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
    return path


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
