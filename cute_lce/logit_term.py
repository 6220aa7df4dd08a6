"""LogitTerm: a user's own function of each logit, in place of a softcap; written once, for tensors and for
the kernels' numbers.

A term is identified by a negative number, its `key`, which takes the softcap's place in options, so that ops,
graphs and processes pass it on like a softcap. It is a hash of what the term's functions compute and of its
fields.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from .arguments import TERMS, Float32
from .scalars import python_number
from .symbolic import example_of, is_known

MOST_FIELDS = 8
FLOAT32_MAX = 2.0**128 - 2.0**104
NUMBERS = ("own_scale", "own_temperature", "own_inverse", *(f"own_{i}" for i in range(MOST_FIELDS)))
"""What kernels read of a term: what products are multiplied by before it, what its result is divided by, one
over that, and the term's fields."""
PREFIX = "own_term_"
"""A term's name among arguments.TERMS begins with it."""

OPS = ("exp", "log", "log1p", "tanh", "sqrt", "abs", "minimum", "maximum", "where")
_OPERATORS = {"+", "-", "*", "/", "ADD", "SUBTRACT", "MULTIPLY", "TRUE_DIVIDE"}
"""By Python's versions."""
_FOREIGN = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE", "IMPORT")
"""Instructions that begin so read what is no argument of a function."""
_OBJECTS = ("IS_OP", "CONTAINS_OP", "BUILD", "STORE_ATTR", "STORE_SUBSCR", "RAISE")
"""And those that treat a number as an object, or make others."""

_terms: dict[float, LogitTerm] = {}
_kinds: dict[str, type[LogitTerm]] = {}


class LogitTerm:
    """Your own function z = logit(x) of each scaled logit x; pass an instance as ``softcap``.

    A subclass is a frozen dataclass with at most 8 fields, finite numbers, and two functions:

        @dataclass(frozen=True)
        class LogCap(cute_lce.LogitTerm):
            cap: float

            def logit(self, x, ops):
                return ops.where(x < 0, -self.cap, self.cap) * ops.log1p(ops.abs(x) / self.cap)

            def slope(self, z, ops):
                return ops.exp(-ops.abs(z) / self.cap)

    logit(x, ops) returns z; slope(z, ops) returns dz/dx as a function of z. Both may use +, -, * and / of
    their argument, the fields and numbers, and ops.exp, log, log1p, tanh, sqrt, abs, minimum, maximum and
    where(a < b, c, d), with any comparison. They read nothing else, have no branches, and change nothing in
    place (+=). x and z are tensors of any shape in the accumulation dtype, or a kernel's float32 numbers,
    whose /, exp and log have errors of some 2^-22 (absolute where a log is near 0; |x| 2^-23 for exp of a
    large x), and for which a divisor above 2^126 is infinite. logit must be finite where x is, and monotonic;
    slope must be finite even where rounding takes z beyond the range of logit, by up to 2^-11 of how far the
    row's largest z lies above it.

    What the functions compute is compiled into the kernels, which are cached by it; fields are arguments of
    the kernels. Do not assign a class's functions anew once it has made a term: the key and the kernels would
    stay those of the first ones. A process keeps every term that it makes, some hundred bytes each.

    Raises TypeError for a subclass that is not such a dataclass, or whose functions do anything else, and
    ValueError for a field beyond float32's range.
    """

    key: float
    """Identifies the term in place of a softcap: equal for equal functions and fields, in any process."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "key" in inspect.get_annotations(cls):
            raise TypeError(f"{cls.__name__}: got a field named key, want another name")
        if "__post_init__" in cls.__dict__:
            raise TypeError(f"{cls.__name__}: got a __post_init__, want none")

    def logit(self, x: Any, ops: Any) -> Any:
        raise NotImplementedError

    def slope(self, z: Any, ops: Any) -> Any:
        raise NotImplementedError

    def __init__(self, *_: Any, **__: Any) -> None:
        # A dataclass has its own.
        name = type(self).__name__
        raise TypeError(f"{name}: got no dataclass with an __init__, want @dataclass(frozen=True)")

    def __post_init__(self, *others: Any) -> None:
        if others:
            raise TypeError(f"{type(self).__name__}: got an InitVar, want fields")
        fields = _fields(self)
        digest = hashlib.sha256(repr((_name(type(self)), fields)).encode()).digest()
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
    values = {}
    for field in dataclasses.fields(term):  # pyright: ignore[reportArgumentType]
        value = values[field.name] = python_number(getattr(term, field.name))
        object.__setattr__(term, field.name, value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}.{field.name}: got {type(value).__name__}, want a number")
        if not abs(value) <= sys.float_info.max or not field.init:
            got = value if field.init else "a field that __init__ does not take"
            raise TypeError(f"{name}.{field.name}: got {got}, want a finite number")
        if abs(value) > FLOAT32_MAX:
            raise ValueError(f"{name}.{field.name}: got {value}, want a number in float32's range")
    if len(values) > MOST_FIELDS:
        raise TypeError(f"{name}: got {len(values)} fields, want at most {MOST_FIELDS}")
    return tuple(float(value) for value in values.values())


@functools.cache
def _name(kind: type[LogitTerm]) -> str:
    """The term's name among TERMS, where it is from now on."""
    names = tuple(field.name for field in dataclasses.fields(kind))  # pyright: ignore
    functions = [_checked(kind, which, names) for which in ("logit", "slope")]
    name = PREFIX + hashlib.sha256(repr((names, functions)).encode()).hexdigest()[:16]
    _kinds[name] = kind
    TERMS[name] = dict.fromkeys(NUMBERS[: 3 + len(names)], Float32)
    return name


def _checked(kind: type[LogitTerm], which: str, fields: tuple[str, ...]) -> Any:
    """All that a function computes, which is nothing but what LogitTerm's docstring says."""
    # Of a static or class method not the function in it, which takes other arguments.
    function, name = inspect.getattr_static(kind, which), f"{kind.__name__}.{which}"
    if function is getattr(LogitTerm, which):
        raise TypeError(f"{kind.__name__}: got no function {which}, want one")
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount != 3 or function.__defaults__ or code.co_kwonlyargcount:
        raise TypeError(f"{name}: got no function of (self, {'x' if which == 'logit' else 'z'}, ops)")
    if any(isinstance(each, CodeType) for each in code.co_consts):
        raise TypeError(f"{name}: got one with a function in it, want fields and ops")
    for each in dis.get_instructions(function):
        if each.opname.startswith(_FOREIGN):
            raise TypeError(f"{name}: got one that reads {each.argval!r}, want fields and ops")
        if each.opname.startswith(_OBJECTS):
            raise TypeError(f"{name}: got one with {each.opname}, want fields and ops")
        if "JUMP" in each.opname or each.opname == "FOR_ITER":
            raise TypeError(f"{name}: got one with a branch, want ops.where")
        if each.opname.startswith(("BINARY_", "INPLACE_")):
            # In place a tensor would be changed that others read too; += and INPLACE_ADD are not among these.
            operator = each.argrepr if each.opname == "BINARY_OP" else each.opname.removeprefix("BINARY_")
            if operator not in _OPERATORS:
                raise TypeError(f"{name}: got one with the operator {operator}, want +, -, * and /")
    others = [each for each in code.co_names if each not in fields and each not in OPS]
    if others:
        raise TypeError(f"{name}: got one that reads {others[0]!r}, want fields and ops")
    _try(function, name, fields)
    return code.co_code.hex(), code.co_names, code.co_varnames, code.co_consts


def _try(function: Callable[..., Any], name: str, fields: tuple[str, ...]) -> None:
    """Call it with what can do no more than a kernel's numbers."""
    term = _AnyFields()
    for field in fields:
        setattr(term, field, _Any())
    try:
        found = function(term, _Any(), _AnyOps)
    except (AttributeError, TypeError) as error:
        what = _in_words(str(error))
        raise TypeError(
            f"{name}: got one that fails: {what}; want +, -, *, /, comparisons and ops"
        ) from error
    if isinstance(found, bool) or not isinstance(found, _Any | int | float):
        what = _in_words(type(found).__name__)
        raise TypeError(f"{name}: got one that returns {what}, want a number")


def _in_words(message: str) -> str:
    words = (_AnyFields, "the fields"), (_AnyOps, "ops"), (_Any, "a number"), (_Comparison, "a comparison")
    for kind, what in words:
        message = message.replace(kind.__name__, what)
    return message


class _Any:
    """Any number."""

    def _with(self, other: Any) -> _Any:
        return self if isinstance(other, _Any | int | float) else NotImplemented

    def _compared(self, other: Any) -> _Comparison:
        return _Comparison() if isinstance(other, _Any | int | float) else NotImplemented

    def _alone(self) -> _Any:
        return self

    def __bool__(self) -> bool:
        raise TypeError("a number as a condition")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _with
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared  # pyright: ignore
    __neg__ = __pos__ = _alone
    __hash__ = None  # pyright: ignore


class _Comparison:
    """What one of any numbers gives: no number, since tensors would be bool, whose sums are no numbers."""

    def __bool__(self) -> bool:
        # `and` and `or` are branches.
        raise TypeError("not of a comparison")


class _AnyFields:
    """Of a term, without its class's attributes: another's may have other values, and the same key."""


class _AnyOps:
    """Of any numbers."""

    @staticmethod
    def _one(x: Any) -> _Any:
        return _Any() + x

    @staticmethod
    def _two(a: Any, b: Any) -> _Any:
        return _Any() + a + b

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> _Any:
        if not isinstance(condition, _Comparison):
            raise TypeError(f"{type(condition).__name__} as a condition of where")
        return _Any() + a + b

    exp = log = log1p = tanh = sqrt = abs = _one
    minimum = maximum = _two


def as_number(softcap: Any) -> Any:
    """A term's key instead of it; anything else as it is."""
    return softcap.key if isinstance(softcap, LogitTerm) else softcap


def term_of(softcap: Any) -> LogitTerm | None:
    """The term whose key stands where a softcap would; None for a softcap, or None. Raises ValueError for
    another number below 0."""
    if softcap is None or not is_known(softcap) or not softcap < 0:
        return None
    found = _terms.get(float(example_of(softcap)))
    if found is None:
        raise ValueError(
            f"softcap: got {softcap}, want a positive, finite number, or a LogitTerm (a key, which is "
            "negative, stands for a LogitTerm only in a process that has made or loaded it)"
        )
    return found


def kernel_term(term: LogitTerm) -> str:
    """Its name among TERMS."""
    return _name(type(term))


def numbers_of(term: LogitTerm, logit_scale: float, temperature: float) -> dict[str, float]:
    """By NUMBERS."""
    values = logit_scale, temperature, 1.0 / temperature, *_fields(term)
    return dict(zip(NUMBERS, values, strict=False))


def of_kernel(loss: Any, number: Callable[[Any], Any]) -> LogitTerm | None:
    """The term that a kernel is compiled for; its fields are `number` of those of the loss."""
    name = next((each for each in loss.terms if each.startswith(PREFIX)), None)
    if name is None:
        return None
    kind = _kinds[name]
    term = object.__new__(kind)
    for i, field in enumerate(dataclasses.fields(kind)):  # pyright: ignore
        object.__setattr__(term, field.name, number(getattr(loss, f"own_{i}")))
    return term
