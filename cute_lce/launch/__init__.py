"""The kernels' host side: what a call allocates and launches. The contract is implementation.py's.

Arch-neutral: what differs between architectures is in the plan and behind `compile`. Where a kernel does not
exist yet, the streaming implementation takes over.
"""

from ..implementation import Implementation
from ..streaming import STREAMING
from .backward import backward
from .choose import choose
from .device import DTYPES, serves
from .forward import empty_kept, forward


class Kernels:
    choose = staticmethod(choose)
    forward = staticmethod(forward)
    empty_kept = staticmethod(empty_kept)
    backward = staticmethod(backward)
    grad_in_forward = STREAMING.grad_in_forward
    scale_gradients = STREAMING.scale_gradients


KERNELS: Implementation = Kernels()

__all__ = ["DTYPES", "KERNELS", "serves"]
