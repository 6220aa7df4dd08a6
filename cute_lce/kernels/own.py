"""What a LogitTerm's functions are given in a kernel, for a thread's numbers."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_lce import logit_term, maths
from cute_lce.arguments import LossArguments
from cute_lce.kernels import row_stats

LN_2 = 0.6931471805599453


class Number:
    """A float32 number, or what a comparison gives. A quotient is a product with the divisor's reciprocal,
    which is made once where the divisor is the same; IEEE's takes a dozen instructions and a branch."""

    def __init__(self, value: Float32 | Boolean):
        self.value = value

    def __add__(self, other: Any) -> Number:
        return Number(plain(self) + plain(other))

    def __sub__(self, other: Any) -> Number:
        return Number(plain(self) - plain(other))

    def __rsub__(self, other: Any) -> Number:
        return Number(plain(other) - plain(self))

    def __mul__(self, other: Any) -> Number:
        return Number(plain(self) * plain(other))

    def __truediv__(self, other: Any) -> Number:
        return Number(plain(self) * cute.arch.rcp_approx(plain(other)))

    def __rtruediv__(self, other: Any) -> Number:
        return Number(plain(other) * cute.arch.rcp_approx(plain(self)))

    def __neg__(self) -> Number:
        return Number(-plain(self))

    def __pos__(self) -> Number:
        return self

    def __lt__(self, other: Any) -> Number:
        return Number(plain(self) < plain(other))

    def __le__(self, other: Any) -> Number:
        return Number(plain(self) <= plain(other))

    def __gt__(self, other: Any) -> Number:
        return Number(plain(self) > plain(other))

    def __ge__(self, other: Any) -> Number:
        return Number(plain(self) >= plain(other))

    def __eq__(self, other: Any) -> Any:
        return Number(plain(self) == plain(other))

    def __ne__(self, other: Any) -> Any:
        return Number(plain(self) != plain(other))

    def __bool__(self) -> bool:
        raise TypeError("softcap: got a LogitTerm with a condition on a number, want ops.where")

    __radd__, __rmul__, __hash__ = __add__, __mul__, None  # pyright: ignore


def plain(x: Any) -> Float32:
    """Of a Number, or of one of Python's."""
    return Float32(x.value if isinstance(x, Number) else x)


class Ops:
    """Each returns a Number."""

    @staticmethod
    def exp(x: Any) -> Number:
        return Number(row_stats.exp(plain(x)))

    @staticmethod
    def log(x: Any) -> Number:
        return Number(cute.math.log2(plain(x), fastmath=True) * Float32(LN_2))

    @classmethod
    def log1p(cls, x: Any) -> Number:
        """log(1 + x) has what rounding added to x as a factor."""
        x = Number(plain(x))
        more = x + 1.0
        added = more - 1.0
        # Where it is 0 or infinity there is no quotient; of -infinity the logarithm is nan.
        return cls.where(cls.abs(added + added) == added, x, cls.log(more) * (x / added))

    @classmethod
    def tanh(cls, x: Any) -> Number:
        x = Number(plain(x))
        small = maths.tanh_of_small(x.value, row_stats.fma)
        distance = cls.abs(x)
        large = 1.0 - 2.0 / (cls.exp(distance + distance) + 1.0)
        large = cls.where(x < 0.0, -large, large)
        return cls.where(distance < maths.CAP_EDGE, small, large)

    @staticmethod
    def sqrt(x: Any) -> Number:
        return Number(cute.math.sqrt(plain(x)))

    @staticmethod
    def abs(x: Any) -> Number:
        return Number(cute.math.absf(plain(x)))

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Number:
        if isinstance(condition, Number):
            condition = condition.value
        return Number(Float32(cutlass.select_(condition, plain(a), plain(b))))

    @staticmethod
    def minimum(a: Any, b: Any) -> Number:
        return Number(cute.arch.fmin(plain(a), plain(b), nan=True))

    @staticmethod
    def maximum(a: Any, b: Any) -> Number:
        return Number(cute.arch.fmax(plain(a), plain(b), nan=True))


class Own:
    """A LogitTerm's functions of Float32, its fields those of a kernel's loss."""

    def __init__(self, term: logit_term.LogitTerm, loss: LossArguments):
        self._term, self._loss = term, loss

    def scale_after(self, number: Float32) -> Float32:
        """What products are multiplied by, known only when this number is: the bits that are added are none,
        since the sign of the temperature is 0, which the compiler cannot know."""
        none = number.bitcast(Int32) & (self._loss.own_temperature.bitcast(Int32) >> 31)
        return (self._loss.own_scale.bitcast(Int32) | none).bitcast(Float32)

    def logit(self, product: Float32, scale: Float32 | None = None) -> Float32:
        """z, divided by the temperature, of a product. scale: of `scale_after`; None: at once."""
        x = product * (self._loss.own_scale if scale is None else scale)
        return plain(self._term.logit(Number(x), Ops)) * self._loss.own_inverse

    def slope(self, z: Float32, temperature: Float32) -> Float32:
        """Of z as `logit` gives it, with another temperature maybe."""
        return plain(self._term.slope(Number(z * temperature), Ops))


def own_of(loss: LossArguments) -> Own | None:
    """None: there is no LogitTerm."""
    term = logit_term.of_kernel(loss, Number)
    return None if term is None else Own(term, loss)
