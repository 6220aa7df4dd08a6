"""What the compiler made of the backward and of the forward that keeps: PTX, registers, memory. No GPU."""

from __future__ import annotations

import functools
import re

import pytest

from cute_lce.arch import architecture
from cute_lce.plan.kernels import BackwardKey, ForwardKey, Key
from tests.compiled import cubin

ARCHITECTURES = ("sm_90a", "sm_100a")
DTYPES = {"bfloat16": "bf16", "float16": "f16"}
# float16 keeps nothing.
PASSES = [
    *((arch, dtype, "backward") for arch in ARCHITECTURES for dtype in DTYPES),
    *((arch, "bfloat16", "keep") for arch in ARCHITECTURES),
]
every_pass = pytest.mark.parametrize(("arch", "dtype", "which"), PASSES)
every_backward = pytest.mark.parametrize(
    ("arch", "dtype"), [(arch, dtype) for arch in ARCHITECTURES for dtype in DTYPES]
)


@functools.cache
def key(arch: str, dtype: str, which: str, target_dtype: str = "int64") -> Key:
    """The key of what launch/ asks for."""
    row = architecture(arch)
    if which == "keep":
        return ForwardKey(row.keep_config, dtype, target_dtype, keeps=True)
    return BackwardKey(row.keep_config, row.gradient_config, row.gradient_config, dtype, target_dtype)


def gemms(arch: str, dtype: str, which: str = "backward") -> list[cubin.Kernel]:
    """The GEMMs in the order in which the host function launches them: logits, dhidden, dweight."""
    found = [kernel for name, kernel in cubin.kernels(key(arch, dtype, which)).items() if "Gemm" in name]
    return sorted(found, key=lambda kernel: int(kernel.name.rsplit("_", 1)[1]))


@pytest.mark.parametrize(
    ("arch", "dtype", "which"),
    [
        pytest.param(*each, marks=pytest.mark.xfail(reason="a word a run; see the next test"))
        if each == ("sm_90a", "bfloat16", "keep")
        else each
        for each in PASSES
    ],
)
def test_no_spill_and_no_local_memory(arch: str, dtype: str, which: str):
    for kernel in cubin.kernels(key(arch, dtype, which)).values():
        assert kernel.target == arch
        assert kernel.usage["STACK"] == kernel.usage["LOCAL"] == 0, kernel.name
        assert not kernel.local_accesses, kernel.name
        assert ".local" not in kernel.ptx


def test_what_hoppers_keeping_forward_spills_is_outside_the_loop_over_tiles():
    """One word that lives through all runs, stored once and read once a run, before the run's first MMA."""
    (kernel,) = gemms("sm_90a", "bfloat16", "keep")
    assert kernel.usage["STACK"] <= 8
    assert kernel.local_accesses == ["STL", "LDL"]
    assert max(kernel.sass.index(access) for access in ("STL", "LDL")) < kernel.sass.index("HGMMA")
    jumps = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+\S*\s*BRA\S* \S*?\s*0x([0-9a-f]+)", kernel.sass)
    first_mma, read = (
        int(found[1], 16)
        for op in ("HGMMA", "LDL")
        if (found := re.search(rf"/\*([0-9a-f]{{4,5}})\*/[^\n]*\b{op}\b", kernel.sass))
    )
    loops = [(int(to, 16), int(at, 16)) for at, to in jumps if int(to, 16) < int(at, 16)]
    around_mma = sorted(end - start for start, end in loops if start <= first_mma <= end)
    around_read = sorted(end - start for start, end in loops if start <= read <= end)
    # The loops around the MMAs are those over k tiles, tiles and runs; of these only the last has the load.
    assert len(around_mma) >= 3
    assert around_read[0] > around_mma[1]


@every_pass
def test_kernels(arch: str, dtype: str, which: str):
    """Three GEMMs and the scaling of rows; or the forward's, the references and the finish."""
    names = list(cubin.kernels(key(arch, dtype, which)))
    wanted = ["ScaleRows"] if which == "backward" else ["References", "Combine", "Finish"]
    for want in wanted:
        assert sum(want in name for name in names) == 1, (want, names)
    assert len(gemms(arch, dtype, which)) == (3 if which == "backward" else 1)


@every_pass
def test_registers(arch: str, dtype: str, which: str):
    for kernel in cubin.kernels(key(arch, dtype, which)).values():
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_wgmma(dtype: str):
    row = architecture("sm_90a")
    configs = row.keep_config, row.gradient_config, row.gradient_config
    for kernel, config in zip(gemms("sm_90a", dtype), configs, strict=True):
        shape = f"m64n{config.tile_n}k16.f32.{DTYPES[dtype]}.{DTYPES[dtype]}"
        rows_of_64 = config.tile_m * config.turns // (64 * config.warpgroups)
        assert kernel.ptx_of(r"wgmma\.mma_async\.sync\.aligned\.(\S+)") == [shape] * (4 * rows_of_64)
        assert kernel.sass.count("HGMMA") == 4 * rows_of_64
        assert kernel.sass.count("WARPGROUP.DEPBAR") == 2
        assert sorted(kernel.ptx_of(r"wgmma\.wait_group\S*\s+(\d)")) == ["0", "1"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_wgmma_reads_operands_where_they_lie(dtype: str):
    """dhidden takes weight as it is stored, dweight both of its operands; no copy is made for it.

    The last two numbers of wgmma say which operand is transposed.
    """
    transposed = []
    for kernel in gemms("sm_90a", dtype):
        numbers = {
            tuple(int(x) for x in line.split(",")[-2:])
            for line in re.findall(r"wgmma\.mma_async[^;]*?((?:, *-?\d+)+);", kernel.ptx)
        }
        assert len(numbers) == 1, numbers
        transposed += numbers
    assert transposed == [(0, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tcgen05(dtype: str):
    for kernel in gemms("sm_100a", dtype):
        mma = re.findall(r"tcgen05\.mma\.cta_group::(\d)\.kind::(\w+)", kernel.ptx)
        assert mma == [("2", "f16")] * 4  # a k tile of 64 is four MMAs of 16
        lines = [line.strip() for line in kernel.ptx.split("\n")]
        loads = [i for i, line in enumerate(lines) if line.startswith("tcgen05.ld")]
        assert loads
        assert all(lines[i + 1].startswith("tcgen05.wait::ld") for i in loads)
        assert "UTCHMMA.2CTA" in kernel.sass


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_is_kept_costs_one_exponential_an_element(arch: str):
    """The exponential that is stored serves the statistics; columns beyond take the other branch."""
    config = architecture(arch).keep_config
    (kernel,) = gemms(arch, "bfloat16", "keep")
    elements = config.tile_m * config.tile_n // 128 if arch == "sm_90a" else 64
    exponentials = len(kernel.ptx_of(r"ex2\.\S+"))
    # Both branches, and a few a row to rescale its sum.
    assert 2 * elements <= exponentials <= 2.2 * elements + 32


@every_backward
def test_gradients_are_stored_in_pairs(arch: str, dtype: str):
    """No element alone: gradients, dlogits and accumulators leave at least as two neighbours."""
    for kernel in gemms(arch, dtype):
        stores = kernel.ptx_of(r"st\.global\S*")
        assert stores
        assert not any(store.endswith((".b16", ".u16", ".b8")) and ".v2" not in store for store in stores)


@pytest.mark.parametrize("arch", ["sm_103a"])
def test_other_targets_compile(arch: str):
    for kernel in gemms(arch, "bfloat16"):
        assert kernel.target == arch
        assert kernel.usage["STACK"] == kernel.usage["LOCAL"] == 0
