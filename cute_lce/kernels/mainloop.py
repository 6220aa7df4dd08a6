"""The mainloop of an architecture."""

import importlib

from cute_lce.arch import KernelConfig


def mainloop(config: KernelConfig):
    """The GEMM class of the configuration's architecture: MAINLOOP of its module, the only one imported."""
    return importlib.import_module(f"cute_lce.kernels.{config.row.mainloop}").MAINLOOP
