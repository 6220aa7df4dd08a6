"""The portable implementation: plain torch, window by window over the vocabulary, never the logits.

It is what a CPU, a GPU without kernels, fp32 and float64 run. The contract is implementation.py's.
"""

from ..implementation import Implementation
from .backward import StreamingBackward
from .forward import StreamingForward, empty_kept
from .grad_in_forward import grad_in_forward, scale_gradients
from .memory import choose


class Streaming:
    choose = staticmethod(choose)
    forward = staticmethod(StreamingForward)
    empty_kept = staticmethod(empty_kept)
    backward = staticmethod(StreamingBackward)
    grad_in_forward = staticmethod(grad_in_forward)
    scale_gradients = staticmethod(scale_gradients)


STREAMING: Implementation = Streaming()
