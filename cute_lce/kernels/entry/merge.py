"""The host function of calls over several ranks: targets of a shard, or the merge of ranks' statistics."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce.arguments import MERGE_ROWS, LossArguments, RankStatistics, ShardTargets
from cute_lce.kernels.entry.types import INDICES, example, vector
from cute_lce.kernels.merge import Localize, LocalizeTensors, Merge, MergeTensors


class Merging:
    """See cute_lce.arguments for what is read and written."""

    def __init__(self):
        self.localize = Localize()
        self.merge = Merge()

    @cute.jit
    def __call__(
        self,
        target: cute.Tensor,  # (n,); counted from the shard's first class where ranks are merged
        loss: LossArguments,
        targets: ShardTargets,
        ranks: RankStatistics,
        stream: cuda.CUstream,
    ):
        n = cute.size(target)
        if ranks.gathered == 0:
            self.localize(
                LocalizeTensors(
                    target=target,
                    local=vector(target.element_type, targets.local, n),
                    header=vector(Float32, targets.header, 1),
                    arrived=vector(Int32, targets.arrived, 1),
                    start=targets.start,
                    columns=targets.columns,
                    count=targets.count,
                    ignore_index=loss.ignore_index,
                ),
                stream,
            )
        if ranks.gathered != 0:
            gathered = vector(Float32, ranks.gathered, n)
            blocks = vector(Float32, ranks.blocks, n)
            self.merge(
                MergeTensors(
                    gathered=cute.make_tensor(
                        gathered.iterator,
                        cute.make_layout((ranks.ranks, Int32(ranks.pitch)), stride=(ranks.pitch, 1)),
                    ),
                    local=target,
                    row_max=vector(Float32, ranks.row_max, n),
                    row_sum=vector(Float32, ranks.row_sum, n),
                    losses=vector(Float32, ranks.loss, n),
                    num_valid=vector(Int64, ranks.num_valid, 1),
                    blocks=cute.make_tensor(
                        blocks.iterator, cute.make_layout((cute.ceil_div(n, MERGE_ROWS), 2), stride=(2, 1))
                    ),
                    arrived=vector(Int32, ranks.arrived, 1),
                    loss=loss,
                    target_logit=vector(Float32, ranks.target_logit, n),
                    mean_gap=vector(Float32, ranks.mean_gap, n),
                    total_gap=vector(Float32, ranks.total_gap, n),
                ),
                stream,
            )


def compile_merge(target_dtype: str, *, options: str):
    """Compile `Merging` for any n and number of ranks."""
    return cute.compile(
        Merging(),
        cute.runtime.make_fake_compact_tensor(INDICES[target_dtype], (cute.sym_int(),)),
        example(LossArguments),
        example(ShardTargets),
        example(RankStatistics),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
