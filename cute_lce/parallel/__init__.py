"""Calls over several ranks of torch.distributed: the vocabulary in shards, and the tokens in slices."""

from ..ops import flops
from . import public as public
from .modules import VocabParallelLoss, gathered_weight

flops.register()

__all__ = ["VocabParallelLoss", "gathered_weight"]
