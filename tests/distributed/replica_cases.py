"""Cases of replicas: DistributedDataParallel around the module, and ZeRO-1, for CPUs as for GPUs."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from cute_lce import LinearCrossEntropy
from tests.distributed.calls import slice_of
from tests.distributed.ranks import Rank
from tests.distributed.tensor_cases import ignoring
from tests.numerics import Case, assert_close, random_case

MICRO_BATCHES = 2


def replica_of(here: Rank, case: Case, reduction: str) -> DistributedDataParallel:
    """The module with the case's weight; the first rank's is every rank's."""
    V, d = case.linear_weight.shape
    dtype = case.linear_weight.dtype
    head = LinearCrossEntropy(d, V, reduction=reduction, device=here.device, dtype=dtype)
    if here.rank == 0:
        with torch.no_grad():
            head.weight.copy_(case.linear_weight)
    return DistributedDataParallel(head, process_group=here.group)


def weight_of(model: DistributedDataParallel) -> nn.Parameter:
    (weight,) = model.parameters()
    return weight


def replicas(here: Rank) -> None:
    """Each has its tokens, in two micro-batches of which the first is not synchronised. Gradients by the
    weight are those of all tokens on one process, averaged over the ranks."""
    for dtype in here.dtypes:
        case = random_case(4 * MICRO_BATCHES * here.ranks, 24, 70, dtype)
        # The ranks have different numbers of valid tokens.
        case.target[: 4 * MICRO_BATCHES - 1 : 2] = case.ignore_index
        case = case.to(here.device)
        valid = int((case.target != case.ignore_index).sum())
        # DistributedDataParallel divides the sum over the ranks by their number.
        for reduction, upstream in (("sum", 1 / here.ranks), ("mean", 1.0)):
            model = replica_of(here, case, reduction)
            denominator = valid / here.ranks if reduction == "mean" else None
            expected, baseline = (each(upstream, reduction) for each in (case.expected, case.baseline))
            inputs = slice_of(case.input, here, 0).chunk(MICRO_BATCHES)
            leaves = [each.clone().requires_grad_() for each in inputs]
            targets = slice_of(case.target, here, 0).chunk(MICRO_BATCHES)

            def step(micro: int, model=model, leaves=leaves, targets=targets, denominator=denominator):
                loss = model(leaves[micro], targets[micro], denominator=denominator)
                loss.backward()

            with model.no_sync():
                step(0)
            gradient = weight_of(model).grad
            assert gradient is not None
            assert not here.is_same(gradient)
            step(1)
            gradient = weight_of(model).grad
            assert gradient is not None
            assert gradient.dtype is dtype
            assert here.is_same(gradient)
            # The micro-batches' gradients, and then the ranks', are added in dtype.
            rounding = 2.0**-8 * here.ranks if dtype is torch.bfloat16 else 0.0
            assert_close("dweight", gradient, expected[2], baseline[2], rounding=rounding)
            # Hidden states are this rank's, and so is the loss, which nothing has divided.
            own = torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None])
            want, plain = (here.ranks * slice_of(each[1], here, 0) for each in (expected, baseline))
            assert_close("dinput", own, want, plain)


def sharded_optimizer(here: Rank) -> None:
    """A step of ZeRO-1 is the step of the ordinary optimizer, to the last bit, and changes every weight."""
    case = ignoring(random_case(4 * here.ranks, 24, 70, torch.float32)).to(here.device)
    head = LinearCrossEntropy(24, 70, bias=True, device=here.device)
    model = DistributedDataParallel(head, process_group=here.group)
    alone = copy.deepcopy(head)
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=here.group, lr=0.1)
    model(slice_of(case.input, here, 0), slice_of(case.target, here, 0)).backward()
    before: list[Tensor] = []
    for own, other in zip(head.parameters(), alone.parameters(), strict=True):
        assert own.grad is not None
        other.grad = own.grad.clone()
        before.append(own.detach().clone())
    torch.optim.AdamW(alone.parameters(), lr=0.1).step()
    sharded.step()
    for own, other, old in zip(head.parameters(), alone.parameters(), before, strict=True):
        assert here.is_same(own.detach())
        assert torch.equal(own, other)
        assert (own != old).all()


CASES = (replicas, sharded_optimizer)
