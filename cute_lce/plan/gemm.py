"""The grid of one plain GEMM, and its time."""

from __future__ import annotations

from collections.abc import Iterable

from ..arch import Gpu, KernelConfig
from ..arguments import GemmPlan
from .problem import ceil_div

SUM_BYTES_PER_CLOCK = 2000
"""Bytes of partial sums that a GPU writes or reads in a clock: DRAM's rate, since others use L2."""


def cluster_count(config: KernelConfig, sms: int) -> int:
    """Clusters that run at once. Raises ValueError if there are fewer SMs than one cluster needs."""
    if sms < config.cluster_size:
        raise ValueError(f"sms: got {sms}, want at least the {config.cluster_size} of a cluster")
    return sms // config.cluster_size


def is_paced(gpu: Gpu, config: KernelConfig, m: int, n: int, k: int) -> bool:
    """Whether clusters pace: if the kernel can, and several columns of tiles share operands that do not fit
    L2."""
    return config.pace > 0 and n > config.cluster_columns and 2 * k * (m + n) > gpu.row.l2 // 2


def plan(gpu: Gpu, config: KernelConfig, m: int, n: int, k: int, splits: int = 1) -> GemmPlan:
    """Plan an (m, k) x (n, k) product."""
    windows, columns = ceil_div(m, config.cluster_rows), ceil_div(n, config.cluster_columns)
    clusters = max(1, min(cluster_count(config, gpu.sms), windows * columns * splits))
    side = max(1, int((clusters * config.cluster_rows / config.cluster_columns) ** 0.5))
    return GemmPlan(
        windows=windows,
        tiles_per_window=1,
        splits=splits,
        group=min(columns, side),
        clusters=clusters,
        paced=int(is_paced(gpu, config, m, n, k)),
    )


SUSTAINED = 8 * 10**11
"""Multiply-adds of a GEMM from which the clock of tensor cores falls (H200: from 1.8 to 1.3 GHz, after some
2 ms) but not that of L2, which then serves narrower tiles."""
SUSTAINED_L2 = 1.22
"""By how much more, in an SM's clocks: measured with tiles of 128 and 176 columns."""


def tile_clocks(config: KernelConfig, k: int, macs: int = 0) -> float:
    """Clocks of a CTA's tile of depth k: of its MMAs or, where tiles are narrow, of its loads from L2.

    macs: multiply-adds of the whole GEMM.
    """
    row = config.row
    mma = 2 * config.tile_m * config.tile_n / config.pair / row.dense_flops_per_clock
    loaded = 2 * (config.tile_m // config.pair + config.tile_n // config.cluster_m)
    rate = row.l2_bytes_per_clock * (SUSTAINED_L2 if macs >= SUSTAINED else 1)
    return k * max(mma, loaded / rate)


def clocks(config: KernelConfig, chosen: GemmPlan, n: int, k: int) -> float:
    """Clocks of a GEMM on the busiest cluster."""
    macs = chosen.windows * chosen.tiles_per_window * config.cluster_rows * n * k
    runs = chosen.windows * ceil_div(n, config.cluster_columns) * chosen.splits
    return ceil_div(runs, chosen.clusters) * tile_clocks(config, ceil_div(k, chosen.splits), macs)


def split_plan(
    gpu: Gpu, configs: Iterable[KernelConfig], m: int, n: int, k: int, most: int
) -> tuple[KernelConfig, GemmPlan]:
    """The fastest of the configurations and of up to `most` splits of k, whose sums are added afterwards."""

    def cost(candidate: tuple[KernelConfig, GemmPlan]) -> tuple[float, int]:
        config, chosen = candidate
        sums = 8 * m * n * chosen.splits if chosen.splits > 1 else 0
        return clocks(config, chosen, n, k) + sums / SUM_BYTES_PER_CLOCK, -config.tile_n

    # With as many splits as clusters all have equally many runs: more save nothing.
    most = max(1, min(most, ceil_div(k, 1024)))
    return min(
        (
            (config, plan(gpu, config, m, n, k, splits))
            for config in configs
            for splits in range(1, min(most, cluster_count(config, gpu.sms)) + 1)
        ),
        key=cost,
    )
