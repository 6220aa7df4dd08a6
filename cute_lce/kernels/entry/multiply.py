"""The host function of grad_in_forward's backward: one launch for both gradients."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Numeric

from cute_lce.arguments import LossArguments, Products, Upstream
from cute_lce.kernels.entry.types import ADDED, ELEMENTS, example, matrix, strided, vector
from cute_lce.kernels.multiply import Multiply, MultiplyTensors


class Multiplying:
    """See cute_lce.arguments for what is read and written.

    Args:
        dtype: the gradients' type.
        added: the type of a matrix to which dweight is added; None: dweight is written.
    """

    def __init__(self, dtype: type[Numeric], added: type[Numeric] | None):
        self.dtype, self.dweight_dtype = dtype, added or dtype
        self.multiply = Multiply(adds=added is not None)

    @cute.jit
    def __call__(
        self,
        num_valid: cute.Tensor,  # (1,)
        loss: LossArguments,
        upstream: Upstream,
        products: Products,
        stream: cuda.CUstream,
    ):
        n, vocab, d = products.n, products.vocab, products.d
        self.multiply(
            MultiplyTensors(
                dinput=matrix(Float32, products.dinput, n, d, d),
                dweight=matrix(Float32, products.dweight, vocab, d, d),
                dinput_out=matrix(self.dtype, products.dinput_out, n, d, d),
                dweight_out=matrix(self.dweight_dtype, products.dweight_out, vocab, d, d),
                dloss=strided(upstream.dloss, n, upstream.stride),
                target=strided(products.target, n, products.target_stride, Int64),
                narrow_target=strided(products.target, n, products.target_stride, Int32),
                is_narrow=products.target_bytes == 4,
                source=vector(Int32, products.source, n),
                num_valid=num_valid,
                loss=loss,
            ),
            stream,
        )


def compile_multiply(dtype: str, added: str, *, options: str):
    """Compile `Multiplying` for any n, d and V."""
    return cute.compile(
        Multiplying(ELEMENTS[dtype], ADDED[added]),
        cute.runtime.make_fake_compact_tensor(Int64, (1,)),
        example(LossArguments),
        example(Upstream),
        example(Products),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
