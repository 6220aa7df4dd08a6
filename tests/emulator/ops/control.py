"""Control flow (PTX ISA 9.7.12) and instructions without effect here."""

from __future__ import annotations

from .. import ptx
from ..faults import Fault, UnsupportedInstruction
from ..program import BRANCH, EXIT, instruction


@instruction("bra")
def _bra(d):
    """.uni only promises that the branch does not diverge; a divergent one is a fault."""
    d.mods.flag("uni")
    d.count(1)
    label = d.operands[0]
    if not isinstance(label, ptx.Symbol) or label.name not in d.program.entry.labels:
        raise UnsupportedInstruction(f"branch target {label}")
    d.op.target = d.program.entry.labels[label.name]
    return d.done(lambda warp, lanes: None, BRANCH)


@instruction("ret", "exit")
def _ret(d):
    d.mods.flag("uni")
    return d.done(lambda warp, lanes: None, EXIT)


@instruction("trap")
def _trap(d):
    def run(warp, lanes):
        raise Fault("value", "trap")

    return d.done(run)


@instruction("nanosleep")
def _nanosleep(d):
    """Suspends for a while (PTX ISA 9.7.19): time is not modelled."""
    d.mods.type("u32")
    d.source(d.operands[0], "u32")
    return d.done(lambda warp, lanes: None)


@instruction("griddepcontrol")
def _griddepcontrol(d):
    """Programmatic dependent launch (PTX ISA 9.7.13). Launches run one after the other here; before its wait
    a warp must not rely on that, nor let the next launch begin, which relies on the end of all but this."""
    form = d.mods.need("launch_dependents", "wait")

    def run(warp, lanes):
        warp.cta.cluster.device.counters[f"griddepcontrol.{form}"] += 1
        if form == "launch_dependents":
            why = ": the next launch may begin while the one before this still runs"
            warp.check_not_early("griddepcontrol.launch_dependents", why)
        elif warp.active == warp.live:
            warp.may_be_early = False

    return d.done(run)


@instruction("pmevent")
def _pmevent(d):
    return d.done(lambda warp, lanes: None)
