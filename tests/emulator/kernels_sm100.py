# type: ignore  # The DSL traces Python: its types are not Python's.
"""A small Blackwell GEMM of our own that covers the forms of tcgen05 that the project uses, for the
emulator's tests.

C (m, n) fp32 = A (m, k) B (n, k)^T. Every CTA, or pair of CTAs, walks over the n tiles of one m tile.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers

from .hardware.kernels_sm90 import column_major, options, row_major, stream

STAGES = 2  # slots of the ring of operands
ACC_STAGES = 2  # accumulators in TMEM
EPILOGUE_THREADS = 128


class Gemm:
    """Warp roles: warps 0 to 3 epilogue (TMEM, registers, plain stores), warp 4 MMA, warp 5 TMA loads.

    Pipelines: operands, load -> MMA, STAGES; accumulators, MMA -> epilogue, ACC_STAGES. `pair` uses
      cta_group::2 and M 256; `cluster_n` CTAs (pairs) side by side along n multicast A and commit to each
      other. `repeat` is that of tcgen05.ld, of shape 32x32b, or 16x256b with `halves`. m, n are multiples of
      the cluster's tile.
    """

    def __init__(self, tile_n=64, tile_k=64, pair=False, cluster_n=1, repeat=32, halves=False):
        self.pair, self.repeat, self.halves = pair, repeat, halves
        self.tile = (256 if pair else 128, tile_n, tile_k)
        self.cluster = (2 if pair else 1, cluster_n)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
        dtype = a.element_type
        group = tcgen05.CtaGroup.TWO if self.pair else tcgen05.CtaGroup.ONE
        major = lambda k_major: OperandMajorMode.K if k_major else OperandMajorMode.MN  # noqa: E731
        tiled_mma = blackwell_helpers.make_trivial_tiled_mma(
            dtype,
            dtype,
            major(LayoutEnum.from_tensor(a).is_k_major_a()),
            major(LayoutEnum.from_tensor(b).is_k_major_b()),
            Float32,
            group,
            self.tile[:2],
        )
        a_smem = blackwell_helpers.make_smem_layout_a(tiled_mma, self.tile, dtype, STAGES)
        b_smem = blackwell_helpers.make_smem_layout_b(tiled_mma, self.tile, dtype, STAGES)
        cta_layout = cute.tiled_divide(cute.make_layout((*self.cluster, 1)), (tiled_mma.thr_id.shape,))
        a_op = blackwell_helpers.cluster_shape_to_tma_atom_A((*self.cluster, 1), tiled_mma.thr_id)
        b_op = blackwell_helpers.cluster_shape_to_tma_atom_B((*self.cluster, 1), tiled_mma.thr_id)
        tma_a, mA = cute.nvgpu.make_tiled_tma_atom_A(
            a_op, a, cute.select(a_smem, mode=[0, 1, 2]), self.tile, tiled_mma, cta_layout.shape
        )
        tma_b, mB = cute.nvgpu.make_tiled_tma_atom_B(
            b_op, b, cute.select(b_smem, mode=[0, 1, 2]), self.tile, tiled_mma, cta_layout.shape
        )

        @cute.struct
        class Storage:
            ring: cute.struct.MemRange[cutlass.Int64, STAGES * 2]
            accumulators: cute.struct.MemRange[cutlass.Int64, ACC_STAGES * 2]
            dealloc: cutlass.Int64
            tmem: cutlass.Int32
            a: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(a_smem.outer)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(b_smem.outer)], 1024]

        self.storage = Storage
        rows = cute.ceil_div(cute.size(c, mode=[0]), 128)
        self.kernel(tma_a, mA, tma_b, mB, c, tiled_mma, a_smem, b_smem, cta_layout).launch(
            grid=(rows, self.cluster[1], 1), block=(192, 1, 1), cluster=(*self.cluster, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, tma_a, mA, tma_b, mB, mC, tiled_mma, a_smem, b_smem, cta_layout: cute.Layout):
        tile_m, tile_n, tile_k = self.tile
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        block, first_tile, _ = cute.arch.block_idx()
        ctas = self.cluster[0]
        half = block % ctas  # place in the pair
        coord = cta_layout.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sA = storage.a.get_tensor(a_smem.outer, swizzle=a_smem.inner)
        sB = storage.b.get_tensor(b_smem.outer, swizzle=b_smem.inner)
        ring = pipeline.PipelineTmaUmma.create(
            barrier_storage=storage.ring.data_ptr(),
            num_stages=STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.cluster[1]),
            tx_count=(tile_m + tile_n) * tile_k * (sA.element_type.width // 8),
            cta_layout_vmnk=cta_layout,
            defer_sync=True,
        )
        accumulators = pipeline.PipelineUmmaAsync.create(
            barrier_storage=storage.accumulators.data_ptr(),
            num_stages=ACC_STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * ctas),
            cta_layout_vmnk=cta_layout,
            defer_sync=True,
        )
        tmem = cutlass.memory.TmemAllocator(
            storage.tmem.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=2, num_threads=160),
            allocator_warp_id=0,
            is_two_cta=self.pair,
            two_cta_tmem_dealloc_mbar_ptr=storage.dealloc.ptr,
        )
        pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)

        thr_mma = tiled_mma.get_slice(half)
        gA = thr_mma.partition_A(cute.local_tile(mA, (tile_m, tile_k), (block // ctas, None)))
        gB = thr_mma.partition_B(cute.local_tile(mB, (tile_n, tile_k), (None, None)))
        gC = thr_mma.partition_C(cute.local_tile(mC, (tile_m, tile_n), (block // ctas, None)))
        tCrA, tCrB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)
        acc_shape = tiled_mma.partition_shape_C((tile_m, tile_n))
        acc_layout = tiled_mma.make_fragment_C(cute.append(acc_shape, ACC_STAGES)).layout
        tAsA, tAgA = cpasync.tma_partition(
            tma_a,
            coord[2],
            cute.make_layout(cute.size(cta_layout, mode=[2])),
            cute.group_modes(sA, 0, 3),
            cute.group_modes(gA, 0, 3),
        )
        tBsB, tBgB = cpasync.tma_partition(
            tma_b,
            coord[1],
            cute.make_layout(cute.size(cta_layout, mode=[1])),
            cute.group_modes(sB, 0, 3),
            cute.group_modes(gB, 0, 3),
        )
        k_tiles = cute.size(tAgA, mode=[1])
        n_tiles = cute.size(tBgB, mode=[1])
        pipeline_init_wait(cluster_shape_mn=self.cluster)

        if warp == 5:
            multicast = self.pair or self.cluster[1] > 1
            a_mask = cpasync.create_tma_multicast_mask(cta_layout, coord, mcast_mode=2) if multicast else None
            b_mask = cpasync.create_tma_multicast_mask(cta_layout, coord, mcast_mode=1) if multicast else None
            slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
            for n in cutlass.range(first_tile, n_tiles, self.cluster[1], unroll=1):
                for k in cutlass.range(k_tiles, unroll=1):
                    ring.producer_acquire(slot)
                    full = ring.producer_get_barrier(slot)
                    cute.copy(
                        tma_a, tAgA[None, k], tAsA[None, slot.index], tma_bar_ptr=full, mcast_mask=a_mask
                    )
                    cute.copy(
                        tma_b, tBgB[None, n, k], tBsB[None, slot.index], tma_bar_ptr=full, mcast_mask=b_mask
                    )
                    slot.advance()
            ring.producer_tail(slot)

        if warp == 4:
            tmem.wait_for_alloc()
            tCtAcc = cute.make_tensor(tmem.retrieve_ptr(Float32), acc_layout)
            if half == 0:
                slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
                acc_slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, ACC_STAGES)
                for _ in cutlass.range(first_tile, n_tiles, self.cluster[1], unroll=1):
                    accumulators.producer_acquire(acc_slot)
                    _fence("after_thread_sync")
                    acc = tCtAcc[None, None, None, acc_slot.index]
                    for k in cutlass.range(k_tiles, unroll=1):
                        ring.consumer_wait(slot)
                        for block_k in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                            tiled_mma.set(tcgen05.Field.ACCUMULATE, k + block_k > 0)
                            at = (None, None, block_k, slot.index)
                            cute.gemm(tiled_mma, acc, tCrA[at], tCrB[at], acc)
                        ring.consumer_release(slot)
                        slot.advance()
                    accumulators.producer_commit(acc_slot)
                    acc_slot.advance()
                accumulators.producer_tail(acc_slot)

        if warp < 4:
            columns = 32
            while cutlass.const_expr(columns < ACC_STAGES * tile_n):
                columns *= 2
            tmem.allocate(columns)
            tmem.wait_for_alloc()
            pointer = tmem.retrieve_ptr(Float32)
            tEtAcc = cute.make_tensor(pointer, acc_layout)
            op = tcgen05.Ld16x256bOp if self.halves else tcgen05.Ld32x32bOp
            atom = cute.make_copy_atom(op(tcgen05.Repetition(self.repeat)), Float32)
            slab = ((128, self.repeat * (8 if self.halves else 1)),)
            acc_slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, ACC_STAGES)
            for n in cutlass.range(first_tile, n_tiles, self.cluster[1], unroll=1):
                accumulators.consumer_wait(acc_slot)
                _fence("after_thread_sync")
                tAcc_slabs = cute.zipped_divide(tEtAcc[None, 0, 0, acc_slot.index], slab)
                gC_slabs = cute.zipped_divide(gC[None, 0, 0, n], slab)
                load = tcgen05.make_tmem_copy(atom, tAcc_slabs[None, 0]).get_slice(thread)
                source, target = load.partition_S(tAcc_slabs), load.partition_D(gC_slabs)
                fragment = cute.make_rmem_tensor(target[None, None, 0].shape, Float32)
                for i in cutlass.range_constexpr(cute.size(target, mode=[2])):
                    cute.copy(load, source[None, None, i], fragment)
                    cute.arch.fence_view_async_tmem_load()
                    cute.autovec_copy(fragment, target[None, None, i])
                _fence("before_thread_sync")
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    accumulators.consumer_release(acc_slot)
                acc_slot.advance()
            tmem.relinquish_alloc_permit()
            cute.arch.barrier(barrier_id=1, number_of_threads=EPILOGUE_THREADS)
            tmem.free(pointer)


def _fence(kind: str):
    cute.arch.inline_ptx(f"tcgen05.fence::{kind};")


def compile_gemm(dtype, a_major="k", b_major="k", folder=None, **config):
    """`config` is that of Gemm."""
    m, n, k = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)
    a = row_major(dtype, m, k) if a_major == "k" else column_major(dtype, m, k)
    b = row_major(dtype, n, k) if b_major == "k" else column_major(dtype, n, k)
    return cute.compile(
        Gemm(**config), a, b, row_major(Float32, m, n), stream(), options=options("sm_100a", folder)
    )
