"""What stands for the device that launch/ asks about, and for the kernels that it asks `compile` for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from unittest import mock

import pytest

from cute_lce import launch
from cute_lce.arch import Gpu, KernelConfig
from cute_lce.compile import cache
from cute_lce.ops import prepared
from cute_lce.plan import backward as backward_plans
from cute_lce.plan import candidates, grad_in_forward, memory, schedule
from cute_lce.plan import forward as forward_plans
from cute_lce.plan.kernels import Key


def tile_of(config: KernelConfig) -> tuple[int, ...]:
    """Tokens of a tile, how many are side by side in a cluster, and its classes if these are not 128."""
    return config.tile_n, config.cluster_n, *([config.tile_m] * (config.tile_m != 128))


class Functions(Protocol):
    """What stands for the compiled functions."""

    def get(self, key: Key, /) -> Callable[..., Any] | None: ...


@contextlib.contextmanager
def planned_for(
    gpu: Gpu, functions: Functions | None = None, forward: forward_plans.ForwardPlan | None = None
) -> Iterator[None]:
    """While active, launch/ plans for `gpu`, whatever the tensors' device is.

    functions: where compiled functions come from; None: `compile`. forward: the plan of every forward; None:
    the planner's.
    """
    forget_device()
    with contextlib.ExitStack() as stack:
        stack.callback(forget_device)
        modules = launch.forward, launch.backward, launch.choose, launch.grad_in_forward, launch.merge
        for module in (*modules, launch.multiply):
            stack.enter_context(mock.patch.object(module, "gpu_of", return_value=gpu))
        if functions is not None:
            stack.enter_context(mock.patch.object(cache, "_functions", functions))
        if forward is not None:
            stack.enter_context(mock.patch.object(forward_plans, "plan", return_value=forward))
        yield


def forget_device() -> None:
    """Empty the caches that do not expect a device to change."""
    launch.device.gpu_of.cache_clear()
    launch.device.template.cache_clear()
    launch.merge._prepared.cache_clear()
    prepared.cache.clear()
    launch.token_stats.forget()


def forget_plans() -> None:
    """Empty the caches that do not expect an architecture's row to change."""
    candidates.candidates.cache_clear()
    schedule._call.cache_clear()
    schedule.predict.cache_clear()
    forward_plans.plan.cache_clear()
    backward_plans.plan.cache_clear()
    for cached in (grad_in_forward.plan, grad_in_forward._choices, grad_in_forward._chunk):
        cached.cache_clear()


def accepted(call: Callable[[float], object], workspace_mb: float = 0.0) -> float:
    """The least workspace_mb that a call accepts, by its refusal of less; or more, if more is given."""
    with pytest.raises(ValueError, match="want at least") as raised:
        call(0.001)
    return max(workspace_mb, float(str(raised.value).split("want at least ")[1].split()[0]))


def two_sweeps(patch: pytest.MonkeyPatch, chunk: int, columns: int, splits: int = 1) -> None:
    """Backwards by chunks of tokens for dinput, and then by stripes of columns for dweight."""
    forget_plans()

    def within(gpu, problem, kept, limits):
        assert not kept
        found = candidates.candidates(gpu, problem)
        enough = memory.sweeps_bytes(problem, chunk, splits, columns)
        return found, candidates.Candidate(0, enough, columns if problem.need_dweight else 0, splits, chunk)

    patch.setattr(backward_plans, "backward_within", within)
