"""LogitTerms that tests give."""

from __future__ import annotations

from dataclasses import dataclass

from cute_lce import LogitTerm


@dataclass(frozen=True)
class LogCap(LogitTerm):
    """Grows as a logarithm beyond the cap."""

    cap: float

    def logit(self, x, ops):
        return ops.where(x < 0, -self.cap, self.cap) * ops.log1p(ops.abs(x) / self.cap)

    def slope(self, z, ops):
        return ops.exp(-ops.abs(z) / self.cap)


@dataclass(frozen=True)
class Knee(LogitTerm):
    """x up to a knee; beyond it a square root."""

    knee: float

    def logit(self, x, ops):
        beyond = ops.maximum(x, self.knee) - self.knee
        return ops.minimum(x, self.knee) + ops.sqrt(1 + 2 * beyond) - 1

    def slope(self, z, ops):
        return ops.where(z > self.knee, 1 / (1 + (z - self.knee)), 1.0)


@dataclass(frozen=True)
class Tanh(LogitTerm):
    """What softcap does."""

    cap: float

    def logit(self, x, ops):
        return self.cap * ops.tanh(x / self.cap)

    def slope(self, z, ops):
        return 1 - (z / self.cap) * (z / self.cap)


@dataclass(frozen=True)
class SoftPlus(LogitTerm):
    """log(1 + exp(x)), of x that are not large."""

    def logit(self, x, ops):
        return ops.log(1 + ops.exp(x))

    def slope(self, z, ops):
        return 1 - ops.exp(-z)


@dataclass(frozen=True)
class Exp(LogitTerm):
    """Its slope is what it gives."""

    def logit(self, x, ops):
        return ops.exp(x)

    def slope(self, z, ops):
        return z


@dataclass(frozen=True)
class Line(LogitTerm):
    """Its slope is a number, and its functions those of fields."""

    steepness: float

    def logit(self, x, ops):
        return x * ops.maximum(ops.sqrt(self.steepness), 0.5)

    def slope(self, z, ops):
        return ops.maximum(ops.sqrt(self.steepness), 0.5)


@dataclass(frozen=True)
class Same(LogitTerm):
    """Nothing is done."""

    def logit(self, x, ops):
        return x

    def slope(self, z, ops):
        return 1.0
