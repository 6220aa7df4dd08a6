"""Compiled kernels by key: a call's key is looked up in memory, among the package's own, then in a folder.

What none of them holds is compiled (trace.py) and stored in memory and in the folder: by workers, together
with what calls of its kind need next, or here (workers.py). A file is a shared library that the host's C
compiler (`cc`, or what CC names) links from the object that the DSL exports.
Loading it needs apache-tvm-ffi and the DSL's runtime library but not the DSL itself, so the first call of a
second process does not import cutlass.

A file's name is a hash of everything that it depends on: the key, the versions of the DSL, of its CUDA
toolkit and of tvm-ffi, the sources that a compile imports and the host's architecture; of its CPUs any will
do (baseline.py), so that machines may share the folder. A file is written under a temporary name and renamed
when it is complete. It ends in a hash of its name and content; a file whose hash does not match (truncated,
altered, copied from another name) is a miss and is replaced. Any number of processes may share a folder:
whoever compiles a key holds its lock (locks.py), and others wait for the file. Where they do not, all write
the same content, and the last rename wins. Stale temporary folders are deleted by the first compile an hour
later.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import environment
from ..plan.kernels import Key, is_users_own
from . import driver, locks, machine, workers
from .trace import trace

_logger = logging.getLogger("cute_lce")
_functions: dict[Key, Callable[..., None]] = {}
_lock, _building = threading.Lock(), threading.Lock()
Others = Callable[[], Iterable[Key]] | None

SOURCES = (
    *("kernels/**/*.py", "compile/trace.py", "compile/baseline.py", "compile/cache.py", "plan/kernels.py"),
    *("arch.py", "arguments.py", "data_sheets.py", "environment.py", "logit_term.py", "maths.py"),
    *("scalars.py", "symbolic.py", "widths.py"),
)
"""Patterns of the files that a compile imports; changing one of them invalidates what was compiled."""
CARRIED = Path(__file__).parent.parent / "carried"
"""The folder of the files that came with the package."""
SEAL_BYTES = 32
TEMPORARY = ".compiling-"
STALE_SECONDS = 3600
PROBE_BYTES = 1 << 20
"""What must fit into the folder before something is compiled: the object, the library and its sealed copy."""


def get(key: Key, others: Others = None) -> Callable[..., None]:
    """A compiled host function of kernels.entry, for any n, d, V and stripe; from memory in well under 1 us.

    others: gives the keys that calls of this kind are likely to need next, the most likely first. It is
    called if the key is in no cache: then workers compile all of them, this one first (workers.py).

    It takes the arguments of the class's __call__ except the stream, which is torch's current stream.
    Raises RuntimeError if there is no C compiler to link with, ImportError if the DSL is not installed,
    PermissionError if others could have written to the cache, another OSError if it cannot be there.
    """
    return _functions.get(key) or _get(key, others)


def get_all(keys: Sequence[Key], others: Others = None) -> list[Callable[..., None]]:
    """The functions of several keys that a call needs, which are compiled at once; see `get`."""
    functions = [_functions.get(key) for key in keys]
    if not all(functions):
        _fill(keys, others)
        functions = [_functions[key] for key in keys]
    return functions  # pyright: ignore[reportReturnType]


def missing(keys: Iterable[Key]) -> list[Key]:
    """Those of the keys that the folder lacks. Raises OSError as `check` does."""
    check()
    folder = cache_dir()
    with _private(folder) as descriptor:
        return [key for key in keys if not _is_whole(folder / file_name(key), descriptor)]


def compile_all(keys: Sequence[Key], jobs: int) -> Iterator[Key]:
    """Compile keys that are `missing` in `jobs` processes, 0: in this one; gives each as it is there.

    Raises what `get` raises.
    """
    folder = cache_dir()
    _linker()
    pending, pool = dict.fromkeys(keys), _workers(folder)
    while pending:
        elsewhere = [
            key for key in pending if not is_users_own(key) and not (folder / file_name(key)).exists()
        ]
        for key in pool.compile_all(elsewhere, min(jobs, len(elsewhere))):
            del pending[key]
            yield key
        # What went wrong with one in a worker goes wrong here, and is raised.
        for key in pool.failed(pending) or [*pending]:
            _build_here(key, folder / file_name(key))
            del pending[key]
            yield key


def cache_dir() -> Path:
    """The folder of compiled kernels."""
    explicit = environment.cache_dir()
    if explicit:
        return Path(os.path.expanduser(explicit))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cute_lce"


def check() -> None:
    """Raise OSError, as `get` does, if the cache's folder cannot be there, is not private or has no room."""
    folder = cache_dir()
    _create(folder)
    with _private(folder):
        _refuse_unwritable(folder)


def _get(key: Key, others: Others = None) -> Callable[..., None]:
    return get_all((key,), others)[0]


def _fill(keys: Sequence[Key], others: Others) -> None:
    """Have the keys' functions in memory."""
    absent = [key for key in dict.fromkeys(keys) if not _is_carried(key)]
    if not absent:
        return
    folder = cache_dir()
    _create(folder)
    absent = [key for key in absent if not _is_stored(key, folder)]
    if not absent:
        return
    _refuse_unwritable(folder)
    _linker()
    # What cannot be loaded is there, and is replaced here.
    elsewhere = [key for key in absent if not is_users_own(key) and not (folder / file_name(key)).exists()]
    if elsewhere and machine.compile_jobs() != 0:
        more = dict.fromkeys(others() if others else ())
        rest = [key for key in more if key not in elsewhere and not is_users_own(key) and not carries(key)]
        _workers(folder).wait(elsewhere, rest)
    for key in absent:
        _load_or_build(key, folder / file_name(key))


def _workers(folder: Path) -> workers.Workers:
    return workers.workers_of(Path(os.path.abspath(folder)), agreement(), file_name)


def _is_carried(key: Key) -> bool:
    """Whether the key's function is in memory, where it is put if it came with the package."""
    with _lock:
        if key not in _functions:
            function = _load_carried(CARRIED / file_name(key))
            if function is None:
                return False
            _functions[key] = function
        return True


def _is_stored(key: Key, folder: Path) -> bool:
    """The same of the folder."""
    with _lock, _private(folder) as descriptor:
        if key not in _functions:
            function = _load(folder / file_name(key), descriptor)
            if function is None:
                return False
            _functions[key] = function
        return True


def carries(key: Key) -> bool:
    """Whether the key's file came with the package, compiled by what is installed here."""
    return (CARRIED / file_name(key)).is_file()


def file_name(key: Key) -> str:
    """The name of the key's file, wherever it lies."""
    return f"{_digest(key)}.so"


def _load_or_build(key: Key, path: Path) -> None:
    """Have the key's function in memory, from what is compiled here if nobody else has."""
    if path.exists() and _is_stored(key, path.parent):
        return
    _build_here(key, path)
    if not _is_stored(key, path.parent):
        raise RuntimeError(f"{path}: was just compiled and cannot be loaded")


def _build_here(key: Key, path: Path) -> None:
    """Compile in this process, unless another one does and finishes it."""
    before, begun = _identity(path), time.monotonic()
    with contextlib.ExitStack() as held, _building:
        while time.monotonic() - begun < workers.PATIENCE:
            try:
                lock = locks.acquire(path)
            except locks.Unsupported:
                break
            if lock is not None:
                held.enter_context(lock)
                break
            time.sleep(workers.POLL)
        if _identity(path) == before:
            _logger.info("compiling %s", key)
            build(key, path)


def _identity(path: Path) -> tuple[int, int] | None:
    """Of a file, which is another once it has been replaced; None: there is none."""
    try:
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


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


def _refuse_unwritable(folder: Path) -> None:
    """Raise OSError, of the class of what happened, if no compiled kernel can be written to the folder."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=TEMPORARY) as probe:
            Path(probe, "probe").write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        raise type(error)(
            f"{folder}: got {error.strerror!r} from the system, want a folder that can be written to and has "
            f"room for {PROBE_BYTES >> 20} MiB; name another in CUTE_LCE_CACHE_DIR"
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
    sources = _digest_of(source_files(Path(__file__).parent.parent))
    toolkit, _ = driver.toolkit()
    return repr((versions, toolkit, sources, platform.system(), platform.machine()))


@functools.cache
def agreement() -> str:
    """What a worker and its parent must have in common: the environment, and how they talk."""
    return _environment() + _digest_of(sorted(Path(__file__).parent.glob("*.py")))


def _digest_of(files: Iterable[Path]) -> str:
    digest, package = hashlib.sha256(), Path(__file__).parent.parent
    for path in files:
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


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


def _is_whole(path: Path, folder: int) -> bool:
    """Whether a file is there and is what was written under its name; not whether it can be loaded."""
    try:
        with _private(path, folder) as file:
            content = Path(f"/proc/self/fd/{file}").read_bytes()
    except FileNotFoundError:
        return False
    return content[-SEAL_BYTES:] == _seal(path.name, content[:-SEAL_BYTES])


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
    locks.sweep(folder)
    for path in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def build(key: Key, path: Path, owner: str = "") -> None:
    """Compile into `path`, which is complete as soon as it exists. owner: in its temporary folder's name."""
    _sweep(path.parent)
    compiler = _linker()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{TEMPORARY}{owner}") as folder:
        compiled = Path(folder, "kernel.o")
        trace(key).export_to_c(str(compiled), function_name="kernel", export_only_tvm_ffi_symbols=True)
        linked = Path(folder, "kernel.so")
        try:
            subprocess.run(
                [*compiler, "-shared", "-o", linked, compiled], check=True, capture_output=True, text=True
            )
        except subprocess.CalledProcessError as error:
            raise RuntimeError(
                f"{shlex.join(compiler)}: could not link {compiled}: {error.stderr}"
            ) from error
        linked.write_bytes((library := linked.read_bytes()) + _seal(path.name, library))
        linked.chmod(0o600)
        os.replace(linked, path)


def _linker() -> list[str]:
    """The command that links. Raises RuntimeError if it is not there."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(compiler[0]) is None:
        raise RuntimeError(f"{compiler[0]}: not found; a C compiler links the compiled kernels (set CC)")
    return compiler


def _forget() -> None:
    """In a forked child: other threads of its parent may have held these."""
    global _lock, _building
    _lock, _building = threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
