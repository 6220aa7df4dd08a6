"""The kernels' host side: what a call allocates and launches. The contract is implementation.py's.

Arch-neutral: what differs between architectures is in the plan and behind `compile`.
"""

from ..implementation import Implementation, Statistics
from . import backward, choose, forward, grad_in_forward, merge, multiply, packing, token_stats
from .device import DTYPES, serves


class Kernels:
    choose = staticmethod(choose.choose)
    empty_kept = staticmethod(forward.empty_kept)
    forward = staticmethod(forward.forward)
    backward = staticmethod(backward.backward)
    unpacked = staticmethod(packing.unpacked)
    empty_source = staticmethod(grad_in_forward.empty_source)
    grad_in_forward = staticmethod(grad_in_forward.grad_in_forward)
    scale_gradients = staticmethod(multiply.scale_gradients)
    localize = staticmethod(merge.localize)
    merge_sums = staticmethod(merge.merge_sums)
    merge = staticmethod(merge.merge)


KERNELS: Implementation = Kernels()


class KernelStatistics:
    choose = staticmethod(token_stats.choose)
    empty_kept = staticmethod(token_stats.empty_kept)
    forward = staticmethod(token_stats.forward)
    backward = staticmethod(token_stats.backward)
    grad_in_forward = staticmethod(token_stats.grad_in_forward)


STATISTICS: Statistics = KernelStatistics()

__all__ = ["DTYPES", "KERNELS", "STATISTICS", "serves"]
