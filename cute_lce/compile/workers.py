"""The policy of compiling: processes that compile all kernels of a kind of call, those waited for first.

A call that finds kernels missing starts them, waits for its own, and goes on; the others follow. One process,
the front, compiles what is waited for and nothing else, so that a later call finds it free. The rest also
compile the others, at the lowest priority as soon as nobody has waited for a while. Of the processes that use
a folder on a machine one alone has a rest. Who compiles what is settled by the kernels' locks (locks.py), so
that processes share the work without knowing of each other, and a killed one's kernel is another's.

A worker (worker.py) is a fresh interpreter that imports no torch. It ends with its parent, or when it has had
nothing to do for a while.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..plan.kernels import Key
from . import locks, machine
from .progress import USUAL_SECONDS, Progress

_logger = logging.getLogger("cute_lce")
PATIENCE = 120.0
"""Seconds in which no kernel has been finished, after which a caller compiles its own by itself."""
START_SECONDS = 30.0
"""Seconds after which an interpreter that has not answered is taken to be none."""
END_SECONDS = 1.0
"""Seconds that a worker has to drop what it is at."""
POLL, COUNT = 0.02, 1.0
"""Seconds between two looks for the files that are waited for, and between two at all files."""
TRACE = "cute_lce.compile.trace:trace"
"""The function that compiles a key."""
PROGRAM = Path(__file__).with_name("worker.py")
_LAUNCHERS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("LD_PRELOAD", "LD_AUDIT", "PYTHONINSPECT"),
)
_LAUNCHERS_PREFIXES = ("MASTER_", "TORCHELASTIC_")
"""What a worker does not inherit: its parent's place in a job, and what is loaded into every program."""


class Workers:
    """The workers of this process for a folder of kernels.

    folder: absolute. agreement: the versions of all that parent and worker have in common. name_of: the name
    of a key's file.
    """

    def __init__(self, folder: Path, agreement: str, name_of: Callable[[Key], str]):
        self.folder, self.is_usable = folder, _is_interpreter()
        self._settings = {"folder": str(folder), "agreement": agreement, "trace": TRACE}
        self._name_of, self._changed = name_of, threading.Condition()
        self._workers: list[_Worker] = []
        self._failed: set[str] = set()
        self._seconds: list[float] = []
        self._waiting, self._finished = 0, 0.0
        self._leader: socket.socket | None = None

    def wait(self, wanted: Sequence[Key], others: Sequence[Key]) -> None:
        """Wait for the files of `wanted`, and have those of `others` compiled afterwards.

        Files may still be missing when it returns: where no worker can be had, where one could not compile
        a key, or where nothing has been finished for PATIENCE seconds. Workers end with KeyboardInterrupt.
        """
        missing = [key for key in others if not self._path(key).exists()]
        count = machine.jobs(len(wanted) + len(missing))
        if not wanted or not count or not self.is_usable or not self._can_share(wanted[0]):
            return
        with self._changed:
            self._ensure(_Role.FRONT, 1)
            if missing and self._leads():
                self._ensure(_Role.REST, count - 1)
                if count == 1:
                    self._workers[0].tell({"fills": True})
            self._tell({"first": list(wanted)})
            self._tell({"then": missing}, _Role.REST if count > 1 else _Role.FRONT)
        for _ in self._arrivals(wanted):
            pass

    def compile_all(self, keys: Sequence[Key], count: int) -> Iterator[Key]:
        """Compile keys in `count` workers; gives each as its file is there. Ends as `wait` does."""
        if not keys or not count or not self.is_usable:
            return
        shares = self._can_share(keys[0])
        with self._changed:
            self._ensure(_Role.FRONT, count, shares)
            for i, worker in enumerate(self._workers):
                worker.tell({"first": list(keys if shares else keys[i :: len(self._workers)])})
        yield from self._arrivals(keys, shows=False)

    def failed(self, keys: Iterable[Key]) -> list[Key]:
        """Those that a worker could not compile."""
        return [key for key in keys if self._name_of(key) in self._failed]

    def end(self) -> None:
        """End all workers, each of which drops what it is at."""
        with self._changed:
            workers = list(self._workers)
            for worker in workers:
                worker.end()
        deadline = time.monotonic() + END_SECONDS
        for worker in workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
            if worker.thread.is_alive():
                worker.kill()
                worker.thread.join(END_SECONDS)

    def forget(self) -> None:
        """In a forked child: these are its parent's."""
        for worker in self._workers:
            worker.forget()
        if self._leader is not None:
            self._leader.close()

    def _path(self, key: Key) -> Path:
        return self.folder / self._name_of(key)

    def _can_share(self, key: Key) -> bool:
        """Whether there are locks, by which workers and other processes share kernels."""
        try:
            lock = locks.acquire(self._path(key))
        except locks.Unsupported as error:
            _logger.info("%s: kernels are compiled once for each process", error)
            return False
        if lock is not None:
            lock.release()
        return True

    # What follows is called with the condition's lock held, but for `_arrivals` and the workers' threads.

    def _ensure(self, role: str, count: int, shares: bool = True) -> None:
        """Have so many workers of a role."""
        alive = sum(worker.role == role for worker in self._workers)
        for _ in range(count - alive):
            try:
                worker = _Worker(role, {**self._settings, "fills": role == _Role.REST, "shares": shares})
            except OSError as error:
                self._give_up(str(error))
                return
            self._workers.append(worker)
            worker.thread = threading.Thread(
                target=self._listen, args=(worker,), name="cute_lce compile", daemon=True
            )
            worker.thread.start()

    def _tell(self, message: dict[str, Any], role: str | None = None) -> None:
        for worker in self._workers:
            if role in (None, worker.role):
                worker.tell(message)

    def _leads(self) -> bool:
        """Whether this process is the one of this machine whose workers compile what nobody waits for.

        The name of a socket, which ends with the process, says which one is.
        """
        if self._leader is None:
            there = os.stat(self.folder)
            leader = socket.socket(socket.AF_UNIX)
            try:
                leader.bind(f"\0cute_lce-{os.geteuid()}-{there.st_dev}-{there.st_ino}")
            except OSError:
                leader.close()
                return False
            self._leader = leader
        return True

    def _step_down(self) -> None:
        """Let another process lead, if there are no workers here."""
        if self._leader is not None and not self._workers:
            self._leader.close()
            self._leader = None

    def _usual(self) -> float:
        """Seconds that a kernel takes."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else USUAL_SECONDS

    def _give_up(self, why: str) -> None:
        if self.is_usable:
            _logger.info("no process can be started that compiles (%s): this one does", why)
        self.is_usable = False
        self._step_down()

    def _arrivals(self, wanted: Sequence[Key], shows: bool = True) -> Iterator[Key]:
        """Each key as its file is there, until all are or no more can be expected."""
        missing = {self._name_of(key): key for key in wanted}
        progress, begun = None, time.monotonic()
        with self._changed:
            self._waiting += 1
            self._failed -= missing.keys()
            self._finished, revived = begun, False
            self._tell({"waiting": True})
        counted, files = begun, _count(self.folder)
        try:
            while missing:
                for name in [name for name in missing if (self.folder / name).exists()]:
                    yield missing.pop(name)
                now = time.monotonic()
                if now - counted >= COUNT:
                    # Other processes' kernels count too.
                    counted, before, files = now, files, _count(self.folder)
                    self._finished = now if files != before else self._finished
                with self._changed:
                    if not self._failed.isdisjoint(missing) or not self.is_usable:
                        break
                    if now - self._finished >= PATIENCE:
                        _logger.warning("no kernel has been compiled for %.0f s: this process does", PATIENCE)
                        break
                    if not self._workers:
                        if revived:
                            break
                        revived = True
                        self._ensure(_Role.FRONT, 1)
                        self._tell({"first": list(missing.values()), "waiting": True})
                    if now - begun >= START_SECONDS and not any(worker.ready for worker in self._workers):
                        self._give_up(f"{sys.executable} does not answer")
                        break
                    usual, processes = self._usual(), len(self._workers)
                    if missing:
                        self._changed.wait(POLL)
                if shows and missing:
                    progress = progress or Progress(next(iter(missing.values())).arch, len(wanted))
                    progress.estimate.update(len(wanted) - len(missing), usual, processes)
                    progress.show()
        except BaseException:
            self.end()
            raise
        finally:
            if progress is not None:
                progress.close()
            with self._changed:
                self._waiting -= 1
                if not self._waiting:
                    self._tell({"waiting": False})
        if missing and time.monotonic() - self._finished >= PATIENCE:
            # They hold the locks of what they do not finish.
            self.end()

    def _listen(self, worker: _Worker) -> None:
        """Hear a worker, to its end; then remove what it left."""
        for message in worker.messages():
            with self._changed:
                if "ready" in message:
                    worker.set_ready()
                elif "refused" in message:
                    self._give_up(message["refused"])
                elif "begun" in message:
                    worker.current = message["begun"]
                elif "done" in message:
                    worker.current = None
                    self._seconds.append(message["seconds"])
                    self._finished = time.monotonic()
                elif "failed" in message:
                    worker.current = None
                    _logger.info("%s: %s", message["failed"], message["error"])
                    self._failed.add(message["failed"])
                    self._tell({"drop": [message["failed"]]})
                self._changed.notify_all()
        worker.process.wait()
        for path in self.folder.glob(f"*{worker.owner}*"):
            shutil.rmtree(path, ignore_errors=True)
        if worker.current is not None:
            with contextlib.suppress(OSError):
                lock = locks.acquire(self.folder / worker.current)
                if lock is not None:
                    lock.release()
        with self._changed:
            self._workers.remove(worker)
            worker.close()
            if not worker.ready and not worker.is_ended:
                self._give_up(f"{sys.executable} ended with {worker.process.returncode}")
            self._step_down()
            self._changed.notify_all()


class _Role:
    FRONT, REST = "front", "rest"


class _Worker:
    """A process; messages to it wait until it is ready."""

    thread: threading.Thread

    def __init__(self, role: str, settings: dict[str, Any]):
        self.role, self.ready, self.is_ended, self.current = role, False, False, None
        self.owner = f"{os.urandom(6).hex()}-"
        self._backlog: list[bytes] = []
        self.process = subprocess.Popen(
            [sys.executable, "-Wignore", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=_environment(),
            # Ctrl-C in a terminal is for the parent.
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        os.set_blocking(self._input.fileno(), False)
        path = [entry for entry in sys.path if isinstance(entry, str)]
        given = {**settings, "path": path, "owner": self.owner, "parent": os.getpid()}
        self._write(json.dumps(given).encode())

    def tell(self, message: dict[str, Any]) -> None:
        line = base64.b64encode(zlib.compress(pickle.dumps(message)))
        if self.ready:
            self._write(line)
        else:
            self._backlog.append(line)

    def set_ready(self) -> None:
        self.ready = True
        for line in self._backlog:
            self._write(line)
        self._backlog.clear()

    def messages(self) -> Iterator[dict[str, Any]]:
        """What it says, to its end."""
        rest = b""
        while True:
            try:
                read = os.read(self._output.fileno(), 1 << 16)
            except (OSError, ValueError):
                return
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                try:
                    yield json.loads(line)
                except ValueError:
                    # It is another program than ours.
                    self.kill()
                    break

    def end(self) -> None:
        self.is_ended = True
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()

    def forget(self) -> None:
        self.process.returncode = 0
        self.close()

    def close(self) -> None:
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):
                pipe.close()

    def _write(self, line: bytes) -> None:
        """A line; a worker that does not take it is stuck, and is killed: nobody waits for it."""
        written = 0
        with contextlib.suppress(OSError, ValueError):
            written = self._input.write(line + b"\n") or 0
        if written <= len(line):
            self.kill()


def _is_interpreter() -> bool:
    """Whether sys.executable is a Python that can run a file of this package."""
    return bool(sys.executable) and not getattr(sys, "frozen", False) and PROGRAM.is_file()


def _environment() -> dict[str, str]:
    """A worker's: without its parent's place in a job, and without GPUs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHERS and not name.startswith(_LAUNCHERS_PREFIXES)
    }
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}


def _count(folder: Path) -> int:
    """Kernels in the folder."""
    with contextlib.suppress(OSError):
        return sum(name.endswith(".so") for name in os.listdir(folder))
    return 0


_here: Workers | None = None
_here_lock = threading.Lock()


def workers_of(folder: Path, agreement: str, name_of: Callable[[Key], str]) -> Workers:
    """This process's for a folder; those for another one end."""
    global _here
    with _here_lock:
        if _here is not None and _here.folder != folder:
            _here.end()
            _here = None
        if _here is None:
            _here = Workers(folder, agreement, name_of)
        return _here


def end() -> None:
    """End this process's workers."""
    if _here is not None:
        _here.end()


def _forget() -> None:
    global _here, _here_lock
    _here_lock = threading.Lock()
    if _here is not None:
        _here.forget()
        _here = None


atexit.register(end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
