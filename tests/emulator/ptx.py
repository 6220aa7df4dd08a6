"""PTX text -> modules, entries and instructions. Names are resolved here; what an instruction means is not.

PTX ISA sections 4 (syntax), 5.2 (types), 6.4 (operands), 10 (special registers), 11 (directives).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .faults import EmulatorError, UnsupportedInstruction

TYPE_BYTES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4,
    "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8,
    "f32x2": 8, "b128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Reg:
    name: str


@dataclass(frozen=True)
class Imm:
    """A literal. `value` is an int, or for 0f/0d literals the bits with `float_bits` 32 or 64."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Special:
    """A special register, such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A kernel parameter, a shared or global variable, or a label."""

    name: str


@dataclass(frozen=True)
class Vector:
    items: tuple


@dataclass(frozen=True)
class Pair:
    """`d|p`: a destination with a predicate beside it."""

    first: object
    second: object


@dataclass(frozen=True)
class Not:
    """`!p` as a source predicate."""

    reg: Reg


@dataclass(frozen=True)
class Address:
    """`[base+offset]`, or `[base, {coordinates}]` for tensor maps."""

    base: object
    offset: int = 0
    coordinates: tuple = ()


@dataclass(frozen=True)
class Sink:
    """`_`: a result nobody wants."""


@dataclass
class Instruction:
    index: int
    text: str
    opcode: str  # the dotted name as written, for counts and messages
    parts: tuple[str, ...]  # opcode split at the dots
    operands: tuple
    guard: Reg | None = None
    guard_negated: bool = False
    scope: tuple[int, ...] = ()  # nesting of { } around the instruction, for local labels
    line: int = 0


@dataclass(frozen=True)
class Param:
    name: str
    offset: int  # in the parameter buffer
    size: int  # bytes
    type: str


@dataclass
class Variable:
    """A module-scope shared or global variable. `size` 0 means extern (dynamic shared memory)."""

    name: str
    space: str
    align: int
    size: int
    initial: bytes = b""


@dataclass
class Entry:
    name: str
    params: list[Param]
    registers: dict[str, str]  # name -> type
    instructions: list[Instruction]
    labels: dict[str, int]  # unique label -> instruction index
    directives: dict[str, tuple[int, ...]]  # reqntid, minnctapersm, maxnreg, ...
    param_bytes: int = 0


@dataclass
class Module:
    target: str
    version: str
    entries: dict[str, Entry]
    variables: dict[str, Variable] = field(default_factory=dict)


_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+[\w.\s]*?)?([\w$]+)(?:\[(\d+)\])?\s*$"
)
_VARIABLE = re.compile(
    r"(?:\.visible\s+|\.weak\s+)?(\.extern\s+)?(?:\.visible\s+)?\.(shared|global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)"
    r"(?:\[(\d*)\])?\s*(?:=\s*(.*))?$",
    re.S,
)
_REGISTERS = re.compile(r"([%\w$]+)<(\d+)>")
_LITERAL = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[bB][01]+|\d+)U?$")
_MARK = re.compile(r"[{}:;\n]")
_NAME = re.compile(r"[%\w$][\w$]*$")
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?(?:0x[0-9a-fA-F]+|\d+)))?\s*\]$")
_SPECIAL = re.compile(
    r"%(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$"
    r"|%(?:laneid|warpid|nwarpid|smid|nsmid|cluster_ctarank|cluster_nctarank|clock|clock64|clock_hi|globaltimer|globaltimer_lo"
    r"|lanemask_(?:eq|le|lt|ge|gt)|dynamic_smem_size|total_smem_size|is_explicit_cluster)$"
)


def split_list(text: str) -> list[str]:
    """Split at the commas outside any bracket."""
    items, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        if ch in "{[(":
            depth += 1
        elif ch in "}])":
            depth -= 1
        elif ch == "," and depth == 0:
            items.append(text[start:i].strip())
            start = i + 1
    if text[start:].strip():
        items.append(text[start:].strip())
    return items


def parse_module(text: str) -> Module:
    """Parse a PTX module, as `compiled.__ptx__` holds it."""
    text = re.sub(r"/\*.*?\*/", " ", re.sub(r"//[^\n]*", "", text), flags=re.S)
    target, version = re.search(r"\.target\s+(\w+)", text), re.search(r"\.version\s+([\d.]+)", text)
    if not target or not version:
        raise EmulatorError("not PTX: .target or .version is missing")
    module = Module(target[1], version[1], {})
    position = 0
    for match in re.finditer(r"\.entry\s+([\w$]+)\s*\(", text):
        if match.start() < position:
            continue
        _parse_variables(text[position : match.start()], module)
        close = text.index(")", match.end())
        brace = text.index("{", close)
        params, size = _parse_params(text[match.end() : close])
        directives = {
            m[1]: tuple(int(x) for x in m[2].split(","))
            for m in re.finditer(r"\.(\w+)\s+([\d,\s]+)", text[close + 1 : brace])
        }
        body = _BodyParser(text, brace, {p.name for p in params} | set(module.variables))
        position = body.end
        module.entries[match[1]] = Entry(
            match[1], params, body.registers, body.instructions, body.labels, directives, size
        )
    _parse_variables(text[position:], module)
    if ".func" in text:
        raise UnsupportedInstruction("device functions (.func) are not modelled")
    return module


def _parse_params(text: str) -> tuple[list[Param], int]:
    params, offset = [], 0
    for item in split_list(" ".join(text.split())):
        m = _PARAM.match(item)
        if not m:
            raise UnsupportedInstruction(f"kernel parameter: {item}")
        size = int(m[4] or 1) * TYPE_BYTES[m[2]]
        align = int(m[1] or TYPE_BYTES[m[2]])
        offset = -(-offset // align) * align
        params.append(Param(m[3], offset, size, m[2]))
        offset += size
    return params, offset


def _parse_variables(text: str, module: Module) -> None:
    for statement in text.split(";"):
        statement = " ".join(statement.split())
        m = re.search(r"(?:\.extern|\.visible|\.weak|\.shared|\.global|\.const)\b.*", statement)
        if not m or ".entry" in m[0]:
            continue
        v = _VARIABLE.match(m[0])
        if not v:
            if re.fullmatch(r"\.visible\s*|\.weak\s*", m[0]):
                continue
            raise UnsupportedInstruction(f"module-scope variable: {m[0][:120]}")
        unit = TYPE_BYTES[v[4]]
        count = 0 if v[1] or v[6] == "" else int(v[6] or 1)
        initial = b""
        if v[7]:
            initial = b"".join(
                (int(x, 0) & (256**unit - 1)).to_bytes(unit, "little") for x in split_list(v[7].strip("{} "))
            )
        module.variables[v[5]] = Variable(v[5], v[2], int(v[3] or unit), count * unit, initial)


class _BodyParser:
    """One entry's body. Names declared in inner { } scopes are renamed as they appear, so that operands
    are unique."""

    def __init__(self, text: str, start: int, symbols: set[str]):
        self.registers: dict[str, str] = {}
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.symbols = symbols
        self._scopes: list[dict[str, str]] = []
        self._scope_ids: list[int] = []
        self._local_labels: dict[tuple[int, str], str] = {}
        self._next_scope = 0
        self.end = self._parse(text, start)
        for ins in self.instructions:
            ins.operands = tuple(self._resolve_label(ins, op) for op in ins.operands)

    def _parse(self, text: str, start: int) -> int:
        buffer_start, depth, line = start, 0, text.count("\n", 0, start) + 1
        for mark in _MARK.finditer(text, start):
            ch, i = mark[0], mark.start()
            if ch == "\n":
                line += 1
            elif ch == ";":
                if depth == 0:
                    self._statement(" ".join(text[buffer_start:i].split()), line)
                    buffer_start = i + 1
            elif ch == "{" and depth == 0 and not text[buffer_start:i].strip():
                self._scopes.append({})
                self._scope_ids.append(self._next_scope)
                self._next_scope += 1
                buffer_start = i + 1
            elif ch == "{":
                depth += 1
            elif ch == "}" and depth:
                depth -= 1
            elif ch == "}":
                self._scopes.pop()
                self._scope_ids.pop()
                buffer_start = i + 1
                if not self._scopes:
                    return i + 1
            elif ":" not in (text[i - 1], text[i + 1]) and re.fullmatch(r"\s*[\w$]+", text[buffer_start:i]):
                self._label(text[buffer_start:i].strip())
                buffer_start = i + 1
        raise EmulatorError("not PTX: the text ends inside a kernel")

    def _label(self, name: str) -> None:
        scope = self._scope_ids[-1]
        unique = name if len(self._scope_ids) == 1 else f"{name}@{scope}"
        self._local_labels[scope, name] = unique
        self.labels[unique] = len(self.instructions)

    def _resolve_label(self, ins: Instruction, operand):
        if isinstance(operand, Symbol) and operand.name not in self.symbols:
            for scope in reversed(ins.scope):
                if (scope, operand.name) in self._local_labels:
                    return Symbol(self._local_labels[scope, operand.name])
            raise EmulatorError(f"line {ins.line}: unknown name {operand.name} in: {ins.text}")
        return operand

    def _statement(self, text: str, line: int) -> None:
        if not text:
            return
        if text.startswith(".reg"):
            _, kind, names = text.split(None, 2)
            kind = kind.lstrip(".")
            if kind not in TYPE_BYTES:
                raise UnsupportedInstruction(f"line {line}: register type .{kind}")
            for name in split_list(names):
                m = _REGISTERS.fullmatch(name)
                for n in [f"{m[1]}{k}" for k in range(int(m[2]))] if m else [name]:
                    unique = n if len(self._scopes) == 1 else f"{n}@{self._scope_ids[-1]}"
                    self._scopes[-1][n] = unique
                    self.registers[unique] = kind
            return
        if text.startswith((".loc", ".pragma", ".file")):
            return
        if text.startswith("."):
            raise UnsupportedInstruction(f"line {line}: directive: {text[:100]}")
        guard, negated, rest = None, False, text
        if text.startswith("@"):
            predicate, rest = text[1:].split(None, 1)
            negated = predicate.startswith("!")
            guard = self._operand(predicate.lstrip("!"), line)
            if not isinstance(guard, Reg):
                raise EmulatorError(f"line {line}: guard is not a register: {text}")
        opcode, _, arguments = rest.partition(" ")
        operands = tuple(self._operand(a, line) for a in split_list(arguments))
        self.instructions.append(
            Instruction(
                len(self.instructions),
                text,
                opcode,
                tuple(opcode.split(".")),
                operands,
                guard,
                negated,
                tuple(self._scope_ids),
                line,
            )
        )

    def _operand(self, text: str, line: int):
        for scope in reversed(self._scopes):  # the common case first: a register
            if text in scope:
                return Reg(scope[text])
        m = _LITERAL.match(text)
        if m:
            sign, digits = m[1], m[2]
            if digits[:2] in ("0f", "0F", "0d", "0D"):
                return Imm(int(digits[2:], 16), 32 if digits[1] in "fF" else 64)
            value = int(digits, 0) if not re.fullmatch(r"0\d+", digits) else int(digits, 8)
            return Imm(-value if sign else value)
        if text == "_":
            return Sink()
        if text.startswith("!"):
            inner = self._operand(text[1:].strip(), line)
            if isinstance(inner, Reg):
                return Not(inner)
        if text.startswith("{"):
            return Vector(tuple(self._operand(t, line) for t in split_list(text[1:-1])))
        if text.startswith("["):
            m = _ADDRESS.match(text)
            if m:
                return Address(self._operand(m[1], line), int(m[2] or "0", 0))
            parts = split_list(text[1:-1])
            if len(parts) == 2 and parts[1].startswith("{"):
                return Address(
                    self._operand(parts[0], line),
                    0,
                    tuple(self._operand(t, line) for t in split_list(parts[1][1:-1])),
                )
        if "|" in text:
            first, second = text.split("|", 1)
            return Pair(self._operand(first.strip(), line), self._operand(second.strip(), line))
        if _SPECIAL.match(text):
            return Special(text)
        if _NAME.match(text) and not text.startswith("%"):
            return Symbol(text)
        raise UnsupportedInstruction(f"line {line}: operand {text!r}")
