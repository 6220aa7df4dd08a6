"""Which cluster computes what: runs of tiles, in an order in which L2 serves shared operands.

A run is one row of clusters (`m`) and one window of the vocabulary. A cluster computes the runs `cluster_id,
cluster_id + clusters, ...`. Runs are numbered group by group: a group is `group_m` adjacent rows of clusters,
and within a group the rows vary fastest. At any time the resident clusters therefore share few rows of H and
few windows of W, and both stay in L2.

Integer arithmetic without branches: the functions take Python ints in tests and the DSL's Int32 in kernels.
"""

from dataclasses import dataclass
from typing import Any


def clamp_below(x, ceiling):
    """min(x, ceiling) for values whose difference fits in 32 bits, without a branch."""
    excess = x - ceiling
    return x - (excess - (excess & (excess >> 31)))


def run_coord(run, rows, windows, group_m):
    """(row of clusters, window) of run number `run`.

    Args:
        run: in [0, rows * windows).
        rows: rows of clusters: ceil(n / (tile_m * cluster_m)).
        windows: windows of the vocabulary.
        group_m: rows of clusters in a group; the last group may have fewer.
    """
    group = run // (group_m * windows)
    first = group * group_m
    within = run - first * windows
    width = clamp_below(rows - first, group_m)
    window = within // width
    return first + (within - window * width), window


def run_tiles(window, tiles_per_window, tiles):
    """[first, end) of the vocabulary tiles that a window covers; the last window may be shorter."""
    first = window * tiles_per_window
    return first, clamp_below(first + tiles_per_window, tiles)


@dataclass(frozen=True)
class Walk:
    """What one CTA computes: its cluster's runs, in order, and its own tile of each cluster-wide one.

    rows, windows, tiles_per_window, group_m: as above. tiles: of the vocabulary, each as wide as a cluster.
    cluster, clusters: the cluster's number, and how many there are: it takes runs cluster, cluster +
    clusters, ... below `runs`. tiles_m, tiles_n: tiles that a cluster computes at once. m, n: which of them
    is this CTA's.
    """

    rows: Any
    windows: Any
    tiles_per_window: Any
    group_m: Any
    tiles: Any
    cluster: Any
    clusters: Any
    tiles_m: int
    tiles_n: int
    m: Any
    n: Any

    @property
    def runs(self):
        return self.rows * self.windows

    def run(self, number):
        """(m tile of this CTA, window, [first, end) of the cluster-wide tiles) of a run."""
        row, window = run_coord(number, self.rows, self.windows, self.group_m)
        first, end = run_tiles(window, self.tiles_per_window, self.tiles)
        return row * self.tiles_m + self.m, window, first, end

    def n_tile(self, tile):
        """This CTA's n tile of a cluster-wide one."""
        return tile * self.tiles_n + self.n

    def partial(self, window):
        """The number of this CTA's partial of a window."""
        return window * self.tiles_n + self.n
