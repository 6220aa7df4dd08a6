"""clusterlaunchcontrol: a running cluster takes over the work of one that has not started (PTX ISA 9.7.13).

The response in shared memory is opaque; here its four words are whether a cluster was cancelled and the ctaid
of its first CTA.
"""

from __future__ import annotations

import numpy as np

from ..faults import Fault, UnsupportedInstruction
from ..program import instruction
from .bulk import finish_load


@instruction("clusterlaunchcontrol")
def _clusterlaunchcontrol(d):
    forms = {"try_cancel": _try_cancel, "query_cancel": _query_cancel}
    return forms[d.mods.need(*forms)](d)


def _try_cancel(d):
    """Writes the response and completes 16 bytes at the mbarrier; .multicast::cluster::all in every CTA."""
    d.mods.need("async")
    d.mods.take("shared::cta")
    d.mods.need("mbarrier::complete_tx::bytes")
    everywhere = d.mods.flag("multicast::cluster::all")
    d.mods.type("b128")
    d.count(2)
    address, barrier = d.address_reader(d.operands[0]), d.address_reader(d.operands[1])

    def run(warp, lanes):
        active = warp.active
        if active & (active - 1):
            raise Fault(
                "divergence", f"try_cancel issued by lanes {active:#010x}: each would cancel a cluster"
            )
        lane = active.bit_length() - 1
        cluster, device = warp.cta.cluster, warp.cta.cluster.device
        cta, offset = warp.cta.peer(int(address(warp)[lane]))
        _, barrier_offset = warp.cta.peer(int(barrier(warp)[lane]))
        if offset % 16:
            raise Fault("misaligned", f"try_cancel: shared address {offset:#x} is not aligned to 16 bytes")
        response: list[np.ndarray] = []

        def answer():
            """The same in all CTAs of the cluster: decided when the first copy of the response is written."""
            if not response:
                response.append(np.array([0, *device.cancel_cluster(cluster.launch)], np.uint32))
                response[0][0] = int(response[0][1] != NONE)
            return response[0].view(np.uint8).reshape(1, 16)

        clock = warp.clock.copy()
        for target in cluster.ctas if everywhere else [cta]:
            b = target.mbarrier(barrier_offset)
            what = "clusterlaunchcontrol.try_cancel"
            target.shared.check(offset, 16)
            target.shared.async_write(clock, b.agent, b.phase + 1, offset, 16, what)
            granules = np.array([offset >> 4])
            device.later(what, finish_load(target, granules, answer, b, b.phase, 16, clock))
        device.counters["clusterlaunchcontrol.try_cancel"] += 1
        device.progress += 1

    return d.done(run)


NONE = 0xFFFFFFFF  # in place of ctaid.x when no cluster was left to cancel


def _query_cancel(d):
    form = d.mods.need(
        "is_canceled", "get_first_ctaid", "get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z"
    )
    if form == "get_first_ctaid":
        raise UnsupportedInstruction("query_cancel.get_first_ctaid of a vector")
    d.mods.type("b128")
    kind = d.mods.type("pred" if form == "is_canceled" else "b32")
    d.count(2)
    dest, handle = d.dest(d.operands[0], kind), d.source(d.operands[1], "b128")
    word = 0 if form == "is_canceled" else 1 + "xyz".index(form[-1])

    def run(warp, lanes):
        words = warp.views["b128"][handle].view(np.uint32).reshape(32, 4)[:, word]
        np.copyto(warp.views[kind][dest], words != 0 if kind == "pred" else words, where=lanes)

    return d.done(run)
