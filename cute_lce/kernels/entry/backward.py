"""The backward's host function: a stripe of the vocabulary, three GEMMs (the paper's Algorithm 2 in stripes).

    dlogits = grad_scale (softmax(hidden @ weight.T) - onehot)   the forward's GEMM, rounded and stored
    dhidden += dlogits @ weight                                  fp32 over the stripes, rounded after the last
    dweight = dlogits.T @ hidden                                 the stripe's rows, written once

All three use the architecture's mainloop, with different major dimensions of the operands and different
epilogues. A stripe that the forward kept needs factors and scaled rows (kernels.scale) instead of the first.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce.arch import KernelConfig
from cute_lce.arguments import (
    GradientOperands,
    Gradients,
    LossArguments,
    Statistics,
    Stripe,
    Sweep,
    Upstream,
)
from cute_lce.kernels.entry.types import example, example_operands, matrix, strided, transposed, vector
from cute_lce.kernels.epilogues.dlogits import DlogitsEpilogue, DlogitsTensors
from cute_lce.kernels.epilogues.gradient import GradientEpilogue, GradientTensors
from cute_lce.kernels.mainloop import mainloop
from cute_lce.kernels.scale import ScaleRows, ScaleTensors


class Backward:
    """One stripe of the backward; see cute_lce.arguments for what is read and written.

    Args:
        logits: the configuration of the logits' GEMM.
        dhidden, dweight: the configurations of the gradients' GEMMs.
        has_grad_scale: whether dlogits hold grad_scale (bfloat16), or the gradients' epilogues apply it
            (float16).
    """

    def __init__(
        self, logits: KernelConfig, dhidden: KernelConfig, dweight: KernelConfig, has_grad_scale: bool
    ):
        gemm = mainloop(logits)
        self.dlogits = gemm(logits, DlogitsEpilogue(logits.tile_n, gemm.threads_per_row, has_grad_scale))
        self.dhidden = gemm(dhidden, GradientEpilogue(dhidden.tile_n, gemm.threads_per_row))
        self.dweight = gemm(dweight, GradientEpilogue(dweight.tile_n, gemm.threads_per_row))
        self.scale = ScaleRows()

    @cute.jit
    def __call__(
        self,
        hidden: cute.Tensor,  # (n, d)
        weight: cute.Tensor,  # (V, d)
        target: cute.Tensor,  # (n,)
        loss: LossArguments,
        upstream: Upstream,
        statistics: Statistics,
        gradients: Gradients,
        source: GradientOperands,
        stripe: Stripe,
        progress: Int64,  # three zeroed int32 if a GEMM is paced
        stream: cuda.CUstream,
    ):
        dtype = hidden.element_type
        n, d = cute.size(hidden, mode=[0]), cute.size(hidden, mode=[1])
        first, columns = stripe.first, stripe.columns
        row_pitch = weight.stride[0]
        rows = cute.make_tensor(
            weight.iterator + Int64(first) * row_pitch, cute.make_layout((columns, d), stride=(row_pitch, 1))
        )
        dlogits = matrix(dtype, source.dlogits, n, columns, source.pitch)
        hidden_rows = matrix(dtype, source.hidden, n, d, source.hidden_pitch)
        counters = [vector(Int32, progress + 4 * i, 1) for i in range(3)]
        dloss = strided(upstream.dloss, n, upstream.stride)
        factors = strided(source.factor, n, source.factor_stride)
        num_valid = vector(Int64, statistics.num_valid, 1)
        if source.kept_scale == 0:
            self.dlogits(
                hidden,
                rows,
                DlogitsTensors(
                    target=target,
                    row_max=vector(Float32, statistics.row_max, n),
                    row_sum=vector(Float32, statistics.row_sum, n),
                    dloss=dloss,
                    num_valid=num_valid,
                    dlogits=dlogits,
                    loss=loss,
                    first=first,
                    columns=columns,
                ),
                counters[0],
                Sweep(tiles_per_window=Int32(1), gemm=stripe.logits),
                stream,
            )
        else:
            self.scale(
                ScaleTensors(
                    hidden=hidden,
                    target=target,
                    dloss=dloss,
                    num_valid=num_valid,
                    kept_scale=vector(Float32, source.kept_scale, n),
                    factor=factors,
                    scaled=hidden_rows,
                    loss=loss,
                    wanted=Int32(gradients.dweight != 0),
                ),
                stream,
            )
        if gradients.dhidden != 0:
            self.dhidden(
                dlogits,
                transposed(rows),
                GradientTensors(
                    out=matrix(dtype, gradients.dhidden, n, d, d),
                    accumulator=matrix(Float32, gradients.accumulator, n, d, d),
                    factor=factors,
                    is_first=stripe.is_first,
                    is_last=stripe.is_last,
                ),
                counters[1],
                Sweep(tiles_per_window=Int32(1), gemm=stripe.dhidden),
                stream,
            )
        if gradients.dweight != 0:
            self.dweight(
                transposed(dlogits),
                transposed(hidden_rows),
                GradientTensors(
                    out=matrix(
                        dtype, gradients.dweight + Int64(first) * d * (dtype.width // 8), columns, d, d
                    ),
                    accumulator=matrix(Float32, gradients.accumulator, columns, d, d),
                    factor=strided(source.weight_factor, columns, 0),
                    is_first=Int32(1),
                    is_last=Int32(1),
                ),
                counters[2],
                Sweep(tiles_per_window=Int32(1), gemm=stripe.dweight),
                stream,
            )


def compile_backward(
    logits: KernelConfig,
    dhidden: KernelConfig,
    dweight: KernelConfig,
    dtype: str,
    target_dtype: str,
    *,
    options: str,
):
    """Compile `Backward` for any n, d, V, stripe, and pitch of rows that begin at multiples of 16 bytes."""
    return cute.compile(
        Backward(logits, dhidden, dweight, has_grad_scale=dtype == "bfloat16"),
        *example_operands(dtype, target_dtype),
        example(LossArguments),
        example(Upstream),
        example(Statistics),
        example(Gradients),
        example(GradientOperands),
        example(Stripe),
        Int64(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
