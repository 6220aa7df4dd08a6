"""tcgen05: tensor memory and the matrix multiply that accumulates in it (PTX ISA 9.7.16), kind::f16 and
8-bit kind::f8f6f4 with f32 accumulators.

tcgen05.mma goes to the tensor pipe of the issuing CTA, which executes in order and as late as the
scheduler likes; tcgen05.commit follows in the same order and arrives at its mbarriers. tcgen05.ld delivers
at tcgen05.wait::ld and owns its registers until then. TMEM cells and shared memory are claimed when an
instruction is issued (ordering.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .. import ptx
from ..descriptors import (
    decode_instruction_descriptor,
    decode_matrix_descriptor,
    read_tile,
    tile_granules,
    to_float32,
)
from ..faults import Fault, UnsupportedInstruction
from ..ordering import CONTROL, TENSOR, after_thread_sync, before_thread_sync
from ..program import COLLECTIVE, instruction
from ..tmem import TensorMemory
from ..warp import FULL, Blocked
from . import exit_checks
from .memory import store_bytes
from .warpwide import need_whole_warp
from .wgmma import fragment, multiplied

ALL = slice(0, 4)  # all four quarters of the 128 lanes


def tmem_of(cta) -> TensorMemory:
    if cta.tmem is None:
        cta.tmem = TensorMemory(cta.rank, cta.cluster.ordering, cta.columns)
    return cta.tmem


@instruction("tcgen05")
def _tcgen05(d):
    forms = {
        "alloc": _alloc, "dealloc": _dealloc, "relinquish_alloc_permit": _relinquish, "mma": _mma,
        "commit": _commit, "ld": _ld, "st": _st, "wait::ld": _wait_ld, "wait::st": _wait_st,
    }  # fmt: skip
    form = d.mods.need(*forms, "fence::before_thread_sync", "fence::after_thread_sync")
    return forms[form](d) if form in forms else _fence(d, form)


def _group(d) -> int:
    return int(d.mods.need("cta_group::1", "cta_group::2")[-1])


def _pair(cta, group: int) -> list:
    """The CTAs that a cta_group works on: the CTA alone, or the pair whose ranks differ in the last bit,
    even rank first."""
    if group == 1:
        return [cta]
    if len(cta.cluster.ctas) % 2:
        raise Fault("value", ".cta_group::2 in a cluster with an odd number of CTAs")
    return [cta.cluster.ctas[cta.rank & ~1], cta.cluster.ctas[cta.rank | 1]]


# ---- allocation (9.7.16)


def _alloc(d):
    """One warp of the CTA, or one of each CTA of the pair, allocates; the column address is written to
    shared memory."""
    group = _group(d)
    d.mods.need("sync")
    d.mods.need("aligned")
    space = d.mods.take("shared::cta") or "generic"
    d.mods.type("b32")
    d.count(2)
    address, count = d.address_reader(d.operands[0]), d.source(d.operands[1], "u32")

    def run(warp, lanes):
        columns = warp.uniform("u32", count, FULL, "number of columns")
        TensorMemory.check_size(columns)
        ctas = _pair(warp.cta, group)
        if tmem_of(warp.cta).relinquished:
            raise Fault("tmem-alloc", f"alloc after relinquish_alloc_permit in CTA rank {warp.cta.rank}")
        requests = warp.cta.cluster.__dict__.setdefault("tmem_requests", {})
        key = (ctas[0].rank, group)
        request = requests.setdefault(key, {"columns": columns, "ranks": set(), "first": None})
        if request["columns"] != columns:
            raise Fault("mismatch", f"the CTAs of a pair allocate {request['columns']} and {columns} columns")
        request["ranks"].add(warp.cta.rank)
        if request["first"] is None:

            def possible():
                if len(request["ranks"]) < len(ctas) or not all(c.columns.permits(c) for c in ctas):
                    return None
                taken = np.logical_or.reduce([c.columns.taken for c in ctas])
                return next((f for f in range(0, 512, columns) if not taken[f : f + columns].any()), None)

            def why():
                asked = f"CTA ranks that asked: {sorted(request['ranks'])}"
                free = min(512 - int(c.columns.taken.sum()) for c in ctas)
                holder = next((c.columns.holder for c in ctas if not c.columns.permits(c)), None)
                permit = f", CTA {holder.ctaid} of the SM has the permit" if holder else ""
                return f"waits to allocate {columns} TMEM columns ({asked}, {free} are free{permit})"

            first = possible()
            if first is None:
                return Blocked(why, lambda: request["first"] is not None or possible() is not None)
            for cta in ctas:
                cta.columns.holder = cta
                tmem_of(cta).allocate(first, columns)
            request["first"] = first
            warp.cta.cluster.device.progress += 1
        first = request["first"]
        request["ranks"].discard(warp.cta.rank)
        if not request["ranks"]:
            del requests[key]
        where = address(warp)[:1]
        store_bytes(warp, space, where, np.array([[first]], np.uint32).view(np.uint8))
        return None

    return d.done(run, COLLECTIVE)


def _dealloc(d):
    group = _group(d)
    d.mods.need("sync")
    d.mods.need("aligned")
    d.mods.type("b32")
    d.count(2)
    address, count = d.source(d.operands[0], "u32"), d.source(d.operands[1], "u32")

    def run(warp, lanes):
        at = warp.uniform("u32", address, FULL, "TMEM address")
        columns = warp.uniform("u32", count, FULL, "number of columns")
        TensorMemory.check_size(columns)
        _pair(warp.cta, group)
        tmem = tmem_of(warp.cta)
        tmem.free(at, columns)
        tmem.note_dealloc(warp, slice(at, at + columns))
        tmem.forget(slice(at, at + columns))
        warp.cta.cluster.device.progress += 1

    return d.done(run, COLLECTIVE)


def _relinquish(d):
    group = _group(d)
    d.mods.need("sync")
    d.mods.need("aligned")

    def run(warp, lanes):
        _pair(warp.cta, group)
        tmem_of(warp.cta).relinquished = True
        warp.cta.columns.release(warp.cta)
        warp.cta.cluster.device.progress += 1

    return d.done(run, COLLECTIVE)


# ---- matrix multiply (9.7.16)


def _mma(d):
    """D (+)= A B for M 128 in one CTA, or M 128 or 256 over a pair, with half of A's rows, of B's and of D's
    in each CTA.

    A CTA with 128 rows keeps row i in lane i. With 64 rows (M 128 over a pair) lanes 0..63 hold the first
    half of the columns and lanes 64..127 the second (9.7.16, data-path layouts).
    """
    if d.mods.take("sp", "ws"):
        raise UnsupportedInstruction("sparse or weight-stationary mma")
    group = _group(d)
    kind = d.mods.need("kind::f16", "kind::f8f6f4").removeprefix("kind::")
    depth = 16 if kind == "f16" else 32  # of k: 32 bytes either way
    d.mods.take("collector::a::discard", "collector::a::lastuse", "collector::a::fill", "collector::a::use")
    d_address = _tmem_address(d, d.operands[0])
    from_tmem = isinstance(d.operands[1], ptx.Address)
    a_operand = _tmem_address(d, d.operands[1]) if from_tmem else d.source(d.operands[1], "u64")
    b_desc, idesc = d.source(d.operands[2], "u64"), d.source(d.operands[3], "u32")
    rest = list(d.operands[4:])
    disabled = d.sources(rest.pop(0), "u32") if isinstance(rest[0], ptx.Vector) else []
    enable = d.source(rest.pop(0), "pred")
    if rest:
        raise UnsupportedInstruction("scale-input-d")
    if disabled and len(disabled) != 4 * group:
        raise UnsupportedInstruction(f"disable-output-lane of {len(disabled)} words")

    def run(warp, lanes):
        active = warp.active
        if active & (active - 1):
            raise Fault("divergence", f"tcgen05.mma issued by lanes {active:#010x}: every one would issue it")
        lane = active.bit_length() - 1
        views = warp.views
        if any(views["u32"][r][lane] for r in disabled):
            raise Fault("value", "disable-output-lane other than zero is not modelled")
        shape = decode_instruction_descriptor(int(views["u32"][idesc][lane]), kind)
        cluster, device, rank = warp.cta.cluster, warp.cta.cluster.device, warp.cta.rank
        step = 16 if group == 1 else 32
        if (
            shape.m not in (128, 128 * group)
            or shape.n % step
            or not 16 <= shape.n <= 256
            or shape.accumulator != "f32"
        ):
            raise Fault("value", f"tcgen05.mma.cta_group::{group} with {shape} is not modelled")
        if rank & (group - 1):
            raise Fault(
                "value", "tcgen05.mma.cta_group::2 issued from the odd CTA of the pair is not modelled"
            )
        ctas = _pair(warp.cta, group)
        accumulate = bool(views["pred"][enable][lane])
        rows = shape.m // group
        if from_tmem and rows != 128:
            raise Fault("value", "operand A in TMEM with M 128 over a pair is not modelled")
        destination = d_address(warp, lane)
        if destination >> 16:
            raise Fault("value", f"D at TMEM address {destination:#x}: the lane must be 0 for M {shape.m}")
        what = f"tcgen05.mma m{shape.m}n{shape.n}k{depth}"
        agent = cluster.ordering.pipe(rank)
        epoch = cluster.ordering.advance(agent)
        b = tile_granules(
            decode_matrix_descriptor(int(views["u64"][b_desc][lane]), True),
            shape.n // group,
            16,
            shape.b_k_major,
        )
        if from_tmem:
            a_column = a_operand(warp, lane) & 0xFFFF
            a = None
        else:
            a_column = -1
            a = tile_granules(
                decode_matrix_descriptor(int(views["u64"][a_operand][lane]), True), rows, 16, shape.a_k_major
            )
        width = shape.n if rows == 128 else shape.n // 2
        columns = slice(destination, destination + width)
        for cta in ctas:
            shared, tmem = cta.shared, tmem_of(cta)
            for name, granules in (("A", a), ("B", b)):
                if granules is not None:
                    low, high = int(granules.min()), int(granules.max())
                    shared.check(low * 16, (high - low + 1) * 16)
                    shared.async_read(warp.clock, agent, epoch, granules, f"{what}, operand {name},")
            if from_tmem:
                tmem.check(a_column, 8)
                tmem.note_read(warp, agent, epoch, ALL, slice(a_column, a_column + 8), f"{what}, operand A,")
            tmem.check(destination, width)
            tmem.note_write(warp, agent, epoch, ALL, columns, what)

        def execute():
            right = np.concatenate(
                [to_float32(read_tile(c.shared, b, shape.b_k_major), shape.b) for c in ctas]
            )
            right = -right if shape.negate_b else right
            for cta in ctas:
                tmem = tmem_of(cta)
                if a is not None:
                    left = to_float32(read_tile(cta.shared, a, shape.a_k_major), shape.a)
                else:  # 32 bits along k in each column
                    left = to_float32(
                        tmem.read(slice(0, 128), slice(a_column, a_column + 8)).view(np.uint16), shape.a
                    )
                product = multiplied(-left if shape.negate_a else left, right)
                if rows == 64:
                    product = np.concatenate([product[:, :width], product[:, width:]])
                if accumulate:
                    product += tmem.read(slice(0, 128), columns).view(np.float32)
                tmem.write(slice(0, 128), columns, product.view(np.uint32))

        device.later(what, execute, queue=agent_queue(cluster, agent))
        device.counters["tcgen05.mma"] += 1
        device.progress += 1

    return d.done(run)


def agent_queue(cluster, agent: int):
    """The order in which one tensor pipe works."""
    return (id(cluster), agent)


def _tmem_operand(d, operand) -> tuple[int, int]:
    """(register number, offset) of a TMEM address."""
    if not isinstance(operand, ptx.Address) or not isinstance(operand.base, ptx.Reg):
        raise UnsupportedInstruction(f"TMEM address {operand}")
    return d.source(operand.base, "u32"), operand.offset


def _tmem_address(d, operand):
    """The address that a lane gives."""
    number, offset = _tmem_operand(d, operand)
    return lambda warp, lane: (int(warp.views["u32"][number][lane]) + offset) & 0xFFFFFFFF


def _commit(d):
    """Arrives once at each mbarrier when all mma issued before it are done (9.7.16)."""
    group = _group(d)
    d.mods.need("mbarrier::arrive::one")
    d.mods.take("shared::cluster")
    multicast = d.mods.flag("multicast::cluster")
    d.mods.type("b64")
    d.count(2 if multicast else 1)
    address = d.address_reader(d.operands[0])
    mask_row = d.source(d.operands[1], "u16") if multicast else -1

    def run(warp, lanes):
        active = warp.active
        if active & (active - 1):
            raise Fault(
                "divergence", f"tcgen05.commit issued by lanes {active:#010x}: every one would arrive"
            )
        lane = active.bit_length() - 1
        cluster = warp.cta.cluster
        _pair(warp.cta, group)
        cta, offset = warp.cta.peer(int(address(warp)[lane]))
        targets = [cta]
        if multicast:
            mask = int(warp.views["u16"][mask_row][lane])
            if not mask or mask >> len(cluster.ctas):
                raise Fault("value", f"multicast mask {mask:#x} in a cluster of {len(cluster.ctas)}")
            targets = [c for c in cluster.ctas if mask >> c.rank & 1]
        agent = cluster.ordering.pipe(warp.cta.rank)
        clock = np.zeros_like(warp.clock)
        clock[CONTROL] = warp.clock[CONTROL]
        np.maximum(warp.clock[TENSOR], warp.tensor_view, out=clock[TENSOR])
        clock[:, agent] = cluster.ordering.epochs[agent]
        for target in targets:
            target.mbarrier(offset)

            def arrive(target=target):
                if target.ended:
                    ended = f"tcgen05.commit arrives at CTA {target.ctaid}, which has ended"
                    cluster.device.report(Fault("pending-at-exit", ended))
                    return
                target.mbarrier(offset).arrive(1, clock)

            cluster.device.later("tcgen05.commit", arrive, queue=agent_queue(cluster, agent))
        cluster.device.counters["tcgen05.commit"] += 1
        cluster.device.progress += 1

    return d.done(run)


# ---- loads and stores of TMEM by warps (9.7.16)


class Shape(NamedTuple):
    """The cells that one access moves, and how registers hold them."""

    lanes: int
    columns: int
    registers: int
    fragment: Callable[[np.ndarray], np.ndarray]  # cells (lanes, columns) -> (registers, 32 threads)


class TensorLoads:
    """One warp's tcgen05.ld whose registers are not yet delivered."""

    def __init__(self, warp):
        self.agent = warp.cta.cluster.ordering.warp_agent(warp.id, "tcgen05.ld")
        self.pending: list[tuple[list[int], np.ndarray, Shape, slice, slice]] = []

    def deliver(self, warp) -> None:
        for registers, rows, shape, lanes, columns in self.pending:
            warp.files[4][rows] = shape.fragment(tmem_of(warp.cta).read(lanes, columns))
            for r in registers:
                warp.valid[r] = FULL
            warp.disown(registers)
        self.pending = []
        warp.clock[0, self.agent] = warp.cta.cluster.ordering.epochs[self.agent]
        warp.tensor_view[self.agent] = warp.clock[0, self.agent]


def _shape(d, *names: str) -> Shape:
    """One of the shapes `names`, with its repeat count (9.7.16, data movement shapes).

    32x32b: register j of thread i is lane i of the warp's quarter, column j.
    16x256b: register 4 j + 2 h + e of thread i is lane i / 4 + 8 h of the half quarter that the address
    names, column 8 j + 2 (i % 4) + e. The ISA shows this in a figure only; CUTLASS writes it as a layout:
    DstLayout of Copy_Traits<SM100_TMEM_LOAD_16dp256b*x> in include/cute/atom/copy_traits_sm100.hpp.
    """
    d.mods.need("sync")
    d.mods.need("aligned")
    name = d.mods.need(*names)
    repeat = int(d.mods.need("x1", "x2", "x4", "x8", "x16", "x32", "x64", "x128")[1:])
    d.mods.type("b32")
    d.count(2)
    if name == "32x32b":
        return Shape(32, repeat, repeat, np.transpose)
    if repeat > 32:
        raise UnsupportedInstruction(f"{name}.x{repeat}: x32 is the largest, of 128 registers")
    return Shape(16, 8 * repeat, 4 * repeat, fragment)


def _window(warp, tmem: TensorMemory, address: int, shape: Shape) -> tuple[slice, slice, slice]:
    """(quarters, lanes, columns) of an access; a warp may only touch the quarter of its rank in the
    warpgroup (9.7.16), and a shape of 16 lanes the first or the second half of that."""
    need_whole_warp(warp, "tcgen05.ld or .st")
    quarter, lane, column = warp.index % 4, address >> 16, address & 0xFFFF
    if not 32 * quarter <= lane <= 32 * quarter + 32 - shape.lanes:
        raise Fault(
            "tmem-bounds",
            f"TMEM lanes {lane}..{lane + shape.lanes}: warp {warp.index} may only access lanes"
            f" {32 * quarter}..{32 * quarter + 32}",
        )
    if lane % shape.lanes:
        raise Fault("misaligned", f"TMEM lane {lane} for a shape of {shape.lanes} lanes")
    tmem.check(column, shape.columns)
    return slice(quarter, quarter + 1), slice(lane, lane + shape.lanes), slice(column, column + shape.columns)


def _warp_address(d, operand):
    """The address that all lanes must share."""
    number, offset = _tmem_operand(d, operand)
    return lambda warp: (warp.uniform("u32", number, warp.active, "the TMEM address") + offset) & 0xFFFFFFFF


def _ld(d):
    shape = _shape(d, "32x32b", "16x256b")
    dests = d.dests(d.operands[0], "b32", checked=False)
    if len(dests) != shape.registers:
        raise UnsupportedInstruction(f"{len(dests)} destinations, expected {shape.registers}")
    address = _warp_address(d, d.operands[1])

    def run(warp, lanes):
        tmem = tmem_of(warp.cta)
        quarters, rows, columns = _window(warp, tmem, address(warp), shape)
        if "tcgen05.ld" not in warp.state:
            warp.state["tcgen05.ld"] = TensorLoads(warp)
        loads: TensorLoads = warp.state["tcgen05.ld"]
        epoch = warp.cta.cluster.ordering.advance(loads.agent)
        tmem.note_read(warp, loads.agent, epoch, quarters, columns, "tcgen05.ld")
        in_file = np.array([warp.program.row_in_file[r] for r in dests])
        loads.pending.append((dests, in_file, shape, rows, columns))
        warp.own(
            dests,
            "tcgen05-wait-ld",
            "it is the result of a tcgen05.ld that tcgen05.wait::ld has not waited for",
            loads.deliver,
        )
        warp.cta.cluster.device.counters["bytes read from TMEM by tcgen05.ld"] += 128 * shape.registers

    return d.done(run, COLLECTIVE)


def _st(d):
    shape = _shape(d, "32x32b")
    address = _warp_address(d, d.operands[0])
    sources = d.sources(d.operands[1], "b32")
    if len(sources) != shape.registers:
        raise UnsupportedInstruction(f"{len(sources)} sources, expected {shape.registers}")

    def run(warp, lanes):
        cluster, tmem = warp.cta.cluster, tmem_of(warp.cta)
        quarters, rows, columns = _window(warp, tmem, address(warp), shape)
        agent = cluster.ordering.warp_agent(warp.id, "tcgen05.st")
        epoch = cluster.ordering.advance(agent)
        tmem.note_write(warp, agent, epoch, quarters, columns, "tcgen05.st")
        values = np.stack([warp.views["u32"][s] for s in sources], 1)
        warp.state["tcgen05.st"] = warp.state.get("tcgen05.st", 0) + 1

        def finish():
            tmem.write(rows, columns, values)
            warp.state["tcgen05.st"] -= 1

        cluster.device.later("tcgen05.st", finish, queue=agent_queue(cluster, agent))
        cluster.device.counters["bytes written to TMEM by tcgen05.st"] += 128 * shape.registers

    return d.done(run, COLLECTIVE)


def _wait_ld(d):
    d.mods.need("sync")
    d.mods.need("aligned")

    def run(warp, lanes):
        if "tcgen05.ld" in warp.state:
            warp.state["tcgen05.ld"].deliver(warp)

    return d.done(run, COLLECTIVE)


def _wait_st(d):
    d.mods.need("sync")
    d.mods.need("aligned")

    def run(warp, lanes):
        if warp.state.get("tcgen05.st"):
            return Blocked(lambda: "waits for its tcgen05.st", lambda: not warp.state["tcgen05.st"])
        agent = warp.cta.cluster.ordering.warp_agent(warp.id, "tcgen05.st")
        warp.clock[0, agent] = warp.tensor_view[agent] = warp.cta.cluster.ordering.epochs[agent]
        return None

    return d.done(run, COLLECTIVE)


def _fence(d, form):
    """Orders tcgen05 operations with the execution-ordering operations of the thread (9.7.16):
    before_thread_sync those that are complete, for whoever waits for what comes next; after_thread_sync
    those to come, behind what the thread has waited for."""
    d.count(0)
    fence = before_thread_sync if form == "fence::before_thread_sync" else after_thread_sync
    return d.done(lambda warp, lanes: fence(warp.clock, warp.tensor_view))


def _check_exit(warp) -> None:
    if "tcgen05.ld" in warp.state and warp.state["tcgen05.ld"].pending:
        raise Fault(
            "pending-at-exit", f"warp {warp.index} exits with a tcgen05.ld that it has not waited for"
        )
    if warp.state.get("tcgen05.st"):
        raise Fault(
            "pending-at-exit", f"warp {warp.index} exits with a tcgen05.st that it has not waited for"
        )


exit_checks.append(_check_exit)
