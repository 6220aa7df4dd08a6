"""Which cluster computes what: runs of tiles, in an order in which L2 serves shared operands.

A run is one cluster-wide tile of B's rows (a column of the product), one window of A's rows, and one split of
k. A cluster computes the runs `cluster_id, cluster_id + clusters, ...`. Splits vary slowest. Within a split
runs are numbered group by group: a group is `group` adjacent columns, and within a group the columns vary
fastest. At any time the resident clusters therefore share few tiles of B and few windows of A, and both stay
in L2.

Integer arithmetic without branches: the functions take Python ints in tests and the DSL's Int32 in kernels.
"""

from dataclasses import dataclass
from typing import Any


def clamp_below(x, ceiling):
    """min(x, ceiling) for values whose difference fits in 32 bits, without a branch."""
    excess = x - ceiling
    return x - (excess - (excess & (excess >> 31)))


def run_coord(run, columns, windows, group):
    """(column, window) of run number `run` of a split.

    Args:
        run: in [0, columns * windows).
        columns: cluster-wide tiles of B's rows.
        windows: windows of A's rows.
        group: columns in a group; the last group may have fewer.
    """
    number = run // (group * windows)
    first = number * group
    within = run - first * windows
    width = clamp_below(columns - first, group)
    window = within // width
    return first + (within - window * width), window


def run_tiles(window, tiles_per_window, tiles):
    """[first, end) of the tiles that a window covers; the last window may be shorter."""
    first = window * tiles_per_window
    return first, clamp_below(first + tiles_per_window, tiles)


@dataclass(frozen=True)
class Walk:
    """What one CTA computes: its cluster's runs, in order, and its own tile of each cluster-wide one.

    columns, windows, tiles_per_window, group: as above. tiles: of A's rows, each as high as a cluster.
    splits: of k, each of `depth` k tiles; the last one's may lie beyond k, where operands are zeros.
    cluster, clusters: the cluster's number, and how many there are: it takes runs cluster, cluster +
    clusters, ... below `runs`. tiles_m, tiles_n: tiles that a cluster computes at once. m, n: which of them
    is this CTA's.
    """

    columns: Any
    windows: Any
    tiles_per_window: Any
    group: Any
    tiles: Any
    splits: Any
    depth: Any
    cluster: Any
    clusters: Any
    tiles_m: int
    tiles_n: int
    m: Any
    n: Any

    @property
    def runs(self):
        return self.columns * self.windows * self.splits

    def run(self, number):
        """(n tile of this CTA, window, split, [first, end) of the cluster-wide m tiles) of a run."""
        runs = self.columns * self.windows
        split = number // runs
        column, window = run_coord(number - split * runs, self.columns, self.windows, self.group)
        first, end = run_tiles(window, self.tiles_per_window, self.tiles)
        return column * self.tiles_n + self.n, window, split, first, end

    def m_tile(self, tile):
        """This CTA's m tile of a cluster-wide one."""
        return tile * self.tiles_m + self.m

    def partial(self, window):
        """The number of this CTA's share of a window: each CTA along m has rows, and partials, of its own."""
        return window * self.tiles_m + self.m
