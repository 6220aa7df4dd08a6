"""A lock on a kernel's name, by which the processes of a machine compile each kernel once."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

SUFFIX = ".lock"


class Unsupported(OSError):
    """The folder's file system has no locks."""


class Lock:
    """Held from `acquire` to `release`, or to the death of its process: a file that is locked with flock,
    beside the kernel's. Such a file without a lock means nothing, and is taken over."""

    def __init__(self, path: Path, descriptor: int):
        self._path, self._descriptor = path, descriptor

    def release(self) -> None:
        # First: whoever opens the path afterwards makes another file.
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire(kernel: Path) -> Lock | None:
    """The lock of a kernel's file, without waiting; None: another process holds it.

    Raises Unsupported where there are no locks, another OSError if the lock's file cannot be there.
    """
    import fcntl

    path = kernel.with_suffix(SUFFIX)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            if error.errno == errno.EINTR:
                continue
            with contextlib.suppress(OSError):
                path.unlink()
            raise Unsupported(error.errno, f"{path}: cannot be locked: {error.strerror}") from None
        if _is_file(path, descriptor):
            return Lock(path, descriptor)
        # Its holder removed it meanwhile.
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove the files of locks that nobody holds, of kernels that are there."""
    for path in folder.glob(f"*{SUFFIX}"):
        kernel = path.with_suffix(".so")
        with contextlib.suppress(OSError):
            if kernel.exists() and (lock := acquire(kernel)):
                lock.release()


def _is_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
