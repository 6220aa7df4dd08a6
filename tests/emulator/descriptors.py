"""Tensor maps, shared-memory matrix descriptors, instruction descriptors, and the swizzles they share.

PTX ISA 5.5 (tensors, swizzling modes), 9.7.15 and 9.7.16 (matrix and instruction
descriptors). The layout of the 128-byte tensor map is not documented; it is read off the host code that
CuTe DSL 4.8.1 emits (docs of the project's shared notes, section 6) and checked against hardware by
tests/emulator/hardware.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .faults import Fault

# XOR swizzles on 16-byte granules: mode -> address bits taken from bit 7 up and XORed into bit 4 up.
SWIZZLE_BITS = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}  # bytes of a row of the swizzle atom


def swizzle(address, mode: str):
    """Where the byte at `address` (int or array) really lies (PTX ISA 5.5, swizzling modes)."""
    return address ^ (((address >> 7) & ((1 << SWIZZLE_BITS[mode]) - 1)) << 4)


@lru_cache(maxsize=4096)
def linear_granules(offset: int, size: int, mode: str) -> np.ndarray:
    """Granule numbers (address / 16) of `size` consecutive bytes from `offset`, swizzled."""
    return swizzle(np.arange(offset, offset + size, 16), mode) >> 4


ELEMENTS = {
    0: ("u8", 1), 1: ("u16", 2), 2: ("u32", 4), 3: ("s32", 4), 4: ("u64", 8), 5: ("s64", 8), 6: ("f16", 2),
    7: ("f32", 4), 9: ("f64", 8), 10: ("bf16", 2),
}  # fmt: skip


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map. Dimension 0 is the contiguous one; sizes in elements, strides in bytes."""

    base: int
    element: str
    element_bytes: int
    swizzle: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    box: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.size)

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.element_bytes


@lru_cache(maxsize=256)
def decode_tensor_map(raw: bytes) -> TensorMap:
    w = [int.from_bytes(raw[8 * i : 8 * i + 8], "little") for i in range(16)]
    rank = ((w[1] >> 4) & 7) + 1
    kind = (w[1] >> 7) & 15
    if rank > 5 or kind not in ELEMENTS:
        raise Fault("descriptor", f"tensor map of rank {rank}, element code {kind}: not a tensor map?")
    element, size = ELEMENTS[kind]
    mode = (w[1] >> 13) & 7
    if mode > 3:
        raise Fault("descriptor", f"tensor map with swizzle code {mode}")
    sizes = [
        (w[4] & 0xFFFFFFFF) + 1,
        (w[4] >> 32) + 1,
        (w[5] & 0xFFFFFFFF) + 1,
        (w[5] >> 32) + 1,
        (w[6] & 0xFFFFFFFF) + 1,
    ]
    low = [w[1] >> 32, w[2] & 0xFFFFFFFF, w[2] >> 32, w[3] & 0xFFFFFFFF]
    high = [(w[3] >> (32 + 4 * i)) & 15 for i in range(4)]
    strides = [size] + [(lo | hi << 32) * 16 for lo, hi in zip(low, high, strict=False)]
    boxes = [((w[6] >> 56) & 255) + 1] + [((w[7] >> (8 * i)) & 255) + 1 for i in range(4)]
    tm = TensorMap(
        w[0],
        element,
        size,
        ("none", "32B", "64B", "128B")[mode],
        tuple(sizes[:rank]),
        tuple(strides[:rank]),
        tuple(boxes[:rank]),
    )
    if tm.base % 16:
        raise Fault("descriptor", f"tensor map with base {tm.base:#x}, not aligned to 16 bytes")
    inner = tm.box[0] * size
    if inner % 16 or (tm.swizzle != "none" and inner > SPAN[tm.swizzle]):
        raise Fault("descriptor", f"tensor map whose box is {inner} bytes wide with swizzle {tm.swizzle}")
    return tm


@dataclass(frozen=True)
class MatrixDescriptor:
    start: int
    leading: int  # bytes, "leading dimension byte offset"
    stride: int  # bytes, "stride dimension byte offset"
    swizzle: str


@lru_cache(maxsize=65536)
def decode_matrix_descriptor(value: int, tcgen05: bool) -> MatrixDescriptor:
    if tcgen05:
        if (value >> 46) & 7 != 1:
            raise Fault("descriptor", f"tcgen05 matrix descriptor {value:#x}: bits 46..48 must be 0b001")
        code = value >> 61
        modes = {0: "none", 2: "128B", 4: "64B", 6: "32B"}
        if (value >> 52) & 1:
            raise Fault(
                "descriptor", f"matrix descriptor {value:#x}: absolute leading-dimension mode is not modelled"
            )
    else:
        code = value >> 62
        modes = {0: "none", 1: "128B", 2: "64B", 3: "32B"}
    if code not in modes:
        raise Fault("descriptor", f"matrix descriptor {value:#x}: swizzle code {code} is not modelled")
    if (value >> 49) & 7:
        raise Fault("descriptor", f"matrix descriptor {value:#x}: base offset other than 0 is not modelled")
    return MatrixDescriptor(
        (value & 0x3FFF) << 4, ((value >> 16) & 0x3FFF) << 4, ((value >> 32) & 0x3FFF) << 4, modes[code]
    )


@lru_cache(maxsize=65536)
def tile_granules(d: MatrixDescriptor, rows: int, k: int, k_major: bool, first_row: int = 0) -> np.ndarray:
    """Granules of an operand tile of 16-bit elements: (rows, k / 8) if K-major, (k, rows / 8) if MN-major.

    `rows` is M or N. Canonical layouts of PTX ISA 9.7.15: K-major rows lie a swizzle span apart in
    groups of 8 rows that are `stride` apart; MN-major columns lie a span apart in groups of 8 that are
    `stride` apart, and spans along M or N are `leading` apart. Without swizzle, leading and stride trade
    places in the MN-major layout.
    """
    span = SPAN[d.swizzle]
    if k_major:
        i = np.arange(first_row, first_row + rows)[:, None]
        g = np.arange(k // 8)[None, :]
        if d.swizzle == "none":
            a = d.start + i // 8 * d.stride + i % 8 * 16 + g * d.leading
        else:
            a = d.start + i // 8 * d.stride + i % 8 * span + g * 16
    else:
        i = np.arange(k)[:, None]
        g = np.arange(first_row // 8, (first_row + rows) // 8)[None, :]
        if d.swizzle == "none":
            a = d.start + g * d.stride + i // 8 * d.leading + i % 8 * 16
        else:
            per_span = span // 16
            a = d.start + g // per_span * d.leading + i // 8 * d.stride + i % 8 * span + g % per_span * 16
    return swizzle(a, d.swizzle) >> 4


def read_tile(shared, granules: np.ndarray, k_major: bool) -> np.ndarray:
    """(rows, k) 16-bit elements of an operand tile, as uint16."""
    raw = shared.granules[granules].view(np.uint16).reshape(granules.shape[0], -1)
    return raw if k_major else raw.T


def _fp8_values(exponent_bits: int, bias: int, special: dict[int, float]) -> np.ndarray:
    """The 256 values of an 8-bit float, as float32."""
    code = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    values = np.where(exponent > 0, 1 + fraction, 2 * fraction) * 2.0 ** (exponent - bias)
    for magnitude, value in special.items():
        values[[magnitude, magnitude | 128]] = value
    return np.where(code & 128, -values, values).astype(np.float32)


FP8 = {
    "e4m3": _fp8_values(4, 7, {0x7F: np.nan}),
    "e5m2": _fp8_values(5, 15, {0x7C: np.inf, 0x7D: np.nan, 0x7E: np.nan, 0x7F: np.nan}),
}


def to_float32(raw: np.ndarray, element: str) -> np.ndarray:
    """Of 16-bit words; each holds two elements along the last axis if these have 8 bits."""
    raw = np.ascontiguousarray(raw)
    if element in FP8:
        return FP8[element][raw.view(np.uint8)]
    if element == "f16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True)
class InstructionDescriptor:
    """tcgen05.mma kind::f16 and kind::f8f6f4 (PTX ISA 9.7.16, table of the instruction descriptor)."""

    m: int
    n: int
    accumulator: str
    a: str
    b: str
    negate_a: bool
    negate_b: bool
    a_k_major: bool
    b_k_major: bool


@lru_cache(maxsize=256)
def decode_instruction_descriptor(value: int, kind: str = "f16") -> InstructionDescriptor:
    if value & 0b1111 or value >> 29:
        raise Fault(
            "descriptor",
            f"instruction descriptor {value:#x}: sparsity, saturation or shift bits are not modelled",
        )
    formats = {0: "f16", 1: "bf16"} if kind == "f16" else {0: "e4m3", 1: "e5m2"}
    a, b, acc = (value >> 7) & 7, (value >> 10) & 7, (value >> 4) & 3
    if a not in formats or b not in formats or acc not in (0, 1):
        raise Fault(
            "descriptor",
            f"instruction descriptor {value:#x}: formats {a}, {b}, {acc} of kind::{kind} are not modelled",
        )
    if kind != "f16" and value >> 15 & 3:
        raise Fault("descriptor", f"instruction descriptor {value:#x}: MN-major kind::{kind} is not modelled")
    return InstructionDescriptor(
        ((value >> 24) & 31) * 16, ((value >> 17) & 63) * 8, "f32" if acc else "f16", formats[a], formats[b],
        bool(value >> 13 & 1), bool(value >> 14 & 1), not value >> 15 & 1, not value >> 16 & 1,
    )  # fmt: skip
