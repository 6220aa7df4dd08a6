"""What is registered of placements says the same of a result and of the argument that it becomes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import cute_lce  # noqa: F401
from cute_lce.parallel.sharding import _shardings

N = 9


def stubs(op: torch._ops.OpOverload, kept: Any, saved: tuple[int, ...]) -> list[Any]:
    """Arguments of an op: tensors of N tokens, but for what is kept, and for kept_scale and onehot_ratio."""
    found: list[Any] = []
    for argument in op._schema.arguments:
        tensor = SimpleNamespace(shape=(N, 4), placements=(kept,))
        if argument.name in ("kept_scale", "onehot_ratio"):
            tensor.shape = saved
        found.append(
            tensor if "Tensor" in str(argument.type) else 128 if argument.name == "kept_columns" else True
        )
    return found


@pytest.mark.parametrize("saved", [(N,), (0,)], ids=["kernels", "none"])
@pytest.mark.parametrize("kept", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize(
    ("first", "second"), [("forward_keep", "backward"), ("token_stats", "token_stats_backward")]
)
def test_what_is_beside_kept_stays(first, second, kept, saved):
    """Whatever shape its fake has: uneven shards that are gathered by a wrong one hang."""
    before, after = (getattr(torch.ops.cute_lce, name).default for name in (first, second))
    results = [each.name for each in before._schema.returns]
    arguments = [each.name for each in after._schema.arguments]
    given = _shardings(before, *stubs(before, kept, saved))
    taken = _shardings(after, *stubs(after, kept, saved))
    assert taken
    for name in {"kept_scale", "onehot_ratio"} & {*results}:
        placements = {str(each[0][results.index(name)]) for each in given}
        placements |= {str(each[1][arguments.index(name)]) for each in taken}
        assert len(placements) == 1, (name, placements)
    (own,) = taken
    assert own[1][arguments.index("kept")] == kept
