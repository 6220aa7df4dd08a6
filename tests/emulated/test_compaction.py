"""The compaction's kernels, executed without a GEMM: each token at its place, thousands of them too."""

from __future__ import annotations

import pytest
import torch

from cute_lce.kernels.rows import BLOCKS, THREADS
from tests.emulated import compaction
from tests.emulated.compaction import Tokens

full = pytest.mark.emulator_full
both = pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=full)])


def at_random(n: int, share: float = 0.4) -> torch.Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(n)) < share


VALID = {
    "none": lambda n: torch.zeros(n, dtype=torch.bool),
    "all": lambda n: torch.ones(n, dtype=torch.bool),
    "all but one": lambda n: torch.arange(n) != 3,
    "the last": lambda n: torch.arange(n) == n - 1,
    "at the end": lambda n: torch.arange(n) >= n - 70,
    "a k tile": lambda n: torch.arange(n) >= n - 64,
    "a k tile and one": lambda n: torch.arange(n) >= n - 65,
    "one below a k tile": lambda n: torch.arange(n) >= n - 63,
    "two k tiles": lambda n: torch.arange(n) % 160 < 128,
    "random": at_random,
}


@both
@pytest.mark.parametrize("valid", VALID)
def test_which_are_valid(valid: str, arch: str):
    what = Tokens(VALID[valid](160), 72)
    assert compaction.is_right(what, compaction.run(what, arch=arch))


@pytest.mark.parametrize("n", [1, 31, 32, 33, 65])
def test_few_tokens(n: int):
    what = Tokens(at_random(n), 8)
    assert compaction.is_right(what, compaction.run(what, blocks=BLOCKS))


# Rows of one load of a lane, of each number of those in flight with a ragged last one, and of more.
@pytest.mark.parametrize("d", [8, 256, 264, 520, 776, 1024, 1032, 2056])
def test_rows_of_any_length(d: int):
    # The last token is valid: what is read behind its row is outside of the memory.
    what = Tokens(VALID["all but one"](40), d)
    found = compaction.run(what)
    assert compaction.is_right(what, found)
    copied = compaction.run(what, before=found)
    assert compaction.equal(copied.hidden, what.rows(0, 40))


# A thread counts a token of each 1024, eight at once, of which any may be the last one; above 4096 tokens a
# block has more than a warp's. A block of all tokens handles 1024 at a time, and moves their rows.
@pytest.mark.parametrize(
    ("n", "blocks"),
    [
        (4200, 2),
        (2100, 1),
        *(pytest.param(n, 2, marks=full) for n in range(600, 8 * THREADS, THREADS)),
        *(pytest.param(n, BLOCKS, marks=full) for n in (4200, 8192, 8300, 16500)),
    ],
)
def test_thousands_of_tokens(n: int, blocks: int):
    what = Tokens(at_random(n), 8, torch.int32)
    # Where they go is what is asked; what moves with them does as with few.
    without = ("hidden", "values", "sums") if blocks == 2 else ()
    assert compaction.is_right(what, compaction.run(what, blocks=blocks, without=without), without=without)


@pytest.mark.parametrize("stride", [0, 3])
def test_strides_of_the_upstream_gradient(stride: int):
    what = Tokens(at_random(70), 8)
    assert compaction.is_right(what, compaction.run(what, stride=stride), stride=stride)


@pytest.mark.parametrize("without", ["hidden", "values", "sums"])
def test_what_is_not_copied(without: str):
    what = Tokens(at_random(70), 8)
    found = compaction.run(what, without=(without,))
    assert compaction.is_right(what, found, without=(without,))


CHUNKS = [(0, 64), (0, 100), (64, 64), (100, 60), (128, 32)]


@both
@pytest.mark.parametrize("valid", ["none", "all", "a k tile", "a k tile and one", "random"])
@pytest.mark.parametrize(("first", "tokens"), CHUNKS)
def test_chunks(valid: str, first: int, tokens: int, arch: str):
    """Gathered by each, and copied by those after the first; the last is ragged."""
    what = Tokens(VALID[valid](160), 72)
    found = compaction.run(what, first, tokens, arch=arch)
    assert compaction.is_right(what, found, first)
    copied = compaction.run(what, first, tokens, before=found, arch=arch)
    assert compaction.equal(copied.hidden, what.rows(first, tokens))


@both
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=full) for seed in range(2, 21))])
def test_any_schedule(seed: int, arch: str):
    what = Tokens(at_random(600), 72)
    assert compaction.is_right(what, compaction.run(what, seed=seed, arch=arch))
