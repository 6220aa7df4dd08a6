"""The paper's Algorithm 1 with windows: a GEMM whose logits stay on the SM, and a small kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments import ForwardOutputs, KeepOutputs, Operands, Rows, units
from ..compile import cache
from ..compile.frozen import freeze
from ..implementation import Request, Results
from ..options import LossOptions
from ..plan import forward as forward_plan
from ..plan.kernels import ForwardKey
from ..plan.memory import forward_compaction_bytes, forward_compacts, keep_workspace_bytes
from ..plan.problem import Problem, round_up
from .device import Parts, aligned, dtype_name, gpu_of, loss_arguments, readable, template
from .packing import Packing
from .rows import Compaction

_NOTHING_KEPT = KeepOutputs(kept=0, kept_scale=0, workspace=0, pitch=0, columns=0)
LOSS_AND_COUNT = 16
"""Bytes of a loss and a count, which a shard's forward writes and nobody reads."""


def empty_kept(hidden: Tensor, kept_columns: int) -> tuple[Tensor, Tensor]:
    """Uninitialised (kept, kept_scale): (n, kept_columns rounded up to 8) and (n,) fp32."""
    n = hidden.shape[0]
    return hidden.new_empty((n, round_up(kept_columns, 8))), hidden.new_empty((n,), dtype=torch.float32)


def empty_kept_logits(hidden: Tensor, kept_columns: int) -> tuple[Tensor, Tensor]:
    """Uninitialised (kept, notes): (n, kept_columns rounded up to 8) and (units, n), fp16."""
    n, dtype = hidden.shape[0], torch.float16
    kept = hidden.new_empty((n, round_up(kept_columns, 8)), dtype=dtype)
    return kept, hidden.new_empty((units(kept_columns), n), dtype=dtype)


def forward(operands: Operands, loss: LossOptions, request: Request) -> KernelForward | EmptyForward:
    """A forward for hidden (n, d) and weight (V, d), both bfloat16 or both float16, any strides; target (n,).

    Operands that the kernels cannot read in place are copied (`aligned`). Statistics are fp32. A target
    out of range makes its row's loss and row_sum nan. With n = 0 nothing is launched. A call allocates the
    results, the plan's workspace (4 workspace_floats bytes) and the copies; it never synchronises; it runs on
    torch's current stream of hidden's device. Raises what `cache.get` raises, on the first call of a
    configuration.
    """
    if operands.hidden.shape[0] == 0:
        return EmptyForward(request.kept_columns, request.shard)
    return (ShardForward if request.shard else KernelForward)(operands, loss, request)


def _is_by_token(loss: LossOptions) -> bool:
    return loss.reduction in ("none", "logprob")


@dataclass(frozen=True)
class EmptyForward:
    """The forward of a call without rows, which launches nothing."""

    kept_columns: int
    shard: bool

    def statistics(self, operands: Operands, loss: LossOptions) -> Results:
        rows = operands.hidden.new_zeros((0,), dtype=torch.float32)
        kept = kept_scale = None
        if self.kept_columns:
            kept, kept_scale = empty_kept(operands.hidden, self.kept_columns)
        return Results(
            loss=rows if self.shard or _is_by_token(loss) else rows.new_zeros(()),
            row_max=rows.new_empty((0,)),
            row_sum=rows.new_empty((0,)),
            num_valid=rows.new_zeros((), dtype=torch.int64),
            kept=kept,
            kept_scale=kept_scale,
        )

    def finish(self, operands: Operands, loss: LossOptions, results: Results) -> Results:
        return results


class KernelForward:
    """See implementation.Forward. `statistics` computes everything: statistics, loss, and what is kept."""

    def __init__(
        self,
        operands: Operands,
        loss: LossOptions,
        request: Request,
        plan: forward_plan.ForwardPlan | None = None,
    ):
        """plan: None: chosen for the request."""
        hidden, weight, target = operands
        device, (n, d) = hidden.device, hidden.shape
        kept = request.kept_columns
        # The alignment of addresses is checked in every call.
        self.in_place = readable(operands)
        half, needs = hidden.dtype is torch.float16, request.statistics
        self.keeps_logits = kept > 0 and "kept_logits" in loss.terms
        sizes = n, round_up(d, 8), weight.shape[0]
        problem = Problem(*sizes, half, needs, needs, self.keeps_logits)
        beside = {"kept": kept, "reserved": forward_compaction_bytes(problem, kept)}
        gpu = gpu_of(device).serving(loss.terms, "keep" if kept else "forward")
        chosen = plan or forward_plan.plan(gpu, *sizes, request.limits, **beside)
        dtypes = dtype_name(hidden.dtype), dtype_name(target.dtype)
        self.function = cache.get(ForwardKey(chosen.config, *dtypes, keeps=kept > 0, terms=loss.terms))
        self.gemm, self.nothing_kept = freeze(chosen.gemm), freeze(_NOTHING_KEPT)
        self.kept_columns, self.pitch = kept, round_up(kept, 8)
        self.partials = chosen.gemm.windows * chosen.config.partials_per_window
        self.row, self.count = template(device, torch.float32, n), template(device, torch.int64)
        self.kept = template(device, torch.float16 if self.keeps_logits else hidden.dtype, n, self.pitch)
        self.notes = template(device, torch.float16, units(kept), n) if self.keeps_logits else None
        self.loss = self.row if _is_by_token(loss) else template(device, torch.float32)
        # Statistics that are not requested go behind the workspace.
        self.packing = Packing(hidden, kept) if request.packs or not needs else None
        behind = 0 if self.packing is None or needs else self.packing.template.nbytes
        self.wants_statistics = needs
        parts, keep_parts = Parts(), Parts()
        parts.reserve(4 * chosen.workspace_floats)
        self.behind = parts.reserve(LOSS_AND_COUNT if request.shard else behind)
        # A shard's `finish` needs it too, if there is something to finish.
        self.finishes = request.shard and kept > 0 and not self.keeps_logits
        keeping = keep_parts if self.finishes else parts
        self.keep_workspace = keeping.reserve(0 if self.keeps_logits else keep_workspace_bytes(n, kept))
        self.compaction, self.all_rows = None, freeze(Rows(first=0, tokens=n))
        if forward_compacts(problem, kept):
            copied = n * problem.d * hidden.dtype.itemsize
            self.compaction = Compaction(keeping, n, target.dtype.itemsize, copied)
        self.workspace = template(device, torch.uint8, parts.nbytes)
        self.workspace_of_both = template(device, torch.uint8, keep_parts.nbytes)

    def statistics(self, operands: Operands, loss: LossOptions) -> Results:
        return self.run(operands, loss, None)

    def run(self, operands: Operands, loss: LossOptions, target_logit: Tensor | None) -> Results:
        """target_logit (n,) fp32: written. Kernels whose logits have slopes want it."""
        if not self.in_place or (operands.hidden.data_ptr() | operands.weight.data_ptr()) % 16:
            operands = aligned(operands)
        total, scratch = torch.empty_like(self.loss), torch.empty_like(self.workspace)
        workspace = scratch.data_ptr()
        results, outputs, kept, kept_scale = self._results(total, workspace)
        if target_logit is not None:
            outputs = outputs._replace(target_logit=target_logit.data_ptr())
        keep = self.nothing_kept
        if self.keeps_logits:
            keep = self._keep_outputs(kept, 0, kept_scale)
        elif self.kept_columns:
            keep = self._keep_outputs(kept, kept_scale, workspace + self.keep_workspace)
        rows = self.all_rows if self.compaction is None else self.compaction.rows(workspace)
        self.function(*operands, loss_arguments(loss), outputs, rows, self.gemm, keep)
        return results

    def _keep_outputs(self, kept: int, kept_scale: int, workspace: int) -> KeepOutputs:
        return KeepOutputs(
            kept=kept,
            kept_scale=kept_scale,
            workspace=workspace,
            pitch=self.pitch,
            columns=self.kept_columns,
        )

    def _results(self, total: Tensor, workspace: int) -> tuple[Results, ForwardOutputs, int, int]:
        """The results, and where they lie, with the addresses of kept and kept_scale."""
        packing = self.packing
        if packing is not None:
            results, start = Results(loss=total), workspace + self.behind
            if self.wants_statistics:
                packed = torch.empty_like(packing.template)
                results, start = Results(loss=total, kept=packed), packed.data_ptr()
            outputs = ForwardOutputs(
                loss=total.data_ptr(),
                row_max=start + packing.row_max,
                row_sum=start + packing.row_sum,
                num_valid=start + packing.num_valid,
                workspace=workspace,
            )
            return results, outputs, start + packing.kept, start + packing.kept_scale
        row_max, row_sum = torch.empty_like(self.row), torch.empty_like(self.row)
        num_valid = torch.empty_like(self.count)
        outputs = ForwardOutputs(
            loss=total.data_ptr(),
            row_max=row_max.data_ptr(),
            row_sum=row_sum.data_ptr(),
            num_valid=num_valid.data_ptr(),
            workspace=workspace,
        )
        results = Results(loss=total, row_max=row_max, row_sum=row_sum, num_valid=num_valid)
        if not self.kept_columns:
            return results, outputs, 0, 0
        beside = self.row if self.notes is None else self.notes
        kept, kept_scale = torch.empty_like(self.kept), torch.empty_like(beside)
        results = results._replace(kept=kept, kept_scale=kept_scale)
        return results, outputs, kept.data_ptr(), kept_scale.data_ptr()

    def finish(self, operands: Operands, loss: LossOptions, results: Results) -> Results:
        return results


class ShardForward(KernelForward):
    """The same of a shard of the vocabulary: `finish` completes what is kept."""

    def run(self, operands: Operands, loss: LossOptions, target_logit: Tensor | None) -> Results:
        scratch = torch.empty_like(self.workspace)
        row_max, row_sum = torch.empty_like(self.row), torch.empty_like(self.row)
        if target_logit is None:
            target_logit = torch.empty_like(self.row)
        kept = keep_workspace = None
        if self.notes is not None:
            kept, keep_workspace = torch.empty_like(self.kept), torch.empty_like(self.notes)
        elif self.kept_columns:
            kept, keep_workspace = torch.empty_like(self.kept), torch.empty_like(self.workspace_of_both)
        results = Results(target_logit, row_max, row_sum, None, kept, keep_workspace)
        self._launch(operands, loss, results, None, scratch)
        return results

    def finish(self, operands: Operands, loss: LossOptions, results: Results) -> Results:
        if not self.finishes:
            return results
        kept_scale = torch.empty_like(self.row)
        self._launch(operands, loss, results, kept_scale)
        return results._replace(kept_scale=kept_scale)

    def _launch(
        self,
        operands: Operands,
        loss: LossOptions,
        results: Results,
        kept_scale: Tensor | None,
        scratch: Tensor | None = None,
    ) -> None:
        """The statistics, or, given kept_scale, which is written, the completion of what is kept."""
        if not self.in_place or (operands.hidden.data_ptr() | operands.weight.data_ptr()) % 16:
            operands = aligned(operands)
        target_logit, row_max, row_sum, _, kept, keep_workspace = results
        assert row_max is not None
        assert row_sum is not None
        workspace = 0 if scratch is None else scratch.data_ptr()
        outputs = ForwardOutputs(
            loss=workspace + self.behind + 8,
            row_max=row_max.data_ptr(),
            row_sum=row_sum.data_ptr(),
            num_valid=workspace + self.behind,
            workspace=workspace,
            target_logit=target_logit.data_ptr(),
            shard=1,
            finishes=int(kept_scale is not None),
        )
        keep = self.nothing_kept
        if kept is not None and keep_workspace is not None:
            scales = 0 if kept_scale is None else kept_scale.data_ptr()
            start = 0 if self.keeps_logits else self.keep_workspace
            keep = self._keep_outputs(kept.data_ptr(), scales, keep_workspace.data_ptr() + start)
        rows = self.all_rows
        if self.compaction is not None:
            if self.finishes and keep_workspace is not None:
                workspace = keep_workspace.data_ptr()
            rows = self.compaction.rows(workspace)
            rows = rows._replace(gathers=int(kept_scale is None))
        # At most one loss and one count are written, and nobody reads them.
        summed = loss_arguments(loss._replace(reduction="sum"))
        self.function(*operands, summed, outputs, rows, self.gemm, keep)
