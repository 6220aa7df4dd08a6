"""The paper's Algorithms 3 and 4, a chunk of tokens at a time: a forward that keeps all columns, then the
gradients' GEMMs from what it kept. Three GEMMs for any number of tokens, and one chunk's logits in memory.
Chunks are of compacted tokens, each of which copies its own hidden states if a token is ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import (
    COPIES,
    Counters,
    ForwardOutputs,
    GradientOperands,
    Gradients,
    KeepOutputs,
    LossArguments,
    Operands,
    Statistics,
    Upstream,
)
from ..compile import cache
from ..compile.frozen import freeze
from ..implementation import Accumulated, Request
from ..options import LossOptions
from ..plan import grad_in_forward as plans
from ..plan.kernels import BackwardKey, ForwardKey
from ..plan.memory import keep_workspace_bytes, partials_in_rows
from ..plan.problem import Problem, round_up
from ..streaming import STREAMING
from .device import Parts, aligned, dtype_name, gpu_of, loss_arguments, unpadded
from .rows import Compaction
from .steps import COUNTERS


class _Chunk:
    """What chunks of as many tokens have in common: compiled functions, grids, and offsets in the workspace.

    Losses are asked for by row, and the gradients are those of their sum: the upstream gradient is 1.
    """

    def __init__(self, plan: plans.ChunkPlan, dtypes: tuple[str, str], terms: tuple, problem: Problem):
        """terms: LossOptions.terms."""
        forward, backward = plan.forward, plan.backward
        n, d, vocab = forward.n, problem.d, problem.vocab
        self.forward = cache.get(ForwardKey(forward.config, *dtypes, keeps=True, terms=terms))
        self.backward = cache.get(BackwardKey(*backward.configs, *dtypes, added="float32", terms=terms))
        (stripe,) = backward.stripes
        self.paced = bool(stripe.dhidden.paced or stripe.dweight.paced)
        # Not the last: the sum of dhidden stays in fp32.
        self.grid, self.stripe = freeze(forward.gemm), freeze(stripe._replace(is_last=0))
        self.pitch, self.columns, self.d = round_up(vocab, 8), vocab, d
        self.half = problem.half
        parts = Parts()
        self.kept_scale, self.factor = (parts.reserve(4 * n) for _ in range(2))
        self.kept = parts.reserve(2 * n * self.pitch)
        self.weight_factor = parts.reserve(4 if problem.half else 0)
        # The backward's lie where the forward's were. Until dinput's GEMM writes the chunk's rows of its
        # accumulator, the copied hidden states and, if there is room, the partials lie there.
        of_forward, of_backward = Parts(parts.nbytes), Parts(parts.nbytes)
        copied, partials = 2 * n * d, 4 * forward.workspace_floats
        self.in_rows = partials_in_rows(problem, n, partials)
        self.partials = copied if self.in_rows else of_forward.reserve(partials)
        self.keep = of_forward.reserve(keep_workspace_bytes(n, vocab))
        self.hidden = 0 if problem.need_dinput else of_forward.reserve(copied)
        self.scaled = of_backward.reserve(2 * n * d if problem.need_dweight else 0)
        # Several splits are summed to the accumulator.
        self.splits = backward.splits if problem.need_dinput else 1
        self.sums = of_backward.reserve(4 * n * d * self.splits if self.splits > 1 else 0)
        self.nbytes = max(of_forward.nbytes, of_backward.nbytes)

    def keep_outputs(self, start: int) -> KeepOutputs:
        """start: the address of the chunk's workspace."""
        return KeepOutputs(
            kept=start + self.kept,
            kept_scale=start + self.kept_scale,
            workspace=start + self.keep,
            pitch=self.pitch,
            columns=self.columns,
        )

    def gradient_operands(self, start: int) -> GradientOperands:
        """Of what `keep_outputs` says."""
        return GradientOperands(
            dlogits=start + self.kept,
            pitch=self.pitch,
            factor=start + self.factor,
            weight_factor=start + self.weight_factor if self.half else 0,
            hidden=start + self.scaled,
            hidden_pitch=self.d,
            kept_scale=start + self.kept_scale,
            scales=1,
        )


def empty_source(hidden: Tensor, need_dinput: bool) -> Tensor:
    """See implementation.Implementation."""
    return hidden.new_empty((hidden.shape[0] if need_dinput else 0,), dtype=torch.int32)


def grad_in_forward(operands: Operands, loss: LossOptions, request: Request) -> Accumulated:
    """See implementation.Implementation. Allocates the accumulators, each row's loss, and a workspace."""
    n = operands.hidden.shape[0]
    if n == 0:
        return STREAMING.grad_in_forward(operands, loss, request)
    features = operands.hidden.shape[1]
    hidden, weight, target = operands = aligned(operands)
    device, vocab, d = hidden.device, weight.shape[0], hidden.shape[1]
    half = hidden.dtype is torch.float16
    adds = request.added is not None
    problem = Problem(n, d, vocab, half, request.need_dinput, request.need_dweight, adds=adds)
    plan = plans.plan(gpu_of(device), problem, request.limits)
    names = dtype_name(hidden.dtype), dtype_name(target.dtype)
    chunks = {tokens: _Chunk(each, names, loss.terms, problem) for tokens, each in plan.chunks.items()}

    def rows(count: int) -> Tensor:
        return torch.empty((count, d), dtype=torch.float32, device=device)

    dinput = rows(n) if request.need_dinput else None
    dweight = rows(vocab) if request.need_dweight else None
    source = None if dinput is None else empty_source(hidden, True)
    losses = torch.empty((n,), dtype=torch.float32, device=device)
    one = torch.ones((), dtype=torch.float32, device=device)
    parts = Parts()
    # Chunks are of compacted tokens: once all valid ones are done, the others are empty. So are the rows of
    # dinput's accumulator.
    compaction = Compaction(parts, n, target.dtype.itemsize)
    counters = COUNTERS * len(plan.tokens) if any(chunk.paced for chunk in chunks.values()) else 0
    progress = parts.reserve(4 * counters)
    row_max, row_sum, of_chunk = parts.reserve(4 * n), parts.reserve(4 * n), parts.reserve(8)
    begin = parts.reserve(max(chunk.nbytes for chunk in chunks.values()))
    scratch = torch.empty((parts.nbytes,), dtype=torch.uint8, device=device)
    compacted = compaction.rows(scratch.data_ptr())
    if source is not None:
        compacted = compacted._replace(source=source.data_ptr())
    start = scratch.data_ptr() + begin
    arguments = _per_row(loss)
    upstream = Upstream(dloss=one.data_ptr(), stride=0)
    outputs = ForwardOutputs(
        loss=losses.data_ptr(),
        row_max=scratch.data_ptr() + row_max,
        row_sum=scratch.data_ptr() + row_sum,
        num_valid=scratch.data_ptr() + of_chunk,
        workspace=0,
    )
    statistics = Statistics(row_max=outputs.row_max, row_sum=outputs.row_sum, num_valid=outputs.num_valid)
    first = 0
    for i, tokens in enumerate(plan.tokens):
        chunk = chunks[tokens]
        own = 0 if dinput is None else dinput.data_ptr() + 4 * first * d
        places = compacted._replace(first=first, tokens=tokens, hidden=own or start + chunk.hidden)
        if i > 0:
            places = places._replace(gathers=COPIES)
        workspace = (own if chunk.in_rows else start) + chunk.partials
        chunk.forward(
            *(*operands, arguments),
            *(outputs._replace(workspace=workspace), places, chunk.grid),
            chunk.keep_outputs(start),
        )
        sums_are_rows = own and chunk.splits == 1
        gradients = Gradients(
            # Read for whether it is 0; what is written is the sums.
            dhidden=own,
            dweight=0 if dweight is None else dweight.data_ptr(),
            sums=own if sums_are_rows else start + chunk.sums,
            adds=int(i > 0),
        )
        places = places._replace(gathers=0, accumulator=0 if sums_are_rows else own, in_order=1)
        kept = chunk.gradient_operands(start)
        groups = arguments, upstream, statistics, gradients, kept, places, chunk.stripe
        # The first chunk's zeroes the counters of all.
        address = scratch.data_ptr() + progress + 4 * COUNTERS * i
        chunk.backward(*operands, *groups, Counters(address=address, clears=0 if i > 0 else counters))
        first += tokens
    count = scratch[compaction.count : compaction.count + 4].view(torch.int32)
    num_valid = count.sum(dtype=torch.int64)
    # Copies of padded accumulators are made with as little beside them as can be.
    del scratch, count
    dinput = unpadded(dinput, features)
    dweight = unpadded(dweight, features)
    return Accumulated(_reduced(losses, num_valid, loss.reduction), num_valid, dinput, dweight, source)


def _per_row(loss: LossOptions) -> LossArguments:
    """The loss's arguments for a loss of each row, whose upstream gradient is applied as it is."""
    return loss_arguments(loss._replace(reduction="none"))


def _reduced(losses: Tensor, num_valid: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum(dtype=torch.float64)
    if reduction == "mean":
        total = total / num_valid.clamp(min=1)
    return total.float()
