"""What a wheel carries is loaded from it, on any CPU of its kind; what is built otherwise carries nothing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cute_lce import cli
from cute_lce.arch import ARCHITECTURES
from cute_lce.commands import doctor, wheel
from cute_lce.compile import cache
from cute_lce.plan.kernels import BackwardKey, MergeKey, carried, kernels
from tests.host.test_cache import KEY, LOAD, seven  # noqa: F401

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the DSL is for Linux")
BEYOND = re.compile(r"%[yz]mm\d|\tv[a-z0-9]+ .*%xmm|\{%k\d\}")
"""Of a disassembled x86-64 library: what x86-64-v2 lacks."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that carries KEY."""
    folder = tmp_path_factory.mktemp("wheel")
    before = os.environ.get("CUTE_LCE_CACHE_DIR")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache, "_functions", {})
            return wheel.build_wheel([KEY], folder / "dist", folder / "kept")
    finally:
        os.environ.pop("CUTE_LCE_CACHE_DIR")
        os.environ.update({} if before is None else {"CUTE_LCE_CACHE_DIR": before})


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that it is installed in."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder),
    ]
    subprocess.run([*pip, str(built)], check=True)
    return folder


def only_kernel(folder: Path) -> Path:
    (path,) = (folder / "cute_lce" / "carried").iterdir()
    return path


def run(folder: Path, code: str, **environment: str) -> str:
    """What a program prints that has the installed package, and no other, on its path."""
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return found.stdout


def test_its_name_says_where_it_can_be_installed(built: Path):
    assert built.name.endswith(f"-py3-none-manylinux_2_28_{platform.machine()}.whl")
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
    assert sorted(name for name in names if name.endswith(".so")) == [
        f"cute_lce/carried/{cache.file_name(KEY)}"
    ]
    assert {"cute_lce/py.typed", "cute_lce/commands/report.py", "cute_lce/measure/timing.py"} <= set(names)


def test_a_first_call_loads_what_is_carried(installed: Path, tmp_path: Path):
    """It compiles nothing, imports no cutlass and needs no folder."""
    nowhere = tmp_path / "cache"
    code = f"import cute_lce; assert cute_lce.__file__.startswith({str(installed)!r})\n{LOAD}"
    imported, _ = run(installed, code, CUTE_LCE_CACHE_DIR=str(nowhere), CC="no-such-compiler").split()
    assert imported == "False"
    assert not nowhere.exists()
    assert only_kernel(installed).stat().st_mode & 0o444 == 0o444


@pytest.mark.skipif(platform.machine() != "x86_64", reason="disassembles x86-64")
def test_carried_code_runs_on_every_cpu_of_its_kind(installed: Path):
    text = disassembled(only_kernel(installed))
    assert text.count("\n") > 1000
    assert not BEYOND.findall(text)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="disassembles x86-64")
def test_newer_instructions_are_found(tmp_path: Path):
    """In what the C compiler makes for a CPU that has them."""
    source, library = tmp_path / "sum.c", tmp_path / "sum.so"
    source.write_text("void f(float *a, float *b) { for (int i = 0; i < 64; i++) a[i] += b[i]; }")
    for options, there in (
        ([], False),
        (["-mavx"], True),
        (["-mavx512f", "-mprefer-vector-width=512"], True),
    ):
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", *options, "-o", library, source], check=True)
        assert bool(BEYOND.findall(disassembled(library))) == there, options


def disassembled(library: Path) -> str:
    return subprocess.run(["objdump", "-d", library], check=True, capture_output=True, text=True).stdout


def test_carried_kernels_ask_glibc_for_nothing(installed: Path):
    """The tag of the wheel's platform names a version of it."""
    command = ["objdump", "-T", only_kernel(installed)]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "_cudaLaunchKernelEx" in symbols
    versions = re.findall(r"GLIBC_(\d+)\.(\d+)", symbols)
    assert all((int(major), int(minor)) <= (2, 28) for major, minor in versions), versions


@pytest.fixture
def carries(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This package, with KEY's file beside it; the folder of those."""
    folder = tmp_path / "carried"
    with zipfile.ZipFile(built) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".so"))
        folder.mkdir()
        (folder / Path(name).name).write_bytes(archive.read(name))
    monkeypatch.setattr(cache, "CARRIED", folder)
    monkeypatch.setattr(cache, "_functions", {})
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def test_what_is_not_carried_is_compiled_and_cached(carries: Path, seven: None, tmp_path: Path):  # noqa: F811
    other = KEY._replace(terms=("logit_scale",))
    assert cache.carries(KEY)
    assert not cache.carries(other)
    cache.get(KEY)
    assert not (tmp_path / "cache").exists()
    function: Any = cache.get(other)
    assert function() == 7
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [cache.file_name(other)]
    assert len(list(carries.iterdir())) == 1


def test_a_spoiled_carried_file_is_a_miss(carries: Path, seven: None, caplog):  # noqa: F811
    (path,) = carries.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    function: Any = cache.get(KEY)
    assert function() == 7
    assert str(path) in caplog.text


def test_the_doctor_says_what_is_carried(carries: Path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "carried", lambda: [KEY])
    monkeypatch.setattr("cute_lce.commands.info.carried", lambda: [KEY])
    assert doctor._carried().text == "1, with 1 of the 1 of bfloat16"
    assert cli.main(["info"]) == 0
    assert "carried kernels" in capsys.readouterr().out
    # Another version of the DSL: its kernels are others.
    (path,) = carries.iterdir()
    path.rename(carries / f"{'0' * 32}.so")
    line = doctor._carried()
    assert line.state == doctor.FAIL
    assert "1 for other versions" in line.text
    shutil.rmtree(carries)
    line = doctor._carried()
    assert (line.state, line.text.partition(":")[0]) == (doctor.NOTE, "none")


def test_what_a_wheel_carries():
    """All that bfloat16 asks for without terms, and what grad_in_forward and groups do."""
    keys = carried()
    assert len(set(keys)) == len(keys)
    wanted = {
        key
        for arch in ARCHITECTURES
        for added in ("", "float32")
        for key in kernels(arch, "bfloat16", "int64", added)
    }
    assert set(keys) == wanted | {MergeKey(arch) for arch in ARCHITECTURES}
    assert Counter(type(key) for key in keys)[BackwardKey] > 100
    assert set(keys) < set(carried(("bfloat16", "float16")))


@pytest.mark.parametrize("kind", ["build_wheel", "build_sdist"])
def test_what_is_built_from_sources_carries_nothing(kind: str, tmp_path: Path):
    path = wheel.build(wheel.copy_sources(tmp_path), kind, tmp_path / "dist")
    if kind == "build_wheel":
        assert path.name.endswith("-py3-none-any.whl")
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    else:
        with tarfile.open(path) as archive:
            names = archive.getnames()
    assert any(name.endswith("cute_lce/py.typed") for name in names)
    assert any(name.endswith("cute_lce/kernels/entry/forward.py") for name in names)
    assert not [name for name in names if "carried" in name or name.endswith((".so", ".o"))]


def test_the_checkout_carries_nothing():
    assert not cache.CARRIED.exists()


def test_a_file_is_no_folder_for_a_wheel(tmp_path, capsys):
    """Which is said before the kernels are compiled."""
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        wheel.main(["--out", str(tmp_path / "file")])
    assert "a file, want a folder" in capsys.readouterr().err
