"""GPUs for which plans are made: their peaks by the data sheet, and what was measured of their L2 and clocks.

GPUs of one architecture run the same kernels and differ in memory and L2, on which the best tiles depend: an
H100 has five sixths of an H200's L2, and its SMs load up to 15% less from it in a clock.

The H200's numbers were fitted to bench/results/tuning/h200_kernels.json, and `beside_sliced` and `delay` to
h200_gradients.json there, the H100's to h100_kernels.json,
h100_tiles.json, h100_cool.json, of forwards to h100_forwards.json and of dlinear_weight to
h100_dweight.json there, and, of writes, to an earlier bench/results/h100_random11.json
(tests/host/test_cost.py); what a B200's sheet does not say is a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DataSheet:
    """A GPU.

    gpu: its name; of those with several forms, SXM's. flops: dense bf16 FLOP/s. memory: bytes/s. sms: those
        that go with them. l2: bytes, as the driver reports them.
    panel: bytes of rows of H that stay in L2 while the vocabulary streams past, in a forward: each half of
        the SMs has a half of L2, which the windows in flight want too. panel_of_all: the most bytes of
        tokens that are one group. panel_beside: both, of clusters with tiles of tokens side by side, but for
        tiles of 192 classes.
        panel_of_plain: of the backward's GEMMs, for their B.
    l2_bytes_per_clock: that an SM loads from L2 while all do, in single tiles of the backward's GEMMs. alone:
        in a forward's, and in its tiles of 192 classes. beside: in a forward's other tiles of tokens side
        by side. beside_keeping: the same in a forward that stores 16-bit results, and
        beside_dlogits, in the backward's GEMM of logits. beside_sliced: the same of the gradients'
        GEMMs, with operands that come in slices of 64 columns, since their rows are not along k.
    missed: what a forward's loads of the weight take longer, as a share of their time in L2, since one of the
        clusters that share them waits for DRAM: this over the number of these clusters.
    again: of DRAM's time for the weight, what each further group of columns that reads it in a forward takes:
        what is moved costs clock at the power limit.
    between: clocks that a forward's tile in turns takes besides its MMAs; narrow tiles have them more often.
        waits: those that it waits for the tile beside it, if it keeps nothing. 0: the GPU's times are
        described as well without.
    write_share: of the data sheet's DRAM rate, that writes reach.
    sustained: the share of short calls' clock that SMs keep in long ones, which draw the power limit; L2 and
        DRAM keep theirs.
    cool: the share that a GPU below its power limit has in the choice of dlinear_weight's tiles for a short
        call; for a long one it has none. Its SMs run at `boost` Hz, while L2 and DRAM keep their rates. 0:
        not measured.
    few: of L2's clocks for a tile of dlinear_weight, what clusters of two rows of tiles in turns save with
        few tokens (cost.py).
    load_heat: in longer calls of many tokens a forward that keeps nothing takes this share of its MMAs' time
        longer for each byte beyond cost.LOADED that an SM loads from L2 in a clock of theirs, and less for
        each below: what is moved costs clock. 0: times in turn with other GEMMs do not show it.
    delay: the most clocks that a tile of 128 x 128 of dlinear_weight, in turns and in clusters of either
        shape, loses with few tokens (cost.py). 0: the GPU's times are described as well without.
    """

    gpu: str
    flops: float
    memory: float
    sms: int
    l2: int
    panel: int
    panel_of_all: int
    panel_beside: int
    panel_of_plain: int
    l2_bytes_per_clock: float
    alone: float
    beside: float
    beside_keeping: float
    beside_dlogits: float
    beside_sliced: float
    missed: float
    again: float
    between: float
    waits: float
    write_share: float
    sustained: float
    cool: float
    boost: float
    few: float
    load_heat: float
    delay: float


H200 = DataSheet(
    gpu="H200",
    flops=989.4e12,
    memory=4.8e12,
    sms=132,
    l2=60 * MIB,
    panel=23 * MIB,
    panel_of_all=23 * MIB,
    panel_beside=22 * MIB,
    panel_of_plain=22 * MIB,
    l2_bytes_per_clock=43,
    alone=43,
    beside=43,
    beside_keeping=43,
    beside_dlogits=43,
    beside_sliced=42,
    missed=0.0,
    again=0.0,
    between=0.0,
    waits=150.0,
    write_share=0.65,
    sustained=0.87,
    cool=0.0,
    boost=1.98e9,
    few=0.0,
    load_heat=0.002,
    delay=400.0,
)
H100 = DataSheet(
    gpu="H100",
    flops=989.4e12,
    memory=3.35e12,
    sms=132,
    l2=50 * MIB,
    panel=22 * MIB,
    panel_of_all=30 * MIB,
    panel_beside=5 * MIB,
    panel_of_plain=12 * MIB,
    l2_bytes_per_clock=36.5,
    alone=39,
    beside=45,
    beside_keeping=44,
    beside_dlogits=40,
    beside_sliced=37.5,
    missed=0.04,
    again=0.05,
    between=500.0,
    waits=300.0,
    write_share=0.75,
    sustained=0.95,
    cool=0.35,
    boost=1.98e9,
    few=0.16,
    load_heat=0.0,
    delay=0.0,
)
B200 = DataSheet(
    gpu="B200",
    flops=2.25e15,
    memory=8.0e12,
    sms=148,
    l2=126 * MIB,
    panel=55 * MIB,
    panel_of_all=55 * MIB,
    panel_beside=55 * MIB,
    panel_of_plain=55 * MIB,
    l2_bytes_per_clock=72,
    alone=72,
    beside=72,
    beside_keeping=72,
    beside_dlogits=72,
    beside_sliced=72,
    missed=0.0,
    again=0.0,
    between=0.0,
    waits=0.0,
    write_share=0.65,
    sustained=0.847,
    cool=0.0,
    boost=1.98e9,
    few=0.0,
    load_heat=0.0,
    delay=0.0,
)


def nearest(sheets: Sequence[DataSheet], l2: int) -> int:
    """The number of the sheet whose L2 is nearest to so many bytes."""
    return min(range(len(sheets)), key=lambda i: abs(sheets[i].l2 - l2))
