"""How many processes may compile here at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .. import environment

WORKER_BYTES = 1 << 30
"""Memory that a process which compiles may take: it is measured to take half of this."""
_V1_CPU, _V1_MEMORY = "sys/fs/cgroup/cpu", "sys/fs/cgroup/memory"


def jobs(kernels: int) -> int:
    """Processes for so many kernels, at least 1; 0: the calling process compiles by itself.

    Raises ValueError for a CUTE_LCE_COMPILE_JOBS that is no whole number.
    """
    most = compile_jobs()
    if most == 0:
        return 0
    limits = [cores(), free_memory() // WORKER_BYTES, kernels, *([] if most is None else [most])]
    return max(1, min(limits))


def compile_jobs() -> int | None:
    """CUTE_LCE_COMPILE_JOBS, the most processes that compile: 0: none but the calling one; None: not set."""
    text = environment.compile_jobs().strip()
    if not text:
        return None
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError(
            f"CUTE_LCE_COMPILE_JOBS: got {text!r}, want a whole number of at least 0, or no such variable"
        )
    return number


def compile_by_itself() -> None:
    """Have this process and its children compile by themselves, unless the user says otherwise: nothing is to
    run beside what they measure."""
    if not environment.compile_jobs():
        os.environ["CUTE_LCE_COMPILE_JOBS"] = "0"


def cores(root: Path = Path("/")) -> int:
    """Cores that this process may use, by its affinity and its cgroups; at least 1.

    root: of the file system, for tests.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups(root, "", "sys/fs/cgroup"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        count = min(count, _rounded_up(quota, period))
    for folder in _cgroups(root, "cpu", _V1_CPU):
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        count = min(count, _rounded_up(quota, period))
    return max(1, count)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process and its children may still take, by the machine and its cgroups."""
    free = 1 << 62
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    for folders, limit, usage in (
        (_cgroups(root, "", "sys/fs/cgroup"), "memory.max", "memory.current"),
        (_cgroups(root, "memory", _V1_MEMORY), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in folders:
            most, used = _text(folder / limit), _text(folder / usage)
            if most.isdigit() and used.isdigit():
                free = min(free, max(0, int(most) - int(used)))
    return free


def _cgroups(root: Path, controller: str, mount: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of those above it. controller: "": the unified hierarchy."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = Path(path)
            for part in (group, *group.parents):
                yield root / mount / str(part).lstrip("/")


def _rounded_up(quota: str, period: str) -> int:
    """Cores of a quota; of none ("max", -1, no such file) any number."""
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return 1 << 30
    return max(1, -(-int(quota) // int(period)))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
