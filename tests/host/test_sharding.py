"""Calls over a group without one: what is registered of placements, and what comes before collectives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import cute_lce  # noqa: F401
from cute_lce.arguments import Operands
from cute_lce.implementation import Request
from cute_lce.options import LossOptions
from cute_lce.parallel import tensor
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


@pytest.mark.parametrize("sliced", [True, False])
def test_a_forward_is_prepared_before_the_first_collective(sliced, monkeypatch):
    """A rank that compiles for a minute has nobody waiting for it in a collective."""
    events: list[Any] = []

    class Serving:
        def forward(self, operands: Operands, loss: LossOptions, request: Request) -> None:
            events.append(tuple(tuple(each.shape) for each in operands))

        def localize(self, target: torch.Tensor, *_: Any) -> Any:
            return SimpleNamespace(local=target)

    def gather(rows: torch.Tensor, group: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(tensor, "implementation", lambda *_: Serving())
    monkeypatch.setattr(tensor, "gather", gather)
    group: Any = SimpleNamespace(size=lambda: 2)
    shard = tensor.Shard(group, 0, True, sliced, reduces=False)
    operands = Operands(torch.zeros(N, 8), torch.zeros(5, 8), torch.zeros(2 * N if sliced else N))
    passes = tensor.ShardedPasses(operands, Request(), shard)
    with pytest.raises(TimeoutError if sliced else AttributeError):
        passes.run(operands, LossOptions())
    n = 2 * N if sliced else N
    assert events[0] == ((n, 8), (5, 8), (n,))
