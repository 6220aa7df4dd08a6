"""Runs and tiles: every (column, window), split and tile exactly once, in an order that shares operands."""

from __future__ import annotations

import itertools
import random
from itertools import pairwise

import pytest

from cute_lce.kernels.schedule import Walk, clamp_below, run_coord, run_tiles


def order(columns: int, windows: int, group: int) -> list[tuple[int, int]]:
    return [run_coord(run, columns, windows, group) for run in range(columns * windows)]


def sweep(count: int, seed: int):
    """(columns, windows, group) of every small size, then of `count` random ones."""
    for columns in range(1, 8):
        for windows in range(1, 6):
            for group in range(1, columns + 1):
                yield columns, windows, group
    draw = random.Random(seed)
    for _ in range(count):
        columns, windows = draw.randint(1, 300), draw.randint(1, 90)
        yield columns, windows, draw.randint(1, columns)


@pytest.mark.parametrize("seed", range(4))
def test_every_column_and_window_once(seed: int):
    for columns, windows, group in sweep(60, seed):
        found = order(columns, windows, group)
        assert len(set(found)) == columns * windows, (columns, windows, group)
        assert all(0 <= column < columns and 0 <= window < windows for column, window in found)


@pytest.mark.parametrize("seed", range(2))
def test_groups_come_one_after_another_and_windows_rise_inside_them(seed: int):
    for columns, windows, group in sweep(60, seed):
        found = order(columns, windows, group)
        groups = [column // group for column, _ in found]
        assert groups == sorted(groups)
        for (column, window), (following, next_window) in pairwise(found):
            if column // group == following // group:
                # Columns vary fastest: next is the next column of this window or the next one's first.
                assert (next_window, following) > (window, column)


def test_the_last_group_is_narrower():
    # 5 columns in groups of 2: the group of column 4 has one, and its windows follow one another.
    assert order(5, 3, 2)[12:] == [(4, 0), (4, 1), (4, 2)]
    assert order(5, 3, 2)[:6] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_one_group_and_groups_of_one():
    assert order(3, 2, 3) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert order(3, 2, 1) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("clusters", [1, 2, 7, 66, 132])
def test_resident_clusters_share_operands(clusters: int):
    """Runs under way at once lie in few groups, and so touch few tiles of B and windows of A."""
    columns, windows, group = 64, 50, 5
    found = order(columns, windows, group)
    for first in range(0, columns * windows, clusters):
        now = found[first : first + clusters]
        touched = {column for column, _ in now}
        assert len(touched) <= 2 * group
        assert len({window for _, window in now}) <= 2 * -(-len(now) // group) + 2


@pytest.mark.parametrize("seed", range(4))
def test_windows_cover_every_tile_once(seed: int):
    draw = random.Random(seed)
    sizes = [(tiles, per) for tiles in range(1, 30) for per in range(1, tiles + 2)]
    sizes += [(draw.randint(1, 5000), draw.randint(1, 64)) for _ in range(200)]
    for tiles, tiles_per_window in sizes:
        windows = -(-tiles // tiles_per_window)
        spans = [run_tiles(window, tiles_per_window, tiles) for window in range(windows)]
        assert [tile for first, end in spans for tile in range(first, end)] == list(range(tiles))
        assert all(0 < end - first <= tiles_per_window for first, end in spans)


@pytest.mark.parametrize("seed", range(3))
def test_walks_cover_every_tile_once(seed: int):
    """All CTAs of all clusters together: each tile of the product once in each split, in windows that are
    theirs alone."""
    draw = random.Random(seed)
    for _ in range(40):
        columns, tiles, tiles_m, tiles_n, splits = (draw.randint(1, most) for most in (9, 9, 2, 3, 4))
        tiles_per_window, clusters = draw.randint(1, tiles), draw.randint(1, 12)
        windows = -(-tiles // tiles_per_window)
        group = draw.randint(1, columns)
        found, partials = [], {}
        for cluster, m, n in itertools.product(range(clusters), range(tiles_m), range(tiles_n)):
            walk = Walk(
                columns=columns,
                windows=windows,
                tiles_per_window=tiles_per_window,
                group=group,
                tiles=tiles,
                splits=splits,
                depth=1,
                cluster=cluster,
                clusters=clusters,
                tiles_m=tiles_m,
                tiles_n=tiles_n,
                m=m,
                n=n,
            )
            reached = -1
            for run in range(walk.cluster, walk.runs, walk.clusters):
                n_tile, window, split, first, end = walk.run(run)
                found += [(split, walk.m_tile(tile), n_tile) for tile in range(first, end)]
                assert partials.setdefault((split, n_tile, walk.partial(window)), walk) is walk
                # Splits vary slowest.
                assert split >= reached
                reached = split
        sizes = splits, tiles * tiles_m, columns * tiles_n
        assert sorted(found) == list(itertools.product(*map(range, sizes)))
        assert len(partials) == splits * columns * tiles_n * windows * tiles_m
        assert {partial for _, _, partial in partials} == set(range(windows * tiles_m))


def test_clamp_below():
    for x in (-(2**30), -5, 0, 3, 2**30):
        for ceiling in (-(2**30), -1, 0, 3, 4, 2**30):
            assert clamp_below(x, ceiling) == min(x, ceiling)


def test_run_coord_fits_32_bits():
    """Kernels run it on Int32: no number on the way leaves it, up to 2^20 columns of tiles and windows."""

    class Checked(int):
        pass

    def checked(name):
        def operation(a, b):
            result = getattr(int, name)(int(a), int(b))
            assert -(2**31) <= result < 2**31, (name, int(a), int(b))
            return Checked(result)

        return operation

    for name in ("__add__", "__sub__", "__mul__", "__floordiv__", "__and__", "__rshift__"):
        setattr(Checked, name, checked(name))
    # n = 2^20 tokens in tiles of 32, V = 2^20 in windows of one tile: more than any plan has.
    columns, windows, group = 2**20 // 32, 2**20 // 256, 44
    for run in (0, 1, columns * windows // 2, columns * windows - 1):
        run_coord(Checked(run), Checked(columns), Checked(windows), Checked(group))
