"""Decide first: the frozen configuration of a kernel and the run-time plan of a call. Integers only: no torch, no cutlass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelConfig:
    """What a GEMM kernel is compiled for. Everything that a compile depends on is here or in the call to `compiled`.

    tile_m, tile_n, tile_k: rows of A, rows of B and depth that a CTA (Blackwell: a pair) takes at once, in elements.
    warpgroups: consumer warpgroups of 128 threads, side by side along tile_m (Hopper).
    cluster_m, cluster_n: CTAs of a cluster; B is multicast along m, A along n.
    stages: slots of the ring of operand tiles in shared memory.
    pingpong: two consumer warpgroups take turns at whole tiles, so that the epilogue of one hides behind the MMAs of
        the other; otherwise the warpgroups share each tile (Hopper).
    """

    arch: str
    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    warpgroups: int = 2
    cluster_m: int = 2
    cluster_n: int = 1
    stages: int = 4
    pingpong: bool = False
    hints: str = 'lf'
    pace: int = 16
    slack: int = 1
