"""Architectures: one row each; a name without a row is refused, a GPU without one is served by streaming."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from cute_lce import environment
from cute_lce.arch import ARCHITECTURES, MOST_STAGES, Gpu, architecture, of_capability
from cute_lce.arguments import TOPK_TOKENS
from cute_lce.commands import doctor, info
from cute_lce.compile import driver
from cute_lce.launch import KERNELS
from cute_lce.launch.device import gpu_of
from cute_lce.ops import select
from cute_lce.plan import backward, forward, gemm, kernels
from cute_lce.plan.problem import NO_LIMITS, Problem
from cute_lce.streaming import STREAMING
from tests.device import forget_device

CONFIG = architecture("sm_90a").configs[0].tokens[-1]


@pytest.mark.parametrize("name", ["sm_120a", "sm_90", "sm_100", "sm_10", "SM_90A", ""])
@pytest.mark.parametrize(
    "call",
    [
        architecture,
        lambda name: dataclasses.replace(CONFIG, arch=name),
        lambda name: Gpu(name, 132).row,
        lambda name: forward.plan(Gpu(name, 132), 4096, 4096, 128256),
        lambda name: forward.plan(Gpu(name, 132), 4096, 4096, 128256, config=CONFIG),
        lambda name: backward.plan(Gpu(name, 132), Problem(4096, 4096, 128256), 0, NO_LIMITS),
        lambda name: gemm.plan(Gpu(name, 132), CONFIG, 4096, 4096, 4096),
        lambda name: kernels.kernels(name, "bfloat16", "int64"),
    ],
    ids=["row", "config", "gpu", "forward", "forward of a config", "backward", "gemm", "keys"],
)
def test_an_unknown_name_is_refused(call: Callable[[str], object], name: str):
    with pytest.raises(ValueError, match=rf"^arch: got '{name}', want one of 'sm_90a', 'sm_100a', 'sm_103a'"):
        call(name)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_configuration_is_of_its_row(arch: str):
    row = architecture(arch)
    assert row.name == arch
    for config in (*row.token_configs, *row.dweight_configs):
        assert config.arch == arch
        assert config.row is row
    for tilings, configs in zip(row.tilings, row.configs, strict=True):
        for made, given in ((configs.tokens, tilings.tokens), (configs.dweight, tilings.dweight)):
            # As given, but for the stages.
            for config, tiling in zip(made, given, strict=True):
                assert all(
                    getattr(config, name) == value for name, value in vars(tiling).items() if name != "stages"
                )
    assert set(row.token_configs) == {config for configs in row.configs for config in configs.tokens}
    assert set(row.dweight_configs) == {config for configs in row.configs for config in configs.dweight}
    for every in (row.token_configs, row.dweight_configs):
        assert len(set(every)) == len(every)
    # Tiles, and chunks of tokens, begin where a block of given ids does, or at half of one in forwards alone.
    assert not any(config.tile_n % TOPK_TOKENS for config in row.token_configs)
    assert not any(config.tile_n % (TOPK_TOKENS // 2) for config in row.forward_configs)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_configuration_that_does_not_fit_is_refused(arch: str):
    row = architecture(arch)
    for config in (*row.token_configs, *row.dweight_configs):
        # The ring is as deep as can be.
        assert config.stages == config.stages_that_fit <= MOST_STAGES
        dataclasses.replace(config, stages=config.stages - 1)
        with pytest.raises(ValueError, match=rf"^config: got \d+ bytes of shared memory, want .* on {arch}"):
            dataclasses.replace(config, stages=config.stages + 1)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_accumulators_fit_tensor_memory(arch: str):
    config = dataclasses.replace(architecture(arch).token_configs[-1], stages=1)
    assert config.tmem_columns == 512
    with pytest.raises(ValueError, match=r"^config: got 1024 columns of tensor memory, want at most 512 on "):
        dataclasses.replace(config, tile_n=264)


@pytest.mark.parametrize(
    ("changes", "registers"),
    [
        # fp32 accumulators of a consumer thread, and 32 beside them, of the 240 that it has.
        ({"tile_n": 256}, 256 + 32),
        ({"tile_m": 256, "pingpong": False}, 192 + 32),
        ({"tile_m": 256, "tile_n": 216, "pingpong": False}, 216 + 32),
        # A third warpgroup leaves each 160.
        ({"tile_m": 192, "tile_n": 128, "warpgroups": 3, "pingpong": False}, 64 * 128 // 128 + 32),
        ({"tile_m": 192, "tile_n": 192, "warpgroups": 3, "pingpong": False}, 96 + 32),
        ({"tile_m": 192, "tile_n": 256, "warpgroups": 3, "pingpong": False}, 128 + 32),
        ({"tile_m": 192, "tile_n": 264, "warpgroups": 3, "pingpong": False}, 132 + 32),
        ({"tile_m": 64, "tile_n": 256, "warpgroups": 1, "pingpong": False}, 128 + 32),
        ({"tile_m": 128, "tile_n": 256, "warpgroups": 1, "pingpong": False}, 256 + 32),
    ],
)
def test_accumulators_fit_registers(changes: dict, registers: int):
    changes = {"stages": 1, **changes}
    most = {1: 256, 2: 240, 3: 160}[changes.get("warpgroups", 2)]
    if registers <= most:
        config = dataclasses.replace(CONFIG, **changes)
        assert config.accumulator_registers + 32 == registers
    else:
        message = f"^config: got {registers} registers a thread, want at most {most} on sm_90a"
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize("warpgroups", [0, 4])
def test_warpgroups_are_1_2_or_3(warpgroups: int):
    message = f"^config: got {warpgroups} warpgroups, want one of 1, 2, 3 on sm_90a"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, warpgroups=warpgroups)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., torch.device]]:
    """Makes torch find a GPU of a compute capability, whatever there is."""
    monkeypatch.setattr(select, "_picked", {})
    forget_device()
    select._log_streaming.cache_clear()
    select._log_switched_off.cache_clear()

    def found(major: int, minor: int, l2: int = 0) -> torch.device:
        properties = SimpleNamespace(
            name="a GPU", major=major, minor=minor, multi_processor_count=48, L2_cache_size=l2
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(driver, "driver_version", lambda: None)
        return torch.device("cuda", 0)

    yield found
    forget_device()
    select._log_streaming.cache_clear()
    select._log_switched_off.cache_clear()


@pytest.mark.parametrize("capability", [(12, 0), (7, 5), (8, 0), (8, 9), (9, 1), (11, 0)])
def test_a_gpu_without_a_row_keeps_streaming(capability: tuple[int, int], gpu, caplog):
    assert of_capability(capability) is None
    device = gpu(*capability)
    for dtype in select.DTYPES:
        assert select.implementation(device, dtype) is STREAMING
    (record,) = caplog.records
    major, minor = capability
    assert record.getMessage().startswith(f"cuda:0 (a GPU, compute capability {major}.{minor}): no kernels")
    with pytest.raises(RuntimeError, match=r"^cuda:0 \(a GPU, .*\): there are no kernels for it"):
        gpu_of(device)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_gpu_with_a_row_has_kernels(arch: str, gpu, caplog):
    row = architecture(arch)
    assert of_capability(row.capability) is row
    device = gpu(*row.capability, row.data_sheets[0].l2)
    for dtype in select.DTYPES:
        served = KERNELS if dtype in (torch.bfloat16, torch.float16) else STREAMING
        assert select.implementation(device, dtype) is served
    assert not caplog.records
    assert gpu_of(device) == Gpu(arch, 48)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_the_kernels_are_switched_off(capability: tuple[int, int], gpu, caplog, monkeypatch):
    """CUTE_LCE_IMPLEMENTATION=streaming, whether or not there are kernels: said once, and no warning."""
    monkeypatch.setattr(environment, "IMPLEMENTATION", "streaming")
    device = gpu(*capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with caplog.at_level(logging.INFO, logger="cute_lce"):
        for dtype in select.DTYPES:
            assert select.implementation(device, dtype) is STREAMING
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("CUTE_LCE_IMPLEMENTATION=streaming: ")
    rows = dict(info.devices())
    assert rows["cuda:0 bfloat16"] == "streaming path: CUTE_LCE_IMPLEMENTATION=streaming"
    assert not [line for line in doctor._cuda() if line.subject == "cuda:0 kernels"]


@pytest.mark.parametrize(
    ("mib", "name"), [(60, "H200"), (50, "H100"), (64, "H200"), (40, "H100"), (0, "H100")]
)
def test_plans_are_made_for_the_gpu_by_its_l2(mib: int, name: str, gpu):
    found = gpu_of(gpu(9, 0, mib << 20))
    assert found.sheet.gpu == name
    assert found.serving(("softcap",), "forward").sheet.gpu == name
