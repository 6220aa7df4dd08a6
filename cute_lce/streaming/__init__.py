"""The portable implementation: plain torch, window by window over the vocabulary, never the logits.

It is what a CPU, a GPU without kernels, fp32 and float64 run. The contract is implementation.py's.
"""

from ..implementation import Implementation, Statistics
from . import backward, forward, grad_in_forward, memory, shards, token_rows, token_stats


class Streaming:
    choose = staticmethod(memory.choose)
    empty_kept = staticmethod(forward.empty_kept)
    forward = staticmethod(forward.StreamingForward)
    unpacked = staticmethod(backward.unpacked)
    backward = staticmethod(backward.StreamingBackward)
    scale_gradients = staticmethod(grad_in_forward.scale_gradients)
    empty_source = staticmethod(grad_in_forward.empty_source)
    grad_in_forward = staticmethod(grad_in_forward.grad_in_forward)
    localize = staticmethod(shards.localize)
    merge = staticmethod(shards.merge)
    merge_sums = staticmethod(shards.merge_sums)


STREAMING: Implementation = Streaming()


class StreamingStatistics:
    choose = staticmethod(memory.choose_with_terms)
    empty_kept = staticmethod(token_stats.empty_kept)
    forward = staticmethod(token_rows.forward)
    backward = staticmethod(token_rows.backward)
    grad_in_forward = staticmethod(token_rows.grad_in_forward)


STATISTICS: Statistics = StreamingStatistics()
