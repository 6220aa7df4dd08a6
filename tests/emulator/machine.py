"""Device, clusters and CTAs, and the scheduler that advances warps and asynchronous operations in adversarial
order.

The order is drawn from a seeded generator. Asynchronous operations complete late: by the seed's policy
either only when no warp can advance any more (the latest that the rules allow), or now and then at random.
Warps run for random stretches, some of a single instruction, some until they block.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import numpy as np

from .barriers import ClusterBarrier, MBarrier, NamedBarriers
from .faults import FAULTS, Deadlock, EmulatorError, Fault
from .memory import SHARED_LIMIT, GlobalMemory, SharedMemory
from .ordering import CONTROL, Ordering
from .program import PARAM_WINDOW, Program
from .tmem import TensorColumns, TensorMemory
from .warp import LANES, Warp

STRETCHES = (1, 4, 30, 200, 100_000)  # instructions that a warp may run before another one has its turn
REGISTER_FILE = 64 * 1024  # 32-bit registers of an SM
STALL_LIMIT = (
    300_000  # instructions executed with no progress anywhere before polling loops count as a deadlock
)


class AsyncOp:
    """One pending step of an asynchronous operation. Steps of the same `queue` finish in order; others in
    any order."""

    __slots__ = ("finish", "queue", "what")

    def __init__(self, what: str, finish: Callable[[], None], queue=None):
        self.what, self.finish, self.queue = what, finish, queue


class CTA:
    def __init__(self, cluster: Cluster, rank: int, ctaid: tuple[int, int, int], columns: TensorColumns):
        launch = cluster.launch
        self.columns = columns  # tensor memory of the SM that it is on
        self.cluster, self.rank, self.ctaid = cluster, rank, ctaid
        self.program: Program = cluster.program
        self.block = launch.block
        self.threads = int(np.prod(launch.block))
        self.warp_count = -(-self.threads // 32)
        size = self.program.static_shared_end + launch.shared
        if size > SHARED_LIMIT:
            raise Fault("shared-bounds", f"{size} bytes of shared memory, the limit is {SHARED_LIMIT}")
        self.shared = SharedMemory(size, cluster.ordering, rank, cluster.device)
        self.mbarriers: dict[int, MBarrier] = {}
        self.barriers = NamedBarriers(self)
        self.tmem: TensorMemory | None = None
        self.params = launch.params
        self.free_registers = 0
        self.warpgroups: dict[int, dict] = {}
        self.warps: list[Warp] = []
        self.ended = False

    def make_warps(self) -> None:
        self.warps = [Warp(self, i) for i in range(self.warp_count)]

    def fill_constant(self, warp: Warp, row: np.ndarray, name: str) -> None:
        """Values of special registers (PTX ISA 10) and addresses of symbols in this warp."""
        if name in self.program.shared_offsets:
            row[:] = self.rank << 24 | self.program.shared_offsets[name]
            return
        if name in self.program.param_offsets:
            row[:] = PARAM_WINDOW | self.program.param_offsets[name]
            return
        if name in self.cluster.device.global_variables:
            row[:] = self.cluster.device.global_variables[name]
            return
        base, _, axis = name.lstrip("%").partition(".")
        i = "xyz".index(axis) if axis else 0
        bx, by, _ = self.block
        if base == "tid":
            row[:] = (warp.thread % bx, warp.thread // bx % by, warp.thread // (bx * by))[i]
        elif base == "laneid":
            row[:] = LANES
        elif base.startswith("lanemask_"):
            bit = np.uint64(1) << LANES.astype(np.uint64)
            one, full = np.uint64(1), np.uint64(0xFFFFFFFF)
            below = bit - one
            row[:] = {
                "eq": bit,
                "lt": below,
                "le": below | bit,
                "gt": full & ~(below | bit),
                "ge": full & ~below,
            }[base[9:]]
        else:
            row[:] = warp.index if base == "warpid" else self._special(name, base, i)

    def _special(self, name: str, base: str, axis: int) -> int:
        """A special register whose value all warps of the CTA share."""
        launch, shape = self.cluster.launch, self.cluster.launch.cluster
        ctas = math.prod(shape)
        values = {
            "ntid": self.block[axis], "ctaid": self.ctaid[axis], "nctaid": launch.grid[axis],
            "clusterid": self.ctaid[axis] // shape[axis], "nclusterid": launch.grid[axis] // shape[axis],
            "cluster_ctaid": self.ctaid[axis] % shape[axis], "cluster_nctaid": shape[axis],
            "cluster_ctarank": self.rank, "cluster_nctarank": ctas, "nwarpid": self.warp_count,
            "smid": self.cluster.number * ctas + self.rank, "nsmid": 132,
            "dynamic_smem_size": launch.shared, "total_smem_size": self.shared.size,
            "is_explicit_cluster": int(ctas > 1),
        }  # fmt: skip
        if base not in values:
            raise EmulatorError(f"special register {name}")
        return values[base]

    # ---- what instructions need

    def peer(self, address: int) -> tuple[CTA, int]:
        """The CTA and offset of a shared address (bits 24.. hold the CTA's rank in the cluster)."""
        rank, offset = (address >> 24) & 0xFF, address & 0xFFFFFF
        if rank >= len(self.cluster.ctas) or address >> 32 not in (0, 0x0500_0000):
            raise Fault(
                "shared-bounds", f"{address:#x} is not an address in the shared memory of this cluster"
            )
        cta = self.cluster.ctas[rank]
        if cta.ended:
            raise Fault(
                "pending-at-exit", f"shared address {address:#x} belongs to CTA {cta.ctaid}, which has ended"
            )
        return cta, offset

    def mbarrier(self, offset: int, warp: Warp | None = None) -> MBarrier:
        """The mbarrier at a local offset. `warp` is the user, None for asynchronous engines: others need
        it published."""
        b = self.mbarriers.get(offset)
        if b is None:
            raise Fault(
                "mbarrier-init",
                f"shared address {offset:#x} of CTA rank {self.rank} holds no initialised mbarrier",
            )
        if not b.published and (warp is None or warp.cta is not self):
            raise Fault(
                "mbarrier-init",
                f"{b.name()} is used by the async proxy or another CTA without fence.mbarrier_init after its"
                f" init",
            )
        if warp is not None and warp.clock[CONTROL, b.initialiser[0]] < b.initialiser[1]:
            raise Fault(
                "mbarrier-init", f"{b.name()} is used, and nothing orders the use after its mbarrier.init"
            )
        return b


class Site:
    """The SMs that a cluster runs on, one for each of its CTAs, and how many clusters are there."""

    def __init__(self, ctas: int):
        self.columns = [TensorColumns() for _ in range(ctas)]
        self.clusters = 0


class Cluster:
    def __init__(self, device: Device, program: Program, launch, number: int, origin, site: Site):
        self.device, self.program, self.launch, self.number = device, program, launch, number
        self.site = site
        site.clusters += 1
        shape = launch.cluster
        count = int(np.prod(shape))
        threads = int(np.prod(launch.block))
        self.ordering = Ordering(count, -(-threads // 32))
        self.ctas: list[CTA] = []
        for rank in range(count):
            place = (rank % shape[0], rank // shape[0] % shape[1], rank // (shape[0] * shape[1]))
            ctaid = tuple(o * s + p for o, s, p in zip(origin, shape, place, strict=False))
            self.ctas.append(CTA(self, rank, ctaid, site.columns[rank]))
        self.barrier = ClusterBarrier(self)
        # What ptxas gave each thread is not in the PTX: as much as the register file or .maxnreg allows.
        most = program.entry.directives.get("maxnreg", (256,))[0]
        per_thread = min(256, most, REGISTER_FILE // threads // 8 * 8)
        for cta in self.ctas:
            cta.make_warps()
            cta.free_registers = REGISTER_FILE - per_thread * threads
            for warp in cta.warps:
                warp.state["registers"] = per_thread
        self.running = [w for c in self.ctas for w in c.warps]

    def retire(self, warp: Warp) -> None:
        """A warp has exited: nothing of its own may be pending (PTX ISA 9.7.9: bulk copies read after
        exit)."""
        from .ops import exit_checks

        for check in exit_checks:
            check(warp)
        self.barrier.check()
        if all(w.done for w in warp.cta.warps):
            self._retire_cta(warp.cta)

    def _retire_cta(self, cta: CTA) -> None:
        cta.ended = True
        if all(warp.may_be_early for warp in cta.warps):
            raise Fault(
                "launch-order",
                f"CTA {cta.ctaid} has no griddepcontrol.wait: its launch may end before the one before it",
            )
        cta.columns.release(cta)
        if cta.tmem is not None:
            cta.tmem.check_freed()
        for b in cta.mbarriers.values():
            if b.tx:
                raise Fault(
                    "pending-at-exit", f"CTA {cta.ctaid} ends with bytes outstanding at {b.describe()}"
                )


class Device:
    """Runs launches. `seed` draws the schedule; `ignore` names fault codes to note as warnings instead of
    raising."""

    def __init__(self, memory: GlobalMemory, seed: int = 0, ignore=(), resident: int = 16, per_sm: int = 1):
        unknown = set(ignore) - set(FAULTS)
        if unknown:
            raise EmulatorError(f"ignore={sorted(unknown)}: not among the fault codes {sorted(FAULTS)}")
        self.memory, self.ignore, self.resident, self.per_sm = memory, set(ignore), resident, per_sm
        self.random = random.Random(seed)
        self.seed = seed
        self.pending: list[AsyncOp] = []
        self.progress = 0  # counts events that may let somebody advance
        self.instructions: Counter = Counter()  # (warp index, opcode) -> executed
        self.counts: dict[int, list[int]] = {}  # of this launch: warp index -> executions of each instruction
        self.counters: Counter = Counter()
        self.warnings: Counter = Counter()
        self.global_variables: dict[str, int] = {}
        self.unlaunched: list[tuple[int, tuple[int, int, int]]] = []  # (number, origin) of waiting clusters
        # Policies by seed: how eagerly asynchronous work completes, and which lane elect.sync picks.
        self.eagerness = (0.0, 0.02, 0.3)[seed % 3]
        self.elected = 0 if seed % 2 == 0 else self.random.randrange(32)

    def report(self, fault: Fault) -> None:
        """Raise a fault, or note it as a warning when the caller of `run` chose to ignore its code."""
        if fault.code not in self.ignore:
            raise fault
        self.warnings[f"[{fault.code}] {fault.message}"] += 1

    def later(self, what: str, finish: Callable[[], None], queue=None) -> None:
        self.pending.append(AsyncOp(what, finish, queue))

    # ---- launching

    def counts_of(self, program: Program, warp: int) -> list[int]:
        """What the warps of this index, one of each CTA, count together."""
        return self.counts.setdefault(warp, [0] * len(program.ops))

    def _add_counts(self, program: Program) -> None:
        for warp, counts in self.counts.items():
            for op, n in zip(program.ops, counts, strict=True):
                if n:
                    self.instructions[warp, op.name] += n
        self.counts = {}

    def launch(self, program: Program, launch) -> None:
        self._load_globals(program)
        self.memory.begin_launch()
        grid, shape = launch.grid, launch.cluster
        if any(g % c for g, c in zip(grid, shape, strict=False)):
            raise EmulatorError(f"grid {grid} is not a multiple of cluster {shape}")
        origins = [
            (x, y, z)
            for z in range(grid[2] // shape[2])
            for y in range(grid[1] // shape[1])
            for x in range(grid[0] // shape[0])
        ]
        self.unlaunched = list(enumerate(origins))
        self.random.shuffle(self.unlaunched)
        room = max(1, self.resident // int(np.prod(shape)))
        live: list[Cluster] = []
        sites: list[Site] = []
        with np.errstate(all="ignore"):  # overflow, NaN and division by zero are the kernel's business
            while self.unlaunched or live:
                while self.unlaunched and len(live) < room:
                    number, origin = self.unlaunched.pop()
                    site = next((s for s in sites if s.clusters < self.per_sm), None)
                    if site is None:
                        site = Site(int(np.prod(shape)))
                        sites.append(site)
                    live.append(Cluster(self, program, launch, number, origin, site))
                live = self._run(live)
            while self.pending:  # stores whose sources were read may still write after the last CTA has ended
                self._complete_one()
        self._add_counts(program)

    def cancel_cluster(self, launch) -> tuple[int, int, int]:
        """Take a cluster that has not started off the list: the ctaid of its first CTA, or all ones."""
        if not self.unlaunched:
            return 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF
        _, origin = self.unlaunched.pop(0)
        x, y, z = (o * c for o, c in zip(origin, launch.cluster, strict=True))
        return x, y, z

    def _load_globals(self, program: Program) -> None:
        for v in program.module.variables.values():
            if v.space in ("global", "const") and v.name not in self.global_variables:
                data = np.zeros(max(v.size, 1) + 16, np.uint8)
                skip = -data.ctypes.data % 16
                data[skip : skip + len(v.initial)] = np.frombuffer(v.initial, np.uint8)
                self.memory.add(v.name, data)
                self.global_variables[v.name] = data.ctypes.data + skip

    def _run(self, live: list[Cluster]) -> list[Cluster]:
        """Run until a cluster ends (when others wait for room) or all have ended; returns those still
        alive."""
        rng = self.random
        runnable = [w for c in live for w in c.running if w.blocked is None]
        blocked = [w for c in live for w in c.running if w.blocked is not None]
        seen = -1
        since_progress = 0
        timeouts = 0
        last_progress = self.progress
        while True:
            if self.progress != seen:
                seen = self.progress
                still = []
                for w in blocked:
                    (runnable if w.blocked is None or w.blocked.ready() else still).append(w)
                blocked = still
            if self.progress != last_progress:
                last_progress, since_progress, timeouts = self.progress, 0, 0
            if self.pending and (not runnable or rng.random() < self.eagerness):
                self._complete_one()
                continue
            if not runnable:
                if not blocked:
                    return []
                patient = [w for w in blocked if w.blocked is not None and w.blocked.timeout]
                timeouts += 1
                if not patient or timeouts > 3:
                    self._check_bytes(live)
                    raise Deadlock(self._stuck(live))
                for w in patient:  # mbarrier.try_wait may give up after its time limit
                    w.gave_up = True
                    blocked.remove(w)
                    runnable.append(w)
                continue
            if since_progress > STALL_LIMIT:
                raise Deadlock("polling without progress\n" + self._stuck(live))
            i = rng.randrange(len(runnable))
            warp = runnable[i]
            warp.blocked = None
            budget = rng.choice(STRETCHES)
            done = warp.run(budget)
            since_progress += done + 1
            if warp.done:
                runnable[i] = runnable[-1]
                runnable.pop()
                self.progress += 1
                if self._retire(warp, live) and self.unlaunched:
                    return live
            elif warp.blocked is not None and not warp.blocked.ready():
                runnable[i] = runnable[-1]
                runnable.pop()
                blocked.append(warp)

    def _retire(self, warp: Warp, live: list[Cluster]) -> bool:
        """Account for an exited warp; True when its cluster has ended."""
        cluster = warp.cta.cluster
        try:
            cluster.retire(warp)
        except Fault as fault:
            fault.where = (
                fault.where
                or f"kernel {warp.program.name[:100]}, CTA {warp.cta.ctaid}, warp {warp.index}, at exit"
            )
            raise
        cluster.running.remove(warp)
        warp.give_registers()
        if cluster.running:
            return False
        live.remove(cluster)
        cluster.site.clusters -= 1
        return True

    def _complete_one(self) -> None:
        """Finish one pending step, chosen at random among those at the head of their queues."""
        heads, queues = [], set()
        for i, op in enumerate(self.pending):
            if op.queue is None or op.queue not in queues:
                heads.append(i)
                queues.add(op.queue)
        op = self.pending.pop(self.random.choice(heads))
        self.progress += 1
        try:
            op.finish()
        except Fault as fault:
            fault.where = fault.where or f"asynchronous: {op.what}"
            raise

    def _check_bytes(self, live: list[Cluster]) -> None:
        """A deadlock at an mbarrier that has all its arrivals, but not the bytes it expects, is a wrong
        byte count."""
        for b in (b for c in live for cta in c.ctas for b in cta.mbarriers.values()):
            if b.tx and b.waiting and not b.pending:
                wrong = (
                    f"{b.tx} bytes more are expected than"
                    if b.tx > 0
                    else f"{-b.tx} bytes fewer are expected than"
                )
                raise Fault("mbarrier-tx", f"{wrong} copies bring at {b.describe()}\n{self._stuck(live)}")

    def _stuck(self, live: list[Cluster]) -> str:
        lines = []
        for c in live:
            for w in c.running:
                why = w.blocked.why() if w.blocked is not None else "polling"
                lines.append(f"CTA {w.cta.ctaid} warp {w.index}: {why}; {w.place().split(', ', 3)[3]}")
        return "no warp can advance:\n  " + "\n  ".join(lines)
