"""The public call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import environment, ops
from .arguments import Operands
from .logit_term import LogitTerm, as_number
from .ops import checks
from .options import (
    ComputeOptions,
    LossOptions,
    TermOptions,
    check_kind,
    check_positive,
    has_terms,
    is_number,
)
from .scalars import python_number
from .symbolic import is_traced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_fused_linear_cross_entropy = torch.ops.cute_lce.fused_linear_cross_entropy.default
_denominator_op = torch.ops.cute_lce.denominator.default


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor | Sequence[Tensor] | nn.ParameterList,
    target: Tensor,
    *,
    linear_bias: Tensor | Sequence[Tensor | None] | nn.ParameterList | None = None,
    weight: Tensor | Sequence[Tensor | None] | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | LogitTerm | None = None,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    denominator: Tensor | float | None = None,
    schedule: str = "auto",
    workspace_mb: float | None = None,
    window: int | None = None,
    grad_weight_out: Tensor | Sequence[Tensor | None] | None = None,
    grad_weight_dummy: bool = False,
    tp_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    sequence_dim: int | None = None,
    grad_input: str = "reduced",
    sm_margin: int | None = None,
) -> Tensor:
    """Cross entropy of ``input @ linear_weight.T`` with class indices, without storing the logits.

    The logits are z = softcap((input @ linear_weight.T + linear_bias) logit_scale), and a token's loss is
    token_weight (cross entropy, with class weights and smoothing, + z_loss lse(z)^2), where lse is
    log sum exp; docs/losses.md has the formulas, and reference.linear_cross_entropy is the definition. Names
    and order are those of torch.nn.functional.linear_cross_entropy. The one difference from torch: if every
    target is ignored, "mean" gives loss and gradients of 0, where torch gives nan.

    Args:
        input: (..., d), the hidden states: bfloat16, float16, float32 or float64, any strides (a copy may be
            made where neither rows nor columns are contiguous).
        linear_weight: (V, d), input's dtype and device, any strides.
        target: (...), class indices in [0, V) or ignore_index: int64 or int32, input's device, any strides.
        linear_bias: (V,), input's dtype; its gradient is summed in float32 (float64 for float64) and rounded
            once.
        weight: (V,), any floating dtype: class weights, as in torch: a row's loss has its target's weight,
            and with label_smoothing each class has its own.
        reduction: "mean" divides the sum of the rows' losses by the number of targets that are not ignored,
            with class weights by the sum of these targets' weights, or by denominator; "sum"; or "none",
            which accepts any upstream gradient (expanded, strided).
        ignore_index: rows with this target have loss 0 and no gradient. None means -100, as in torch. A nan
            or inf in such a row of input does not matter.
        label_smoothing: in [0, 1]: the part of a target's probability that is spread over all classes.
        logit_scale: multiplies the logits.
        softcap: from 1e-30 to 1e30: c of c tanh(z / c), which is applied to the scaled logits z. Or a
            `LogitTerm`, your own function of the logits, which is compiled into the kernels. None: neither.
        z_loss: the coefficient of the square of the row's lse, which is added to its loss.
        token_weight: target's shape, any real dtype: multiplies the row's loss. "mean" does not divide by it.
        denominator: what "mean" divides by instead of the number of rows, such as the number of tokens in all
            micro-batches of a step: a number that is not negative, or a tensor of shape () on input's device,
            of any real dtype, which is not read on the host. The other reductions do not use it. If it is 0
            and the sum of the losses is too, because all rows are ignored or have a token_weight of 0, loss
            and gradients are 0, where 0 / 0 in torch (and Hugging Face) is nan; any other division by 0
            gives inf.
        schedule: how the backward obtains the logits.
            "recompute" computes them again, window by window: the least memory, any upstream gradient.
            "keep" stores, from forward to backward, as many of their columns as workspace_mb holds, and
            recomputes the others: any upstream gradient.
            "grad_in_forward" computes the gradients in the forward, for a scalar upstream gradient, and holds
            them in float32 (4 (n + V) d bytes) until the backward. With reduction "none", linear_weight and
            linear_bias must then need no gradient.
            "auto" picks one that can serve the call: on the kernels the one that is predicted to be the
            fastest ("grad_in_forward" only in eager calls without grad_weight_out); on the streaming path
            docs/tuning.md has which.
            Terms restrict the kernels: with both label_smoothing and a softcap they recompute, and "keep" is
            refused; with label_smoothing they keep only in bfloat16, and in float16 the streaming path serves
            "keep". It also serves "grad_in_forward" with a softcap, label_smoothing, a linear_bias or a
            z_loss.
            If nothing needs a gradient, every schedule is a forward that keeps nothing.
        workspace_mb: the most that the call, including its backward, may allocate beyond its results (the
            loss and the gradients), in MiB (2**20 bytes). The kernels' "grad_in_forward" uses the gradients'
            memory in the forward, whether or not a backward follows. None means CUTE_LCE_WORKSPACE_MB in the
            environment, or 2304, raised automatically if a call needs more; a number is never raised. "auto"
            and "recompute" are predicted never to be slower with more. With the least that the kernels
            accept they are predicted to take at most 1.8 times as long as the matrix products alone, or 1.5
            times the best time if that is longer.
        window: columns of the vocabulary per window; None: chosen from the shapes. It changes results by
            rounding only.
        grad_weight_out: a buffer to which the backward adds linear_weight's gradient, on the forward's
            stream; autograd gets None for linear_weight. (V, d), float32, bfloat16 or linear_weight's dtype,
            contiguous, on input's device, at a multiple of 16 bytes, sharing no memory with the operands. The
            sum is formed in float32 (float64 for float64) and rounded once, without a temporary of (V, d)
            unless the kernels pad a d that is not a multiple of 8. The buffer may change between forward and
            backward. A second backward adds again, and a backward that does not ask for linear_weight's
            gradient adds nothing, unless one operation made both operands (other than a module's backward
            hook or fully_shard); where one of its outputs itself is asked for it raises. Plain eager calls
            only: no torch.compile, torch.func, dispatch mode or tensor subclass.
        grad_weight_dummy: with grad_weight_out, autograd gets zeros of linear_weight's shape instead of None:
            one expanded number, which takes memory where torch makes a new .grad from it, casts it
            (autocast) or adds it to another gradient.
        tp_group: a torch.distributed process group over whose ranks the vocabulary is sharded. linear_weight,
            its gradient, linear_bias, weight and grad_weight_out are this rank's rows; input and target are
            the same on every rank, and target has classes of the whole vocabulary. The results are the same
            on every rank, to the last bit. workspace_mb applies to each rank. A target in no rank's shard
            makes its row nan. Not with "grad_in_forward". docs/parallel.md has more.
        vocab_start: the first class of this rank's shard; None: the shards are equal, in rank order.
        sequence_dim: the dimension of the tokens that input is this rank's slice of; slices are equal, in
            rank order. target is a slice too, or whole, and with "none" the losses have target's shape.
            "mean" and "sum" are over all ranks' tokens. With "none" each rank gives the upstream gradient of
            its losses: the same on every rank if target is whole.
        grad_input: "reduced": input's gradient is summed over the group, in float32, and rounded once;
            "partial": it is this shard's part, rounded, and the caller sums it.
        sm_margin: the number of SMs (streaming multiprocessors) that the GEMM of linear_weight's gradient
            leaves free for that sum while it is predicted to run; None: as many as the group's collectives
            take. The streaming path leaves none.

    DTensors: their placements replace tp_group, vocab_start and sequence_dim, which must then be None;
    docs/parallel.md lists the accepted placements.

    Several heads: linear_weight may be K weights, a list (or nn.ParameterList) of (V_k, d) or a tensor
    (K, V, d). Then target and token_weight are (..., K), and input is (..., d), which the heads share, or
    (..., K, d); linear_bias, weight and grad_weight_out are lists of K, or tensors with a leading K, and
    a denominator may be (K,). Each head is a call of its own, except for input's gradient: those of three
    heads or more are added in float32 (4 n d bytes beside workspace_mb), of two in input's dtype, so that the
    sum is rounded once. workspace_mb is divided equally among them, except with "recompute"; with None each
    head has the default. Not with tp_group or DTensors.

    Returns:
        The loss in nats: of target's shape for "none", else a scalar, or (K,) for several heads; float32
        (float64 for float64).

    Each gradient has the dtype of its tensor; it is accumulated in float32 (float64 for float64) and rounded
    once. Under autocast, input and linear_weight are cast as torch's linear casts them. Differentiating a
    gradient again raises RuntimeError ("grad_in_forward" and grad_weight_out raise at once under
    create_graph=True), and so does forward-mode differentiation. torch.func's vmap supports every schedule;
    its grad, vjp and jacrev support all but "grad_in_forward". Batched calls are computed one after another.

    Raises:
        TypeError: a dtype, or a Python type, other than the above.
        ValueError: a shape, a value or a device other than the above; a weight, token_weight or denominator
            that requires a gradient; a schedule that cannot serve the call; a workspace_mb too small for the
            schedule (the message has the least that fits); on a CPU, a target outside [0, V) that is not
            ignore_index. On a GPU, where checking would synchronise, such a row's loss and its input's
            gradient, and hence the weight's gradient, are nan, whatever its upstream gradient, and nothing
            outside the tensors is read; with CUTE_LCE_CHECK_TARGETS=1 in the environment it is a device-side
            assertion there.
    """
    if workspace_mb is None:
        workspace_mb = environment.WORKSPACE_MB
    values = reduction, ignore_index, logit_scale, schedule, workspace_mb, window
    over_group = tp_group, vocab_start, sequence_dim, grad_input, sm_margin
    terms = label_smoothing, as_number(softcap), z_loss
    tensors: tuple[Any, Any, Any, Any] = linear_bias, weight, token_weight, denominator
    if ops.has_heads(linear_weight):
        if not is_on_one_device(over_group):
            raise _refuse_group(over_group)
        numbers = map(python_number, (*values, *terms))
        given = _named(*numbers, *tensors, grad_weight_out, python_number(grad_weight_dummy))
        return ops.linear_cross_entropy_of_heads(linear_cross_entropy, input, linear_weight, target, given)
    if not isinstance(linear_weight, Tensor):
        raise checks.no_tensor("linear_weight", linear_weight)
    check_types(input, linear_weight, target)
    has_tensors = is_any_given(tensors)
    if has_tensors:
        check_types_besides(linear_bias=linear_bias, weight=weight, token_weight=token_weight)
    plain = ops.is_plain_eager(input, linear_weight, target)
    if not plain and ops.is_distributed(input, linear_weight, target):
        from .parallel import dtensor

        given = _named(*values, *terms, *tensors, grad_weight_out, grad_weight_dummy)
        operands, group = Operands(input, linear_weight, target), named_over_group(over_group)
        return dtensor.linear_cross_entropy(linear_cross_entropy, operands, group, given)
    loss, compute = _remembered_options(values) if plain else _options(*values)
    spread = None
    if not is_on_one_device(over_group):
        spread = _parallel().spread_of(*over_group)
    destination = None
    if grad_weight_out is not None or grad_weight_dummy is not False:
        # Others, which have no addresses, are refused below.
        if all(t.layout is torch.strided and not t.is_nested for t in (input, linear_weight, target)):
            operands = Operands(input, linear_weight, target)
            destination = _destination(operands, grad_weight_out, grad_weight_dummy, plain)
        plain = True
    if spread is not None:
        if has_terms(terms) or has_tensors:
            from .parallel import public

            given = ops.TermTensors(*tensors[:3], denominator_of(denominator, input))
            operands = Operands(input, linear_weight, target)
            terms = tuple(map(python_number, terms))
            return public.linear_cross_entropy(
                operands, given, loss, terms, compute, spread, plain, destination
            )
        if destination is None:
            return _parallel().call(input, linear_weight, target, loss, compute, spread, plain)
        return _parallel().linear_cross_entropy(
            input, linear_weight, target, loss, compute, spread, watched=False, destination=destination
        )
    if not plain or has_terms(terms) or has_tensors:
        operands = Operands(input, linear_weight, target)
        return call_with_terms(operands, tensors, loss, terms, compute, plain, destination)
    return ops.linear_cross_entropy(
        input, linear_weight, target, loss, compute, watched=False, destination=destination
    )


_NAMES = (
    *(*LossOptions._fields, *ComputeOptions._fields),
    *(*TermOptions._fields, *ops.TermTensors._fields),
    *("grad_weight_out", "grad_weight_dummy"),
)
"""Arguments of a call: fields of the options, then of the terms, numbers and tensors, and a buffer's."""
ON_ONE_DEVICE = (None, None, None, "reduced", None)
"""The arguments about a group."""


def is_on_one_device(over_group: tuple) -> bool:
    """Whether none of them is given."""
    tp_group, vocab_start, sequence_dim, grad_input, sm_margin = over_group
    return (
        (tp_group is None and vocab_start is None and sequence_dim is None and sm_margin is None)
        and isinstance(grad_input, str)
        and grad_input == "reduced"
    )


def is_any_given(tensors: tuple) -> bool:
    """Whether one of four is not None; an array is compared with None element by element."""
    first, second, third, fourth = tensors
    return not (first is None and second is None and third is None and fourth is None)


def _named(*given: Any) -> dict[str, Any]:
    return dict(zip(_NAMES, given, strict=True))


def named_over_group(over_group: tuple) -> dict[str, Any]:
    """Those arguments by their names."""
    names = "tp_group", "vocab_start", "sequence_dim", "grad_input", "sm_margin"
    return dict(zip(names, over_group, strict=True))


def _refuse_group(over_group: tuple) -> ValueError:
    """The error for several heads, by the name of the first that is given."""
    each = zip(named_over_group(over_group), over_group, ON_ONE_DEVICE, strict=True)
    # By their types first: an array is compared element by element.
    name, got, want = next(
        (name, got, want) for name, got, want in each if type(got) is not type(want) or got != want
    )
    got = "a group" if name == "tp_group" else repr(got)
    return ValueError(f"{name}: got {got} with several heads, want {want!r}: a group takes one head")


def call_with_terms(
    operands: Operands,
    tensors: tuple,
    loss: LossOptions,
    terms: tuple,
    compute: ComputeOptions,
    plain: bool,
    destination: ops.Destination | None = None,
) -> Tensor:
    """linear_cross_entropy of the fields of ops.TermTensors, of which denominator may be a number, and of
    TermOptions. plain: ops.is_plain_eager of the operands."""
    linear_bias, weight, token_weight, denominator = tensors
    denominator = denominator_of(denominator, operands.hidden)
    given = ops.TermTensors(linear_bias, weight, token_weight, denominator)
    if plain:
        numbers = TermOptions(*terms)
        return ops.linear_cross_entropy_with_terms(operands, given, loss, numbers, compute, destination)
    # Numbers' values are not looked at here: torch.compile would trace that.
    named = dict(zip(TermOptions._fields, map(python_number, terms), strict=True))
    check_kinds(named)
    return _fused_linear_cross_entropy(
        *operands, **given._asdict(), **loss._asdict(), **named, **compute._asdict()
    )


def check_kinds(numbers: dict[str, Any]) -> None:
    """Raise TypeError for what is neither a number nor None, such as a NumPy scalar, which is an array to
    torch.compile: it then leaves the call to Python."""
    for name, number in numbers.items():
        if number is not None:
            check_kind(name, number)


def denominator_of(denominator: Any, input: Tensor) -> Tensor | None:
    """A denominator as a tensor. Raises TypeError and ValueError for a number that cannot be one."""
    if denominator is None or isinstance(denominator, Tensor):
        return denominator
    denominator = python_number(denominator)
    if not is_number(denominator):
        raise checks.no_tensor("denominator", denominator, "a number, a torch.Tensor or None")
    check_positive("denominator", denominator, or_zero=True)
    if is_traced():
        return _denominator_op(denominator, input)
    return input.new_full((), denominator, dtype=torch.float64)


def _parallel() -> Any:
    """Imported when asked for: torch may be built without torch.distributed. Not functools.cache's, of which
    torch.compile warns."""
    from .parallel import call

    return call


def _destination(operands: Operands, out: Any, dummy: bool, plain: bool) -> ops.Destination | None:
    """grad_weight_out and grad_weight_dummy, checked; plain: ops.is_plain_eager of the call's operands."""
    weight = operands.weight
    dummy = python_number(dummy)
    if not isinstance(dummy, bool):
        raise TypeError(f"grad_weight_dummy: got {type(dummy).__name__}, want a bool")
    if out is None and not dummy:
        return None
    if out is None:
        raise ValueError("grad_weight_dummy: got True without grad_weight_out, want False")
    if not isinstance(out, Tensor):
        raise checks.no_tensor("grad_weight_out", out, "a torch.Tensor or None")
    checks.check_dense("grad_weight_out", out)
    if out.device != weight.device:
        raise ValueError(
            f"grad_weight_out: got device {out.device}, want linear_weight's device, {weight.device}"
        )
    if not plain or not ops.is_plain_eager(out, out, out):
        raise ValueError(
            "grad_weight_out: got a call that something intercepts (torch.compile, a transform, a dispatch "
            "mode, a tensor subclass), want None there"
        )
    if not weight.requires_grad:
        raise ValueError(
            "grad_weight_out: got a tensor for a linear_weight that needs no gradient, want None there"
        )
    if out.dtype not in (torch.float32, torch.bfloat16, weight.dtype):
        dtypes = dict.fromkeys(map(str, (torch.float32, torch.bfloat16, weight.dtype)))
        raise TypeError(f"grad_weight_out: got {out.dtype}, want one of {', '.join(dtypes)}")
    if out.shape != weight.shape:
        raise ValueError(
            f"grad_weight_out: got shape {tuple(out.shape)}, want linear_weight's, {tuple(weight.shape)}"
        )
    if not ops.is_writable(out):
        raise ValueError(
            f"grad_weight_out: got strides {out.stride()} at address {out.data_ptr():#x}"
            f"{', lazily negated' if out.is_neg() else ''}, want a contiguous tensor at a multiple of 16 "
            "bytes"
        )
    if out.requires_grad or out.is_inference():
        what = "requires a gradient" if out.requires_grad else "was made in inference mode"
        raise ValueError(f"grad_weight_out: got a tensor that {what}, want one that does not and was not")
    for name, operand in zip(("input", "linear_weight", "target"), operands, strict=True):
        if _overlap(out, operand):
            raise ValueError(f"grad_weight_out: got memory of {name}, want a tensor that shares none with it")
    return ops.Destination(out, dummy)


def check_types(input: Tensor, linear_weight: Tensor, target: Tensor) -> None:
    """Raise TypeError, by its name, for an operand that is no tensor."""
    if isinstance(input, Tensor) and isinstance(linear_weight, Tensor) and isinstance(target, Tensor):
        return
    for name, value in (("input", input), ("linear_weight", linear_weight), ("target", target)):
        if not isinstance(value, Tensor):
            raise checks.no_tensor(name, value)


def check_types_besides(**tensors: Any) -> None:
    """The same of others, by their names, which may be None."""
    for name, value in tensors.items():
        if value is not None and not isinstance(value, Tensor):
            raise checks.no_tensor(name, value, "a torch.Tensor or None")


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether the addresses from the first to the last of two tensors overlap; strides are not negative."""

    def ends(tensor: Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

    (first, end), (other_first, other_end) = ends(one), ends(other)
    return one.numel() > 0 < other.numel() and first < other_end and other_first < end


def _options(*values: Any) -> tuple[LossOptions, ComputeOptions]:
    """Both objects of their fields' values, in order."""
    fields = len(LossOptions._fields)
    return LossOptions(*values[:fields]), ComputeOptions(*values[fields:])


_known_options = functools.lru_cache(maxsize=1024, typed=True)(_options)


def _remembered_options(values: tuple) -> tuple[LossOptions, ComputeOptions]:
    """The same, checked once for the same values."""
    try:
        return _known_options(*values)
    except TypeError:
        # A value that cannot be hashed, or one that is refused, which happens again here.
        return _options(*values)
