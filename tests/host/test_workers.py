"""Who compiles a kernel, and what is left when one of them dies: with compiles that take a second."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_lce
from cute_lce.compile import cache, locks, machine, workers
from cute_lce.plan.kernels import MergeKey, MultiplyKey
from tests.host import slow_trace

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the DSL is for Linux")
ROOT = Path(cute_lce.__file__).parent.parent
A, B, C, D = KEYS = [MultiplyKey("sm_90a", f"of {name}") for name in "abcd"]

# Without the package's own __init__, and without tvm_ffi: both import torch.
BEGIN = f"""
import os, sys, time, types
sys.path.insert(0, {str(ROOT)!r})
stub = sys.modules["cute_lce"] = types.ModuleType("cute_lce")
stub.__path__ = [{str(ROOT / "cute_lce")!r}]
from cute_lce.compile import cache, machine, workers
from cute_lce.plan.kernels import MergeKey, MultiplyKey
from tests.host import slow_trace
workers.TRACE, cache.trace = "tests.host.slow_trace:trace", slow_trace.trace
cache._load_bytes = lambda name, library: lambda: 7
machine.cores, machine.free_memory = lambda: 8, lambda: 1 << 40
A, B, C, D = KEYS = [MultiplyKey("sm_90a", f"of {{name}}") for name in "abcd"]
"""
CALL = "print(cache.get(A, lambda: [B, C])(), flush=True)\n"


class Place:
    """A folder of kernels, and how long compiles into it take."""

    def __init__(self, folder: Path, seconds: float = 0.3, jobs: int = 2, **settings: Any):
        self.cache, self.trace = folder / "cache", folder / "trace"
        self.started: list[subprocess.Popen] = []
        self.environment = {
            **slow_trace.prepare(self.trace, seconds, **settings),
            "CUTE_LCE_CACHE_DIR": str(self.cache),
            "CUTE_LCE_COMPILE_JOBS": str(jobs),
        }

    def start(self, code: str, **options: Any) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + code],
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        self.started.append(process)
        return process

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()

    def run(self, code: str) -> str:
        return finish(self.start(code))

    def wait_for(self, what: Callable[[list[dict[str, Any]]], Any], seconds: float = 120) -> Any:
        """What is true of the log, as soon as it is."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if answer := what(slow_trace.log(self.trace)):
                return answer
            time.sleep(0.01)
        raise AssertionError(slow_trace.log(self.trace))

    @property
    def begun(self) -> Counter[str]:
        return Counter(line["begun"] for line in slow_trace.log(self.trace) if "begun" in line)

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.cache.iterdir()} if self.cache.exists() else set()


def finish(process: subprocess.Popen) -> str:
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out


def names(*keys: Any) -> set[str]:
    return {cache.file_name(key) for key in keys}


def is_gone(pid: int) -> bool:
    """Whether a process has ended; its parent need not have noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Makes a Place that programs compile into."""
    places = []

    def make(**options: Any) -> Place:
        places.append(Place(tmp_path, **options))
        return places[-1]

    yield make
    for place in places:
        place.end()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Place]]:
    """Makes a Place that this process compiles into."""

    def make(**options: Any) -> Place:
        place = Place(tmp_path, **options)
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
        return place

    monkeypatch.setattr(cache, "_functions", {})
    monkeypatch.setattr(cache, "trace", slow_trace.trace)
    monkeypatch.setattr(workers, "TRACE", "tests.host.slow_trace:trace")
    monkeypatch.setattr(workers, "_here", None)
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 40)
    yield make
    workers.end()


# ----------------------------------------------------------------------------------------------------------
# What a call waits for


def test_a_call_waits_for_its_own_alone(here: Any):
    place = here(seconds=0.5)
    function: Any = cache.get(A, lambda: [B, C, D])
    assert function() == 7
    assert names(A) <= place.files
    assert not names(B, C, D) <= place.files
    place.wait_for(lambda log: names(*KEYS) <= place.files)
    assert place.begun == Counter(map(repr, KEYS))
    assert all(line["worker"] for line in slow_trace.log(place.trace))
    # With a worker that fills and one that waits there is nothing else in the folder.
    place.wait_for(lambda log: place.files == names(*KEYS))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_later_call_is_moved_to_the_front(jobs: int, here: Any):
    others = [MultiplyKey("sm_90a", f"{i}") for i in range(6)]
    place = here(seconds=0.3, jobs=jobs)
    cache.get(A, lambda: others)
    cache.get(D, lambda: others)
    begun = [line["begun"] for line in slow_trace.log(place.trace) if "begun" in line]
    assert begun.index(repr(D)) <= 3
    assert len(place.files & names(*others)) < 5


def test_all_keys_of_a_call_are_compiled_at_once(here: Any):
    place = here(seconds=1.0, jobs=2)
    one, another = cache.get_all([A, B], lambda: [C])
    assert one is not another
    first, second = slow_trace.log(place.trace)[:2]
    assert {first.get("begun"), second.get("begun")} == {repr(A), repr(B)}
    assert first["pid"] != second["pid"]


def test_what_is_there_starts_nothing(here: Any):
    place = here()
    cache.get(A, None)
    workers.end()
    before = place.begun

    def none() -> list:
        raise AssertionError("asked for others")

    cache._functions.clear()
    cache.get(A, none)
    cache.get(A, none)
    assert place.begun == before


def test_without_workers_the_process_compiles(here: Any):
    place = here(jobs=0)
    function: Any = cache.get(A, lambda: [B])
    assert function() == 7
    assert [line["pid"] for line in slow_trace.log(place.trace)] == [os.getpid()] * 2
    assert place.files == names(A)


def test_a_users_own_term_is_compiled_by_the_process_that_has_it(here: Any, monkeypatch):
    place = here()
    monkeypatch.setattr(cache, "is_users_own", lambda key: key in (A, B))
    cache.get(A, lambda: [B, C])
    assert [line["pid"] for line in slow_trace.log(place.trace)] == [os.getpid()] * 2


def test_the_others_have_the_lowest_priority(here: Any):
    """Once nobody has waited for a while; what is waited for never has it."""
    others = [MultiplyKey("sm_90a", f"{i}") for i in range(20)]
    place = here(seconds=0.4)
    before = os.nice(0)
    cache.get(A, lambda: others)
    place.wait_for(lambda log: any(line["nice"] == 19 for line in log))
    cache.get(B, lambda: others)
    (line,) = [line for line in slow_trace.log(place.trace) if line.get("begun") == repr(B)]
    assert line["nice"] == before


def test_what_is_said_while_somebody_waits(here: Any, caplog: pytest.LogCaptureFixture, capsys):
    here(seconds=0.5)
    with caplog.at_level(logging.INFO, "cute_lce"):
        cache.get_all([A, B], lambda: [C])
    said = r"compiling for sm_90a, once on this machine: 0/2, about \d+ s left"
    assert re.fullmatch(said, caplog.messages[0])
    assert len(caplog.messages) == 1
    assert re.search(f"\rcute_lce: {said}", capsys.readouterr().err)


# ----------------------------------------------------------------------------------------------------------
# What kind of process calls


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
def test_a_program_without_a_main_guard_runs_once(how: str, there: Any, tmp_path: Path):
    place = there()
    code = BEGIN + "print('once')\n" + CALL
    script = tmp_path / "script.py"
    script.write_text(code)
    command = {"file": [str(script)], "-c": ["-c", code], "stdin": []}[how]
    found = subprocess.run(
        [sys.executable, *command],
        input=code if how == "stdin" else None,
        env={**os.environ, **place.environment},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout == "once\n7\n"
    assert place.begun[repr(A)] == 1
    assert all(line["worker"] for line in slow_trace.log(place.trace))
    # What the process did not wait for is dropped at its end, cleanly.
    assert {Path(name).suffix for name in place.files} == {".so"}


def test_children_have_workers_of_their_own(there: Any):
    """Forked, with their parent's threads and pipes gone, and daemonic."""
    place = there()
    code = """
import multiprocessing
def child(key):
    assert cache.get(key, lambda: [])() == 7
cache.get(A, lambda: [B])
pid = os.fork()
if not pid:
    child(C)
    workers.end()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
process = multiprocessing.get_context("fork").Process(target=child, args=(D,), daemon=True)
process.start()
process.join()
assert process.exitcode == 0
print(cache.get(B, lambda: [])())
"""
    assert place.run(code) == "7\n"
    assert place.files == names(*KEYS)
    assert place.begun == Counter(map(repr, KEYS))


class Items(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> int:
        function: Any = cache.get(KEYS[i], list)
        workers.end()
        return function() + i


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_data_loaders_worker(here: Any):
    place = here()
    loader = torch.utils.data.DataLoader(
        Items(), num_workers=1, multiprocessing_context=multiprocessing.get_context("fork")
    )
    assert [int(batch) for batch in loader] == [7, 8]
    assert place.files == names(A, B)


def test_eight_processes_compile_each_kernel_once(there: Any):
    place = there(seconds=0.5)
    code = "for key in KEYS: assert cache.get(key, lambda: KEYS)() == 7\n"
    processes = [place.start(code) for _ in range(8)]
    for process in processes:
        finish(process)
    assert place.begun == Counter(map(repr, KEYS))
    assert place.files == names(*KEYS)


def test_a_worker_has_no_place_in_its_parents_job(there: Any):
    place = there()
    place.environment |= {"RANK": "3", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "nowhere"}
    place.environment |= {"MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "CUDA_VISIBLE_DEVICES": "0"}
    place.environment |= {"LD_PRELOAD": "", "SOMETHING": "else"}
    place.run(CALL)
    line = slow_trace.log(place.trace)[0]
    inherited = set(line["names"]) & set(place.environment)
    assert inherited == {"CUTE_LCE_CACHE_DIR", "CUTE_LCE_COMPILE_JOBS", "SLOW_TRACE", "SOMETHING"} | {
        "CUDA_VISIBLE_DEVICES"
    }
    assert line["gpus"] == ""
    assert not line["torch"]


# ----------------------------------------------------------------------------------------------------------
# What dies


def pid_at(log: list[dict[str, Any]], key: Any, but: int = 0) -> int | None:
    """The process that has begun a key."""
    return next((line["pid"] for line in log if line.get("begun") == repr(key) and line["pid"] != but), None)


def test_a_killed_workers_kernel_is_anothers(there: Any):
    place = there(seconds=1.0, jobs=2)
    process = place.start(CALL)
    pid = place.wait_for(lambda log: pid_at(log, A))
    os.kill(pid, signal.SIGKILL)
    assert finish(process) == "7\n"
    assert place.begun[repr(A)] == 2
    assert all(line["worker"] for line in slow_trace.log(place.trace))
    assert {Path(name).suffix for name in place.files} == {".so"}


def test_where_every_worker_is_killed_the_caller_compiles(there: Any):
    place = there(worker=60.0, seconds=0.1, jobs=1)
    process = place.start(CALL)
    first = place.wait_for(lambda log: pid_at(log, A))
    os.kill(first, signal.SIGKILL)
    second = place.wait_for(lambda log: pid_at(log, A, first))
    os.kill(second, signal.SIGKILL)
    assert finish(process) == "7\n"
    assert not slow_trace.log(place.trace)[-1]["worker"]
    assert place.files == names(A)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_parent(number: signal.Signals, there: Any):
    """While they compile what it waits for; nothing of that is left."""
    place = there(seconds=60.0, jobs=2)
    process = place.start(CALL, start_new_session=True)
    pids = [place.wait_for(lambda log, key=key: pid_at(log, key)) for key in (A, B)]
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=120)
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    place.wait_for(lambda log: all(map(is_gone, pids)))
    assert place.files == set()


def test_a_forked_child_does_not_keep_workers_alive(there: Any):
    place = there(jobs=1)
    code = """
cache.get(A, lambda: [])
if not os.fork():
    for stream in (0, 1, 2):
        os.close(stream)
    time.sleep(60)
print(os.getpid(), flush=True)
os.kill(os.getpid(), 9)
"""
    process = place.start(code)
    process.communicate(timeout=120)
    pid = slow_trace.log(place.trace)[0]["pid"]
    place.wait_for(lambda log: is_gone(pid))


def test_a_lock_that_nobody_holds_means_nothing(here: Any):
    place = here()
    place.cache.mkdir(mode=0o700)
    stale = (place.cache / cache.file_name(A)).with_suffix(locks.SUFFIX)
    stale.touch(0o600)
    cache.get(A, list)
    assert place.files == names(A)


def test_a_lock_is_one_processs_alone(tmp_path: Path):
    path = tmp_path / "kernel.so"
    with locks.acquire(path) as held:  # pyright: ignore[reportOptionalContextManager]
        assert held is not None
        assert locks.acquire(path) is None
    assert not list(tmp_path.iterdir())
    again = locks.acquire(path)
    assert again is not None
    # Removed and made anew by others: it is theirs.
    path.with_suffix(locks.SUFFIX).unlink()
    other = locks.acquire(path)
    assert other is not None


# ----------------------------------------------------------------------------------------------------------
# Where nothing can be shared


def test_without_locks_the_caller_compiles(here: Any, monkeypatch: pytest.MonkeyPatch):
    place = here()

    def unsupported(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    function: Any = cache.get(A, lambda: [B])
    assert function() == 7
    assert {line["pid"] for line in slow_trace.log(place.trace)} == {os.getpid()}
    assert place.files == names(A)


def test_without_locks_a_list_is_divided(here: Any, monkeypatch: pytest.MonkeyPatch):
    place = here()
    monkeypatch.setattr(workers.Workers, "_can_share", lambda self, key: False)
    assert set(cache.compile_all(cache.missing(KEYS), 2)) == set(KEYS)
    log = slow_trace.log(place.trace)
    assert place.begun == Counter(map(repr, KEYS))
    assert len({line["pid"] for line in log}) == 2
    assert all(line["worker"] for line in log)


@pytest.mark.parametrize("whose", ["own", "another's"])
def test_where_nothing_is_finished_the_caller_compiles(whose: str, here: Any, monkeypatch, caplog):
    place = here(seconds=0.1, worker=60.0, jobs=1)
    monkeypatch.setattr(workers, "PATIENCE", 2.0)
    place.cache.mkdir(mode=0o700)
    held = locks.acquire(place.cache / cache.file_name(A)) if whose == "another's" else None
    begun = time.monotonic()
    function: Any = cache.get(A, list)
    assert function() == 7
    assert time.monotonic() - begun > 2.0
    assert not slow_trace.log(place.trace)[-1]["worker"]
    assert "no kernel has been compiled for 2 s" in caplog.text
    if held is not None:
        held.release()
    assert place.files == names(A)


@pytest.mark.parametrize("executable", ["", "/no/such/file", "/bin/false", "/bin/echo", "frozen"])
def test_without_an_interpreter_the_caller_compiles(executable: str, here: Any, monkeypatch):
    place = here()
    if executable == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.setattr(sys, "executable", executable)
    for key in (A, B):
        function: Any = cache.get(key, lambda: [C])
        assert function() == 7
    assert {line["pid"] for line in slow_trace.log(place.trace)} == {os.getpid()}


def test_a_program_that_does_not_answer_is_no_interpreter(here: Any, monkeypatch, tmp_path: Path):
    place = here()
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(silent))
    monkeypatch.setattr(workers, "START_SECONDS", 0.5)
    cache.get(A, list)
    assert {line["pid"] for line in slow_trace.log(place.trace)} == {os.getpid()}


def test_a_worker_refuses_other_sources(here: Any, caplog: pytest.LogCaptureFixture):
    place = here()
    cache.check()
    other = workers.Workers(place.cache, "other", cache.file_name)
    with caplog.at_level(logging.INFO, "cute_lce"):
        other.wait([A], [])
    assert "sources or packages have changed" in caplog.text
    assert not other.is_usable
    assert place.files == set()


def test_what_fails_in_a_worker_fails_in_the_call(here: Any, monkeypatch):
    here(jobs=1, fails="no memory")
    function: Any = cache.get(A, list)
    assert function() == 7, "it does not fail here"

    def trace(key: Any) -> None:
        raise ValueError("wrong")

    monkeypatch.setattr(cache, "trace", trace)
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            cache.get(B, list)


@pytest.mark.parametrize("what", ["read-only", "full"])
def test_a_folder_without_room_is_refused_before_a_compile(what: str, there: Any):
    place = there()
    code = CALL
    if what == "full":
        code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))\n" + CALL
    elif os.geteuid():
        place.cache.mkdir(0o500)
    else:
        # Root may write anywhere but to the kernel's.
        place.environment["CUTE_LCE_CACHE_DIR"] = "/proc/sys"
    process = place.start(code)
    _, errors = process.communicate(timeout=120)
    folder = place.environment["CUTE_LCE_CACHE_DIR"]
    assert re.search(rf"Error: {folder}: got '.*' from the system, want a folder that can be", errors), errors
    assert errors.rstrip().endswith("name another in CUTE_LCE_CACHE_DIR")
    assert not slow_trace.log(place.trace)


def test_without_a_c_compiler_nothing_is_compiled(here: Any, monkeypatch):
    place = here()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"no-such-compiler: not found.*set CC"):
        cache.get(A, list)
    assert not slow_trace.log(place.trace)


# ----------------------------------------------------------------------------------------------------------
# How many


@pytest.mark.parametrize(
    ("text", "cores", "memory", "kernels", "jobs"),
    [
        ("", 8, 64, 100, 8),
        ("3", 8, 64, 100, 3),
        ("30", 8, 64, 100, 8),
        ("", 8, 2.9, 100, 2),
        ("", 8, 0.1, 100, 1),
        ("", 8, 64, 5, 5),
        ("0", 8, 64, 100, 0),
    ],
)
def test_how_many_processes_compile(text, cores, memory, kernels, jobs, monkeypatch):
    monkeypatch.setenv("CUTE_LCE_COMPILE_JOBS", text)
    monkeypatch.setattr(machine, "cores", lambda: cores)
    monkeypatch.setattr(machine, "free_memory", lambda: int(memory * 2**30))
    assert machine.jobs(kernels) == jobs


@pytest.mark.parametrize("text", ["-1", "two", "1.5"])
def test_a_wrong_number_is_refused(text, monkeypatch):
    monkeypatch.setenv("CUTE_LCE_COMPILE_JOBS", text)
    with pytest.raises(ValueError, match=rf"CUTE_LCE_COMPILE_JOBS: got '{text}', want a whole number"):
        machine.jobs(4)


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({}, 64, 1 << 62),
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    4096 kB\n"}, 64, 4 << 20),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
                "sys/fs/cgroup/job/cpu.max": "250000 100000\n",
                "sys/fs/cgroup/job/step/memory.max": "1000\n",
                "sys/fs/cgroup/job/step/memory.current": "400\n",
                "sys/fs/cgroup/job/memory.max": "max\n",
                "sys/fs/cgroup/job/memory.current": "400\n",
            },
            3,
            600,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n0::/\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "100\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "200\n",
            },
            1,
            0,
        ),
    ],
)
def test_what_a_machine_and_its_cgroups_allow(files, cores, memory, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.cores(tmp_path) == cores
    assert machine.free_memory(tmp_path) == memory


# ----------------------------------------------------------------------------------------------------------
# A real one


def test_a_worker_compiles_a_kernel(there: Any, monkeypatch: pytest.MonkeyPatch):
    """One that is loaded, and is what the process itself would have compiled."""
    place = there()
    code = """
from cute_lce.compile.trace import trace
workers.TRACE, cache.trace = "cute_lce.compile.trace:trace", None
cache.get(MultiplyKey("sm_90a"), list)
print("cutlass" in sys.modules)
"""
    assert place.run(code) == "False\n"
    assert place.files == names(KEY := MultiplyKey("sm_90a"))
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(place.cache))
    monkeypatch.setattr(cache, "_functions", {})
    monkeypatch.setattr(cache, "trace", None)
    assert callable(cache.get(KEY))


def test_a_merge_has_a_name_of_its_own():
    assert len(names(*KEYS, MergeKey("sm_90a"), MergeKey("sm_100a"))) == 6
