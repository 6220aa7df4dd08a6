"""What a LogitTerm's functions are given in a kernel, for a thread's numbers."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_lce import maths
from cute_lce.kernels import row_stats

LN_2 = 0.6931471805599453


class Ops:
    @staticmethod
    def exp(x):
        return row_stats.exp(Float32(x))

    @staticmethod
    def log(x):
        return cute.math.log2(Float32(x), fastmath=True) * Float32(LN_2)

    @classmethod
    def log1p(cls, x):
        """log(1 + x) has what rounding added to x as a factor."""
        x = Float32(x)
        more = x + Float32(1.0)
        added = more - Float32(1.0)
        return cls.where(added == Float32(0.0), x, cls.log(more) * (x / added))

    @classmethod
    def tanh(cls, x):
        x = Float32(x)
        small = maths.tanh_of_small(x, row_stats.fma)
        distance = cls.abs(x)
        large = Float32(1.0) - Float32(2.0) / (cls.exp(distance + distance) + Float32(1.0))
        large = cls.where(x < Float32(0.0), -large, large)
        return cls.where(distance < Float32(maths.CAP_EDGE), small, large)

    @staticmethod
    def sqrt(x):
        return cute.math.sqrt(Float32(x))

    @staticmethod
    def abs(x):
        return cute.math.absf(Float32(x))

    @staticmethod
    def where(condition: Any, a, b):
        return Float32(cutlass.select_(condition, Float32(a), Float32(b)))

    @classmethod
    def minimum(cls, a, b):
        a, b = Float32(a), Float32(b)
        return cls.where(a < b, a, b)

    @classmethod
    def maximum(cls, a, b):
        a, b = Float32(a), Float32(b)
        return cls.where(a > b, a, b)
