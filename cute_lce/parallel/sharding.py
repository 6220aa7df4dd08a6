"""How the inner ops spread over a mesh, for the public ops with DTensors: what placements alone can say, and
no collective of ours. Tokens are sharded, or nothing is; DTensor redistributes anything else, so that a
sharded weight is gathered. cute_lce.linear_cross_entropy takes sharded vocabularies.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

OPS = (
    "forward",
    "forward_keep",
    "backward",
    "grad_in_forward",
    "scale_gradients",
    "token_stats",
    "token_stats_backward",
    "token_loss_gradients",
)
OF_CLASSES = {"linear_weight", "linear_bias", "class_weight"}
SUMS = {"num_valid", "dlinear_weight", "dlinear_bias", "dweight_accumulator", "dbias_accumulator"}
"""Over the tokens of each rank."""
BESIDE_KEPT = {"kept_scale", "onehot_ratio", "sorted_ids"}
"""Of the tokens of `kept`, whose placement decides. Replicate, though each rank has its own: DTensor then
passes a rank's tensor on as it is. As shards they would be padded to shapes that torch before 2.13 asks of
fakes on a CPU, where there are none of these numbers."""
GRADIENTS = {
    "need_dinput": ("dinput", "dinput_accumulator"),
    "need_dweight": ("dlinear_weight", "dweight_accumulator"),
    "need_dbias": ("dlinear_bias", "dbias_accumulator"),
}


@functools.cache
def register() -> None:
    """For the process, once; not at import, since torch.distributed.tensor takes longer than this package."""
    for name in OPS:
        op = getattr(torch.ops.cute_lce, name).default
        register_sharding(op)(functools.partial(_shardings, op))


def _shardings(op: torch._ops.OpOverload, *given: Any) -> list[tuple[list, list]]:
    """Of one dimension of a mesh: (placements of the results, of the arguments, None where no tensor is)."""
    values = dict(zip((argument.name for argument in op._schema.arguments), given, strict=True))
    results = [each.name for each in op._schema.returns]
    absent, total = {*_absent(values)}, values.get("total", False)

    def of_argument(name: str) -> Placement | None:
        # DTensor's descriptions of tensors; a shard of no rows it takes for an error.
        if not hasattr(values[name], "placements"):
            return None
        return Replicate() if values[name].shape[:1] == (0,) else _of_tokens(name)

    def of_result(name: str) -> Placement:
        if name in absent:
            return Replicate()
        return Partial() if name == "loss" and total else _of_tokens(name)

    tokens = [of_result(name) for name in results], [of_argument(name) for name in values]
    whole = [Replicate()] * len(results), [each and Replicate() for each in tokens[1]]
    kept = values.get("kept")
    if kept is None or kept.shape[1] == 0:
        return [whole, tokens]
    # The rows of what is kept are those of a rank's valid tokens: its placement must stay.
    sharded = {placement.is_shard() for placement in kept.placements}
    return [each for each, when in ((whole, False), (tokens, True)) if when in sharded]


def _absent(values: dict[str, Any]) -> Iterator[str]:
    """Results that are empty, for gradients that are not needed."""
    for need, names in GRADIENTS.items():
        if not values.get(need, True):
            yield from names


def _of_tokens(name: str) -> Placement:
    """Where the tokens are sharded."""
    if name in OF_CLASSES or name in BESIDE_KEPT:
        return Replicate()
    return Partial() if name in SUMS else Shard(0)
