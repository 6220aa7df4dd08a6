"""What the GEMMs of a stripe of the backward read and write."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int64

from cute_lce.arguments import GradientOperands, Gradients, Rows, Stripe
from cute_lce.kernels.entry.types import chosen, first_given, given_tokens, matrix


class Matrices(NamedTuple):
    """What the GEMMs of a stripe multiply, of n tokens of the launch.

    classes (columns, d): the weight's rows. hidden (n, d): their product with it are the logits. dlogits (n,
    columns): written, or what was kept. rows (n, d): what dlogits.T is multiplied by. given and given_rows
    (n, d): where hidden and rows are, if no token is ignored. factor (n,), weight_factor (1,):
    GradientOperands'.
    """

    classes: cute.Tensor
    hidden: cute.Tensor
    dlogits: cute.Tensor
    rows: cute.Tensor
    given: cute.Tensor
    given_rows: cute.Tensor
    factor: cute.Tensor
    weight_factor: cute.Tensor


class DhiddenParts(NamedTuple):
    """Where dhidden's GEMM writes, of n tokens of the launch.

    out (n, d): the result. sums (splits, n, d) fp32. from_sums: whether the result is rounded from these in
    any case. places: the address of the tokens' places in the sums, 0: in order.
    """

    out: cute.Tensor
    sums: cute.Tensor
    from_sums: Boolean
    places: Int64


def given_rows(hidden: cute.Tensor, source: GradientOperands, rows: Rows) -> cute.Tensor:
    """What dlogits.T is multiplied by, if no token is ignored: the operands' hidden states instead of their
    copies; scaled rows are where they are."""
    given, is_scaled = given_tokens(hidden, rows), source.factor != 0
    address = Int64(cutlass.select_(is_scaled, source.hidden, given.iterator.toint()))
    pitch = Int64(cutlass.select_(is_scaled, Int64(source.hidden_pitch), Int64(given.stride[0])))
    return matrix(hidden.element_type, address, rows.tokens, hidden.shape[1], pitch)


def dhidden_parts(matrices: Matrices, gradients: Gradients, rows: Rows, stripe: Stripe) -> DhiddenParts:
    (n, d), splits = matrices.hidden.shape, stripe.dhidden.splits
    address = gradients.dhidden + first_given(rows) * d * 2
    sums = cute.make_ptr(Float32, chosen(rows.sums, gradients.sums), cute.AddressSpace.gmem, assumed_align=16)
    return DhiddenParts(
        out=matrix(matrices.hidden.element_type, address, n, d, d),
        sums=cute.make_tensor(sums, cute.make_layout((splits, n, d), stride=(Int64(n) * d, d, 1))),
        from_sums=Boolean(rows.dhidden == gradients.dhidden),
        places=Int64(cutlass.select_(rows.sums != 0, rows.source, Int64(0))),
    )
