"""What terms make of the products of a tile: logits, and the gradient by products (arguments.TERMS)."""

import functools
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce import maths
from cute_lce.arguments import LossArguments
from cute_lce.kernels import row_stats
from cute_lce.kernels.fragment import SHARED, Fragment, opaque, spread
from cute_lce.kernels.own import own_of
from cute_lce.kernels.rows import Compacted


def numbers(address: Int64, count, kind=Float32) -> cute.Tensor:
    """The (count,) tensor of 4- or 8-byte numbers at an address in global memory."""
    pointer = cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=kind.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(count))


@cute.jit
def of_classes(
    address: Int64, first: Int32, last: Int32, fragment: cutlass.Constexpr[Fragment]
) -> cute.Tensor:
    """A thread's numbers of its rows' classes. first: the class of its first row; last: the last there is."""
    given = numbers(address, last + 1)
    own = cute.make_rmem_tensor(len(fragment.rows), Float32)
    for r in cutlass.range_constexpr(len(fragment.rows)):
        own[r] = given[cutlass.min(first + fragment.rows[r], last)]
    return own


@cute.jit
def of_tokens(
    address: Int64,
    rows: Compacted,
    n: Int32,
    column: Int32,
    slab: cutlass.Constexpr[int],
    fragment: cutlass.Constexpr[Fragment],
) -> cute.Tensor:
    """The numbers, by the operands' tokens, of the tokens that this lane owns in a slab; n: of the launch."""
    given = numbers(address, n)
    own = cute.make_rmem_tensor(fragment.owned, Float32)
    own.fill(0.0)
    for i in cutlass.range_constexpr(fragment.owned):
        token, exists = fragment.owned_column(column, slab, i, n)
        if exists:
            own[i] = given[of_operands(rows, token)]
    return own


@cute.jit
def _of_token(
    address: Int64,
    rows: Compacted,
    n: Int32,
    column: Int32,
    slab: cutlass.Constexpr[int],
    i: cutlass.Constexpr[int],
    fragment: cutlass.Constexpr[Fragment],
) -> Float32:
    """That of the i-th token alone."""
    own = Float32(0.0)
    token, exists = fragment.owned_column(column, slab, i, n)
    if exists:
        own = numbers(address, n)[of_operands(rows, token)]
    return own


@cute.jit
def of_operands(rows: Compacted, at: Int32) -> Int32:
    """Which of the operands' tokens the launch's token `at` is, compacted or not."""
    token = rows.first + at
    if rows.source.iterator.toint() != 0:
        token = rows.source[token]
    return token


class TileLogits:
    """The logits of one slab of a tile, of a thread's elements (r, c). Lives while a slab is traced.

    linear_bias: of its rows. row_scale: of the tokens that it owns. None: there is no such term. before: a
    number that is known before a LogitTerm's logits are computed.
    """

    def __init__(self, loss: LossArguments, linear_bias, row_scale, before: Float32):
        self.loss, self.linear_bias, self.row_scale = loss, linear_bias, row_scale
        self.before = [before] * AT_ONCE
        self.edge_square, self.own = None, own_of(loss)
        if "softcap" in loss.terms:
            self.edge_square = cute.make_rmem_tensor(1, Float32)
            self.edge_square[0] = loss.edge_square

    def apply(self, frag: cute.Tensor, columns: range):
        """Products of these columns, one of `together`, become logits, but for `scale`."""
        rows = range(cute.size(frag, mode=[0]))
        if self.linear_bias is not None:
            for c in columns:
                for r in rows:
                    frag[r, c] = frag[r, c] + self.linear_bias[r]
        if self.own is not None:
            for c in columns:
                scale = self.own.scale_after(self.before[-AT_ONCE])
                for r in rows:
                    frag[r, c] = self.own.logit(frag[r, c], scale)
                self.before.append(frag[rows[-1], c])
        elif self.edge_square is not None:
            _cap(frag, self.loss, self.edge_square, columns)
        else:
            for c in columns:
                for r in rows:
                    frag[r, c] = maths.logits(frag[r, c], self.loss)

    def slope(self, z: Float32):
        """The derivative of what gave z, before `scale`; None: 1."""
        return _slope(self.loss, _slope_number(self.loss), z) if has_slope(self.loss) else None

    @staticmethod
    def together(count: int) -> list[range]:
        """The columns of a fragment, in their order."""
        return [range(first, min(first + TOGETHER, count)) for first in range(0, count, TOGETHER)]

    def scale(self, c: int):
        """What the logits of column c are multiplied by behind the cap; None: 1."""
        return None if self.row_scale is None else spread(self.row_scale[c // SHARED], c)


FAR = -1e30
"""A distance from the maximum whose exponential is 0."""


def gradient(distance: Float32, factor, gap, uniform, slope):
    """By a product, but for the onehot (arguments.TERMS). distance: z - row_max. factor: of its exponential.
    gap, uniform, slope: None where there is none."""
    found = row_stats.exp(distance)
    if gap is None:
        found = factor * found
    else:
        # 0 times -inf is 0 here.
        found = (cute.arch.fmax(distance, Float32(FAR)) * gap + factor) * found
    if uniform is not None:
        found = found + uniform
    return found if slope is None else found * slope


AT_ONCE = 2
"""Columns of a thread's elements whose logits a LogitTerm's function computes at once: of all that are
independent ptxas would interleave more, and spill."""
TOGETHER = 4
"""Columns of a thread's elements, with four rows 512 logits of a warp, that are capped by the series alone if
all are small. Fewer would be so more often, where some logits reach the edge; a vote is 3 instructions."""


@cute.jit
def _cap(frag: cute.Tensor, loss: LossArguments, edge_square: cute.Tensor, columns: cutlass.Constexpr[range]):
    """Softcap the elements of these columns.

    edge_square (1,): loss.edge_square, computed anew where a vote fails: ptxas would otherwise move work of
    the next columns ahead of the branch, and spill.
    """
    rows = cute.size(frag, mode=[0])
    beyond = cute.make_rmem_tensor((rows, len(columns)), Float32)
    small = Int32(-1)
    for c in cutlass.range_constexpr(len(columns)):
        for r in cutlass.range_constexpr(rows):
            x = frag[r, columns[c]]
            beyond[r, c] = maths.beyond_edge(x, edge_square[0], row_stats.fma)
            small &= beyond[r, c].bitcast(Int32)
    # Sign bits: all are set if all are small.
    if cute.arch.vote_any_sync(small >= 0):
        edge_square[0] = loss.edge * loss.edge
        for c in cutlass.range_constexpr(len(columns)):
            for r in cutlass.range_constexpr(rows):
                frag[r, columns[c]] = _capped(frag[r, columns[c]], beyond[r, c], loss)
    else:
        for c in cutlass.range_constexpr(len(columns)):
            for r in cutlass.range_constexpr(rows):
                x = frag[r, columns[c]]
                frag[r, columns[c]] = maths.small_capped(x, beyond[r, c], loss, row_stats.fma)


def _capped(x: Float32, beyond: Float32, loss: LossArguments) -> Float32:
    """The softcap of any number. beyond: maths.beyond_edge of it."""
    distance = cute.math.absf(x)
    small = maths.small_capped(x, beyond, loss, row_stats.fma)
    large = maths.large_capped(distance, loss, _exp2, cute.arch.rcp_approx, row_stats.fma)
    large = (large.bitcast(Int32) ^ (x.bitcast(Int32) & Int32(-(2**31)))).bitcast(Float32)
    return Float32(cutlass.select_(distance < loss.edge, small, large))


def _exp2(x):
    return cute.math.exp2(x, fastmath=True)


def logit(product: Float32, loss: LossArguments, linear_bias=None, row_scale=None) -> Float32:
    """Of a lane that is alone. linear_bias, row_scale: of the logit; None: there is no such term."""
    if linear_bias is not None:
        product = product + linear_bias
    own = own_of(loss)
    if own is not None:
        z = own.logit(product)
    elif "softcap" in loss.terms:
        z = _capped(product, maths.beyond_edge(product, loss.edge_square, row_stats.fma), loss)
    else:
        z = maths.logits(product, loss)
    return z if row_scale is None else z * row_scale


Slope = Callable[[Float32], Float32]
"""dz/dx of a logit z, but for the numbers that x or z are multiplied by."""


def has_slope(loss: LossArguments) -> bool:
    """Whether dz/dx differs from logit to logit."""
    return "softcap" in loss.terms or own_of(loss) is not None


def slopes(tensors, column: Int32, slab: int, i: int, fragment: Fragment) -> Callable[[int], Slope] | None:
    """By the elements of a slab's i-th 32 columns; None where has_slope is False. column: as tile_logits'."""
    loss = tensors.loss
    if not has_slope(loss):
        return None
    if "row_scale" not in loss.terms:
        return lambda _: functools.partial(_slope, loss, _slope_number(loss))
    scale = _of_token(loss.row_scale, tensors.rows, cute.size(tensors.target), column, slab, i, fragment)
    number = _slope_number(loss, scale)
    return lambda j: functools.partial(_slope, loss, spread(number, j))


def slope_at(loss: LossArguments, token: Int32) -> Slope:
    """Of one token, of the operands'."""
    scale = None
    if "row_scale" in loss.terms:
        scale = numbers(loss.row_scale, token + 1)[token]
    return functools.partial(_slope, loss, _slope_number(loss, scale))


def _slope_number(loss: LossArguments, row_scale=None) -> Float32:
    """What _slope needs to know besides z: maths.slope_of_capped's inverse_square, or the temperature, of a
    LogitTerm. row_scale: of a token; None: it is not in z."""
    if own_of(loss) is not None:
        return loss.own_temperature if row_scale is None else loss.own_temperature / row_scale
    if row_scale is None:
        return loss.inverse_square
    inverse = Float32(1.0) / (row_scale * loss.cap)
    return inverse * inverse


def _slope(loss: LossArguments, number: Float32, z: Float32) -> Float32:
    own = own_of(loss)
    if own is not None:
        return own.slope(z, number)
    return maths.slope_of_capped(z, number, row_stats.fma)


def tile_logits(
    tensors, first: Int32, last: Int32, column: Int32, slab: int, fragment: Fragment, before: Float32
) -> TileLogits:
    """first: the class of a thread's first row. last: the last class that there is. column: of element 0 in
    slab 0. before: as TileLogits'."""
    loss, bias, scale = tensors.loss, None, None
    if own_of(loss) is not None:
        # Its tokens are found again behind the logits, rather than kept in registers beside them.
        column = opaque(column)
    if "linear_bias" in loss.terms:
        bias = of_classes(loss.linear_bias, first, last, fragment)
    if "row_scale" in loss.terms:
        n = cute.size(tensors.target)
        scale = of_tokens(loss.row_scale, tensors.rows, n, column, slab, fragment)
    return TileLogits(loss, bias, scale, before)


def has_own_logits(loss: LossArguments) -> bool:
    """Whether logits are more than a multiple of the products."""
    others = any(term in loss.terms for term in ("softcap", "linear_bias", "row_scale"))
    return others or own_of(loss) is not None
