# type: ignore  # The DSL traces Python: its types are not Python's.
"""Small Hopper kernels that cover what the project's kernels use, for the emulator's tests and for the record
on hardware.

They are kept plain: one idea each, no tuning. Compile functions take what a compile depends on and return
the compiled function, bound through TVM-FFI.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

STAGES = 2
WARPGROUP = 128


def row_major(dtype, rows, cols, align=16):
    """A fake (rows, cols) tensor whose rows may lie any multiple of 16 bytes apart."""
    pitch = cute.sym_int64(divisibility=128 // dtype.width)
    return cute.runtime.make_fake_tensor(dtype, (rows, cols), (pitch, 1), assumed_align=align)


def column_major(dtype, rows, cols):
    pitch = cute.sym_int64(divisibility=128 // dtype.width)
    return cute.runtime.make_fake_tensor(dtype, (rows, cols), (1, pitch), assumed_align=16)


def stream():
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


def options(arch: str, folder: str | None) -> str:
    """Compile options; with a folder the PTX is kept, which the emulator needs."""
    return f"--enable-tvm-ffi --gpu-arch {arch}" + (f" --keep-ptx --dump-dir {folder}" if folder else "")


class Gemm:
    """C (m, n) fp32 = A (m, k) B (n, k)^T: a load warp and one consumer warpgroup, a ring of STAGES, a
    cluster along m that multicasts B (and, with cluster_n, A). The majors and the tile decide the swizzle of
    each operand.

    Warp roles: warps 0 to 3 consume (WGMMA, then plain stores), warp 4 loads. m and n are multiples of the
    cluster's tile; k is any multiple of 8: TMA fills with zeros.
    """

    def __init__(self, tile=(64, 64, 64), cluster=(1, 1)):
        self.tile, self.cluster = tile, cluster

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
        tile_m, tile_n, tile_k = self.tile
        dtype = a.element_type
        a_layout, b_layout = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        tiled_mma = hopper_helpers.make_trivial_tiled_mma(
            a.element_type,
            b.element_type,
            a_layout.sm90_mma_major_mode(),
            b_layout.sm90_mma_major_mode(),
            Float32,
            (1, 1, 1),
            (64, tile_n),
        )
        a_smem = hopper_helpers.make_smem_layout_a(a_layout, self.tile, a.element_type, STAGES)
        b_smem = hopper_helpers.make_smem_layout_b(b_layout, self.tile, b.element_type, STAGES)
        tma_a, mA = tma_load(a, a_smem, (tile_m, tile_k), self.cluster[1])
        tma_b, mB = tma_load(b, b_smem, (tile_n, tile_k), self.cluster[0])

        @cute.struct
        class Storage:
            ring: cute.struct.MemRange[cutlass.Int64, STAGES * 2]
            a: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(a_smem)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(b_smem)], 1024]

        self.storage = Storage
        grid = (
            cute.ceil_div(cute.size(c, mode=[0]), tile_m),
            cute.ceil_div(cute.size(c, mode=[1]), tile_n),
            1,
        )
        self.kernel(tma_a, mA, tma_b, mB, c, tiled_mma, a_smem, b_smem).launch(
            grid=grid, block=(WARPGROUP + 32, 1, 1), cluster=(*self.cluster, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, tma_a, mA, tma_b, mB, mC, tiled_mma, a_smem, b_smem):
        tile_m, tile_n, tile_k = self.tile
        thread, _, _ = cute.arch.thread_idx()
        m_tile, n_tile, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cluster_layout = cute.make_layout((*self.cluster, 1))
        coord = cluster_layout.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sA = storage.a.get_tensor(a_smem.outer, swizzle=a_smem.inner)
        sB = storage.b.get_tensor(b_smem.outer, swizzle=b_smem.inner)
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.ring.data_ptr(),
            num_stages=STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * (sum(self.cluster) - 1)),
            tx_count=(tile_m + tile_n) * tile_k * (sA.element_type.width // 8),
            cta_layout_vmnk=cute.make_layout((1, *cluster_layout.shape)),
            defer_sync=True,
        )
        pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        gA = cute.local_tile(mA, (tile_m, tile_k), (m_tile, None))  # (tile_m, tile_k, k tiles)
        gB = cute.local_tile(mB, (tile_n, tile_k), (n_tile, None))  # (tile_n, tile_k, k tiles)
        gC = cute.local_tile(mC, (tile_m, tile_n), (m_tile, n_tile))  # (tile_m, tile_n)
        k_tiles = cute.size(gA, mode=[2])
        pipeline_init_wait(cluster_shape_mn=self.cluster)

        if warp == 4:
            tAsA, tAgA = cpasync.tma_partition(
                tma_a,
                coord[1],
                cute.make_layout(self.cluster[1]),
                cute.group_modes(sA, 0, 2),
                cute.group_modes(gA, 0, 2),
            )
            tBsB, tBgB = cpasync.tma_partition(
                tma_b,
                coord[0],
                cute.make_layout(self.cluster[0]),
                cute.group_modes(sB, 0, 2),
                cute.group_modes(gB, 0, 2),
            )
            a_mask = (
                cute.make_layout_image_mask(cluster_layout, coord, mode=1) if self.cluster[1] > 1 else None
            )
            b_mask = (
                cute.make_layout_image_mask(cluster_layout, coord, mode=0) if self.cluster[0] > 1 else None
            )
            slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
            for k in cutlass.range(k_tiles, unroll=1):
                ring.producer_acquire(slot)
                full = ring.producer_get_barrier(slot)
                cute.copy(tma_a, tAgA[None, k], tAsA[None, slot.index], tma_bar_ptr=full, mcast_mask=a_mask)
                cute.copy(tma_b, tBgB[None, k], tBsB[None, slot.index], tma_bar_ptr=full, mcast_mask=b_mask)
                slot.advance()
            ring.producer_tail(slot)
        else:
            shared = tiled_mma.get_slice(0)
            tCrA = tiled_mma.make_fragment_A(shared.partition_A(sA))
            tCrB = tiled_mma.make_fragment_B(shared.partition_B(sB))
            tCgC = tiled_mma.get_slice(thread).partition_C(gC)
            acc = cute.make_rmem_tensor(tCgC.shape, Float32)
            slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
            done = slot.clone()
            for k in cutlass.range(k_tiles, unroll=1):
                ring.consumer_wait(slot)
                warpgroup.fence()
                for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, k + block > 0)
                    at = (None, None, block, slot.index)
                    cute.gemm(tiled_mma, acc, tCrA[at], tCrB[at], acc)
                warpgroup.commit_group()
                slot.advance()
                if k > 0:
                    warpgroup.wait_group(1)
                    ring.consumer_release(done)
                    done.advance()
            warpgroup.wait_group(0)
            ring.consumer_release(done)
            cute.autovec_copy(acc, tCgC)


class ScaleTiles:
    """out (m, n) = 2 x (m, n), or out += 2 x with `reduce`: TMA load, generic reads and writes of shared
    memory, TMA store.

    Warp roles: warp 4 loads tiles into a ring of STAGES; warps 0 to 3 read a tile, write it doubled to a
    staging buffer, and warp 0 stores that. Each CTA walks over a column of tiles. TMA masks the edges.
    """

    def __init__(self, tile=(32, 64), reduce=False):
        self.tile, self.reduce = tile, reduce

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        rows, cols = self.tile
        dtype = x.element_type
        layout = hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (rows, 8, cols), dtype, STAGES)
        staging = hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (rows, 8, cols), dtype, 1)
        tma_x, mX = tma_load(x, layout, self.tile, 1)
        op = cpasync.CopyReduceBulkTensorTileS2GOp() if self.reduce else cpasync.CopyBulkTensorTileS2GOp()
        tma_out, mOut = cpasync.make_tiled_tma_atom(op, out, cute.slice_(staging, (None, None, 0)), self.tile)

        @cute.struct
        class Storage:
            ring: cute.struct.MemRange[cutlass.Int64, STAGES * 2]
            x: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout)], 1024]
            out: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(staging)], 1024]

        self.storage = Storage
        self.kernel(tma_x, mX, tma_out, mOut, layout, staging).launch(
            grid=(1, cute.ceil_div(cute.size(x, mode=[1]), cols), 1),
            block=(WARPGROUP + 32, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tma_x, mX, tma_out, mOut, layout, staging):
        rows, cols = self.tile
        thread, _, _ = cute.arch.thread_idx()
        _, column, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sX = storage.x.get_tensor(layout.outer, swizzle=layout.inner)  # (rows, cols, STAGES)
        sOut = storage.out.get_tensor(staging.outer, swizzle=staging.inner)  # (rows, cols, 1)
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.ring.data_ptr(),
            num_stages=STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4),
            tx_count=rows * cols * (sX.element_type.width // 8),
        )
        gX = cute.local_tile(mX, self.tile, (None, column))  # (rows, cols, tiles)
        gOut = cute.local_tile(mOut, self.tile, (None, column))
        one = cute.make_layout(1)
        tXsX, tXgX = cpasync.tma_partition(
            tma_x, 0, one, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        tOsO, tOgO = cpasync.tma_partition(
            tma_out, 0, one, cute.group_modes(sOut, 0, 2), cute.group_modes(gOut, 0, 2)
        )
        tiles = cute.size(gX, mode=[2])
        if warp == 4:
            slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
            for i in cutlass.range(tiles, unroll=1):
                ring.producer_acquire(slot)
                cute.copy(
                    tma_x, tXgX[None, i], tXsX[None, slot.index], tma_bar_ptr=ring.producer_get_barrier(slot)
                )
                slot.advance()
            ring.producer_tail(slot)
        else:
            slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
            for i in cutlass.range(tiles, unroll=1):
                ring.consumer_wait(slot)
                doubled = cute.make_rmem_tensor(rows * cols // WARPGROUP, sX.element_type)
                for j in cutlass.range_constexpr(rows * cols // WARPGROUP):
                    at = thread + j * WARPGROUP
                    doubled[j] = (Float32(sX[at // cols, at % cols, slot.index]) * 2.0).to(sX.element_type)
                cute.arch.sync_warp()
                ring.consumer_release(slot)
                slot.advance()
                # The staging buffer is free once the last store has read it.
                if warp == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
                for j in cutlass.range_constexpr(rows * cols // WARPGROUP):
                    at = thread + j * WARPGROUP
                    sOut[at // cols, at % cols, 0] = doubled[j]
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
                if warp == 0:
                    cute.copy(tma_out, tOsO[None, 0], tOgO[None, i])
                    cute.arch.cp_async_bulk_commit_group()
            if warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)


class RowSum:
    """out (rows,) = sums of x (rows, 256) over columns, in two steps: warps by shuffles, then through shared
    memory.

    For the generic proxy alone: shared memory, bar.sync and shuffles.
    """

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, out).launch(grid=(1, 1, 1), block=(256, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        partial = cutlass.memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout(8), byte_alignment=16
        )
        for row in cutlass.range(cute.size(x, mode=[0]), unroll=1):
            value = cute.arch.warp_reduction(x[row, thread], lambda a, b: a + b)
            if thread % 32 == 0:
                partial[warp] = value
            cute.arch.sync_threads()
            if thread == 0:
                total = Float32(0.0)
                for i in cutlass.range_constexpr(8):
                    total += partial[i]
                out[row] = total
            cute.arch.sync_threads()


class Maths:
    """out (6, count) = approximate functions of x (count,): ex2, ex2.ftz, lg2, rcp, rsqrt and tanh, as the
    DSL emits them."""

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        count = cute.size(x)
        self.kernel(x, out, count).launch(
            grid=(cute.ceil_div(count, 128), 1, 1), block=(128, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor, count: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * 128 + thread
        if i < count:
            v = x[i]
            out[0, i] = cute.math.exp2(v)
            out[1, i] = cute.math.exp2(v, fastmath=True)
            out[2, i] = cute.math.log2(v, fastmath=True)
            out[3, i] = cute.arch.rcp_approx(v)
            out[4, i] = cute.math.rsqrt(v, fastmath=True)
            out[5, i] = cute.math.tanh(v, fastmath=True)


class Integers:
    """out (12, count) int32 = integer and conversion instructions on x, y (count,) int32, as the DSL emits
    them."""

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        count = cute.size(x)
        self.kernel(x, y, out).launch(
            grid=(cute.ceil_div(count, 128), 1, 1), block=(128, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * 128 + thread
        a, b = x[i], y[i]
        out[0, i] = a * b + 7
        out[1, i] = a // b
        out[2, i] = a % b
        out[3, i] = (a ^ b) & (a | 255)
        out[4, i] = (a >> 3) + (b << 5)
        out[5, i] = cutlass.min(a, b) - cutlass.max(a, b)
        out[6, i] = Int32((cutlass.Int64(a) * cutlass.Int64(b)) >> 17)
        out[7, i] = Int32(cutlass.Uint32(a) // cutlass.Uint32(b))
        out[8, i] = cute.arch.warp_reduction(a, lambda p, q: p + q)
        out[9, i] = cute.arch.shuffle_sync_up(a, 3)
        out[10, i] = Int32(Float32(a) * 1e-3)
        out[11, i] = Int32(Float32(cutlass.BFloat16(Float32(b))))


def tma_load(tensor, smem_layout, tile, multicast):
    op = cpasync.CopyBulkTensorTileG2SOp() if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    return cpasync.make_tiled_tma_atom(
        op, tensor, cute.slice_(smem_layout, (None, None, 0)), tile, num_multicast=multicast
    )


def compile_gemm(dtype, tile=(64, 64, 64), cluster=(1, 1), a_major="k", b_major="k", folder=None):
    m, n, k = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)
    a = row_major(dtype, m, k) if a_major == "k" else column_major(dtype, m, k)
    b = row_major(dtype, n, k) if b_major == "k" else column_major(dtype, n, k)
    return cute.compile(
        Gemm(tile, cluster), a, b, row_major(Float32, m, n), stream(), options=options("sm_90a", folder)
    )


def compile_scale(dtype, tile=(32, 64), reduce=False, folder=None):
    m, n = cute.sym_int(), cute.sym_int(divisibility=128 // dtype.width)
    x, out = row_major(dtype, m, n), row_major(dtype, m, n)
    return cute.compile(ScaleTiles(tile, reduce), x, out, stream(), options=options("sm_90a", folder))


def compile_row_sum(folder=None):
    rows = cute.sym_int()
    out = cute.runtime.make_fake_compact_tensor(Float32, (rows,))
    return cute.compile(
        RowSum(), row_major(Float32, rows, 256), out, stream(), options=options("sm_90a", folder)
    )


def compile_maths(folder=None):
    count = cute.sym_int(divisibility=4)
    x = cute.runtime.make_fake_compact_tensor(Float32, (count,))
    return cute.compile(Maths(), x, row_major(Float32, 6, count), stream(), options=options("sm_90a", folder))


def compile_integers(folder=None):
    count = cute.sym_int(divisibility=128)
    x, y = (cute.runtime.make_fake_compact_tensor(Int32, (count,)) for _ in range(2))
    return cute.compile(
        Integers(), x, y, row_major(Int32, 12, count), stream(), options=options("sm_90a", folder)
    )
