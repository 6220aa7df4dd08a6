"""The forward's host function: the GEMM with the row statistics, then the combine kernel."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16

from cute_lce.kernels.combine import ROWS, Combine, CombineTensors
from cute_lce.kernels.epilogues import ForwardEpilogue, ForwardTensors, KeepEpilogue, KeepForwardTensors
from cute_lce.kernels.keep import Finish, KeepTensors, References
from cute_lce.plan import KernelConfig


def mainloop(config: KernelConfig):
    """The architecture's GEMM class; only the one that is used is imported."""
    if config.arch.startswith("sm_9"):
        from cute_lce.kernels.gemm_sm90 import GemmSm90

        return GemmSm90
    from cute_lce.kernels.gemm_sm100 import GemmSm100

    return GemmSm100


@cute.kernel
def clear(counters: cute.Tensor):
    """Zero up to 32 counters."""
    thread = cute.arch.thread_idx()[0]
    if thread < cute.size(counters):
        counters[thread] = Int32(0)


class Forward:
    """Loss and row statistics of hidden @ weight.T; see cute_lce.launch.forward for the tensors.

    Args:
        config: tiles, cluster, stages.
        keeps: whether it also keeps the exponentials of the first columns; see kernels.keep.
    """

    def __init__(self, config: KernelConfig, keeps: bool):
        gemm = mainloop(config)
        self.keeps = keeps
        self.unit = gemm.fragment_columns(config)
        self.gemm = gemm(
            config,
            KeepEpilogue(config.tile_n, self.unit, gemm.threads_per_row)
            if keeps
            else ForwardEpilogue(config.tile_n, gemm.threads_per_row),
        )
        self.references = References()
        self.finish = Finish(self.unit)
        self.combine = Combine()
        self.partials_per_window = config.partials_per_window

    @cute.jit
    def __call__(
        self,
        hidden: cute.Tensor,  # (n, d)
        weight: cute.Tensor,  # (V, d)
        target: cute.Tensor,  # (n,)
        ignore_index: Int64,
        reduction: Int32,  # combine's NONE, SUM or MEAN
        loss: Int64,  # addresses of what is written: fp32 (n,) or one number,
        row_max: Int64,  # fp32 (n,)
        row_sum: Int64,  # fp32 (n,)
        num_valid: Int64,  # one int64
        workspace: Int64,  # 2 counters, partials (all of a row's, n, 2), target_logit (n,), blocks
        windows: Int32,
        tiles_per_window: Int32,
        group_m: Int32,
        clusters: Int32,
        paced: Int32,
        kept: Int64,  # addresses, if it keeps: (n, kept_columns) bf16, rows of kept_pitch elements,
        kept_scale: Int64,  # fp32 (n,)
        kept_workspace: Int64,  # reference (n,), most_raised (n,), raised (units, n) uint16
        kept_pitch: Int64,
        kept_columns: Int32,
        stream: cuda.CUstream,
    ):
        n, vocab = cute.size(hidden, mode=[0]), cute.size(weight, mode=[0])
        count = windows * self.partials_per_window
        # The clusters' progress and the blocks that arrived: (2,) int32 at the head of the workspace.
        counters = cute.make_ptr(Int32, workspace, cute.AddressSpace.gmem, assumed_align=8)
        progress = cute.make_tensor(counters, cute.make_layout(1))
        arrived = cute.make_tensor(counters + 1, cute.make_layout(1))
        floats = cute.make_ptr(Float32, workspace, cute.AddressSpace.gmem, assumed_align=8)
        partials = cute.make_tensor(floats + 2, cute.make_layout((count, n, 2), stride=(Int64(n) * 2, 2, 1)))
        target_logit = cute.make_tensor(partials.iterator + Int64(count) * n * 2, cute.make_layout(n))
        blocks = cute.make_tensor(
            target_logit.iterator + n, cute.make_layout((cute.ceil_div(n, ROWS), 2), stride=(2, 1))
        )
        if paced != 0:
            clear(progress).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)
        tensors = ForwardTensors(target, partials, target_logit, arrived, vocab)
        keep = KeepTensors(
            cute.make_tensor(
                cute.make_ptr(hidden.element_type, kept, cute.AddressSpace.gmem, assumed_align=16),
                cute.make_layout((n, kept_columns), stride=(cute.assume(kept_pitch, divby=8), 1)),
            ),
            vector(Float32, kept_workspace, n),
            cute.make_tensor(
                cute.make_ptr(Uint16, kept_workspace + Int64(n) * 8, cute.AddressSpace.gmem, assumed_align=2),
                cute.make_layout((cute.ceil_div(kept_columns, self.unit), n), stride=(Int64(n), 1)),
            ),
            vector(Int32, kept_workspace + Int64(n) * 4, n),
            vector(Float32, kept_scale, n),
            kept_columns,
        )
        if cutlass.const_expr(self.keeps):
            self.references(hidden, weight, target, keep, stream)
            tensors = KeepForwardTensors(tensors, keep, ignore_index)
        self.gemm(
            hidden,
            weight,
            tensors,
            progress,
            windows,
            tiles_per_window,
            group_m,
            clusters,
            paced,
            stream,
        )
        self.combine(
            CombineTensors(
                vocab,
                ignore_index,
                reduction,
                target,
                partials,
                target_logit,
                vector(Float32, row_max, n),
                vector(Float32, row_sum, n),
                vector(Float32, loss, n),
                vector(Int64, num_valid, 1),
                blocks,
                arrived,
            ),
            stream,
        )
        if cutlass.const_expr(self.keeps):
            self.finish(
                keep,
                target,
                target_logit,
                vector(Float32, row_max, n),
                vector(Float32, row_sum, n),
                ignore_index,
                stream,
            )


def vector(kind, address: Int64, count):
    """The (count,) tensor of 4- or 8-byte numbers at an address."""
    return cute.make_tensor(
        cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=kind.width // 8),
        cute.make_layout(count),
    )


def compile_forward(
    config: KernelConfig, dtype: str, target_dtype: str, keeps: bool = False, *, options: str
):
    """Compile `Forward` for any n, d and V, and any pitch of rows that begin at multiples of 16 bytes."""
    element = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype]
    index = {"int32": cutlass.Int32, "int64": cutlass.Int64}[target_dtype]
    n, d = cute.sym_int(), cute.sym_int(divisibility=8)

    def rows(count):
        return cute.runtime.make_fake_tensor(
            element, (count, d), (cute.sym_int64(divisibility=8), 1), assumed_align=16
        )

    return cute.compile(
        Forward(config, keeps),
        rows(n),
        rows(cute.sym_int()),
        cute.runtime.make_fake_compact_tensor(index, (n,)),
        Int64(0),
        Int32(0),
        *(Int64(0) for _ in range(5)),
        *(Int32(0) for _ in range(5)),
        *(Int64(0) for _ in range(4)),
        Int32(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
