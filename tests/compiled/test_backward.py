"""What the compiler made of the backward and of the forward that keeps: PTX, registers, memory. No GPU.

Each test has a few of the tiles that a plan may choose; `emulator_full` has all of Hopper's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from cute_lce.arch import KernelConfig, architecture
from cute_lce.plan.kernels import BackwardKey, ForwardKey, Key
from tests.compiled import cubin

DTYPES = {"bfloat16": "bf16", "float16": "f16"}
KINDS = ("backward", "keep")
# The narrowest, the widest, and for Hopper one that is no multiple of the 32 columns that lanes share.
TILES = {"sm_90a": (32, 112, 192), "sm_100a": (64, 256)}


class Pass(NamedTuple):
    """A backward or a forward that keeps."""

    arch: str
    tile: int
    dtype: str = "bfloat16"
    which: str = "backward"

    @property
    def config(self) -> KernelConfig:
        (config,) = (each for each in architecture(self.arch).token_configs if each.tile_n == self.tile)
        return config

    @property
    def key(self) -> Key:
        """The key of what launch/ asks for."""
        if self.which == "keep":
            return ForwardKey(self.config, self.dtype, keeps=True)
        return BackwardKey(self.config, architecture(self.arch).gradient_configs[0], self.dtype)

    @property
    def gemms(self) -> list[cubin.Kernel]:
        """The GEMMs in the order in which the host function launches them: logits, dhidden, dweight."""
        found = [kernel for name, kernel in cubin.kernels(self.key).items() if "Gemm" in name]
        return sorted(found, key=lambda kernel: int(kernel.name.rsplit("_", 1)[1]))


def passes(arch: str, tiles: Iterable[int]) -> list[Pass]:
    return [Pass(arch, tile, dtype, which) for tile in tiles for dtype in DTYPES for which in KINDS]


def named(chosen: Iterable[Pass], spills: dict[Pass, str] | None = None) -> Any:
    """Parametrize a test by passes; those in `spills` are expected to fail for the given reason."""
    spills = spills or {}
    return pytest.mark.parametrize(
        "each",
        [
            pytest.param(
                each,
                id="-".join(map(str, each)),
                marks=[pytest.mark.xfail(reason=spills[each])] if each in spills else [],
            )
            for each in chosen
        ],
    )


# float16's registers are bfloat16's: its widest tile stands for the others.
PASSES = [
    each
    for arch, tiles in TILES.items()
    for each in passes(arch, tiles)
    if each.dtype == "bfloat16" or each.tile == tiles[-1]
]
ALL = passes("sm_90a", architecture("sm_90a").token_tiles)
SPILLS = {
    **{Pass("sm_90a", 192, dtype): "dlogits: 16 bytes, 7 accesses" for dtype in DTYPES},
    **{Pass("sm_90a", 160, dtype, "keep"): "8 bytes, 4 accesses" for dtype in DTYPES},
    **{Pass("sm_90a", 176, dtype, "keep"): "72 bytes, 49 accesses" for dtype in DTYPES},
    **{Pass("sm_90a", 192, dtype, "keep"): "136 bytes, 142 accesses" for dtype in DTYPES},
}
every_pass = named(PASSES)
every_backward = named(each for each in PASSES if each.which == "backward")
hoppers_backwards = named(each for each in PASSES if (each.arch, each.which) == ("sm_90a", "backward"))


@named(PASSES, SPILLS)
def test_no_spill_and_no_local_memory(each: Pass):
    cubin.check_no_local_memory(each.key)


@pytest.mark.emulator_full
@named(ALL, SPILLS)
def test_no_tile_spills(each: Pass):
    check_registers(each)
    cubin.check_no_local_memory(each.key)


@every_pass
def test_kernels(each: Pass):
    """Three GEMMs, the scaling of rows, three kernels in float16, and the sum of splits; or the forward's,
    references and finish."""
    kernels = cubin.kernels(each.key)
    names = list(kernels)
    assert {kernel.target for kernel in kernels.values()} == {each.arch}
    if each.which == "backward":
        wanted = {"ScaleRows": 3 if each.dtype == "float16" else 1, "Reduce": 1}
    else:
        wanted = {"References": 1, "Combine": 1, "Finish": 1}
    for want, count in wanted.items():
        assert sum(want in name for name in names) == count, (want, names)
    assert len(each.gemms) == (3 if each.which == "backward" else 1)


@every_pass
def test_registers(each: Pass):
    check_registers(each)


def check_registers(each: Pass) -> None:
    for kernel in cubin.kernels(each.key).values():
        if "GemmSm90" in kernel.name:
            # At launch all warps have the same; then the load warpgroup gives up what the consumers take.
            assert kernel.usage["REG"] <= 168, kernel.name
            (least,), (most,) = (kernel.ptx_of(rf"setmaxnreg\.{way}\S*\s+(\d+)") for way in ("dec", "inc"))
            assert 128 * (int(least) + 2 * int(most)) <= 65536
        elif "GemmSm100" in kernel.name:
            assert kernel.usage["REG"] <= 255, kernel.name
        else:
            # Small kernels live by how many of them fit: 128 threads, at least 8 blocks to an SM.
            assert kernel.usage["REG"] <= 64, kernel.name


@hoppers_backwards
def test_wgmma(each: Pass):
    configs = each.config, each.config, architecture("sm_90a").gradient_configs[0]
    for kernel, config in zip(each.gemms, configs, strict=True):
        shape = f"m64n{config.tile_n}k16.f32.{DTYPES[each.dtype]}.{DTYPES[each.dtype]}"
        rows_of_64 = config.tile_m * config.turns // (64 * config.warpgroups)
        assert kernel.ptx_of(r"wgmma\.mma_async\.sync\.aligned\.(\S+)") == [shape] * (4 * rows_of_64)
        assert kernel.sass.count("HGMMA") == 4 * rows_of_64
        assert kernel.sass.count("WARPGROUP.DEPBAR") == 2
        assert sorted(kernel.ptx_of(r"wgmma\.wait_group\S*\s+(\d)")) == ["0", "1"]


@hoppers_backwards
def test_wgmma_reads_operands_where_they_lie(each: Pass):
    """dhidden takes weight as it is stored, dweight both of its operands; no copy is made for it.

    The last two numbers of wgmma say which operand is transposed.
    """
    transposed = []
    for kernel in each.gemms:
        numbers = {
            tuple(int(x) for x in line.split(",")[-2:])
            for line in re.findall(r"wgmma\.mma_async[^;]*?((?:, *-?\d+)+);", kernel.ptx)
        }
        assert len(numbers) == 1, numbers
        transposed += numbers
    assert transposed == [(0, 0), (1, 0), (1, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tcgen05(dtype: str):
    for kernel in Pass("sm_100a", 256, dtype).gemms:
        mma = re.findall(r"tcgen05\.mma\.cta_group::(\d)\.kind::(\w+)", kernel.ptx)
        assert mma == [("2", "f16")] * 4  # a k tile of 64 is four MMAs of 16
        lines = [line.strip() for line in kernel.ptx.split("\n")]
        loads = [i for i, line in enumerate(lines) if line.startswith("tcgen05.ld")]
        assert loads
        # A slab is two loads of 16 lanes; what follows the second is the wait.
        assert len(loads) % 2 == 0
        assert all(second == first + 1 for first, second in zip(loads[::2], loads[1::2], strict=True))
        assert all(lines[i + 1].startswith("tcgen05.wait::ld") for i in loads[1::2])
        assert "UTCHMMA.2CTA" in kernel.sass


@named(each for each in PASSES if each.which == "keep")
def test_what_is_kept_costs_one_exponential_an_element(each: Pass):
    """The exponential that is stored serves the statistics; columns beyond take the other branch."""
    from cute_lce.kernels.mainloop import mainloop

    (kernel,) = each.gemms
    fragment = mainloop(each.config).fragment(each.config)
    elements = len(fragment.rows) * fragment.count
    exponentials = len(kernel.ptx_of(r"ex2\.\S+"))
    # Both branches, and a few for each 32 columns, of which a lane owns one: a change of base.
    least = 2 * elements * fragment.slabs
    assert least <= exponentials <= least + 5 * fragment.owned * fragment.slabs


@every_backward
def test_16_bit_numbers_are_stored_16_bytes_at_once(each: Pass):
    """Gradients and dlogits, transposed by movmatrix where tokens are an MMA's columns; sums are in fp32."""
    for kernel in each.gemms:
        stores = kernel.ptx_of(r"st\.global\S*")
        assert stores
        assert not any(store.endswith((".b16", ".u16", ".b8")) for store in stores)
        assert any(store.endswith((".v4.b32", ".v2.b64", ".v4.u32", ".v2.u64")) for store in stores), stores
    assert [bool(kernel.ptx_of(r"movmatrix\S*")) for kernel in each.gemms] == [True, True, False]


@pytest.mark.parametrize("arch", ["sm_103a"])
def test_other_targets_compile(arch: str):
    for kernel in Pass(arch, 256).gemms:
        assert kernel.target == arch
        assert kernel.usage["STACK"] == kernel.usage["LOCAL"] == 0
