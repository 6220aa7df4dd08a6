"""`cute-lce doctor`: whether what is installed here fits together, and whether tiny calls are right."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from typing import NamedTuple

from .. import environment
from ..compile import cache, driver
from ..measure import isolated
from ..plan.kernels import carried
from .compile import cores
from .info import describe_cache, describe_carried, devices
from .terminal import positive

PASS, FAIL, NOTE = "PASS", "FAIL", "note"
MOST_JOBS = 8


class Line(NamedTuple):
    """What was found about a subject; a note is neither right nor wrong."""

    state: str
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.state}  {self.subject:41}  {self.text}"


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "doctor",
        help="check versions, driver and cache, and compare tiny calls of each kind with float64",
    )
    command.add_argument(
        "--seconds",
        type=positive,
        default=300,
        help="how long a call, including its compile, may take before it counts as hanging (%(default)s)",
    )
    command.add_argument(
        "--jobs",
        type=positive,
        default=default_jobs(),
        help=f"number of processes that call and compile (one for each core, at most {MOST_JOBS})",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a line for each subject; 1 if one of them failed."""
    failed = 0
    for line in examine(args.seconds, args.jobs):
        print(line, flush=True)
        failed += line.state == FAIL
    print(f"{failed} FAILED" if failed else "all is well")
    return 1 if failed else 0


def default_jobs() -> int:
    return min(cores(), MOST_JOBS)


def examine(seconds: float, jobs: int) -> Iterator[Line]:
    """Everything that the doctor looks at; seconds: what one call may take, of which `jobs` processes make
    some each."""
    yield _python()
    yield from packages()
    yield from _cuda()
    yield _compiler()
    yield _cache()
    yield _carried()
    yield from _answers(seconds, jobs)


def _python() -> Line:
    import cute_lce

    where = f"{platform.system()} {platform.machine()}"
    return Line(NOTE, "cute_lce", f"{cute_lce.__version__}, Python {platform.python_version()}, {where}")


# Packages


def packages() -> Iterator[Line]:
    """Whether what cute-lce requires is there, in the versions that it was tested with."""
    try:
        required = importlib.metadata.requires("cute-lce") or []
    except importlib.metadata.PackageNotFoundError:
        yield Line(
            NOTE, "packages", "cute-lce is not installed (a path to its sources is): nothing is required"
        )
        return
    for text in required:
        wanted = requirement(text)
        if wanted is None:
            continue
        name, operator, version = wanted
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Line(FAIL, name, f"got none, want {operator}{version}")
            continue
        right = found == version if operator == "==" else _numbers(found) >= _numbers(version)
        yield Line(PASS, name, found) if right else Line(FAIL, name, f"got {found}, want {operator}{version}")


def requirement(text: str) -> tuple[str, str, str] | None:
    """(name, "==" or ">=", version) of a requirement; None if it is an extra's, or another system's."""
    found = re.fullmatch(r"([\w.-]+)(?:\[.*\])?(==|>=)([\w.]+)(?:; *sys_platform == ['\"](\w+)['\"])?", text)
    if found is None:
        if "extra ==" in text:
            return None
        raise ValueError(f"requirement: got {text!r}, want NAME==VERSION or NAME>=VERSION")
    name, operator, version, system = found.groups()
    return (name, operator, version) if system in (None, sys.platform) else None


def _numbers(version: str) -> list[int]:
    """2.11.0+cu130 -> [2, 11, 0]."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


# The driver, the toolkit, the devices


def _cuda() -> Iterator[Line]:
    import torch

    from ..launch.device import gpu_of, serves

    version = driver.driver_version()
    none = "none: no libcuda.so.1 that answers"
    yield Line(NOTE, "driver", none if version is None else "supports CUDA {}.{}".format(*version))
    yield Line(NOTE, "torch's CUDA", torch.version.cuda or "none: this torch is built without")
    try:
        major, library = driver.toolkit()
        yield Line(PASS, "DSL's runtime library", f"CUDA {major}, {library}")
    except ImportError as error:
        yield Line(FAIL if sys.platform == "linux" else NOTE, "DSL's runtime library", str(error))
    for name, text in devices():
        yield Line(NOTE, name, text)
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if environment.IMPLEMENTATION == "streaming" or not serves(device, torch.bfloat16):
            continue
        try:
            gpu = gpu_of(device)
            yield Line(PASS, f"{device} kernels", f"{gpu.arch}, {gpu.sms} SMs")
        except RuntimeError as error:
            yield Line(FAIL, f"{device} kernels", str(error))


def _compiler() -> Line:
    command = (shlex.split(os.environ.get("CC", "")) or ["cc"])[0]
    found = shutil.which(command)
    if found is None:
        return Line(
            NOTE, "C compiler", f"{command}: not found; kernels that are compiled here need one (set CC)"
        )
    return Line(PASS, "C compiler", found)


def _cache() -> Line:
    try:
        cache.check()
    except OSError as error:
        return Line(FAIL, "compiled kernels", str(error))
    return Line(PASS, "compiled kernels", describe_cache())


def _carried() -> Line:
    try:
        unusable = any(cache.CARRIED.glob("*.so")) and not any(map(cache.carries, carried()))
        return Line(FAIL if unusable else NOTE, "carried kernels", describe_carried())
    except ImportError as error:
        return Line(FAIL, "carried kernels", str(error))


# Calls


def _answers(seconds: float, jobs: int) -> Iterator[Line]:
    """A line for each tiny call, made in other processes: one that hangs fails, and the next one runs."""
    from .calls import answer, calls

    asked = list(calls())
    if asked[0].device == "cpu":
        yield Line(NOTE, "no GPU", "calls take the streaming path, in plain torch; it is checked")
    for call, found in zip(asked, isolated.each(answer, asked, seconds, jobs), strict=True):
        subject = f"{call.device} {call.dtype} {call.kind}"
        if isinstance(found, isolated.Failure):
            yield Line(FAIL, subject, found.why)
            continue
        error = f"error {found.error:.1e}, {'within' if found.right else 'want at most'} {found.bound:.1e}"
        yield Line(PASS if found.right else FAIL, subject, f"{found.by}, {error}, {found.seconds:.2f} s")
