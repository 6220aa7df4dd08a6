"""Calls with DTensors: what their placements say of a call, made with the ranks' own parts.

    linear_weight   Shard(0) on one dimension of the mesh, which is the tensor parallel one, else Replicate
    input           there Replicate, or Shard of a dimension of the tokens; on others either of the two
    target          as input; where the vocabulary is sharded, it may be replicated beside a slice
    of each class   (linear_bias, weight) linear_weight's, or Replicate on all, as an ordinary tensor is
    of each token   (token_weight, temperature, topk_ids) target's; an ordinary tensor where target is one
    denominator     Replicate on all, or an ordinary tensor or number

No tokens and no linear_weight are redistributed: what has other placements is refused, and the error says to
what to redistribute it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..arguments import Operands
from ..options import TokenStats

Placements = tuple[Placement, ...]


def linear_cross_entropy(
    call: Callable[..., Tensor], operands: Operands, over_group: dict[str, Any], given: dict[str, Any]
) -> Tensor:
    """The loss. call: functional.linear_cross_entropy, of ordinary tensors. over_group, given: its arguments
    about a group, and the others."""
    layout = _layout(operands, over_group)
    reduction = given["reduction"]
    if layout.summed and reduction == "mean" and given["denominator"] is None:
        raise ValueError(
            "reduction: got 'mean' with tokens that are sharded over the mesh, whose number no rank knows; "
            "want a denominator, 'sum' (a Partial loss) or 'none'"
        )
    own = {
        "linear_bias": layout.of_classes("linear_bias", given["linear_bias"]),
        "weight": layout.of_classes("weight", given["weight"]),
        "token_weight": layout.of_tokens("token_weight", given["token_weight"]),
        "denominator": layout.of_all("denominator", given["denominator"]),
        "grad_weight_out": layout.of_gradient("grad_weight_out", given["grad_weight_out"]),
    }
    operands = layout.own(operands, adds=own["grad_weight_out"] is not None)
    loss = call(*operands, **{**given, **own}, **layout.over_group)
    return layout.result(loss, of_tokens=reduction == "none")


def linear_logprob(
    call: Callable[..., TokenStats], operands: Operands, over_group: dict[str, Any], given: dict[str, Any]
) -> TokenStats:
    """The same of cute_lce.linear_logprob."""
    layout = _layout(operands, over_group)
    own = {
        "linear_bias": layout.of_classes("linear_bias", given["linear_bias"]),
        "temperature": layout.of_tokens("temperature", given["temperature"]),
        "topk_ids": layout.of_tokens("topk_ids", given["topk_ids"]),
    }
    found = call(*layout.own(operands), **{**given, **own}, **layout.over_group)
    return TokenStats(*(None if each is None else layout.result(each, of_tokens=True) for each in found))


class _Layout(NamedTuple):
    """Where the ranks' parts of a call's tensors are.

    weight, inputs, targets: placements, one a dimension of the mesh. gradients: those of linear_weight's
    gradient; grad_inputs: of input's. summed: dimensions of the mesh whose ranks have tokens of their own and
    all of each one's classes. ordinary: the operands that are ordinary tensors; where input is one, so are
    the results. shape: of all ranks' tokens, classes: their number. over_group: arguments of a rank's call.
    """

    mesh: DeviceMesh
    weight: Placements
    inputs: Placements
    targets: Placements
    gradients: Placements
    grad_inputs: Placements
    summed: tuple[int, ...]
    ordinary: tuple[str, ...]
    shape: torch.Size
    classes: int
    over_group: dict[str, Any]

    def own(self, operands: Operands, *, adds: bool = False) -> Operands:
        """This rank's. adds: whether linear_weight's gradient is added to a buffer."""
        input, linear_weight, target = operands
        assert isinstance(linear_weight, DTensor)
        if adds:
            weight: Any = _WithoutZeros.apply(linear_weight, self.gradients)
        else:
            weight = linear_weight.to_local(grad_placements=self.gradients)
        return Operands(
            input.to_local(grad_placements=self.grad_inputs) if isinstance(input, DTensor) else input,
            weight,
            target.to_local() if isinstance(target, DTensor) else target,
        )

    def of_classes(self, name: str, tensor: Any) -> Any:
        """This rank's classes of a tensor (V,). The gradient of one with linear_weight's placements is as
        linear_weight's, that of any other is whole on every rank."""
        if not isinstance(tensor, Tensor):
            return tensor
        if not isinstance(tensor, DTensor):
            if tuple(tensor.shape) != (self.classes,):
                raise ValueError(
                    f"{name}: got shape {tuple(tensor.shape)}, want all classes, {(self.classes,)}, or a "
                    f"DTensor with linear_weight's placements, {self.weight}"
                )
            everywhere = (Replicate(),) * self.mesh.ndim
            tensor = DTensor.from_local(tensor, self.mesh, everywhere, run_check=False)
            return tensor.redistribute(placements=self.weight).to_local(grad_placements=self.gradients)
        _check_mesh(name, tensor, self.mesh)
        if not _same(tensor.placements, self.weight):
            if not all(placement.is_replicate() for placement in tensor.placements):
                raise ValueError(
                    f"{name}: got placements {tensor.placements}, want linear_weight's, {self.weight}, or "
                    "Replicate() on each dimension of the mesh: redistribute it"
                )
            tensor = tensor.redistribute(placements=self.weight)
        return tensor.to_local(grad_placements=self.gradients)

    def of_tokens(self, name: str, tensor: Any) -> Any:
        """This rank's tokens of a tensor of target's shape, or (..., K)."""
        if isinstance(tensor, DTensor):
            _check_mesh(name, tensor, self.mesh)
            if not _same(tensor.placements, self.targets):
                raise ValueError(
                    f"{name}: got placements {tensor.placements}, want target's, {self.targets}: "
                    "redistribute it"
                )
            return tensor.to_local()
        is_sharded = any(placement.is_shard() for placement in self.targets)
        if isinstance(tensor, Tensor) and is_sharded and "target" not in self.ordinary:
            raise ValueError(
                f"{name}: got an ordinary tensor beside a target that is sharded over the mesh, want a "
                f"DTensor of its placements, {self.targets}"
            )
        return tensor

    def of_all(self, name: str, tensor: Any) -> Any:
        """A tensor () that all ranks have."""
        if not isinstance(tensor, DTensor):
            return tensor
        if not all(placement.is_replicate() for placement in tensor.placements):
            raise ValueError(
                f"{name}: got placements {tensor.placements}, want Replicate() on each dimension of the "
                "mesh: redistribute it"
            )
        return tensor.to_local()

    def of_gradient(self, name: str, tensor: Any) -> Any:
        """This rank's rows of what linear_weight's gradient is added to."""
        if not isinstance(tensor, DTensor):
            return tensor
        _check_mesh(name, tensor, self.mesh)
        if not _same(tensor.placements, self.gradients):
            raise ValueError(
                f"{name}: got placements {tensor.placements}, want those of linear_weight's gradient, "
                f"{self.gradients}, or an ordinary tensor of this rank's rows"
            )
        return tensor.to_local()

    def result(self, found: Tensor, *, of_tokens: bool) -> Tensor:
        """Of all ranks."""
        if "input" in self.ordinary:
            return found
        if of_tokens:
            placements, shape = self.targets, (*self.shape, *found.shape[len(self.shape) :])
        else:
            every = range(self.mesh.ndim)
            placements, shape = tuple(Partial() if i in self.summed else Replicate() for i in every), ()
        shape = torch.Size(shape)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(found, self.mesh, placements, run_check=False, shape=shape, stride=stride)


class _WithoutZeros(torch.autograd.Function):
    """DTensor.to_local. A gradient that there is none of stays None, which torch before 2.13 makes zeros."""

    @staticmethod
    def forward(ctx, tensor, placements):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.like = tensor.device_mesh, placements, tensor.shape, tensor.stride()
        local = tensor.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        if gradient is None:
            return None, None
        mesh, placements, shape, stride = ctx.like
        found = DTensor.from_local(gradient, mesh, placements, run_check=False, shape=shape, stride=stride)
        return found, None


def _layout(operands: Operands, over_group: dict[str, Any]) -> _Layout:
    """Raises ValueError for placements other than the above, by name."""
    input, linear_weight, target = operands
    for name in ("tp_group", "vocab_start", "sequence_dim"):
        if over_group[name] is not None:
            got = "a group" if name == "tp_group" else over_group[name]
            raise ValueError(f"{name}: got {got} beside a DTensor, want None: its placements say it")
    if not isinstance(linear_weight, DTensor):
        raise ValueError(
            "linear_weight: got an ordinary tensor beside a DTensor, want a DTensor on the same mesh "
            "(torch.distributed.tensor.distribute_tensor)"
        )
    mesh, weight = linear_weight.device_mesh, tuple(linear_weight.placements)
    dim = _vocabulary_dim(linear_weight)
    inputs = _token_placements(input, mesh)
    targets = _target_placements(input, target, inputs, mesh, dim)
    summed = tuple(i for i, placement in enumerate(inputs) if i != dim and placement.is_shard())
    grad_inputs = inputs
    if dim is not None:
        over_group = {**over_group, **_group_of(linear_weight, input, dim, inputs)}
        if over_group["grad_input"] == "partial":
            grad_inputs = *inputs[:dim], Partial(), *inputs[dim + 1 :]
    return _Layout(
        mesh=mesh,
        weight=weight,
        inputs=inputs,
        targets=targets,
        gradients=tuple(Partial() if i in summed else placement for i, placement in enumerate(weight)),
        grad_inputs=grad_inputs,
        summed=summed,
        ordinary=tuple(
            name for name, tensor in (("input", input), ("target", target)) if not isinstance(tensor, DTensor)
        ),
        shape=input.shape[:-1],
        classes=linear_weight.shape[0],
        over_group=over_group,
    )


def _group_of(weight: DTensor, input: Tensor, dim: int, inputs: Placements) -> dict[str, Any]:
    """A rank's arguments about the group, over dimension dim of the mesh. inputs: placements of input."""
    mesh = weight.device_mesh
    ranks, rows = mesh.size(dim), weight.shape[0]
    # As torch splits: all but the last ranks have so many.
    each = -(-rows // ranks)
    if each * (ranks - 1) >= rows:
        raise ValueError(
            f"linear_weight: got shape {tuple(weight.shape)} over {ranks} ranks, some without any class, "
            "want more classes"
        )
    sequence_dim, placement = None, inputs[dim]
    if isinstance(placement, Shard):
        sequence_dim = placement.dim % input.dim()
        over = ranks
        for i in range(dim):
            # An earlier dimension leaves parts that this one splits again. (No generator: dynamo traces it.)
            if _same((inputs[i],), (placement,)):
                over *= mesh.size(i)
        if input.shape[sequence_dim] % over:
            raise ValueError(
                f"input: got shape {tuple(input.shape)}, whose dimension {sequence_dim} is over {over} "
                "ranks, want equal shards: redistribute it to Replicate()"
            )
    start = each * mesh.get_local_rank(dim)
    return {"tp_group": mesh.get_group(dim), "vocab_start": start, "sequence_dim": sequence_dim}


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


def _token_placements(input: Tensor, mesh: DeviceMesh) -> Placements:
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
    input: Tensor, target: Tensor, tokens: Placements, mesh: DeviceMesh, dim: int | None
) -> Placements:
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
        # What a later dimension splits of a slice are no neighbours in the whole.
        may_be_whole = i == dim and not any(_same((inputs,), (other,)) for other in tokens[i + 1 :])
        if not _same((own,), (inputs,)) and not (may_be_whole and own.is_replicate()):
            raise ValueError(
                f"target: got placements {target.placements}, want input's, {tokens}: redistribute it"
            )
    return tuple(target.placements)


def _same(one: Placements, other: Placements) -> bool:
    """A _StridedShard equals a Shard for torch."""
    return all(type(a) is type(b) and a == b for a, b in zip(one, other, strict=True))


def _check_mesh(name: str, tensor: DTensor, mesh: DeviceMesh) -> None:
    if tensor.device_mesh != mesh:
        raise ValueError(f"{name}: got {tensor.device_mesh}, want linear_weight's mesh, {mesh}")
