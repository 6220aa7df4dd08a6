"""The DSL's types for the groups of cute_lce.arguments, and tensors at addresses."""

from typing import Any, get_type_hints

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce import arguments
from cute_lce.kernels.logits import numbers
from cute_lce.kernels.rows import Compacted, GatherTensors

ELEMENTS = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
ADDED = {"": None, "float32": Float32, **ELEMENTS}
"""The types of a matrix to which dweight is added, by their names; "": dweight is written."""
NUMBERS = {arguments.Int32: Int32, arguments.Int64: Int64, arguments.Float32: Float32}
INDICES = {"int32": cutlass.Int32, "int64": cutlass.Int64}


def example(group: type) -> Any:
    """A group without tensors for cute.compile: each number as a value of its DSL type."""
    hints = get_type_hints(group, include_extras=True)
    return group(
        **{name: NUMBERS[hint](0) if hint in NUMBERS else example(hint) for name, hint in hints.items()}
    )


def example_operands(dtype: str, target_dtype: str) -> arguments.Operands:
    """Operands of any n, d and V, and any pitch of rows that begin at multiples of 16 bytes."""
    n, d = cute.sym_int(), cute.sym_int(divisibility=8)

    def rows(count):
        return cute.runtime.make_fake_tensor(
            ELEMENTS[dtype], (count, d), (cute.sym_int64(divisibility=8), 1), assumed_align=16
        )

    return arguments.Operands(
        hidden=rows(n),
        weight=rows(cute.sym_int()),
        target=cute.runtime.make_fake_compact_tensor(INDICES[target_dtype], (n,)),
    )


def vector(kind, address: Int64, count) -> cute.Tensor:
    """The (count,) tensor of 4- or 8-byte numbers at an address."""
    return numbers(address, count, kind)


def strided(address: Int64, count, stride, kind=Float32) -> cute.Tensor:
    """The (count,) tensor of 4- or 8-byte numbers with a stride at an address."""
    return cute.make_tensor(
        cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=kind.width // 8),
        cute.make_layout(count, stride=stride),
    )


def matrix(kind, address: Int64, rows, columns, pitch) -> cute.Tensor:
    """The (rows, columns) matrix at a 16-byte aligned address; pitch: elements a row, a multiple of 8."""
    return cute.make_tensor(
        cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=16),
        cute.make_layout((rows, columns), stride=(cute.assume(Int64(pitch), divby=8), 1)),
    )


def chosen(first: Int64, otherwise: Int64) -> Int64:
    """An address, or another where it is 0."""
    return Int64(cutlass.select_(first != 0, first, otherwise))


def first_given(rows: arguments.Rows) -> Int64:
    """The first of the operands' tokens that a launch takes in their order; compacted ones are found by their
    origins, from 0."""
    return Int64(cutlass.select_(rows.count != 0, Int64(0), Int64(rows.first)))


def tokens_of(hidden: cute.Tensor, target: cute.Tensor, rows: arguments.Rows) -> tuple:
    """hidden (tokens, d) and target (tokens,) of a launch: the operands' rows, or those of their compaction;
    without compacted hidden states, the operands' first."""
    (_, d), pitch = hidden.shape, hidden.stride[0]
    width = hidden.element_type.width // 8
    address = chosen(rows.hidden, hidden.iterator.toint() + first_given(rows) * pitch * width)
    pitch = Int64(cutlass.select_(rows.hidden != 0, Int64(d), Int64(pitch)))
    width = target.element_type.width // 8
    base = chosen(rows.target, target.iterator.toint())
    return (
        matrix(hidden.element_type, address, rows.tokens, d, pitch),
        vector(target.element_type, base + Int64(rows.first) * width, rows.tokens),
    )


def given_tokens(hidden: cute.Tensor, rows: arguments.Rows) -> cute.Tensor:
    """hidden (tokens, d) of a launch, in the operands' order."""
    pitch, width = Int64(hidden.stride[0]), hidden.element_type.width // 8
    address = hidden.iterator.toint() + Int64(rows.first) * pitch * width
    return matrix(hidden.element_type, address, rows.tokens, hidden.shape[1], pitch)


def origins(given: cute.Tensor, hidden: cute.Tensor, rows: arguments.Rows) -> cute.Tensor:
    """Hidden states in which `rows.origin` finds a token's: the operands', or the launch's own."""
    is_given = rows.source != 0
    address = Int64(cutlass.select_(is_given, given.iterator.toint(), hidden.iterator.toint()))
    pitch = Int64(cutlass.select_(is_given, Int64(given.stride[0]), Int64(hidden.stride[0])))
    return matrix(given.element_type, address, given.shape[0], given.shape[1], pitch)


def dloss_of_origins(upstream: arguments.Upstream, rows: arguments.Rows, n: Int32) -> cute.Tensor:
    """The upstream gradient likewise."""
    return strided(upstream.dloss + 4 * first_given(rows) * upstream.stride, n, upstream.stride)


def values_of(
    upstream: arguments.Upstream, statistics: arguments.Statistics, rows: arguments.Rows, n: Int32
) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
    """dloss, row_max and row_sum of a launch's tokens; n: of the operands'."""
    copied, first = rows.values != 0, Int64(rows.first)
    stride = Int64(cutlass.select_(copied, Int64(1), upstream.stride))
    addresses = upstream.dloss, statistics.row_max, statistics.row_sum
    dloss, row_max, row_sum = (
        Int64(cutlass.select_(copied, rows.values + 4 * Int64(n) * i, address))
        for i, address in enumerate(addresses)
    )
    return (
        strided(dloss + 4 * first * stride, rows.tokens, stride),
        vector(Float32, row_max + 4 * first, rows.tokens),
        vector(Float32, row_sum + 4 * first, rows.tokens),
    )


def compacted(rows: arguments.Rows, n: Int32) -> Compacted:
    """n: the operands' tokens."""
    return Compacted(
        source=vector(Int32, rows.source, n),
        count=vector(Int32, rows.count, 1),
        first=rows.first,
        tokens=rows.tokens,
    )


def has_numbers_of_tokens(loss: arguments.LossArguments) -> bool:
    """Whether terms have vectors that epilogues read by the tokens' origins."""
    return any(term in loss.terms for term in ("row_scale", "topk", "gap", "uniform", "bias_gradient"))


def gather_tensors(
    hidden: cute.Tensor,
    target: cute.Tensor,
    rows: arguments.Rows,
    loss: arguments.LossArguments,
    values=None,
    counters: cute.Tensor | None = None,
) -> GatherTensors:
    """values: dloss, row_max and row_sum (n,), if they are compacted. counters: what is zeroed; None:
    nothing."""
    n, d = hidden.shape
    sums = None if values is None else matrix(Float32, rows.sums, n, d, d)
    if values is None:
        values = [vector(Float32, Int64(0), n) for _ in range(3)]
    dloss, row_max, row_sum = values
    return GatherTensors(
        target=target,
        hidden=hidden,
        dloss=dloss,
        row_max=row_max,
        row_sum=row_sum,
        ignore_index=loss.ignore_index,
        rows=compacted(rows, n),
        compacted_target=vector(target.element_type, rows.target, n),
        compacted_hidden=matrix(hidden.element_type, rows.hidden, rows.tokens, d, d),
        values=cute.make_tensor(
            vector(Float32, rows.values, n).iterator, cute.make_layout((3, n), stride=(Int64(n), 1))
        ),
        sums=sums,
        counters=vector(Int32, Int64(0), Int32(0)) if counters is None else counters,
    )


def transposed(source: cute.Tensor) -> cute.Tensor:
    rows, columns = source.shape
    return cute.make_tensor(source.iterator, cute.make_layout((columns, rows), stride=(1, source.stride[0])))
