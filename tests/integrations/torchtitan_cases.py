"""torchtitan's hook class and ours beside float64, on one process and, with its layouts, on two ranks."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed.calls import slice_of
from tests.distributed.ranks import Rank
from tests.numerics import assert_close, random_case

B, L, D, V = 2, 8, 32, 97
KINDS = (torch.float64, torch.float32)


class Decoder(nn.Module):
    """What of torchtitan's Decoder a loss sees: hidden states of the last norm, which lm_head has not had."""

    def __init__(self, lm_head: nn.Linear, weight: Tensor):
        super().__init__()
        self.tok_embeddings, self.norm, self.lm_head = nn.Linear(D, D, bias=False), nn.RMSNorm(D), lm_head
        self.to(weight)
        with torch.no_grad():
            nn.init.eye_(self.tok_embeddings.weight)
            self.lm_head.weight.copy_(weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.tok_embeddings(inputs))


def batch(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(inputs [B, L, D], weight (V, D), labels [B, L]), some labels ignored."""
    case = random_case(B * L, D, V, dtype, seed=seed)
    case.target[[1, 9]] = -100
    weight = random_case(B * L, D, V, dtype).linear_weight
    return case.input.view(B, L, D), weight, case.target.view(B, L)


def expected(dtype: torch.dtype, kind: torch.dtype, tokens: float, seeds: tuple[int, ...] = (0,)):
    """(each batch's loss, its gradient by inputs, the sum of those by both weights)."""
    losses, dinputs, parameters = [], [], []
    for seed in seeds:
        inputs, weight, labels = (
            each.to(kind) if each.is_floating_point() else each for each in batch(dtype, seed)
        )
        model = Decoder(nn.Linear(D, V, bias=False), weight)
        leaf = inputs.requires_grad_()
        logits = model.lm_head(model(leaf)).transpose(1, 2)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / tokens
        loss.backward()
        losses.append(loss.detach())
        dinputs.append(leaf.grad)
        parameters.append([model.lm_head.weight.grad, model.tok_embeddings.weight.grad])
    return losses, dinputs, [torch.stack(each).sum(0) for each in zip(*parameters, strict=True)]


def linear() -> Any:
    """torchtitan.models.common.linear.Linear, without its package, which needs triton."""
    import torchtitan

    path = Path(torchtitan.__path__[0], "models/common/linear.py")
    spec = spec_from_file_location("torchtitan_linear", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Linear


def make(weight: Tensor) -> tuple[Any, Decoder]:
    """(the loss, a model with torchtitan's own Linear), as its trainer connects them."""
    from torchtitan.components.loss import ChunkedLossWrapper

    from cute_lce.integrations.torchtitan import FusedLoss

    model = Decoder(linear().Config(in_features=D, out_features=V).build(), weight)
    loss = FusedLoss.Config().build(compile_config=None)
    assert isinstance(loss, ChunkedLossWrapper)
    loss.set_lm_head(model.lm_head)
    return loss, model


def fully_sharded(here: Rank) -> None:
    """The last norm and lm_head one unit, as torchtitan has them; each rank has a batch."""
    mesh = init_device_mesh(here.device.partition(":")[0], (here.ranks,))
    tokens, seeds = torch.tensor(20.0, device=here.device), tuple(range(here.ranks))
    want, plain = (expected(torch.float32, kind, 20, seeds) for kind in KINDS)
    for reshard in (False, True):
        inputs, weight, labels = (each.to(here.device) for each in batch(torch.float32, here.rank))
        loss_fn, model = make(weight)
        for unit in (model.tok_embeddings, [model.norm, model.lm_head], model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        for step in range(2):
            leaf = inputs.clone().requires_grad_()
            loss, metrics = loss_fn(model(leaf), labels, tokens)
            assert metrics == {}
            loss.backward()
            assert leaf.grad is not None
            rank = here.rank
            assert_close("loss", loss.detach().cpu(), want[0][rank], plain[0][rank])
            assert_close("dinputs", leaf.grad.cpu(), want[1][rank], plain[1][rank])
            for index, own in enumerate((model.lm_head.weight.grad, model.tok_embeddings.weight.grad)):
                assert isinstance(own, DTensor)
                assert_close(
                    f"dparameter {index}",
                    own.full_tensor().cpu() * here.ranks / (step + 1),
                    want[2][index],
                    plain[2][index],
                )


def tensor_parallel(here: Rank) -> None:
    """lm_head's weight as a plain shard (spmd_types) and as a DTensor (the others); V is uneven."""
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh
    from torchtitan.distributed.utils import set_spmd_backend

    want, plain = (expected(torch.float32, kind, 20) for kind in KINDS)
    mesh = init_device_mesh(here.device.partition(":")[0], (here.ranks,), mesh_dim_names=("tp",))
    inputs, weight, labels = (each.to(here.device) for each in batch(torch.float32))
    for backend in ("spmd_types", "partial_dtensor", "full_dtensor"):
        loss_fn, model = make(weight)
        leaf = inputs.clone().requires_grad_()
        hidden = model(leaf)
        if backend == "spmd_types":
            model.lm_head.weight = nn.Parameter(slice_of(weight, here, 0).clone())
            hidden = _Summed.apply(hidden, here.group)
        else:
            model.lm_head.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
            hidden = DTensor.from_local(hidden, mesh, [Replicate()])
            # What its parallelize makes of the forward, for logits.
            _no_logits.__module__ = "torchtitan.protocols.module"
            model.lm_head.forward = _no_logits  # pyright: ignore[reportAttributeAccessIssue]
        classes = labels
        if backend == "full_dtensor":
            classes = DTensor.from_local(labels, mesh, [Replicate()])
        set_spmd_backend(backend)
        try:
            with set_current_spmd_mesh(mesh) if backend == "spmd_types" else nullcontext():
                loss, _ = loss_fn(hidden, classes, 20.0)
        finally:
            set_spmd_backend("spmd_types")
        loss.backward()
        assert ("forward" in vars(model.lm_head)) == (backend != "spmd_types")
        assert leaf.grad is not None
        assert isinstance(loss, DTensor) == (backend == "full_dtensor")
        loss = loss.to_local() if isinstance(loss, DTensor) else loss
        assert_close("loss", loss.detach().cpu(), want[0][0], plain[0][0])
        assert_close("dinputs", leaf.grad.cpu(), want[1][0], plain[1][0])
        dweight: Any = model.lm_head.weight.grad
        dweight = dweight.to_local() if isinstance(dweight, DTensor) else dweight
        assert_close("dweight", dweight.cpu(), *(slice_of(each[2][0], here, 0) for each in (want, plain)))


def _no_logits(*_: Any) -> Tensor:
    raise AssertionError("lm_head gave logits")


class _Summed(torch.autograd.Function):
    """Hidden states whose gradients the ranks' parts are summed to, as the layout of the last norm has it."""

    @staticmethod
    def forward(ctx, hidden, group):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, dhidden):  # pyright: ignore[reportIncompatibleMethodOverride]
        dhidden = dhidden.clone()
        torch.distributed.all_reduce(dhidden, group=ctx.group)
        return dhidden, None


CASES = (fully_sharded, tensor_parallel)
