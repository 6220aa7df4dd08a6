"""What the compiler made of a key of plan.kernels: each kernel's PTX, registers, memory and SASS.

No GPU and no driver: the DSL brings ptxas, nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm read the cubin.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from cute_lce.plan.kernels import Key
from tests import store


@dataclass(frozen=True)
class Kernel:
    """One entry of a module."""

    name: str
    target: str
    ptx: str
    usage: dict[str, int]  # REG, STACK, SHARED, LOCAL
    sass: str

    @property
    def local_accesses(self) -> list[str]:
        """Loads and stores of local memory: what a spill or an indexed register array becomes."""
        return re.findall(r"\b(?:LDL|STL)\b", self.sass)

    def ptx_of(self, pattern: str) -> list[str]:
        """Opcodes of the PTX, or what the pattern's group catches."""
        return re.findall(pattern, self.ptx)


def check_no_local_memory(key: Key, launches: tuple[str, ...] = ()) -> None:
    """No kernel of a key spills or has a stack; which does, and by how much, is in the error."""
    found = {kernel.name: kernel for kernel in kernels(key, launches).values()}
    spilled = {
        name: f"{kernel.usage['STACK']} bytes of stack, {len(kernel.local_accesses)} loads and stores of it"
        for name, kernel in found.items()
        if kernel.usage["STACK"] or kernel.usage["LOCAL"] or kernel.local_accesses or ".local" in kernel.ptx
    }
    assert not spilled, spilled


@functools.cache
def kernels(key: Key, launches: tuple[str, ...] = ()) -> dict[str, Kernel]:
    """Compile a key; its kernels by name. launches: of a backward the attributes of Backward whose kernels
    are asked for, since each takes seconds; (): all."""
    folder = store.compiled(key, launches)
    ptx = (folder / store.PTX).read_text()
    usage, sass = (_cuobjdump(flag, str(folder / store.CUBIN)) for flag in ("-res-usage", "-sass"))
    target = re.search(r"\.target (\S+)", ptx)
    assert target
    texts = {
        "ptx": _by_name(ptx, r"\.visible \.entry (\w+)"),
        "usage": _by_name(usage, r" Function (\w+):"),
        "sass": _by_name(sass, r"Function : (\w+)"),
    }
    assert set(texts["ptx"]) == set(texts["usage"]) == set(texts["sass"])
    return {
        name: Kernel(
            name,
            target[1],
            texts["ptx"][name],
            {k: int(v) for k, v in re.findall(r"([A-Z]+):(\d+)", texts["usage"][name])},
            texts["sass"][name],
        )
        for name in texts["ptx"]
    }


def kernel(key: Key, of: str) -> Kernel:
    """The only kernel whose name has `of` in it."""
    found = [kernel for name, kernel in kernels(key).items() if of in name]
    assert len(found) == 1, (of, list(kernels(key)))
    return found[0]


def gemms(key: Key, launches: tuple[str, ...] = ()) -> list[Kernel]:
    """Those of `kernels` that are GEMMs, in the order in which the host function launches them."""
    found = [kernel for name, kernel in kernels(key, launches).items() if "Gemm" in name]
    return sorted(found, key=lambda kernel: int(kernel.name.rsplit("_", 1)[1]))


def _by_name(text: str, heading: str) -> dict[str, str]:
    """A listing's parts, each from one heading to the next, by the name in the heading."""
    parts = re.split(heading, text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _cuobjdump(*args: str) -> str:
    tool = Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "bin", "cuobjdump")
    return subprocess.run([tool, *args], check=True, capture_output=True, text=True).stdout
