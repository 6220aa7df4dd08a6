"""A call whose vocabulary is sharded over a group, against float64 of the whole on one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cute_lce import linear_cross_entropy
from tests.distributed.ranks import Rank
from tests.numerics import Case, assert_close


def shard_sizes(V: int, ranks: int) -> list[int]:
    """Uneven: the first rank has some more, the last what is left."""
    size = V // ranks
    sizes = [size + 5, *[size] * (ranks - 2), 0]
    return [*sizes[:-1], V - sum(sizes)]


def slice_of(tensor: Tensor, rank: Rank, dim: int) -> Tensor:
    """A rank's slice of a dimension."""
    return tensor.chunk(rank.ranks, dim)[rank.rank]


def check(
    here: Rank,
    case: Case,
    *,
    sizes: Sequence[int] | None = None,
    reduction: str = "mean",
    sequence_dim: int | None = None,
    sliced_target: bool = False,
    clean: Case | None = None,
    call: Any = linear_cross_entropy,
    need_dinput: bool = True,
    need_dweight: bool = True,
    **options: Any,
) -> None:
    """Forward and backward on this rank, compared with its part of what float64 has; losses have the same
    bits on every rank. sizes: of the shards; None: equal ones, whose start is not given. clean: the case with
    what should not be read replaced."""
    case, clean = (each.to(here.device) for each in (case, clean or case))
    V = case.linear_weight.shape[0]
    every = list(sizes or [V // here.ranks] * here.ranks)
    start = sum(every[: here.rank])
    rows = slice(start, start + every[here.rank])
    dim = None if sequence_dim is None else sequence_dim % case.target.dim()

    def own(tensor: Tensor) -> Tensor:
        return tensor if dim is None else slice_of(tensor, here, dim).contiguous()

    hidden = own(case.input).clone().requires_grad_(need_dinput)
    weight = case.linear_weight[rows].clone().requires_grad_(need_dweight)
    target = own(case.target) if sliced_target else case.target
    upstream = case.upstream(reduction)
    loss = call(
        *(hidden, weight, target),
        reduction=reduction,
        ignore_index=case.ignore_index,
        logit_scale=case.logit_scale,
        tp_group=here.group,
        vocab_start=None if sizes is None else start,
        sequence_dim=sequence_dim,
        **options,
    )
    dloss = own(upstream) if sliced_target and reduction == "none" else upstream
    if need_dinput or need_dweight:
        loss.backward(dloss.to(loss.dtype))
    expected, baseline = clean.expected(upstream, reduction), clean.baseline(upstream, reduction)
    takes_own = sliced_target and reduction == "none"
    want, plain = (own(each[0]) if takes_own else each[0] for each in (expected, baseline))
    assert loss.shape == want.shape
    assert_close("loss", loss.detach(), want, plain)
    if not takes_own:
        assert here.is_same(loss.detach())
    if need_dinput:
        assert hidden.grad is not None
        assert hidden.grad.dtype is case.input.dtype
        assert_close("dinput", hidden.grad, own(expected[1]), own(baseline[1]))
        assert dim is not None or here.is_same(hidden.grad)
    if need_dweight:
        assert weight.grad is not None
        assert weight.grad.dtype is case.input.dtype
        assert_close("dweight", here.join(weight.grad), expected[2], baseline[2])
