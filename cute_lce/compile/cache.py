"""Compiled kernels by key: a call's key is looked up in memory, among the package's own, then in a folder.

What none of them holds is compiled (trace.py) and stored in memory and in the folder. A file is a shared
library that the host's C compiler (`cc`, or what CC names) links from the object that the DSL exports.
Loading it needs apache-tvm-ffi and the DSL's runtime library but not the DSL itself, so the first call of a
second process does not import cutlass.

A file's name is a hash of everything that it depends on: the key, the versions of the DSL, of its CUDA
toolkit and of tvm-ffi, the sources that a compile imports and the host's architecture; of its CPUs any will
do (baseline.py), so that machines may share the folder. A file is written under a temporary name and renamed
when it is complete. It ends in a hash of its name and content; a file whose hash does not match (truncated,
altered, copied from another name) is a miss and is replaced. Any number of processes may share a folder: each
one that misses compiles, all write the same content, and the last rename wins. Stale temporary folders are
deleted by the first compile an hour later.

The package's own, under the same names, are those that a wheel carries (cute_lce/commands/wheel.py);
installed from sources it has none. Whoever may write them may write the package's sources.

CUTE_LCE_CACHE_DIR names the folder (`~` is the user's home); otherwise it is $XDG_CACHE_HOME/cute_lce or
~/.cache/cute_lce.

What is loaded is code, and a hash that anyone can compute does not authenticate it. So the folder
and its missing parents are created for their owner alone (0700, files 0600), and a folder or file that
another user owns (root included), or that group or others may write, is refused with PermissionError. The
path may contain symbolic links: the folder that they lead to is checked. A file that is a symbolic link is
refused. A file is opened once; its owner, mode and hash are read from that descriptor, and the bytes that
were hashed are the ones that are loaded, from memory (memfd_create).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import environment
from ..plan.kernels import Key
from . import driver
from .trace import trace

_logger = logging.getLogger("cute_lce")
_functions: dict[Key, Callable[..., None]] = {}
_lock = threading.Lock()

SOURCES = (
    *("kernels/**/*.py", "compile/*.py", "plan/kernels.py"),
    *("arch.py", "arguments.py", "data_sheets.py", "environment.py", "logit_term.py", "maths.py"),
    *("scalars.py", "symbolic.py", "widths.py"),
)
"""Patterns of the files that a compile imports; changing one of them invalidates what was compiled."""
CARRIED = Path(__file__).parent.parent / "carried"
"""The folder of the files that came with the package."""
SEAL_BYTES = 32
TEMPORARY = ".compiling-"
STALE_SECONDS = 3600


def get(key: Key) -> Callable[..., None]:
    """A compiled host function of kernels.entry, for any n, d, V and stripe; from memory in well under 1 us.

    It takes the arguments of the class's __call__ except the stream, which is torch's current stream.
    Raises RuntimeError if there is no C compiler to link with, ImportError if the DSL is not installed,
    PermissionError if others could have written to the cache, another OSError if it cannot be there.
    """
    return _functions.get(key) or _get(key)


def cache_dir() -> Path:
    """The folder of compiled kernels."""
    explicit = environment.cache_dir()
    if explicit:
        return Path(os.path.expanduser(explicit))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cute_lce"


def check() -> None:
    """Raise OSError, as `get` does, if the cache's folder cannot be there, is not private or not writable."""
    folder = cache_dir()
    _create(folder)
    with _private(folder), tempfile.TemporaryDirectory(dir=folder, prefix=TEMPORARY):
        pass


def _get(key: Key) -> Callable[..., None]:
    with _lock:
        function = _functions.get(key)
        if function is None:
            name = file_name(key)
            function = _load_carried(CARRIED / name) or _load_or_build(key, cache_dir() / name)
            _functions[key] = function
        return function


def carries(key: Key) -> bool:
    """Whether the key's file came with the package, compiled by what is installed here."""
    return (CARRIED / file_name(key)).is_file()


def file_name(key: Key) -> str:
    """The name of the key's file, wherever it lies."""
    return f"{_digest(key)}.so"


def _load_or_build(key: Key, path: Path) -> Callable[..., None]:
    _create(path.parent)
    with _private(path.parent) as folder:
        function = _load(path, folder)
        if function is None:
            _logger.info("compiling %s", key)
            _build(key, path)
            function = _load(path, folder)
    if function is None:
        raise RuntimeError(f"{path}: was just compiled and cannot be loaded")
    return function


def _create(folder: Path) -> None:
    """Create the folder, and those above it, if they are not there; each for its owner alone.

    Raises OSError, of the class of what happened, naming what is in the way.
    """
    try:
        # Path.mkdir gives `mode` to the last folder only.
        for path in (*reversed(folder.parents), folder):
            path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        # Of what is there, the deepest.
        there = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
        if os.path.isdir(there) or not os.path.lexists(there):
            found = f"{error.strerror!r} from the system"
        elif os.path.exists(there):
            found = f"{there}, which is no folder"
        else:
            found = f"{there}, a symbolic link that leads nowhere"
        raise type(error)(
            f"{folder}: got {found}, want a folder for compiled kernels, or a path where one can be created; "
            "name another in CUTE_LCE_CACHE_DIR"
        ) from None


@contextlib.contextmanager
def _private(path: Path, folder: int | None = None) -> Iterator[int]:
    """An O_PATH descriptor of the cache's folder or, given the folder's descriptor, of a file in it.

    Raises PermissionError if others own it or may write it, FileNotFoundError if it does not exist.
    """
    if folder is None:
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    else:
        descriptor = os.open(path.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        found, user = os.fstat(descriptor), os.geteuid()
        kind, want = (stat.S_IFDIR, "folder") if folder is None else (stat.S_IFREG, "regular file")
        if found.st_uid != user or found.st_mode & 0o022 or stat.S_IFMT(found.st_mode) != kind:
            elsewhere = "name a folder of your own in CUTE_LCE_CACHE_DIR"
            if folder is not None:
                mend = f"remove it, or {elsewhere}"
            else:
                mend = f"chmod go-w {path}, or {elsewhere}" if found.st_uid == user else elsewhere
            raise PermissionError(
                f"{path}: got owner {found.st_uid} and mode {stat.filemode(found.st_mode)}, want a {want} of "
                f"owner {user} that neither group nor others may write: what is cached here is run; {mend}"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def source_files(package: Path) -> list[Path]:
    """Every file of the package that a compile imports."""
    return sorted(path for pattern in SOURCES for path in package.glob(pattern))


@functools.cache
def _environment() -> str:
    """Everything that a compiled file depends on besides the key."""
    versions = [
        f"{name}=={importlib.metadata.version(name)}" for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")
    ]
    sources = hashlib.sha256()
    package = Path(__file__).parent.parent
    for path in source_files(package):
        sources.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    toolkit, _ = driver.toolkit()
    return repr((versions, toolkit, sources.hexdigest(), platform.system(), platform.machine()))


def _digest(key: Key) -> str:
    return hashlib.sha256((repr(key) + _environment()).encode()).hexdigest()[:32]


@functools.cache
def _runtime() -> Any:
    """tvm_ffi, with the DSL's runtime library loaded for the compiled files to link against."""
    import tvm_ffi

    _, library = driver.toolkit()
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return tvm_ffi


def _load(path: Path, folder: int) -> Callable[..., None] | None:
    """The function in a compiled file, or None if there is no usable file.

    folder: a descriptor of the file's folder.
    """
    try:
        with _private(path, folder) as file:
            content = Path(f"/proc/self/fd/{file}").read_bytes()
    except FileNotFoundError:
        return None
    return _load_sealed(path, content)


def _load_carried(path: Path) -> Callable[..., None] | None:
    """The function in a file of the package, or None if there is no usable file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return _load_sealed(path, content)


def _load_sealed(path: Path, content: bytes) -> Callable[..., None] | None:
    """The function in a file's content, or None if it is not what was written under this name."""
    try:
        # The loader maps as much as the headers declare: a truncated file would kill the process (SIGBUS).
        if content[-SEAL_BYTES:] != _seal(path.name, content[:-SEAL_BYTES]):
            raise ValueError("not what was written under this name")
        return _load_bytes(path.name, content)
    except ImportError:
        raise
    except Exception as error:
        # Not deleted: another process may have just replaced it and be about to load it.
        _logger.warning("%s: cannot be loaded (%s), compiling it again", path, error)
        return None


def _load_bytes(name: str, library: bytes) -> Callable[..., None]:
    """The function in a shared library's bytes; `name` is what memory maps and debuggers show."""
    descriptor = os.memfd_create(name)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(library)
        # What tvm_ffi.load_module does for a path that ends in .so.
        load, keep_loaded = map(
            _runtime().get_global_func, ("ffi.Module.load_from_file.so", "ffi.ModuleGlobalsAdd")
        )
        module = load(f"/proc/self/fd/{descriptor}", "so")
        keep_loaded(module)
        function = module["kernel"]
    except BaseException:
        os.close(descriptor)
        raise
    # The descriptor stays open: dlopen identifies libraries by path, and its number must not be reused.
    return function


def _seal(name: str, library: bytes) -> bytes:
    """The end of a compiled file, after everything that the loader reads: a hash of its name and content."""
    return hashlib.sha256(name.encode() + b"\0" + library).digest()


def _sweep(folder: Path) -> None:
    """Delete temporary folders older than any compile takes, left by processes that were killed.

    Other processes may do so at the same time; a folder that is already gone is no error.
    """
    for path in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _build(key: Key, path: Path) -> None:
    """Compile into `path`, which is complete as soon as it exists."""
    _sweep(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=TEMPORARY) as folder:
        compiled = Path(folder, "kernel.o")
        trace(key).export_to_c(str(compiled), function_name="kernel", export_only_tvm_ffi_symbols=True)
        linked = Path(folder, "kernel.so")
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
        try:
            subprocess.run(
                [*compiler, "-shared", "-o", linked, compiled], check=True, capture_output=True, text=True
            )
        except FileNotFoundError:
            raise RuntimeError(
                f"{compiler[0]}: not found; a C compiler links the compiled kernels (set CC)"
            ) from None
        except subprocess.CalledProcessError as error:
            raise RuntimeError(
                f"{shlex.join(compiler)}: could not link {compiled}: {error.stderr}"
            ) from error
        linked.write_bytes((library := linked.read_bytes()) + _seal(path.name, library))
        linked.chmod(0o600)
        os.replace(linked, path)
