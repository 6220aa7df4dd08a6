"""Fused linear cross entropy: the loss of ``hidden @ weight.T`` without the logits."""

from .functional import linear_cross_entropy
from .logit_term import LogitTerm
from .logprob import LinearLogprob, linear_logprob
from .module import LinearCrossEntropy
from .options import LossOptions, TokenStats
from .sampled import sampled_linear_cross_entropy

__all__ = [
    "LinearCrossEntropy",
    "LinearLogprob",
    "LogitTerm",
    "LossOptions",
    "TokenStats",
    "__version__",
    "linear_cross_entropy",
    "linear_logprob",
    "sampled_linear_cross_entropy",
]
__version__ = "0.1.0.dev0"
