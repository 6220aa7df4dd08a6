"""Calls with DTensors: what their placements say of a call, made with the ranks' own parts.

    linear_weight   Shard(0) on one dimension of the mesh, which is the tensor parallel one, else Replicate
    input           there Replicate, or Shard of a dimension of the tokens; on others either of the two
    target          as input; where the vocabulary is sharded, it may be replicated beside a slice

Nothing is redistributed: what has other placements is refused, and the error says to what to redistribute it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..arguments import Operands
from ..options import LossOptions
from .call import Spread


class Local(NamedTuple):
    """A rank's part of a call: its operands, how it is spread, and the placements of its loss.

    spread: None: the vocabulary is whole. placements: None: the loss is an ordinary tensor; shape: of the
    tokens of all ranks.
    """

    operands: Operands
    spread: Spread | None
    mesh: DeviceMesh
    placements: tuple[Placement, ...] | None
    shape: torch.Size

    def global_loss(self, loss: Tensor) -> Tensor:
        if self.placements is None:
            return loss
        shape = self.shape if loss.dim() else loss.shape
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            loss, self.mesh, self.placements, run_check=False, shape=shape, stride=stride
        )


def local_call(operands: Operands, loss: LossOptions) -> Local:
    """What each rank calls. Raises ValueError for placements other than the above, by name."""
    input, linear_weight, target = operands
    if not isinstance(linear_weight, DTensor):
        raise ValueError(
            "linear_weight: got an ordinary tensor beside a DTensor, want a DTensor on the same mesh "
            "(torch.distributed.tensor.distribute_tensor)"
        )
    mesh = linear_weight.device_mesh
    dim = _vocabulary_dim(linear_weight)
    tokens = _token_placements(input, mesh, dim)
    classes = _target_placements(input, target, tokens, mesh, dim)
    partial = [i for i, placement in enumerate(tokens) if i != dim and placement.is_shard()]
    if partial and loss.reduction == "mean":
        raise ValueError(
            "reduction: got 'mean' of tokens that are sharded over the mesh, whose count no rank knows; want "
            "'sum' (a Partial loss) or 'none'"
        )
    gradients = [
        Partial() if i in partial else placement for i, placement in enumerate(linear_weight.placements)
    ]
    weight = linear_weight.to_local(grad_placements=gradients)
    hidden = input.to_local(grad_placements=tokens) if isinstance(input, DTensor) else input
    here = target.to_local() if isinstance(target, DTensor) else target
    placements = _loss_placements(input, classes, partial, loss)
    own = None if dim is None else _spread(linear_weight, input, dim, tokens)
    return Local(Operands(hidden, weight, here), own, mesh, placements, input.shape[:-1])


def _spread(weight: DTensor, input: Tensor, dim: int, tokens: tuple[Placement, ...]) -> Spread:
    mesh = weight.device_mesh
    ranks, rows = mesh.size(dim), weight.shape[0]
    # As torch splits: all but the last ranks have ceil(V / ranks).
    if -(-rows // ranks) * (ranks - 1) >= rows:
        raise ValueError(
            f"linear_weight: got {rows} classes over {ranks} ranks, some without any, want more classes"
        )
    _, offset = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
    placement = tokens[dim]
    sequence_dim = None
    if isinstance(placement, Shard):
        sequence_dim = placement.dim % input.dim()
        if input.shape[sequence_dim] % ranks:
            raise ValueError(
                f"input: got {input.shape[sequence_dim]} tokens in dimension {sequence_dim} over {ranks} "
                "ranks, want equal shards: redistribute it to Replicate()"
            )
    return Spread(mesh.get_group(dim), offset[0], sequence_dim)


def _vocabulary_dim(weight: DTensor) -> int | None:
    """The dimension of the mesh over which the vocabulary is sharded; None: over none."""
    found = [i for i, placement in enumerate(weight.placements) if not placement.is_replicate()]
    for i in found:
        placement = weight.placements[i]
        # Not its subclasses: _StridedShard has no contiguous rows.
        if len(found) > 1 or type(placement) is not Shard or placement.dim % weight.dim():
            raise ValueError(
                f"linear_weight: got placements {weight.placements}, want Shard(0) on one dimension of the "
                "mesh and Replicate() on the others: redistribute it (a weight that fully_shard has sharded "
                "too has them in its unit's forward)"
            )
    return found[0] if found else None


def _token_placements(input: Tensor, mesh: DeviceMesh, dim: int | None) -> tuple[Placement, ...]:
    """Of input, one a dimension of the mesh; an ordinary tensor is replicated."""
    if not isinstance(input, DTensor):
        return (Replicate(),) * mesh.ndim
    _check_mesh("input", input, mesh)
    last = input.dim() - 1
    for placement in input.placements:
        sharded = type(placement) is Shard and placement.dim % input.dim() < last
        if not (placement.is_replicate() or sharded):
            raise ValueError(
                f"input: got placements {input.placements}, want Replicate() or Shard of a dimension of the "
                "tokens on each dimension of the mesh: redistribute it"
            )
    return tuple(input.placements)


def _target_placements(
    input: Tensor, target: Tensor, tokens: tuple[Placement, ...], mesh: DeviceMesh, dim: int | None
) -> tuple[Placement, ...]:
    """Of target; an ordinary tensor is replicated, or where the vocabulary is sharded a slice as input is."""
    sharded = [i for i, placement in enumerate(tokens) if i != dim and placement.is_shard()]
    if not isinstance(target, DTensor):
        if sharded:
            raise ValueError(
                "target: got an ordinary tensor beside tokens that are sharded over the mesh, want a DTensor "
                f"of input's placements, {tokens}"
            )
        return tokens if target.shape != input.shape[:-1] else (Replicate(),) * mesh.ndim
    _check_mesh("target", target, mesh)
    for i, (own, inputs) in enumerate(zip(target.placements, tokens, strict=True)):
        if own != inputs and not (i == dim and own.is_replicate()):
            raise ValueError(
                f"target: got placements {target.placements}, want input's, {tokens}: redistribute it"
            )
    return tuple(target.placements)


def _loss_placements(
    input: Tensor, classes: tuple[Placement, ...], partial: list[int], loss: LossOptions
) -> tuple[Placement, ...] | None:
    if not isinstance(input, DTensor):
        return None
    if loss.reduction == "none":
        return classes
    return tuple(Partial() if i in partial else Replicate() for i in range(len(classes)))


def _check_mesh(name: str, tensor: DTensor, mesh: DeviceMesh) -> None:
    if tensor.device_mesh != mesh:
        raise ValueError(f"{name}: got {tensor.device_mesh}, want linear_weight's mesh, {mesh}")
