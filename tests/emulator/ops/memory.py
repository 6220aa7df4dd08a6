"""ld, st, atom, red, ldmatrix, stmatrix: warps' own accesses to memory (PTX ISA 9.7.9, 9.7.13,
9.7.14)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import ptx
from ..faults import Fault, UnsupportedInstruction
from ..program import COLLECTIVE, NUMPY, instruction
from ..warp import lanes_array
from .arithmetic import from_bf16, to_bf16

SPACES = ("global", "shared", "shared::cta", "shared::cluster", "param", "param::entry", "const")
CACHE = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")
EVICTION = tuple(
    f"L1::{x}" for x in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")
) + tuple(f"L2::{x}" for x in ("evict_last", "evict_normal", "evict_first", "64B", "128B", "256B"))
SCOPES = ("cta", "cluster", "gpu", "sys")
MEMORY_TYPES = (
    "b8",
    "u8",
    "s8",
    "b16",
    "u16",
    "s16",
    "f16",
    "bf16",
    "b32",
    "u32",
    "s32",
    "f32",
    "b64",
    "u64",
    "s64",
    "f64",
)


def access_modifiers(d, orders):
    """(space, type, element count, order, cache hint given) of ld and st; scopes and cache hints have no
    effect here."""
    type_name = d.mods.type(*MEMORY_TYPES)
    order = d.mods.take(*orders) or "weak"
    scope = d.mods.take(*SCOPES)
    if (order in ("weak", "volatile")) != (scope is None):
        raise UnsupportedInstruction(f".{order} with scope {scope}")
    space = d.mods.take(*SPACES) or "generic"
    vector = d.mods.take("v2", "v4", "v8")
    while d.mods.take(*CACHE, *EVICTION):
        pass
    hint = d.mods.flag("L2::cache_hint")
    return space.removesuffix("::entry"), type_name, int(vector[1]) if vector else 1, order, hint


def split_spaces(warp, space: str, addresses: np.ndarray) -> Iterator[tuple]:
    """Active lanes by the memory they address: yields (kind, target, lane indices, offsets)."""
    if space == "generic":
        window = addresses >> 56
        for kind in np.unique(window).tolist():
            chosen = (window == kind).nonzero()[0]
            part = addresses[chosen]
            named = {0x05: "shared", 0x06: "param"}.get(kind, "global")
            for k, target, index, offsets in split_spaces(
                warp, named, part if named == "global" else part & 0xFFFFFFFF
            ):
                yield k, target, chosen[index], offsets
    elif space == "global":
        yield "global", None, slice(None), addresses
    elif space == "param":
        yield "param", None, slice(None), addresses & 0xFFFFFFFF
    elif space.startswith("shared"):
        ranks = addresses >> 24
        first = int(ranks[0])
        if (ranks == first).all():
            cta, _ = warp.cta.peer(first << 24)
            yield "shared", cta.shared, slice(None), addresses & 0xFFFFFF
            return
        for rank in np.unique(ranks).tolist():
            chosen = (ranks == rank).nonzero()[0]
            cta, _ = warp.cta.peer(rank << 24)
            yield "shared", cta.shared, chosen, addresses[chosen] & 0xFFFFFF
    else:
        raise UnsupportedInstruction(f"state space .{space}")


def load_bytes(warp, space: str, addresses: np.ndarray, size: int) -> np.ndarray:
    """(lanes, size) bytes at the active lanes' addresses."""
    device = warp.cta.cluster.device
    out = np.empty((len(addresses), size), np.uint8)
    for kind, target, index, offsets in split_spaces(warp, space, addresses):
        if kind == "shared":
            out[index] = target.load(warp, offsets, size)
            device.counters["bytes read from shared memory by ld"] += len(offsets) * size
        elif kind == "param":
            params = warp.cta.params
            if int(offsets.max()) + size > params.size or int(offsets.min()) < 0:
                raise Fault(
                    "global-bounds", f"parameter bytes {int(offsets.max())}..+{size} of {params.size}"
                )
            out[index] = params[offsets[:, None] + np.arange(size)]
        else:
            if warp.may_be_early:
                warp.launch_before().check_early_read(offsets, size)
            for region, lanes, where in device.memory.locate(offsets, size):
                device.memory.touched.read.add(region, where, size)
                data, at = region.at(where, size)
                out[np.arange(len(addresses))[index][lanes]] = data[at]
            device.counters["bytes read from global memory by ld"] += len(offsets) * size
    return out


def store_bytes(warp, space: str, addresses: np.ndarray, values: np.ndarray) -> None:
    device = warp.cta.cluster.device
    size = values.shape[1]
    device.progress += 1
    for kind, target, index, offsets in split_spaces(warp, space, addresses):
        if kind == "shared":
            target.store(warp, offsets, values[index])
            device.counters["bytes written to shared memory by st"] += len(offsets) * size
        elif kind == "param":
            raise Fault("value", "store to kernel parameters")
        else:
            if warp.may_be_early:
                warp.launch_before().check_early_write(offsets, size)
            for region, lanes, where in device.memory.locate(offsets, size):
                device.memory.touched.written.add(region, where, size)
                data, at = region.at(where, size)
                data[at] = values[index][lanes]
            device.counters["bytes written to global memory by st"] += len(offsets) * size


@instruction("ld", "ldu")
def _ld(d):
    space, type_name, n, _, hint = access_modifiers(d, ("weak", "volatile", "relaxed", "acquire"))
    d.count(3 if hint else 2)
    if hint:
        d.source(d.operands[2], "b64")
    dests = d.dests(d.operands[0], type_name, relaxed=True)
    address = d.address_reader(d.operands[1])
    if len(dests) != n:
        raise UnsupportedInstruction(f"{len(dests)} destinations")
    dtype = np.dtype(NUMPY[type_name])
    size = dtype.itemsize * n
    views = [d.program.view_of_width[x] if x >= 0 else "" for x in dests]
    if space == "param" and isinstance(d.operands[1].base, ptx.Symbol):
        return _ld_param(d, d.operands[1], dtype, dests, views)

    def run(warp, lanes):
        where = slice(None) if lanes is True else lanes
        raw = load_bytes(warp, space, address(warp)[where], size).view(dtype)
        for i, dest in enumerate(dests):
            if dest >= 0:
                row = warp.views[views[i]][dest]
                value = raw[:, i]
                row[where] = (
                    value.view(row.dtype) if row.itemsize == dtype.itemsize else _extend(value, row.dtype)
                )

    op = d.done(run)
    op.writes = tuple(w for w in op.writes if w >= 0)
    return op


def _extend(value: np.ndarray, wider: np.dtype) -> np.ndarray:
    """Into a wider register: sign-extended for signed integers, zero-extended otherwise (PTX ISA 9.4.1)."""
    return (
        value.astype(f"i{wider.itemsize}").view(wider)
        if value.dtype.kind == "i"
        else value.view(f"u{value.itemsize}").astype(wider)
    )


def _ld_param(d, operand, dtype, dests, views):
    """A kernel parameter at a fixed offset: the same value in all lanes."""
    start = d.program.param_offsets.get(operand.base.name, 0) + operand.offset
    if operand.base.name not in d.program.param_offsets:
        raise UnsupportedInstruction(f"parameter {operand.base.name}")

    # The parameters of the launch that executed this last, and what all lanes of each destination get.
    known: list = [None, []]

    def read(params: np.ndarray) -> None:
        values = params[start : start + dtype.itemsize * len(dests)].view(dtype)
        known[:] = params, []
        for i, dest in enumerate(dests):
            if dest >= 0:
                view, value = np.dtype(NUMPY[views[i]]), values[i : i + 1]
                same = view.itemsize == dtype.itemsize
                known[1].append((views[i], dest, value.view(view) if same else _extend(value, view)))

    def run(warp, lanes):
        if known[0] is not warp.cta.params:
            read(warp.cta.params)
        for view, dest, value in known[1]:
            np.copyto(warp.views[view][dest], value, where=lanes)

    op = d.done(run)
    op.writes = tuple(w for w in op.writes if w >= 0)
    return op


@instruction("st")
def _st(d):
    space, type_name, n, _, hint = access_modifiers(d, ("weak", "volatile", "relaxed", "release"))
    d.count(3 if hint else 2)
    if hint:
        d.source(d.operands[2], "b64")
    address = d.address_reader(d.operands[0])
    sources = d.sources(d.operands[1], type_name, relaxed=True)
    if len(sources) != n:
        raise UnsupportedInstruction(f"{len(sources)} sources")
    unsigned = np.dtype(f"u{np.dtype(NUMPY[type_name]).itemsize}")
    views = [d.program.view_of_width[x] for x in sources]

    def run(warp, lanes):
        where = slice(None) if lanes is True else lanes
        columns = [
            warp.views[v][s][where].astype(unsigned, copy=False) for v, s in zip(views, sources, strict=False)
        ]
        values = np.stack(columns, 1)
        store_bytes(warp, space, address(warp)[where], np.ascontiguousarray(values).view(np.uint8))

    return d.done(run)


@instruction("prefetch")
def _prefetch(d):
    """A hint about caches (PTX ISA 9.7.9); the address is computed, nothing is touched."""
    d.mods.take("param", "const", "global")
    d.mods.need("tensormap", "L1", "L2", "L2::evict_last", "L2::evict_normal")
    d.count(1)
    d.address(d.operands[0])
    return d.done(lambda warp, lanes: None)


ATOMICS = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


@instruction("atom", "red")
def _atom(d):
    """Lanes act one after the other, in a random order: their order is unspecified. Semantics and scopes
    do not matter here, since warps advance one at a time; .acquire and .release order nothing for shared
    memory (see the README's limits)."""
    reduction = d.ins.parts[0] == "red"
    type_name = d.mods.type(
        "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64", "f16", "bf16", "f16x2", "bf16x2"
    )
    d.mods.take("relaxed", "acquire", "release", "acq_rel")
    d.mods.take(*SCOPES)
    space = d.mods.take(*SPACES) or "generic"
    names = tuple(ATOMICS) + (() if reduction else ("exch", "cas", "inc", "dec"))
    name = d.mods.need(*names)
    if type_name in ("f16", "bf16", "f16x2", "bf16x2"):
        d.mods.need("noftz")
    vector = d.mods.take("v2", "v4", "v8")
    if vector and not reduction:
        raise UnsupportedInstruction("atom on vectors")
    if d.mods.flag("L2::cache_hint"):
        d.source(d.operands[-1], "b64")
        d.operands = d.operands[:-1]
    operands = d.operands if reduction else d.operands[1:]
    dest = -1 if reduction else d.dest(d.operands[0], type_name)
    address = d.address_reader(operands[0])
    values = d.sources(operands[1], type_name)
    compared = d.source(operands[1], type_name) if name == "cas" else -1
    if name == "cas":
        values = d.sources(operands[2], type_name)
    dtype = np.dtype(NUMPY[type_name])
    size = dtype.itemsize * len(values)
    combine = _combiner(name, type_name)

    def run(warp, lanes):
        active = lanes_array(warp.active).nonzero()[0].tolist()
        rows = warp.views[type_name]
        addresses = address(warp)
        order = warp.cta.cluster.device.random.sample(active, len(active))
        old = np.zeros((32, len(values)), dtype)
        for lane in order:
            at = addresses[lane : lane + 1]
            old[lane] = load_bytes(warp, space, at, size).view(dtype)[0]
            new = np.array(
                [
                    combine(o, rows[v][lane], rows[compared][lane] if name == "cas" else None)
                    for o, v in zip(old[lane], values, strict=False)
                ],
                dtype,
            )
            store_bytes(warp, space, at, new.view(np.uint8).reshape(1, -1))
        warp.cta.cluster.device.counters["atomic operations"] += len(active)
        if dest >= 0:
            np.copyto(rows[dest], old[:, 0], where=lanes)

    op = d.done(run)
    op.writes = tuple(w for w in op.writes if w >= 0)
    return op


def _combiner(name: str, type_name: str):
    if name == "exch":
        return lambda o, v, c: v
    if name == "cas":
        return lambda o, v, c: v if o == c else o
    if name == "inc":
        return lambda o, v, c: 0 if o >= v else o + 1
    if name == "dec":
        return lambda o, v, c: v if o == 0 or o > v else o - 1
    ufunc = ATOMICS[name]
    if type_name in ("f16x2", "bf16x2", "bf16"):

        def paired(o, v, c):
            a, b = (np.array([x]).view(np.uint16) for x in (o, v))
            if type_name.startswith("bf16"):
                r = to_bf16(ufunc(from_bf16(a), from_bf16(b)))
            else:
                r = ufunc(a.view(np.float16), b.view(np.float16)).view(np.uint16)
            return r.view(NUMPY[type_name])[0]

        return paired
    return lambda o, v, c: ufunc(o, v)


def _matrix(d):
    """Common part of ldmatrix and stmatrix of 8x8 matrices of 16-bit elements."""
    d.mods.need("sync")
    d.mods.need("aligned")
    d.mods.need("m8n8")
    count = int(d.mods.need("x1", "x2", "x4")[1])
    transposed = d.mods.flag("trans")
    space = d.mods.take("shared", "shared::cta") or "generic"
    d.mods.type("b16")
    return count, transposed, space


@instruction("stmatrix")
def _stmatrix(d):
    """Row r of matrix j is stored at the address in lane 8 j + r; lane l holds elements (l / 4, 2 (l % 4)
    + {0, 1})."""
    count, transposed, space = _matrix(d)
    address = d.address_reader(d.operands[0])
    sources = d.sources(d.operands[1], "b32")

    def run(warp, lanes):
        rows = warp.views["b32"]
        values = np.empty((count, 8, 8), np.uint16)
        for j in range(count):
            m = rows[sources[j]].view(np.uint16).reshape(8, 8)
            values[j] = m.T if transposed else m
        store_bytes(warp, space, address(warp)[: 8 * count], values.reshape(8 * count, 8).view(np.uint8))

    return d.done(run, COLLECTIVE)


@instruction("ldmatrix")
def _ldmatrix(d):
    count, transposed, space = _matrix(d)
    dests = d.dests(d.operands[0], "b32")
    address = d.address_reader(d.operands[1])

    def run(warp, lanes):
        raw = load_bytes(warp, space, address(warp)[: 8 * count], 16).view(np.uint16).reshape(count, 8, 8)
        rows = warp.views["b32"]
        for j in range(count):
            m = raw[j].T if transposed else raw[j]
            rows[dests[j]][:] = np.ascontiguousarray(m).reshape(32, 2).view(np.uint32)[:, 0]

    return d.done(run, COLLECTIVE)
