"""The ops' schemas, generated from the options' fields, and options from an op's flat arguments."""

from __future__ import annotations

from ..options import KINDS, LossOptions, fields

OPERANDS = "Tensor input, Tensor linear_weight, Tensor target"
LIMITS = "SymInt window, SymInt workspace"
NEEDED = "bool need_dinput, bool need_dweight"
LOSS = ", ".join(f"{field.inner} {name}" for name, field in fields(LossOptions).items())
"""The loss's fields, all in their order, as the inner ops take them."""
LOSS_FIELDS = len(LossOptions._fields)

STATISTICS = "Tensor row_max, Tensor row_sum, Tensor num_valid"


def _keywords(options: type) -> str:
    """The fields as keyword arguments with their defaults."""
    return ", ".join(
        f"{field.public} {name}={options._field_defaults[name]!r}" for name, field in fields(options).items()
    )


TERMS = "Tensor? linear_bias=None, Tensor? weight=None, Tensor? token_weight=None, Tensor? denominator=None"
PUBLIC = f"fused_linear_cross_entropy({OPERANDS}, *, {TERMS}, {', '.join(map(_keywords, KINDS))}) -> Tensor"
FORWARD = f"forward({OPERANDS}, {LOSS}, {LIMITS}) -> (Tensor loss, {STATISTICS})"
FORWARD_KEEP = (
    f"forward_keep({OPERANDS}, {LOSS}, {LIMITS}, SymInt kept_columns)"
    f" -> (Tensor loss, {STATISTICS}, Tensor kept, Tensor kept_scale)"
)
BACKWARD = (
    f"backward(Tensor dloss, {OPERANDS}, {STATISTICS}, Tensor? kept, Tensor? kept_scale, {LOSS}, {LIMITS}, "
    f"{NEEDED}) -> (Tensor dinput, Tensor dlinear_weight)"
)
GRAD_IN_FORWARD = (
    f"grad_in_forward({OPERANDS}, {LOSS}, {LIMITS}, {NEEDED})"
    " -> (Tensor loss, Tensor num_valid, Tensor dinput_accumulator, Tensor dweight_accumulator, "
    "Tensor source)"
)
SCALE_GRADIENTS = (
    "scale_gradients(Tensor dloss, Tensor target, Tensor num_valid, Tensor? dinput_accumulator, "
    f"Tensor? dweight_accumulator, Tensor? source, {LOSS}, ScalarType dtype, {NEEDED})"
    " -> (Tensor dinput, Tensor dlinear_weight)"
)


def loss_of(arguments: tuple) -> tuple[LossOptions, tuple]:
    """The loss, whose fields begin an inner op's arguments (after its tensors), and the remaining arguments.

    The public op has checked the fields; they may be symbolic here.
    """
    return LossOptions._make(arguments[:LOSS_FIELDS]), arguments[LOSS_FIELDS:]
