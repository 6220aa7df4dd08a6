"""A function of each logit of one's own, where a softcap would be: written once, for tensors and for the
kernels' numbers.

A term is known by a number below 0, its `key`, which stands where options have a softcap: so that ops, graphs
and processes pass it on as they do that. It is made of what the term's functions compute and of its fields.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
from types import CodeType
from typing import Any

from .arguments import TERMS, Float32

MOST_FIELDS = 8
NUMBERS = ("own_scale", "own_temperature", "own_inverse", *(f"own_{i}" for i in range(MOST_FIELDS)))
"""What kernels read of a term: what products are multiplied by before it, what its result is divided by, one
over that, and the term's fields."""
PREFIX = "own_term_"
"""A term's name among arguments.TERMS begins with it."""

_READS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"}
"""Instructions that read what is no argument of a function."""

_terms: dict[float, LogitTerm] = {}
_kinds: dict[str, type[LogitTerm]] = {}


class LogitTerm:
    """z = logit(x) instead of a softcap of each scaled logit x; given as ``softcap``.

    A subclass is a frozen dataclass whose fields, at most 8, are numbers, and has two functions:

        @dataclass(frozen=True)
        class LogCap(cute_lce.LogitTerm):
            cap: float

            def logit(self, x, ops):
                return ops.where(x < 0, -self.cap, self.cap) * ops.log1p(ops.abs(x) / self.cap)

            def slope(self, z, ops):
                return ops.exp(-ops.abs(z) / self.cap)

    logit(x, ops): z. slope(z, ops): dz/dx, as a function of z. Both compute with +, -, *, / and comparisons
    of their argument, the fields and numbers, and with ops.exp, log, log1p, tanh, sqrt, abs, minimum,
    maximum and where(condition, a, b); they read nothing else, and have no branches. What they give is
    compiled into the kernels, in float32, and these are cached by what the functions compute; fields are
    arguments of the kernels. logit(x) must be finite where x is, and grow with x or fall with it.

    Raises TypeError for a subclass that is no such dataclass, or whose functions read other variables.
    """

    key: float

    def logit(self, x: Any, ops: Any) -> Any:
        raise NotImplementedError

    def slope(self, z: Any, ops: Any) -> Any:
        raise NotImplementedError

    def __init__(self) -> None:
        # A dataclass has its own.
        raise TypeError(f"{type(self).__name__}: got no dataclass, want @dataclass(frozen=True)")

    def __post_init__(self) -> None:
        fields = _fields(self)
        kind = _name(type(self))
        digest = hashlib.sha256(repr((kind, fields)).encode()).digest()
        # Every whole number up to 2^52 is a float.
        key = -1.0 - float(int.from_bytes(digest[:8], "big") >> 12)
        object.__setattr__(self, "key", key)
        _terms[key] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew, so that the process that loads it knows its key."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}  # pyright: ignore
        return _made, (type(self), fields)


def _made(kind: type[LogitTerm], fields: dict[str, float]) -> LogitTerm:
    return kind(**fields)


def _fields(term: LogitTerm) -> tuple[float, ...]:
    name = type(term).__name__
    if not type(term).__dataclass_params__.frozen:  # pyright: ignore
        raise TypeError(f"{name}: got a dataclass that is not frozen, want @dataclass(frozen=True)")
    names = [field.name for field in dataclasses.fields(term)]  # pyright: ignore[reportArgumentType]
    values = {each: getattr(term, each) for each in names}
    for field, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}.{field}: got {type(value).__name__}, want a number")
    if len(values) > MOST_FIELDS:
        raise TypeError(f"{name}: got {len(values)} fields, want at most {MOST_FIELDS}")
    return tuple(float(value) for value in values.values())


@functools.cache
def _name(kind: type[LogitTerm]) -> str:
    """The term's name among TERMS, where it is from now on."""
    functions = []
    for name in ("logit", "slope"):
        function = getattr(kind, name)
        if function is getattr(LogitTerm, name):
            raise TypeError(f"{kind.__name__}: got no function {name}, want one")
        read = [each.argval for each in dis.get_instructions(function) if each.opname in _READS]
        if read:
            raise TypeError(f"{kind.__name__}.{name}: got one that reads {read[0]!r}, want fields and ops")
        functions.append(_code(function.__code__))
    names = tuple(field.name for field in dataclasses.fields(kind))  # pyright: ignore
    name = PREFIX + hashlib.sha256(repr((names, functions)).encode()).hexdigest()[:16]
    _kinds[name] = kind
    TERMS[name] = dict.fromkeys(NUMBERS[: 3 + len(names)], Float32)
    return name


def _code(code: CodeType) -> Any:
    constants = tuple(_code(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.co_code.hex(), code.co_names, code.co_varnames, constants


def as_number(softcap: Any) -> Any:
    """A term's key instead of it; anything else as it is."""
    return softcap.key if isinstance(softcap, LogitTerm) else softcap


def term_of(softcap: Any) -> LogitTerm | None:
    """The term whose key stands where a softcap would; None for a softcap, or None."""
    if softcap is None or softcap > 0:
        return None
    return _terms.get(float(softcap))


def kernel_term(term: LogitTerm) -> str:
    """Its name among TERMS."""
    return _name(type(term))


def numbers_of(term: LogitTerm, logit_scale: float, temperature: float) -> dict[str, float]:
    """By NUMBERS."""
    values = logit_scale, temperature, 1.0 / temperature, *_fields(term)
    return dict(zip(NUMBERS, values, strict=False))


def of_kernel(loss: Any) -> LogitTerm | None:
    """The term that a kernel is compiled for, with the numbers of its loss as fields."""
    name = next((each for each in loss.terms if each.startswith(PREFIX)), None)
    if name is None:
        return None
    kind = _kinds[name]
    term = object.__new__(kind)
    for i, field in enumerate(dataclasses.fields(kind)):  # pyright: ignore
        object.__setattr__(term, field.name, getattr(loss, f"own_{i}"))
    return term
