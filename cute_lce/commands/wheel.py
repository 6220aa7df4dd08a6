"""Build a wheel that carries compiled kernels, so that a first call on a new machine loads them.

    python3 -m cute_lce.commands.wheel                            # bfloat16: what plan.kernels.carried lists
    python3 -m cute_lce.commands.wheel --dtype bfloat16 float16
    python3 -m cute_lce.commands.wheel --cache ~/kernels          # keeps what it compiles for the next wheel

It needs a checkout and no GPU, and runs on the kind of machine that the wheel is for, x86-64 or aarch64
Linux. The kernels' host parts are for every CPU of it (cute_lce/compile/baseline.py). What is built is a copy
of the sources: the checkout carries no kernels, and neither does what pip makes of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cute_lce.commands.compile import compiled, cores
from cute_lce.commands.terminal import positive
from cute_lce.compile import cache
from cute_lce.plan.kernels import Key, carried

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = f"manylinux_2_28_{platform.machine()}"
"""That of the DSL's own wheels. The kernels ask glibc for nothing."""
BUILD = """
import json, sys
from setuptools import build_meta
name = getattr(build_meta, sys.argv[1])(sys.argv[2], json.loads(sys.argv[3]))
print("\\n" + name)
"""


def build_wheel(keys: Sequence[Key], out: Path, kept: Path, jobs: int = 1) -> Path:
    """Write a wheel into `out` that carries `keys`, compiled into `kept` where they are not there already."""
    # Before the kernels, which take minutes.
    out.mkdir(parents=True, exist_ok=True)
    os.environ["CUTE_LCE_CACHE_DIR"] = str(kept)
    for seconds, key in compiled(keys, min(jobs, len(keys))):
        print(f"{seconds:6.2f} s  {key}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_sources(Path(folder))
        target = copy / "cute_lce" / cache.CARRIED.name
        target.mkdir()
        for key in keys:
            path = kept / cache.file_name(key)
            # Readable for every user of the machine that it is installed on.
            shutil.copyfile(path, target / path.name)
            (target / path.name).chmod(0o644)
        return build(copy, "build_wheel", out, {"--build-option": [f"--plat-name={PLATFORM}"]})


def copy_sources(folder: Path) -> Path:
    """What a wheel is built from, in `folder`."""
    copy = folder / "sources"
    ignored = shutil.ignore_patterns("__pycache__", cache.CARRIED.name)
    shutil.copytree(ROOT / "cute_lce", copy / "cute_lce", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def build(sources: Path, kind: str, out: Path, settings: dict[str, list[str]] | None = None) -> Path:
    """Have setuptools build sources; the file that it writes into `out`. kind: build_wheel, build_sdist."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", BUILD, kind, str(out.resolve()), json.dumps(settings)]
    printed = subprocess.run(command, cwd=sources, check=True, stdout=subprocess.PIPE, text=True).stdout
    return out / printed.splitlines()[-1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="cute_lce.commands.wheel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    dtypes = ("bfloat16", "float16")
    add = parser.add_argument
    add("--dtype", nargs="+", choices=dtypes, default=["bfloat16"], help="dtypes of the operands (bfloat16)")
    add("--out", type=Path, default=Path("dist"), help="folder for the wheel (%(default)s)")
    add("--cache", type=Path, help="folder in which compiled kernels are kept (default: a temporary one)")
    add("--jobs", type=positive, default=cores(), help="number of processes that compile (%(default)s)")
    args = parser.parse_args(argv)
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out: got {args.out}, a file, want a folder")
    started = time.perf_counter()
    keys = carried(args.dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = build_wheel(keys, args.out, args.cache or Path(folder), args.jobs)
    taken = time.perf_counter() - started
    print(f"{path}: {len(keys)} kernels, {path.stat().st_size / 2**20:.1f} MiB, {taken:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
