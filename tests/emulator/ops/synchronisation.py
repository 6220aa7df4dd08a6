"""mbarrier, named and cluster barriers, fences, setmaxnreg (PTX ISA 9.7.13, 9.7.19)."""

from __future__ import annotations

import numpy as np

from ..barriers import MBarrier
from ..faults import Fault, UnsupportedInstruction
from ..ordering import TENSOR, acquire, new_epoch, proxy_fence, relaxed_release, release
from ..program import COLLECTIVE, instruction
from ..warp import Blocked, lanes_array
from .memory import SCOPES
from .warpwide import bar_warp_sync

SHARED = ("shared", "shared::cta", "shared::cluster")


@instruction("mbarrier")
def _mbarrier(d):
    form = d.mods.need(
        "init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait"
    )
    decoders = {
        "init": _init,
        "inval": _inval,
        "arrive": _arrive,
        "expect_tx": _expect_tx,
        "test_wait": _wait,
        "try_wait": _wait,
    }
    if form not in decoders:
        raise UnsupportedInstruction(f"mbarrier.{form}")
    return decoders[form](d, form)


def each_lane(warp, lanes):
    return lanes_array(warp.active).nonzero()[0].tolist()


def _init(d, form):
    """mbarrier.init: the object becomes visible to other CTAs and to the async proxy by
    fence.mbarrier_init (9.7.13)."""
    d.mods.take(*SHARED)
    d.mods.type("b64")
    d.count(2)
    address, count = d.address_reader(d.operands[0]), d.source(d.operands[1], "u32")

    def run(warp, lanes):
        where, counts = address(warp), warp.views["u32"][count]
        for lane in each_lane(warp, lanes):
            cta, offset = warp.cta.peer(int(where[lane]))
            if cta is not warp.cta:
                raise Fault("mbarrier-init", "mbarrier.init on another CTA's shared memory")
            cta.shared.check(offset, 8)
            if offset % 8:
                raise Fault("misaligned", f"mbarrier at {offset:#x} is not aligned to 8 bytes")
            b = MBarrier(
                cta.rank,
                offset,
                int(counts[lane]),
                (warp.id, int(warp.clock[0, warp.id])),
                cta.cluster.ordering,
            )
            cta.mbarriers[offset] = b
            cta.shared.mbarrier_words[offset // 4 : offset // 4 + 2] = True
            warp.state.setdefault("unpublished", []).append(b)

    return d.done(run)


def _inval(d, form):
    d.mods.take(*SHARED)
    d.mods.type("b64")
    address = d.address_reader(d.operands[0])

    def run(warp, lanes):
        where = address(warp)
        for lane in each_lane(warp, lanes):
            cta, offset = warp.cta.peer(int(where[lane]))
            b = cta.mbarrier(offset, warp)
            if b.tx or b.waiting:
                raise Fault("pending-at-exit", f"mbarrier.inval while in use: {b.describe()}")
            del cta.mbarriers[offset]
            cta.shared.mbarrier_words[offset // 4 : offset // 4 + 2] = False

    return d.done(run)


def _arrive(d, form):
    """arrive, arrive.expect_tx (expect-tx first, then one arrival), remote arrivals; .release unless
    .relaxed (9.7.13)."""
    expects = d.mods.flag("expect_tx")
    ordered = d.mods.take("release", "relaxed") != "relaxed"
    d.mods.take("cta", "cluster")
    d.mods.take(*SHARED)
    d.mods.type("b64")
    d.count(1, 2, 3)
    operands = list(d.operands)
    state = -1
    if not hasattr(operands[0], "coordinates"):  # not an address: the state result
        state = d.dest(operands.pop(0), "b64")
    address = d.address_reader(operands[0])
    amount = d.source(operands[1], "u32") if len(operands) > 1 else -1
    if expects and amount < 0:
        raise UnsupportedInstruction("expect_tx without a byte count")

    def run(warp, lanes):
        where = address(warp)
        amounts = warp.views["u32"][amount] if amount >= 0 else None
        clock = np.zeros_like(warp.clock)
        if ordered:
            release(warp.clock, warp.id, clock)
        else:
            relaxed_release(warp.clock, warp.state.get("fenced clock"), clock)
        warp.cta.cluster.device.progress += 1
        for lane in each_lane(warp, lanes):
            cta, offset = warp.cta.peer(int(where[lane]))
            b = cta.mbarrier(offset, warp)
            value = int(amounts[lane]) if amounts is not None else 1
            if state >= 0:
                warp.views["u64"][state][lane] = b.phase
            if expects:
                b.expect_tx(value)
            b.arrive(1 if expects else value, clock)

    op = d.done(run)
    op.writes = tuple(w for w in op.writes if w >= 0)
    return op


def _expect_tx(d, form):
    d.mods.take("relaxed")
    d.mods.take("cta", "cluster")
    d.mods.take(*SHARED)
    d.mods.type("b64")
    d.count(2)
    address, amount = d.address_reader(d.operands[0]), d.source(d.operands[1], "u32")

    def run(warp, lanes):
        where = address(warp)
        for lane in each_lane(warp, lanes):
            cta, offset = warp.cta.peer(int(where[lane]))
            cta.mbarrier(offset, warp).expect_tx(int(warp.views["u32"][amount][lane]))

    return d.done(run)


def _wait(d, form):
    """test_wait and try_wait (9.7.13). try_wait suspends until the phase completes or a time limit
    passes; here it may also give up early, as the PTX ISA allows, and gives up when nothing else can
    happen."""
    parity = d.mods.flag("parity")
    ordered = d.mods.take("acquire", "relaxed") != "relaxed"
    d.mods.take("cta", "cluster")
    d.mods.take(*SHARED)
    d.mods.type("b64")
    d.count(3, 4)
    dest = d.dest(d.operands[0], "pred")
    address = d.address_reader(d.operands[1])
    phase = d.source(d.operands[2], "u32" if parity else "b64")
    if len(d.operands) == 4:
        d.source(d.operands[3], "u32")
    view = "u32" if parity else "u64"
    suspends = form == "try_wait"

    def run(warp, lanes):
        device = warp.cta.cluster.device
        where, phases = address(warp), warp.views[view][phase]
        results = warp.views["pred"][dest]
        result = np.zeros(32, bool)
        waits = []
        seen: dict[tuple[int, int], bool] = {}
        for lane in each_lane(warp, lanes):
            key = (int(where[lane]), int(phases[lane]))
            if key not in seen:
                cta, offset = warp.cta.peer(key[0])
                if cta is not warp.cta:
                    raise Fault(
                        "value", "waiting on another CTA's mbarrier (PTX ISA 9.7.13: only .shared::cta)"
                    )
                b = cta.mbarrier(offset, warp)
                seen[key] = b.complete_at(key[1]) if parity else b.phase > key[1]
                if seen[key]:
                    b.waiting.pop(warp.id, None)
                    if ordered:
                        acquire(warp.clock, b.observed)
                    else:
                        _remember(warp, b.observed)
                else:
                    waits.append((b, key[1]))
            result[lane] = seen[key]
        if waits and suspends and not any(seen.values()):
            if not warp.gave_up and device.random.random() > 0.03:
                for b, p in waits:
                    b.waiting[warp.id] = b.phase if parity else p
                return Blocked(
                    lambda: (
                        "waits for "
                        + ", ".join(f"phase {b.waiting.get(warp.id)} of {b.describe()}" for b, _ in waits)
                    ),
                    lambda: any(b.complete_at(p) if parity else b.phase > p for b, p in waits),
                    timeout=True,
                )
            for b, _ in waits:
                b.waiting.pop(warp.id, None)
        warp.gave_up = False
        np.copyto(results, result, where=lanes)
        if not waits:
            device.counters["mbarrier waits"] += 1
        return None

    return d.done(run)


def _remember(warp, clock):
    """A relaxed wait: what it saw is acquired by the next fence, but fenced tcgen05 operations at once."""
    np.maximum(warp.clock[TENSOR], clock[TENSOR], out=warp.clock[TENSOR])
    seen = warp.state.setdefault("unfenced", np.zeros_like(clock))
    np.maximum(seen, clock, out=seen)


# ---- named barriers


@instruction("bar", "barrier")
def _bar(d):
    if "warp" in d.mods.left:
        return bar_warp_sync(d)
    if d.mods.flag("cluster"):
        return _cluster(d)
    d.mods.flag("cta")
    form = d.mods.need("sync", "arrive", "red")
    d.mods.flag("aligned")
    reduction = d.mods.need("popc", "and", "or") if form == "red" else None
    operands = list(d.operands)
    dest = predicate = -1
    if reduction:
        kind = d.mods.type("u32" if reduction == "popc" else "pred")
        dest = d.dest(operands.pop(0), kind)
        predicate = d.source(operands.pop(), "pred")
    if len(operands) not in ((2,) if form == "arrive" else (1, 2)):
        raise UnsupportedInstruction(f"{len(operands)} operands")
    number = d.source(operands[0], "u32")
    count = d.source(operands[1], "u32") if len(operands) > 1 else -1

    def run(warp, lanes):
        cta = warp.cta
        barriers = cta.barriers
        waiting = warp.state.get("bar")
        if waiting is None:
            b = warp.uniform("u32", number, warp.active, "barrier number")
            n = warp.uniform("u32", count, warp.active, "thread count") if count >= 0 else 32 * cta.warp_count
            bits = None
            if predicate >= 0:
                bits = warp.views["pred"][predicate][lanes_array(warp.active)]
            generation = barriers.arrive(warp, b, n, 32, bits)
            cta.cluster.device.progress += 1
            cta.cluster.device.counters["named barrier arrivals"] += 1
            if form == "arrive":
                return None
            waiting = warp.state["bar"] = (b, generation)
        b, generation = waiting
        if not barriers.passed(b, generation):
            return Blocked(lambda: f"waits at {barriers.describe(b)}", lambda: barriers.passed(b, generation))
        del warp.state["bar"]
        barriers.leave(warp, b)
        cta.cluster.device.counters["named barrier waits"] += 1
        if dest >= 0:
            votes = np.concatenate(barriers.result[b])
            if reduction == "popc":
                warp.views["u32"][dest][:] = int(votes.sum())
            else:
                warp.views["pred"][dest][:] = votes.all() if reduction == "and" else votes.any()
        return None

    return d.done(run, COLLECTIVE)


def _cluster(d):
    """barrier.cluster.arrive releases unless .relaxed, .wait acquires (9.7.13)."""
    form = d.mods.need("arrive", "wait")
    order = d.mods.take("release", "acquire", "relaxed")
    d.mods.flag("aligned")
    d.count(0)

    def arrive(warp, lanes):
        if "cluster barrier" in warp.state:
            raise Fault("barrier", "barrier.cluster.arrive twice without barrier.cluster.wait")
        warp.state["cluster barrier"] = warp.cta.cluster.barrier.arrive(warp, order != "relaxed")
        warp.cta.cluster.device.progress += 1

    def wait(warp, lanes):
        generation = warp.state.get("cluster barrier")
        if generation is None:
            raise Fault("barrier", "barrier.cluster.wait without barrier.cluster.arrive")
        barrier = warp.cta.cluster.barrier
        if barrier.generation == generation:
            return Blocked(lambda: f"waits at {barrier.describe()}", lambda: barrier.generation != generation)
        del warp.state["cluster barrier"]
        acquire(warp.clock, barrier.observed)
        warp.cta.cluster.device.counters["cluster barrier waits"] += 1
        return None

    return d.done(arrive if form == "arrive" else wait, COLLECTIVE)


# ---- fences


@instruction("fence")
def _fence(d):
    """Memory and proxy fences (9.7.13). Lanes share their warp's clock, so a fence counts for all lanes
    of the warp."""
    d.count(0)
    if d.mods.flag("mbarrier_init"):
        d.mods.need("release")
        d.mods.need("cluster")
        return d.done(_publish)
    if d.mods.flag("proxy"):
        proxy = d.mods.need("async", "async::generic", "alias")
        if proxy == "async":
            d.mods.take("global", "shared::cta", "shared::cluster")
        elif proxy == "async::generic":
            raise UnsupportedInstruction("fence.proxy.async::generic")

        def run_proxy(warp, lanes):
            if proxy == "async":
                proxy_fence(warp.clock, warp.id)
                for b in warp.state.pop("unpublished", ()):
                    b.published = True

        return d.done(run_proxy)
    d.mods.take("sc", "acq_rel", "acquire", "release")
    d.mods.need(*SCOPES)
    return d.done(_thread_fence)


@instruction("membar")
def _membar(d):
    d.count(0)
    d.mods.need("cta", "gl", "sys")
    return d.done(_thread_fence)


def _publish(warp, lanes):
    """fence.mbarrier_init.release.cluster: the warp's mbarrier.init become visible through a later relaxed
    cluster arrive."""
    for b in warp.state.pop("unpublished", ()):
        b.published = True
    _thread_fence(warp, lanes)


def _thread_fence(warp, lanes):
    if "unfenced" in warp.state:
        acquire(warp.clock, warp.state.pop("unfenced"))
    warp.state["fenced clock"] = warp.clock.copy()
    new_epoch(warp.clock, warp.id)


# ---- registers


@instruction("setmaxnreg")
def _setmaxnreg(d):
    """Registers per thread of a warpgroup (9.7.19). .inc waits until the CTA's pool has enough; the pool
    starts with what the launch left of 64 Ki registers."""
    form = d.mods.need("inc", "dec")
    d.mods.need("sync")
    d.mods.need("aligned")
    d.mods.type("u32")
    d.count(1)
    number = d.source(d.operands[0], "u32")

    def run(warp, lanes):
        cta = warp.cta
        n = warp.uniform("u32", number, warp.active, "register count")
        if n % 8 or not 24 <= n <= 256:
            raise Fault("value", f"setmaxnreg {n}: must be a multiple of 8 from 24 to 256")
        have = warp.state["registers"]
        more = 32 * (n - have)
        known = "setmaxnreg" in warp.state  # until its first setmaxnreg the warp may have had fewer
        if known and (form == "inc") != (more >= 0) and more:
            raise Fault("value", f"setmaxnreg.{form} from {have} to {n} registers")
        if cta.free_registers < more:
            return Blocked(
                lambda: f"waits for {more} registers, {cta.free_registers} are free (setmaxnreg.inc {n})",
                lambda: cta.free_registers >= more,
            )
        cta.free_registers -= more
        warp.state["registers"], warp.state["setmaxnreg"] = n, True
        cta.cluster.device.progress += 1
        return None

    return d.done(run, COLLECTIVE)
