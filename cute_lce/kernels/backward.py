"""The backward's host function: a stripe of the vocabulary, three GEMMs (the paper's Algorithm 2 in stripes).

    dlogits = grad_scale (softmax(hidden @ weight.T) - onehot)   the forward's GEMM, rounded and stored
    dhidden += dlogits @ weight                                  fp32 over the stripes, rounded after the last
    dweight = dlogits.T @ hidden                                 the stripe's rows, written once

All three are the architecture's one mainloop; the operands' orders of dimensions and the epilogues differ. A
stripe that the forward kept needs no first GEMM, but factors and scaled rows (kernels.scale).
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce.kernels.epilogues import DlogitsEpilogue, DlogitsTensors, GradientEpilogue, GradientTensors
from cute_lce.kernels.forward import mainloop, vector
from cute_lce.kernels.scale import ScaleRows, ScaleTensors
from cute_lce.plan import KernelConfig


class Backward:
    """One stripe of the backward; see cute_lce.launch.backward for the tensors.

    Args:
        logits: the configuration of the logits' GEMM.
        dhidden, dweight: the configurations of the gradients' GEMMs.
        scaled: whether dlogits hold grad_scale (bfloat16), or the gradients' epilogues apply it (float16).
    """

    def __init__(self, logits: KernelConfig, dhidden: KernelConfig, dweight: KernelConfig, scaled: bool):
        gemm = mainloop(logits)
        self.dlogits = gemm(logits, DlogitsEpilogue(logits.tile_n, gemm.threads_per_row, scaled))
        self.dhidden = gemm(dhidden, GradientEpilogue(dhidden.tile_n, gemm.threads_per_row))
        self.dweight = gemm(dweight, GradientEpilogue(dweight.tile_n, gemm.threads_per_row))
        self.scale = ScaleRows()

    @cute.jit
    def __call__(
        self,
        hidden: cute.Tensor,  # (n, d)
        weight: cute.Tensor,  # (V, d)
        target: cute.Tensor,  # (n,)
        ignore_index: Int64,
        mean: Int32,
        dloss: Int64,  # addresses: fp32 (n,) of stride dloss_stride,
        dloss_stride: Int64,
        row_max: Int64,  # fp32 (n,)
        row_sum: Int64,  # fp32 (n,)
        num_valid: Int64,  # one int64
        accumulator: Int64,  # fp32 (n, d)
        dhidden: Int64,  # (n, d), 0: not wanted
        dweight: Int64,  # (V, d), 0: not wanted
        factor: Int64,  # fp32 (n,) of stride factor_stride: factors of dlogits @ weight's rows; 0: ones
        factor_stride: Int64,
        weight_factor: Int64,  # one fp32: the factor of dlogits.T @ scaled_hidden; 0: one
        scaled_hidden: Int64,  # (n, d), rows of scaled_pitch elements: hidden itself, or its rows scaled
        scaled_pitch: Int64,
        dlogits: Int64,  # (n, columns) in the operands' dtype, rows of `pitch` elements
        pitch: Int64,
        # fp32 (n,), 0: dlogits are recomputed; else factor and scaled_hidden are written here
        kept_scale: Int64,
        progress: Int64,  # three zeroed int32 if a GEMM is paced
        first: Int32,  # the stripe: its first column and its columns
        columns: Int32,
        is_first: Int32,
        is_last: Int32,
        logits_windows: Int32,  # the plans of the three GEMMs
        logits_group: Int32,
        logits_clusters: Int32,
        logits_paced: Int32,
        dhidden_windows: Int32,
        dhidden_group: Int32,
        dhidden_clusters: Int32,
        dhidden_paced: Int32,
        dweight_windows: Int32,
        dweight_group: Int32,
        dweight_clusters: Int32,
        dweight_paced: Int32,
        stream: cuda.CUstream,
    ):
        dtype = hidden.element_type
        n, d = cute.size(hidden, mode=[0]), cute.size(hidden, mode=[1])
        row_pitch = weight.stride[0]
        stripe = cute.make_tensor(
            weight.iterator + Int64(first) * row_pitch, cute.make_layout((columns, d), stride=(row_pitch, 1))
        )
        matrix = _matrix(dtype, dlogits, n, columns, pitch)
        scaled = _matrix(dtype, scaled_hidden, n, d, scaled_pitch)
        counters = [vector(Int32, progress + 4 * i, 1) for i in range(3)]
        ints = [
            (logits_windows, logits_group, logits_clusters, logits_paced),
            (dhidden_windows, dhidden_group, dhidden_clusters, dhidden_paced),
            (dweight_windows, dweight_group, dweight_clusters, dweight_paced),
        ]
        upstream = _strided(dloss, n, dloss_stride)
        factors = _strided(factor, n, factor_stride)
        if kept_scale == 0:
            self._gemm(
                self.dlogits,
                hidden,
                stripe,
                DlogitsTensors(
                    target,
                    vector(Float32, row_max, n),
                    vector(Float32, row_sum, n),
                    upstream,
                    vector(Int64, num_valid, 1),
                    matrix,
                    ignore_index,
                    first,
                    columns,
                    mean,
                ),
                counters[0],
                ints[0],
                stream,
            )
        else:
            self.scale(
                ScaleTensors(
                    hidden,
                    target,
                    upstream,
                    vector(Int64, num_valid, 1),
                    vector(Float32, kept_scale, n),
                    factors,
                    scaled,
                    ignore_index,
                    mean,
                    Int32(dweight != 0),
                ),
                stream,
            )
        if dhidden != 0:
            self._gemm(
                self.dhidden,
                matrix,
                _transposed(stripe),
                GradientTensors(
                    _matrix(dtype, dhidden, n, d, d),
                    _matrix(Float32, accumulator, n, d, d),
                    factors,
                    is_first,
                    is_last,
                ),
                counters[1],
                ints[1],
                stream,
            )
        if dweight != 0:
            out = _matrix(dtype, dweight + Int64(first) * d * (dtype.width // 8), columns, d, d)
            self._gemm(
                self.dweight,
                _transposed(matrix),
                _transposed(scaled),
                GradientTensors(
                    out,
                    _matrix(Float32, accumulator, columns, d, d),
                    _strided(weight_factor, columns, 0),
                    Int32(1),
                    Int32(1),
                ),
                counters[2],
                ints[2],
                stream,
            )

    @cute.jit
    def _gemm(self, gemm: cutlass.Constexpr, a, b, tensors, progress, ints, stream):
        windows, group_m, clusters, paced = ints
        gemm(a, b, tensors, progress, windows, Int32(1), group_m, clusters, paced, stream)


def _strided(address: Int64, count, stride) -> cute.Tensor:
    """The fp32 (count,) tensor of a stride at an address."""
    return cute.make_tensor(
        cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4),
        cute.make_layout(count, stride=stride),
    )


def _transposed(matrix: cute.Tensor) -> cute.Tensor:
    rows, columns = matrix.shape
    return cute.make_tensor(matrix.iterator, cute.make_layout((columns, rows), stride=(1, matrix.stride[0])))


def _matrix(kind, address: Int64, rows, columns, pitch) -> cute.Tensor:
    """The (rows, columns) matrix at a 16-byte aligned address; pitch: elements a row, a multiple of 8."""
    return cute.make_tensor(
        cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=16),
        cute.make_layout((rows, columns), stride=(cute.assume(Int64(pitch), divby=8), 1)),
    )


def compile_backward(
    logits: KernelConfig,
    dhidden: KernelConfig,
    dweight: KernelConfig,
    dtype: str,
    target_dtype: str,
    options: str,
):
    """Compile `Backward` for any n, d, V, stripe, and pitch of rows that begin at multiples of 16 bytes."""
    element = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype]
    index = {"int32": cutlass.Int32, "int64": cutlass.Int64}[target_dtype]
    n, d = cute.sym_int(), cute.sym_int(divisibility=8)

    def rows(count):
        return cute.runtime.make_fake_tensor(
            element, (count, d), (cute.sym_int64(divisibility=8), 1), assumed_align=16
        )

    return cute.compile(
        Backward(logits, dhidden, dweight, scaled=dtype == "bfloat16"),
        rows(n),
        rows(cute.sym_int()),
        cute.runtime.make_fake_compact_tensor(index, (n,)),
        Int64(0),
        Int32(0),
        *(Int64(0) for _ in range(17)),
        *(Int32(0) for _ in range(4 + 12)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
