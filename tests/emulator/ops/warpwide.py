"""Instructions in which the lanes of a warp exchange values (PTX ISA 9.7.9 shfl.sync, 9.7.13 vote,
match, activemask, redux, elect, bar.warp.sync, 9.7.14 movmatrix)."""

from __future__ import annotations

import functools

import numpy as np

from .. import ptx
from ..faults import Fault, UnsupportedInstruction
from ..program import COLLECTIVE, instruction
from ..warp import FULL, LANES, bits_of, lanes_array


def membermask(d, operand) -> None:
    """The instruction waits for the live lanes of its membermask; all must name the same one."""
    number = d.source(operand, "b32")
    d.op.collective_mask = number


def check_member(warp, number: int) -> int:
    mask = warp.uniform("u32", number, warp.active, "membermask")
    if warp.active & ~mask:
        raise Fault(
            "divergence",
            f"lanes {warp.active & ~mask:#010x} execute this without being in its membermask {mask:#010x}",
        )
    if mask & warp.live & ~warp.active:
        raise Fault(
            "divergence",
            f"membermask {mask:#010x}, but only lanes {warp.active:#010x} of {warp.live:#010x} execute this",
        )
    return mask


@functools.lru_cache(maxsize=4096)
def _source_lanes(mode: str, by_row: bytes, clamp_row: bytes, active: int):
    """The lane that each lane reads, whether it lies in its segment (where not, a lane reads itself), and a
    mask of the lanes that active ones read. by_row, clamp_row: int32 of each lane."""
    by, clamp = np.frombuffer(by_row, np.int32), np.frombuffer(clamp_row, np.int32)
    segment, limit = (clamp >> 8) & 31, clamp & 31
    low = LANES & segment
    if mode == "idx":
        source = low | (by & 31 & ~segment)
    elif mode == "bfly":
        source = LANES ^ (by & 31)
    else:
        source = LANES + (by & 31) * (-1 if mode == "up" else 1)
    high = low | (limit & ~segment)
    inside = source >= high if mode == "up" else source <= high
    source = np.where(inside, source, LANES)
    used = np.bitwise_or.reduce(np.uint32(1) << source[lanes_array(active)].astype(np.uint32))
    return source, inside, int(used)


@instruction("shfl")
def _shfl(d):
    d.mods.need("sync")
    mode = d.mods.need("up", "down", "bfly", "idx")
    d.mods.type("b32")
    d.count(5)
    first, pred = d.operands[0], -1
    if isinstance(first, ptx.Pair):
        pred = d.dest(first.second, "pred")
        first = first.first
    dest = d.dest(first, "b32")
    # A lane's source value is only needed where some lane reads it, so validity is checked at the source
    # lanes.
    a = d.source(d.operands[1], "b32", checked=False)
    b, c = d.source(d.operands[2], "u32"), d.source(d.operands[3], "u32")
    membermask(d, d.operands[4])
    mask_row = d.op.collective_mask

    def run(warp, lanes):
        check_member(warp, mask_row)
        rows = warp.views["u32"]
        source, inside, used = _source_lanes(mode, rows[b].tobytes(), rows[c].tobytes(), warp.active)
        if used & ~warp.active:
            raise Fault(
                "value", f"shfl reads from lanes {used & ~warp.active:#010x}, which do not execute it"
            )
        if warp.valid[a] & used != used:
            warp.undefined(a, used)
        if dest >= 0:
            np.copyto(rows[dest], rows[a][source], where=lanes)
        if pred >= 0:
            np.copyto(warp.views["pred"][pred], inside, where=lanes)

    op = d.done(run, COLLECTIVE)
    op.writes = tuple(w for w in op.writes if w >= 0)
    return op


def need_whole_warp(warp, what: str) -> None:
    """For instructions whose operands are spread over all 32 lanes: none may have exited."""
    if warp.active != FULL:
        raise Fault("divergence", f"{what} needs all 32 lanes, and lanes {warp.active:#010x} execute it")


@instruction("movmatrix")
def _movmatrix(d):
    """Transposes an 8x8 matrix of 16-bit elements: lane l holds elements (l / 4, 2 (l % 4) + {0, 1}) of the
    source and of the result."""
    for modifier in ("sync", "aligned", "m8n8", "trans"):
        d.mods.need(modifier)
    d.mods.type("b16")
    d.count(2)
    dest, source = d.dest(d.operands[0], "b32"), d.source(d.operands[1], "b32")

    def run(warp, lanes):
        need_whole_warp(warp, "movmatrix")
        rows = warp.views["u32"]
        matrix = rows[source].view(np.uint16).reshape(8, 8)
        rows[dest][:] = np.ascontiguousarray(matrix.T).view(np.uint32).reshape(32)

    return d.done(run, COLLECTIVE)


@instruction("elect")
def _elect(d):
    """Elects one lane of the membermask. Which one is up to the implementation, the same for the same
    mask; so a seed decides."""
    d.mods.need("sync")
    d.count(2)
    pair = d.operands[0]
    if not isinstance(pair, ptx.Pair):
        raise UnsupportedInstruction("elect needs d|p")
    dest, pred = d.dest(pair.first, "b32"), d.dest(pair.second, "pred")
    membermask(d, d.operands[1])
    mask_row = d.op.collective_mask

    def run(warp, lanes):
        check_member(warp, mask_row)
        wanted = warp.cta.cluster.device.elected
        above = warp.active >> wanted << wanted
        chosen = above or warp.active
        leader = (chosen & -chosen).bit_length() - 1
        if dest >= 0:
            np.copyto(warp.views["u32"][dest], np.uint32(leader), where=lanes)
        if pred >= 0:
            np.copyto(warp.views["pred"][pred], leader == LANES, where=lanes)

    op = d.done(run, COLLECTIVE)
    op.writes = tuple(w for w in op.writes if w >= 0)
    return op


@instruction("vote")
def _vote(d):
    d.mods.need("sync")
    mode = d.mods.need("all", "any", "uni", "ballot")
    d.mods.type("b32" if mode == "ballot" else "pred")
    operand = d.operands[1]
    negate = isinstance(operand, ptx.Not)
    source = d.source(operand.reg if isinstance(operand, ptx.Not) else operand, "pred")
    dest = d.dest(d.operands[0], "b32" if mode == "ballot" else "pred")
    membermask(d, d.operands[2])
    mask_row = d.op.collective_mask

    def run(warp, lanes):
        check_member(warp, mask_row)
        bits = bits_of(warp.views["pred"][source])
        bits = (~bits if negate else bits) & warp.active
        if mode == "ballot":
            np.copyto(warp.views["u32"][dest], np.uint32(bits), where=lanes)
        else:
            value = {"all": bits == warp.active, "any": bits != 0, "uni": bits in (0, warp.active)}[mode]
            np.copyto(warp.views["pred"][dest], value, where=lanes)

    return d.done(run, COLLECTIVE)


@instruction("match")
def _match(d):
    d.mods.need("sync")
    d.mods.need("any")
    type_name = d.mods.type("b32", "b64")
    dest, source = d.dest(d.operands[0], "b32"), d.source(d.operands[1], type_name)
    membermask(d, d.operands[2])
    mask_row = d.op.collective_mask

    def run(warp, lanes):
        check_member(warp, mask_row)
        row = warp.views[type_name][source]
        value = np.array([bits_of(row == x) & warp.active for x in row], np.uint32)
        np.copyto(warp.views["u32"][dest], value, where=lanes)

    return d.done(run, COLLECTIVE)


@instruction("activemask")
def _activemask(d):
    d.mods.type("b32")
    dest = d.dest(d.operands[0], "b32")

    def run(warp, lanes):
        np.copyto(warp.views["u32"][dest], np.uint32(warp.active), where=lanes)

    return d.done(run)


@instruction("redux")
def _redux(d):
    """Integer reductions; on sm_100a also .min and .max of f32, where NaN operands are dropped unless .NaN
    (9.7.13)."""
    d.mods.need("sync")
    mode = d.mods.need("add", "min", "max", "and", "or", "xor")
    absolute, nan = d.mods.flag("abs"), d.mods.flag("NaN")
    type_name = d.mods.type("u32", "s32", "b32", "f32")
    if (type_name == "f32") != (mode in ("min", "max") and type_name == "f32") or (
        type_name != "f32" and (absolute or nan)
    ):
        raise UnsupportedInstruction(f"redux.{mode}.{type_name}")
    dest, source = d.dest(d.operands[0], type_name), d.source(d.operands[1], type_name)
    membermask(d, d.operands[2])
    mask_row = d.op.collective_mask
    reducers = {"add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    if type_name == "f32":
        reducers |= {"min": np.minimum if nan else np.fmin, "max": np.maximum if nan else np.fmax}
    else:
        reducers |= {"min": np.minimum, "max": np.maximum}
    ufunc = reducers[mode]

    def run(warp, lanes):
        check_member(warp, mask_row)
        row = warp.views[type_name][source][lanes_array(warp.active)]
        value = ufunc.reduce(np.abs(row) if absolute else row)
        np.copyto(warp.views[type_name][dest], value.astype(row.dtype), where=lanes)

    return d.done(run, COLLECTIVE)


def bar_warp_sync(d):
    """bar.warp.sync membermask: joins the lanes and orders their accesses; lanes of a warp share one clock
    here anyway."""
    d.mods.need("warp")
    d.mods.need("sync")
    membermask(d, d.operands[0])
    mask_row = d.op.collective_mask
    return d.done(lambda warp, lanes: check_member(warp, mask_row) and None, COLLECTIVE)
