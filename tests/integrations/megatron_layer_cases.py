"""The hook of megatron-core >= 0.18 with a layer that has what of megatron-core's is read, for machines that
lack megatron-core, as those with GPUs may. megatron_cases.py has megatron-core's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from cute_lce.integrations import megatron
from tests.distributed.calls import slice_of
from tests.distributed.ranks import Rank
from tests.numerics import assert_close

S, B, H, V = 24, 2, 64, 320


class ColumnParallelLinear(nn.Module):
    """A weight (V / ranks, h) of a group; None: of this process alone."""

    def __init__(self, weight: Tensor, group: ProcessGroup | None, sequence_parallel: bool):
        super().__init__()
        self.weight, self.bias, self.is_expert = nn.Parameter(weight.clone()), None, False
        self.tp_group, self.sequence_parallel = group, sequence_parallel
        self.allreduce_dgrad = group is not None and not sequence_parallel
        self.gradient_accumulation_fusion = True
        head: Any = self.weight
        head.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        head.grad_added_to_main_grad = False

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None):
        return input_ @ (self.weight if weight is None else weight).T, None


class Model(nn.Module):
    """Takes what GPTModel's forward takes, and calls its output_processor as that does."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.output_layer = ColumnParallelLinear(torch.randn(V, H) / H**0.5, None, False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        output_processor: Any,
    ) -> Tensor:
        return output_processor(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            hidden_states=self.embedding(input_ids).transpose(0, 1),
            output_layer=self.output_layer,
            output_weight=None,
            labels=labels,
            loss_mask=loss_mask,
            config=SimpleNamespace(defer_embedding_wgrad_compute=False),
        )


def batch_of_model() -> dict[str, Any]:
    """A model and a batch, by the names of docs/integrations.md."""
    torch.manual_seed(0)
    tokens = torch.randint(V, (B, S))
    return {
        "model": Model(),
        "tokens": tokens,
        "position_ids": torch.arange(S).expand(B, S),
        "labels": tokens.roll(-1, 1),
        "loss_mask": (torch.arange(S) < S - 1).expand(B, S).float(),
    }


def expected(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, dtype: torch.dtype):
    """(losses [b, s], dhidden, dweight) of the sum over the mask, by torch."""
    leaves = [each.to(dtype, copy=True).requires_grad_() for each in (hidden, weight)]
    logits = (leaves[0] @ leaves[1].T).permute(1, 2, 0)
    losses = nn.functional.cross_entropy(logits, labels, reduction="none") * mask
    return losses.detach(), *torch.autograd.grad(losses.sum(), leaves)


def check(
    device: str, dtype: torch.dtype, group: ProcessGroup | None, here: Rank | None, sequence_parallel: bool
) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(S, B, H, generator=generator)
    weight = torch.randn(V, H, generator=generator) / H**0.5
    labels, mask = torch.randint(V, (B, S), generator=generator), torch.ones(B, S)
    mask[0, :5] = mask[1, 7] = 0
    hidden, weight, labels, mask = (
        each.to(device) for each in (hidden.to(dtype), weight.to(dtype), labels, mask)
    )

    def rows(tensor: Tensor) -> Tensor:
        return tensor if here is None else slice_of(tensor, here, 0)

    def tokens(tensor: Tensor) -> Tensor:
        return rows(tensor) if sequence_parallel else tensor

    layer = ColumnParallelLinear(rows(weight), group, sequence_parallel)
    leaf = tokens(hidden).clone().requires_grad_()
    for _ in range(2):
        leaf.grad = None
        losses = megatron.output_processor(
            hidden_states=leaf,
            output_layer=layer,
            output_weight=None,
            labels=labels,
            loss_mask=mask,
            config=SimpleNamespace(defer_embedding_wgrad_compute=False),
        )
        (losses * mask).sum().backward()
    head: Any = layer.weight
    assert head.grad_added_to_main_grad
    assert head.grad is not None
    assert not head.grad.any()
    want, plain = (expected(hidden, weight, labels, mask, kind) for kind in (torch.float64, torch.float32))
    # Products of narrow operands on a GPU take dlogits that are rounded.
    rounding = 2.0**-8 if losses.is_cuda and dtype is torch.bfloat16 else 0.0
    assert_close("losses", losses.detach(), want[0], plain[0])
    assert leaf.grad is not None
    assert_close("dhidden", leaf.grad, tokens(want[1]), tokens(plain[1]).to(dtype), rounding=rounding)
    assert_close("main_grad", head.main_grad, 2 * rows(want[2]), 2 * rows(plain[2]), rounding=rounding)


def a_layer_like_megatrons(here: Rank) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for sequence_parallel in (False, True):
            check(here.device, dtype, here.group, here, sequence_parallel)


CASES = (a_layer_like_megatrons,)
