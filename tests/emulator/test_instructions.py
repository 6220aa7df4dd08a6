"""Instructions against numpy: arithmetic, conversions, loads and stores, exchanges between lanes; matrix
multiplies, TMA loads and loads of tensor memory in every shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests import emulator
from tests.emulator.ops.arithmetic import from_bf16

RNG = np.random.default_rng(0)
INTEGERS = RNG.integers(-(2**31), 2**31, (3, 32)).astype(np.int32)
INTEGERS[1, :8] = [1, -1, 31, 32, 33, 7, 64, 2**31 - 1]
FLOATS = (RNG.standard_normal((3, 32)) * 50).astype(np.float32)
FLOATS[0, :6] = [np.nan, np.inf, -np.inf, -0.0, 1e-40, 3e38]
FLOATS[1, 3:6] = [0.0, np.nan, 3e38]
U = INTEGERS.view(np.uint32)
I64 = INTEGERS.astype(np.int64)


def execute(body: str, inputs: np.ndarray, words: int = 1, target: str = "sm_90a") -> np.ndarray:
    """Run `body` on one warp with %a, %b, %c (and their f32 names %x, %y, %z) loaded; the result is in
    %o0, %o1."""
    text = f""".version 8.7
    .target {target}
    .address_size 64
    .visible .entry k(.param .u64 in, .param .u64 out) {{
    .reg .pred %p<4>; .reg .b16 %h<9>; .reg .b32 %r<9>; .reg .b32 %a, %b, %c, %o0, %o1, %t;
    .reg .b64 %d<12>; .reg .f64 %e<4>;
    ld.param.u64 %d0, [in]; ld.param.u64 %d1, [out]; mov.u32 %t, %tid.x; mul.wide.u32 %d2, %t, 4;
    add.s64 %d3, %d0, %d2; add.s64 %d4, %d1, %d2;
    ld.global.b32 %a, [%d3]; ld.global.b32 %b, [%d3+128]; ld.global.b32 %c, [%d3+256];
    {body}
    st.global.b32 [%d4], %o0; {"st.global.b32 [%d4+128], %o1;" if words > 1 else ""}
    ret; }}"""
    out = torch.zeros(words * 32, dtype=torch.int32)
    emulator.run_ptx(text, torch.from_numpy(np.ascontiguousarray(inputs).view(np.int32).copy()), out)
    return out.numpy().reshape(words, 32)


def shift_left(a, n):
    return np.array(
        [(int(x) << int(k)) & 0xFFFFFFFF if k < 32 else 0 for x, k in zip(a, n, strict=True)], np.uint32
    )


def c_divide(a, b):
    return np.trunc(a.astype(np.float64) / b).astype(np.int64).astype(np.int32)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("add.s32 %o0, %a, %b;", lambda: INTEGERS[0] + INTEGERS[1]),
        ("sub.s32 %o0, %a, 5;", lambda: INTEGERS[0] - np.int32(5)),
        ("mul.lo.s32 %o0, %a, %b;", lambda: (I64[0] * I64[1]).astype(np.int32)),
        ("mul.hi.s32 %o0, %a, %b;", lambda: (I64[0] * I64[1] >> 32).astype(np.int32)),
        (
            "mul.hi.u32 %o0, %a, %b;",
            lambda: (U[0].astype(np.uint64) * U[1] >> np.uint64(32)).astype(np.uint32),
        ),
        ("mad.lo.s32 %o0, %a, %b, %c;", lambda: (I64[0] * I64[1] + I64[2]).astype(np.int32)),
        (
            "mul.wide.s32 %d5, %a, %b; shr.u64 %d6, %d5, 13; cvt.u32.u64 %o0, %d6;",
            lambda: (I64[0] * I64[1]).view(np.uint64) >> np.uint64(13),
        ),
        ("div.s32 %o0, %a, %b;", lambda: c_divide(INTEGERS[0], INTEGERS[1])),
        ("rem.s32 %o0, %a, %b;", lambda: np.fmod(INTEGERS[0], INTEGERS[1])),
        ("div.u32 %o0, %a, %b;", lambda: U[0] // U[1]),
        ("min.s32 %o0, %a, %b;", lambda: np.minimum(INTEGERS[0], INTEGERS[1])),
        ("min.relu.s32 %o0, %a, %b;", lambda: np.maximum(np.minimum(INTEGERS[0], INTEGERS[1]), 0)),
        ("max.u32 %o0, %a, %b;", lambda: np.maximum(U[0], U[1])),
        ("shl.b32 %o0, %a, %b;", lambda: shift_left(U[0], U[1])),
        ("shl.b32 %o0, %a, 7;", lambda: U[0] << np.uint32(7)),
        ("shr.s32 %o0, %a, 33;", lambda: INTEGERS[0] >> 31),
        ("shr.u32 %o0, %a, 32;", lambda: np.zeros(32, np.uint32)),
        ("and.b32 %o0, %a, %b;", lambda: U[0] & U[1]),
        ("not.b32 %o0, %a;", lambda: ~U[0]),
        ("lop3.b32 %o0, %a, %b, %c, 0x96;", lambda: U[0] ^ U[1] ^ U[2]),
        (
            "prmt.b32 %o0, %a, %b, 0x1650;",
            lambda: (U[0] & 0xFF) | (U[1] & 0xFF00) | (U[1] & 0xFF0000) | (U[0] << 16 & 0xFF000000),
        ),
        ("bfe.u32 %o0, %a, 5, 9;", lambda: (U[0] >> 5) & 0x1FF),
        ("bfe.s32 %o0, %a, 5, 9;", lambda: INTEGERS[0] << 18 >> 23),
        ("popc.b32 %o0, %a;", lambda: np.array([bin(x).count("1") for x in U[0]])),
        ("clz.b32 %o0, %a;", lambda: np.array([32 - int(x).bit_length() for x in U[0]])),
        ("shf.l.wrap.b32 %o0, %a, %b, 11;", lambda: (U[1] << np.uint32(11)) | (U[0] >> np.uint32(21))),
        (
            "setp.lt.s32 %p0, %a, %b; selp.b32 %o0, 1, 2, %p0;",
            lambda: np.where(INTEGERS[0] < INTEGERS[1], 1, 2),
        ),
        ("setp.lo.u32 %p0, %a, %b; selp.b32 %o0, 1, 2, %p0;", lambda: np.where(U[0] < U[1], 1, 2)),
        (
            "setp.gt.s32 %p0, %a, 0; setp.lt.and.s32 %p1, %b, %c, !%p0; selp.b32 %o0, 1, 0, %p1;",
            lambda: (INTEGERS[1] < INTEGERS[2]) & ~(INTEGERS[0] > 0),
        ),
        ("cvt.s16.s32 %h0, %a; cvt.s32.s16 %o0, %h0;", lambda: INTEGERS[0].astype(np.int16).astype(np.int32)),
        ("cvt.u16.u32 %h0, %a; cvt.u32.u16 %o0, %h0;", lambda: U[0] & 0xFFFF),
        (
            "mov.b32 {%h0, %h1}, %a; mov.b32 %o0, {%h1, %h0};",
            lambda: U[0] << np.uint32(16) | U[0] >> np.uint32(16),
        ),
        (
            "mov.b64 %d5, {%a, %b}; mov.b64 {%r0, %r1}, %d5; sub.s32 %o0, %r0, %r1;",
            lambda: INTEGERS[0] - INTEGERS[1],
        ),
        ("cvt.rn.f32.s32 %o0, %a;", lambda: INTEGERS[0].astype(np.float32).view(np.uint32)),
        ("cvt.rn.f32.u32 %o0, %a;", lambda: U[0].astype(np.float32).view(np.uint32)),
        ("@%p3 mov.b32 %o0, 1;", None),
    ],
)
def test_integers(body, expected):
    if expected is None:
        with pytest.raises(emulator.Fault, match="uninit-register"):
            execute(body, INTEGERS)
        return
    got = execute(body, INTEGERS)[0].view(np.uint32)
    assert np.array_equal(got, np.asarray(expected()).astype(np.int64).astype(np.uint32))


def bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("add.f32 %o0, %a, %b;", lambda x, y, z: x + y),
        ("sub.rn.f32 %o0, %a, %b;", lambda x, y, z: x - y),
        ("mul.f32 %o0, %a, %b;", lambda x, y, z: x * y),
        (
            "mul.ftz.f32 %o0, %a, 0f3F000000;",
            lambda x, y, z: np.where(np.abs(x) < 2.0**-126, 0 * x, x) * np.float32(0.5),
        ),
        ("fma.rn.f32 %o0, %a, %b, %c;", lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32)),
        ("neg.f32 %o0, %a;", lambda x, y, z: -x),
        ("abs.f32 %o0, %a;", lambda x, y, z: np.abs(x)),
        ("copysign.f32 %o0, %a, %b;", lambda x, y, z: np.copysign(y, x)),
        ("max.f32 %o0, %a, %b;", lambda x, y, z: np.fmax(x, y)),
        ("max.NaN.f32 %o0, %a, %b;", lambda x, y, z: np.maximum(x, y)),
        ("min.f32 %o0, %a, %b;", lambda x, y, z: np.fmin(x, y)),
        ("max.f32 %o0, %a, %b, %c;", lambda x, y, z: np.fmax(np.fmax(x, y), z)),
        ("div.rn.f32 %o0, %a, %b;", lambda x, y, z: x / y),
        ("ex2.approx.ftz.f32 %o0, %a;", lambda x, y, z: np.exp2(x.astype(np.float64)).astype(np.float32)),
        (
            "abs.f32 %r0, %a; lg2.approx.f32 %o0, %r0;",
            lambda x, y, z: np.log2(np.abs(x).astype(np.float64)).astype(np.float32),
        ),
        ("setp.lt.f32 %p0, %a, %b; selp.f32 %o0, %a, %b, %p0;", lambda x, y, z: np.where(x < y, x, y)),
        ("setp.ltu.f32 %p0, %a, %b; selp.f32 %o0, %a, %b, %p0;", lambda x, y, z: np.where(~(x >= y), x, y)),
        ("setp.neu.f32 %p0, %a, %b; selp.f32 %o0, %a, %b, %p0;", lambda x, y, z: np.where(x != y, x, y)),
        (
            "setp.nan.f32 %p0, %a, %b; selp.f32 %o0, 0f3F800000, 0f00000000, %p0;",
            lambda x, y, z: np.float32(np.isnan(x) | np.isnan(y)),
        ),
        (
            "mov.b64 %d5, {%a, %b}; mov.b64 %d6, {%b, %c}; add.rn.f32x2 %d7, %d5, %d6;"
            "mov.b64 {%r0, %o0}, %d7;",
            lambda x, y, z: y + z,
        ),
        (
            "mov.b64 %d5, {%a, %b}; mov.b64 %d6, {%b, %c}; fma.rn.f32x2 %d7, %d5, %d6, %d5;"
            "mov.b64 {%o0, %r1}, %d7;",
            lambda x, y, z: (x.astype(np.float64) * y + x).astype(np.float32),
        ),
        (
            "mov.b64 %d5, {%a, %b}; mov.b64 %d6, {%b, %c}; mov.b64 %d7, %d6; setp.lt.f32 %p0, %a, %b;"
            "@%p0 mul.f32x2 %d7, %d5, %d6; mov.b64 {%r0, %o0}, %d7;",
            lambda x, y, z: np.where(x < y, y * z, z),
        ),
        (
            "cvt.rn.bf16.f32 %h0, %a; cvt.rn.bf16.f32 %h1, %b; fma.rn.f32.bf16 %o0, %h0, %h1, %c;",
            lambda x, y, z: (np.float64(from_bf16(bf16(x))) * from_bf16(bf16(y)) + z).astype(np.float32),
        ),
        (
            "cvt.rn.f16.f32 %h0, %b; cvt.f32.f16 %o0, %h0;",
            lambda x, y, z: y.astype(np.float16).astype(np.float32),
        ),
        ("cvt.f64.f32 %e0, %a; cvt.rn.f32.f64 %o0, %e0;", lambda x, y, z: x),
        ("cvt.rni.f32.f32 %o0, %c;", lambda x, y, z: np.rint(z)),
    ],
)
def test_floats(body, expected):
    with np.errstate(all="ignore"):
        want = np.asarray(expected(*FLOATS), np.float32)
    got = execute(body, FLOATS)[0].view(np.float32)
    assert np.array_equal(got, want, equal_nan=True)


def test_bf16_and_f16_pairs():
    got = execute("cvt.rn.bf16x2.f32 %o0, %b, %c; cvt.rn.f16x2.f32 %o1, %b, %c;", FLOATS, 2).view(np.uint32)
    y, z = FLOATS[1], FLOATS[2]
    number = ~np.isnan(y)
    assert np.array_equal((got[0] >> 16)[number], bf16(y)[number])
    assert np.array_equal(got[0] & 0xFFFF, bf16(z))
    with np.errstate(over="ignore"):
        assert np.array_equal((got[1] >> 16)[number], y.astype(np.float16).view(np.uint16)[number])


def test_float_to_integer_clamps_and_nan_is_zero():
    got = execute("cvt.rzi.s32.f32 %o0, %a; cvt.rni.u32.f32 %o1, %a;", FLOATS, 2)
    x = FLOATS[0].astype(np.float64)
    safe = np.where(np.isnan(x), 0, x)
    assert np.array_equal(
        got[0], np.trunc(np.clip(safe, -(2**31), 2**31 - 1)).astype(np.int64).astype(np.int32)
    )
    assert np.array_equal(got[1].view(np.uint32), np.rint(np.clip(safe, 0, 2**32 - 1)).astype(np.uint32))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("shfl.sync.bfly.b32 %o0, %a, 5, 31, -1;", lambda a: a[np.arange(32) ^ 5]),
        ("shfl.sync.idx.b32 %o0, %a, 9, 31, -1;", lambda a: np.full(32, a[9])),
        ("shfl.sync.up.b32 %o0, %a, 2, 0, -1;", lambda a: np.concatenate([a[:2], a[:-2]])),
        ("shfl.sync.down.b32 %o0, %a, 3, 31, -1;", lambda a: np.concatenate([a[3:], a[-3:]])),
        ("shfl.sync.idx.b32 %o0, %a, 1, 0x181f, -1;", lambda a: a[np.arange(32) // 8 * 8 + 1]),
        ("redux.sync.add.s32 %o0, %a, -1;", lambda a: np.full(32, a.sum(dtype=np.int32))),
        (
            "shfl.sync.up.b32 %o0|%p0, %a, 2, 0, -1; selp.b32 %o0, %o0, 7, %p0;",
            lambda a: np.concatenate([[7, 7], a[:-2]]),
        ),
        (
            "sub.s32 %r0, 31, %t; shfl.sync.idx.b32 %o0|%p0, %a, %r0, 7, -1; selp.b32 %o0, %o0, 7, %p0;",
            lambda a: np.concatenate([np.full(24, 7), a[7::-1]]),
        ),
        ("redux.sync.max.s32 %o0, %a, -1;", lambda a: np.full(32, a.max())),
        ("redux.sync.min.s32 %o0, %a, -1;", lambda a: np.full(32, a.min())),
        ("redux.sync.add.u32 %o0, %a, -1;", lambda a: np.full(32, a.view(np.uint32).sum(dtype=np.uint32))),
        ("redux.sync.max.u32 %o0, %a, -1;", lambda a: np.full(32, a.view(np.uint32).max())),
        ("redux.sync.min.u32 %o0, %a, -1;", lambda a: np.full(32, a.view(np.uint32).min())),
        (
            "setp.gt.s32 %p0, %a, 0; vote.sync.ballot.b32 %o0, %p0, -1;",
            lambda a: np.full(32, sum(1 << i for i in range(32) if a[i] > 0)),
        ),
        (
            "setp.gt.s32 %p0, %a, 0; vote.sync.any.pred %p1, %p0, -1; selp.b32 %o0, 1, 0, %p1;",
            lambda a: np.ones(32),
        ),
        (
            "setp.ne.s32 %p0, %a, %a; vote.sync.any.pred %p1, %p0, -1; selp.b32 %o0, 1, 0, %p1;",
            lambda a: np.zeros(32),
        ),
        (
            "setp.ne.s32 %p0, %t, 5; vote.sync.all.pred %p1, %p0, -1; selp.b32 %o0, 1, 0, %p1;",
            lambda a: np.zeros(32),
        ),
        (
            "setp.gt.s32 %p0, %t, 31; vote.sync.all.pred %p1, !%p0, -1; selp.b32 %o0, 1, 0, %p1;",
            lambda a: np.ones(32),
        ),
        ("activemask.b32 %o0;", lambda a: np.full(32, 2**32 - 1)),
    ],
)
def test_exchanges_between_lanes(body, expected):
    got = execute(body, INTEGERS)[0].view(np.uint32)
    assert np.array_equal(got, np.asarray(expected(INTEGERS[0])).astype(np.int64).astype(np.uint32))


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        ("shfl.sync.idx.b32 %o0, %a, 9, 31, 0xfff;", lambda a: np.full(12, a[9])),
        ("redux.sync.add.s32 %o0, %a, 0xfff;", lambda a: np.full(12, a[:12].sum(dtype=np.int32))),
        ("redux.sync.min.u32 %o0, %a, 0xfff;", lambda a: np.full(12, a[:12].view(np.uint32).min())),
        (
            "vote.sync.ballot.b32 %o0, %p1, 0xfff;",
            lambda a: np.full(12, sum(1 << i for i in range(12) if a[i] > 0)),
        ),
        ("vote.sync.any.pred %p2, %p0, 0xfff; selp.b32 %o0, 1, 0, %p2;", lambda a: np.ones(12)),
        ("vote.sync.all.pred %p2, %p0, 0xfff; selp.b32 %o0, 1, 0, %p2;", lambda a: np.ones(12)),
        ("activemask.b32 %o0;", lambda a: np.full(12, 0xFFF)),
    ],
)
def test_exchanges_between_some_of_the_lanes(exchange, expected):
    """Lanes 0 to 11 exchange values, and the others keep their 3."""
    body = """setp.gt.s32 %p1, %a, 0; setp.lt.u32 %p0, %t, 12; mov.b32 %o0, 3; @!%p0 bra join;
    {} join:"""
    got = execute(body.format(exchange), INTEGERS)[0].view(np.uint32)
    assert np.array_equal(got[:12], np.asarray(expected(INTEGERS[0])).astype(np.int64).astype(np.uint32))
    assert (got[12:] == 3).all()


@pytest.mark.parametrize("dest", ["%o0", "%a"])
def test_movmatrix_transposes_an_8x8_matrix_of_16_bits(dest):
    got = execute(f"movmatrix.sync.aligned.m8n8.trans.b16 {dest}, %a; mov.b32 %o0, {dest};", INTEGERS)[0]
    matrix = np.array([[INTEGERS[0, 4 * i + j // 2] >> 16 * (j % 2) for j in range(8)] for i in range(8)])
    matrix = matrix & 0xFFFF
    want = [matrix[2 * (t % 4), t // 4] | matrix[2 * (t % 4) + 1, t // 4] << 16 for t in range(32)]
    assert np.array_equal(got.view(np.uint32), np.array(want, np.uint32))


def test_redux_of_floats_on_sm_100a():
    got = execute("redux.sync.max.f32 %o0, %a, -1; redux.sync.max.NaN.f32 %o1, %a, -1;", FLOATS, 2, "sm_100a")
    assert (got[0].view(np.float32) == np.inf).all()
    assert np.isnan(got[1].view(np.float32)).all()


def test_elect_picks_the_same_single_lane_each_time():
    body = "elect.sync %r0|%p0, -1; selp.b32 %o0, 1, 0, %p0; elect.sync %r1|%p1, -1; selp.b32 %o1, 1, 0, %p1;"
    got = execute(body, INTEGERS, 2)
    assert got[0].sum() == 1
    assert np.array_equal(got[0], got[1])


def test_vector_loads_and_narrow_types():
    body = """add.s64 %d5, %d0, 16; ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%d5]; add.s32 %o0, %r1, %r3;
    ld.global.s8 %r4, [%d5+1]; ld.global.u8 %h0, [%d5+1]; cvt.u32.u16 %r5, %h0; sub.s32 %o1, %r5, %r4;"""
    got = execute(body, INTEGERS, 2)
    assert (got[0] == (I64[0, 5] + I64[0, 7]).astype(np.int32)).all()
    byte = int(INTEGERS[0, 4:5].view(np.uint8)[1])
    assert (got[1] == (256 if byte > 127 else 0)).all()


@pytest.mark.parametrize("seed", range(3))
def test_atomics_from_many_warps(seed):
    text = """.version 8.7
    .target sm_90a
    .address_size 64
    .visible .entry k(.param .u64 out) { .reg .b64 %d<2>; .reg .b32 %r<4>; .reg .pred %p<2>;
    ld.param.u64 %d0, [out]; mov.u32 %r0, %tid.x;
    red.relaxed.gpu.global.add.u32 [%d0], %r0; atom.relaxed.gpu.global.add.f32 %r1, [%d0+4], 0f3F800000;
    red.relaxed.gpu.global.max.s32 [%d0+8], %r0; atom.global.cas.b32 %r2, [%d0+12], 0, 7; ret; }"""
    out = torch.zeros(4, dtype=torch.int32)
    result = emulator.run_ptx(text, out, grid=(3, 1, 1), block=(128, 1, 1), seed=seed)
    assert out[0] == 3 * 127 * 64
    assert out[1:2].view(torch.float32) == 384
    assert out[2:].tolist() == [127, 7]
    assert result.counters["atomic operations"] == 4 * 384


def test_counts():
    """Instructions count once per warp; branches not taken by anybody still count as executed."""
    text = """.version 8.7
    .target sm_90a
    .address_size 64
    .visible .entry k(.param .u32 n) { .reg .b32 %r<4>; .reg .pred %p<2>;
    ld.param.u32 %r0, [n]; mov.u32 %r1, 0;
    again: add.s32 %r1, %r1, 1; setp.lt.u32 %p0, %r1, %r0; @%p0 bra again; bar.sync 0; ret; }"""
    result = emulator.run_ptx(text, 5, grid=(2, 1, 1), block=(96, 1, 1))
    assert result.instructions["add.s32"] == 2 * 3 * 5
    assert result.by_warp_opcode[2]["bar.sync"] == 2
    assert result.by_warp[0] == 2 * (2 + 15 + 2)
    assert result.counters["named barrier waits"] == 6


WGMMA = """.version 8.7
.target sm_90a
.address_size 64
.shared .align 128 .b8 b[256];
.visible .entry k(.param .u64 a, .param .u64 bt, .param .u64 out) {
.reg .pred %p<2>; .reg .b16 %h<2>; .reg .b32 %t, %l, %w, %r<20>; .reg .b32 %f<4>; .reg .b64 %d<20>;
ld.param.u64 %d0, [a]; ld.param.u64 %d1, [bt]; ld.param.u64 %d2, [out];
mov.u32 %t, %tid.x; and.b32 %l, %t, 31; shr.u32 %w, %t, 5;
// B is K-major without swizzle: element (n, k) of 8 x 16 at 128 (k / 8) + 16 n + 2 (k % 8).
mul.wide.u32 %d3, %t, 2; add.s64 %d4, %d1, %d3; ld.global.b16 %h0, [%d4];
shr.u32 %r0, %t, 4; and.b32 %r1, %t, 15; shr.u32 %r2, %r1, 3; and.b32 %r3, %r1, 7;
shl.b32 %r2, %r2, 7; shl.b32 %r0, %r0, 4; shl.b32 %r3, %r3, 1; mov.b32 %r4, b;
add.s32 %r4, %r4, %r0; add.s32 %r4, %r4, %r2; add.s32 %r4, %r4, %r3; st.shared.b16 [%r4], %h0;
fence.proxy.async.shared::cta; bar.sync 0;
// A from registers: row 16 w + l / 4 + 8 h, columns 8 c + 2 (l % 4) of a row-major 64 x 16 matrix.
shr.u32 %r5, %l, 2; shl.b32 %r6, %w, 4; add.s32 %r5, %r5, %r6; and.b32 %r7, %l, 3;
mul.lo.s32 %r8, %r5, 32; mul.lo.s32 %r9, %r7, 4; add.s32 %r8, %r8, %r9; cvt.u64.u32 %d5, %r8;
add.s64 %d6, %d0, %d5;
ld.global.b32 %r10, [%d6]; ld.global.b32 %r11, [%d6+256]; ld.global.b32 %r12, [%d6+16];
ld.global.b32 %r13, [%d6+272];
mov.b32 %r14, b; shr.u32 %r14, %r14, 4; cvt.u64.u32 %d7, %r14; or.b64 %d7, %d7, 524288;
// leading offset 128
setp.ne.b32 %p0, 0, 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16
  {%f0, %f1, %f2, %f3}, {%r10, %r11, %r12, %r13}, %d7, %p0, 1, 1, 0;
wgmma.commit_group.sync.aligned; {before} wgmma.wait_group.sync.aligned 0;
mul.lo.s32 %r15, %r5, 32; mul.lo.s32 %r16, %r7, 8; add.s32 %r15, %r15, %r16; cvt.u64.u32 %d8, %r15;
add.s64 %d9, %d2, %d8;
st.global.v2.b32 [%d9], {%f0, %f1}; st.global.v2.b32 [%d9+256], {%f2, %f3}; ret; }
"""


def test_wgmma_with_a_in_registers_and_b_without_swizzle():
    torch.manual_seed(0)
    a, b = torch.randn(64, 16).half(), torch.randn(8, 16).half()
    for seed in range(3):
        out = torch.full((64, 8), float("nan"))
        emulator.run_ptx(WGMMA.replace("{before}", ""), a, b, out, block=(128, 1, 1), seed=seed)
        assert torch.allclose(out.double(), a.double() @ b.double().T, atol=1e-5)


@pytest.mark.parametrize("register", ["%r10", "%f1"])
def test_registers_of_a_wgmma_in_flight(register):
    text = WGMMA.replace("{before}", f"mov.b32 {register}, 0;")
    with pytest.raises(emulator.Fault, match="register-in-flight"):
        emulator.run_ptx(
            text,
            torch.ones(64, 16).half(),
            torch.ones(8, 16).half(),
            torch.zeros(64, 8),
            block=(128, 1, 1),
        )


# ---- matrices in tensor memory and shared memory


TMEM = """.version 8.7
.target sm_100a
.address_size 64
.shared .align 16 .b8 slot[16];
.visible .entry k(.param .u64 in, .param .u64 out) {
.reg .pred %p<2>; .reg .b32 %t, %w, %base, %at, %r<4>, %c<128>, %v<128>; .reg .b64 %d<9>;
ld.param.u64 %d0, [in]; ld.param.u64 %d1, [out]; mov.u32 %t, %tid.x; shr.u32 %w, %t, 5;
setp.eq.u32 %p0, %w, 0; mov.b32 %r0, slot;
@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 512;
bar.sync 0; ld.shared.b32 %base, [%r0]; shl.b32 %at, %w, 21; add.s32 %at, %at, %base;
BODY
bar.sync 0; @%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %base, 512; ret; }
"""


def names(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


@pytest.mark.parametrize("repeat", [1, 2, 4, 8, 16, 32])
def test_tcgen05_ld_16x256b(repeat):
    """Against the layout that CUTLASS gives: DstLayout of SM100_TMEM_LOAD_16dp256b<repeat>x (include/cute/
    atom/copy_traits_sm100.hpp), from a thread and a bit of its registers to a bit of the 16 rows, each of
    256 * repeat bits."""
    columns, registers, offset = 8 * repeat, 4 * repeat, 5
    body = "mul.wide.u32 %d2, %t, 512; add.s64 %d3, %d0, %d2;"
    for c in range(128):
        body += f"ld.global.b32 %c{c}, [%d3+{4 * c}];"
    for first in range(0, columns + offset, 128):  # as many columns as the load covers, rounded up to 128
        body += f"tcgen05.st.sync.aligned.32x32b.x128.b32 [%at+{first}], {names('c', 128)};"
        body += "".join(f"add.s32 %c{c}, %c{c}, 1000;" for c in range(128))
    body += f"tcgen05.wait::st.sync.aligned; mul.wide.u32 %d4, %t, {8 * registers}; add.s64 %d5, %d1, %d4;"
    for half in range(2):
        load = f"tcgen05.ld.sync.aligned.16x256b.x{repeat}.b32 {names('v', registers)}"
        body += f"{load}, [%at+{(half << 20) + offset}]; tcgen05.wait::ld.sync.aligned;"
        body += "".join(f"st.global.b32 [%d5+{4 * (half * registers + r)}], %v{r};" for r in range(registers))
    cells = torch.arange(128 * 128, dtype=torch.int32).reshape(128, 128) * 10_000
    out = torch.full((4, 32, 2, registers), -1, dtype=torch.int32)
    result = emulator.run_ptx(TMEM.replace("BODY", body), cells, out, block=(128, 1, 1))
    assert result.counters["bytes read from TMEM by tcgen05.ld"] == 128 * columns * 4
    stored = np.concatenate([cells.numpy() + 1000 * i for i in range(3)], 1)
    thread, register = np.arange(32)[:, None], np.arange(registers)[None, :]
    bit = 64 * (thread % 4) + 256 * repeat * (thread // 4)  # strides of the threads' modes, (4, 8)
    bit = bit + 32 * (register % 2) + 8 * 256 * repeat * (register // 2 % 2) + 256 * (register // 4)
    row, column = bit // (256 * repeat), bit % (256 * repeat) // 32
    for warp in range(4):
        for half in range(2):
            want = stored[32 * warp + 16 * half + row, offset + column]
            assert np.array_equal(out[warp, :, half].numpy(), want), f"warp {warp}, half {half}"


DEPTH = 64  # of k: one span of the swizzle of 128 bytes, K-major


def operand_image(x: torch.Tensor, k_major: bool) -> torch.Tensor:
    """The shared memory of an operand (rows, DEPTH) of 16 bits with the swizzle of 128 bytes, padded with NaN
    to a multiple of 1024 bytes."""
    rows = x.shape[0]
    size = -(-rows // 8) * 1024 if k_major else -(-rows // 64) * DEPTH * 128
    image = np.full(size // 2, 0x7FFF, np.uint16)
    row, k = np.meshgrid(np.arange(rows), np.arange(DEPTH), indexing="ij")
    at = 128 * row + 2 * k if k_major else DEPTH * 128 * (row // 64) + 128 * k + 2 * (row % 64)
    image[(at ^ (at >> 7 & 7) << 4) // 2] = x.view(torch.int16).numpy().view(np.uint16)
    return torch.from_numpy(image.view(np.int16))


def image_descriptor(k_major: bool, code: int) -> tuple[int, int]:
    """(descriptor less its start address, bytes from one 16 of k to the next) of an operand_image."""
    leading = 0 if k_major else DEPTH * 128
    return leading >> 4 << 16 | 1024 >> 4 << 32 | code, 32 if k_major else 2048


def random_operands(m: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B and the float64 product. The products are exact in fp32; only sums of DEPTH of them round."""
    generator = torch.Generator().manual_seed(m + n)
    a, b = (torch.randn(rows, DEPTH, generator=generator).bfloat16() for rows in (m, n))
    return a, b, a.double() @ b.double().T


# Every CTA copies its image, of which operand A comes first, to shared memory; %r1 is its address.
IMAGES = """.version 8.7
.target TARGET
.address_size 64
.shared .align 1024 .b8 buffer[BYTES];
.visible .entry k(.param .u64 in, .param .u64 out) {
.reg .pred %p<5>, %never; .reg .b16 %h<2>; .reg .b32 %t, %w, %l, %rank, %r<20>; .reg .b32 %f<128>;
.reg .b64 %d<20>;
ld.param.u64 %d0, [in]; ld.param.u64 %d1, [out]; mov.u32 %t, %tid.x; and.b32 %l, %t, 31; shr.u32 %w, %t, 5;
setp.eq.u32 %p0, %t, 0; setp.ne.b32 %never, 0, 0; mov.b32 %r0, buffer; add.s32 %r1, %r0, 1024;
mov.u32 %rank, %cluster_ctarank;
mul.wide.u32 %d2, %rank, SIZE; add.s64 %d2, %d2, %d0;
@%p0 mbarrier.init.shared.b64 [%r0], 1; @%p0 mbarrier.init.shared.b64 [%r0+8], 1;
fence.mbarrier_init.release.cluster; barrier.cluster.arrive; barrier.cluster.wait;
@%p0 mbarrier.arrive.expect_tx.shared.b64 %d3, [%r0], SIZE;
@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d2], SIZE, [%r0];
loaded: mbarrier.try_wait.parity.shared.b64 %p1, [%r0], 0; @!%p1 bra loaded;
BODY
ret; }
"""


def with_images(target: str, size: int, body: str) -> str:
    text = IMAGES.replace("TARGET", target).replace("BYTES", str(size + 1024))
    return text.replace("SIZE", str(size)).replace("BODY", body)


def descriptors(step: int, a: tuple[int, int], b: tuple[int, int], b_offset: int) -> str:
    """%d5 and %d6 are the descriptors of A and B at `step` of k."""
    body = ""
    for number, (fixed, stride), offset in ((5, a, 0), (6, b, b_offset)):
        body += f"add.s32 %r4, %r1, {offset + step * stride}; shr.u32 %r4, %r4, 4;"
        body += f"cvt.u64.u32 %d{number}, %r4; or.b64 %d{number}, %d{number}, {fixed};"
    return body


@pytest.mark.parametrize("majors", ["kk", "km", "mk", "mm"])
@pytest.mark.parametrize("n", range(8, 257, 8))
def test_wgmma_of_every_n(n, majors):
    a, b, want = random_operands(64, n)
    a_image, b_image = operand_image(a, majors[0] == "k"), operand_image(b, majors[1] == "k")
    fixed = image_descriptor(majors[0] == "k", 1 << 62), image_descriptor(majors[1] == "k", 1 << 62)
    body = "setp.eq.b32 %p2, 0, 0; wgmma.fence.sync.aligned;"
    for step in range(DEPTH // 16):
        body += descriptors(step, *fixed, 2 * len(a_image))
        body += f"""wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {names("f", n // 2)}, %d5, %d6,
        {"%p2" if step else "%never"}, 1, 1, {int(majors[0] == "m")}, {int(majors[1] == "m")};"""
    body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    body += f"mul.wide.u32 %d7, %t, {2 * n}; add.s64 %d8, %d1, %d7;"
    body += "".join(f"st.global.b32 [%d8+{4 * i}], %f{i};" for i in range(n // 2))
    image = torch.cat([a_image, b_image])
    out = torch.full((4, 8, 4, n // 8, 2, 2), float("nan"))  # warp, row, columns' pair, 8 columns, half, pair
    text = with_images("sm_90a", 2 * len(image), body)
    emulator.run_ptx(text, image, out, block=(128, 1, 1))
    got = out.permute(0, 4, 1, 3, 2, 5).reshape(64, n)
    assert (got.double() - want).norm() < 4e-7 * want.norm()


ALLOCATE = """setp.eq.u32 %p3, %w, 0; and.b32 %r9, %rank, 1; setp.eq.u32 %p4, %r9, 0;
@%p3 tcgen05.alloc.cta_group::GROUP.sync.aligned.shared::cta.b32 [%r0+16], 256;
@%p3 tcgen05.relinquish_alloc_permit.cta_group::GROUP.sync.aligned;
bar.sync 0; ld.shared.b32 %r2, [%r0+16]; barrier.cluster.arrive; barrier.cluster.wait;
and.pred %p4, %p4, %p0; setp.eq.b32 %p2, 0, 0;"""


@pytest.mark.parametrize("majors", ["kk", "mm"])
@pytest.mark.parametrize(
    ("group", "n"), [(1, n) for n in range(16, 257, 16)] + [(2, n) for n in range(32, 257, 32)]
)
def test_tcgen05_mma_of_every_n(group, n, majors):
    a, b, want = random_operands(128 * group, n)
    rows = n // group
    images = [
        torch.cat(
            [
                operand_image(a[128 * i : 128 * i + 128], majors[0] == "k"),
                operand_image(b[rows * i : rows * i + rows], majors[1] == "k"),
            ]
        )
        for i in range(group)
    ]
    instruction = 1 << 4 | 1 << 7 | 1 << 10 | n // 8 << 17 | 8 * group << 24
    instruction |= (majors[0] == "m") << 15 | (majors[1] == "m") << 16
    code = 2 << 61 | 1 << 46
    fixed = image_descriptor(majors[0] == "k", code), image_descriptor(majors[1] == "k", code)
    body = ALLOCATE + f"mov.b32 %r5, {instruction};"
    for step in range(DEPTH // 16):
        body += descriptors(step, *fixed, 128 * DEPTH * 2)
        accumulate = "%p2" if step else "%never"
        body += f"@%p4 tcgen05.mma.cta_group::GROUP.kind::f16 [%r2], %d5, %d6, %r5, {accumulate};"
    body += "mov.b16 %h0, 3; @%p4 tcgen05.commit.cta_group::GROUP.mbarrier::arrive::one.shared::cluster"
    body += ".b64 [%r0+8];" if group == 1 else ".multicast::cluster.b64 [%r0+8], %h0;"
    body += """done: mbarrier.try_wait.parity.shared.b64 %p1, [%r0+8], 0; @!%p1 bra done;
    tcgen05.fence::after_thread_sync; shl.b32 %r6, %w, 21; add.s32 %r6, %r6, %r2;
    shl.b32 %r7, %rank, 7; add.s32 %r7, %r7, %t;"""
    body += f"mul.wide.u32 %d7, %r7, {4 * n}; add.s64 %d8, %d1, %d7;"
    for first in range(0, n, 16):
        body += f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {names('f', 16)}, [%r6+{first}];"
        body += "tcgen05.wait::ld.sync.aligned;"
        body += "".join(f"st.global.b32 [%d8+{4 * (first + i)}], %f{i};" for i in range(16))
    body += """tcgen05.fence::before_thread_sync; barrier.cluster.arrive; barrier.cluster.wait;
    @%p3 tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 %r2, 256;"""
    text = with_images("sm_100a", 2 * len(images[0]), body.replace("GROUP", str(group)))
    shape: dict[str, Any] = dict(grid=(group, 1, 1), cluster=(group, 1, 1), block=(128, 1, 1))
    out = torch.full((128 * group, n), float("nan"))
    emulator.run_ptx(text, torch.cat(images), out, **shape)
    assert (out.double() - want).norm() < 4e-7 * want.norm()


def tensor_map(x: torch.Tensor, box_rows: int) -> torch.Tensor:
    """A map of the matrix x of 16 bits with boxes of (box_rows, 64) and the swizzle of 128 bytes (the layout
    of descriptors.decode_tensor_map, which hardware has confirmed)."""
    rows, columns = x.shape
    words = [0] * 16
    words[0] = x.data_ptr()
    words[1] = 1 << 4 | 10 << 7 | 3 << 13 | columns * 2 // 16 << 32  # rank 2, bf16, 128 bytes
    words[4] = columns - 1 | rows - 1 << 32
    words[6] = 63 << 56
    words[7] = box_rows - 1
    raw = b"".join(w.to_bytes(8, "little") for w in words)
    return torch.tensor(list(raw), dtype=torch.uint8)  # torch aligns it to the 64 bytes that a map needs


# Each of two CTAs loads half of the rows of a box at (COLUMN, ROW) and multicasts it to both.
MULTICAST = """.version 8.7
.target sm_90a
.address_size 64
.shared .align 1024 .b8 buffer[BYTES];
.visible .entry k(.param .u64 map, .param .u64 in, .param .u64 out) {
.reg .pred %p<2>; .reg .b16 %h; .reg .b32 %t, %rank, %r<9>; .reg .b64 %d<9>;
ld.param.u64 %d0, [map]; ld.param.u64 %d1, [out]; mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank;
setp.eq.u32 %p0, %t, 0; mov.b32 %r0, buffer; add.s32 %r1, %r0, 1024; mul.lo.s32 %r2, %rank, HALF;
mul.lo.s32 %r3, %r2, 128; add.s32 %r3, %r1, %r3; add.s32 %r2, %r2, ROW; mov.b16 %h, 3; mov.b32 %r4, COLUMN;
@%p0 mbarrier.init.shared.b64 [%r0], 1; @%p0 mbarrier.arrive.expect_tx.shared.b64 %d2, [%r0], EXPECTED;
fence.mbarrier_init.release.cluster; barrier.cluster.arrive; barrier.cluster.wait;
@%p0 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
  [%r3], [%d0, {%r4, %r2}], [%r0], %h;
loaded: mbarrier.try_wait.parity.shared.b64 %p1, [%r0], 0; @!%p1 bra loaded;
mad.lo.s32 %r5, %rank, EXPECTED, 0; shl.b32 %r6, %t, 2; add.s32 %r5, %r5, %r6; cvt.u64.u32 %d3, %r5;
add.s64 %d3, %d1, %d3; add.s32 %r7, %r1, %r6;
DUMP
barrier.cluster.arrive; barrier.cluster.wait; ret; }
"""


def multicast(rows: int, row: int, column: int, expected: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What two CTAs receive of a (40, 88) matrix, and what they should."""
    x = torch.arange(1, 40 * 88 + 1, dtype=torch.int16).view(torch.bfloat16).reshape(40, 88)
    text = MULTICAST.replace("BYTES", str(rows * 128 + 1024)).replace("EXPECTED", str(expected))
    text = text.replace("HALF", str(rows // 2)).replace("ROW", str(row)).replace("COLUMN", str(column))
    dump = "".join(
        f"ld.shared.b32 %r8, [%r7+{at}]; st.global.b32 [%d3+{at}], %r8;" for at in range(0, rows * 128, 512)
    )
    out = torch.full((2, rows * 64), -1, dtype=torch.int16)
    shape: dict[str, Any] = dict(grid=(2, 1, 1), cluster=(2, 1, 1), block=(128, 1, 1))
    result = emulator.run_ptx(
        text.replace("DUMP", dump), tensor_map(x, rows // 2), x.view(torch.int16), out, **shape
    )
    assert result.counters["bytes written to shared memory by bulk copies"] == 2 * rows * 128
    want = torch.zeros(rows, 64, dtype=torch.bfloat16)
    inside = x[row : row + rows, max(column, 0) : max(column + 64, 0)]
    first = max(-column, 0)
    want[: inside.shape[0], first : first + inside.shape[1]] = inside
    return out, operand_image(want, True)


@pytest.mark.parametrize("column", [0, 64, 88, 128, -24, -64], ids="column {}".format)
@pytest.mark.parametrize("rows", [16, 24, 32, 48, 80, 112, 144, 160, 176, 256])
def test_tma_multicast_of_half_a_box_each(rows, column):
    """A box of any height, inside of the matrix, past its edges, and (columns 88, 128 and -64) all outside:
    then it is zeros, and their bytes count."""
    for row in (0, 8):
        got, want = multicast(rows, row, column, rows * 128)
        assert torch.equal(got, want.expand(2, -1))


def test_a_tma_load_outside_the_tensor_counts_all_its_bytes():
    with pytest.raises(emulator.Fault, match="mbarrier-tx"):
        multicast(32, 0, 128, 64 * 128)
