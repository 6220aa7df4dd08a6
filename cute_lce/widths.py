"""Which tiles of tokens have registers for the terms of an epilogue. Integers and names only."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple


class Widths(NamedTuple):
    """The widths of tiles that do not spill. columns: the widest of 128 rows (Blackwell: of any). high: of
    192 rows; 0: none. but: widths below `columns` that do."""

    columns: int
    high: int = 0
    but: tuple[int, ...] = ()

    def holds(self, tile_m: int, tile_n: int) -> bool:
        if tile_m == 192:
            return tile_n <= self.high
        return tile_n <= self.columns and tile_n not in self.but

    def both(self, other: Widths | None) -> Widths:
        """Those that are among the other's too; None: all."""
        if other is None:
            return self
        but = tuple(sorted({*self.but, *other.but}))
        return Widths(min(self.columns, other.columns), min(self.high, other.high), but)


class Limit(NamedTuple):
    """terms: names, or `+` between those that want their widths together; "": with any terms or none."""

    widths: Widths
    terms: str


class Limits(NamedTuple):
    """Of each epilogue with tiles of tokens: a forward's, one's that keeps exponentials, or logits, and that
    of the backward's dlogits."""

    forward: tuple[Limit, ...] = ()
    keep: tuple[Limit, ...] = ()
    keep_logits: tuple[Limit, ...] = ()
    backward: tuple[Limit, ...] = ()


@functools.lru_cache(maxsize=4096)
def widths_of(limits: tuple[Limit, ...], terms: tuple[str, ...]) -> Widths | None:
    """The widths for these terms; None: any."""
    names = {*terms, *("own_term" for each in terms if each.startswith("own_term_"))}
    found: Widths | None = None
    for widths, each in limits:
        if any(map(names.issuperset, _together(each))):
            found = widths.both(found)
    return found


def _together(terms: str) -> list[list[str]]:
    """Of "" what every set contains."""
    return [each.split("+") for each in terms.split()] or [[]]


def _each(terms: str, count: int = 1, beside: str = "") -> str:
    """For Limit.terms: every choice of `count` of these terms, each with those beside."""
    some = itertools.combinations(terms.split(), count)
    return " ".join("+".join((*each, *beside.split())) for each in some)


_SUMS = "entropy squares total logits argmax"
HOPPER = Limits(
    forward=(
        Limit(Widths(192, 128), "row_scale"),
        Limit(Widths(176, 128), "entropy squares logits argmax total+row_scale total+topk"),
        Limit(Widths(200, 128), "total"),
        Limit(Widths(176, 120), "argmax softcap+linear_bias"),
        Limit(Widths(176, 120), _each(_SUMS, beside="softcap")),
        Limit(Widths(160, 120), _each(_SUMS, 3)),
        Limit(Widths(144), "softcap+row_scale"),
        Limit(Widths(128), "own_term"),
    ),
    keep=(
        Limit(Widths(192), ""),
        Limit(Widths(152), "row_scale+linear_bias"),
        Limit(Widths(152, but=(144,)), "row_scale+linear_bias+logit_scale"),
        Limit(Widths(160), "logits argmax"),
        Limit(Widths(144), f"entropy softcap+linear_bias softcap+row_scale {_each(_SUMS, 2)}"),
        Limit(Widths(144), _each(_SUMS, beside="softcap")),
        Limit(Widths(128), f"own_term softcap+row_scale+linear_bias {_each(_SUMS, 3)}"),
    ),
    keep_logits=(
        Limit(Widths(192), ""),
        Limit(Widths(192, but=(168, 176)), "entropy squares argmax"),
        Limit(Widths(184, but=(168, 176)), "total logits"),
        Limit(Widths(160), _each(_SUMS, 2)),
        Limit(Widths(144), "softcap+row_scale"),
        Limit(Widths(128), f"own_term {_each(_SUMS, 2, 'softcap row_scale')} {_each(_SUMS, 4)}"),
    ),
    backward=(
        Limit(Widths(176), "gap uniform linear_bias"),
        Limit(Widths(160), "softcap bias_gradient topk"),
        Limit(Widths(144), "row_scale"),
        Limit(Widths(128), "own_term"),
    ),
)
"""By compiles of every term, of most pairs and some sets, of which tests/compiled/test_terms.py repeats some.
Own terms beside an entropy spill 32 bytes in tiles of 128 tokens that keep logits, and none in 96."""
_BLACKWELL = (
    Limit(Widths(224), "softcap squares linear_bias+entropy"),
    Limit(Widths(192), "own_term row_scale+entropy+squares"),
)
_KEEPING = *_BLACKWELL, Limit(Widths(224), "class_weight")
_TOTAL = Limit(Widths(224, but=(192,)), "linear_bias+class_weight+total")
BLACKWELL = Limits(forward=(*_BLACKWELL, _TOTAL), keep=_KEEPING, keep_logits=_KEEPING, backward=_BLACKWELL)
