"""verl's fused head: log-probabilities and entropy from hidden states, called like verl's own kernel.

verl (0.9.1) calls `verl.utils.kernel.linear_cross_entropy.linear_cross_entropy` with positional arguments in
its FSDP models (`use_fused_kernels`, backend "triton") and in its Megatron models, there with the tensor
parallel group. `install` replaces it by the function of this file.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..logprob import linear_logprob

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

REDUCTIONS = ("none", "sum", "mean")
_KERNEL = "verl.utils.kernel.linear_cross_entropy"
_CALLERS = ("verl.models.mcore.model_forward_fused", "verl.models.mcore.model_forward_1f1b_overlap")
"""Modules that import the function by its name when they are imported; others do when they are called."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) of each token, from the logits hidden @ weight.T / temperature.

    Args:
        hidden: (..., d), N tokens.
        labels: (...), int64 or int32, N tokens; other shapes than hidden's are accepted, as (s, 1, d) and
            (1, s). Labels are aligned with hidden: nothing is shifted.
        weight: (V, d), hidden's dtype; with a group this rank's rows: equal shards, in rank order.
        temperature: a positive number; or a tensor of N elements, one for each token, or of one element, on
            hidden's device, which is not read on the host.
        reduction: for logprobs only: "none", "sum" or "mean" over all N.
        dist_process_group: the group over whose ranks the vocabulary is sharded. The gradient by hidden is
            then this rank's part, in hidden's dtype, and the caller sums it over the group, as verl does.

    Returns:
        logprobs, (N,) or (), and entropy, (N,), float32 (float64 for float64), both differentiable. A row
        whose label is -100 has 0 for both and no gradient; verl's kernel knows no such label.

    Errors and memory are as in cute_lce.linear_logprob, whose messages call hidden input, weight
    linear_weight and labels target; also TypeError for another dist_process_group, and ValueError for a
    weight that is a DTensor.
    """
    for name, tensor in (("hidden", hidden), ("weight", weight), ("labels", labels)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, want a tensor")
    if not hidden.dim():
        raise ValueError("hidden: got shape (), want (..., d)")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: got {reduction!r}, want one of {', '.join(map(repr, REDUCTIONS))}")
    if hasattr(weight, "device_mesh"):
        raise ValueError(
            "weight: got a DTensor, want an ordinary tensor: read the head's weight inside its unit's "
            "forward, or gather it with cute_lce.parallel.gathered_weight"
        )
    if dist_process_group is not None:
        from torch.distributed import ProcessGroup

        if not isinstance(dist_process_group, ProcessGroup):
            got = type(dist_process_group).__name__
            raise TypeError(f"dist_process_group: got {got}, want a torch.distributed.ProcessGroup or None")
    labels = labels.reshape(-1)
    if isinstance(temperature, Tensor):
        temperature = _of_each_token(temperature, labels)
    sharded = dist_process_group is not None and dist_process_group.size() > 1
    stats = linear_logprob(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels,
        temperature=temperature,
        outputs=("logprob", "entropy"),
        tp_group=dist_process_group if sharded else None,
        grad_input="partial" if sharded else "reduced",
    )
    logprobs, entropy = stats.logprob, stats.entropy
    assert logprobs is not None
    assert entropy is not None
    if reduction == "sum":
        logprobs = logprobs.sum()
    elif reduction == "mean":
        # Not mean, which is nan without tokens.
        logprobs = logprobs.sum() / torch.sym_max(labels.shape[0], 1)
    return logprobs, entropy


def _of_each_token(temperature: Tensor, labels: Tensor) -> Tensor:
    """(N,), in float32 if it was not floating. Raises ValueError for another number of elements."""
    if temperature.numel() not in (1, labels.shape[0]):
        raise ValueError(
            f"temperature: got {temperature.numel()} elements, want one, or one for each of "
            f"{labels.shape[0]} tokens (repeat a sequence's for its tokens)"
        )
    temperature = temperature.reshape(-1).expand(labels.shape[0])
    return temperature if temperature.is_floating_point() else temperature.float()


def install() -> None:
    """Make verl call this file's function, in this process; before or after verl's models are imported.

    Raises ImportError if verl is not installed.
    """
    try:
        __import__(_KERNEL)
    except ImportError as error:
        raise ImportError(
            f"cute_lce.integrations.verl: {_KERNEL} could not be imported, want verl (pip install verl)"
        ) from error
    for name in (_KERNEL, *_CALLERS):
        if name in sys.modules:
            vars(sys.modules[name])["linear_cross_entropy"] = linear_cross_entropy
