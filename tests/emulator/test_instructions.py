"""Instructions of a warp against numpy: arithmetic, conversions, loads and stores, exchanges between
lanes."""

from __future__ import annotations

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
        ("redux.sync.max.s32 %o0, %a, -1;", lambda a: np.full(32, a.max())),
        (
            "setp.gt.s32 %p0, %a, 0; vote.sync.ballot.b32 %o0, %p0, -1;",
            lambda a: np.full(32, sum(1 << i for i in range(32) if a[i] > 0)),
        ),
        (
            "setp.gt.s32 %p0, %a, 0; vote.sync.any.pred %p1, %p0, -1; selp.b32 %o0, 1, 0, %p1;",
            lambda a: np.ones(32),
        ),
        ("activemask.b32 %o0;", lambda a: np.full(32, 2**32 - 1)),
    ],
)
def test_exchanges_between_lanes(body, expected):
    got = execute(body, INTEGERS)[0].view(np.uint32)
    assert np.array_equal(got, np.asarray(expected(INTEGERS[0])).astype(np.int64).astype(np.uint32))


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
