# type: ignore  # The DSL traces Python: its types are not Python's.
"""Host functions of one group of cute_lce.arguments, or of its operands, whose kernels write what each name
reads."""

import operator

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from cute_lce.kernels.entry.types import example, example_operands
from tests.emulated.compiling import compile_host


@cute.kernel
def store_numbers(numbers: tuple, out: cute.Tensor):
    if cute.arch.thread_idx()[0] == 0:
        for i in cutlass.range_constexpr(len(numbers)):
            out[i] = Int64(numbers[i])


@cute.kernel
def store_firsts(hidden: cute.Tensor, weight: cute.Tensor, target: cute.Tensor, out: cute.Tensor):
    if cute.arch.thread_idx()[0] == 0:
        out[0] = Int64(Float32(hidden[0, 0]))
        out[1] = Int64(Float32(weight[0, 0]))
        out[2] = Int64(target[0])


class Numbers:
    """Writes a group's numbers to out, in the order of `paths` ("logits.windows")."""

    def __init__(self, paths: list[str]):
        self.paths = paths

    @cute.jit
    def __call__(self, group, out: cute.Tensor, stream: cuda.CUstream):
        numbers = tuple(operator.attrgetter(path)(group) for path in self.paths)
        store_numbers(numbers, out).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


class Firsts:
    """Writes the first elements of hidden, weight and target to out."""

    @cute.jit
    def __call__(
        self,
        hidden: cute.Tensor,
        weight: cute.Tensor,
        target: cute.Tensor,
        out: cute.Tensor,
        stream: cuda.CUstream,
    ):
        store_firsts(hidden, weight, target, out).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def compile_numbers(group: type, paths: list[str], folder: str):
    return _compile(Numbers(paths), [example(group)], folder)


def compile_firsts(folder: str):
    return _compile(Firsts(), example_operands("bfloat16", "int64"), folder)


def _compile(function, arguments, folder: str):
    """arguments: those before out, which is int64, of any length."""
    out = cute.runtime.make_fake_compact_tensor(Int64, (cute.sym_int(),))
    return compile_host(function, *arguments, out, arch="sm_90a", folder=folder)
