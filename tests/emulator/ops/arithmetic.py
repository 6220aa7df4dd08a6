"""Integer, floating-point, comparison and logic instructions (PTX ISA 9.7.1 to 9.7.8), on vectors of 32
lanes.

Floating point: .rn is what numpy computes; .ftz flushes denormal inputs and results. The approximate
functions (ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh .approx) are computed in float64 and rounded to
float32: hardware may differ by the error that the PTX ISA documents for each.
"""

from __future__ import annotations

import numpy as np

from .. import ptx
from ..faults import UnsupportedInstruction
from ..program import NUMPY, Decoder, Op, instruction

INT = ("u16", "u32", "u64", "s16", "s32", "s64")
BITS = ("pred", "b16", "b32", "b64")
FLOAT_MIN = np.float32(2.0**-126)
ROUNDINGS = ("rn", "rz", "rm", "rp")


def flush(x: np.ndarray) -> np.ndarray:
    """Denormal float32 values to zeros of the same sign."""
    return x * (np.abs(x) >= FLOAT_MIN)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even; NaN becomes the canonical 0x7FFF."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def elementwise(d: Decoder, type_name: str, function, count: int) -> Op:
    """`dest = function(sources...)`, all of one type; `function` is a numpy ufunc that takes out= and
    where=."""
    d.count(count + 1)
    dest = d.dest(d.operands[0], type_name)
    args = [d.source(x, type_name) for x in d.operands[1:]]
    if count == 2:
        a, b = args

        def run(warp, lanes):
            rows = warp.views[type_name]
            function(rows[a], rows[b], out=rows[dest], where=lanes)
    else:

        def run(warp, lanes):
            rows = warp.views[type_name]
            function(*[rows[x] for x in args], out=rows[dest], where=lanes)

    return d.done(run)


def computed(d: Decoder, type_name: str, function, source_types: list[str] | None = None) -> Op:
    """`dest = function(*sources)` for any function of arrays that returns an array of dest's type."""
    types = source_types or [type_name] * (len(d.operands) - 1)
    d.count(len(types) + 1)
    dest = d.dest(d.operands[0], type_name)
    args = [(t, d.source(x, t)) for t, x in zip(types, d.operands[1:], strict=False)]

    def run(warp, lanes):
        views = warp.views
        value = function(*[views[t][n] for t, n in args])
        np.copyto(views[type_name][dest], value, where=lane_mask(lanes, value))

    return d.done(run)


def lane_mask(lanes, value):
    """The active lanes, doubled for rows of 64 halves (f32x2)."""
    return np.repeat(lanes, 2) if lanes is not True and value.shape[-1] == 64 else lanes


def float_function(d: Decoder, function, count: int) -> Op:
    """add, sub, mul, fma on floats: rounding, .ftz, .sat and the packed types (PTX ISA 9.7.3, 9.7.4)."""
    type_name = d.mods.type("f16", "f16x2", "bf16", "bf16x2", "f32", "f64", "f32x2")
    rounding = d.mods.take(*ROUNDINGS)
    ftz, sat = d.mods.flag("ftz"), d.mods.flag("sat")
    if rounding not in (None, "rn"):
        return _directed(d, type_name, rounding, function, count, ftz or sat)
    if type_name in ("f32", "f64") and not ftz and not sat and count == 2:
        return elementwise(d, type_name, function, count)

    def run(*args):
        if ftz:
            args = [flush(a) for a in args]
        r = function(*args)
        if ftz:
            r = flush(r)
        return np.clip(np.where(np.isnan(r), 0, r), 0, 1) if sat else r

    return computed(d, type_name, _through_f32(type_name, run))


def _through_f32(type_name: str, function):
    """Wrap a float32 function for a 16-bit type or pairs of them: widen, compute, round once."""
    if type_name in ("f32", "f64", "f32x2"):
        return function

    def half(x):
        return (
            x.view(np.float16).astype(np.float32)
            if type_name.startswith("f16")
            else from_bf16(x.view(np.uint16))
        )

    def narrow(x, like):
        r = x.astype(np.float16).view(np.uint16) if type_name.startswith("f16") else to_bf16(x)
        return np.ascontiguousarray(r).view(like.dtype)

    return lambda *args: narrow(function(*[half(np.ascontiguousarray(a)) for a in args]), args[0])


def _directed(d: Decoder, type_name: str, rounding: str, function, count: int, extra: bool) -> Op:
    """Directed rounding of float32 through float64, which holds sums and products of two floats closely
    enough."""
    if type_name not in ("f32", "f32x2") or extra or function is fused_multiply_add:
        raise UnsupportedInstruction(f".{rounding} for .{type_name}")

    def run(*args):
        exact = function(*[a.astype(np.float64) for a in args])
        near = exact.astype(np.float32)
        down = np.where(near.astype(np.float64) > exact, np.nextafter(near, np.float32(-np.inf)), near)
        up = np.where(near.astype(np.float64) < exact, np.nextafter(near, np.float32(np.inf)), near)
        return {"rm": down, "rp": up, "rz": np.where(exact >= 0, down, up)}[rounding].astype(np.float32)

    return computed(d, type_name, run)


def fused_multiply_add(a, b, c):
    """One rounding for float32: the product is exact in float64, the sum rounds there first (double
    rounding is rare)."""
    if a.dtype == np.float64:
        return a * b + c
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _saturating(d: Decoder, ufunc) -> Op:
    def run(a, b):
        return np.clip(ufunc(a.astype(np.int64), b.astype(np.int64)), -(2**31), 2**31 - 1).astype(np.int32)

    return computed(d, d.mods.type("s32"), run)


@instruction("add")
def _add(d):
    return _add_sub(d, np.add)


@instruction("sub")
def _sub(d):
    return _add_sub(d, np.subtract)


def _add_sub(d, ufunc):
    if d.mods.left[-1] in INT:
        if d.mods.flag("sat"):
            return _saturating(d, ufunc)
        return elementwise(d, d.mods.type(*INT), ufunc, 2)
    return _mixed(d, ufunc, 1) if _is_mixed(d) else float_function(d, ufunc, 2)


def _wider(type_name: str) -> str:
    return type_name[0] + str(2 * int(type_name[1:]))


def _product_high(type_name: str):
    bits = 8 * ptx.TYPE_BYTES[type_name]
    if bits < 64:
        wide = NUMPY[_wider(type_name)]
        return lambda a, b: ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(NUMPY[type_name])

    def high(a, b):
        values = [(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=False)]
        return np.array([v & (2**64 - 1) for v in values], np.uint64).view(NUMPY[type_name])

    return high


@instruction("mul")
def _mul(d):
    part = d.mods.take("lo", "hi", "wide")
    if part is None:
        return float_function(d, np.multiply, 2)
    type_name = d.mods.type(*INT)
    if part == "lo":
        return elementwise(d, type_name, np.multiply, 2)
    if part == "hi":
        return computed(d, type_name, _product_high(type_name))
    wide = _wider(type_name)
    dtype = NUMPY[wide]
    return computed(d, wide, lambda a, b: a.astype(dtype) * b.astype(dtype), [type_name] * 2)


@instruction("mad")
def _mad(d):
    part = d.mods.need("lo", "hi", "wide")
    type_name = d.mods.type(*INT)
    if part == "lo":
        return computed(d, type_name, lambda a, b, c: a * b + c)
    if part == "hi":
        high = _product_high(type_name)
        return computed(d, type_name, lambda a, b, c: high(a, b) + c)
    wide = _wider(type_name)
    dtype = NUMPY[wide]
    return computed(
        d, wide, lambda a, b, c: a.astype(dtype) * b.astype(dtype) + c, [type_name, type_name, wide]
    )


@instruction("fma")
def _fma(d):
    if _is_mixed(d):
        return _mixed(d, fused_multiply_add, 2)
    return float_function(d, fused_multiply_add, 3)


def _is_mixed(d: Decoder) -> bool:
    return d.mods.left[-2:] in (["f32", "bf16"], ["f32", "f16"])


def _mixed(d: Decoder, function, narrow: int) -> Op:
    """The first `narrow` operands of 16 bits, a float32 summand and result (PTX ISA, mixed precision)."""
    kind = d.mods.type("bf16", "f16")
    d.mods.type("f32")
    d.mods.take("rn")

    def widen(x):
        return from_bf16(x) if kind == "bf16" else x.view(np.float16).astype(np.float32)

    return computed(
        d, "f32", lambda *args: function(*map(widen, args[:narrow]), args[-1]), ["u16"] * narrow + ["f32"]
    )


@instruction("div")
def _div(d):
    if d.mods.left[-1] not in INT:
        type_name = d.mods.type("f32", "f64")
        d.mods.need("rn", "approx", "full")
        ftz = d.mods.flag("ftz")
        return computed(d, type_name, lambda a, b: flush(flush(a) / flush(b)) if ftz else a / b)
    type_name = d.mods.type(*INT)
    if type_name[0] == "u":
        # Division by zero gives an unspecified value (PTX ISA 9.7.1); all ones is what the hardware's
        # routine returns.
        return computed(
            d,
            type_name,
            lambda a, b: np.where(b == 0, ~a.dtype.type(0), a // np.where(b == 0, a.dtype.type(1), b)),
        )
    return computed(d, type_name, _truncated_quotient)


def _truncated_quotient(a, b):
    safe = np.where(b == 0, b.dtype.type(1), b)
    q = np.floor_divide(a, safe)
    return np.where(b == 0, b.dtype.type(-1), q + ((q < 0) & (q * safe != a)).astype(a.dtype)).astype(a.dtype)


@instruction("rem")
def _rem(d):
    return computed(d, d.mods.type(*INT), lambda a, b: np.fmod(a, np.where(b == 0, b.dtype.type(1), b)))


@instruction("min")
def _min(d):
    return _min_max(d, np.minimum, np.fmin)


@instruction("max")
def _max(d):
    return _min_max(d, np.maximum, np.fmax)


def _min_max(d, with_nan, without_nan):
    """Integers, and floats: a NaN operand is dropped unless .NaN is given; three-operand forms on sm_100
    (PTX ISA 9.7.3)."""
    if d.mods.left[-1] in INT:
        if d.mods.flag("relu"):
            return computed(d, d.mods.type("s32"), lambda a, b: np.maximum(with_nan(a, b), 0))
        return elementwise(d, d.mods.type(*INT), with_nan, 2)
    type_name = d.mods.type("f32", "f16", "f16x2", "bf16", "bf16x2", "f64")
    ftz, nan = d.mods.flag("ftz"), d.mods.flag("NaN")
    if d.mods.take("xorsign", "abs"):
        raise UnsupportedInstruction("xorsign.abs")
    function = with_nan if nan else without_nan
    if type_name in ("f32", "f64") and not ftz and len(d.operands) == 3:
        return elementwise(d, type_name, function, 2)
    d.count(3, 4)

    def run(*args):
        args = [flush(a) for a in args] if ftz else args
        r = function(args[0], args[1])
        return function(r, args[2]) if len(args) == 3 else r

    return computed(d, type_name, _through_f32(type_name, run))


@instruction("neg")
def _neg(d):
    ftz = d.mods.flag("ftz")
    type_name = d.mods.type(*INT, "f32", "f64", "f16", "f16x2", "bf16", "bf16x2")
    if type_name[0] in "us":
        return elementwise(d, type_name, np.negative, 1)
    return computed(d, type_name, _through_f32(type_name, lambda a: flush(-a) if ftz else -a))


@instruction("abs")
def _abs(d):
    ftz = d.mods.flag("ftz")
    type_name = d.mods.type("s16", "s32", "s64", "f32", "f64", "f16", "f16x2", "bf16", "bf16x2")
    return computed(d, type_name, _through_f32(type_name, lambda a: flush(np.abs(a)) if ftz else np.abs(a)))


@instruction("copysign")
def _copysign(d):
    """The second operand with the first one's sign (PTX ISA 9.7.3)."""
    return computed(d, d.mods.type("f32", "f64"), lambda a, b: np.copysign(b, a))


def _approximate(name: str, function):
    """Registers name.approx[.ftz].f32 and, where it exists, the rounded forms; without .ftz, denormals are
    kept."""

    @instruction(name)
    def decode(d):
        approx = d.mods.take("approx", "rn")
        if approx is None:
            raise UnsupportedInstruction("needs .approx or .rn")
        ftz = d.mods.flag("ftz")
        type_name = d.mods.type("f32", "f64", "f16", "f16x2", "bf16", "bf16x2")

        def run(a):
            r = function((flush(a) if ftz else a).astype(np.float64))
            r = r.astype(NUMPY["f64" if type_name == "f64" else "f32"])
            return flush(r) if ftz else r

        return computed(d, type_name, _through_f32(type_name, run))


_approximate("ex2", np.exp2)
_approximate("lg2", np.log2)
_approximate("rcp", lambda a: 1.0 / a)
_approximate("sqrt", np.sqrt)
_approximate("rsqrt", lambda a: 1.0 / np.sqrt(a))
_approximate("sin", np.sin)
_approximate("cos", np.cos)
_approximate("tanh", np.tanh)


@instruction("and")
def _and(d):
    type_name = d.mods.type(*BITS)
    return elementwise(d, type_name, np.logical_and if type_name == "pred" else np.bitwise_and, 2)


@instruction("or")
def _or(d):
    type_name = d.mods.type(*BITS)
    return elementwise(d, type_name, np.logical_or if type_name == "pred" else np.bitwise_or, 2)


@instruction("xor")
def _xor(d):
    type_name = d.mods.type(*BITS)
    return elementwise(d, type_name, np.logical_xor if type_name == "pred" else np.bitwise_xor, 2)


@instruction("not")
def _not(d):
    type_name = d.mods.type(*BITS)
    return elementwise(d, type_name, np.logical_not if type_name == "pred" else np.invert, 1)


@instruction("shl")
def _shl(d):
    """Amounts beyond the width give 0 (PTX ISA 9.7.8)."""
    type_name = d.mods.type("b16", "b32", "b64")
    bits = 8 * ptx.TYPE_BYTES[type_name]
    return _shift(
        d,
        type_name,
        lambda a, n: np.where(n < bits, a << np.minimum(n, bits - 1).astype(a.dtype), a.dtype.type(0)),
    )


@instruction("shr")
def _shr(d):
    """Amounts are clamped to the width: unsigned give 0, signed fill with the sign (PTX ISA 9.7.8)."""
    type_name = d.mods.type("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")
    bits = 8 * ptx.TYPE_BYTES[type_name]
    if type_name[0] == "s":
        return _shift(d, type_name, lambda a, n: a >> np.minimum(n, bits - 1).astype(a.dtype))
    return _shift(
        d,
        type_name,
        lambda a, n: np.where(n < bits, a >> np.minimum(n, bits - 1).astype(a.dtype), a.dtype.type(0)),
    )


def _shift(d, type_name, function):
    amount = d.operands[2]
    if isinstance(amount, ptx.Imm):  # almost always; a plain ufunc is much faster
        bits = 8 * ptx.TYPE_BYTES[type_name]
        n = amount.value & 0xFFFFFFFF
        if n < bits:
            d.count(3)
            dest, a = d.dest(d.operands[0], type_name), d.source(d.operands[1], type_name)
            ufunc = np.left_shift if d.ins.parts[0] == "shl" else np.right_shift
            by = NUMPY[type_name](n)

            def run(warp, lanes):
                rows = warp.views[type_name]
                ufunc(rows[a], by, out=rows[dest], where=lanes)

            return d.done(run)
    return computed(d, type_name, function, [type_name, "u32"])


@instruction("shf")
def _shf(d):
    direction, mode = d.mods.need("l", "r"), d.mods.need("wrap", "clamp")
    d.mods.type("b32")
    d.mods.left.append("b32")

    def run(a, b, c):
        n = (c & np.uint32(31) if mode == "wrap" else np.minimum(c, np.uint32(32))).astype(np.uint64)
        both = b.astype(np.uint64) << np.uint64(32) | a
        if direction == "l":
            return ((both << n) >> np.uint64(32)).astype(np.uint32)
        return (both >> n).astype(np.uint32)

    return computed(d, d.mods.type("b32"), run)


@instruction("lop3")
def _lop3(d):
    d.mods.type("b32")
    d.count(5)
    table = d.operands[4].value
    dest = d.dest(d.operands[0], "b32")
    args = [d.source(x, "b32") for x in d.operands[1:4]]

    def run(warp, lanes):
        rows = warp.views["b32"]
        a, b, c = (rows[x] for x in args)
        r = np.zeros(32, np.uint32)
        for k in range(8):
            if table >> k & 1:
                r |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        np.copyto(rows[dest], r, where=lanes)

    return d.done(run)


@instruction("popc")
def _popc(d):
    type_name = d.mods.type("b32", "b64")
    return computed(d, "u32", lambda a: np.bitwise_count(a).astype(np.uint32), [type_name])


@instruction("clz")
def _clz(d):
    type_name = d.mods.type("b32", "b64")
    bits = 8 * ptx.TYPE_BYTES[type_name]
    return computed(
        d, "u32", lambda a: np.array([bits - int(x).bit_length() for x in a], np.uint32), [type_name]
    )


@instruction("brev")
def _brev(d):
    d.mods.type("b32")
    return computed(d, "b32", lambda a: np.array([int(f"{int(x):032b}"[::-1], 2) for x in a], np.uint32))


@instruction("bfind")
def _bfind(d):
    type_name = d.mods.type("u32", "u64")
    return computed(
        d,
        "u32",
        lambda a: np.array([(int(x).bit_length() - 1) & 0xFFFFFFFF for x in a], np.uint32),
        [type_name],
    )


@instruction("bfe")
def _bfe(d):
    type_name = d.mods.type("u32", "s32")

    def run(a, b, c):
        out = []
        for x, pos, length in zip(a.tolist(), (b & 255).tolist(), (c & 255).tolist(), strict=False):
            value = (x & 0xFFFFFFFF) >> pos & ((1 << min(length, 32)) - 1) if pos < 32 else 0
            if type_name == "s32" and length:
                top = min(pos + length - 1, 31)
                if (x & 0xFFFFFFFF) >> top & 1:
                    value |= -1 << min(length, 32 - min(pos, 32)) & 0xFFFFFFFF
            out.append(value & 0xFFFFFFFF)
        return np.array(out, np.uint32).view(NUMPY[type_name])

    return computed(d, type_name, run, [type_name, "u32", "u32"])


@instruction("prmt")
def _prmt(d):
    d.mods.type("b32")

    def run(a, b, c):
        octets = np.stack([a, b], 1).view(np.uint8).reshape(32, 8)
        out = np.zeros((32, 4), np.uint8)
        for k in range(4):
            selector = (c >> np.uint32(4 * k)) & np.uint32(15)
            byte = octets[np.arange(32), selector & np.uint32(7)]
            sign = np.where(byte & 128, np.uint8(255), np.uint8(0))
            out[:, k] = np.where(selector & np.uint32(8), sign, byte)
        return out.view(np.uint32)[:, 0]

    return computed(d, "b32", run)


COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
SETP_TYPES = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64", "f16", "bf16")


def comparison(mods, type_name: str):
    """The comparison operator as a function of two arrays (PTX ISA 9.7.6 setp; unordered forms are true
    on NaN)."""
    name = mods.need(*COMPARE, *(c + "u" for c in COMPARE), "num", "nan")
    if type_name[0] != "f" and type_name != "bf16":
        if name not in COMPARE:
            raise UnsupportedInstruction(f".{name} for integers")
        return COMPARE[name]

    def run(a, b):
        if type_name == "bf16":
            a, b = from_bf16(a), from_bf16(b)
        unordered = np.isnan(a) | np.isnan(b)
        if name in ("num", "nan"):
            return unordered if name == "nan" else ~unordered
        return COMPARE[name](a, b) & ~unordered if name in COMPARE else COMPARE[name[:-1]](a, b) | unordered

    return run


@instruction("setp")
def _setp(d):
    type_name = d.mods.type(*SETP_TYPES)
    ftz = d.mods.flag("ftz")
    combine = d.mods.take("and", "or", "xor")
    compare = comparison(d.mods, type_name)
    if ftz:
        inner = compare
        compare = lambda a, b: inner(flush(a), flush(b))  # noqa: E731
    d.count(4 if combine else 3)
    first = d.operands[0]
    second = -1
    if isinstance(first, ptx.Pair):
        second = d.dest(first.second, "pred")
        first = first.first
    dest = d.dest(first, "pred")
    a, b = d.source(d.operands[1], type_name), d.source(d.operands[2], type_name)
    if combine is None and second < 0:
        plain = compare if isinstance(compare, np.ufunc) else None
        if plain is not None:

            def run(warp, lanes):
                rows = warp.views[type_name]
                plain(rows[a], rows[b], out=warp.views["pred"][dest], where=lanes)

            return d.done(run)
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, None: None}[combine]
    other, negate = -1, False
    if combine:
        operand = d.operands[3]
        negate = isinstance(operand, ptx.Not)
        other = d.source(operand.reg if isinstance(operand, ptx.Not) else operand, "pred")

    def run_combined(warp, lanes):
        rows, predicates = warp.views[type_name], warp.views["pred"]
        r = compare(rows[a], rows[b])
        s = ~r
        if join is not None:
            c = ~predicates[other] if negate else predicates[other].copy()
            r, s = join(r, c), join(s, c)
        if dest >= 0:
            np.copyto(predicates[dest], r, where=lanes)
        if second >= 0:
            np.copyto(predicates[second], s, where=lanes)

    return d.done(run_combined)


@instruction("set")
def _set(d):
    type_name = d.mods.type(*SETP_TYPES)
    result = d.mods.type("u32", "s32", "f32")
    d.mods.flag("ftz")
    compare = comparison(d.mods, type_name)

    def run(a, b):
        r = compare(a, b)
        return (
            r.astype(np.float32)
            if result == "f32"
            else np.where(r, NUMPY[result](-1 if result == "s32" else 0xFFFFFFFF), NUMPY[result](0))
        )

    return computed(d, result, run, [type_name, type_name])


@instruction("selp")
def _selp(d):
    """Only the selected source needs to be valid in a lane."""
    type_name = d.mods.type("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")
    d.count(4)
    dest = d.dest(d.operands[0], type_name)
    a = d.source(d.operands[1], type_name, checked=False)
    b = d.source(d.operands[2], type_name, checked=False)
    p = d.source(d.operands[3], "pred")

    def run(warp, lanes):
        rows, predicate = warp.views[type_name], warp.views["pred"][p]
        valid, active = warp.valid, warp.active
        if (valid[a] & valid[b]) & active != active:
            from ..warp import bits_of

            chosen = bits_of(predicate)
            for number, wanted in ((a, active & chosen), (b, active & ~chosen)):
                if valid[number] & wanted != wanted:
                    warp.undefined(number, wanted)
        np.copyto(rows[dest], np.where(predicate, rows[a], rows[b]), where=lanes)

    return d.done(run)
