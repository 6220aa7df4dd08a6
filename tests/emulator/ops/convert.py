"""mov, cvt, cvta, mapa: moving values between registers and types (PTX ISA 9.7.9)."""

from __future__ import annotations

import numpy as np

from .. import ptx
from ..faults import UnsupportedInstruction
from ..program import NUMPY, SHARED_WINDOW, instruction
from .arithmetic import INT, flush, from_bf16, to_bf16


@instruction("mov")
def _mov(d):
    """Copies validity with the value: moving an undefined register is not yet an error, using it is."""
    type_name = d.mods.type(
        "pred", "b16", "b32", "b64", "b128", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64"
    )
    d.count(2)
    to, source = d.operands
    if isinstance(to, ptx.Vector):
        return _unpack(d, to, source, type_name)
    if isinstance(source, ptx.Vector):
        return _pack(d, to, source, type_name)
    if isinstance(source, ptx.Special) and source.name.lstrip("%") in (
        "clock",
        "clock64",
        "clock_hi",
        "globaltimer",
        "globaltimer_lo",
    ):
        dest = d.dest(to, type_name)

        def tick(warp, lanes):
            np.copyto(
                warp.views[type_name][dest], NUMPY[type_name](sum(warp.counts) & 0x7FFFFFFF), where=lanes
            )

        return d.done(tick)
    dest = d.dest(to, type_name, checked=False)
    a = d.source(source, type_name, checked=False)

    def run(warp, lanes):
        rows, valid, active = warp.views[type_name], warp.valid, warp.active
        np.copyto(rows[dest], rows[a], where=lanes)
        valid[dest] = valid[dest] & ~active | valid[a] & active

    return d.done(run)


def _part_type(type_name: str, n: int) -> str:
    size = ptx.TYPE_BYTES[type_name] // n
    if size not in (2, 4, 8):
        raise UnsupportedInstruction(f"mov of {n} parts of {size} bytes")
    return f"b{8 * size}"


def _unpack(d, to, source, type_name):
    part = _part_type(type_name, len(to.items))
    dests = d.dests(to, part)
    a = d.source(source, type_name)
    dtype, n = NUMPY[part], len(dests)

    def run(warp, lanes):
        parts = warp.views[type_name][a].view(dtype).reshape(32, n)
        rows = warp.views[part]
        for i, dest in enumerate(dests):
            if dest >= 0:
                np.copyto(rows[dest], parts[:, i], where=lanes)

    op = d.done(run)
    op.writes = tuple(w for w in op.writes if w >= 0)
    return op


def _pack(d, to, source, type_name):
    part = _part_type(type_name, len(source.items))
    dest = d.dest(to, type_name)
    sources = d.sources(source, part)
    dtype, n = NUMPY[part], len(sources)

    def run(warp, lanes):
        rows = warp.views[part]
        parts = warp.views[type_name][dest].view(dtype).reshape(32, n)
        values = [rows[s].copy() for s in sources]
        for i, value in enumerate(values):
            np.copyto(parts[:, i], value, where=lanes)

    return d.done(run)


@instruction("cvta")
def _cvta(d):
    """Generic addresses of shared memory and parameters are windows whose low 32 bits are the address in
    that space."""
    to = d.mods.flag("to")
    space = d.mods.need("global", "shared", "shared::cta", "shared::cluster", "param", "const")
    type_name = d.mods.type("u32", "u64")
    if type_name != "u64":
        raise UnsupportedInstruction("cvta.u32")
    dest, a = d.dest(d.operands[0], "u64"), d.source(d.operands[1], "u64")
    shared = space.startswith("shared")

    def run(warp, lanes):
        rows = warp.views["u64"]
        value = rows[a]
        if shared:
            value = value & np.uint64(0xFFFFFFFF) if to else value | np.uint64(SHARED_WINDOW)
        np.copyto(rows[dest], value, where=lanes)

    return d.done(run)


@instruction("mapa")
def _mapa(d):
    """The address of the same variable in the CTA of another rank (PTX ISA 9.7.9)."""
    d.mods.need("shared::cluster")
    type_name = d.mods.type("u32", "u64")
    dest, a, rank = (
        d.dest(d.operands[0], type_name),
        d.source(d.operands[1], type_name),
        d.source(d.operands[2], "u32"),
    )

    def run(warp, lanes):
        rows = warp.views[type_name]
        dtype = NUMPY[type_name]
        value = (rows[a] & dtype(0xFFFFFF)) | (warp.views["u32"][rank].astype(dtype) << dtype(24))
        np.copyto(rows[dest], value, where=lanes)

    return d.done(run)


@instruction("getctarank")
def _getctarank(d):
    d.mods.need("shared::cluster")
    type_name = d.mods.type("u32", "u64")
    dest, a = d.dest(d.operands[0], "u32"), d.source(d.operands[1], type_name)

    def run(warp, lanes):
        np.copyto(
            warp.views["u32"][dest],
            (warp.views[type_name][a] >> NUMPY[type_name](24)).astype(np.uint32) & np.uint32(0xFF),
            where=lanes,
        )

    return d.done(run)


ROUND_INTEGER = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


@instruction("cvt")
def _cvt(d):
    """Conversions (PTX ISA 9.7.9): integers, floats of 16 to 64 bits, and pairs of f32 into f16x2 or
    bf16x2."""
    source_type = d.mods.type(*INT, "u8", "s8", "f16", "bf16", "f32", "f64")
    result_type = d.mods.type(*INT, "u8", "s8", "f16", "bf16", "f32", "f64", "f16x2", "bf16x2")
    ftz, sat, relu = d.mods.flag("ftz"), d.mods.flag("sat"), d.mods.flag("relu")
    rounding = d.mods.take("rn", "rz", "rm", "rp", *ROUND_INTEGER)
    if result_type.endswith("x2"):
        return _cvt_pair(d, source_type, result_type, rounding, relu, ftz or sat)
    if relu:
        raise UnsupportedInstruction(".relu on a single value")
    is_float = lambda t: t[0] == "f" or t == "bf16"  # noqa: E731
    sizes = ptx.TYPE_BYTES
    narrowing = is_float(source_type) and is_float(result_type) and sizes[result_type] < sizes[source_type]
    if (
        rounding not in (None, "rn")
        and rounding not in ROUND_INTEGER
        and not (rounding == "rz" and not narrowing)
    ):
        raise UnsupportedInstruction(f".{rounding}.{result_type}.{source_type}")
    if is_float(source_type) and not is_float(result_type) and rounding not in ROUND_INTEGER:
        raise UnsupportedInstruction("float to integer needs .rni, .rzi, .rmi or .rpi")
    d.count(2)
    dest = d.dest(d.operands[0], result_type, relaxed=True)
    a = d.source(d.operands[1], source_type, relaxed=True)
    dest_view, source_view = d.program.view_of_width[dest], d.program.view_of_width[a]
    result_dtype = NUMPY[result_type]

    def read(views):
        row = views[source_view][a]
        if row.itemsize > sizes[source_type]:
            row = row.astype(f"u{sizes[source_type]}")
        value = row.view(NUMPY[source_type])
        if source_type == "bf16":
            value = from_bf16(value)
        return flush(value) if ftz and value.dtype == np.float32 else value

    def convert(value):
        if is_float(result_type):
            if result_type == "bf16":
                return to_bf16(value.astype(np.float32))
            if rounding in ROUND_INTEGER:
                value = ROUND_INTEGER[rounding](value)
            r = value.astype(result_dtype)
            if sat:
                r = np.clip(np.where(np.isnan(r), 0, r), 0, 1).astype(result_dtype)
            return flush(r) if ftz and r.dtype == np.float32 else r
        info = np.iinfo(result_dtype)
        if is_float(source_type):
            # Out of range clamps, NaN becomes 0 (PTX ISA 9.7.9, "integer notes").
            rounded = ROUND_INTEGER[str(rounding)](value.astype(np.float64))
            low, high = float(info.min), float(info.max)
            clipped = np.clip(
                np.where(np.isnan(rounded), 0.0, rounded),
                low,
                np.nextafter(high, 0) if high > 2**53 else high,
            )
            r = clipped.astype(result_dtype)
            return np.where(rounded >= high, result_dtype(info.max), r) if high > 2**53 else r
        if sat:
            return np.array([min(max(int(x), info.min), info.max) for x in value], result_dtype)
        return value.astype(result_dtype)

    def run(warp, lanes):
        views = warp.views
        r = convert(read(views))
        row = views[dest_view][dest]
        if row.itemsize > r.itemsize:
            # Into a wider register: sign-extended for signed integers, zero-extended otherwise.
            r = (
                r.astype(f"i{row.itemsize}")
                if r.dtype.kind == "i"
                else r.view(f"u{r.itemsize}").astype(f"u{row.itemsize}")
            )
        np.copyto(row, np.ascontiguousarray(r).view(row.dtype), where=lanes)

    return d.done(run)


def _cvt_pair(d, source_type, result_type, rounding, relu, extra):
    """cvt.rn{.relu}.{f16x2,bf16x2}.f32 d, a, b: a goes to the upper half, b to the lower."""
    if source_type != "f32" or rounding != "rn" or extra:
        raise UnsupportedInstruction(f"cvt to {result_type}")
    d.count(3)
    dest = d.dest(d.operands[0], "b32")
    high, low = d.source(d.operands[1], "f32"), d.source(d.operands[2], "f32")
    narrow = to_bf16 if result_type == "bf16x2" else lambda x: x.astype(np.float16).view(np.uint16)

    def run(warp, lanes):
        rows = warp.views["f32"]
        pairs = np.stack((rows[low], rows[high]), axis=1)
        if relu:
            pairs = np.maximum(pairs, 0)
        np.copyto(warp.views["b32"][dest], narrow(pairs).view(np.uint32)[:, 0], where=lanes)

    return d.done(run)
