"""The Protocol that streaming/ and launch/ satisfy, and what they exchange with ops/.

A forward passes to its backward only the row statistics and what was kept. The format of the latter is
private to an implementation; apart from it a forward of one and a backward of another may be combined. Both
passes have phases, between which collectives belong where the vocabulary is sharded. On one device they run
back to back, and both implementations do a pass's work in its first phase.

Shapes, with "acc" for float32 (float64 for float64):
    hidden (n, d), weight (V, d): one dtype, any strides. target (n,): int64 or int32, any stride.
    loss: acc, () for "mean" and "sum", (n,) for "none". dloss: loss's shape and dtype, any strides.
    row_max, row_sum: acc (n,), sum_v exp(z_v) = row_sum exp(row_max). row_sum is nan where the target is
        out of range, from which every gradient of that row becomes nan. An ignored row has its ordinary
        statistics.
    num_valid: int64 (), the targets that are not ignored.
    A row's loss is log(row_sum) + (row_max - target_logit), which has no cancellation under a common offset
    of its logits.
    The accumulators: acc (n, d) and (V, d), the gradients of the sum of the rows' losses.
    dinput (n, d), dweight (V, d): hidden's dtype, contiguous.

No method synchronises with a device; on a CPU the targets are checked. No argument but `out` is modified.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .arguments import Operands
from .options import LossOptions
from .plan.problem import NO_LIMITS, Limits, Problem


class Request(NamedTuple):
    """What an implementation is asked for, besides operands and loss.

    limits: window, columns of the vocabulary at once, and workspace, bytes that may be allocated beyond the
    results; 0: the implementation's choice. kept_columns: how many columns the forward keeps, from the first.
    need_dinput, need_dweight: which gradients will be needed. statistics: whether results other than the loss
    are needed. added: the dtype of a tensor of the caller's to which dweight will be added; None: there is
    none. shard: whether weight is a part of the vocabulary, and target counts from its first class: one
    outside it that is not ignore_index belongs to another part. The two phases of a pass are then apart:
    Forward and Backward say what the first one gives.
    """

    limits: Limits = NO_LIMITS
    kept_columns: int = 0
    need_dinput: bool = True
    need_dweight: bool = True
    statistics: bool = True
    added: torch.dtype | None = None
    shard: bool = False


class Results(NamedTuple):
    """What a forward returns. If only the loss was requested, the others may be None; kept and kept_scale are
    None if nothing is kept."""

    loss: Tensor
    row_max: Tensor | None = None
    row_sum: Tensor | None = None
    num_valid: Tensor | None = None
    kept: Tensor | None = None
    kept_scale: Tensor | None = None


class Saved(NamedTuple):
    """What a backward receives from its forward: the operands, and the results without the loss."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    row_max: Tensor
    row_sum: Tensor
    num_valid: Tensor
    kept: Tensor | None = None
    kept_scale: Tensor | None = None

    @property
    def operands(self) -> Operands:
        return Operands(self.hidden, self.weight, self.target)


class Forward(Protocol):
    """A forward prepared for operands of one kind (devices, dtypes, shapes, strides) and a loss's static
    fields; it can be reused for every such call."""

    def statistics(self, operands: Operands, loss: LossOptions) -> Results:
        """The row statistics, and whatever else can be computed before they are merged.

        Of a shard, `loss` is each row's target logit (n,), nan where the target is not in it; row_max and
        row_sum are those of its columns; num_valid is None; kept_scale is what `finish` makes it of.
        """
        ...

    def finish(self, operands: Operands, loss: LossOptions, results: Results) -> Results:
        """The complete results: what of the loss and the kept columns depends on the merged statistics.

        results: what `statistics` returned, of a shard with row_max, row_sum and the target logits of the
        whole vocabulary; nan among the latter makes its row's loss and row_sum nan.
        """
        ...


BothGradients = tuple[Tensor | None, Tensor | None]
"""(dinput, dweight); None for one that is not requested, or was added to the caller's tensor."""


class Halfway(NamedTuple):
    """What a shard's backward returns between its phases: BothGradients, with dinput in acc and not yet
    reduced over the shards; rest: what of dweight is still to be computed, for the implementation."""

    dinput: Tensor | None
    dweight: Tensor | None
    rest: Any = None


class Backward(Protocol):
    """A backward prepared as a Forward is, for the gradients that are requested and the columns that the
    forward kept; it can be reused for every such call.

    out: (V, d) of request.added, contiguous: dweight is added to it in acc and rounded once, instead of being
    returned. Both phases get the same.
    """

    def dinput(
        self, dloss: Tensor, saved: Saved, loss: LossOptions, out: Tensor | None = None
    ) -> BothGradients | Halfway:
        """dinput, and whatever of dweight should not wait for its reduction. Of a shard: Halfway."""
        ...

    def dweight(
        self,
        dloss: Tensor,
        saved: Saved,
        loss: LossOptions,
        gradients: BothGradients | Halfway,
        out: Tensor | None = None,
    ) -> BothGradients:
        """Both gradients, complete; of a shard, dinput as it is. gradients: what `dinput` returned."""
        ...


class Accumulated(NamedTuple):
    """What grad_in_forward returns: the loss, and both gradients of the sum of the rows' losses."""

    loss: Tensor
    num_valid: Tensor
    dinput: Tensor | None
    dweight: Tensor | None


class Implementation(Protocol):
    """streaming.STREAMING and launch.KERNELS."""

    def choose(
        self,
        problem: Problem,
        dtype: torch.dtype,
        device: torch.device,
        schedule: str,
        reduction: str,
        limits: Limits,
    ) -> tuple[str, int]:
        """(schedule, columns to keep): "recompute", "keep" or "grad_in_forward". Sizes may be symbolic.

        Raises ValueError naming the least workspace_mb if the given one is too small, and naming schedule if
        the requested one cannot serve the call.
        """
        ...

    def forward(self, operands: Operands, loss: LossOptions, request: Request) -> Forward: ...

    def empty_kept(self, hidden: Tensor, kept_columns: int) -> tuple[Tensor, Tensor]:
        """Uninitialised (kept, kept_scale) of the shapes and dtypes that a forward's results have."""
        ...

    def backward(self, operands: Operands, loss: LossOptions, request: Request) -> Backward: ...

    def grad_in_forward(self, operands: Operands, loss: LossOptions, request: Request) -> Accumulated:
        """The loss and the accumulators that the request needs, contiguous, within limits.workspace, apart
        from copies of operands and gradients whose rows are padded. limits.window is the streaming path's."""
        ...

    def scale_gradients(
        self,
        dloss: Tensor,
        accumulated: Accumulated,
        loss: LossOptions,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> BothGradients:
        """The accumulators times the upstream gradient, rounded once. accumulated.loss is not read.

        out: as in Backward, for dweight's.
        """
        ...
