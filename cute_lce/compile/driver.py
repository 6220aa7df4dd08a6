"""The driver and the CUDA toolkits of this machine: what can be compiled and loaded here."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

from ..arch import Architecture


@functools.cache
def driver_version() -> tuple[int, int] | None:
    """(major, minor) of the CUDA version that this machine's driver supports; None without a driver."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if status else (version.value // 1000, version.value % 1000 // 10)


@functools.cache
def _toolkits() -> dict[int, Path]:
    """CUDA major version -> runtime library, of each toolkit that the DSL is installed for."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    libraries = {}
    for folder in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        for library in Path(folder).glob("cu[0-9]*/lib/libcute_dsl_runtime.so"):
            libraries[int(library.parents[1].name.removeprefix("cu"))] = library
    return libraries


def toolkit() -> tuple[int, Path]:
    """(CUDA major version, runtime library) of the toolkit that compiles and loads here.

    The DSL's own choice: the newest one that the driver supports; without a driver, the newest.
    """
    toolkits, driver = _toolkits(), driver_version()
    if not toolkits:
        raise ImportError(
            "nvidia-cutlass-dsl: libcute_dsl_runtime.so is not installed; "
            "pip install 'nvidia-cutlass-dsl[cu13]'"
        )
    major = max((major for major in toolkits if driver is None or major <= driver[0]), default=max(toolkits))
    return major, toolkits[major]


def check_driver(row: Architecture, device: str) -> None:
    """Raise RuntimeError if this machine's driver is too old to load an architecture's code.

    device: its name in the error. To be called before the first compile for a device: the driver's own error,
    at a kernel's first launch, names neither the cause nor the remedy.
    """
    found, toolkits = driver_version(), _toolkits()
    least = max(row.least_driver, (min(toolkits, default=0), 0))
    if found is not None and found < least:
        raise RuntimeError(
            f"{device}: got a driver that supports CUDA {found[0]}.{found[1]}, which cannot load kernels "
            f"compiled for {row.name}; want one that supports CUDA {least[0]}.{least[1]} or later"
        )
