"""The DSL's types for the groups of cute_lce.arguments, and tensors at addresses."""

from typing import Any, get_type_hints

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce import arguments

ELEMENTS = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
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
    return cute.make_tensor(
        cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=kind.width // 8),
        cute.make_layout(count),
    )


def strided(address: Int64, count, stride) -> cute.Tensor:
    """The fp32 (count,) tensor with a stride at an address."""
    return cute.make_tensor(
        cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4),
        cute.make_layout(count, stride=stride),
    )


def matrix(kind, address: Int64, rows, columns, pitch) -> cute.Tensor:
    """The (rows, columns) matrix at a 16-byte aligned address; pitch: elements a row, a multiple of 8."""
    return cute.make_tensor(
        cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=16),
        cute.make_layout((rows, columns), stride=(cute.assume(Int64(pitch), divby=8), 1)),
    )


def transposed(source: cute.Tensor) -> cute.Tensor:
    rows, columns = source.shape
    return cute.make_tensor(source.iterator, cute.make_layout((columns, rows), stride=(1, source.stride[0])))
