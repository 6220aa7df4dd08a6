"""Fused linear cross entropy: the loss of ``hidden @ weight.T`` without the logits."""

from .functional import linear_cross_entropy
from .module import LinearCrossEntropy
from .options import LossOptions

__all__ = ["LinearCrossEntropy", "LossOptions", "__version__", "linear_cross_entropy"]
__version__ = "0.1.0.dev0"
