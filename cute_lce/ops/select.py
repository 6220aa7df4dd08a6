"""The implementation for a device and dtype. The kernels' is imported where a GPU is seen: it would be half
of what importing the package takes."""

from __future__ import annotations

import functools
import logging

import torch

from .. import environment
from ..implementation import Implementation, Statistics, StatsOperands, StatsOptions
from ..logit_term import term_of
from ..streaming import STATISTICS, STREAMING

_logger = logging.getLogger("cute_lce")

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_picked: dict[tuple[torch.device, torch.dtype], Implementation] = {}


def implementation(device: torch.device, dtype: torch.dtype) -> Implementation:
    """The implementation that serves tensors of this device and dtype."""
    return _picked.get((device, dtype)) or _pick(device, dtype)


def statistics(operands: StatsOperands, options: StatsOptions, schedule: str) -> Statistics:
    """What serves a call with terms or linear_logprob: the kernels, if they recompute, or keep what its
    gradients need. Raises ValueError by the name of the schedule for "keep" with a softcap and smoothing."""
    hidden = operands.hidden
    found = implementation(hidden.device, hidden.dtype)
    if found is STREAMING:
        return STATISTICS
    from .. import launch

    if found is not launch.KERNELS or not launch.token_stats.serves(operands, options):
        return STATISTICS
    capped = options.softcap is not None and term_of(options.softcap) is None
    if schedule == "keep" and capped and options.label_smoothing:
        raise ValueError(
            "schedule: got 'keep' with a softcap and label_smoothing, want 'recompute' or 'auto', or "
            "only one of the two terms"
        )
    keeps = schedule == "keep" and launch.token_stats.keeps(operands, options)
    return launch.STATISTICS if keeps or schedule in ("auto", "recompute") else STATISTICS


def _pick(device: torch.device, dtype: torch.dtype) -> Implementation:
    # Every call comes here, or to what an earlier one picked.
    environment.check()
    picked = STREAMING
    if environment.IMPLEMENTATION == "streaming":
        _log_switched_off()
    # A fake CUDA tensor may exist without a CUDA device.
    elif device.type == "cuda" and torch.cuda.is_available():
        from .. import launch

        if launch.serves(device, dtype):
            picked = launch.KERNELS
        elif not any(launch.serves(device, other) for other in launch.DTYPES):
            _log_streaming(device)
    _picked[device, dtype] = picked
    return picked


@functools.cache
def _log_switched_off() -> None:
    """Log once what was asked for."""
    _logger.info("CUTE_LCE_IMPLEMENTATION=streaming: the streaming path serves every call")


@functools.cache
def _log_streaming(device: torch.device) -> None:
    """Log once for each device that it has no kernels."""
    _logger.warning(
        "%s (%s, compute capability %d.%d): no kernels for it here, the streaming path serves it",
        device,
        torch.cuda.get_device_name(device),
        *torch.cuda.get_device_capability(device),
    )
