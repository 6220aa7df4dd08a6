"""What a backward may do, with bytes and clocks: the candidates that a plan chooses from.

They are a function of the problem alone; a workspace only decides which of them fit. So a larger workspace
never makes the cheapest one slower.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..arch import Gpu, KernelConfig
from ..arguments import KEPT_TILE
from .cost import Gemm, Gemms, chunk_clocks, gemm_of, heat, split_clocks, stripe_clocks
from .epilogues import DLOGITS, DWEIGHT
from .memory import backward_bytes, dlogits_bytes, sweeps_bytes
from .problem import Problem, ceil_div, round_up, steps

STRIPE_MULTIPLE = 256
"""Columns that are whole tiles in all three GEMMs."""
LEAST_DEPTH = 1024
"""Columns of dhidden's k for each of its splits, but for the last."""
MOST_ROUNDS = 8
"""Rounds of dhidden's GEMM, divided into splits, that are considered: more fill the last one no better."""
KEPT_STEPS = 32
"""Numbers of kept columns that are considered."""
STRIPE_STEPS, CHUNK_STEPS, REST_STEPS = 24, 8, 8
"""How many widths of stripes until they have doubled, of chunks, and of stripes beside kept columns."""
EVEN_STRIPES = 8
"""Stripes into which what is beside kept columns is divided equally, at most."""


class Candidate(NamedTuple):
    """A backward. clocks: of its GEMMs and sums. bytes: that it allocates, with what was kept for it.

    columns: of each recomputed stripe except the last; 0 if there is none. splits: of dhidden's k. chunk:
    tokens of each chunk but the last, where dinput has a sweep of its own; 0: it is summed over the stripes.
    """

    clocks: int
    bytes: int
    columns: int
    splits: int = 1
    chunk: int = 0


class Candidates:
    """Those of one problem. window: columns of every stripe, as the caller wants them; 0: any."""

    def __init__(self, gpu: Gpu, problem: Problem, window: int = 0):
        self.problem, self.window = problem, window
        dweight = _dweight(gpu, problem, window)
        tokens, dhidden, self._splits = _tokens(gpu, problem, window)
        self._computing = Gemms(tokens, dhidden, dweight)
        self._keeping_all, self._kept_splits = self._computing, self._splits
        if not problem.has_stripes_of_logits:
            # What overwrites kept logits are spare warps of dweight's GEMM, for which high tiles leave no
            # registers (overlap.pieces).
            dweight = _dweight(gpu, problem, window, all_is_kept=not problem.overwrites)
            if problem.need_dinput:
                tokens, dhidden, self._kept_splits = _tokens(gpu, problem, window, all_is_kept=True)
            self._keeping_all = Gemms(tokens, dhidden, dweight)
        # Clocks of a column of the vocabulary, were every round full: of its logits, and in the gradients.
        area = problem.n * problem.d
        self._logits = self._computing.tokens.least(area)
        dhiddens = self._computing.dhidden, self._keeping_all.dhidden
        self._gradients = min(each.least(area) for each in dhiddens) * problem.need_dinput
        dweights = self._computing.dweight, self._keeping_all.dweight
        self._gradients += min(each.least(area) for each in dweights) * problem.need_dweight
        self._stripes: dict[tuple[int, int, bool], int] = {}
        self._keeping: dict[int, list[Candidate]] = {}

    def gemms(self, kept: int) -> Gemms:
        """Of those that find `kept` columns kept."""
        return self._keeping_all if kept == self.problem.vocab else self._computing

    def keeping(self, kept: int) -> list[Candidate]:
        """Those that find `kept` columns kept: by rising bytes, each faster than all before it."""
        found = self._keeping.get(kept)
        if found is None:
            problem = self.problem
            if kept and problem.has_stripes_of_logits:
                every = self._stripes_of_logits(kept)
            elif kept == problem.vocab:
                every = self._kept_only()
            elif kept or self.window or not problem.need_dinput:
                every = self._one_sweep(kept)
            else:
                every = [*self._one_sweep(0), *self._two_sweeps()]
            found = self._keeping[kept] = _fastest(every)
        return found

    def best(self, kept: int, most: int) -> Candidate:
        """The fastest that takes at most `most` bytes; if none does, the one that takes the fewest."""
        found = self.keeping(kept)
        return found[max(bisect_right(found, most, key=_bytes) - 1, 0)]

    def least(self, kept: int) -> tuple[int, int]:
        """(clocks, bytes) that none of those that find `kept` columns kept are below, found at once."""
        problem = self.problem
        left = problem.vocab - kept
        total = self._logits * left + self._gradients * problem.vocab
        if not kept:
            return int(total), 0
        widths = [min(self.window or STRIPE_MULTIPLE, left)]
        if problem.has_stripes_of_logits:
            # The widest may be the only stripe, and need no sum of dinput.
            widths = self._widths_of_logits(kept)
        return int(total), min(backward_bytes(problem, each, kept) for each in (widths[0], widths[-1]))

    @functools.cached_property
    def kept(self) -> list[int]:
        """The numbers of columns that a forward may keep: none, steps of whole tiles, all."""
        vocab = self.problem.vocab
        tiles = vocab // STRIPE_MULTIPLE
        multiples = {STRIPE_MULTIPLE * (tiles * i // KEPT_STEPS) for i in range(KEPT_STEPS + 1)}
        return sorted({*multiples, vocab})

    def _kept_only(self) -> list[Candidate]:
        problem, kept = self.problem, self.problem.vocab
        found = []
        for splits in self._kept_splits:
            clocks = self._kept_stripe(kept, splits) + self._sums(1, splits, kept)
            found.append(Candidate(clocks, backward_bytes(problem, 0, kept, splits), 0, splits))
        return found

    def _one_sweep(self, kept: int) -> list[Candidate]:
        """Stripes, over which dinput is summed."""
        problem, found = self.problem, []
        n, left = problem.n, problem.vocab - kept
        if kept:
            widths = {*self._widths(left, REST_STEPS), *self._even_widths(left)}
        else:
            widths = self._widths(left, STRIPE_STEPS)
        for splits in self._splits:
            alone = splits not in (1, self._splits[-1])
            begun = self._kept_stripe(kept, splits) if kept and not alone else 0
            beside = backward_bytes(problem, 0, kept, splits)
            for columns in widths:
                if LEAST_DEPTH * (splits - 1) >= max(columns, kept):
                    continue
                if columns == left and not kept:
                    beside = backward_bytes(problem, columns, 0, splits) - dlogits_bytes(problem, n, columns)
                elif alone:
                    # Several stripes: one split or the most of them.
                    continue
                full, rest = divmod(left, columns)
                clocks = begun + self._sums(full + (rest > 0) + (kept > 0), splits)
                clocks += full * self._stripe(columns, splits) + (self._stripe(rest, splits) if rest else 0)
                nbytes = beside + dlogits_bytes(problem, n, columns)
                found.append(Candidate(clocks, nbytes, columns, splits))
        return found

    def _stripes_of_logits(self, kept: int) -> Iterator[Candidate]:
        """Stripes of kept logits, and then of those that are computed again."""
        problem = self.problem
        left = problem.vocab - kept
        for columns in self._widths_of_logits(kept):
            for splits in {self._splits[0], self._splits[-1]}:
                if LEAST_DEPTH * (splits - 1) >= columns:
                    continue
                clocks = stripes = 0
                for part, is_kept in ((kept, True), (left, False)):
                    full, rest = divmod(part, columns)
                    clocks += full * self._stripe(columns, splits, is_kept)
                    clocks += self._stripe(rest, splits, is_kept) if rest else 0
                    stripes += full + (rest > 0)
                clocks += self._sums(stripes, splits)
                yield Candidate(clocks, backward_bytes(problem, columns, kept, splits), columns, splits)

    def _widths_of_logits(self, kept: int) -> list[int]:
        """Columns of stripes of kept logits, and of the others."""
        widths = self._widths(max(kept, self.problem.vocab - kept), STRIPE_STEPS)
        # A unit of what was kept is in one stripe.
        return [round_up(widths[0], KEPT_TILE)] if self.window else widths

    def _two_sweeps(self) -> Iterator[Candidate]:
        """dinput by chunks of tokens and dweight by stripes, each from logits of its own: five GEMMs, and no
        sum of dinput over stripes."""
        chunks = _fastest(self._chunks())
        stripes = _fastest(self._dweight_stripes()) if self.problem.need_dweight else [Candidate(0, 0, 0)]
        for level in sorted({*map(_bytes, chunks), *map(_bytes, stripes)}):
            if level >= max(chunks[0].bytes, stripes[0].bytes):
                chunk = chunks[bisect_right(chunks, level, key=_bytes) - 1]
                stripe = stripes[bisect_right(stripes, level, key=_bytes) - 1]
                clocks = chunk.clocks + stripe.clocks
                yield Candidate(clocks, level, stripe.columns, chunk.splits, chunk.chunk)

    def _chunks(self) -> Iterator[Candidate]:
        problem, gemms = self.problem, self._computing
        n, d, vocab = problem.n, problem.d, problem.vocab
        for count in steps(ceil_div(n, gemms.tokens.columns), CHUNK_STEPS):
            chunk = min(count * gemms.tokens.columns, n)
            full, rest = divmod(n, chunk)
            faster = faster_splits(gemms.dhidden, d, chunk, vocab)
            for splits in {1, faster[-1]}:
                clocks = full * chunk_clocks(gemms, problem, chunk, splits)
                clocks += chunk_clocks(gemms, problem, rest, splits) if rest else 0
                yield Candidate(clocks, sweeps_bytes(problem, chunk, splits, 0), 0, splits, chunk)

    def _dweight_stripes(self) -> Iterator[Candidate]:
        problem = self.problem._replace(need_dinput=False)
        vocab = problem.vocab
        for columns in self._widths(vocab, STRIPE_STEPS):
            full, rest = divmod(vocab, columns)
            clocks = full * stripe_clocks(self._computing, problem, columns, 1)
            clocks += stripe_clocks(self._computing, problem, rest, 1) if rest else 0
            yield Candidate(clocks, sweeps_bytes(self.problem, 0, 1, columns), columns)

    def _widths(self, left: int, fine: int) -> list[int]:
        """Columns of stripes of `left` columns."""
        if self.window:
            return [min(self.window, left)]
        tiles = ceil_div(left, STRIPE_MULTIPLE)
        return [min(count * STRIPE_MULTIPLE, left) for count in steps(tiles, fine)]

    def _even_widths(self, left: int) -> list[int]:
        """Widths that divide `left` columns into up to EVEN_STRIPES stripes, equally but for whole tiles."""
        if self.window:
            return []
        counts = range(1, EVEN_STRIPES + 1)
        return [min(round_up(ceil_div(left, count), STRIPE_MULTIPLE), left) for count in counts]

    def _stripe(self, columns: int, splits: int, of_logits: bool = False) -> int:
        """Clocks of a recomputed stripe, or of one of kept logits."""
        key = columns, splits, of_logits
        clocks = self._stripes.get(key)
        if clocks is None:
            clocks = stripe_clocks(self._computing, self.problem, columns, splits, is_kept=of_logits)
            self._stripes[key] = clocks
        return clocks

    def _kept_stripe(self, kept: int, splits: int) -> int:
        """Clocks of the stripe that was kept."""
        return stripe_clocks(self.gemms(kept), self.problem, kept, splits, is_kept=True)

    def _sums(self, stripes: int, splits: int, kept: int = 0) -> int:
        """kept: columns that these candidates find kept."""
        problem, dhidden = self.problem, self.gemms(kept).dhidden
        return dhidden.sums(problem.n, problem.d, stripes, splits) if problem.need_dinput else 0


@functools.lru_cache(maxsize=64)
def candidates(gpu: Gpu, problem: Problem, window: int = 0) -> Candidates:
    return Candidates(gpu, problem, window)


def _dweight(gpu: Gpu, problem: Problem, window: int, *, all_is_kept: bool = False) -> Gemm:
    """The configuration with which dweight's GEMM is the fastest over the whole vocabulary: by a mean of its
    times at the power limit and, the more the shorter the call, on a GPU that has not reached it.

    all_is_kept: in one stripe, of which any tiles fill the rounds."""
    n, d, vocab = problem.n, problem.d, problem.vocab
    macs = n * d * vocab
    share = gpu.sheet.cool * (1 - heat(macs))

    def seconds(config: KernelConfig, cool: bool) -> float:
        gemm = gemm_of(gpu, config, macs, cool)
        return gemm.clocks(vocab, d, n, DWEIGHT) / gemm.rates.clock

    def weighed(config: KernelConfig) -> float:
        hot = seconds(config, False)
        return hot + share * (seconds(config, True) - hot) if share else hot

    configs = gpu.row.configs_for(n, window, gpu.widths)
    among = configs.dweight if all_is_kept else configs.dweight_of_parts
    return gemm_of(gpu, min(among, key=weighed), macs)


def _tokens(
    gpu: Gpu, problem: Problem, window: int, *, all_is_kept: bool = False
) -> tuple[Gemm, Gemm, list[int]]:
    """The configurations with which the GEMMs of logits and of dhidden take the fewest clocks over the whole
    vocabulary, and the numbers of dhidden's splits to consider.

    all_is_kept: without the GEMM of logits. Otherwise the tiles of both are as wide: of the candidates that
    the pair is for, some have chunks of tokens, which are whole tiles. Where a tile holds all tokens, it is
    the narrowest of these, and the weight is read once. An explicit window fixes the order of a row's
    additions: no other splits than its stripes."""
    n, d, vocab = problem.n, problem.d, problem.vocab
    found = []
    for pair in gpu.row.configs_for(n, window, gpu.widths).pairs_for(n):
        tokens, dhidden = (gemm_of(gpu, config, n * d * vocab) for config in pair)
        clocks, splits = 0, [1]
        if not all_is_kept:
            if tokens.columns != dhidden.columns:
                continue
            clocks = tokens.clocks(vocab, n, d, DLOGITS)
        if problem.need_dinput and not window:
            splits = faster_splits(dhidden, d, n, vocab)
        if problem.need_dinput:
            clocks += split_clocks(dhidden, d, n, vocab, splits[-1])
        # Of equally fast ones the widest.
        found.append((clocks, -dhidden.columns, tokens, dhidden, splits))
    *_, tokens, dhidden, splits = min(found, key=lambda each: each[:2])
    return tokens, dhidden, splits


def faster_splits(gemm: Gemm, m: int, n: int, k: int) -> list[int]:
    """Numbers of splits of k, from 1: each faster than all before it. Considered are those that fill their
    last round best."""
    tiles = ceil_div(m, gemm.rows) * ceil_div(n, gemm.columns)
    most = ceil_div(k, LEAST_DEPTH)
    faster, least = [1], split_clocks(gemm, m, n, k, 1)
    for rounds in range(1, MOST_ROUNDS + 1):
        splits = min(rounds * gemm.clusters // max(tiles, 1), most, gemm.clusters)
        if splits > faster[-1]:
            clocks = split_clocks(gemm, m, n, k, splits)
            if clocks < least:
                least = clocks
                faster.append(splits)
    return faster


def _bytes(candidate: Candidate) -> int:
    return candidate.bytes


def _fastest(some: Iterable[Candidate]) -> list[Candidate]:
    """By rising bytes those that are faster than all that take no more."""
    found: list[Candidate] = []
    for candidate in sorted(some, key=lambda candidate: (candidate.bytes, candidate.clocks)):
        if not found or candidate.clocks < found[-1].clocks:
            found.append(candidate)
    return found
