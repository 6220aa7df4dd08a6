# type: ignore  # The DSL traces Python: its types are not Python's.
"""A host function that applies a LogitTerm's two functions to numbers."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32

from cute_lce.arguments import with_terms
from cute_lce.kernels.entry.types import example
from cute_lce.kernels.own import own_of
from cute_lce.logit_term import LogitTerm, kernel_term
from tests.emulated.compiling import compile_host


@cute.kernel
def apply_both(x: cute.Tensor, out: cute.Tensor, loss):
    at = cute.arch.block_idx()[0] * 32 + cute.arch.thread_idx()[0]
    own = own_of(loss)
    out[0, at] = own.logit(x[at])
    out[1, at] = own.slope(x[at], Float32(1.0))


class Both:
    """out (2, n) = logit and slope of x (n,); n: a multiple of 32."""

    @cute.jit
    def __call__(self, loss, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        apply_both(x, out, loss).launch(grid=(x.shape[0] // 32, 1, 1), block=(32, 1, 1), stream=stream)


def compile_term(term: LogitTerm, arch: str, folder: str):
    n = cute.sym_int(divisibility=32)
    x = cute.runtime.make_fake_compact_tensor(Float32, (n,), assumed_align=4)
    out = cute.runtime.make_fake_compact_tensor(Float32, (2, n), stride_order=(1, 0), assumed_align=4)
    loss = example(with_terms((kernel_term(term),)))
    return compile_host(Both(), loss, x, out, arch=arch, folder=folder)
