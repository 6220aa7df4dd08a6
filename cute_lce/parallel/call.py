"""The steps of a call over a group: checks of what this rank sees, tokens, schedule, passes, a view."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..arguments import Operands
from ..implementation import Request
from ..ops import Destination, inner
from ..ops.autograd import apply_of
from ..ops.call import needs_gradient
from ..ops.checks import autocast, check_tensors
from ..ops.plain import innermost_transform
from ..ops.prepared import cache, key_of, remember
from ..ops.select import implementation
from ..options import ComputeOptions, LossOptions
from ..plan.problem import Problem
from ..scalars import python_number
from . import ops, ranks
from .collectives import ctas_of
from .tensor import Shard, ShardedPasses
from .tokens import Tokens, tokens_of

GRAD_INPUTS = ("reduced", "partial")


class Spread(NamedTuple):
    """The public call's arguments about the group, by their names."""

    tp_group: ProcessGroup
    vocab_start: int | None = None
    sequence_dim: int | None = None
    grad_input: str = "reduced"
    sm_margin: int | None = None


def spread_of(tp_group: Any, vocab_start: Any, sequence_dim: Any, grad_input: Any, sm_margin: Any) -> Spread:
    """The arguments, checked as far as that needs no tensors. Raises TypeError and ValueError by name."""
    vocab_start, sequence_dim, sm_margin = map(python_number, (vocab_start, sequence_dim, sm_margin))
    if tp_group is None:
        given = {"vocab_start": vocab_start is not None, "sequence_dim": sequence_dim is not None}
        given["grad_input"] = not isinstance(grad_input, str) or grad_input != "reduced"
        given["sm_margin"] = sm_margin is not None
        name = next(name for name, is_given in given.items() if is_given)
        raise ValueError(f"{name}: got a value without tp_group, want it only with a tp_group")
    if not isinstance(tp_group, ProcessGroup):
        what = "a group that this rank is not in" if tp_group is dist.GroupMember.NON_GROUP_MEMBER else ""
        raise TypeError(
            f"tp_group: got {what or type(tp_group).__name__}, want a torch.distributed.ProcessGroup or None"
        )
    if vocab_start is not None:
        # Of DTensors with a symbolic number of classes it is symbolic.
        if isinstance(vocab_start, bool) or not isinstance(vocab_start, int | torch.SymInt):
            raise TypeError(f"vocab_start: got {type(vocab_start).__name__}, want an int or None")
        if not 0 <= vocab_start < 2**31:
            raise ValueError(f"vocab_start: got {vocab_start}, want at least 0 and less than 2**31")
        vocab_start = cast("int", vocab_start)
    if isinstance(sequence_dim, bool) or not isinstance(sequence_dim, int | None):
        raise TypeError(f"sequence_dim: got {type(sequence_dim).__name__}, want an int or None")
    if not isinstance(grad_input, str) or grad_input not in GRAD_INPUTS:
        raise ValueError(f"grad_input: got {grad_input!r}, want one of {', '.join(map(repr, GRAD_INPUTS))}")
    if grad_input == "partial" and sequence_dim is not None:
        raise ValueError(
            "grad_input: got 'partial' with sequence_dim, where a rank's gradient is its slice of the sum; "
            "want 'reduced'"
        )
    if sm_margin is not None:
        if isinstance(sm_margin, bool) or not isinstance(sm_margin, int):
            raise TypeError(f"sm_margin: got {type(sm_margin).__name__}, want an int or None")
        if not 0 <= sm_margin < 2**31:
            raise ValueError(f"sm_margin: got {sm_margin}, want at least 0 and less than 2**31")
    return Spread(tp_group, vocab_start, sequence_dim, grad_input, sm_margin)


def shard_of(spread: Spread, linear_weight: Tensor) -> Shard:
    """Of this rank's rows of the weight."""
    group, margin = spread.tp_group, spread.sm_margin
    if margin is None:
        margin = ctas_of(group, linear_weight.device)
    sliced, reduces = spread.sequence_dim is not None, spread.grad_input == "reduced"
    start = first_class(spread, linear_weight.shape[0])
    return Shard(group, start, spread.vocab_start is None, sliced, reduces, margin)


def first_class(spread: Spread, V: int) -> int:
    """Of this rank's shard of so many."""
    given = spread.vocab_start
    return spread.tp_group.rank() * V if given is None else given


def call(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss: LossOptions,
    compute: ComputeOptions,
    spread: Spread,
    plain: bool,
) -> Tensor:
    """linear_cross_entropy, or the op. plain: ops.is_plain_eager of the tensors."""
    if plain:
        return linear_cross_entropy(input, linear_weight, target, loss, compute, spread, watched=False)
    group, *where = spread
    options = {**dict(zip(Spread._fields[1:], where, strict=True)), **loss._asdict(), **compute._asdict()}
    op = torch.ops.cute_lce.sharded_linear_cross_entropy.default
    return op(input, linear_weight, target, group=group.group_name, **options)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss: LossOptions,
    compute: ComputeOptions,
    spread: Spread,
    *,
    watched: bool,
    destination: Destination | None = None,
) -> Tensor:
    """The loss; see functional.linear_cross_entropy. watched: whether something intercepts the dispatcher."""
    input, linear_weight = autocast(input, linear_weight)
    needs = needs_gradient(input, linear_weight)
    if not needs[1]:
        destination = None
    try:
        how = needs, compute, spread
        key = None if watched else key_of(input, linear_weight, target, loss, how)
    except RuntimeError:
        # A layout without strides, which is refused.
        key = None
    call: _Call | None = cache.get(key) if key else None
    if call is None:
        operands = Operands(input, linear_weight, target)
        call = _prepare(operands, needs, loss, compute, spread, watched)
        if key:
            remember(key, call)
    if ranks.are_checked(input, linear_weight, target):
        ranks.check((input, linear_weight, target), needs, loss, compute, spread)
    tokens, group = call.tokens, spread.tp_group
    flat = flatten_watched(target, tokens, group) if watched else tokens.flatten(target, group)
    hidden = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
    result = call.run(loss, destination, hidden, linear_weight, flat)
    if loss.reduction != "none":
        return result
    return of_target(result, tokens, group)


class _Call(NamedTuple):
    """A call of one kind, checked and decided.

    run: computes the loss, of a loss whose numbers may differ from call to call, a destination or None, and
    operands of shapes (n, d), (V, d) and (n,). tokens: where they are.
    """

    run: Callable[..., Tensor]
    tokens: Tokens


def _prepare(
    operands: Operands,
    needs: tuple[bool, bool],
    loss: LossOptions,
    compute: ComputeOptions,
    spread: Spread,
    watched: bool,
) -> _Call:
    """Check what this rank sees of a call, choose its schedule, and bind what computes it."""
    group = spread.tp_group
    hidden, weight, target = operands
    tokens = tokens_of(hidden, target, spread.sequence_dim, group)
    check_tensors(Operands(hidden, weight, as_inputs(target, tokens, group)))
    refuse_grad_in_forward(compute)
    V, d = weight.shape
    n = hidden.numel() // d * (1 if tokens.dim is None else group.size())
    problem = Problem(n, d, V, hidden.dtype is torch.float16, *needs, shard=True)
    schedule, kept = implementation(hidden.device, hidden.dtype).choose(
        problem, hidden.dtype, hidden.device, compute.schedule, loss.reduction, compute.limits
    )
    kept = kept if schedule == "keep" else 0
    request = Request(compute.limits, kept, *needs, statistics=problem.wants_gradient)
    shard = shard_of(spread, weight)
    arguments = *request.limits, request.kept_columns, group.group_name, *shard[1:]
    if watched:
        return _Call(functools.partial(_run_op, arguments), tokens)
    passes = ShardedPasses(operands, request, shard)
    if not problem.wants_gradient:
        return _Call(functools.partial(_run_for_loss, passes), tokens)
    return _Call(functools.partial(apply_of(ops.ShardedFunction), passes.run, passes, arguments), tokens)


def refuse_grad_in_forward(compute: ComputeOptions) -> None:
    if compute.schedule == "grad_in_forward":
        raise ValueError(
            "schedule: got 'grad_in_forward' with tp_group, whose statistics are merged after the forward; "
            "want 'recompute', 'keep' or 'auto'"
        )


def _run_op(arguments: tuple, loss: LossOptions, _destination: None, *operands: Tensor) -> Tensor:
    return inner.call(ops.sharded_forward, *operands, *loss, *arguments)[0]


def _run_for_loss(passes: ShardedPasses, loss: LossOptions, _destination: None, *operands: Tensor) -> Tensor:
    return passes.run(Operands(*operands), loss)[0].loss


def as_inputs(target: Tensor, tokens: Tokens, group: ProcessGroup) -> Tensor:
    """A view of target of the shape that input's slice has."""
    if tokens.dim is None or not tokens.whole or target.is_nested:
        return target
    return target.narrow(tokens.dim, 0, target.shape[tokens.dim] // group.size())


def flatten_watched(target: Tensor, tokens: Tokens, group: ProcessGroup) -> Tensor:
    """Tokens.flatten, whose collective is an op's."""
    if tokens.whole:
        return tokens.flatten(target, group)
    return ops.gather_rows(tokens.rows(target), group.group_name, group.size()).flatten(0, 1)


def of_target(rows: Tensor, tokens: Tokens, group: ProcessGroup) -> Tensor:
    """Numbers (n,) or (n, K), rank by rank where input is a slice, in target's shape; those of a slice have
    upstream gradients that are gathered."""
    if tokens.whole:
        return tokens.restore(rows, group)
    transform = innermost_transform()
    if transform is not None and transform.key() == torch._C._functorch.TransformType.Grad:  # pyright: ignore
        raise ValueError("target: got a slice under torch.func's grad, vjp or jacrev, want it whole")
    own = _Own.apply(rows, group.group_name, group.size(), group.rank())
    return own.view((*tokens.shape, *rows.shape[1:]))


class _Own(torch.autograd.Function):
    """This rank's of all ranks' rows (n, ...), each of which has a gradient on its own rank."""

    @staticmethod
    def forward(ctx, rows, group, count, rank):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.count = group, count
        return rows.unflatten(0, (count, -1))[rank].clone()

    @staticmethod
    def backward(ctx, dloss):  # pyright: ignore[reportIncompatibleMethodOverride]
        return ops.gather_rows(dloss, ctx.group, ctx.count).flatten(0, 1), None, None, None
