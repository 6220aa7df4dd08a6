"""Sampled softmax: the loss over a sample of the classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .arguments import Operands
from .functional import check_types, check_types_besides, denominator_of
from .ops import checks, sampled, terms
from .options import MOST_WINDOW, LossOptions
from .scalars import python_number
from .streaming.rows import is_valid
from .streaming.sampled import SampledOperands, SampledOptions
from .symbolic import holds

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def sampled_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    sampled_ids: Tensor,
    *,
    sampled_log_q: Tensor | None = None,
    target_log_q: Tensor | None = None,
    remove_accidental_hits: bool = True,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    denominator: Tensor | float | None = None,
    window: int | None = None,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Sampled softmax: cross entropy of each token's target against m sampled classes, instead of all V.

    With z = (input @ linear_weight.T + linear_bias) logit_scale, computed only for the target's class y and
    the sampled classes, and log_q from target_log_q and sampled_log_q (0 without them), a token's loss is

        token_weight (log(exp(z_y - log_q_y) + sum_j exp(z_j - log_q_j)) - (z_y - log_q_y))

    where j runs over the sampled ids that are not y; reference.sampled_linear_cross_entropy is the
    definition. Use it for training: with ids drawn from q its gradients approximate those of the full cross
    entropy. Its value does not estimate the full cross entropy; evaluate with linear_cross_entropy.

    Args:
        input, linear_weight, target, linear_bias, reduction, ignore_index, logit_scale, token_weight,
            denominator: as in linear_cross_entropy.
        sampled_ids: (m,), classes in [0, V) that all tokens share: int64 or int32, on input's device. They
            may repeat; each occurrence counts.
        sampled_log_q, target_log_q: (m,) and target's shape, any floating dtype: the logarithm of how often
            each class is expected in a sample (tf.nn.sampled_softmax_loss's expected counts), or of its
            probability, which differs by a constant. Give both or neither; without them ids are assumed to
            be drawn uniformly.
        remove_accidental_hits: whether a sampled id that is a token's target is left out of its sum.
        window: how many sampled ids are processed at once; None: chosen. It changes results by rounding only.
        tp_group: None; a group is refused, since linear_weight has all classes.

    Returns:
        The loss in nats: of target's shape for "none", else a scalar; float32 (float64 for float64).

    It is plain torch, on every device, without synchronisation. It takes m d multiplications a token for the
    forward and three times as many for the backward, which computes the logits again. Beyond the results it
    allocates windows of n x window in float32 (some 8 MiB on a CPU, 256 on a GPU, or what 64 ids take),
    copies of input and of the sampled rows, and in the backward their gradients in float32. linear_weight's
    gradient is dense. Each class's gradient is summed in float32, in the order of sampled_ids, then of
    tokens, and rounded once: the same bits each time. Errors are as in linear_cross_entropy; sampled_ids out
    of range are an error on a CPU, and make every loss nan on a GPU. There are no other terms and no
    schedules. Differentiating a gradient again raises RuntimeError.
    """
    if tp_group is not None:
        raise ValueError("tp_group: got a group in a sampled loss, want None: linear_weight has all classes")
    check_types(input, linear_weight, target)
    check_types_besides(
        linear_bias=linear_bias,
        token_weight=token_weight,
        sampled_log_q=sampled_log_q,
        target_log_q=target_log_q,
    )
    for name, operand in (("input", input), ("linear_weight", linear_weight), ("target", target)):
        # Whose class this does not import.
        if hasattr(operand, "device_mesh"):
            raise ValueError(f"{name}: got a DTensor, want ordinary tensors in a sampled loss")
    options = LossOptions(reduction, ignore_index, logit_scale)
    operands, linear_bias = terms.checked(Operands(input, linear_weight, target), linear_bias)
    tensors = terms.TermTensors(None, None, token_weight, denominator_of(denominator, input))
    terms.check_factors(operands, tensors)
    _check(operands, sampled_ids, sampled_log_q, target_log_q)
    remove_accidental_hits, window = python_number(remove_accidental_hits), python_number(window)
    if not isinstance(remove_accidental_hits, bool):
        raise TypeError(f"remove_accidental_hits: got {type(remove_accidental_hits).__name__}, want a bool")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window: got {window!r}, want at least 1 id or None")
    window = 0 if window is None else min(window, MOST_WINDOW)
    shape, flat = operands.target.shape, checks.flatten(operands)
    if target_log_q is not None:
        target_log_q = target_log_q.reshape(-1)
    given = SampledOperands(*flat, sampled_ids, linear_bias, sampled_log_q, target_log_q)
    how = SampledOptions(options.ignore_index, options.logit_scale, remove_accidental_hits, window)
    losses = sampled.losses(*given, *how)
    valid = is_valid(flat.target, options.ignore_index)
    if token_weight is not None:
        losses = losses * token_weight.reshape(-1).to(losses.dtype).masked_fill(~valid, 0)
    if options.reduction == "none":
        return losses.view(shape)
    total = losses.sum()
    if options.reduction == "sum":
        return total
    if tensors.denominator is not None:
        return terms.divided(total, tensors.denominator)
    return total / valid.sum().clamp(min=1)


def _check(
    operands: Operands, ids: Tensor, sampled_log_q: Tensor | None, target_log_q: Tensor | None
) -> None:
    hidden = operands.hidden
    if not isinstance(ids, Tensor):
        raise checks.no_tensor("sampled_ids", ids)
    checks.check_dense("sampled_ids", ids)
    if ids.dim() != 1 or not holds(ids.shape[0] > 0):
        raise ValueError(f"sampled_ids: got shape {tuple(ids.shape)}, want (m,), at least one class")
    checks.check_term("sampled_ids", ids, tuple(ids.shape), checks.TARGET_DTYPES, hidden)
    if (sampled_log_q is None) != (target_log_q is None):
        got, missing = "sampled_log_q", "target_log_q"
        if sampled_log_q is None:
            got, missing = missing, got
        raise ValueError(f"{got}: got a tensor without a {missing}, want both or neither")
    wanted = tuple(ids.shape), tuple(operands.target.shape)
    for name, tensor, shape in zip(
        ("sampled_log_q", "target_log_q"), (sampled_log_q, target_log_q), wanted, strict=True
    ):
        if tensor is not None:
            checks.check_term(name, tensor, shape, checks.DTYPES, hidden)
            checks.refuse_gradient(name, tensor)
