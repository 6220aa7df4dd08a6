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

from cute_lce import compiled, launch
from cute_lce import plan as plans

DEVICES = {
    "sm_90a": ("NVIDIA H100", 9, 0, 132),
    "sm_100a": ("NVIDIA B200", 10, 0, 148),
    "sm_103a": ("NVIDIA B300", 10, 3, 148),
}


@pytest.fixture(autouse=True)
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """Stands where compiled functions come from; must not be called where the driver is refused."""
    get = Mock(name="compiled._get")
    monkeypatch.setattr(compiled, "_functions", {})
    monkeypatch.setattr(compiled, "_get", get)
    for cached in (launch._architecture, launch._prepare, launch._prepare_backward):
        cached.cache_clear()
    yield get
    for cached in (launch._architecture, launch._prepare, launch._prepare_backward):
        cached.cache_clear()


def prepare(monkeypatch: pytest.MonkeyPatch, arch: str, driver: tuple[int, int] | None):
    """What a first call on such a device decides."""
    name, major, minor, sms = DEVICES[arch]
    properties = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(compiled, "driver_version", lambda: driver)
    monkeypatch.setattr(launch, "_like", lambda device, dtype: torch.empty((), dtype=dtype))
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    launch._prepare_backward(device, dtype, torch.int64, 256, 64, 512, True, True, 0, 0, 0)
    chosen, _ = launch._prepare(device, dtype, torch.int64, 256, 64, 512, 0, 0, False)
    return chosen


@pytest.mark.parametrize(
    ("arch", "driver", "wanted"),
    [
        ("sm_90a", (11, 8), "12.0"),
        ("sm_100a", (12, 4), "12.8"),
        ("sm_100a", (12, 7), "12.8"),
        ("sm_103a", (12, 8), "12.9"),
    ],
)
def test_an_old_driver_is_refused(arch: str, driver: tuple, wanted: str, monkeypatch, nothing_compiles):
    name, major, minor, _ = DEVICES[arch]
    expected = (
        rf"cuda:0 \({name}, compute capability {major}\.{minor}\): got a driver that supports CUDA "
        rf"{driver[0]}\.{driver[1]}, which cannot load kernels compiled for {arch}; want one that supports "
        rf"CUDA {wanted} or later"
    )
    for _ in range(2):  # nothing is remembered that would let the second call pass
        with pytest.raises(RuntimeError, match=expected):
            prepare(monkeypatch, arch, driver)
    nothing_compiles.assert_not_called()


@pytest.mark.parametrize(
    ("arch", "driver"),
    [
        ("sm_90a", (12, 4)),
        ("sm_100a", (12, 8)),
        ("sm_103a", (12, 9)),
        *((arch, (13, 0)) for arch in DEVICES),
        ("sm_100a", None),  # a driver under another name says itself what it cannot do
    ],
)
def test_a_driver_that_is_new_enough_is_taken(arch: str, driver, monkeypatch, nothing_compiles):
    assert prepare(monkeypatch, arch, driver).config.arch == arch
    assert nothing_compiles.call_count == 2


def test_every_architecture_has_a_least_driver():
    assert set(launch.ARCHITECTURES.values()) == set(plans.DEVICES) == set(compiled.LEAST_DRIVER)


def test_the_toolkit_is_one_that_the_driver_takes(monkeypatch: pytest.MonkeyPatch):
    """The DSL compiles with the newest toolkit that the driver takes; what loads the result is of it too."""
    libraries = {12: Path("cu12.so"), 13: Path("cu13.so")}
    monkeypatch.setattr(compiled, "_toolkits", lambda: libraries)
    for driver, major in (((12, 8), 12), ((13, 0), 13), ((14, 1), 13), (None, 13)):
        monkeypatch.setattr(compiled, "driver_version", lambda driver=driver: driver)
        assert compiled._toolkit() == (major, libraries[major])


def test_with_the_newest_toolkit_alone_its_driver_is_wanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "_toolkits", lambda: {13: Path("cu13.so")})
    monkeypatch.setattr(compiled, "driver_version", lambda: (12, 9))
    with pytest.raises(RuntimeError, match=r"here: got .* CUDA 12\.9, .* sm_90a; want .* CUDA 13\.0"):
        compiled.check_driver("sm_90a", "here")


def test_files_of_different_toolkits_have_different_names(monkeypatch: pytest.MonkeyPatch):
    fresh = compiled._environment.__wrapped__
    environments = set()
    for major in (12, 13):
        monkeypatch.setattr(compiled, "_toolkit", lambda major=major: (major, Path()))
        environments.add(fresh())
    assert len(environments) == 2


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
        [sys.executable, "-c", "from cute_lce import compiled; print(compiled.driver_version())"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == str(expected)


@pytest.mark.emulator_full
def test_what_the_older_toolkit_compiles_is_as_good(tmp_path: Path):
    """With a driver of 12.8 the DSL's compiler of CUDA 12 makes the kernels: the forward's tests again."""
    if 12 not in compiled._toolkits():
        pytest.skip("the DSL is not installed for CUDA 12")
    source = tmp_path / "driver.c"
    source.write_text(FAKE % (12080, 0))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    files = [
        f"tests/test_{kind}_{arch}.py" for kind in ("compiled", "emulated") for arch in ("sm90", "sm100")
    ]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not emulator_full", "-p", "no:cacheprovider", *files],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert re.search(r"\d{3} passed", run.stdout)
