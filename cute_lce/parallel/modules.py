"""The module under parallelize_module, and a weight that is read outside its fully_shard unit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from ..logprob import LinearLogprob
from ..module import LinearCrossEntropy
from ..options import TokenStats


class VocabParallelLoss(ParallelStyle):
    """A style of torch.distributed.tensor.parallel.parallelize_module for LinearCrossEntropy and
    LinearLogprob, whose weight becomes Shard(0) of the mesh, which has one dimension. A weight that was tied
    is then a copy, as with torch's styles: docs/parallel.md ties it again.

    Args:
        input_layouts: what an ordinary input tensor is on each rank: Replicate(), or Shard(k), a slice of its
            dimension k. A DTensor is taken as it is; for logits its tokens are gathered. target is whole, or
            a slice as input is.
        use_local_output: whether the loss or the numbers of tokens, and without a target the logits of all
            classes, are ordinary tensors instead of DTensors.

    Applying it raises TypeError to another module, and ValueError on a mesh of several dimensions.
    """

    def __init__(self, *, input_layouts: Placement | None = None, use_local_output: bool = True):
        super().__init__()
        self.input_layouts = input_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, LinearCrossEntropy | LinearLogprob):
            got, want = type(module).__name__, "a cute_lce.LinearCrossEntropy or LinearLogprob"
            raise TypeError(f"module: got {got}, want {want}")
        if device_mesh.ndim != 1:
            raise ValueError(
                f"device_mesh: got {device_mesh.ndim} dimensions, want one: that of the tensor parallel group"
            )
        distribute_module(module, device_mesh, self._partition)

        def place(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            input = args[0] if args else kwargs.get("input")
            for_logits = _target(args, kwargs) is None
            # An ordinary tensor beside a sharded weight is replicated, but torch's linear refuses it.
            plain = self.input_layouts.is_replicate() and not for_logits
            if not isinstance(input, Tensor) or (not for_logits and (plain or isinstance(input, DTensor))):
                return args, kwargs
            if not isinstance(input, DTensor):
                input = DTensor.from_local(input, device_mesh, [self.input_layouts], run_check=False)
            if for_logits:
                # Every rank computes all tokens' logits of its classes; torch's linear gathers the tokens
                # itself, but before torch 2.13 it refuses slices of a second dimension.
                input = input.redistribute(device_mesh, [Replicate()])
            return ((input, *args[1:]), kwargs) if args else (args, {**kwargs, "input": input})

        def give(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            if isinstance(output, TokenStats):
                return TokenStats(*(give(module, args, kwargs, each) for each in output))
            if not isinstance(output, DTensor) or not self.use_local_output:
                return output
            return output.full_tensor() if _target(args, kwargs) is None else output.to_local()

        module.register_forward_pre_hook(place, with_kwargs=True)
        module.register_forward_hook(give, with_kwargs=True)
        return module

    def _partition(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(key, nn.Parameter(sharded, parameter.requires_grad))


def _target(args: tuple, kwargs: dict) -> Tensor | None:
    return args[1] if len(args) > 1 else kwargs.get("target")


def gathered_weight(weight: Tensor, group: ProcessGroup) -> Tensor:
    """The whole of a weight that fully_shard has sharded over `group`, for use outside its unit's forward.

    weight: a DTensor, Shard(0) of a mesh of one dimension, that of group. Returns an ordinary tensor, of
    which every rank has a copy. In the backward the ranks' gradients are summed over the group, divided by
    its size, as fully_shard does, and added to weight.grad as this rank's shard. `weight.full_tensor()` alone
    adds this rank's own gradient, without a sum. Raises TypeError and ValueError for another weight.
    """
    if not isinstance(weight, DTensor):
        raise TypeError(f"weight: got {type(weight).__name__}, want a DTensor, as fully_shard makes them")
    mesh = weight.device_mesh
    if mesh.ndim != 1 or mesh.get_group() != group or type(weight.placements[0]) is not Shard:
        raise ValueError(
            f"weight: got placements {weight.placements} on {mesh}, want Shard(0) over the given group alone"
        )
    return _Averaged.apply(weight.full_tensor(grad_placements=[Partial()]), group.size())


class _Averaged(torch.autograd.Function):
    """A tensor, and its gradient over a number."""

    @staticmethod
    def forward(ctx, tensor, count):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.count = count
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient / ctx.count, None
