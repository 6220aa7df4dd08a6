"""The mainloop of an architecture."""

import importlib

from cute_lce.arch import KernelConfig

CLASSES = {"gemm_sm90": "GemmSm90", "gemm_sm100": "GemmSm100"}


def mainloop(config: KernelConfig):
    """The GEMM class of the configuration's architecture; only the one that is used is imported."""
    name = config.row.mainloop
    return getattr(importlib.import_module(f"cute_lce.kernels.{name}"), CLASSES[name])
