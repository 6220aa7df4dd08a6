"""The grid of one plain GEMM."""

from __future__ import annotations

from ..arch import Gpu, KernelConfig
from ..arguments import GemmPlan
from .problem import ceil_div

SHORT_FEATURES, SHORT_TOKENS, STORES_ALONE = 1024, 2560, 128
"""k below which clusters do not pace whose epilogues store: in GEMMs of logits, and in dweight's. Up to
STORES_ALONE the stores are all that takes time, and go to DRAM faster in step (docs/measurements.md, Between
a call's GEMMs)."""
MOST_LOADS = 1 / 88
"""1 / rows + 1 / columns of a cluster's tile, its loads for a result. Above it clusters pace at any k."""


def cluster_count(config: KernelConfig, sms: int) -> int:
    """Clusters that run at once. Raises ValueError if there are fewer SMs than one cluster needs."""
    if sms < config.cluster_size:
        raise ValueError(f"sms: got {sms}, want at least the {config.cluster_size} of a cluster")
    return sms // config.cluster_size


def is_high(config: KernelConfig) -> bool:
    """Whether it is one of a forward's tiles of 192 rows. Two of them side by side are in groups as large as
    those of single tiles."""
    return config.turns > 1 and config.tile_m > 128


def is_paced(gpu: Gpu, config: KernelConfig, m: int, n: int, k: int, short: int) -> bool:
    """Whether clusters pace: if the kernel can, and several columns of tiles share operands that do not fit
    L2. Nor where k is above STORES_ALONE and below `short`, unless a tile loads more than MOST_LOADS: an
    epilogue that stores then takes much of a tile's time, which varies, and clusters in step all wait for the
    slowest."""
    if config.pace == 0 or n <= config.cluster_columns or 2 * k * (m + n) <= gpu.sheet.l2 // 2:
        return False
    if not STORES_ALONE < k < short:
        return True
    return loads_much(config)


def loads_much(config: KernelConfig) -> bool:
    """Whether clusters pace at any k because of what their tiles load."""
    return 1 / config.cluster_rows + 1 / config.cluster_columns > MOST_LOADS


def plan(
    gpu: Gpu, config: KernelConfig, m: int, n: int, k: int, splits: int = 1, *, short: int = 0
) -> GemmPlan:
    """Plan an (m, k) x (n, k) product. short: as in `is_paced`."""
    windows, columns = ceil_div(m, config.cluster_rows), ceil_div(n, config.cluster_columns)
    clusters = max(1, min(cluster_count(config, gpu.sms), windows * columns * splits))
    # As many columns as fit L2 beside each other, so that rows are written whole; or a square of tiles.
    held = gpu.sheet.panel_of_plain // (2 * k * config.cluster_columns)
    side = max(1, held, int((clusters * config.cluster_rows / config.cluster_columns) ** 0.5))
    return GemmPlan(
        windows=windows,
        tiles_per_window=1,
        splits=splits,
        group=min(columns, side),
        clusters=clusters,
        paced=int(is_paced(gpu, config, m, n, k, short)),
    )


def plan_dweight(gpu: Gpu, config: KernelConfig, classes: int, d: int, tokens: int) -> GemmPlan:
    """Plan dweight's GEMM, of some of the vocabulary's classes."""
    return plan(gpu, config, classes, d, tokens, short=SHORT_TOKENS)
