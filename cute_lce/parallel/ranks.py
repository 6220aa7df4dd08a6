"""CUTE_LCE_CHECK_RANKS=1: whether the ranks of a group make the same call."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import environment
from ..ops.plain import is_plain_eager


def are_checked(input: Tensor, weight: Tensor, target: Tensor) -> bool:
    """Whether a call is: an eager one. What torch.compile traces has no values."""
    return environment.CHECK_RANKS and is_plain_eager(input, weight, target)


def check(
    tensors: tuple[Tensor, Tensor, Tensor],
    needs: tuple[bool, bool],
    loss: tuple,
    compute: Any,
    spread: Any,
    **others: Any,
) -> None:
    """Raise ValueError on every rank of the group if two of them differ in what should be equal: input's and
    target's shapes, dtypes and values where each has all tokens, d, options, and which gradients are needed;
    where shards should be equal, their rows; or if two have a class in common. others: what else should be
    equal, by its name.

    It gathers Python objects and reads every number: for debugging.
    """
    input, weight, target = tensors
    group, sliced = spread.tp_group, spread.sequence_dim is not None
    facts = {
        "input's shape": tuple(input.shape),
        "target's shape": tuple(target.shape),
        "dtypes": tuple(str(tensor.dtype) for tensor in tensors),
        "linear_weight's features": weight.shape[1],
        "whether input and linear_weight need gradients": needs,
        "the loss's options": tuple(loss),
        "schedule and window": (compute.schedule, compute.window),
        # With a window it decides how often statistics are gathered.
        "workspace_mb, beside a window": compute.window and compute.workspace_mb,
        "whether vocab_start is given": spread.vocab_start is not None,
        "linear_weight's rows, without vocab_start": None if spread.vocab_start is not None else len(weight),
        "sequence_dim and grad_input": spread[2:4],
        **others,
    }
    if not sliced:
        facts["input's values"] = digest(input)
    if has_every_token(input, target, spread):
        facts["target's values"] = digest(target)
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, (facts, spread.vocab_start, len(weight)), group=group)
    every = [each for each, _, _ in gathered]
    # Of all ranks: one that makes another kind of call has facts that this one lacks.
    for name in dict.fromkeys(name for each in every for name in each):
        found = [each.get(name) for each in every]
        if any(other != found[0] for other in found):
            raise ValueError(f"tp_group: its ranks differ in {name}: got {found}, want the same on each")
    if spread.vocab_start is not None:
        _check_classes([(start, start + rows) for _, start, rows in gathered])


def _check_classes(shards: list[tuple[int, int]]) -> None:
    """Raise ValueError if two ranks' shards, from a class up to another, overlap."""
    ordered = sorted(shards)
    if any(start < stop for (_, stop), (start, _) in itertools.pairwise(ordered)):
        raise ValueError(
            f"vocab_start: got ranks with the classes {', '.join(f'{a} to {b - 1}' for a, b in shards)}, "
            "want each class on one"
        )


def has_every_token(input: Tensor, target: Tensor, spread: Any) -> bool:
    """Whether target is the same on every rank, and no slice."""
    return spread.sequence_dim is None or target.shape != input.shape[:-1]


def kind(tensor: Tensor | None) -> tuple | None:
    """What a gather of a tensor must find equal."""
    return None if tensor is None else (tuple(tensor.shape), str(tensor.dtype))


def digest(tensor: Tensor) -> int:
    """Of a tensor's values, as bytes, in which nan is equal to itself."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
