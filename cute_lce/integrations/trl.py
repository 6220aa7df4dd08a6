"""TRL's trainers: install() makes them score tokens with linear_logprob.

SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer and RLOOTrainer give their models a forward that passes the
hidden states of the tokens to be scored, and the head's weight, to one function in trl.trainer.utils, which
they look up at each call. install() replaces it by one with the same arguments and results.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..logprob import linear_logprob
from ..ops import implementation
from ..options import ComputeOptions

HOOK = "_ChunkedLogProbFunction"
"""The name in trl.trainer.utils that add_fused_lm_head's forward looks up in each call."""
PARAMETERS = (
    "ctx",
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
)
"""Those of the hook's forward."""
OUTPUTS = {
    "log_probs": "logprob",
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logit",
    "is_top1": "is_top1",
}
"""TRL's name of a result -> TokenStats'; in the order of the hook's results."""


class Results(NamedTuple):
    """Each (n,), or None where it was not asked for; the first two are differentiable."""

    logprobs: Tensor
    entropy: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logits: Tensor | None
    is_top1: Tensor | None


class LogProb:
    """What stands in for TRL's autograd function: a class of which `apply` is called."""

    compute = ComputeOptions()

    @classmethod
    def apply(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = tuple(OUTPUTS),
    ) -> Results:
        """Numbers of each token of softcap((hidden @ weight.T + bias) logit_scale) / temperature.

        hidden: (n, d), n may be 0. weight: (V, d), bias: (V,) or None, both cast to hidden's dtype, or as
        autocast has it. targets: (n,), in [0, V). chunk_size: not used; schedule and workspace_mb are
        install's. outputs: names of OUTPUTS; the log-probability is always computed.

        Raises ValueError for a weight that DeepSpeed's ZeRO-3 shards, and for one that needs a gradient and
        was gathered from the shards of FSDP2.
        """
        if not torch.compiler.is_compiling():
            _check(hidden, weight)
        names = [own for name, own in OUTPUTS.items() if name in outputs or own == "logprob"]
        found = linear_logprob(
            hidden,
            weight.to(hidden.dtype),
            targets,
            temperature=temperature,
            outputs=tuple(names),
            linear_bias=None if bias is None else bias.to(hidden.dtype),
            logit_scale=logit_scale,
            softcap=final_logit_softcapping,
            **cls.compute._asdict(),
        )._asdict()
        return Results(*(found[own] for own in OUTPUTS.values()))


def _check(hidden: Tensor, weight: Tensor) -> None:
    """Raise ValueError for a weight whose gradient would be wrong; warn of what the kernels do not serve."""
    if hasattr(weight, "ds_id"):
        raise ValueError(
            "weight: got one that DeepSpeed's ZeRO-3 shards and frees before the backward, want "
            "uninstall() there"
        )
    if "ToTorchTensor" in type(weight.grad_fn).__name__:
        raise ValueError(
            "weight: got one that TRL gathered from a fully_shard unit of its own, whose gradient TRL does "
            "not sum over the ranks; want the head in the root's unit or in one with the norm"
        )
    if hidden.dtype is torch.float32 and not torch.is_autocast_enabled(hidden.device.type):
        _warn_of_float32(hidden.device)


@functools.cache
def _warn_of_float32(device: torch.device) -> None:
    """Once, where bfloat16 would have had kernels."""
    if implementation(device, torch.bfloat16) is not implementation(device, torch.float32):
        warnings.warn(
            "float32 hidden states at the head (cast_lm_head_to_fp32, or a float32 model) take the streaming "
            "path, in plain torch: want bfloat16 or float16 for the kernels",
            stacklevel=4,
        )


def install(*, schedule: str = "auto", workspace_mb: float | None = None) -> None:
    """Make TRL's trainers score tokens with cute_lce.linear_logprob, in this process, from the next call on.

    Results and gradients equal those of TRL's own function, but the logits stay in float32 where TRL rounds
    them to 16 bits. Under FSDP2 the head must be in the root's unit or in one with the norm, where accelerate
    puts it, since TRL reads the head's weight outside the head's forward. Calling install again changes the
    options.

    Args:
        schedule: "auto", "recompute" or "keep", as in linear_logprob.
        workspace_mb: as in linear_logprob, for every call.

    Raises:
        ImportError: a version of TRL without this function, or with another signature of it.
        ValueError, TypeError: for the options, as in linear_logprob.
    """
    from trl.trainer import utils

    compute = ComputeOptions(schedule, workspace_mb)
    if schedule == "grad_in_forward":
        raise ValueError("schedule: got 'grad_in_forward', want 'recompute', 'keep' or 'auto'")
    theirs: Any = getattr(utils, HOOK, None)
    if theirs is not LogProb:
        forward = getattr(theirs, "forward", None)
        parameters = tuple(inspect.signature(forward).parameters) if forward else ()
        if parameters != PARAMETERS:
            raise ImportError(f"trl: got {HOOK} with parameters {parameters}, want trl 1.16's, {PARAMETERS}")
        _replaced[HOOK] = theirs
        setattr(utils, HOOK, LogProb)
    LogProb.compute = compute


def uninstall() -> None:
    """Restore TRL's own function. Raises ValueError if install was not called."""
    from trl.trainer import utils

    if getattr(utils, HOOK, None) is not LogProb:
        raise ValueError("trl: got no function of cute_lce's in it, want install() first")
    setattr(utils, HOOK, _replaced.pop(HOOK))


_replaced: dict[str, Any] = {}
"""What install has replaced."""
