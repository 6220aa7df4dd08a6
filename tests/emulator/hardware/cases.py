"""What is run on a Hopper GPU and on the emulator: each case's kernel, inputs, and how closely the results
must agree.

Data movement and integers agree bit for bit. Sums of the tensor cores differ by the order and rounding of
fp32 accumulation. The approximate functions differ by the error that the PTX ISA documents for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from .. import hopper_forward


@dataclass(frozen=True)
class Case:
    name: str
    compile: Callable  # folder for PTX or None -> compiled function
    inputs: Callable  # () -> input tensors on the CPU; the last one is the output's initial value
    compare: Callable  # (inputs, emulated, hardware) -> list of disagreements
    call: Callable = lambda function, tensors: function(*tensors)  # runs it; the last tensor is written


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same_bits(inputs, emulated: np.ndarray, hardware: np.ndarray) -> list[str]:
    different = emulated.view(np.uint8) != hardware.view(np.uint8)
    return [f"{int(different.sum())} of {different.size} bytes differ"] if different.any() else []


def accumulation_order(inputs, emulated: np.ndarray, hardware: np.ndarray) -> list[str]:
    """Both are within a few roundings of fp32 (2^-23, of the sum of magnitudes) for each of k / 16
    accumulations."""
    a, b = (t.double().numpy() for t in inputs[:2])
    bound = (np.abs(a) @ np.abs(b).T) * (2 + a.shape[1] / 16) * 2.0**-23
    wrong = ~(np.abs(emulated.astype(np.float64) - hardware) <= bound)
    return (
        [f"{int(wrong.sum())} of {wrong.size} sums differ by more than the order of accumulation"]
        if wrong.any()
        else []
    )


# Row of Maths -> (name, bound on |emulated - hardware| as a function of the hardware's value). PTX ISA 9.7.3:
# ex2.approx.ftz 2^-22.5 relative (2 ulp), lg2.approx 2^-22 absolute or 2 ulp, rcp.approx 1 ulp, rsqrt.approx
# 2^-22.9, tanh.approx 2^-11 relative.
MATHS = [
    ("ex2.approx", lambda v: np.abs(v) * 2.0**-22),
    ("ex2.approx.ftz", lambda v: np.abs(v) * 2.0**-22),
    ("lg2.approx.ftz", lambda v: np.maximum(2.0**-22, np.abs(v) * 2.0**-22)),
    ("rcp.approx.ftz", lambda v: np.abs(v) * 2.0**-23),
    ("rsqrt.approx.ftz", lambda v: np.abs(v) * 2.0**-22.4),
    ("tanh.approx", lambda v: np.abs(v) * 2.0**-10.9),
]


def approximate(inputs, emulated: np.ndarray, hardware: np.ndarray) -> list[str]:
    wrong = []
    for (name, bound), e, h in zip(
        MATHS, emulated.astype(np.float64), hardware.astype(np.float64), strict=True
    ):
        finite = np.isfinite(h)
        with np.errstate(invalid="ignore"):
            # A subnormal result may be off by its last bit whatever the documented relative error.
            near = np.abs(e - h) <= np.maximum(bound(np.where(finite, h, 0)), 2.0**-149)
            ok = np.where(finite, near, (e == h) | np.isnan(e) & np.isnan(h))
        if not ok.all():
            i = int((~ok).nonzero()[0][0])
            wrong.append(
                f"{name}: {int((~ok).sum())} values, such as {float(inputs[0][i])!r}: {e[i]!r}, hardware"
                f" {h[i]!r}"
            )
    return wrong


def _gemm(name: str, dtype: str, m: int, n: int, k: int, a_major: str, b_major: str, **config) -> Case:
    def compile_(folder):
        import cutlass  # pyright: ignore[reportMissingImports]

        from . import kernels_sm90

        element = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16}[dtype]
        return kernels_sm90.compile_gemm(element, a_major=a_major, b_major=b_major, folder=folder, **config)

    def inputs():
        g, torch_type = generator(len(name)), {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]

        def operand(rows, major):
            x = torch.randn(rows, k, generator=g).to(torch_type)
            return x if major == "k" else x.T.contiguous().T

        return [operand(m, a_major), operand(n, b_major), torch.full((m, n), float("nan"))]

    return Case(name, compile_, inputs, accumulation_order)


def _scale(name: str, dtype: torch.dtype, tile: tuple[int, int], reduce: bool) -> Case:
    def compile_(folder):
        import cutlass  # pyright: ignore[reportMissingImports]

        from . import kernels_sm90

        element = {torch.bfloat16: cutlass.BFloat16, torch.float32: cutlass.Float32}[dtype]
        return kernels_sm90.compile_scale(element, tile, reduce, folder)

    def inputs():
        g = generator(7)
        x = torch.randn(70, 104, generator=g).to(dtype)
        out = (
            torch.randn(70, 104, generator=g).to(dtype)
            if reduce
            else torch.full((70, 104), float("nan"), dtype=dtype)
        )
        return [x, out]

    return Case(name, compile_, inputs, same_bits)


def _maths_inputs():
    g = generator(3)
    special = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 127.5, 128.0]
    )
    special = torch.cat([special, torch.tensor([-126.0, -127.0, -149.0, -150.0, 3e38, 1.2e-38])])
    x = torch.cat(
        [
            special,
            torch.randn(150, generator=g) * 40,
            torch.rand(150, generator=g),
            torch.randn(83, generator=g),
        ]
    )
    return [x, torch.full((len(MATHS), len(x)), float("nan"))]


def _integer_inputs():
    g = generator(4)
    x = torch.randint(-(2**31), 2**31, (256,), generator=g).to(torch.int32)
    y = torch.randint(-(2**20), 2**20, (256,), generator=g).to(torch.int32)
    y[y == 0] = 1
    return [x, y, torch.zeros(12, 256, dtype=torch.int32)]


def _simple(name: str, compile_name: str, inputs: Callable, compare: Callable) -> Case:
    def compile_(folder):
        from . import kernels_sm90

        return getattr(kernels_sm90, compile_name)(folder)

    return Case(name, compile_, inputs, compare)


def _row_sum_inputs():
    # Small integers: sums are exact in any order.
    return [torch.randint(-9, 10, (5, 256), generator=generator(5)).float(), torch.full((5,), float("nan"))]


def _forward_inputs():
    tensors = hopper_forward.inputs()
    return [*tensors, torch.full((2, hopper_forward.N), float("nan"))]


def _forward_call(function, tensors):
    tensors[-1].copy_(hopper_forward.call(function, False, *tensors[:-1]))


def forward_statistics(inputs, emulated: np.ndarray, hardware: np.ndarray) -> list[str]:
    """Loss and lse to 1e-5: rounding of sums and of ex2.approx."""
    wrong = ~(np.abs(emulated.astype(np.float64) - hardware) <= 1e-5)
    return [f"{int(wrong.sum())} of {wrong.size} statistics differ"] if wrong.any() else []


CASES = [
    _scale("copy_bf16", torch.bfloat16, (32, 64), False),
    _scale("copy_bf16_swizzle64", torch.bfloat16, (64, 32), False),
    _scale("copy_f32_swizzle32", torch.float32, (64, 8), False),
    _scale("reduce_add_f32", torch.float32, (32, 32), True),
    _scale("reduce_add_bf16", torch.bfloat16, (32, 64), True),
    _gemm("gemm_k_k_swizzle128", "bf16", 64, 64, 136, "k", "k", tile=(64, 64, 64)),
    _gemm("gemm_k_k_swizzle64", "bf16", 64, 64, 72, "k", "k", tile=(64, 64, 32)),
    _gemm("gemm_k_k_swizzle32", "bf16", 64, 64, 72, "k", "k", tile=(64, 64, 16)),
    _gemm("gemm_m_k", "bf16", 64, 64, 72, "m", "k", tile=(64, 64, 64)),
    _gemm("gemm_k_m", "f16", 64, 64, 72, "k", "m", tile=(64, 64, 64)),
    _gemm("gemm_m_m_n128", "bf16", 64, 128, 72, "m", "m", tile=(64, 128, 64)),
    _gemm("gemm_k_m_swizzle64", "bf16", 64, 32, 72, "k", "m", tile=(64, 32, 64)),
    _gemm("gemm_k_m_swizzle32", "bf16", 64, 16, 72, "k", "m", tile=(64, 16, 64)),
    _gemm("gemm_n256", "bf16", 64, 256, 64, "k", "k", tile=(64, 256, 64)),
    _gemm("gemm_multicast_b", "f16", 128, 64, 136, "k", "k", tile=(64, 64, 64), cluster=(2, 1)),
    _gemm("gemm_multicast_both", "bf16", 128, 128, 136, "k", "k", tile=(64, 64, 64), cluster=(2, 2)),
    Case(
        "hopper_forward",
        lambda folder: hopper_forward.trace(False, folder),
        _forward_inputs,
        forward_statistics,
        _forward_call,
    ),
    _simple("row_sum", "compile_row_sum", _row_sum_inputs, same_bits),
    _simple("maths", "compile_maths", _maths_inputs, approximate),
    _simple("integers", "compile_integers", _integer_inputs, same_bits),
]


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous array of the tensor's values; bfloat16 as uint16."""
    tensor = tensor.detach().cpu().contiguous()
    return (
        tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    )
