"""`cute-lce report`: what the authors want to know of a machine that they do not have, in one file."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import cute_lce

from ..measure import isolated, records
from . import bench, doctor
from .terminal import Refused, positive, unwritable

GPU_SHAPES = (
    bench.Shape(1024, 4096, 128256),
    bench.GPU_SHAPE,
    bench.Shape(8192, 4096, 128256, "float16"),
    bench.Shape(4096, 7168, 151936),
    bench.Shape(32768, 4096, 262144),
)
CPU_SHAPES = (bench.Shape(64, 256, 8192),)
SHOWN, KEPT = 60, 1200
"""Lines of a program's output: failures that are shown, and what is kept of its end."""
PROGRAM_MINUTES = 20
"""A program that takes longer hangs."""
GRID = ("--shapes", "forward", "backward", "random:7:24", "--pass", "fwd", "fwd_bwd", "--quick")
LOSSES = ("--providers", "cute_lce", "torch_compile", "torch_eager_bf16ce", "--workspace-mb", "ample")


class Section(NamedTuple):
    """A part of the report. well: whether all is as it should be. lines: to read. data: all of it."""

    name: str
    well: bool
    seconds: float
    lines: list[str]
    data: Any


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "report",
        help="write one file to send: doctor, bench and, in a clone, the GPU tests and measurements",
    )
    command.add_argument("--out", type=Path, help="the file (cute-lce-report-GPU-DATE.json, in this folder)")
    command.add_argument(
        "--minutes", type=positive, default=90, help="about how many minutes it may take (%(default)s)"
    )
    command.add_argument(
        "--no-tests", action="store_true", help="leave out the tests and measurements of a clone"
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report, again after each section, so that a machine that fails leaves what there is; 1 if a
    section is not well."""
    device = bench.default_device()
    origin = records.provenance(device, "cute-lce report")
    path = args.out or Path(_file_name(origin["gpu"]))
    check(path)
    done: list[Section] = []
    end = time.monotonic() + 60 * args.minutes
    for name, make in _sections(device, None if args.no_tests else checkout(), end):
        print(f"{name} ...", flush=True)
        started = time.monotonic()
        try:
            well, lines, data = make()
        except Exception as error:  # The others are worth having.
            well, lines, data = False, [f"{type(error).__name__}: {error}"], None
        section = Section(name, well, round(time.monotonic() - started, 1), lines, data)
        print("\n".join(f"    {line}" for line in section.lines), flush=True)
        done.append(section)
        write(path, origin, done)
    wrong = [section.name for section in done if not section.well]
    print(f"{path}: " + (f"not well: {', '.join(wrong)}" if wrong else "all is well"))
    print("please send this file, as in an issue of the repository: it has versions, paths, results")
    return 1 if wrong else 0


def checkout() -> Path | None:
    """The folder with the package's tests and bench, where it runs from a clone."""
    root = Path(cute_lce.__file__).resolve().parent.parent
    return root if (root / "tests" / "gpu").is_dir() and (root / "bench" / "run.py").is_file() else None


def check(path: Path) -> None:
    """Raise Refused where no report can be written."""
    if why := unwritable(path):
        raise Refused(f"--out: got {path}, {why}")


def write(path: Path, origin: dict[str, Any], sections: Sequence[Section]) -> None:
    """Replace the file: what a person reads first, then everything."""
    summary = [
        f"{'well    ' if each.well else 'NOT WELL'}  {each.name}, {each.seconds:g} s" for each in sections
    ]
    for section in sections:
        summary += ["", section.name, *(f"    {line}" for line in section.lines)]
    report = {**origin, "summary": summary, "sections": [each._asdict() for each in sections]}
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def _file_name(gpu: str) -> str:
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M")
    return f"cute-lce-report-{''.join(c if c.isalnum() else '-' for c in gpu)}-{today}.json"


Made = tuple[bool, list[str], Any]


def _sections(
    device: torch.device, root: Path | None, end: float
) -> Iterator[tuple[str, Callable[[], Made]]]:
    """Each section's name and what makes it, the quickest first. end: of time.monotonic, for programs."""
    if device.type == "cuda":
        yield "nvidia-smi", lambda: _program(("nvidia-smi", "-q"), Path.cwd(), end)
    yield "doctor", _doctor
    yield "bench", lambda: _bench(device)
    if root is None or device.type != "cuda":
        return
    # A file each: after a fault, which ends a process's use of the device, the next begins anew.
    for path in sorted((root / "tests" / "gpu").glob("test_*.py")):
        name = path.relative_to(root).as_posix()
        command = (sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", name)
        yield f"pytest {name}", lambda command=command: _program(command, root, end)
    yield "bench.run", lambda: _grid(root, end)


def _doctor() -> Made:
    lines = list(doctor.examine(seconds=300, jobs=doctor.default_jobs()))
    well = all(line.state != doctor.FAIL for line in lines)
    return well, [*map(str, lines)], [line._asdict() for line in lines]


def _bench(device: torch.device) -> Made:
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    well, lines, data = True, [], []
    for shape, found in zip(shapes, isolated.each(_measure, shapes, seconds=600), strict=True):
        if isinstance(found, isolated.Failure):
            well = False
            lines.append(f"{shape}: {found.why}")
        else:
            lines += found.lines()
            data.append({**found._asdict(), "rows": [row._asdict() for row in found.rows]})
            well &= all(not row.failed for row in found.rows if row.name == bench.OURS)
    return well, lines, data


def _measure(shape: bench.Shape) -> bench.Found:
    return bench.measure(shape, bench.default_device())


def _grid(root: Path, end: float) -> Made:
    """bench.run's, with the rows that it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "grid.json")
        left = max(0, int(end - time.monotonic()))
        options = ("--deadline", str(left), "--out", str(out))
        command = (sys.executable, "-m", "bench.run", *GRID, *LOSSES, *options)
        well, lines, data = _program(command, root, end + 600)
        return well, lines, {"output": data, "rows": records.read([out]) if out.exists() else []}


def _program(command: Sequence[str], folder: Path, end: float) -> Made:
    """Run a program, until `end` at most; what it ended with, failures and the last line, and its output."""
    left = min(end - time.monotonic(), 60 * PROGRAM_MINUTES)
    if left <= 0:
        return False, ["left out: out of time (--minutes)"], []
    paths = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = f"ended with status {process.wait(left)}"
        except subprocess.TimeoutExpired:
            status = f"was ended after {left:.0f} s, in the last line above"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    shown = [line for line in lines if line.startswith(("FAILED", "ERROR", "geometric"))][:SHOWN]
    return process.returncode == 0, [*shown, *lines[-1:], status], lines[-KEPT:]
