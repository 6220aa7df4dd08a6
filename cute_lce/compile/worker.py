"""A process that compiles keys for its parent (workers.py). It is run as a file, and its first line of input
says where the package is, so that it imports neither torch nor another version of the package.

Its input is then a message a line: "first", keys that somebody waits for; "then", others; "fills", whether
it compiles these; "drop", names of files that cannot be compiled; "waiting", whether somebody waits. Its
output is another: "ready" or "refused"; of a file's name "begun", "done" or "failed". Results are files. It
ends with its input, or with its parent.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import pickle
import select
import shutil
import signal
import sys
import threading
import time
import types
import zlib
from pathlib import Path
from typing import Any

IDLE_SECONDS = 30.0
"""After which a worker that has nothing to do ends."""
CALM_SECONDS = 2.0
"""After which, if nobody waits, a worker that fills takes the lowest priority for the rest of its life: a
process without privileges cannot have a higher one again."""
LEFT_SECONDS = 1.0
"""In which the rest leave the first key that is waited for to the front."""
POLL = 0.05
HARD_SECONDS = 10.0
"""After which one that is to end does so whatever it is at."""


class Parent:
    """The two pipes. The process's own input and output are /dev/null from now on."""

    def __init__(self):
        self._input, self._output = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        self._rest = b""
        self._pid: int | None = None

    def watch(self, pid: int) -> None:
        """Take a parent of another number for a dead one."""
        self._pid = pid

    def read(self) -> bytes | None:
        """A line; None at the end."""
        while b"\n" not in self._rest:
            readable, _, _ = select.select([self._input], [], [], 1.0)
            if self._pid is not None and os.getppid() != self._pid:
                return None
            if readable:
                read = os.read(self._input, 1 << 16)
                if not read:
                    return None
                self._rest += read
        line, self._rest = self._rest.split(b"\n", 1)
        return line

    def say(self, **message: Any) -> None:
        try:
            os.write(self._output, json.dumps(message).encode() + b"\n")
        except OSError:
            os.kill(os.getpid(), signal.SIGTERM)


class Work:
    """What there is to do, in its order; a thread adds to it."""

    def __init__(self, fills: bool):
        self.fills, self.is_over, self._is_rest, self._asked = fills, False, fills, 0.0
        self._is_read = True
        self.first: list[Any] = []
        self.then: list[Any] = []
        self.dropped: set[str] = set()
        self.changed = threading.Condition()
        self._calm: threading.Timer | None = None

    def hear(self, message: dict[str, Any]) -> None:
        with self.changed:
            self._is_read = False
            if "first" in message:
                # Somebody tries again.
                self.dropped.clear()
                self._asked = time.monotonic()
            self.first += [key for key in message.get("first", ()) if key not in self.first]
            others = message.get("then", ())
            self.then = [*others, *(key for key in self.then if key not in set(others))]
            self.dropped.update(message.get("drop", ()))
            self.fills = message.get("fills", self.fills)
            if "waiting" in message:
                self._set_waiting(message["waiting"])
            self.changed.notify_all()

    def keys(self) -> list[Any]:
        """In the order in which to try them."""
        with self.changed:
            first, self._is_read = self.first, True
            if self._is_rest and time.monotonic() - self._asked < LEFT_SECONDS:
                first = first[1:]
            return [*first, *(self.then if self.fills else ())]

    def forget(self, keys: set[Any], seconds: float) -> None:
        """These are there, or cannot be; then wait for others, which may have come meanwhile."""
        with self.changed:
            self.first = [key for key in self.first if key not in keys]
            self.then = [key for key in self.then if key not in keys]
            if self._is_read:
                self.changed.wait(seconds)

    def _set_waiting(self, somebody: bool) -> None:
        if self._calm is not None:
            self._calm.cancel()
            self._calm = None
        if not somebody and self.fills:
            # Of the main thread, which compiles.
            self._calm = threading.Timer(CALM_SECONDS, os.setpriority, (os.PRIO_PROCESS, os.getpid(), 19))
            self._calm.daemon = True
            self._calm.start()


class Compiler:
    """Takes keys one after the other, each if nobody else is at it."""

    def __init__(self, settings: dict[str, Any], parent: Parent):
        from cute_lce.compile import cache, locks

        self._cache, self._locks, self._parent = cache, locks, parent
        self._folder, self._owner = Path(settings["folder"]), settings["owner"]
        self._shares = settings["shares"]
        module, _, name = settings["trace"].partition(":")
        cache.trace = getattr(importlib.import_module(module), name)

    def run(self, work: Work) -> None:
        idle = time.monotonic()
        while not work.is_over:
            keys, left, took = work.keys(), [], False
            for key in keys:
                state = self._try(key, work)
                if state == "busy":
                    left.append(key)
                elif state == "done":
                    took = True
                    break
            if took or left:
                idle = time.monotonic()
            elif time.monotonic() - idle >= IDLE_SECONDS:
                return
            if not took:
                work.forget(set(keys) - set(left), POLL if left else LEFT_SECONDS)

    def _try(self, key: Any, work: Work) -> str:
        """ "there" or "dropped", "busy" where another compiles it, or "done"."""
        name = self._cache.file_name(key)
        path = self._folder / name
        if name in work.dropped:
            return "dropped"
        if path.exists():
            return "there"
        try:
            lock = self._locks.acquire(path) if self._shares else contextlib.nullcontext()
        except OSError as error:
            self._fail(name, error, work)
            return "dropped"
        if lock is None:
            return "busy"
        with lock:
            if path.exists():
                return "there"
            self._parent.say(begun=name)
            begun = time.monotonic()
            try:
                self._cache.build(key, path, self._owner)
            except Exception as error:
                self._fail(name, error, work)
                return "dropped"
            self._parent.say(done=name, seconds=time.monotonic() - begun)
        return "done"

    def _fail(self, name: str, error: Exception, work: Work) -> None:
        work.dropped.add(name)
        self._parent.say(failed=name, error=f"{type(error).__name__}: {error}")


def _listen(parent: Parent, work: Work, folder: Path, owner: str) -> None:
    while (line := parent.read()) is not None:
        work.hear(pickle.loads(zlib.decompress(base64.b64decode(line))))
    work.is_over = True
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(HARD_SECONDS)
    for path in folder.glob(f"*{owner}*"):
        shutil.rmtree(path, ignore_errors=True)
    os._exit(1)


def _stop(*_: Any) -> None:
    """Leave whatever is being done, by its own cleaning up."""
    raise SystemExit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    parent = Parent()
    line = parent.read()
    if line is None:
        return
    settings = json.loads(line)
    parent.watch(settings["parent"])
    sys.path[:] = settings["path"]
    # Not the package's __init__, which imports torch.
    stub = sys.modules["cute_lce"] = types.ModuleType("cute_lce")
    stub.__path__ = [str(Path(__file__).resolve().parents[1])]
    from cute_lce.compile import cache

    here = cache.agreement()
    if here != settings["agreement"]:
        parent.say(refused=f"got {here}, want {settings['agreement']}: sources or packages have changed")
        return
    work = Work(settings["fills"])
    arguments = parent, work, Path(settings["folder"]), settings["owner"]
    threading.Thread(target=_listen, args=arguments, daemon=True).start()
    parent.say(ready=os.getpid())
    Compiler(settings, parent).run(work)


if __name__ == "__main__":
    main()
