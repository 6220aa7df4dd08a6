"""What a plan depends on, besides the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

KIB, MIB = 1 << 10, 1 << 20


class Problem(NamedTuple):
    """The sizes of a call and the gradients that it needs.

    n, d, vocab: tokens, features, classes. half: whether the operands are float16, whose range is too small
    for grad_scale. need_dinput, need_dweight: which gradients are needed. keeps_logits: whether what is kept
    are logits, of which the backward makes dlogits, a stripe at a time or, with overwrites, all at once in
    their place. shard: whether the classes are a shard's, whose gradient by tokens is summed over the ranks.
    adds: whether dweight is added to a tensor of the caller's, and is no result. need_dbias: whether the
    gradient by a bias is needed, for which a backward sums dlogits over slabs of tokens.
    """

    n: int
    d: int
    vocab: int
    half: bool = False
    need_dinput: bool = True
    need_dweight: bool = True
    keeps_logits: bool = False
    shard: bool = False
    overwrites: bool = False
    adds: bool = False
    need_dbias: bool = False

    @property
    def has_stripes_of_logits(self) -> bool:
        """Whether dlogits of what is kept have memory of their own, a stripe at a time."""
        return self.keeps_logits and not self.overwrites

    @property
    def wants_gradient(self) -> bool:
        return self.need_dinput or self.need_dweight


class Limits(NamedTuple):
    """The caller's window in columns and workspace in bytes; 0: none given."""

    window: int = 0
    workspace: int = 0


NO_LIMITS = Limits()


class Collective(NamedTuple):
    """What runs beside a GEMM for a sum over the ranks of a group. seconds: that it is predicted to take.
    sms: that it takes of the GPU."""

    seconds: float
    sms: int


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    return ceil_div(a, multiple) * multiple


def steps(most: int, fine: int) -> Iterator[int]:
    """Numbers from 1 to `most`: all up to twice `fine`, then `fine` or more until they have doubled."""
    value = 1
    while value < most:
        yield value
        value += max(value // fine, 1)
    yield most
