"""The forward's host function: three launches: counters to zero, the GEMM with the row statistics, combine."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce.kernels.combine import ROWS, Combine, CombineTensors
from cute_lce.kernels.epilogues import ForwardEpilogue, ForwardTensors
from cute_lce.plan import KernelConfig


def _mainloop(config: KernelConfig):
    """The architecture's GEMM class; only the one that is used is imported."""
    if config.arch.startswith("sm_9"):
        from cute_lce.kernels.gemm_sm90 import GemmSm90

        return GemmSm90
    from cute_lce.kernels.gemm_sm100 import GemmSm100

    return GemmSm100


@cute.kernel
def clear(counters: cute.Tensor):
    """Zero a warp's worth of counters or fewer."""
    thread = cute.arch.thread_idx()[0]
    if thread < cute.size(counters):
        counters[thread] = Int32(0)


class Forward:
    """Loss and row statistics of hidden @ weight.T; see cute_lce.launch.forward for the tensors.

    Args:
        config: tiles, cluster, stages.
    """

    def __init__(self, config: KernelConfig):
        mainloop = _mainloop(config)
        self.gemm = mainloop(config, ForwardEpilogue(config.tile_n, mainloop.threads_per_row))
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
        row_max: cute.Tensor,  # (n,)
        row_sum: cute.Tensor,  # (n,)
        loss: cute.Tensor,  # (n,) or (1,)
        num_valid: cute.Tensor,  # (1,)
        workspace: cute.Tensor,  # 2 counters, partials (windows x partials_per_window, n, 2), target_logit (n,), blocks
        windows: Int32,
        tiles_per_window: Int32,
        group_m: Int32,
        clusters: Int32,
        stream: cuda.CUstream,
    ):
        n, vocab = cute.size(hidden, mode=[0]), cute.size(weight, mode=[0])
        count = windows * self.partials_per_window
        # The clusters' progress and the blocks that arrived: (2,) int32 at the head of the workspace.
        counters = cute.recast_ptr(workspace.iterator, dtype=Int32)
        progress = cute.make_tensor(counters, cute.make_layout(1))
        arrived = cute.make_tensor(counters + 1, cute.make_layout(1))
        partials = cute.make_tensor(
            workspace.iterator + 2, cute.make_layout((count, n, 2), stride=(Int64(n) * 2, 2, 1))
        )
        target_logit = cute.make_tensor(partials.iterator + Int64(count) * n * 2, cute.make_layout(n))
        blocks = cute.make_tensor(
            target_logit.iterator + n, cute.make_layout((cute.ceil_div(n, ROWS), 2), stride=(2, 1))
        )
        clear(cute.make_tensor(counters, cute.make_layout(2))).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)
        self.gemm(
            hidden,
            weight,
            ForwardTensors(target, partials, target_logit, vocab),
            progress,
            windows,
            tiles_per_window,
            group_m,
            clusters,
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
                row_max,
                row_sum,
                loss,
                num_valid,
                blocks,
                arrived,
            ),
            stream,
        )


def compile_forward(config: KernelConfig, dtype: str, target_dtype: str, options: str):
    """Compile `Forward` for any n, d and V, and any pitch of rows that begin at multiples of 16 bytes."""
    element = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype]
    index = {"int32": cutlass.Int32, "int64": cutlass.Int64}[target_dtype]
    n, d = cute.sym_int(), cute.sym_int(divisibility=8)

    def rows(count):
        return cute.runtime.make_fake_tensor(element, (count, d), (cute.sym_int64(divisibility=8), 1), assumed_align=16)

    def vector(kind, count, align=None):
        return cute.runtime.make_fake_compact_tensor(kind, (count,), assumed_align=align)

    return cute.compile(
        Forward(config),
        rows(n),
        rows(cute.sym_int()),
        vector(index, n),
        Int64(0),
        Int32(0),
        vector(Float32, n),
        vector(Float32, n),
        vector(Float32, cute.sym_int()),
        vector(Int64, 1),
        vector(Float32, cute.sym_int64(), 16),
        Int32(0),
        Int32(0),
        Int32(0),
        Int32(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
