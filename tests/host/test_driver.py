"""A driver that cannot load the kernels is refused by name, before anything is compiled or launched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_lce
from cute_lce import launch
from cute_lce.arch import ARCHITECTURES, KernelConfig, of_capability
from cute_lce.arguments import Operands
from cute_lce.compile import cache, driver
from cute_lce.implementation import Request
from cute_lce.options import LossOptions
from cute_lce.plan.kernels import BackwardKey, ForwardKey
from tests.device import forget_device

DEVICES = {
    "sm_90a": ("NVIDIA H100", 9, 0, 132),
    "sm_100a": ("NVIDIA B200", 10, 0, 148),
    "sm_103a": ("NVIDIA B300", 10, 3, 148),
}


@pytest.fixture(autouse=True)
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """Stands where compiled functions come from; must not be called where the driver is refused."""
    get = Mock(name="cache._get")
    monkeypatch.setattr(cache, "_functions", {})
    monkeypatch.setattr(cache, "_get", get)
    forget_device()
    yield get
    forget_device()


def prepare(monkeypatch: pytest.MonkeyPatch, arch: str, version: tuple[int, int] | None) -> None:
    """What a first call's backward and forward decide on such a device."""
    name, major, minor, sms = DEVICES[arch]
    properties = SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=sms, L2_cache_size=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(driver, "driver_version", lambda: version)
    for module in (launch.forward, launch.backward):
        monkeypatch.setattr(module, "template", lambda device, dtype, *shape: torch.empty((), dtype=dtype))
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    with FakeTensorMode():
        hidden, weight = (torch.empty(rows, 64, dtype=dtype, device=device) for rows in (256, 512))
        operands = Operands(hidden, weight, torch.empty(256, dtype=torch.int64, device=device))
    launch.KERNELS.backward(operands, LossOptions(), Request())
    launch.KERNELS.forward(operands, LossOptions(), Request())


@pytest.mark.parametrize(
    ("arch", "version", "wanted"),
    [
        ("sm_90a", (11, 8), "12.0"),
        ("sm_100a", (12, 4), "12.8"),
        ("sm_100a", (12, 7), "12.8"),
        ("sm_103a", (12, 8), "12.9"),
    ],
)
def test_an_old_driver_is_refused(arch: str, version: tuple, wanted: str, monkeypatch, nothing_compiles):
    name, major, minor, _ = DEVICES[arch]
    expected = (
        rf"cuda:0 \({name}, compute capability {major}\.{minor}\): got a driver that supports CUDA "
        rf"{version[0]}\.{version[1]}, which cannot load kernels compiled for {arch}; want one that supports "
        rf"CUDA {wanted} or later"
    )
    for _ in range(2):  # nothing is remembered that would let the second call pass
        with pytest.raises(RuntimeError, match=expected):
            prepare(monkeypatch, arch, version)
    nothing_compiles.assert_not_called()


@pytest.mark.parametrize(
    ("arch", "version"),
    [
        ("sm_90a", (12, 4)),
        ("sm_100a", (12, 8)),
        ("sm_103a", (12, 9)),
        *((arch, (13, 0)) for arch in DEVICES),
        ("sm_100a", None),  # a driver under another name says itself what it cannot do
    ],
)
def test_a_driver_that_is_new_enough_is_taken(arch: str, version, monkeypatch, nothing_compiles):
    prepare(monkeypatch, arch, version)
    asked = [call.args[0] for call in nothing_compiles.call_args_list]
    assert [type(key) for key in asked] == [BackwardKey, ForwardKey]
    configs = [part for key in asked for part in key if isinstance(part, KernelConfig)]
    assert [config.arch for config in configs] == [arch] * 4


def test_every_architecture_has_a_least_driver():
    assert set(ARCHITECTURES) == set(DEVICES)
    for name, row in ARCHITECTURES.items():
        assert row.name == name
        assert row.capability == DEVICES[name][1:3]
        assert of_capability(row.capability) is row
        assert row.least_driver >= (12, 0)


def test_the_toolkit_is_one_that_the_driver_takes(monkeypatch: pytest.MonkeyPatch):
    """The DSL compiles with the newest toolkit that the driver takes; what loads the result is of it too."""
    libraries = {12: Path("cu12.so"), 13: Path("cu13.so")}
    monkeypatch.setattr(driver, "_toolkits", lambda: libraries)
    for version, major in (((12, 8), 12), ((13, 0), 13), ((14, 1), 13), (None, 13)):
        monkeypatch.setattr(driver, "driver_version", lambda version=version: version)
        assert driver.toolkit() == (major, libraries[major])


def test_with_the_newest_toolkit_alone_its_driver_is_wanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driver, "_toolkits", lambda: {13: Path("cu13.so")})
    monkeypatch.setattr(driver, "driver_version", lambda: (12, 9))
    with pytest.raises(RuntimeError, match=r"here: got .* CUDA 12\.9, .* sm_90a; want .* CUDA 13\.0"):
        driver.check_driver(ARCHITECTURES["sm_90a"], "here")


def test_files_of_different_toolkits_have_different_names(monkeypatch: pytest.MonkeyPatch):
    fresh = cache._environment.__wrapped__
    environments = set()
    for major in (12, 13):
        monkeypatch.setattr(driver, "toolkit", lambda major=major: (major, Path()))
        environments.add(fresh())
    assert len(environments) == 2


# Without the package's own __init__, which imports torch.
ASK = f"""
import sys, types
stub = sys.modules["cute_lce"] = types.ModuleType("cute_lce")
stub.__path__ = [{str(Path(cute_lce.__file__).parent)!r}]
from cute_lce.compile import driver
print(driver.driver_version())
"""
FAKE = "int cuDriverGetVersion(int *version) { *version = %d; return %d; }"


@pytest.mark.parametrize(
    ("version", "status", "expected"),
    [(12080, 0, (12, 8)), (13010, 0, (13, 1)), (0, 3, None), (None, 0, None)],
)
def test_driver_version(version: int | None, status: int, expected, tmp_path: Path):
    """What the driver says, from a library in its place; None where it fails or is not there."""
    library = tmp_path / "libcuda.so.1"
    if version is None:
        library.write_text("not a library")
    else:
        source = tmp_path / "driver.c"
        source.write_text(FAKE % (version, status))
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    found = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == str(expected)


@pytest.mark.emulator_full
def test_what_the_older_toolkit_compiles_is_as_good(tmp_path: Path):
    """With a driver of 12.8 the DSL's compiler of CUDA 12 makes the kernels: the forward's tests again."""
    if 12 not in driver._toolkits():
        pytest.skip("the DSL is not installed for CUDA 12")
    source = tmp_path / "driver.c"
    source.write_text(FAKE % (12080, 0))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    files = [
        f"tests/{kind}/test_{arch}.py" for kind in ("compiled", "emulated") for arch in ("sm90", "sm100")
    ]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not emulator_full", "-p", "no:cacheprovider", *files],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert re.search(r"\d{3} passed", run.stdout)
