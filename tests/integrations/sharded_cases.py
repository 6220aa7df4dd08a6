"""Cases of patched models over two ranks: FSDP2 by torch and by accelerate."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cute_lce.integrations.transformers import patch, unpatch
from cute_lce.integrations.trl import LogProb
from tests.distributed.ranks import Rank
from tests.integrations.language_models import make, tokens


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wanted(model: Any, here: Rank) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's loss, and the gradients of the mean of all ranks' losses, by the unpatched model."""
    model.zero_grad()
    losses = [model(*batch(model, rank)).loss for rank in range(here.ranks)]
    torch.stack(losses).mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return losses[here.rank].detach(), gradients


def batch(model: Any, rank: int) -> tuple[Any, ...]:
    """Positional arguments up to labels."""
    device = next(model.parameters()).device
    ids, labels = (each.to(device) for each in tokens(rank, rows=2, length=7 + rank))
    return ids, None, None, None, None, labels


def check(model: Any, own: Any, here: Rank, units: list[list[str]], mesh: DeviceMesh) -> None:
    want, gradients = wanted(model, here)
    for unit in units:
        fully_shard([own.get_submodule(name) for name in unit], mesh=mesh)
    fully_shard(own, mesh=mesh)
    for _ in range(2):
        own.zero_grad()
        found = own(*batch(own, here.rank))
        assert found.logits is None
        found.loss.backward()
        assert torch.allclose(found.loss, want, rtol=1e-5)
        for name, parameter in own.named_parameters():
            assert parameter.grad is not None, name
            assert gradients[name].any(), name
            assert torch.allclose(whole(parameter.grad), gradients[name], rtol=1e-4, atol=1e-6), name
    ids = batch(own, here.rank)[0]
    logits = own.eval()(ids).logits
    assert torch.allclose(logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def units_of_fully_shard(here: Rank) -> None:
    """The head alone, with the norm, tied to the embedding, and in the root; patched before and after."""
    mesh = init_device_mesh(here.device.partition(":")[0], (here.ranks,))
    layer = ["model.layers.0"]
    for name, units in (
        ("llama", [layer, ["lm_head"]]),
        ("granite", [layer, ["model.norm", "lm_head"]]),
        ("gemma2", [layer]),
        ("tied", [layer, ["model.embed_tokens", "model.norm", "lm_head"]]),
    ):
        model = make(name).to(here.device)
        own = copy.deepcopy(model)
        patch(own)
        check(model, own, here, units, mesh)
    model = make("llama").to(here.device)
    own = copy.deepcopy(model)
    for unit in ("model.layers.0", "lm_head"):
        fully_shard(own.get_submodule(unit), mesh=mesh)
    patch(own)
    check(model, own, here, [], mesh)
    unpatch(own)
    assert own(*batch(own, here.rank)).logits is not None


def a_loss_stays_wide(here: Rank) -> None:
    """A policy that rounds the head's output to bfloat16 does not round the loss of a head on its own."""
    mesh = init_device_mesh(here.device.partition(":")[0], (here.ranks,))
    model = make("llama").to(here.device)
    want, _ = wanted(model, here)
    narrow = MixedPrecisionPolicy(output_dtype=torch.bfloat16)
    patch(model)
    fully_shard(model.lm_head, mesh=mesh, mp_policy=narrow)
    fully_shard(model, mesh=mesh)
    found = model(*batch(model, here.rank)).loss
    assert found.dtype is torch.float32
    assert torch.allclose(found, want, rtol=1e-5)


def units_of_accelerate(here: Rank) -> None:
    """accelerate's own sharding, which an Accelerator on CPUs does not choose by itself: two steps of SGD
    beside the same in one process."""
    # Not in every version, and the other cases do without.
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = plugin
    for name in ("llama", "tied"):
        model = make(name)
        own = copy.deepcopy(model)
        patch(own)
        own = fsdp2_prepare_model(accelerator, own)
        assert all(isinstance(parameter, DTensor) for parameter in own.parameters())
        mine, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (own, model))
        for _ in range(2):
            mine.zero_grad()
            want, _ = wanted(model, here)
            found: Any = own(*batch(own, here.rank))
            assert found.logits is None
            assert torch.allclose(found.loss, want, rtol=1e-5)
            found.loss.backward()
            plain.step()
            mine.step()
        for (key, one), other in zip(own.named_parameters(), model.parameters(), strict=True):
            assert torch.allclose(whole(one), other, rtol=1e-4, atol=1e-5), key


def a_head_that_trl_gathers(here: Rank) -> None:
    """Its gradient would not be summed; without a gradient it is right."""
    model = make("llama").to(here.device)
    want = model.lm_head.weight.detach().clone()
    fully_shard(model.lm_head, mesh=init_device_mesh(here.device.partition(":")[0], (here.ranks,)))
    hidden, targets = torch.randn(5, want.shape[1], device=here.device), torch.arange(5, device=here.device)
    weight = model.lm_head.weight.full_tensor()
    with pytest.raises(ValueError, match=r"^weight: got one that TRL gathered"):
        LogProb.apply(hidden, weight, None, targets, 1.0, 40)
    # Once for a device and process, in which no other case calls it.
    is_warned = pytest.warns(UserWarning, match="float32 hidden states at the head")
    with torch.no_grad(), nullcontext() if here.device == "cpu" else is_warned:
        found = LogProb.apply(hidden, model.lm_head.weight.full_tensor(), None, targets, 1.0, 40, outputs=())
    expected = (hidden @ want.T).log_softmax(-1)[torch.arange(5), targets]
    assert torch.allclose(found.logprobs, expected, rtol=1e-5, atol=1e-5)


CASES = (units_of_fully_shard, a_loss_stays_wide, a_head_that_trl_gathers)
