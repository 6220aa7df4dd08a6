"""A parsed entry -> a pre-decoded program: every operand a row number of the register file, every instruction
a closure.

Decoding happens once per kernel. The semantics live in ops/: a decoder there is registered for the first
part of an opcode, consumes every modifier (whatever is left over is an error) and returns `run(warp,
lanes)`. `lanes` is True for all 32 or a bool array of 32, fit for numpy's `where=`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import ptx
from .faults import EmulatorError, UnsupportedInstruction

# PTX type -> numpy type of a 32-lane register row (half a lane each for f32x2 and b128). bf16 has no numpy
# type: its rows are uint16, converted where they are used.
NUMPY = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "f16": np.float16, "bf16": np.uint16, "b32": np.uint32, "u32": np.uint32,
    "s32": np.int32, "f32": np.float32, "f16x2": np.uint32, "bf16x2": np.uint32, "b64": np.uint64,
    "u64": np.uint64, "s64": np.int64, "f64": np.float64, "f32x2": np.float32, "b128": np.uint64,
}  # fmt: skip
# Views of the register file by width in bytes; pred is a file of its own. f32x2 rows have 64 entries.
VIEWS = {
    0: ("pred",),
    2: ("b16", "u16", "s16", "f16", "bf16"),
    4: ("b32", "u32", "s32", "f32", "f16x2", "bf16x2"),
    8: ("b64", "u64", "s64", "f64", "f32x2"),
    16: ("b128",),
}
# Entries of a row: a .b128 row is 32 pairs of 64 bits.
ROW_LENGTH = {file: 64 if file == 16 else 32 for file in VIEWS}

NORMAL, BRANCH, EXIT, COLLECTIVE = range(4)

# Windows of the generic address space: the low 32 bits of a generic address are the address within its own
# space.
SHARED_WINDOW, PARAM_WINDOW = 0x0500_0000_0000_0000, 0x0600_0000_0000_0000

DECODERS: dict[str, Callable] = {}


def instruction(*names: str):
    """Register a decoder for opcodes whose first part is one of `names`."""

    def register(decoder):
        for name in names:
            assert name not in DECODERS, name
            DECODERS[name] = decoder
        return decoder

    return register


def file_of(type_name: str) -> int:
    """The register file (its width in bytes, 0 for predicates) that holds a type."""
    return 0 if type_name == "pred" else max(2, ptx.TYPE_BYTES[type_name])


def new_row(file: int) -> np.ndarray:
    """A row of zeros, as a register file holds it."""
    return np.zeros(ROW_LENGTH[file], NUMPY[VIEWS[file][0]])


class Modifiers:
    """The dotted parts after the opcode's name. Decoders take them one by one; `finish` refuses what
    nobody took."""

    def __init__(self, parts: tuple[str, ...]):
        self.left = list(parts)

    def take(self, *options: str) -> str | None:
        """Remove and return the first part that is one of `options`; None when there is none."""
        for part in self.left:
            if part in options:
                self.left.remove(part)
                return part
        return None

    def need(self, *options: str) -> str:
        part = self.take(*options)
        if part is None:
            raise UnsupportedInstruction(f"needs one of {', '.join('.' + o for o in options)}")
        return part

    def flag(self, name: str) -> bool:
        return self.take(name) is not None

    def type(self, *allowed: str) -> str:
        """Remove and return the last part, which must be a type of `allowed`."""
        if not self.left or self.left[-1] not in (allowed or NUMPY):
            raise UnsupportedInstruction(
                f"type .{self.left[-1] if self.left else '(none)'} is not one of {allowed}"
            )
        return self.left.pop()

    def finish(self) -> None:
        if self.left:
            raise UnsupportedInstruction(f"unknown modifier .{'.'.join(self.left)}")


class Op:
    """One decoded instruction."""

    __slots__ = (
        "collective_mask",
        "guard",
        "ins",
        "kind",
        "name",
        "negated",
        "reads",
        "run",
        "sources",
        "target",
        "touches",
        "writes",
    )

    def __init__(self, ins: ptx.Instruction):
        self.ins, self.name = ins, ins.opcode
        self.kind, self.target, self.guard, self.negated = NORMAL, -1, -1, False
        self.reads: tuple[int, ...] = ()  # registers whose lanes must be valid before `run`
        self.writes: tuple[int, ...] = ()  # registers whose active lanes are valid after `run`
        self.touches: tuple[int, ...] = ()  # all registers named, for ownership by asynchronous instructions
        self.sources: tuple[int, ...] = ()  # all registers read
        self.collective_mask = -1  # register with the membermask of a .sync instruction; -1: all lanes
        self.run: Callable = _nothing


def _nothing(warp, lanes):
    return None


class Decoder:
    """What an instruction's decoder uses: operands to register numbers, modifiers, and the op under
    construction."""

    def __init__(self, program: Program, ins: ptx.Instruction):
        self.program, self.ins = program, ins
        self.operands = ins.operands
        self.mods = Modifiers(ins.parts[1:])
        self.op = Op(ins)
        self._reads: list[int] = []
        self._writes: list[int] = []

    def count(self, *allowed: int) -> None:
        if len(self.operands) not in allowed:
            raise UnsupportedInstruction(f"{len(self.operands)} operands, expected {allowed}")

    def source(self, operand, type_name: str, checked: bool = True, relaxed: bool = False) -> int:
        """Register number of a source. `relaxed` lets a wider register hold a narrower type (ld, st and
        cvt, PTX ISA 9.4.1)."""
        if isinstance(operand, ptx.Reg):
            number = self.program.register(operand.name, type_name, relaxed)
            self.op.sources += (number,)
            if checked:
                self._reads.append(number)
            else:
                self.op.touches += (number,)
            return number
        return self.program.constant(operand, type_name)

    def sources(self, operand, type_name: str, **options) -> list[int]:
        """A vector operand, or a single one as a list of one."""
        items = operand.items if isinstance(operand, ptx.Vector) else (operand,)
        return [self.source(x, type_name, **options) for x in items]

    def dest(self, operand, type_name: str, relaxed: bool = False, checked: bool = True) -> int:
        """Register number of a destination; -1 for the sink `_`."""
        if isinstance(operand, ptx.Sink):
            return -1
        if not isinstance(operand, ptx.Reg):
            raise UnsupportedInstruction(f"destination {operand}")
        number = self.program.register(operand.name, type_name, relaxed)
        if checked:
            self._writes.append(number)
        else:
            self.op.touches += (number,)
        return number

    def dests(self, operand, type_name: str, **options) -> list[int]:
        items = operand.items if isinstance(operand, ptx.Vector) else (operand,)
        return [self.dest(x, type_name, **options) for x in items]

    def address(self, operand, wide: bool = True) -> tuple[int, int]:
        """(register number, byte offset) of an address operand. The register may be 32 or 64 bits wide
        when `wide` is False."""
        if not isinstance(operand, ptx.Address) or operand.coordinates:
            raise UnsupportedInstruction(f"address operand {operand}")
        base = operand.base
        if isinstance(base, ptx.Reg):
            kind = "u64" if self.program.width(base.name) == 8 else "u32"
            return self.source(base, kind), operand.offset
        return self.program.constant(base, "u64"), operand.offset

    def address_reader(self, operand) -> Callable:
        """A function of a warp that returns the 32 lanes' addresses as int64."""
        number, offset = self.address(operand)
        kind = self.program.view_of_width[number]
        if offset:
            return lambda warp: warp.views[kind][number].astype(np.int64) + offset
        return lambda warp: warp.views[kind][number].astype(np.int64)

    def done(self, run: Callable, kind: int = NORMAL) -> Op:
        self.mods.finish()
        op = self.op
        op.run, op.kind = run, kind
        fixed = self.program.constants
        op.reads = tuple(dict.fromkeys(r for r in self._reads if r not in fixed))
        op.writes = tuple(dict.fromkeys(self._writes))
        op.touches = tuple(dict.fromkeys(op.reads + op.writes + op.touches))
        return op


class Program:
    """A decoded kernel: ops, the register file's layout and the values of its constant rows."""

    def __init__(self, module: ptx.Module, entry: ptx.Entry):
        from . import ops  # noqa: F401  registers the decoders; imported here because they import this module

        self.module, self.entry, self.name = module, entry, entry.name
        self.files: list[int] = []  # register number -> file
        self.view_of_width: list[str] = []  # register number -> its unsigned view
        self.numbers: dict[str, int] = {}
        self.constants: set[int] = set()  # rows that never change: immediates, special registers, symbols
        self.immediates: dict[int, int] = {}  # row -> value
        self.symbols: dict[int, str] = {}  # row -> name, filled in per warp: special registers and symbols
        self._constant_rows: dict[tuple, int] = {}
        self.wgmma_registers: set[int] = set()  # registers that wgmma reads or writes
        for name, kind in entry.registers.items():
            self.numbers[name] = self._new_row(file_of(kind))
        self._lay_out_memory()
        self.ops: list[Op] = []
        unknown: dict[str, str] = {}
        for ins in entry.instructions:
            try:
                self.ops.append(self._decode(ins))
            except UnsupportedInstruction as error:
                unknown.setdefault(f"{ins.opcode}: {error}", f"line {ins.line}: {ins.text[:200]}")
        if unknown:
            raise UnsupportedInstruction(
                f"{entry.name}: {len(unknown)} instruction forms are not modelled:\n  "
                + "\n  ".join(f"{k}\n      {v}" for k, v in unknown.items())
            )
        for op in self.ops:
            _watch_accumulators(op, self.wgmma_registers)
        self.labels = entry.labels
        self.rows = len(self.files)
        self._index_files()

    def _new_row(self, file: int) -> int:
        self.files.append(file)
        self.view_of_width.append({0: "pred", 2: "u16", 4: "u32", 8: "u64", 16: "b128"}[file])
        return len(self.files) - 1

    def _lay_out_memory(self) -> None:
        """Static shared variables from offset 0x400 (the driver's 1 KiB comes first), dynamic shared
        memory after them."""
        offset, self.shared_offsets, self.param_offsets = (
            0x400,
            {},
            {p.name: p.offset for p in self.entry.params},
        )
        for v in self.module.variables.values():
            if v.space == "shared" and v.size:
                offset = -(-offset // v.align) * v.align
                self.shared_offsets[v.name] = offset
                offset += v.size
        dynamic = [v for v in self.module.variables.values() if v.space == "shared" and not v.size]
        for v in dynamic:
            offset = -(-offset // v.align) * v.align
        for v in dynamic:
            self.shared_offsets[v.name] = offset
        self.static_shared_end = offset

    def width(self, name: str) -> int:
        return self.files[self.numbers[name]]

    def register(self, name: str, type_name: str, relaxed: bool = False) -> int:
        number = self.numbers[name]
        have, want = self.files[number], file_of(type_name)
        if have != want and not (relaxed and have > want > 0):
            raise UnsupportedInstruction(f"register {name} of {8 * have} bits as .{type_name}")
        return number

    def constant(self, operand, type_name: str) -> int:
        """The row that holds an immediate, a special register or a symbol's address."""
        if isinstance(operand, (ptx.Reg, ptx.Not, ptx.Vector, ptx.Address, ptx.Pair, ptx.Sink)):
            raise UnsupportedInstruction(f"operand {operand} where a value is expected")
        if isinstance(operand, ptx.Imm) and operand.float_bits == 32 and type_name == "f64":
            raise UnsupportedInstruction("32-bit float literal for .f64")
        key = (operand, file_of(type_name), type_name == "f32x2")
        if key in self._constant_rows:
            return self._constant_rows[key]
        number = self._constant_rows[key] = self._new_row(file_of(type_name))
        self.constants.add(number)
        if isinstance(operand, ptx.Imm):
            self.immediates[number] = operand.value
        else:
            self.symbols[number] = operand.name
        return number

    def _decode(self, ins: ptx.Instruction) -> Op:
        decoder = DECODERS.get(ins.parts[0])
        if decoder is None:
            raise UnsupportedInstruction("unknown opcode")
        d = Decoder(self, ins)
        op = decoder(d)
        if ins.guard is not None:
            op.guard, op.negated = self.register(ins.guard.name, "pred"), ins.guard_negated
        return op

    def _index_files(self) -> None:
        """Where each register lies in its file, how large the files are, and the rows of immediates."""
        self.row_in_file: dict[int, int] = {}
        sizes = dict.fromkeys(VIEWS, 0)
        for number, file in enumerate(self.files):
            if number not in self.constants:
                self.row_in_file[number] = sizes[file]
                sizes[file] += 1
        self.shapes = {file: (n, ROW_LENGTH[file]) for file, n in sizes.items()}
        self.immediate_rows: dict[int, np.ndarray] = {}  # the same for all warps, and never written
        for number, value in self.immediates.items():
            row = self.immediate_rows[number] = new_row(self.files[number])
            row[:] = (value != 0) if row.dtype == np.bool_ else value & (256 ** self.files[number] - 1)
            row.flags.writeable = False
        self.initially_valid = [0] * self.rows
        for number in self.constants:
            self.initially_valid[number] = 0xFFFFFFFF


def _watch_accumulators(op: Op, accumulators: set[int]) -> None:
    """Have an instruction that reads accumulators note it: wgmma.fence must come before the next wgmma (see
    ops/wgmma.py).

    mov does not count: the compiler places copies and zeroing of accumulators without regard to the fence.
    """
    read = accumulators.intersection(op.sources)
    if not read or op.ins.parts[0] in ("wgmma", "mov"):
        return
    inner = op.run

    def run(warp, lanes):
        warp.state.setdefault("accumulators read", set()).update(read)
        return inner(warp, lanes)

    op.run = run


def decode(text: str) -> dict[str, Program]:
    """Parse and decode all entries of a PTX module."""
    module = ptx.parse_module(text)
    if not module.entries:
        raise EmulatorError("the PTX has no .entry")
    return {name: Program(module, entry) for name, entry in module.entries.items()}
