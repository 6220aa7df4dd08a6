"""The host part of a compiled kernel, for every CPU of a kind instead of for the one that compiles it.

The DSL exports host functions for the CPU that it runs on, with instructions that others lack (AVX-512), and
the folder of compiled kernels may be shared by machines. Attributes of a function override that choice.
"""

from __future__ import annotations

import platform
from typing import Any

BASELINES = {
    "x86_64": ("x86-64-v2", ("cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3")),
    "aarch64": ("generic", ("fp-armv8", "neon")),
}
"""Machine -> LLVM's name of the CPU, and what it has. Those before 2009, and before ARMv8, are left out."""


def set_baseline(compiled: Any) -> None:
    """Have every function of what the DSL compiled, which is exported later, ask for the baseline alone."""
    # Found through code in a .pth file, which pyright does not run.
    from cutlass._mlir import ir  # pyright: ignore[reportMissingImports]

    machine = platform.machine()
    if machine not in BASELINES:
        raise RuntimeError(f"machine: got {machine}, want one of {', '.join(BASELINES)}")
    cpu, features = BASELINES[machine]

    def visit(operation: Any) -> Any:
        if operation.name == "llvm.func":
            operation.attributes["target_cpu"] = name
            operation.attributes["target_features"] = wanted
        return ir.WalkResult.ADVANCE

    with compiled.ir_module.context:
        name = ir.StringAttr.get(cpu)
        listed = ", ".join(f'"+{each}"' for each in features)
        wanted = ir.Attribute.parse(f"#llvm.target_features<[{listed}]>")
        compiled.ir_module.operation.walk(visit)
