"""The epilogues of the GEMMs, as the cost model sees them."""

from __future__ import annotations

from typing import NamedTuple


class Epilogue(NamedTuple):
    """clocks: of 128 rows of a tile, for each column; scarce: where more than `registers` of a thread hold
    accumulators, so that few are left to hide latencies with. stored: bytes for each of its elements.
    exposed, exposed_high: clocks of one that does not hide, for each column of tiles of 128 and of 256 rows.
    beside: the DataSheet's field that says what L2 gives to its GEMM in clusters with tiles side by side.
    of_forward: whether it is a forward's, to whose single tiles L2 gives DataSheet.alone, and whose tiles in
    turns take DataSheet.between and waits."""

    clocks: float
    scarce: float
    stored: int
    exposed: float = 0.0
    exposed_high: float = 0.0
    registers: int = 160
    beside: str = "beside"
    of_forward: bool = False


STATISTICS = Epilogue(20.0, 58.0, 0, registers=184, of_forward=True)
"""Of nothing but sums, and taken for every forward that keeps no exponentials, though with maxima it takes
some 48 clocks, which matters up to some 600 features. clocks: of h200_sums.json, 128 to 512 features. scarce:
of epilogues with maxima; those of now take 22 there, but with 512 features or less tiles that wide were up to
19% slower than others."""
EXPONENTIALS = Epilogue(60.0, 60.0, 2, beside="beside_keeping", of_forward=True)
DLOGITS = Epilogue(90.0, 126.0, 2, beside="beside_dlogits")
DINPUT = Epilogue(60.0, 60.0, 2, exposed_high=3.2, beside="beside_sliced")
SUMS = Epilogue(120.0, 120.0, 4, exposed_high=3.2, beside="beside_sliced")
DWEIGHT = Epilogue(22.4, 22.4, 2, exposed=3.2, exposed_high=16.0, beside="beside_sliced")


def dinput_epilogue(splits: int) -> Epilogue:
    """Of dinput's GEMM in `splits` of k, each of which has an fp32 sum."""
    return SUMS if splits > 1 else DINPUT
