# type: ignore  # The DSL traces Python: its types are not Python's.
"""A host function that applies the softcap of kernels.logits to fragments of numbers."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_lce.arguments import with_terms
from cute_lce.kernels.entry.types import example
from cute_lce.kernels.logits import TileLogits, logit
from tests.emulated.compiling import compile_host

ROWS, COLUMNS = 4, 8


@cute.kernel
def cap_fragments(x: cute.Tensor, out: cute.Tensor, loss):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    frag = cute.make_rmem_tensor((ROWS, COLUMNS), Float32)
    for c in cutlass.range_constexpr(COLUMNS):
        for r in cutlass.range_constexpr(ROWS):
            frag[r, c] = x[block, c, r, thread]
    logits = TileLogits(loss, None, None, Float32(0.0))
    for columns in logits.together(COLUMNS):
        logits.apply(frag, columns)
    for c in cutlass.range_constexpr(COLUMNS):
        for r in cutlass.range_constexpr(ROWS):
            out[0, block, c, r, thread] = frag[r, c]


@cute.kernel
def cap_alone(x: cute.Tensor, out: cute.Tensor, loss):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    for c in cutlass.range_constexpr(COLUMNS):
        for r in cutlass.range_constexpr(ROWS):
            out[1, block, c, r, thread] = logit(x[block, c, r, thread], loss)


class Caps:
    """out (2, blocks, COLUMNS, ROWS, 32) = the softcap of x (blocks, COLUMNS, ROWS, 32), of fragments and, in
    another launch, of each alone."""

    @cute.jit
    def __call__(self, loss, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        for kernel in (cap_fragments, cap_alone):
            kernel(x, out, loss).launch(grid=(x.shape[0], 1, 1), block=(32, 1, 1), stream=stream)


def compile_caps(arch: str, folder: str):
    blocks = cute.sym_int()
    x, out = (
        cute.runtime.make_fake_compact_tensor(
            Float32, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=4
        )
        for shape in ((blocks, COLUMNS, ROWS, 32), (2, blocks, COLUMNS, ROWS, 32))
    )
    return compile_host(Caps(), example(with_terms(("softcap",))), x, out, arch=arch, folder=folder)
