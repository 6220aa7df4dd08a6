"""grad_in_forward: chunks of tokens, each a forward that keeps all columns and the backward of those."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..arch import Gpu
from . import backward, forward, schedule
from .candidates import Candidate, faster_splits
from .cost import LAUNCH_CLOCKS, Gemm, Rates, floor_seconds, gemm_of
from .epilogues import SUMS, Epilogue
from .gemm import cluster_count
from .memory import (
    DEFAULT_WORKSPACE,
    chunk_bytes,
    chunk_forward_bytes,
    grad_in_forward_bytes,
    refuse_workspace,
    usable,
    workspace_for,
)
from .plans import BackwardPlan, ForwardPlan
from .problem import Limits, Problem, ceil_div, round_up, steps

CHUNK_STEPS, UNITS = 4, (128, 160, 192)
"""How many sizes of chunks are considered until they have doubled, of whole tiles of these widths."""
ADDED = Epilogue(45.0, 45.0, 4, exposed=3.2, beside="beside_sliced")
"""Of dweight's GEMM where TMA copies or adds its fp32 product to memory: twice as many bytes as a 16-bit
product's pass through shared memory. What L2 reads for an addition comes on top (`_added_clocks`)."""
ADDED_SHARE = 0.75
"""Of the time in which DRAM reads what is added to: by so much an addition takes longer than a write, on an
H200 by 0.6 at (1936, 4096, 262144), by 0.9 at (1760, 3584, 152064)."""
WIDE, MANY = 128, 1024
"""Tokens that dinput's tiles have at least in chunks of so many: on an H200 those of 96 filled all their
rounds in chunks of 6656, and took some 7% longer than the model has it. Like the model's constants for all
architectures."""
FAR = 1.02
"""Times its GEMMs, which "auto" expects grad_in_forward to take at least, and what other schedules take with
any workspace. Where they take no more within the limits, it spares that plan, which takes tens of
milliseconds, and what it expects never rises with the workspace."""


class ChunkPlan(NamedTuple):
    """The passes of a chunk of as many tokens; clocks: predicted; bytes: of their workspace."""

    forward: ForwardPlan
    backward: BackwardPlan
    clocks: int
    bytes: int


class GradInForwardPlan(NamedTuple):
    """tokens: of each chunk, in order. chunks: the plan of each of these numbers. bytes: beyond the results.
    clocks: predicted."""

    tokens: tuple[int, ...]
    chunks: dict[int, ChunkPlan]
    bytes: int
    clocks: int


class _Choice(NamedTuple):
    bytes: int
    clocks: int
    chunk: int


@functools.lru_cache(maxsize=1024)
def plan(gpu: Gpu, problem: Problem, limits: Limits) -> GradInForwardPlan:
    """The fastest within limits.workspace; 0: the default, or what is needed to come near the fastest. There
    is at least one token."""
    found = _choices(gpu, problem)
    room = usable(limits.workspace or max(DEFAULT_WORKSPACE, workspace_for(_helpful(found))))
    fit = [choice for choice in found if choice.bytes <= room] or [min(found)]
    chosen = min(fit, key=lambda choice: (choice.clocks, choice.bytes))
    full, rest = divmod(problem.n, chosen.chunk)
    tokens = (chosen.chunk,) * full + ((rest,) if rest else ())
    chunks = {count: _chunk(gpu, problem, count) for count in set(tokens)}
    return GradInForwardPlan(tokens, chunks, chosen.bytes, chosen.clocks)


def seconds_of(gpu: Gpu, problem: Problem, clocks: int) -> float:
    """What chunks of so many clocks, and the pass that makes gradients of the accumulators, are predicted to
    take."""
    rates = Rates(gpu, problem.n * problem.d * problem.vocab)
    rows = problem.need_dinput * problem.n + problem.need_dweight * problem.vocab
    return (clocks + 6 * rows * problem.d / rates.read) / rates.clock


def predict(gpu: Gpu, problem: Problem, limits: Limits) -> schedule.Prediction:
    """What a call is predicted to take, within limits that are accepted."""
    chosen, best = plan(gpu, problem, limits).clocks, min(each.clocks for each in _choices(gpu, problem))
    taken, least = (seconds_of(gpu, problem, clocks) for clocks in (chosen, best))
    return schedule.Prediction(taken, least, floor_seconds(gpu, problem))


def predict_auto(gpu: Gpu, problem: Problem, limits: Limits) -> schedule.Prediction | None:
    """What "auto" is predicted to take with it, where a call allows it; None: it does not look, since another
    schedule has all that can be expected, nothing fits, or another is as fast."""
    if limits.window or not problem.wants_gradient or not problem.n:
        return None
    other = schedule.predict(gpu, problem, "auto", limits)
    least = max(FAR * other.floor, other.best)
    room = usable(limits.workspace or DEFAULT_WORKSPACE)
    if other.seconds <= least:
        return None
    fit = [each.clocks for each in _choices(gpu, problem, room) if each.bytes <= room]
    taken = seconds_of(gpu, problem, min(fit)) if fit else other.seconds
    return other._replace(seconds=max(least, taken)) if taken < other.seconds else None


def helpful_workspace(gpu: Gpu, problem: Problem, wanted: str, limits: Limits, best: float) -> int:
    """The least bytes with which a call is predicted to take little more than `best` seconds. wanted:
    "grad_in_forward", or "auto", which may take another schedule then."""
    most = schedule.HELPFUL * best
    enough = [
        workspace_for(each.bytes)
        for each in _choices(gpu, problem)
        if seconds_of(gpu, problem, each.clocks) <= most
    ]
    if wanted == "auto":
        clock = Rates(gpu, problem.n * problem.d * problem.vocab).clock
        enough.append(schedule.workspace_within(gpu, problem, wanted, limits, most * clock))
    return min(enough)


def least_workspace(gpu: Gpu, problem: Problem) -> int:
    """The least bytes of workspace that are accepted, by the rule of the other schedules."""
    taken = [(seconds_of(gpu, problem, each.clocks), each.bytes) for each in _choices(gpu, problem)]
    most = schedule.most_accepted(min(taken)[0], floor_seconds(gpu, problem))
    return workspace_for(min(nbytes for seconds, nbytes in taken if seconds <= most))


def check_workspace(gpu: Gpu, problem: Problem, limits: Limits) -> None:
    """Raise ValueError for a workspace that is less than the least that is accepted."""
    if limits.workspace and problem.n:
        least = least_workspace(gpu, problem)
        if limits.workspace < least:
            raise refuse_workspace("grad_in_forward", limits.workspace, least)


def _helpful(found: list[_Choice]) -> int:
    """The fewest bytes of those that take at most HELPFUL times the clocks of the fastest."""
    most = schedule.HELPFUL * min(choice.clocks for choice in found)
    return min(choice.bytes for choice in found if choice.clocks <= most)


@functools.lru_cache(maxsize=256)
def _choices(gpu: Gpu, problem: Problem, room: int | None = None) -> list[_Choice]:
    """Sizes of chunks, whatever the workspace; room: but for those that need more bytes at the least."""
    n, found = problem.n, []
    configs = gpu.row.configs_for(n, 0)
    # Whole tiles of the widest clusters, or of some of those that dinput's GEMM has to itself: others divide
    # nearly the same chunks.
    wide = [each for each in configs.dhidden if each.tile_n in UNITS]
    units = {each.cluster_columns for each in (configs.tokens[-1], *wide)}
    chunks = {
        min(round_up(ceil_div(n, count), unit), n)
        for unit in units
        for count in steps(ceil_div(n, unit), CHUNK_STEPS)
    }
    # Sizes that fill the rounds of dinput's tiles; what is left is a smaller chunk.
    for each in wide:
        across, clusters = ceil_div(problem.d, each.cluster_rows), cluster_count(each, gpu.sms)
        for rounds in steps(ceil_div(across * ceil_div(n, each.cluster_columns), clusters), CHUNK_STEPS):
            chunks.add(min(max(rounds * clusters // across, 1) * each.cluster_columns, n))
    for chunk in sorted(chunks):
        full, rest = divmod(n, chunk)
        count = full + (rest > 0)
        least = grad_in_forward_bytes(problem, count, chunk_bytes(problem, chunk, 0, 1))
        if room is not None and least > room:
            continue
        passes = [_chunk(gpu, problem, chunk)] * full + ([_chunk(gpu, problem, rest)] if rest else [])
        nbytes = grad_in_forward_bytes(problem, count, max(each.bytes for each in passes))
        clocks = sum(each.clocks for each in passes) + (count - 1) * _added_clocks(gpu, problem)
        found.append(_Choice(nbytes, clocks, chunk))
    return found


def _added_clocks(gpu: Gpu, problem: Problem) -> int:
    """What a chunk behind the first, which writes, takes to add to dweight's accumulator: L2 reads it, which
    MMAs hide in part."""
    read = Rates(gpu, problem.n * problem.d * problem.vocab).read
    return int(ADDED_SHARE * 4 * problem.vocab * problem.d / read) if problem.need_dweight else 0


@functools.lru_cache(maxsize=4096)
def _chunk(gpu: Gpu, problem: Problem, chunk: int) -> ChunkPlan:
    """Of `chunk` of the problem's tokens."""
    d, vocab = problem.d, problem.vocab
    macs = problem.n * d * vocab
    limits = Limits(workspace=chunk_forward_bytes(problem, chunk))
    forwards = forward.plan(gpu, chunk, d, vocab, limits, kept=vocab)
    gemm = gemm_of(gpu, forwards.config, macs)
    partials = forwards.gemm.windows * gemm.partials
    clocks = LAUNCH_CLOCKS + gemm.forward(forwards.rounds, chunk, d, vocab, partials, vocab)
    configs = gpu.row.configs_for(chunk, 0)
    # No logits are computed again.
    least = WIDE if chunk >= MANY else 0
    gemms = {
        gemm_of(gpu, dhidden, macs): tokens
        for tokens, dhidden in configs.pairs_for(chunk)
        if dhidden.tile_n >= least
    }
    split = [(gemm, faster_splits(gemm, d, chunk, vocab)[-1]) for gemm in gemms]

    def dinput_clocks(gemm: Gemm, splits: int) -> int:
        return gemm.clocks(d, chunk, vocab, SUMS, splits) + gemm.sums(chunk, d, 1, splits)

    dhidden, splits = min(split, key=lambda each: (dinput_clocks(*each), -each[0].columns))
    dweight = min(
        (gemm_of(gpu, config, macs) for config in configs.dweight_of_parts),
        key=lambda gemm: gemm.clocks(vocab, d, chunk, ADDED),
    )
    # The factors, and the scaled rows.
    clocks += LAUNCH_CLOCKS + int(4 * chunk * d / dhidden.rates.read)
    if problem.need_dinput:
        clocks += LAUNCH_CLOCKS + dinput_clocks(dhidden, splits)
    if problem.need_dweight:
        clocks += LAUNCH_CLOCKS + dweight.clocks(vocab, d, chunk, ADDED)
    of_chunk = problem._replace(n=chunk)
    nbytes = chunk_bytes(problem, chunk, 4 * forwards.workspace_floats, splits if problem.need_dinput else 1)
    candidate = Candidate(clocks, nbytes, 0, splits)
    chosen = gemms[dhidden], dhidden.config, dweight.config
    backwards = backward.build(gpu, of_chunk, vocab, chosen, candidate)
    return ChunkPlan(forwards, backwards, clocks, nbytes)
