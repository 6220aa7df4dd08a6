"""The loss's formulas, each written once for the kernels and for torch, with operators that the DSL's values
and torch's tensors share. No torch, no cutlass.

Functions that differ between the two, work in place, or must remain one instruction are arguments: exp, fma
and the like. In kernels `exp` is exp2 of the argument times LOG2_E; the difference is taken first, since it
is exact where it matters.
"""

import math
import struct
from dataclasses import dataclass

LOG2_E = 1.4426950408889634

HEADROOM = 64.0
"""How far above a sum's base exponents in base 2 may lie without raising it."""
FARTHEST = 2.0**31
"""Integer bases below it are apart from what they stand for by at most 64, though neither is exact."""
ENTROPY_HEADROOM = 4.0
"""The same for an entropy's sum, whose rounding error is proportional to how far the maximum lies above the
base: at 64 the entropy of a confident row would be off by 4e-6."""
MOST_STEPS = 65535.0
"""The most steps by which K is raised that are noted, in 16 bits."""


@dataclass(frozen=True)
class KeptRange:
    """How exponentials relative to 2^K, with an integer K for each row, use a 16-bit type's range.

    headroom: how far above K exponents in base 2, and that of a row's sum, may lie without raising K. step:
    one step of a raise. far: bound of |K|, within which K and its raises are integers in fp32 and the noted
    steps reach +far from -far. below: how far K lies below what a row's sum is guessed to be before it is
    known. samples: logits of a row that are looked at for that guess, besides the target's.
    """

    headroom: float
    step: float
    far: float
    below: float
    samples: int


KEPT_RANGES = {
    # A raised maximum lies within +-64 of K.
    "bfloat16": KeptRange(headroom=HEADROOM, step=128.0, far=float(2**22), below=0.0, samples=0),
    # Normal numbers lie within 2^-14 and 65504 = 2^15.9993, and a sum of 2^s makes probabilities below
    # 2^(-14 - s) subnormal.
    "float16": KeptRange(headroom=15.5, step=8.0, far=float(2**18), below=6.0, samples=4),
}
"""By the names of the types."""

HALF_SCALE = float(2**15)
"""What float16's recomputed dlogits are multiplied by: probabilities are normal from 2^-29 on."""
HALF_LARGEST = float(2**14)
"""The largest magnitude in float16's scaled copy of the hidden rows."""
HALF_LEAST = float(2**-60)
"""The least that the largest magnitude is taken to be before it is scaled; a gradient of it rounds to 0."""


def logits(product, loss):
    """What a product of hidden and weight becomes before the softmax. A tensor is changed in place.

    loss: LossOptions, or in kernels arguments.LossArguments, which has its numbers: those in `terms` matter.
    """
    if "logit_scale" in loss.terms:
        product *= loss.logit_scale
    return product


def product_gradient(gradient, loss):
    """The gradient by a product, of one by its logit. Coefficients (arguments.TERMS) are by products."""
    scales = "logit_scale" in loss.terms and "coefficients" not in loss.terms
    return gradient * loss.logit_scale if scales else gradient


def cap_ratio(x, inverse_cap, tanh):
    """What a softcap of x is, relative to the cap."""
    return tanh(x * inverse_cap)


def capped(ratio, cap):
    """cap tanh(x / cap). ratio: cap_ratio of x."""
    return ratio * cap


def cap_slope(ratio):
    """The derivative of `capped` by x."""
    return 1.0 - ratio * ratio


def slope_of_capped(z, inverse_square, fma):
    """`cap_slope` of the ratio that became z. inverse_square: 1 / cap^2, with the temperature's."""
    return fma(z * -inverse_square, z, 1.0)


CAP_EDGE = 0.4
TANH_SERIES = (-0.047553604158490206, 0.1098840377432647, -0.2944986157225769, 0.9498723124565699)
"""tanh(y) / y by powers of y^2 - CAP_EDGE^2, the highest first: the minimax polynomial of |y| <= CAP_EDGE,
whose relative error is 2^-23.3."""


def softcap_numbers(softcap, logit_scale, temperature):
    """What kernels read of softcap tanh(logit_scale x / softcap) / temperature (arguments.TERMS), a dict."""
    inverse = abs(logit_scale / softcap)
    cap = math.copysign(softcap / temperature, logit_scale)
    edge, highest = CAP_EDGE / inverse, len(TANH_SERIES) - 1
    series = {
        f"series_{highest - i}": coefficient * cap * inverse ** (2 * (highest - i) + 1)
        for i, coefficient in enumerate(TANH_SERIES)
    }
    return {
        "cap": cap,
        "inverse_square": _inverse_square(_float32(cap)),
        "edge": edge,
        "edge_square": edge**2,
        "doubled": 2 * LOG2_E * inverse,
        **series,
    }


def _inverse_square(cap):
    """1 / cap^2 in float32, or a little less: `slope_of_capped` is nowhere negative up to the cap."""
    inverse = _float32(cap**-2)
    while _float32(cap * inverse) * cap > 1:
        inverse = _float32(inverse * (1 - 2.0**-23))
    return inverse


def _float32(number):
    return struct.unpack("f", struct.pack("f", number))[0]


def softcap_fits(softcap, logit_scale, temperature):
    """Whether `softcap_numbers` are normal numbers of fp32, as they are of caps from 10^-5 to 10^6."""
    inverse, cap = abs(logit_scale / softcap), softcap / temperature
    if not (2.0**-24 <= inverse <= 2.0**24 and 2.0**-40 <= cap <= 2.0**40):
        return False
    numbers = softcap_numbers(softcap, logit_scale, temperature).values()
    return all(2.0**-126 <= abs(number) <= 2.0**127 for number in numbers)


def beyond_edge(x, edge_square, fma):
    """x^2 - edge^2: its sign bit is set where |x| < edge, and not for inf or nan."""
    return fma(x, x, -edge_square)


def small_capped(x, beyond, loss, fma):
    """The softcap of |x| <= edge. beyond: beyond_edge of x."""
    total = fma(loss.series_3, beyond, loss.series_2)
    return x * fma(fma(total, beyond, loss.series_1), beyond, loss.series_0)


def tanh_of_small(x, fma):
    """tanh of |x| <= CAP_EDGE."""
    beyond, total = beyond_edge(x, CAP_EDGE**2, fma), TANH_SERIES[0]
    for coefficient in TANH_SERIES[1:]:
        total = fma(total, beyond, coefficient)
    return x * total


def large_capped(distance, loss, exp2, reciprocal, fma):
    """The softcap of |x| >= edge, where it loses few digits by being a difference. distance: |x|."""
    return fma(reciprocal(1.0 + exp2(distance * loss.doubled)), -2.0 * loss.cap, loss.cap)


def smoothed(nll, total_nll, smoothing, classes):
    """Cross entropy with a target's probability of `smoothing` spread over all classes.

    nll: of the target, times its class weight. total_nll: the sum of all classes', each times its weight.
    """
    return nll * (1.0 - smoothing) + total_nll * (smoothing / classes)


def smoothed_upstream(dloss, smoothing, classes):
    """The gradients by both arguments of `smoothed`."""
    return dloss * (1.0 - smoothing), dloss * (smoothing / classes)


def z_loss_upstream(dloss, lse, coefficient):
    """The gradient of coefficient lse^2 by lse."""
    return dloss * lse * (2.0 * coefficient)


LEAST_SHARE = 2.0**-12
"""What the softmax's coefficient in a row's gradient is taken to be, over the onehot's, where it is less than
that and the row's exponentials are kept: an error of as much, below that of a 16-bit number."""


def softmax_coefficient(onehot, lse_slope, lse):
    """The softmax's in the gradient of a row's loss, in which a onehot has the coefficient `onehot`."""
    return lse * lse_slope + onehot


def logprob(log_row_sum, row_max, logit):
    """logit - lse, grouped as `row_loss`; there is no other negation."""
    return -row_loss(log_row_sum, row_max, logit)


def lse(log_row_sum, row_max):
    return row_max + log_row_sum


def entropy(log_row_sum, mean_gap):
    """-sum p log p. mean_gap: the mean of row_max - z under p."""
    return log_row_sum + mean_gap


def entropy_upstream(dentropy, mean_gap):
    """What the gradient by a logit is p times, with gap z - row_max: (constant part, factor of the gap).

    It is -p (log p + H); log_row_sum cancels without being subtracted.
    """
    return -dentropy * mean_gap, -dentropy


def log_sum_sq_probs(log_row_sum, log_sum_of_squares):
    """log sum p^2, of sums of exponentials and of their squares relative to row_max."""
    return log_sum_of_squares - 2.0 * log_row_sum


def exponential(z, reference, exp, subtract=lambda a, b: a - b):
    """exp(z - reference), in which a common offset of the logits loses nothing."""
    return exp(subtract(z, reference))


def rescaled(row_sum, row_max, reference, exp):
    """A sum relative to exp(row_max), converted to one relative to exp(reference)."""
    return row_sum * exp(row_max - reference)


def row_loss(log_row_sum, row_max, target_logit):
    """lse - target_logit in nats, grouped so that the only large numbers subtracted are logits."""
    return log_row_sum + (row_max - target_logit)


def mean_upstream(dloss, count):
    """The gradient of "mean" by one row's loss."""
    return dloss / count


def softmax_factor(grad_scale, row_sum):
    """The factor from exp(z - row_max) to grad_scale times the softmax."""
    return grad_scale / row_sum


def dlogits(softmax, onehot):
    """grad_scale (softmax - onehot), of arguments with the same scale."""
    return softmax - onehot


def kept_exponent(z, base, fma):
    """z log2 e - base: the base-2 exponent of exp(z) relative to 2^base; base: an integer."""
    return fma(z, LOG2_E, -base)


def base_exponent(logit, base, fma):
    """base - z log2 e: the base-2 exponent of 2^base relative to exp(z)."""
    return fma(logit, -LOG2_E, base)


def raise_steps(highest, reference, kept, fma, ceil):
    """The number of steps by which to raise K so that no exponent exceeds the headroom; 0 and less: none."""
    return ceil(kept_exponent(highest, reference + kept.headroom, fma) * (1 / kept.step))


def raised(reference, steps, kept):
    """K after a raise."""
    return reference + kept.step * steps
