"""cp.async of single elements, completing at an mbarrier (PTX ISA 9.7.9, "Non-bulk copy").

The data moves when the scheduler likes, in the order of a warp's instructions. The bytes are claimed when
the copy is issued (ordering.py): who waits at the mbarrier that cp.async.mbarrier.arrive.noinc names may
read them.
"""

from __future__ import annotations

import numpy as np

from .. import ptx
from ..faults import Fault, UnsupportedInstruction
from ..ordering import CONTROL
from ..warp import lanes_array
from . import exit_checks


def decode(d):
    if d.mods.flag("mbarrier"):
        return _arrive(d)
    cached = d.mods.need("ca", "cg")
    d.mods.need("shared", "shared::cta")
    d.mods.need("global")
    d.count(3, 4)
    destination, source = d.address_reader(d.operands[0]), d.address_reader(d.operands[1])
    size = d.operands[2].value if isinstance(d.operands[2], ptx.Imm) else 0
    if size not in ((4, 8, 16) if cached == "ca" else (16,)):
        raise UnsupportedInstruction(f"cp.async.{cached} of {size} bytes")
    present = d.source(d.operands[3], "u32") if len(d.operands) == 4 else -1

    def run(warp, lanes):
        cluster, active = warp.cta.cluster, lanes_array(warp.active)
        warp.check_not_early("cp.async")
        to, start = destination(warp)[active], source(warp)[active]
        cta, _ = warp.cta.peer(int(to[0]))
        if cta is not warp.cta or (to >> 24 != to[0] >> 24).any():
            raise Fault("value", "cp.async to another CTA's shared memory")
        offsets = to & 0xFFFFFF
        counts = warp.views["u32"][present][active] if present >= 0 else np.full(len(to), size)
        if (counts > size).any():
            raise Fault("value", f"cp.async of {size} bytes with a source of {int(counts.max())}")
        agent = cluster.ordering.warp_agent(warp.id, "cp.async")
        epoch = cluster.ordering.advance(agent)
        index = offsets[:, None] + np.arange(size)
        cta.shared.check_all(offsets, size, size)
        cta.shared.store(warp, offsets, cta.shared.data[index], (agent, epoch))
        warp.state["cp.async"] = warp.state.get("cp.async", 0) + 1

        def finish():
            values = np.zeros((len(to), size), np.uint8)
            for lane, (first, count) in enumerate(zip(start.tolist(), counts.tolist(), strict=True)):
                if count:
                    memory = cluster.device.memory
                    region = memory.find(first, first + count)
                    memory.touched.read.add_range(region, first, count)
                    values[lane, :count] = region.data[first - region.start :][:count]
            cta.shared.data[index] = values
            warp.state["cp.async"] -= 1

        cluster.device.later(f"cp.async of warp {warp.index}", finish, queue=_queue(cluster, agent))
        cluster.device.counters["bytes copied by cp.async"] += int(counts.sum())

    return d.done(run)


def _queue(cluster, agent: int):
    return (id(cluster), agent)


def _arrive(d):
    """Each thread arrives once, when its earlier cp.async are done; with .noinc the count includes it."""
    d.mods.need("arrive")
    d.mods.need("noinc")
    d.mods.take("shared", "shared::cta")
    d.mods.type("b64")
    d.count(1)
    address = d.address_reader(d.operands[0])

    def run(warp, lanes):
        cluster = warp.cta.cluster
        agent = cluster.ordering.warp_agent(warp.id, "cp.async")
        clock = np.zeros_like(warp.clock)
        clock[CONTROL:] = warp.clock[CONTROL:]
        clock[:, agent] = cluster.ordering.epochs[agent]
        barriers = []
        for where in address(warp)[lanes_array(warp.active)].tolist():
            cta, offset = warp.cta.peer(where)
            barriers.append(cta.mbarrier(offset, warp))

        def finish():
            for barrier in barriers:
                barrier.arrive(1, clock)

        what = f"cp.async.mbarrier.arrive of warp {warp.index}"
        cluster.device.later(what, finish, queue=_queue(cluster, agent))
        cluster.device.progress += 1

    return d.done(run)


def _check_exit(warp) -> None:
    if warp.state.get("cp.async"):
        message = f"warp {warp.index} exits with a cp.async that it has not waited for"
        warp.cta.cluster.device.report(Fault("pending-at-exit", message))


exit_checks.append(_check_exit)
