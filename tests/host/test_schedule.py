"""Runs and tiles: every (row, window) and every tile exactly once, in an order that shares operands."""

from __future__ import annotations

import itertools
import random
from itertools import pairwise

import pytest

from cute_lce.kernels.schedule import Walk, clamp_below, run_coord, run_tiles


def order(rows: int, windows: int, group_m: int) -> list[tuple[int, int]]:
    return [run_coord(run, rows, windows, group_m) for run in range(rows * windows)]


def sweep(count: int, seed: int):
    """(rows, windows, group_m) of every small size, then of `count` random ones."""
    for rows in range(1, 8):
        for windows in range(1, 6):
            for group_m in range(1, rows + 1):
                yield rows, windows, group_m
    draw = random.Random(seed)
    for _ in range(count):
        rows, windows = draw.randint(1, 300), draw.randint(1, 90)
        yield rows, windows, draw.randint(1, rows)


@pytest.mark.parametrize("seed", range(4))
def test_every_row_and_window_once(seed: int):
    for rows, windows, group_m in sweep(60, seed):
        found = order(rows, windows, group_m)
        assert len(set(found)) == rows * windows, (rows, windows, group_m)
        assert all(0 <= row < rows and 0 <= window < windows for row, window in found)


@pytest.mark.parametrize("seed", range(2))
def test_groups_come_one_after_another_and_windows_rise_inside_them(seed: int):
    for rows, windows, group_m in sweep(60, seed):
        found = order(rows, windows, group_m)
        groups = [row // group_m for row, _ in found]
        assert groups == sorted(groups)
        for (row, window), (following, next_window) in pairwise(found):
            if row // group_m == following // group_m:
                # Rows vary fastest: the next run is the next row of this window or the first of the next.
                assert (next_window, following) > (window, row)


def test_the_last_group_is_narrower():
    # 5 rows in groups of 2: the group of row 4 has one row, and its windows follow one another.
    assert order(5, 3, 2)[12:] == [(4, 0), (4, 1), (4, 2)]
    assert order(5, 3, 2)[:6] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_one_group_and_groups_of_one():
    assert order(3, 2, 3) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert order(3, 2, 1) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("clusters", [1, 2, 7, 66, 132])
def test_resident_clusters_share_operands(clusters: int):
    """Runs under way at once lie in few groups, and so touch few rows of H and windows of W."""
    rows, windows, group_m = 64, 50, 5
    found = order(rows, windows, group_m)
    for first in range(0, rows * windows, clusters):
        now = found[first : first + clusters]
        touched = {row for row, _ in now}
        assert len(touched) <= 2 * group_m
        assert len({window for _, window in now}) <= 2 * -(-len(now) // group_m) + 2


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
    """All CTAs of all clusters together: each tile of the product once, in windows that are theirs alone."""
    draw = random.Random(seed)
    for _ in range(40):
        rows, tiles, tiles_m, tiles_n = (draw.randint(1, most) for most in (9, 9, 2, 3))
        tiles_per_window, clusters = draw.randint(1, tiles), draw.randint(1, 12)
        windows = -(-tiles // tiles_per_window)
        group_m = draw.randint(1, rows)
        found, partials = [], {}
        for cluster, m, n in itertools.product(range(clusters), range(tiles_m), range(tiles_n)):
            walk = Walk(
                rows,
                windows,
                tiles_per_window,
                group_m,
                tiles,
                cluster,
                clusters,
                tiles_m,
                tiles_n,
                m,
                n,
            )
            for run in range(walk.cluster, walk.runs, walk.clusters):
                m_tile, window, first, end = walk.run(run)
                found += [(m_tile, walk.n_tile(tile)) for tile in range(first, end)]
                assert partials.setdefault((m_tile, walk.partial(window)), walk) is walk
        assert sorted(found) == list(itertools.product(range(rows * tiles_m), range(tiles * tiles_n)))
        assert len(partials) == rows * tiles_m * windows * tiles_n


def test_clamp_below():
    for x in (-(2**30), -5, 0, 3, 2**30):
        for ceiling in (-(2**30), -1, 0, 3, 4, 2**30):
            assert clamp_below(x, ceiling) == min(x, ceiling)


def test_run_coord_fits_32_bits():
    """Kernels run it on Int32: no number on the way leaves it, up to 2^20 rows of clusters and windows."""

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
    # n = 2^20 tokens of V = 2^20 in windows of one tile of 192: more than any plan has.
    rows, windows, group_m = 2**20 // 256, 2**20 // 192 + 1, 44
    for run in (0, 1, rows * windows // 2, rows * windows - 1):
        run_coord(Checked(run), Checked(rows), Checked(windows), Checked(group_m))
