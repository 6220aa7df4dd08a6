"""How the backward obtains the logits: how many columns are kept for it, and how much workspace is enough."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ..arch import Gpu
from ..arguments import KEPT_TILE
from .candidates import STRIPE_MULTIPLE, Candidate, Candidates, candidates
from .cost import floor_clocks, floor_seconds, gemm_of
from .forward import choices, choose_config, fastest, spare_bytes
from .forward import plan as forward_plan
from .memory import (
    DEFAULT_WORKSPACE,
    backward_bytes,
    forward_bytes,
    forward_compaction_bytes,
    keeping_bytes,
    kept_sums_bytes,
    note_bytes,
    refuse_workspace,
    usable,
    window_bytes,
    workspace_for,
)
from .problem import Limits, Problem, round_up

SLOWEST = 1.8
"""A workspace is accepted if a call is predicted to take at most this many times its GEMMs."""
NEAR_BEST = 1.5
"""Where no workspace makes SLOWEST possible, a call may take this many times what the best one would."""
SLOW = 1.25
"""A call that is predicted to take more than this many times what it could take is logged."""
HELPFUL = 1.1
"""The workspace that the log names is the least with which it takes at most this many times that."""
UNLIMITED = 1 << 60
"""Bytes of workspace that hold whatever a plan wants."""


class Prediction(NamedTuple):
    """Seconds that a call is predicted to take: with its workspace, with any, and its GEMMs alone."""

    seconds: float
    best: float
    floor: float

    @property
    def is_slow(self) -> bool:
        return self.seconds > SLOW * self.best


class _Call:
    """The forward and backward of one problem: clocks by what is kept and by the workspace."""

    def __init__(self, gpu: Gpu, problem: Problem, window: int):
        self.gpu, self.problem, self.window = gpu, problem, window
        self.candidates = candidates(gpu, problem, window)
        n, d, vocab = problem.n, problem.d, problem.vocab
        # Of a forward that keeps nothing, and of one that keeps.
        self.tokens = tuple(
            gemm_of(gpu, choose_config(gpu, n, d, vocab, keeps, window), n * d * vocab)
            for keeps in (False, True)
        )
        self._choices: dict[int, list[tuple[int, int, int]]] = {}

    def kept(self, schedule: str) -> Sequence[int]:
        """What a forward may keep."""
        keeps = schedule != "recompute" and self.problem.wants_gradient
        return self.candidates.kept if keeps else (0,)

    def chosen(self, schedule: str, limits: Limits) -> int:
        """The columns that a schedule keeps within the limits."""
        return self.fastest(self.kept(schedule), limits, both=schedule != "keep")[1]

    def clocks(self, kept: int, limits: Limits) -> int:
        """Clocks of the fastest call that keeps as many columns."""
        return self._backward(kept, usable(self.workspace(limits, kept))).clocks + self._forward(kept, limits)

    def fastest(self, kept: Sequence[int], limits: Limits, both: bool = True) -> tuple[int, int]:
        """(clocks, columns kept) of the fastest call within the limits; without `both` passes, of the
        fastest backward."""
        problem, forward = self.problem, self._least_forward if both else 0
        room = usable(self.workspace(limits, 0))
        nothing = self._backward(0, room)
        best = nothing.clocks + (self._forward(0, limits) if both else 0), 0
        if nothing.bytes > room:
            best = UNLIMITED, 0
        if not any(kept):
            return best
        workspace = self.workspace(limits, max(kept))
        room = usable(workspace)
        # Whatever keeps more is likely to be faster, and spares looking at the rest.
        for columns in reversed(kept):
            if not columns or keeping_bytes(problem.n, columns) + forward_bytes(problem, columns) > workspace:
                continue
            clocks, nbytes = self.candidates.least(columns)
            if nbytes <= room and clocks + forward <= best[0]:
                backward = self._backward(columns, room)
                if backward.bytes <= room and backward.clocks + forward <= best[0]:
                    total = backward.clocks + (self._forward(columns, limits) if both else 0)
                    best = min(best, (total, columns))
        return best

    def least(self, kept: Sequence[int], most: float) -> int:
        """The fewest bytes of workspace with which a call takes at most `most` clocks."""
        least, problem = UNLIMITED, self.problem
        for columns in kept:
            if columns and workspace_for(self.candidates.least(columns)[1]) >= least:
                continue
            for backward in self._backwards(columns):
                enough = workspace_for(backward.bytes)
                if enough >= least:
                    break
                if backward.clocks + self._least_forward > most:
                    continue
                forwards = self._forwards(columns)
                for spare, clocks, _ in forwards:
                    if backward.clocks + clocks <= most:
                        forward = window_bytes(problem.n)
                        if spare > forwards[0][0]:
                            forward = forward // 2 + spare
                        forward += self._reserved(columns)
                        least = min(least, max(enough, forward + keeping_bytes(problem.n, columns)))
                        break
        return least

    @functools.cached_property
    def _least_forward(self) -> int:
        """Clocks of a forward that keeps nothing, with any workspace and tiles: no other takes fewer."""
        n, d, vocab = self.problem.n, self.problem.d, self.problem.vocab
        return min(fastest(choices(tokens, n, d, vocab, 0), UNLIMITED)[0] for tokens in self.tokens)

    def most_clocks(self, kept: Sequence[int]) -> float:
        """Of a call whose workspace is accepted."""
        best, _ = self.fastest(kept, Limits(self.window, UNLIMITED))
        return most_accepted(best, floor_clocks(self.gpu, self.problem))

    def least_accepted(self, schedule: str) -> int:
        """The least bytes of workspace that are accepted."""
        problem = self.problem
        if self.window:
            backward = backward_bytes(problem, min(self.window, problem.vocab))
            return max(forward_bytes(problem, 0), backward if problem.wants_gradient else 0)
        kept = self.kept(schedule)
        return self.least(kept, self.most_clocks(kept))

    def workspace(self, limits: Limits, kept: int) -> int:
        """Bytes that a call may allocate: limits.workspace, or the default, raised to the least accepted by
        "recompute", and if columns are kept by "auto" too."""
        if limits.workspace:
            return limits.workspace
        return max(self._default_recomputing, self._default_keeping) if kept else self._default_recomputing

    @functools.cached_property
    def _default_recomputing(self) -> int:
        return self._default("recompute")

    @functools.cached_property
    def _default_keeping(self) -> int:
        # "keep" accepts what "auto" does.
        return self._default("auto")

    def _default(self, schedule: str) -> int:
        """The default, raised to the least that a schedule accepts."""
        if not self.window:
            # Mostly it is fast enough, and spares looking for the least.
            taken, _ = self.fastest(self.kept(schedule), Limits(workspace=DEFAULT_WORKSPACE))
            if taken <= SLOWEST * floor_clocks(self.gpu, self.problem):
                return DEFAULT_WORKSPACE
        return max(DEFAULT_WORKSPACE, self.least_accepted(schedule))

    def _backwards(self, kept: int) -> list[Candidate]:
        return self.candidates.keeping(kept) if self.problem.wants_gradient else [Candidate(0, 0, 0)]

    def _backward(self, kept: int, room: int) -> Candidate:
        return self.candidates.best(kept, room) if self.problem.wants_gradient else Candidate(0, 0, 0)

    def _forward(self, kept: int, limits: Limits) -> int:
        problem = self.problem
        if limits.window:
            n, d, vocab = problem.n, problem.d, problem.vocab
            chosen = forward_plan(self.gpu, n, d, vocab, limits, kept=kept, reserved=self._reserved(kept))
            tokens = self.tokens[kept > 0]
            return tokens.forward(chosen.rounds, n, d, vocab, chosen.gemm.windows * tokens.partials, kept)
        spare = spare_bytes(problem.n, kept, limits, self._reserved(kept))
        return fastest(self._forwards(kept), spare)[0]

    def _reserved(self, kept: int) -> int:
        return forward_compaction_bytes(self.problem, kept)

    def _forwards(self, kept: int) -> list[tuple[int, int, int]]:
        found = self._choices.get(kept)
        if found is None:
            problem = self.problem
            found = choices(self.tokens[kept > 0], problem.n, problem.d, problem.vocab, kept)
            self._choices[kept] = found
        return found


_call = functools.lru_cache(maxsize=64)(_Call)


def most_accepted(best: float, floor: float) -> float:
    """What a call may take whose workspace is accepted. best: with any workspace; floor: its GEMMs alone."""
    most = SLOWEST * floor
    return most if best <= most else NEAR_BEST * best


def choose(gpu: Gpu, problem: Problem, schedule: str, limits: Limits) -> tuple[str, int]:
    """Decide among the kernels' schedules: ("recompute", 0) or ("keep", columns).

    schedule: "auto", "recompute" or "keep". "auto" takes what is predicted to be the fastest within the
    workspace; "keep" takes what has the fastest backward. Raises ValueError naming the least workspace_mb
    that is accepted for a smaller one.
    """
    if problem.n == 0:
        return "recompute", 0
    call = _call(gpu, problem, limits.window)
    if limits.workspace:
        least = call.least_accepted(schedule)
        if limits.workspace < least:
            raise refuse_workspace(schedule, limits.workspace, least)
    kept = call.chosen(schedule, limits)
    return ("keep", kept) if kept else ("recompute", 0)


def backward_within(gpu: Gpu, problem: Problem, kept: int, limits: Limits) -> tuple[Candidates, Candidate]:
    """The backward for what a forward kept: the fastest within the limits, and what it is one of."""
    call = _call(gpu, problem, limits.window)
    return call.candidates, call.candidates.best(kept, usable(call.workspace(limits, kept)))


@functools.lru_cache(maxsize=64)
def predict(gpu: Gpu, problem: Problem, schedule: str, limits: Limits) -> Prediction:
    """What a call is predicted to take. schedule: as for `choose`, which accepts the limits."""
    call = _call(gpu, problem, limits.window)
    rate = call.tokens[False].rates.clock
    seconds, best = (
        call.clocks(call.chosen(schedule, each), each) / rate
        for each in (limits, limits._replace(workspace=UNLIMITED))
    )
    return Prediction(seconds, best, floor_seconds(gpu, problem))


def least_workspace(gpu: Gpu, problem: Problem, schedule: str, limits: Limits) -> int:
    """The least bytes of workspace that are accepted."""
    return _call(gpu, problem, limits.window).least_accepted(schedule)


def helpful_workspace(gpu: Gpu, problem: Problem, schedule: str, limits: Limits) -> int:
    """The least bytes with which a call is predicted to take little more than with any workspace."""
    call = _call(gpu, problem, limits.window)
    best, _ = call.fastest(call.kept(schedule), limits._replace(workspace=UNLIMITED))
    return workspace_within(gpu, problem, schedule, limits, HELPFUL * best)


def workspace_within(gpu: Gpu, problem: Problem, schedule: str, limits: Limits, most: float) -> int:
    """The least bytes with which a call is predicted to take at most so many clocks; UNLIMITED if there are
    none."""
    call = _call(gpu, problem, limits.window)
    return call.least(call.kept(schedule), most)


def kept_of_any(gpu: Gpu, known: Problem, problem: Problem, kept: int, limits: Limits) -> int:
    """The columns to keep of a problem whose sizes may be symbolic, where a plan for `known` sizes keeps
    `kept`: all of them for as long as the workspace holds them, else what it holds beside stripes as wide
    as that plan's. What is compared here becomes a guard of the graph."""
    call = _call(gpu, known, limits.window)
    n, vocab = problem.n, problem.vocab
    if limits.workspace and problem.wants_gradient:
        # No backward has less than the narrowest stripe of dlogits.
        columns = min(limits.window or STRIPE_MULTIPLE, known.vocab) if problem.need_dweight else 0
        least = max(forward_bytes(problem, 0), backward_bytes(problem._replace(need_dinput=False), columns))
        if limits.workspace < least:
            raise refuse_workspace("recompute", limits.workspace, least)
    if not kept:
        return 0
    workspace = call.workspace(limits, kept)
    room = usable(workspace)
    forward = keeping_bytes(n, vocab) + forward_bytes(problem, vocab)
    columns = call.candidates.best(kept, room).columns
    stripe = min(columns, vocab) if known.keeps_logits else 0
    if kept == known.vocab and backward_bytes(problem, stripe, vocab) <= room and forward <= workspace:
        return vocab
    columns = columns or STRIPE_MULTIPLE
    if limits.window:
        # Stripes of kept logits are whole tiles of what is kept.
        columns = min(round_up(limits.window, KEPT_TILE), vocab)
    # Where one tile is kept, of more classes than it and a stripe have.
    one = backward_bytes(problem._replace(vocab=vocab + columns + KEPT_TILE), columns, KEPT_TILE)
    # A forward's statistics and one window take less than STRIPE_MULTIPLE columns of dlogits do.
    one += window_bytes(n) if columns < STRIPE_MULTIPLE else 0
    # Two bytes per row each, and their share of the notes and sums.
    tile = (2 * KEPT_TILE + note_bytes(KEPT_TILE)) * n + kept_sums_bytes(problem, KEPT_TILE)
    fit = (room - one) * KEPT_TILE // tile + KEPT_TILE
    return min(max(fit, 0), vocab) // STRIPE_MULTIPLE * STRIPE_MULTIPLE
