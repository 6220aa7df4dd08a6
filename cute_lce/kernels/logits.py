"""What terms make of the products of a tile: logits, and the gradient by products (arguments.TERMS)."""

import functools
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce import maths
from cute_lce.arguments import LossArguments
from cute_lce.kernels import row_stats
from cute_lce.kernels.fragment import SHARED, Fragment, spread
from cute_lce.kernels.rows import Compacted


def numbers(address: Int64, count) -> cute.Tensor:
    """The (count,) fp32 tensor at an address in global memory."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
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
            own[i] = given[_of_operands(rows, token)]
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
        own = numbers(address, n)[_of_operands(rows, token)]
    return own


@cute.jit
def _of_operands(rows: Compacted, at: Int32) -> Int32:
    """Which of the operands' tokens the launch's token `at` is, compacted or not."""
    token = rows.first + at
    if rows.source.iterator.toint() != 0:
        token = rows.source[token]
    return token


class TileLogits:
    """The logits of one slab of a tile, of a thread's elements (r, c). Lives while a slab is traced.

    linear_bias: of its rows. row_scale: of the tokens that it owns. None: there is no such term.
    """

    def __init__(self, loss: LossArguments, linear_bias, row_scale):
        self.loss, self.linear_bias, self.row_scale = loss, linear_bias, row_scale

    def scale(self, c: int):
        """What the logits of column c are multiplied by behind the cap."""
        return None if self.row_scale is None else spread(self.row_scale[c // SHARED], c)

    def of(self, product, r: int, scale):
        """(z, its derivative by what the softcap was applied to, or None)."""
        if self.linear_bias is not None:
            product = product + self.linear_bias[r]
        z, slope = maths.logit_and_slope(product, self.loss, row_stats.tanh)
        return z if scale is None else z * scale, slope


def cap_factors(
    tensors, column: Int32, slab: int, i: int, fragment: Fragment
) -> Callable[[int], Float32] | None:
    """maths.slope_of_capped's inverse_square, by the elements of a slab's i-th 32 columns; None where there
    is no softcap. column: as in tile_logits."""
    loss = tensors.loss
    if "softcap" not in loss.terms:
        return None
    if "row_scale" not in loss.terms:
        factor = inverse_square(loss.cap)
        return lambda _: factor
    scale = _of_token(loss.row_scale, tensors.rows, cute.size(tensors.target), column, slab, i, fragment)
    return functools.partial(spread, inverse_square(scale * loss.cap))


def inverse_square(cap: Float32) -> Float32:
    """maths.slope_of_capped's. cap: temperatures included."""
    inverse = Float32(1.0) / cap
    return inverse * inverse


def tile_logits(
    tensors, first: Int32, last: Int32, column: Int32, slab: int, fragment: Fragment
) -> TileLogits:
    """first: the class of a thread's first row. last: the last class that there is. column: of element 0 in
    slab 0."""
    loss, bias, scale = tensors.loss, None, None
    if "linear_bias" in loss.terms:
        bias = of_classes(loss.linear_bias, first, last, fragment)
    if "row_scale" in loss.terms:
        n = cute.size(tensors.target)
        scale = of_tokens(loss.row_scale, tensors.rows, n, column, slab, fragment)
    return TileLogits(loss, bias, scale)


def has_own_logits(loss: LossArguments) -> bool:
    """Whether logits are more than a multiple of the products."""
    return any(term in loss.terms for term in ("softcap", "linear_bias", "row_scale"))
