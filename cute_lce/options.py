"""What the loss is, and how it is to be computed: frozen, whole, and read by name.

The objects are passed on unchanged from the public call to the implementation. A field's annotation gives
its types in the schemas of the ops, and whether it is static (part of every cache's key) or a number that may
change from call to call without preparing anything anew. Tensors with gradients of their own are operands
instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, TypedDict, cast, get_type_hints

import torch

from . import environment
from .logit_term import LogitTerm, as_number, term_of
from .plan.problem import MIB, Limits
from .scalars import python_number
from .symbolic import SYMBOLS, differs, is_known, is_traced

REDUCTIONS = ("mean", "sum", "none")
SCHEDULES = ("auto", "recompute", "keep", "grad_in_forward")
IGNORE_INDEX = -100
"""The ignore_index that ``None`` stands for, as in torch."""
NO_SCALE = 1.0
"""The logit_scale of a call that gives none."""
LEAST_DIVISOR = 1e-30
"""Of softcap and temperature; 1 over it is the most."""
MOST_WORKSPACE_MB = 1 << 42
MOST_WINDOW = (1 << 31) - 1
"""More of either is taken as this much, which no machine has and which fits the ops' int64."""


class Field(NamedTuple):
    """How a field is passed; public, inner: its types in the schemas of the public and the inner ops."""

    public: str
    inner: str
    static: bool


class _LossFields(NamedTuple):
    reduction: Annotated[str, Field("str", "str", static=True)] = "mean"
    ignore_index: Annotated[int, Field("SymInt?", "SymInt", static=False)] = IGNORE_INDEX
    logit_scale: Annotated[float, Field("Scalar", "float", static=False)] = NO_SCALE


class LossOptions(_LossFields):
    """The definition of the loss, apart from its tensors.

    reduction: "mean" (over the targets that are not ignored), "sum" or "none".
    ignore_index: the target value whose rows have loss 0 and no gradient; ``None`` means -100.
    logit_scale: a finite number that multiplies the logits.

    Raises ValueError for an unknown reduction or a number out of range, and TypeError for a value of the
    wrong type. Numbers may be symbolic.
    """

    __slots__ = ()

    def __new__(
        cls, reduction: str = "mean", ignore_index: int | None = IGNORE_INDEX, logit_scale: float = NO_SCALE
    ) -> LossOptions:
        if type(reduction) is not str or reduction not in REDUCTIONS:
            _check_choice("reduction", reduction, REDUCTIONS)
        logit_scale, ignore_index = python_number(logit_scale), python_number(ignore_index)
        # By its type first: a tensor is compared element by element, and True equals 1.
        if isinstance(logit_scale, torch.Tensor):
            raise TypeError(
                f"logit_scale: got {type(logit_scale).__name__}, want a number; to learn a scale, "
                "multiply the hidden states by it; otherwise: logit_scale.item() is one"
            )
        if is_traced() or type(logit_scale) is not float or logit_scale != NO_SCALE:
            _check_finite("logit_scale", logit_scale)
        if ignore_index is None:
            ignore_index = IGNORE_INDEX
        elif isinstance(ignore_index, torch.SymInt):
            return tuple.__new__(cls, (reduction, ignore_index, logit_scale))
        elif isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise TypeError(f"ignore_index: got {type(ignore_index).__name__}, want an int or None")
        if not -(1 << 63) <= ignore_index < 1 << 63:
            raise ValueError(f"ignore_index: got {ignore_index}, want a number in the range of int64")
        return tuple.__new__(cls, (reduction, ignore_index, logit_scale))

    def _replace(self, **changes: Any) -> LossOptions:
        return LossOptions(**{**self._asdict(), **changes})

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the numbers that are no default: kernels are compiled for them."""
        return ("logit_scale",) if differs(self.logit_scale, NO_SCALE) else ()

    @property
    def static(self) -> Any:
        """What a cache's key holds: the static fields, and which terms there are."""
        return (self.reduction, self.terms) if self.logit_scale != NO_SCALE else self.reduction


class _TermFields(NamedTuple):
    label_smoothing: Annotated[float, Field("Scalar", "float", static=False)] = 0.0
    softcap: Annotated[float | None, Field("Scalar?", "float?", static=False)] = None
    z_loss: Annotated[float, Field("Scalar", "float", static=False)] = 0.0


class TermOptions(_TermFields):
    """The numbers of a loss's terms; the defaults mean that there is no such term.

    label_smoothing: in [0, 1], the part of the target's probability that is spread over all classes.
    softcap: c of z = c tanh(z / c), from 1e-30 to 1e30, a LogitTerm or the key of one, or None.
    z_loss: the coefficient of lse^2, finite.

    Raises TypeError and ValueError for anything else. Numbers may be symbolic.
    """

    __slots__ = ()

    def __new__(
        cls,
        label_smoothing: float = 0.0,
        softcap: float | LogitTerm | None = None,
        z_loss: float = 0.0,
    ) -> TermOptions:
        label_smoothing, z_loss = python_number(label_smoothing), python_number(z_loss)
        _check_number("label_smoothing", label_smoothing)
        if has_value(label_smoothing) and not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing: got {label_smoothing}, want a number in [0, 1]")
        _check_finite("z_loss", z_loss)
        softcap = python_number(as_number(softcap))
        if isinstance(softcap, type):
            raise TypeError(f"softcap: got the class {softcap.__name__}, want a number or a LogitTerm")
        if softcap is not None:
            _check_number("softcap", softcap)
            if term_of(softcap) is None:
                check_divisor("softcap", softcap)
        return tuple.__new__(cls, (label_smoothing, softcap, z_loss))

    def _replace(self, **changes: Any) -> TermOptions:
        return TermOptions(**{**self._asdict(), **changes})

    @property
    def any(self) -> bool:
        """Whether there is a term."""
        return self.softcap is not None or len(self.numbers) > 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied with a term itself: another process does not know its key."""
        given = {**self._asdict(), "softcap": term_of(self.softcap) or self.softcap}
        return TermOptions, tuple(given.values())

    @property
    def numbers(self) -> tuple[str, ...]:
        """Those of each token that the loss is made of (implementation.RowLoss)."""
        names = ["logprob"]
        if differs(self.label_smoothing, 0):
            names.append("total_nll")
        if differs(self.z_loss, 0):
            names.append("lse")
        return tuple(names)


def is_number(value: object) -> bool:
    """Whether it is one of Python's, or symbolic."""
    return isinstance(value, (int, float, *SYMBOLS))


def check_kind(name: str, value: Any) -> None:
    """Raise TypeError for what is no number, with the way to make one of it."""
    if isinstance(value, bool) or not is_number(value):
        way_out = f": {name}.item() is one" if hasattr(value, "item") else ""
        raise TypeError(f"{name}: got {type(value).__name__}, want a number{way_out}")


def _check_number(name: str, value: Any) -> None:
    check_kind(name, value)
    if not is_traced() and isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{name}: got {value}, want a number that is a float, or in the range of int64")


def has_value(number: Any) -> bool:
    """Whether a number can be compared. The ops look at it where it is a symbol, and again when they run."""
    return not is_traced() and is_known(number)


def _check_finite(name: str, value: Any) -> None:
    _check_number(name, value)
    if has_value(value) and not float("-inf") < value < float("inf"):
        raise ValueError(f"{name}: got {value}, want a finite number")


def check_positive(name: str, value: Any, *, or_zero: bool = False) -> None:
    """Raise TypeError for what is no number, ValueError for one that is not positive (or 0) and finite."""
    _check_number(name, value)
    if not has_value(value):
        return
    if not 0 < value < float("inf") and not (or_zero and value == 0):
        raise ValueError(f"{name}: got {value}, want a positive, finite number{' or 0' if or_zero else ''}")


def check_divisor(name: str, value: Any) -> None:
    """check_positive, and ValueError for what float32 logits cannot be divided by."""
    check_positive(name, value)
    if has_value(value) and not LEAST_DIVISOR <= value <= 1 / LEAST_DIVISOR:
        raise ValueError(f"{name}: got {value}, want a number from 1e-30 to 1e30")


def check_value(name: str, value: float) -> None:
    """Raise ValueError for a number that is out of its argument's range. name: of an op's argument."""
    if name == "temperature_number":
        check_divisor("temperature", value)
    elif name == "softcap" and term_of(value) is None:
        check_divisor("softcap", value)
    elif name == "label_smoothing":
        TermOptions(label_smoothing=value)
    else:
        _check_finite(name, value)


NO_TERMS = TermOptions()


def has_terms(numbers: tuple) -> bool:
    """Whether numbers, TermOptions' fields, which may not have been checked, differ from NO_TERMS."""
    if [type(each) for each in numbers] == _NO_TERMS_ARE:
        # What every call without terms is asked.
        return numbers != NO_TERMS
    # What is no number TermOptions refuses by name.
    pairs = zip(numbers, NO_TERMS, strict=True)
    return any(type(each) not in _NUMBERS or each != none for each, none in pairs)


_NO_TERMS_ARE = [type(each) for each in NO_TERMS]
_NUMBERS = (float, int, type(None), *SYMBOLS)


class TokenStats(NamedTuple):
    """The results of linear_logprob, each of target's shape; None if not asked for, 0 in ignored rows.

    Differentiable, float32 (float64 for float64): logprob, z - lse of the target; entropy, -sum p log p; lse,
    log sum exp(z); topk_logprob (..., K), z - lse of topk_ids.
    Not differentiable: argmax, the first class with the largest z, int64; is_top1, whether that is the
    target, bool; log_sum_sq_probs, log sum p^2, and mean_logit, the mean of z over the classes, in the dtype
    of logprob.
    """

    logprob: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    topk_logprob: torch.Tensor | None = None
    argmax: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logit: torch.Tensor | None = None


def check_outputs(outputs: Any) -> None:
    """Raise TypeError or ValueError for what does not name fields of TokenStats, each once."""
    if not isinstance(outputs, tuple | list) or not all(isinstance(name, str) for name in outputs):
        raise TypeError(f"outputs: got {outputs!r}, want a tuple of names")
    for name in outputs:
        if name not in TokenStats._fields:
            raise ValueError(f"outputs: got {name!r}, want names of {', '.join(TokenStats._fields)}")
    if not outputs or len(set(outputs)) < len(outputs):
        raise ValueError(f"outputs: got {tuple(outputs)}, want at least one name, and each once")


class _ComputeFields(NamedTuple):
    schedule: Annotated[str, Field("str", "", static=True)] = "auto"
    workspace_mb: Annotated[float | None, Field("float?", "", static=True)] = None
    window: Annotated[int | None, Field("SymInt?", "", static=True)] = None


class ComputeOptions(_ComputeFields):
    """How the loss is computed; this changes rounding, time and memory.

    schedule: how the backward obtains the logits: "recompute", "keep", "grad_in_forward" or "auto".
    workspace_mb: MiB that the call may allocate beyond its results, ``None``: the default.
    window: columns of the vocabulary that are worked on at once, ``None``: chosen.

    Raises ValueError for a value, and TypeError for a type, other than these. `window` may be symbolic.
    """

    __slots__ = ()

    def __new__(
        cls, schedule: str = "auto", workspace_mb: float | None = None, window: int | None = None
    ) -> ComputeOptions:
        if type(schedule) is not str or schedule not in SCHEDULES:
            _check_choice("schedule", schedule, SCHEDULES)
        workspace_mb, window = python_number(workspace_mb), python_number(window)
        if workspace_mb is not None:
            if isinstance(workspace_mb, bool) or not isinstance(workspace_mb, int | float):
                raise TypeError(
                    f"workspace_mb: got {type(workspace_mb).__name__}, want a number of MiB or None"
                )
            # This is also false for nan.
            if not 0 < workspace_mb < float("inf"):
                raise ValueError(f"workspace_mb: got {workspace_mb}, want a positive number of MiB or None")
            workspace_mb = min(workspace_mb, MOST_WORKSPACE_MB)
        if window is not None:
            if isinstance(window, bool) or not isinstance(window, int | torch.SymInt):
                raise TypeError(f"window: got {type(window).__name__}, want an int or None")
            if window < 1:
                raise ValueError(f"window: got {window}, want at least 1 column or None")
            # Not min, which would compare: a symbolic window would be guarded.
            window = cast("int", torch.sym_min(window, MOST_WINDOW))
        return tuple.__new__(cls, (schedule, workspace_mb, window))

    def _replace(self, **changes: Any) -> ComputeOptions:
        return ComputeOptions(**{**self._asdict(), **changes})

    @property
    def limits(self) -> Limits:
        """The same in bytes and columns; 0 leaves a limit to the implementation."""
        workspace = 0 if self.workspace_mb is None else max(int(self.workspace_mb * MIB), 1)
        return Limits(window=0 if self.window is None else self.window, workspace=workspace)


def with_default_workspace(compute: ComputeOptions) -> ComputeOptions:
    """The options with the process's default for a workspace_mb that is not given."""
    if compute.workspace_mb is not None or environment.WORKSPACE_MB is None:
        return compute
    return compute._replace(workspace_mb=environment.WORKSPACE_MB)


class CallOptions(TypedDict, total=False):
    """The fields of all three as keyword arguments."""

    reduction: str
    ignore_index: int | None
    logit_scale: float
    label_smoothing: float
    softcap: float | LogitTerm | None
    z_loss: float
    schedule: str
    workspace_mb: float | None
    window: int | None


def defaults() -> dict[str, Any]:
    """Every option's default, by its name."""
    return {name: value for kind in KINDS for name, value in kind._field_defaults.items()}


def split_options(options: Mapping[str, Any]) -> tuple[LossOptions, TermOptions, ComputeOptions]:
    """The objects of keyword arguments. Raises TypeError for a name that none has."""
    known = defaults()
    for name in options:
        if name not in known:
            raise TypeError(f"{name}: not an option, want one of {', '.join(known)}")

    def given(kind: type) -> dict[str, Any]:
        return {name: options[name] for name in fields(kind) if name in options}

    return (
        LossOptions(**given(LossOptions)),
        TermOptions(**given(TermOptions)),
        ComputeOptions(**given(ComputeOptions)),
    )


KINDS = (LossOptions, TermOptions, ComputeOptions)
"""In the order of their fields among a call's keyword arguments."""


def fields(options: type) -> dict[str, Field]:
    """Name -> how it is passed, in the order of the fields."""
    hints = get_type_hints(options.__base__, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise for what is no choice, by its name; calls of every training step do not come here."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: got {type(value).__name__}, want a str")
    if value not in choices:
        raise ValueError(f"{name}: got {value!r}, want one of {', '.join(map(repr, choices))}")
