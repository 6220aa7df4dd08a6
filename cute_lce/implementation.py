"""The Protocol that streaming/ and launch/ satisfy, and what they exchange with ops/.

A forward passes to its backward only the row statistics and what was kept. The format of the latter is
private to an implementation; apart from it a forward of one and a backward of another may be combined. Both
passes have phases, between which collectives belong where the vocabulary is sharded. On one device they run
back to back, and both implementations do a pass's work in its first phase.

Shapes, with "acc" for float32 (float64 for float64):
    hidden (n, d), weight (V, d): one dtype, any strides. target (n,): int64 or int32, any stride.
    loss: acc, () for "mean" and "sum", (n,) for "none". dloss: loss's shape and dtype, any strides.
    row_max, row_sum: acc (n,), sum_v exp(z_v) = row_sum exp(row_max). row_sum is nan where the target is
        out of range, from which every gradient of that row becomes nan. Of an ignored row they are
        finite and otherwise arbitrary. row_max: the largest logit; or the target's, where that has most of
        the sum; or a number near lse.
    num_valid: int64 (), the targets that are not ignored.
    A row's loss is log(row_sum) + (row_max - target_logit), which has no cancellation under a common offset
    of its logits.
    The accumulators: acc (n, d) and (V, d), the gradients of the sum of the rows' losses.
    dinput (n, d), dweight (V, d): hidden's dtype, contiguous.

A call with terms (options.TermOptions, and tensors beside the operands), and every call of linear_logprob, is
a Statistics' instead: numbers of each token, from which ops/ makes the loss, and the gradients from those by
these numbers. `ops.select.statistics` picks it: the kernels' where they serve such a call, else the streaming
path's.

No method synchronises with a device; on a CPU the targets are checked. No argument but `out`, and what a
request overwrites, is modified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import maths
from .arguments import Operands
from .exchange import LocalTargets, Merge, Merged, RowSums, Sum
from .options import LossOptions, TermOptions
from .plan.problem import NO_LIMITS, Collective, Limits, Problem
from .symbolic import as_tensor, example_of, is_symbolic


class Request(NamedTuple):
    """What an implementation is asked for, besides operands and loss.

    limits: window, columns of the vocabulary at once, and workspace, bytes that may be allocated beyond the
    results; 0: the implementation's choice. kept_columns: how many columns the forward keeps, from the first.
    need_dinput, need_dweight: which gradients will be needed. statistics: whether results other than the loss
    are needed. packs: whether a forward may leave them in one tensor, if it is not of a shard (Results).
    added: the dtype of a tensor of the caller's to which dweight will be added; None: there is
    none. shard: whether weight is a part of the vocabulary, and target counts from its first class: one
    outside it that is not ignore_index belongs to another part. The two phases of a pass are then apart:
    Forward and Backward say what the first one gives. is_summed: whether a shard's dinput is summed over the
    shards before it is rounded. beside: what runs beside the second phase of a shard's backward. need_dbias:
    of a Statistics. overwrites: whether a Statistics' backward may write to what was kept: it frees kept
    logits, whose place dlogits take.
    """

    limits: Limits = NO_LIMITS
    kept_columns: int = 0
    need_dinput: bool = True
    need_dweight: bool = True
    statistics: bool = True
    packs: bool = False
    added: torch.dtype | None = None
    shard: bool = False
    is_summed: bool = True
    beside: Collective | None = None
    need_dbias: bool = False
    overwrites: bool = False


class Results(NamedTuple):
    """What a forward returns. If only the loss was requested, the others may be None; kept and kept_scale are
    None if nothing is kept. Packed: all but the loss is in `kept`, in a format of the implementation's own,
    which its backward for the same request reads, and `unpacked`; the others are None."""

    loss: Tensor
    row_max: Tensor | None = None
    row_sum: Tensor | None = None
    num_valid: Tensor | None = None
    kept: Tensor | None = None
    kept_scale: Tensor | None = None


class Saved(NamedTuple):
    """What a backward receives from its forward: the operands, and the results without the loss, which may be
    packed."""

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
        """The complete results. Of a shard: results with what is kept complete; they are what `statistics`
        returned, with row_max and row_sum of the whole vocabulary."""
        ...


BothGradients = tuple[Tensor | None, Tensor | None]
"""(dinput, dweight); None for one that is not requested, or was added to the caller's tensor."""


class Halfway(NamedTuple):
    """What a shard's backward returns between its phases: BothGradients, with dinput of this shard, in acc if
    it is to be summed, else in acc or rounded; rest: what of dweight is still to be computed, for the
    implementation; join: makes the device wait for what began to run beside dweight in between, which a
    launch that leaves no room to it must not overtake."""

    dinput: Tensor | None
    dweight: Tensor | None
    rest: Any = None
    join: Callable[[], object] | None = None


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
    """What grad_in_forward returns: the loss, and both gradients of the sum of the rows' losses. source (n,)
    int32: which token each row of dinput is, the valid ones first; the others' rows hold anything. None: rows
    are the tokens', and those of ignored ones 0."""

    loss: Tensor
    num_valid: Tensor
    dinput: Tensor | None
    dweight: Tensor | None
    source: Tensor | None = None


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
        may_accumulate: bool = False,
    ) -> tuple[str, int]:
        """(schedule, columns to keep): "recompute", "keep" or "grad_in_forward". Sizes may be symbolic.
        may_accumulate: whether "auto" may become "grad_in_forward": a call that nothing intercepts. Raises
        ValueError naming the least workspace_mb if the given one is too small, and naming schedule if the
        requested one cannot serve the call."""
        ...

    def forward(self, operands: Operands, loss: LossOptions, request: Request) -> Forward: ...

    def empty_kept(self, hidden: Tensor, kept_columns: int) -> tuple[Tensor, Tensor]:
        """Uninitialised (kept, kept_scale) of the shapes and dtypes that a forward's results have."""
        ...

    def backward(self, operands: Operands, loss: LossOptions, request: Request) -> Backward: ...

    def unpacked(self, saved: Saved, kept_columns: int) -> Saved:
        """What a forward packed, as tensors of their own."""
        ...

    def grad_in_forward(self, operands: Operands, loss: LossOptions, request: Request) -> Accumulated:
        """The loss and the accumulators that the request needs, contiguous, within limits.workspace, apart
        from copies of operands and gradients whose rows are padded. limits.window is the streaming path's."""
        ...

    def empty_source(self, hidden: Tensor, need_dinput: bool) -> Tensor:
        """Uninitialised Accumulated.source of the shape that grad_in_forward's has; empty for None."""
        ...

    def scale_gradients(
        self,
        dloss: Tensor,
        target: Tensor,
        accumulated: Accumulated,
        loss: LossOptions,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> BothGradients:
        """The accumulators times the upstream gradient, rounded once; zeros in ignored rows, whatever the
        upstream gradient is. accumulated.loss is not read. out: as in Backward, for dweight's."""
        ...

    def localize(
        self, target: Tensor, ignore_index: int, start: int, columns: int, equal: bool
    ) -> LocalTargets:
        """Targets (n,) as the shard of classes [start, start + columns) has them. equal: whether start was
        derived from the rank, which is right if all shards have as many classes."""
        ...

    def merge(self, gathered: Tensor, targets: LocalTargets, loss: LossOptions) -> Merged:
        """Fold shards in their order. gathered: acc (shards, 3 n + 1), of each the header, row_max, row_sum
        and target logits. loss: with arguments.IGNORED for ignore_index. Once for what `localize` gave."""
        ...

    def merge_sums(self, gathered: Tensor, targets: LocalTargets, *, entropy: bool, total: bool) -> RowSums:
        """The same of what a Statistics needs. gathered: as for `merge`, and behind that with `entropy`
        mean_gap (n,), with `total` total_gap (n,) and weight (1,); of the latter `total_gap` alone is
        merged."""
        ...


# ----------------------------------------------------------------------------------------------------------
# Calls with terms


class StatsOperands(NamedTuple):
    """The tensors that numbers of each token are computed from.

    linear_bias (V,): hidden's dtype. class_weight (V,): any floating dtype; of total_nll, and of the loss
    that options say; None: ones.
    temperature (n,): any floating dtype; only those of valid rows matter. topk_ids (n, K): int64 or int32.
    """

    hidden: Tensor
    weight: Tensor
    target: Tensor
    linear_bias: Tensor | None = None
    class_weight: Tensor | None = None
    temperature: Tensor | None = None
    topk_ids: Tensor | None = None


class StatsOptions(NamedTuple):
    """What the numbers are: z = softcap((h W^T + linear_bias) logit_scale) / temperature, with the number
    `temperature` unless there is a tensor; and which are computed, names of Stats up to mean_logit.

    z_loss, label_smoothing: TermOptions', if gradients will be those of a RowLoss of the numbers; where
    something is kept they may have to be known. entropy_grad: whether entropy may have one.
    """

    ignore_index: int
    logit_scale: float
    softcap: float | None
    temperature: float
    outputs: tuple[str, ...]
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    entropy_grad: bool = True

    @classmethod
    def of(cls, loss: LossOptions, terms: TermOptions) -> StatsOptions:
        """Of the numbers that RowLoss makes a loss of."""
        numbers = loss.ignore_index, loss.logit_scale, terms.softcap, 1.0
        return cls(*numbers, terms.numbers, terms.z_loss, terms.label_smoothing)

    @property
    def example(self) -> StatsOptions:
        """With what symbolic numbers are while they are traced."""
        names = "logit_scale", "softcap", "temperature", "z_loss", "label_smoothing"
        return self._replace(**{name: example_of(getattr(self, name)) for name in names})

    @property
    def saves_logits(self) -> bool:
        """Whether a backward may read the logits of targets and of given ids: for the slope of a softcap."""
        return self.softcap is not None


class Stats(NamedTuple):
    """Numbers of each token, acc (n,) but for those named; None where not asked for, 0 in ignored rows.

    logprob: z - lse of the target. lse. entropy: -sum p log p. total_nll: the sum of class_weight (lse - z)
    over all classes. topk_logprob (n, K): z - lse of the given ids, 0 for an id that is no class. argmax
    int64: the first class with the largest z. is_top1 bool: whether that is the target. log_sum_sq_probs:
    log sum p^2. mean_logit: of z over the classes.
    For the backward: row_max, row_sum as above. mean_gap: sum p (row_max - z), if entropy is asked for. kept
    (n, kept_columns): products of hidden and weight, or what kernels keep, with kept_scale, as in Results, or
    of kept logits (units, n) fp16; onehot_ratio: what was subtracted from that at the target, over the
    softmax, where it is not 1. target_logit: z of the target, where options.saves_logits; topk_logit (n,
    K): likewise of the ids, of use where they are classes. sorted_ids int32: these as the kernels take them.
    """

    logprob: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    total_nll: Tensor | None = None
    topk_logprob: Tensor | None = None
    argmax: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logit: Tensor | None = None
    row_max: Tensor | None = None
    row_sum: Tensor | None = None
    mean_gap: Tensor | None = None
    kept: Tensor | None = None
    target_logit: Tensor | None = None
    kept_scale: Tensor | None = None
    onehot_ratio: Tensor | None = None
    topk_logit: Tensor | None = None
    sorted_ids: Tensor | None = None


class StatsUpstream(NamedTuple):
    """The upstream gradients of the differentiable numbers; None for one that there is none of."""

    logprob: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    total_nll: Tensor | None = None
    topk_logprob: Tensor | None = None


class StatsSaved(NamedTuple):
    """What the backward receives of its forward, fields of Stats; kept None: nothing is."""

    row_max: Tensor
    row_sum: Tensor
    mean_gap: Tensor | None
    kept: Tensor | None
    target_logit: Tensor | None = None
    kept_scale: Tensor | None = None
    onehot_ratio: Tensor | None = None
    topk_logit: Tensor | None = None
    sorted_ids: Tensor | None = None


class RowLoss(NamedTuple):
    """The loss of a row in terms of its numbers: `token_weight (class weight of the target x nll, smoothed,
    + z_loss lse^2)`. target_weight, token_weight: acc (n,), finite in ignored rows. Numbers of terms may be
    tensors ()."""

    terms: TermOptions
    target_weight: Tensor | None
    token_weight: Tensor | None

    def with_tensors(self, device: torch.device) -> RowLoss:
        """With tensors for symbolic numbers."""
        if not any(map(is_symbolic, self.terms)):
            return self
        numbers = (as_tensor(each, device) if is_symbolic(each) else each for each in self.terms)
        return self._replace(terms=TermOptions._make(numbers))

    def losses(self, nll: Tensor, stats: Stats, classes: int | Tensor) -> Tensor:
        """Each row's loss, differentiable by both; 0 if ignored. nll: -logprob. classes: V, of a group ()."""
        loss = nll
        if self.target_weight is not None:
            loss = loss * self.target_weight
        if stats.total_nll is not None:
            loss = maths.smoothed(loss, stats.total_nll, self.terms.label_smoothing, classes)
        if stats.lse is not None:
            z_loss = self.terms.z_loss
            if isinstance(z_loss, Tensor):
                loss = loss + stats.lse * stats.lse * z_loss
            else:
                loss = torch.addcmul(loss, stats.lse, stats.lse, value=z_loss)
        return loss if self.token_weight is None else loss * self.token_weight

    def upstream(self, dloss: Tensor, stats: Stats, classes: int | Tensor) -> StatsUpstream:
        """The gradients of `losses` by stats. dloss: (n,), or () of their sum: then those that are the same
        in every row are () too."""
        dnll = dloss if self.token_weight is None else dloss * self.token_weight
        dlse = None if stats.lse is None else maths.z_loss_upstream(dnll, stats.lse, self.terms.z_loss)
        dtotal = None
        if stats.total_nll is not None:
            dnll, dtotal = maths.smoothed_upstream(dnll, self.terms.label_smoothing, classes)
        if self.target_weight is not None:
            dnll = dnll * self.target_weight
        return StatsUpstream(logprob=-dnll, lse=dlse, total_nll=dtotal)


AllGradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""(dinput, dweight, dbias); None for one that is not needed, or was added to the caller's tensor."""


class Statistics(Protocol):
    """streaming.STATISTICS and launch.STATISTICS. The request's need_dinput and need_dweight are of input and
    linear_weight."""

    def choose(
        self,
        problem: Problem,
        operands: StatsOperands,
        options: StatsOptions,
        schedule: str,
        reduction: str,
        limits: Limits,
    ) -> tuple[str, int]:
        """As Implementation.choose."""
        ...

    def empty_kept(
        self, operands: StatsOperands, options: StatsOptions, kept_columns: int
    ) -> dict[str, Tensor]:
        """Uninitialised fields of Stats, of their shapes and dtypes, that a forward which keeps so many
        columns has besides others."""
        ...

    def forward(
        self, operands: StatsOperands, options: StatsOptions, request: Request, merge: Merge | None = None
    ) -> Stats:
        """merge: where the request is of a shard, from whose first class topk_ids count as its targets do.
        It is called once."""
        ...

    def backward(
        self,
        upstream: StatsUpstream,
        operands: StatsOperands,
        saved: StatsSaved,
        options: StatsOptions,
        request: Request,
        out: Tensor | None = None,
        add_up: Sum | None = None,
    ) -> AllGradients:
        """The gradients that the request needs, each rounded once. out: as in Backward. add_up: of a shard
        whose dinput is summed: called once, if dinput is needed, and dinput is what it gives."""
        ...

    def grad_in_forward(
        self, operands: StatsOperands, options: StatsOptions, row_loss: RowLoss, request: Request
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(each row's loss, acc accumulators of dinput, dweight, dbias for an upstream of 1)."""
        ...
