"""`cute-lce info`: versions, devices, and the path that a call takes on each."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform

from .. import environment
from ..compile import cache
from ..plan.kernels import carried
from .terminal import print_table

PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python")


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "info", help="print versions, devices, and which implementation a call uses on each"
    )
    command.set_defaults(run=run)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def run(args: argparse.Namespace) -> int:
    """Print versions, the devices, and which implementation serves a call on each, with the reason."""
    import torch

    import cute_lce

    versions = {package: _version(package) for package in PACKAGES}
    versions["torch"] = f"{torch.__version__}, built for CUDA {torch.version.cuda or 'none'}"
    print_table(
        [
            ("cute_lce", cute_lce.__version__),
            ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
            *versions.items(),
        ]
    )
    print()
    print_table([*devices(), ("compiled kernels", describe_cache()), ("carried kernels", describe_carried())])
    return 0


def describe_cache() -> str:
    """How many files the cache holds, and where."""
    folder = cache.cache_dir()
    if os.path.lexists(folder) and not os.path.isdir(folder):
        return f"none: {folder} is no folder"
    sizes = []
    # Other processes may remove what was listed.
    with contextlib.suppress(OSError):
        for file in folder.glob("*.so"):
            with contextlib.suppress(OSError):
                sizes.append(file.stat().st_size)
    return f"{len(sizes)} in {folder}, {sum(sizes) / 2**20:.1f} MiB"


def describe_carried() -> str:
    """How many kernels came with the package, and whether they are for what is installed."""
    files = len(list(cache.CARRIED.glob("*.so")))
    if not files:
        return "none: kernels are compiled when they are first needed"
    usual = carried()
    usable = sum(map(cache.carries, usual))
    if not usable:
        return f"{files} for other versions than those that are installed: kernels are compiled"
    return f"{files}, with {usable} of the {len(usual)} of bfloat16"


def devices() -> list[tuple[str, str]]:
    """(device and dtype, the implementation there and why) for the CPU and every CUDA device."""
    import torch

    from ..ops.select import DTYPES, implementation
    from ..streaming import STREAMING

    rows = [("cpu", "streaming path: the kernels are for GPUs")]
    if not torch.cuda.is_available():
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "no usable CUDA device"
        return [*rows, ("cuda", f"not there: {reason}")]
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        major, minor = torch.cuda.get_device_capability(device)
        properties = torch.cuda.get_device_properties(device)
        name, sms = properties.name, properties.multi_processor_count
        rows.append((str(device), f"{name}, compute capability {major}.{minor}, {sms} SMs"))
        served = [dtype for dtype in DTYPES if implementation(device, dtype) is not STREAMING]
        for dtype in DTYPES:
            if dtype in served:
                path = "kernels"
            elif environment.IMPLEMENTATION == "streaming":
                path = "streaming path: CUTE_LCE_IMPLEMENTATION=streaming"
            elif served:
                path = f"streaming path: the kernels take {' and '.join(map(_dtype, served))}"
            else:
                path = f"streaming path: no kernels for compute capability {major}.{minor}"
            rows.append((f"{device} {_dtype(dtype)}", path))
    return rows


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
