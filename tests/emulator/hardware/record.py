"""Run the cases on a GPU and write their inputs and outputs: `python3 -m tests.emulator.hardware.record --out
DIR`.

DIR is then committed as tests/emulator/hardware/recorded. Needs a compute capability 9.0 GPU, torch and
the CuTe DSL. `--compile-only` stops after compiling, which works on any machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from .cases import CASES, to_numpy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("recorded"))
    parser.add_argument("--compile-only", action="store_true")
    arguments = parser.parse_args()
    total = 0
    for case in CASES:
        compiled = case.compile(None)
        if arguments.compile_only:
            print(f"compiled {case.name}", flush=True)
            continue
        inputs = case.inputs()
        # `to` keeps strides, so column-major operands stay column-major.
        on_device = [t.to("cuda") for t in inputs]
        case.call(compiled, on_device)
        torch.cuda.synchronize()
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / f"{case.name}.npz"
        arrays: dict = {f"input_{i}": to_numpy(t) for i, t in enumerate(inputs)}
        np.savez_compressed(path, **arrays, output=to_numpy(on_device[-1]))
        total += path.stat().st_size
        print(f"{case.name}: {path.stat().st_size} bytes", flush=True)
    if not arguments.compile_only:
        about = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "command": "python3 -m tests.emulator.hardware.record --out tests/emulator/hardware/recorded",
        }
        (arguments.out / "about.json").write_text(json.dumps(about, indent=1) + "\n")
        print(f"{total} bytes in {arguments.out}")


if __name__ == "__main__":
    main()
