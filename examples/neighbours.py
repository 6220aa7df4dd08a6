"""Use cute_lce, quack and FlashAttention's CuTe kernels in one process, on one installed DSL.

    pip install . quack-kernels==0.6.5 flash-attn-4==4.0.0b36 triton
    python3 -m examples.neighbours

On a machine without a GPU each compiles a kernel of its own for Hopper, which needs no device; on a Hopper or
a Blackwell each is called, and compared with torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.nn.functional as F

PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cute-lce", "quack-kernels", "flash-attn-4")
PINNED = {"quack-kernels": "0.6.5", "flash-attn-4": "4.0.0b36"}
HOPPER = {
    "CUTE_DSL_ARCH": "sm_90a",
    "QUACK_ARCH": "90",
    "FLASH_ATTENTION_ARCH": "sm_90",
    "FLASH_ATTENTION_NUM_SMS": "132",
}
"""What they take in place of a device's own."""


def compile_ours() -> None:
    from cute_lce.compile import cache
    from cute_lce.plan.kernels import kernels

    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUTE_LCE_CACHE_DIR"] = folder
        cache.get(kernels("sm_90a", "bfloat16", "int64")[0])


def compile_quack() -> None:
    import cutlass  # pyright: ignore[reportMissingImports]
    from quack.softmax import Softmax  # pyright: ignore[reportMissingImports]

    Softmax.compile(cutlass.BFloat16, cutlass.BFloat16, 4096)


def compile_flash_attention() -> None:
    from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(1, 256, 4, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        flash_attn_func(q, k, v, causal=True)


def call_ours() -> None:
    import cute_lce

    hidden, weight, target = _operands()
    found = cute_lce.linear_cross_entropy(hidden, weight, target)
    _check(found, F.cross_entropy((hidden @ weight.mT).float(), target))
    found.backward()


def call_quack() -> None:
    from quack.softmax import softmax_fwd  # pyright: ignore[reportMissingImports]

    x = torch.randn(64, 4096, dtype=torch.bfloat16, device="cuda")
    _check(softmax_fwd(x), x.float().softmax(-1))


def call_flash_attention() -> None:
    from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]

    q, k, v = (torch.randn(1, 256, 4, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    found = flash_attn_func(q, k, v, causal=True)
    found = found[0] if isinstance(found, tuple) else found
    wanted = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    _check(found, wanted.transpose(1, 2))


def _operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(512, 256, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(8000, 256, dtype=torch.bfloat16, device="cuda") / 16
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(8000, (512,), device="cuda")


def _check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


def _requirement(package: str) -> str:
    return f"{package}=={PINNED[package]}" if package in PINNED else package


COMPILES: dict[str, Callable[[], None]] = {
    "cute_lce": compile_ours,
    "quack": compile_quack,
    "flash_attn.cute": compile_flash_attention,
}
CALLS = {"cute_lce": call_ours, "quack": call_quack, "flash_attn.cute": call_flash_attention}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="examples.neighbours", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    missing = [package for package in PACKAGES if not list(importlib.metadata.distributions(name=package))]
    if missing:
        parser.error(
            f"not installed: {', '.join(missing)}; pip install {' '.join(map(_requirement, missing))}"
        )
    for package in PACKAGES:
        print(f"{package} {importlib.metadata.version(package)}")
    there = torch.cuda.is_available()
    if not there:
        os.environ.update(HOPPER)
    for name, use in (CALLS if there else COMPILES).items():
        use()
        print(f"{name}: {'called' if there else 'compiled a kernel for sm_90a'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
