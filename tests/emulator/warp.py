"""A warp: registers with validity, control flow with divergence, and the loop that executes decoded
instructions.

Divergent groups of lanes run lowest program counter first and join when they meet. A group that reaches an
instruction that needs other live lanes (`.sync`, `.aligned`) is parked until they arrive; when all groups
are parked at different places, that is a fault. (PTX ISA 9.6 "Divergence of threads in control
constructs".)
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from .faults import EmulatorError, Fault
from .program import BRANCH, COLLECTIVE, EXIT, NORMAL, NUMPY, VIEWS, Program, new_row

if TYPE_CHECKING:
    from .launches import Touched
    from .machine import CTA

FULL = 0xFFFFFFFF
LANES = np.arange(32)
_ALL_TRUE, _ALL_FALSE = b"\1" * 32, b"\0" * 32


class Blocked:
    """Returned by an instruction that cannot complete yet; it is executed again when the scheduler resumes
    the warp."""

    __slots__ = ("ready", "timeout", "why")

    def __init__(self, why, ready, timeout=None):
        self.why = why  # a function that says what the warp waits for
        self.ready = ready  # a function that says whether a retry can succeed
        self.timeout = timeout  # mbarrier.try_wait may give up: a function that makes the retry return False


def bits_of(lanes: np.ndarray) -> int:
    """A bool array of 32 as an int, lane 0 in bit 0."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


@functools.lru_cache(maxsize=4096)
def lanes_array(bits: int) -> np.ndarray:
    """The inverse of bits_of; not to be written to."""
    lanes = np.unpackbits(np.frombuffer(bits.to_bytes(4, "little"), np.uint8), bitorder="little")
    lanes.flags.writeable = False
    return lanes.view(np.bool_)


def lanes_of(bits: int):
    """lanes_array; True for all lanes."""
    return True if bits == FULL else lanes_array(bits)


class Rows(dict):
    """Register number -> its row as one type, made when first used: a warp uses few of a kernel's."""

    __slots__ = ("dtype", "file", "indices", "warp")

    def __init__(self, file: np.ndarray, indices: dict[int, int], name: str):
        self.warp: Warp | None = None
        self.dtype = NUMPY[name]
        self.file, self.indices = file.view(self.dtype), indices

    def __missing__(self, number: int) -> np.ndarray:
        if number in self.indices:
            row = self.file[self.indices[number]]
        else:
            assert self.warp is not None
            row = self.warp.constant(number).view(self.dtype)
        self[number] = row
        return row


Registers = tuple[dict[int, np.ndarray], dict[str, Rows]]
"""A warp's register files, and their rows by type."""
SPARE_BYTES = 200 << 20


class Spare:
    """Registers of warps that have ended, for those of the same kernel and index, which use the same rows:
    making these takes a tenth of the time. The last that were given, up to SPARE_BYTES."""

    def __init__(self) -> None:
        self.given: OrderedDict[tuple[Program, int], list[Registers]] = OrderedDict()
        self.bytes = 0

    def take(self, program: Program, index: int) -> Registers | None:
        found = self.given.get((program, index))
        if not found:
            return None
        registers = found.pop()
        if not found:
            del self.given[program, index]
        self.bytes -= _bytes(registers)
        for file in registers[0].values():
            file.fill(0)
        return registers

    def give(self, program: Program, index: int, registers: Registers) -> None:
        self.given.setdefault((program, index), []).append(registers)
        self.given.move_to_end((program, index))
        self.bytes += _bytes(registers)
        while self.bytes > SPARE_BYTES:
            _, dropped = self.given.popitem(last=False)
            self.bytes -= sum(map(_bytes, dropped))


def _bytes(registers: Registers) -> int:
    """With the rows, which take as much as they show."""
    files, views = registers
    return sum(file.nbytes for file in files.values()) + 250 * sum(map(len, views.values()))


SPARE = Spare()


class Warp:
    def __init__(self, cta: CTA, index: int):
        program: Program = cta.program
        self.cta, self.index, self.program = cta, index, program
        self.id = cta.rank * cta.warp_count + index  # agent number in the cluster's clocks
        threads = cta.threads
        self.thread = index * 32 + LANES
        self.live = bits_of(self.thread < threads)
        self.full_warp = self.live == FULL
        self.symbol_rows: dict[int, np.ndarray] = {}
        self.files, self.views = SPARE.take(program, index) or self._new_registers()
        for rows in self.views.values():
            rows.warp = self
        self.valid = program.initially_valid.copy()
        self.pc, self.mask = 0, self.live
        self.parked: dict[int, int] = {}  # other groups: program counter -> lanes
        self.counts = cta.cluster.device.counts_of(program, index)
        self.owned: dict[int, tuple] = {}  # registers that an asynchronous instruction owns: (code, what)
        self.clock = cta.cluster.ordering.new_clock(self.id)
        self.tensor_view = np.zeros(self.clock.shape[1], np.int32)  # what its tcgen05 operations may rely on
        self.blocked: Blocked | None = None
        # Whether the launch before this one may still run.
        self.may_be_early = cta.cluster.launch.by_pdl
        self.gave_up = False  # the next try_wait returns False instead of blocking
        self.done = False
        self.state: dict = {}  # what instructions keep from one execution to the next, by name

    def check_not_early(self, what: str, why: str = "") -> None:
        """Before what must not happen while the launch before may still run."""
        if self.may_be_early:
            raise Fault("launch-order", f"{what} before griddepcontrol.wait{why}")

    def launch_before(self) -> Touched:
        """What the launch before touches, for an access while it may still run. What ran before a first
        launch is unknown."""
        device = self.cta.cluster.device
        before = device.memory.touched_before
        if before is None:
            raise Fault(
                "launch-order", "global memory is accessed before griddepcontrol.wait in the first launch"
            )
        device.counters["accesses before griddepcontrol.wait"] += 1
        return before

    def _new_registers(self) -> Registers:
        program = self.program
        files = {f: np.zeros(shape, NUMPY[VIEWS[f][0]]) for f, shape in program.shapes.items()}
        rows = program.row_in_file
        return files, {name: Rows(files[f], rows, name) for f, names in VIEWS.items() for name in names}

    def give_registers(self) -> None:
        """To the next warp of this index; of one that has ended, and of which nothing is pending."""
        for rows in self.views.values():
            rows.warp = None
            for number in self.symbol_rows:
                rows.pop(number, None)
        if not self.owned:
            SPARE.give(self.program, self.index, (self.files, self.views))
        self.views, self.files = {}, {}

    # ---- values

    def constant(self, number: int) -> np.ndarray:
        """The row of an immediate or a symbol."""
        program = self.program
        if number in program.immediate_rows:
            return program.immediate_rows[number]
        if number not in self.symbol_rows:
            row = self.symbol_rows[number] = new_row(program.files[number])
            self.cta.fill_constant(self, row, program.symbols[number])
        return self.symbol_rows[number]

    def uniform(self, view: str, number: int, active: int, what: str) -> int:
        """The value that all active lanes must share."""
        row = self.views[view][number]
        first = (active & -active).bit_length() - 1
        value = row[first]
        if number not in self.program.immediate_rows and (row[lanes_array(active)] != value).any():
            raise Fault("mismatch", f"{what} differs between the lanes of the warp")
        return int(value)

    def set_valid(self, number: int, lanes) -> None:
        self.valid[number] |= FULL if lanes is True else bits_of(lanes)

    # ---- ownership by asynchronous instructions

    def own(self, numbers, code: str, what: str, settle=None) -> None:
        """`settle` makes the result of the owner available at once, for callers who ignore the fault."""
        for n in numbers:
            self.owned[n] = (code, what, settle)

    def disown(self, numbers) -> None:
        for n in numbers:
            self.owned.pop(n, None)

    # ---- execution

    def run(self, budget: int) -> int:
        """Execute up to `budget` instructions; returns how many. Stops early when blocked or done."""
        ops, valid, counts = self.program.ops, self.valid, self.counts
        predicates = self.views["pred"]
        pc, mask = self.pc, self.mask
        lanes = lanes_of(mask)
        executed = 0
        try:
            while executed < budget:
                op = ops[pc]
                if self.parked and op.kind == COLLECTIVE:
                    pc, mask = self._gather(pc, mask)
                    lanes = lanes_of(mask)
                    op = ops[pc]
                active, where = mask, lanes
                guard = op.guard
                if guard >= 0:
                    if valid[guard] & mask != mask:
                        self.undefined(guard, mask)
                    if self.owned and guard in self.owned:
                        self._owned(guard)
                    raw = predicates[guard].tobytes()
                    if raw == _ALL_TRUE:
                        active = 0 if op.negated else mask
                    elif raw == _ALL_FALSE:
                        active = mask if op.negated else 0
                    else:
                        bits = bits_of(predicates[guard])
                        active = mask & (~bits if op.negated else bits)
                    where = lanes if active == mask else lanes_of(active)
                executed += 1
                counts[pc] += 1
                if active:
                    if self.owned and op.touches:
                        for r in op.touches:
                            if r in self.owned:
                                self.pc, self.mask = pc, mask
                                self._owned(r)
                    for r in op.reads:
                        if valid[r] & active != active:
                            self.undefined(r, active)
                    kind = op.kind
                    if kind in (NORMAL, COLLECTIVE):
                        if kind == COLLECTIVE and active != mask and op.collective_mask < 0:
                            raise Fault(
                                "divergence", f"only lanes {active:#010x} of {mask:#010x} execute this"
                            )
                        self.active = active
                        stop = op.run(self, where)
                        if stop is not None:
                            executed -= 1
                            counts[pc] -= 1
                            self.blocked = stop
                            break
                        for r in op.writes:
                            valid[r] |= active
                        pc += 1
                    elif kind == BRANCH:
                        if active == mask:
                            pc = op.target
                        else:
                            self._park(op.target, active)
                            mask &= ~active
                            pc += 1
                            pc, mask = self._next(pc, mask)
                            lanes = lanes_of(mask)
                            continue
                    elif kind == EXIT:
                        self.live &= ~active
                        mask &= ~active
                        if mask:
                            pc += 1
                        elif self.parked:
                            pc = min(self.parked)
                            mask = self.parked.pop(pc)
                        else:
                            self.done = True
                            break
                        lanes = lanes_of(mask)
                else:
                    pc += 1
                if self.parked:
                    pc, mask = self._next(pc, mask)
                    lanes = lanes_of(mask)
        except Fault as fault:
            self.pc, self.mask = pc, mask
            fault.where = fault.where or self.place(pc)
            raise
        except (EmulatorError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise EmulatorError(
                f"internal error: {type(error).__name__}: {error}\n  {self.place(pc)}"
            ) from error
        self.pc, self.mask = pc, mask
        return executed

    def _park(self, pc: int, mask: int) -> None:
        self.parked[pc] = self.parked.get(pc, 0) | mask

    def _next(self, pc: int, mask: int) -> tuple[int, int]:
        """Join a group waiting at `pc`, and go on with the group of the lowest program counter."""
        self._park(pc, mask)
        pc = min(self.parked)
        return pc, self.parked.pop(pc)

    def _gather(self, pc: int, mask: int) -> tuple[int, int]:
        """The current group needs lanes that are elsewhere: park it and run another group that can go on."""
        self._park(pc, mask)
        for candidate in sorted(self.parked):
            group = self.parked[candidate]
            op = self.program.ops[candidate]
            if op.kind == COLLECTIVE:
                needed = self.live
                if op.collective_mask >= 0:
                    first = (group & -group).bit_length() - 1
                    needed &= int(self.views["u32"][op.collective_mask][first])
                if needed & ~group:
                    continue
            del self.parked[candidate]
            return candidate, group
        where = "; ".join(
            f"lanes {m:#010x} at: {self.program.ops[p].ins.text[:80]}" for p, m in sorted(self.parked.items())
        )
        raise Fault(
            "divergence", f"the lanes of the warp wait for each other at different instructions: {where}"
        )

    def undefined(self, number: int, active: int):
        missing = active & ~self.valid[number]
        lanes = [i for i in range(32) if missing >> i & 1]
        raise Fault(
            "uninit-register", f"register {self.register_name(number)} was never written in lanes {lanes}"
        )

    def _owned(self, number: int) -> None:
        code, what, settle = self.owned[number]
        message = f"register {self.register_name(number)} is touched while {what}"
        if settle is None:
            raise Fault(code, message)
        raise_or_ignore(self, code, message)
        settle(self)

    def register_name(self, number: int) -> str:
        return next((n for n, k in self.program.numbers.items() if k == number), f"row {number}")

    def place(self, pc: int | None = None) -> str:
        pc = self.pc if pc is None else pc
        text = "after its last instruction"
        if pc < len(self.program.ops):
            ins = self.program.ops[pc].ins
            text = f"line {ins.line}: {ins.text[:160]}"
        who = f"CTA {self.cta.ctaid}, warp {self.index}, lanes {self.mask:#010x}"
        return f"kernel {self.program.name[:100]}, {who}, {text}"


def raise_or_ignore(warp: Warp, code: str, message: str) -> None:
    """Device.report with the place of the warp."""
    fault = Fault(code, message)
    fault.where = warp.place()
    warp.cta.cluster.device.report(fault)
