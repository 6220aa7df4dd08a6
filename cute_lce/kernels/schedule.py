"""Which cluster computes what: runs of tiles, in an order that lets the L2 cache serve shared operands.

A run is one row of clusters (`m`) and one window of the vocabulary. A cluster walks through runs
`cluster_id, cluster_id + clusters, ...`. Runs are numbered group by group: a group is `group_m`
neighbouring rows of clusters, and inside a group the rows vary fastest. At any moment the resident clusters
therefore share few rows of H and few windows of W, and both stay in L2.

Plain integer arithmetic without branches: the functions take Python ints in the tests and the DSL's Int32
in kernels.
"""


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
