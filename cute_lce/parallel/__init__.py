"""Calls over several ranks of torch.distributed: the vocabulary in shards, and the tokens in slices."""

from .call import call, linear_cross_entropy, spread_of

__all__ = ["call", "linear_cross_entropy", "spread_of"]
