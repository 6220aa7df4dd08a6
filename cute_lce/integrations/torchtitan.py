"""torchtitan's loss: cross entropy from a decoder's hidden states and lm_head, without the logits.

torchtitan (0.3.0) passes lm_head to a loss that is a ChunkedLossWrapper, and its model then returns hidden
states. In a Trainer.Config: `loss=FusedLoss.Config()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.distributed.utils import get_spmd_backend

from ..functional import linear_cross_entropy
from .counts import checked_count, divided
from .heads import LINEAR_FORWARD
from .hooks import check_hooks


class FusedLoss(ChunkedLossWrapper):
    """The sum of the tokens' cross entropies divided by global_valid_tokens, in one call instead of chunks.

    lm_head is called, so that fully_shard's hooks run, and its forward returns the loss. Tensor parallelism
    works with each of torchtitan's backends: with "spmd_types" the gradient by the hidden states is this
    rank's part, as the layout of the model's last norm requires; with "partial_dtensor" and "full_dtensor" it
    follows the placements. Labels of -100 are ignored.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        """schedule, workspace_mb: as in cute_lce.linear_cross_entropy. num_chunks is not used."""

        schedule: str = "auto"
        workspace_mb: float | None = None

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        """Raises ValueError for a loss_fn other than CrossEntropyLoss. compile_config is not used."""
        if type(config.loss_fn) is not CrossEntropyLoss.Config:
            raise ValueError(
                f"loss_fn: got {type(config.loss_fn).__qualname__}, want CrossEntropyLoss.Config"
            )
        super().__init__(config)
        self.options = {"schedule": config.schedule, "workspace_mb": config.workspace_mb}

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Raises ValueError for a head that is not a plain nn.Linear."""
        _check_head(lm_head)
        super().set_lm_head(lm_head)

    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor | float | None = None,
        **loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss (), {}) of hidden states pred (B, L, D) and labels (B, L); loss_inputs are not used.

        global_valid_tokens: a number, or a tensor of one element; 0 gives a loss and gradients of 0.

        The loss is float32 (float64 for float64), and a DTensor if the labels are one. Raises ValueError for
        a hook that would get the head's loss as logits, and for a head whose forward was replaced.
        """
        head: Any = self.lm_head
        if head is None:
            raise ValueError("lm_head: got none, want set_lm_head before the first call")
        _check_head(head)
        check_hooks(head, "lm_head")
        # That of a parallel head gives logits a layout.
        others = vars(head).pop("forward", None)
        head.forward = lambda hidden: self._sum(head, hidden, labels)
        try:
            loss = head(pred)
        finally:
            del head.forward
            if others is not None:
                head.forward = others
        if isinstance(loss, DTensor) and not isinstance(labels, DTensor):
            loss = loss.to_local()
        if global_valid_tokens is not None:
            loss = divided(loss, checked_count("global_valid_tokens", global_valid_tokens))
        return loss, {}

    def _sum(self, head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
        parallel: dict[str, Any] = {}
        weight: Any = head.weight
        if get_spmd_backend() == "spmd_types" and spmd_mesh_size("tp") > 1:
            mesh = current_spmd_mesh()
            assert mesh is not None
            group = mesh.get_group("tp")
            # As torchtitan splits: all but the last ranks have as many classes.
            rows = -(-head.out_features // group.size())
            parallel.update(tp_group=group, vocab_start=rows * group.rank(), grad_input="partial")
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            linear_bias=head.bias,
            reduction="sum",
            ignore_index=IGNORE_INDEX,
            **parallel,
            **self.options,
        )


def _check_head(head: nn.Module) -> None:
    """Raise ValueError unless its forward is nn.Linear's, or what torchtitan's parallelize makes of that."""
    forward = vars(head).get("forward")
    own = forward is None or getattr(forward, "__module__", "").startswith("torchtitan.")
    if not isinstance(head, nn.Linear) or type(head).forward is not LINEAR_FORWARD or not own:
        raise ValueError(
            f"lm_head: got {type(head).__name__}, whose forward may change the logits, want an nn.Linear "
            "with nn.Linear's forward"
        )
