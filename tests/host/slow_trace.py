"""A compile that takes as long as a test says, of a function that returns 7; it runs in workers too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SOURCE = """
#include <stdint.h>
struct any { int32_t type; int32_t zero; int64_t value; };
int __tvm_ffi_kernel(void *self, const struct any *arguments, int32_t count, struct any *result) {
    result->type = 1;  /* kTVMFFIInt */
    result->zero = 0;
    result->value = 7;
    return 0;
}
"""


def prepare(folder: Path, seconds: float = 0.0, **others: Any) -> dict[str, str]:
    """The environment of processes whose compiles are these. others: PARENT and WORKER, seconds there;
    FAILS, an error's message."""
    folder.mkdir()
    (folder / "kernel.c").write_text(SOURCE)
    subprocess.run(["cc", "-fPIC", "-c", "-o", folder / "kernel.o", folder / "kernel.c"], check=True)
    (folder / "settings.json").write_text(json.dumps({"seconds": seconds, **others}))
    return {"SLOW_TRACE": str(folder)}


def trace(key: Any) -> Any:
    folder = Path(os.environ["SLOW_TRACE"])
    settings = json.loads((folder / "settings.json").read_text())
    in_worker = sys.argv[0].endswith("worker.py")
    note(folder, begun=repr(key), worker=in_worker)
    seconds = settings.get("worker" if in_worker else "parent", settings["seconds"])
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
    if in_worker and "fails" in settings:
        raise RuntimeError(settings["fails"])
    note(folder, done=repr(key), worker=in_worker)
    return Object()


class Object:
    def export_to_c(self, path: str, **options: Any) -> None:
        shutil.copy(Path(os.environ["SLOW_TRACE"], "kernel.o"), path)


def note(folder: Path, **what: Any) -> None:
    line = {
        **what,
        "pid": os.getpid(),
        "nice": os.nice(0),
        "names": sorted(os.environ),
        "torch": "torch" in sys.modules,
    }
    line["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    descriptor = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, json.dumps(line).encode() + b"\n")
    os.close(descriptor)


def log(folder: Path) -> list[dict[str, Any]]:
    """What was noted, in its order."""
    path = folder / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
