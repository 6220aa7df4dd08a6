"""NeMo Automodel's fused loss: cross entropy from hidden states and a head's weight, without the logits.

Automodel passes hidden states and the head's weight to a loss that is a subclass of its own
FusedLinearCrossEntropy. In a recipe:
`loss_fn: {_target_: cute_lce.integrations.automodel.FusedLinearCrossEntropy}`. The class below follows the
signature in Automodel's repository (2026-08); it has not been run inside Automodel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..functional import linear_cross_entropy
from .counts import checked_count, divided

try:
    from nemo_automodel.components.loss.linear_ce import (  # pyright: ignore[reportMissingImports]
        FusedLinearCrossEntropy as _Fused,
    )
except ImportError as error:
    raise ImportError(
        "cute_lce.integrations.automodel: nemo_automodel.components.loss.linear_ce could not be imported, "
        "want NeMo Automodel (pip install nemo-automodel)"
    ) from error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FusedLinearCrossEntropy(_Fused):
    """Automodel's module of this name, computed by cute_lce. The constructor's arguments ignore_index,
    logit_softcapping (0: none) and reduction are followed; the package cut_cross_entropy is not needed."""

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group: ProcessGroup | None = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor:
        """The loss (), float32 (float64 for float64); (B, L) for reduction "none".

        Args:
            hidden_states: (B, L, D), lm_weight's dtype.
            labels: (B, L), aligned with hidden_states: nothing is shifted.
            lm_weight: (V, D). If fully_shard has sharded it, Automodel's own materialize_lm_weight gathers
                it, and averages its gradient over grad_reduce_group.
            num_label_tokens: divides the sum: a number, or a tensor of one element; 0 gives a loss and
                gradients of 0.
            loss_weights: (B, L), factors of the tokens' losses in the sum.

        Raises ValueError for num_label_tokens or loss_weights with a reduction other than "sum", and for a
        sharded lm_weight if Automodel has no materialize_lm_weight.
        """
        for name, value in (("num_label_tokens", num_label_tokens), ("loss_weights", loss_weights)):
            if value is not None and self.reduction != "sum":
                raise ValueError(f"{name}: got one with reduction={self.reduction!r}, want reduction='sum'")
        if hasattr(lm_weight, "device_mesh"):
            if not hasattr(self, "materialize_lm_weight"):
                raise ValueError("lm_weight: got a DTensor, want a NeMo Automodel with materialize_lm_weight")
            lm_weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group)
        terms: dict[str, Any] = {}
        if self.logit_softcapping:
            terms["softcap"] = self.logit_softcapping
        if loss_weights is not None:
            terms["token_weight"] = loss_weights.to(hidden_states.device)
        loss = linear_cross_entropy(
            hidden_states,
            lm_weight,
            labels,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            **terms,
        )
        if num_label_tokens is None:
            return loss
        return divided(loss, checked_count("num_label_tokens", num_label_tokens))
