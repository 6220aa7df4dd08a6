"""The async proxy's copies: cp.async.bulk, cp.reduce.async.bulk, with tensor maps (TMA) and without (PTX ISA
9.7.9).

A load writes shared memory and then completes bytes at an mbarrier; a store reads shared memory and
completes through bulk groups. Data moves when the operation completes, which the scheduler delays as long
as it can; what the operation will touch is claimed when it is issued (ordering.py), so that anybody who
touches it too early is found.
"""

from __future__ import annotations

import numpy as np

from .. import ptx
from ..descriptors import TensorMap, decode_tensor_map, linear_granules
from ..faults import Fault, UnsupportedInstruction
from ..launches import Words
from ..program import NUMPY, PARAM_WINDOW, instruction
from ..warp import Blocked, lanes_array
from . import async_copy, exit_checks
from .arithmetic import from_bf16, to_bf16


class BulkGroups:
    """One warp's bulk groups, kept per lane, and the epochs of their reads of shared memory."""

    def __init__(self, warp):
        self.agent = warp.cta.cluster.ordering.warp_agent(warp.id, "bulk copy")
        self.open: dict[int, list] = {}
        self.committed: dict[int, list[list]] = {}

    def outstanding(self):
        for groups in (self.open, *(dict(enumerate(g)) for g in self.committed.values())):
            for copies in groups.values():
                yield from copies


class BulkCopy:
    """A store or reduction in flight."""

    __slots__ = ("epoch", "read_done", "what", "write_done")

    def __init__(self, epoch: int, what: str):
        self.epoch, self.what = epoch, what
        self.read_done = self.write_done = False


def groups_of(warp) -> BulkGroups:
    if "bulk" not in warp.state:
        warp.state["bulk"] = BulkGroups(warp)
    return warp.state["bulk"]


def issuing_lane(warp, registers) -> int:
    """The lane that issues. A whole warp with uniform operands counts as one issue: ptxas emits one
    uniform instruction."""
    active = warp.active
    lane = (active & -active).bit_length() - 1
    if active & (active - 1):
        if active != warp.live:
            raise Fault(
                "divergence",
                f"a bulk copy issued by lanes {active:#010x}: neither one lane nor the whole warp",
            )
        for view, number in registers:
            warp.uniform(view, number, active, "an operand of a bulk copy")
    return lane


def fetch_tensor_map(warp, address: int) -> TensorMap:
    if address >> 56 == PARAM_WINDOW >> 56:
        offset = address & 0xFFFFFFFF
        raw = warp.cta.params[offset : offset + 128]
        if len(raw) < 128:
            raise Fault("global-bounds", "tensor map beyond the kernel's parameters")
    else:
        memory = warp.cta.cluster.device.memory
        region = memory.find(address, address + 128)
        memory.touched.read.add_range(region, address, 128)
        raw = region.data[address - region.start :][:128]
    if address % 64:
        raise Fault("misaligned", f"tensor map at {address:#x} is not aligned to 64 bytes")
    return decode_tensor_map(raw.tobytes())


def clip_box(tm: TensorMap, memory, coordinates: list[int], touched: Words):
    """The part of a box that lies inside the tensor: (view of its bytes, slices of the box), or None if
    nothing does. `touched` gets its words.

    Both have the outermost dimension first and the contiguous one last, in bytes.
    """
    low = [max(0, -c) for c in coordinates]
    high = [min(b, s - c) for b, s, c in zip(tm.box, tm.size, coordinates, strict=False)]
    if any(h <= lo for lo, h in zip(low, high, strict=False)):
        return None
    start = tm.base + sum((c + lo) * st for c, lo, st in zip(coordinates, low, tm.stride, strict=False))
    counts = [h - lo for lo, h in zip(low, high, strict=False)]
    counts[0] *= tm.element_bytes
    strides = [1, *tm.stride[1:]]
    last = start + sum((n - 1) * st for n, st in zip(counts, strides, strict=False)) + 1
    region = memory.find(start, last)
    counts.reverse()
    strides.reverse()
    touched.add_box(region, start, counts, strides)
    view = np.lib.stride_tricks.as_strided(region.data[start - region.start :], counts, strides)
    slices = tuple(slice(lo, h) for lo, h in zip(low[:0:-1], high[:0:-1], strict=False))
    return view, (*slices, slice(low[0] * tm.element_bytes, high[0] * tm.element_bytes))


def load_box(tm: TensorMap, memory, coordinates: list[int]) -> np.ndarray:
    """The bytes of a box, zeros outside the tensor, as (granules, 16)."""
    box = np.zeros((*tm.box[:0:-1], tm.box[0] * tm.element_bytes), np.uint8)
    clipped = clip_box(tm, memory, coordinates, memory.touched.read)
    if clipped is not None:
        view, where = clipped
        box[where] = view
    return box.reshape(-1, 16)


def store_box(tm: TensorMap, memory, coordinates: list[int], data: np.ndarray, reduction: str | None) -> int:
    """Write or combine the part of the box inside the tensor; returns its bytes."""
    clipped = clip_box(tm, memory, coordinates, memory.touched.written)
    if clipped is None:
        return 0
    view, where = clipped
    box = data.reshape(*tm.box[:0:-1], tm.box[0] * tm.element_bytes)[where]
    view[...] = box if reduction is None else combine(view, box, tm.element, reduction)
    return view.size


def combine(old: np.ndarray, new: np.ndarray, element: str, reduction: str) -> np.ndarray:
    """Element-wise reduction of arrays of bytes (PTX ISA 9.7.9: .add .min .max .and .or .xor)."""
    old, new = np.ascontiguousarray(old), np.ascontiguousarray(new)
    ufunc = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[reduction]
    if element == "bf16":
        return to_bf16(ufunc(from_bf16(old.view(np.uint16)), from_bf16(new.view(np.uint16)))).view(np.uint8)
    dtype = NUMPY.get(element, np.uint32)
    return ufunc(old.view(dtype), new.view(dtype)).view(np.uint8)


@instruction("cp")
def _cp(d):
    reduction = None
    if d.mods.flag("reduce"):
        d.mods.need("async")
        d.mods.need("bulk")
        reduction = d.mods.need("add", "min", "max", "and", "or", "xor")
    else:
        d.mods.need("async")
        if "bulk" not in d.mods.left:
            return async_copy.decode(d)
        d.mods.need("bulk")
        if d.mods.flag("commit_group"):
            return _commit_group(d)
        if d.mods.flag("wait_group"):
            return _wait_group(d)
    prefetch = d.mods.flag("prefetch")
    tensor = d.mods.flag("tensor")
    rank = int(d.mods.need("1d", "2d", "3d", "4d", "5d")[0]) if tensor else 0
    d.mods.flag("tile")
    first_space = next((p for p in d.ins.parts if p.split("::")[0] in ("shared", "global")), "")
    spaces = [p for p in d.ins.parts if p in ("global", "shared::cta", "shared::cluster")]
    for space in spaces:
        d.mods.need(space)
    if prefetch:
        d.mods.flag("L2")
        d.mods.flag("L2::cache_hint")
        return d.done(lambda warp, lanes: None)
    operands = list(d.operands)
    if d.mods.flag("L2::cache_hint"):
        d.source(operands.pop(), "b64")
    if first_space.startswith("shared") and spaces[1:] == ["global"]:
        return _load(d, operands, rank)
    if first_space == "global" and spaces[1:] == ["shared::cta"]:
        return _store(d, operands, rank, reduction)
    raise UnsupportedInstruction(f"bulk copy between {spaces}")


def _tensor_operand(d, operand, rank: int):
    if not isinstance(operand, ptx.Address) or len(operand.coordinates) != rank:
        raise UnsupportedInstruction(f"tensor operand {operand}")
    return d.source(operand.base, "u64"), [d.source(c, "s32") for c in operand.coordinates]


def _tensor_map_and_coordinates(warp, lane: int, base: int, coordinates: list[int]):
    tm = fetch_tensor_map(warp, int(warp.views["u64"][base][lane]))
    if tm.rank != len(coordinates):
        raise Fault("descriptor", f"{len(coordinates)} coordinates for a tensor map of rank {tm.rank}")
    return tm, [int(warp.views["s32"][c][lane]) for c in coordinates]


def _load(d, operands, rank):
    """Global -> shared memory, completing at an mbarrier; .multicast::cluster writes at the same offset in
    each CTA of the mask and signals the mbarrier there; .cta_group::2 may signal the mbarrier of the CTA
    pair's other half (9.7.9)."""
    d.mods.need("mbarrier::complete_tx::bytes")
    multicast = d.mods.flag("multicast::cluster")
    pair = d.mods.take("cta_group::1", "cta_group::2") == "cta_group::2"
    destination = d.address_reader(operands[0])
    uniform = []
    if rank:
        base, coordinates = _tensor_operand(d, operands[1], rank)
        size_row = -1
        rest = operands[2:]
        uniform = [("u64", base), *(("u32", c) for c in coordinates)]
    else:
        source = d.address_reader(operands[1])
        size_row = d.source(operands[2], "u32")
        rest = operands[3:]
    barrier = d.address_reader(rest[0])
    mask_row = d.source(rest[1], "u16") if multicast else -1
    if len(rest) != (2 if multicast else 1):
        raise UnsupportedInstruction(f"{len(d.operands)} operands")

    def run(warp, lanes):
        lane = issuing_lane(warp, uniform)
        warp.check_not_early("a bulk copy")
        cluster, device = warp.cta.cluster, warp.cta.cluster.device
        target, offset = warp.cta.peer(int(destination(warp)[lane]))
        signal, signal_offset = warp.cta.peer(int(barrier(warp)[lane]))
        if rank:
            tm, at = _tensor_map_and_coordinates(warp, lane, base, coordinates)
            size, mode, align = tm.box_bytes, tm.swizzle, 128
            what = f"TMA load of box {tm.box} at {at}"
            read = lambda: load_box(tm, device.memory, at)  # noqa: E731
        else:
            address, size = int(source(warp)[lane]), int(warp.views["u32"][size_row][lane])
            mode, align = "none", 16
            if size % 16 or address % 16:
                raise Fault(
                    "misaligned", f"bulk copy of {size} bytes from {address:#x}: both must be multiples of 16"
                )
            what = f"bulk copy of {size} bytes from {address:#x}"

            def read():
                region = device.memory.find(address, address + size)
                device.memory.touched.read.add_range(region, address, size)
                return region.data[address - region.start :][:size].reshape(-1, 16).copy()

        if offset % align:
            raise Fault("misaligned", f"{what}: shared address {offset:#x} is not aligned to {align} bytes")
        targets = [target]
        if multicast:
            mask = int(warp.views["u16"][mask_row][lane])
            if mask >> len(cluster.ctas) or not mask:
                raise Fault("value", f"multicast mask {mask:#x} in a cluster of {len(cluster.ctas)}")
            targets = [c for c in cluster.ctas if mask >> c.rank & 1]
        granules = linear_granules(offset, size, mode)
        clock = warp.clock.copy()
        for cta in targets:
            if not multicast:
                owner = signal
                if owner is not cta and not (pair and owner.rank ^ 1 == cta.rank):
                    raise Fault(
                        "value",
                        f"{what}: the mbarrier is in CTA rank {owner.rank}, the destination in {cta.rank}",
                    )
            else:
                owner = cluster.ctas[cta.rank & ~1 | signal.rank & 1] if pair else cta
            cta.shared.check(offset, size)
            b = owner.mbarrier(signal_offset)
            cta.shared.async_write(warp.clock, b.agent, b.phase + 1, offset, size, what)
            device.later(what, finish_load(cta, granules, read, b, b.phase, size, clock))
        device.counters["bytes loaded by bulk copies"] += size
        device.counters["bytes written to shared memory by bulk copies"] += size * len(targets)
        device.progress += 1

    return d.done(run)


def finish_load(cta, granules, read, barrier, phase: int, size: int, issuer: np.ndarray):
    def finish():
        cta.shared.granules[granules] = read()
        barrier.complete_tx(size, phase, issuer)

    return finish


def _store(d, operands, rank, reduction):
    """Shared -> global memory, completing through a bulk group of the issuing thread (9.7.9)."""
    d.mods.need("bulk_group")
    uniform = []
    element = ""
    if rank:
        base, coordinates = _tensor_operand(d, operands[0], rank)
        uniform = [("u64", base), *(("u32", c) for c in coordinates)]
        size_row = -1
    else:
        destination = d.address_reader(operands[0])
        size_row = d.source(operands[2], "u32")
        if reduction:
            d.mods.flag("noftz")
            element = d.mods.type("f16", "bf16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64")
    source = d.address_reader(operands[1])
    if len(operands) != (2 if rank else 3):
        raise UnsupportedInstruction(f"{len(d.operands)} operands")

    def run(warp, lanes):
        lane = issuing_lane(warp, uniform)
        warp.check_not_early("a bulk copy")
        device = warp.cta.cluster.device
        cta, offset = warp.cta.peer(int(source(warp)[lane]))
        if cta is not warp.cta:
            raise Fault("value", "bulk store from another CTA's shared memory")
        verb = f"reduce-{reduction}" if reduction else "store"
        if rank:
            tm, at = _tensor_map_and_coordinates(warp, lane, base, coordinates)
            size, mode, align = tm.box_bytes, tm.swizzle, 128
            what = f"TMA {verb} of box {tm.box} at {at}"
            write = lambda data: store_box(tm, device.memory, at, data, reduction)  # noqa: E731
        else:
            address, size = int(destination(warp)[lane]), int(warp.views["u32"][size_row][lane])
            mode, align = "none", 16
            what = f"bulk {verb} of {size} bytes to {address:#x}"
            if size % 16 or address % 16:
                raise Fault("misaligned", f"{what}: size and address must be multiples of 16")

            def write(data):
                region = device.memory.find(address, address + size)
                device.memory.touched.written.add_range(region, address, size)
                old = region.data[address - region.start :][:size]
                flat = data.reshape(-1)
                old[:] = flat if reduction is None else combine(old, flat, element, reduction)
                return size

        if offset % align:
            raise Fault("misaligned", f"{what}: shared address {offset:#x} is not aligned to {align} bytes")
        cta.shared.check(offset, size)
        granules = linear_granules(offset, size, mode)
        groups = groups_of(warp)
        copy = BulkCopy(cta.cluster.ordering.advance(groups.agent), what)
        cta.shared.async_read(warp.clock, groups.agent, copy.epoch, granules, what)
        groups.open.setdefault(lane, []).append(copy)

        def read():
            data = cta.shared.granules[granules]
            copy.read_done = True
            device.later(what, lambda: finish(data))

        def finish(data):
            device.counters["bytes stored by bulk copies"] += write(data)
            copy.write_done = True

        device.later(what, read)
        device.progress += 1

    return d.done(run)


def _commit_group(d):
    d.count(0)

    def run(warp, lanes):
        groups = groups_of(warp)
        for lane in lanes_array(warp.active).nonzero()[0].tolist():
            groups.committed.setdefault(lane, []).append(groups.open.pop(lane, []))

    return d.done(run)


def _wait_group(d):
    """Wait until at most N of the executing threads' most recent bulk groups are pending; .read: until
    sources are read."""
    only_read = d.mods.flag("read")
    d.count(1)
    n = d.operands[0].value

    def run(warp, lanes):
        groups = groups_of(warp)
        active = lanes_array(warp.active).nonzero()[0].tolist()

        def done():
            for lane in active:
                committed = groups.committed.get(lane, [])
                for group in committed[: len(committed) - n if n else None]:
                    if not all(c.read_done if only_read else c.write_done for c in group):
                        return False
            return True

        if not done():
            return Blocked(
                lambda: f"waits for bulk groups ({sum(1 for _ in groups.outstanding())} copies outstanding)",
                done,
            )
        for lane in active:
            committed = groups.committed.get(lane, [])
            if len(committed) > n:
                del committed[: len(committed) - n]
        left = [c.epoch for c in groups.outstanding()]
        epoch = min(left) - 1 if left else int(warp.cta.cluster.ordering.epochs[groups.agent])
        warp.clock[0, groups.agent] = max(int(warp.clock[0, groups.agent]), epoch)
        return None

    return d.done(run)


def _check_exit(warp) -> None:
    if "bulk" in warp.state:
        for copy in warp.state["bulk"].outstanding():
            from ..warp import raise_or_ignore

            raise_or_ignore(
                warp,
                "pending-at-exit",
                f"warp {warp.index} exits before the source of its {copy.what} was known to be read",
            )


exit_checks.append(_check_exit)
