"""CUTE_LCE_CHECK_RANKS=1: whether the ranks of a group make the same call."""

from __future__ import annotations

import os
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Read once, not in every call.
CHECK_RANKS = os.environ.get("CUTE_LCE_CHECK_RANKS", "0") not in ("", "0")


def check(
    tensors: tuple[Tensor, Tensor, Tensor],
    needs: tuple[bool, bool],
    loss: tuple,
    compute: Any,
    spread: Any,
    **others: Any,
) -> None:
    """Raise ValueError on every rank of the group if two of them differ in what should be equal: input's and
    target's shapes, dtypes and values where each has all tokens, d, options, and which gradients are needed.
    others: what else should be, by its name.

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
        "whether vocab_start is given": spread.vocab_start is not None,
        "sequence_dim and grad_input": spread[2:4],
        **others,
    }
    if not sliced:
        facts["input's values"] = digest(input)
    if not sliced or target.shape != input.shape[:-1]:
        facts["target's values"] = digest(target)
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, facts, group=group)
    for name in facts:
        found = [each.get(name) for each in every]
        if any(other != found[0] for other in found):
            raise ValueError(f"tp_group: its ranks differ in {name}: got {found}, want the same on each")


def digest(tensor: Tensor) -> int:
    """Of a tensor's values, as bytes, in which nan is equal to itself."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
