"""Blackwell's mainloop: TMA into a ring of shared memory, tcgen05 into TMEM, an epilogue on slabs of it."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers

from cute_lce.kernels import schedule
from cute_lce.plan import KernelConfig

WARP = 32
EPILOGUE_WARPS = 4  # one per quarter of the lanes of tensor memory, and one per scheduler of the SM
MMA_WARP = 4
LOAD_WARP = 5
SMEM_ALIGN = 1024  # the 128-byte swizzle repeats every 1024 bytes
TMEM_BARRIER = 1  # named barriers: the epilogue and MMA warps know where tensor memory is;
DONE_BARRIER = 2  # the epilogue warps have read the last of it
SLAB = 64  # columns of a tile that an epilogue thread holds at once, in as many registers


class GemmSm100:
    """A (m, k) times B (n, k) transposed, persistent, its fp32 tiles given to an epilogue and never stored.

    Two forms, by config.tile_m. 256: a tile for a pair of CTAs on neighbouring SMs that share one MMA
    (cta_group::2); each loads and keeps 128 rows of A and of the accumulator, and half of the rows of B. 128:
    a tile for each CTA.

    Warps of a CTA (192 threads, one CTA to an SM):
        0-3  epilogue: a thread has one row, all columns; warp w reads lanes 32 w to 32 w + 31 of TMEM
        4    MMA: issues for the pair in its first CTA, idle in its second
        5    load: TMA of this CTA's parts of A and B

    Pipelines (producer -> consumer, slots):
        ring          load -> MMA, config.stages. full, in the pair's first CTA: 1 arrival and the bytes of
                      both CTAs' A and B. empty: a multicast tcgen05.commit of every MMA in the cluster that
                      reads the slot.
        accumulators  MMA -> epilogue, 2. full: a tcgen05.commit, multicast to the pair. empty, in the pair's
                      first CTA: 4 warps of each CTA, after their last tcgen05.wait::ld.

    Timeline: load runs up to `stages` k tiles ahead of MMA, across tiles and runs. MMA fills one accumulator
    while the epilogue reads the other, so that an epilogue costs nothing as long as it is shorter than a
    tile's MMAs: the forward's is, from a d between 260 and 660 upwards (docs/kernels.md has the cycles). The
    last one of a CTA is exposed.

    Budgets: registers about 120 a thread, without spills; 192 threads could have 255, so setmaxnreg would
    serve nothing. Shared memory: (tile_m + tile_n) * tile_k * 2 / pair bytes a stage, which is 32 KiB for 256
    x 256 x 64 and makes 7 stages of 227 KiB, 48 KiB for 128 x 256 x 64 and 4 stages. TMEM: two accumulators
    of tile_n columns, all 512 columns at 256.

    Four epilogue warps, one for each of the SM's schedulers: exponentials bind, 16 a clock and SM, and four
    warps keep enough of them in flight. Eight would make two of each row, to be merged or to write twice the
    partials.

    The schedule is static, schedule.py's as on Hopper: runs are equally long and their order serves L2.
    Cluster launch control would even out clusters of unequal speed, but hands out work in the order of the
    grid to whoever asks, and wants a warp and a pipeline to distribute it; what it gains nobody here could
    measure.

    Multicast: cluster_m above the pair's shares B between pairs, cluster_n shares A. A lone pair of 256 x 256
    asks L2 for 64 bytes a clock and SM at the full rate, 4 x 1 CTAs for 48. But clusters of 4 leave SMs idle
    where a GPC has no multiple of 4 of them, so that the pair alone is the default until someone measures
    both.
    """

    threads_per_row = 1

    @staticmethod
    def fragment_columns(config: KernelConfig) -> int:
        """Columns of a tile that one visit of the epilogue sees, over all threads that share a row."""
        return SLAB

    def __init__(self, config: KernelConfig, epilogue):
        if config.tile_m not in (128, 256) or config.tile_n % SLAB or not 0 < config.tile_n <= 256:
            raise ValueError(
                f"config: got a tile of {config.tile_m} x {config.tile_n}, want 128 or 256 rows and"
                f" up to 256 columns, a multiple of {SLAB}"
            )
        self.config = config
        self.epilogue = epilogue
        self.pair = config.tile_m // 128  # CTAs that share an MMA
        if config.cluster_m % self.pair:
            raise ValueError(f"config: got cluster_m {config.cluster_m}, want an even one for tile_m 256")
        self.tile = (config.tile_m, config.tile_n, config.tile_k)
        self.cluster = (config.cluster_m, config.cluster_n)
        self.cluster_tiles = config.cluster_m // self.pair  # tiles of a cluster along m
        self.acc_stages = 2
        # tcgen05.alloc takes powers of two.
        self.tmem_columns = 1 << (self.acc_stages * config.tile_n - 1).bit_length()
        self.threads = WARP * (EPILOGUE_WARPS + 2)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (m, k)
        b: cute.Tensor,  # (n, k)
        tensors,
        progress: cute.Tensor,  # of Hopper's pacing, not used here
        windows: Int32,
        tiles_per_window: Int32,
        group_m: Int32,
        clusters: Int32,
        paced: Int32,  # the other mainloop's; not used here
        stream: cuda.CUstream,
    ):
        config = self.config
        dtype = a.element_type
        tiled_mma = blackwell_helpers.make_trivial_tiled_mma(
            dtype,
            dtype,
            LayoutEnum.from_tensor(a).mma_major_mode(),
            LayoutEnum.from_tensor(b).mma_major_mode(),
            Float32,
            tcgen05.CtaGroup.TWO if self.pair == 2 else tcgen05.CtaGroup.ONE,
            self.tile[:2],
        )
        # (MMA, MMA_M or MMA_N, MMA_K, stages) with the 128-byte swizzle: this CTA's part
        a_smem = blackwell_helpers.make_smem_layout_a(tiled_mma, self.tile, dtype, config.stages)
        b_smem = blackwell_helpers.make_smem_layout_b(tiled_mma, self.tile, dtype, config.stages)
        # (CTA of the pair, tiles along m, tiles along n, 1)
        cluster_vmnk = cute.tiled_divide(cute.make_layout((*self.cluster, 1)), (tiled_mma.thr_id.shape,))
        tma_a, mA = cute.nvgpu.make_tiled_tma_atom_A(
            blackwell_helpers.cluster_shape_to_tma_atom_A(self.cluster, tiled_mma.thr_id),
            a,
            cute.slice_(a_smem, (None, None, None, 0)),
            self.tile,
            tiled_mma,
            cluster_vmnk.shape,
        )
        tma_b, mB = cute.nvgpu.make_tiled_tma_atom_B(
            blackwell_helpers.cluster_shape_to_tma_atom_B(self.cluster, tiled_mma.thr_id),
            b,
            cute.slice_(b_smem, (None, None, None, 0)),
            self.tile,
            tiled_mma,
            cluster_vmnk.shape,
        )

        @cute.struct
        class SharedStorage:
            ring: cute.struct.MemRange[cutlass.Int64, config.stages * 2]
            accumulators: cute.struct.MemRange[cutlass.Int64, self.acc_stages * 2]
            tmem_freed: cutlass.Int64
            tmem: cutlass.Int32
            a: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(a_smem.outer)], SMEM_ALIGN]
            b: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(b_smem.outer)], SMEM_ALIGN]

        self.storage = SharedStorage
        rows = cute.ceil_div(cute.size(a, mode=[0]), config.tile_m * self.cluster_tiles)
        self.kernel(
            tma_a,
            mA,
            tma_b,
            mB,
            tensors,
            tiled_mma,
            a_smem,
            b_smem,
            cluster_vmnk,
            (rows, windows, tiles_per_window, group_m),
        ).launch(
            grid=(clusters * config.cluster_m, config.cluster_n, 1),
            block=(self.threads, 1, 1),
            cluster=(*self.cluster, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        tensors,
        tiled_mma: cute.TiledMma,
        a_smem: cute.ComposedLayout,
        b_smem: cute.ComposedLayout,
        cluster_vmnk: cute.Layout,
        runs,
    ):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)

        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        coord = cluster_vmnk.get_flat_coord(rank)  # (CTA of the pair, tile along m, tile along n, 0)

        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sA = storage.a.get_tensor(a_smem.outer, swizzle=a_smem.inner)  # (MMA, MMA_M, MMA_K, stages)
        sB = storage.b.get_tensor(b_smem.outer, swizzle=b_smem.inner)  # (MMA, MMA_N, MMA_K, stages)
        peers = self.cluster_tiles + config.cluster_n - 1  # MMAs that read what this CTA loads
        ring = pipeline.PipelineTmaUmma.create(
            barrier_storage=storage.ring.data_ptr(),
            num_stages=config.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, peers),
            tx_count=(config.tile_m + config.tile_n) * config.tile_k * (sA.element_type.width // 8),
            cta_layout_vmnk=cluster_vmnk,
            defer_sync=True,
        )
        accumulators = pipeline.PipelineUmmaAsync.create(
            barrier_storage=storage.accumulators.data_ptr(),
            num_stages=self.acc_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_WARPS * self.pair),
            cta_layout_vmnk=cluster_vmnk,
            defer_sync=True,
        )
        tmem = cutlass.memory.TmemAllocator(
            storage.tmem.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(TMEM_BARRIER, WARP * (EPILOGUE_WARPS + 1)),
            is_two_cta=self.pair == 2,
            two_cta_tmem_dealloc_mbar_ptr=storage.tmem_freed.ptr,
        )
        pipeline_init_arrive(cluster_shape_mn=cluster_vmnk, is_relaxed=True)

        tiled = tiled_mma.get_slice(coord[0])
        # (MMA, MMA_M, MMA_K, m tiles, k tiles) and (MMA, MMA_N, MMA_K, n tiles, k tiles)
        gA = tiled.partition_A(cute.local_tile(mA, (config.tile_m, config.tile_k), (None, None)))
        gB = tiled.partition_B(cute.local_tile(mB, (config.tile_n, config.tile_k), (None, None)))
        n_tiles, k_tiles = cute.size(gB, mode=[3]), cute.size(gA, mode=[4])
        # (MMA, MMA_M, MMA_N, accumulators)
        acc_shape = cute.append(tiled_mma.partition_shape_C(self.tile[:2]), self.acc_stages)
        acc_layout = tiled_mma.make_fragment_C(acc_shape).layout
        pipeline_init_wait(cluster_shape_mn=cluster_vmnk)

        if warp == LOAD_WARP:
            self._load(tma_a, gA, sA, tma_b, gB, sB, ring, cluster_vmnk, coord, runs, n_tiles, k_tiles)
        if warp == MMA_WARP:
            tmem.wait_for_alloc()
            acc = cute.make_tensor(tmem.retrieve_ptr(Float32), acc_layout)
            if coord[0] == 0:
                self._mma(tiled_mma, sA, sB, acc, ring, accumulators, runs, n_tiles, k_tiles)
        if warp < EPILOGUE_WARPS:
            tmem.allocate(self.tmem_columns)
            tmem.wait_for_alloc()
            base = tmem.retrieve_ptr(Float32)
            self._epilogue(
                tiled, cute.make_tensor(base, acc_layout), accumulators, tensors, coord, runs, n_tiles
            )
            tmem.relinquish_alloc_permit()
            cute.arch.barrier(barrier_id=DONE_BARRIER, number_of_threads=WARP * EPILOGUE_WARPS)
            tmem.free(base)

    @cute.jit
    def _load(
        self, tma_a, gA, sA, tma_b, gB, sB, ring, cluster_vmnk, coord, runs, n_tiles: Int32, k_tiles: Int32
    ):
        """Load warp: for every tile of every run, this CTA's part of its k tiles of A and B into the ring."""
        config = self.config
        # ((tile bytes), stages) and ((tile bytes), tiles, k tiles)
        tAsA, tAgA = cpasync.tma_partition(
            tma_a,
            coord[2],
            cute.make_layout(config.cluster_n),
            cute.group_modes(sA, 0, 3),
            cute.group_modes(gA, 0, 3),
        )
        tBsB, tBgB = cpasync.tma_partition(
            tma_b,
            coord[1],
            cute.make_layout(self.cluster_tiles),
            cute.group_modes(sB, 0, 3),
            cute.group_modes(gB, 0, 3),
        )
        a_mask, b_mask = None, None
        if cutlass.const_expr(config.cluster_m * config.cluster_n > 1):
            a_mask = cpasync.create_tma_multicast_mask(cluster_vmnk, coord, mcast_mode=2)
            b_mask = cpasync.create_tma_multicast_mask(cluster_vmnk, coord, mcast_mode=1)
        rows, windows, tiles_per_window, group_m = runs
        slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
        tiles = cute.ceil_div(n_tiles, config.cluster_n)
        run = cute.arch.block_idx()[0] // config.cluster_m
        step = cute.arch.grid_dim()[0] // config.cluster_m
        while run < rows * windows:
            row, window = schedule.run_coord(run, rows, windows, group_m)
            first, end = schedule.run_tiles(window, tiles_per_window, tiles)
            m_tile = row * self.cluster_tiles + coord[1]
            for tile in cutlass.range(first, end, unroll=1):
                n_tile = tile * config.cluster_n + coord[2]
                for k in cutlass.range(k_tiles, unroll=1):
                    ring.producer_acquire(slot)
                    full = ring.producer_get_barrier(slot)
                    cute.copy(
                        tma_a,
                        tAgA[None, m_tile, k],
                        tAsA[None, slot.index],
                        tma_bar_ptr=full,
                        mcast_mask=a_mask,
                    )
                    cute.copy(
                        tma_b,
                        tBgB[None, n_tile, k],
                        tBsB[None, slot.index],
                        tma_bar_ptr=full,
                        mcast_mask=b_mask,
                    )
                    slot.advance()
            run += step
        ring.producer_tail(slot)

    @cute.jit
    def _mma(self, tiled_mma, sA, sB, acc, ring, accumulators, runs, n_tiles: Int32, k_tiles: Int32):
        """MMA warp of the CTA that leads: every tile of every run into the next free accumulator."""
        config = self.config
        tCrA = tiled_mma.make_fragment_A(sA)  # (MMA, MMA_M, MMA_K, stages)
        tCrB = tiled_mma.make_fragment_B(sB)  # (MMA, MMA_N, MMA_K, stages)
        rows, windows, tiles_per_window, group_m = runs
        slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
        free = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.acc_stages)
        tiles = cute.ceil_div(n_tiles, config.cluster_n)
        run = cute.arch.block_idx()[0] // config.cluster_m
        step = cute.arch.grid_dim()[0] // config.cluster_m
        while run < rows * windows:
            _, window = schedule.run_coord(run, rows, windows, group_m)
            first, end = schedule.run_tiles(window, tiles_per_window, tiles)
            for _ in cutlass.range(first, end, unroll=1):
                accumulators.producer_acquire(free)
                _fence("after_thread_sync")
                tile = acc[None, None, None, free.index]
                for k in cutlass.range(k_tiles, unroll=1):
                    ring.consumer_wait(slot)
                    for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                        tiled_mma.set(tcgen05.Field.ACCUMULATE, k + block > 0)
                        at = (None, None, block, slot.index)
                        cute.gemm(tiled_mma, tile, tCrA[at], tCrB[at], tile)
                    ring.consumer_release(slot)
                    slot.advance()
                accumulators.producer_commit(free)
                free.advance()
            run += step
        accumulators.producer_tail(free)

    @cute.jit
    def _epilogue(self, tiled, acc, accumulators, tensors, coord, runs, n_tiles: Int32):
        """Epilogue warps: every tile's 128 rows of this CTA, a row to a thread, slab by slab."""
        config = self.config
        thread = cute.arch.thread_idx()[0]
        slabs = config.tile_n // SLAB
        load = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(SLAB)), Float32)
        # (128, SLAB, 1, slabs, accumulators) and the same cut of the tile's coordinates
        slabbed = cute.flat_divide(acc[(None, None), 0, 0, None], (128, SLAB))
        where = tiled.partition_C(cute.make_identity_tensor((config.tile_m, config.tile_n)))
        where = cute.flat_divide(where[(None, None), 0, 0], (128, SLAB))
        copy = tcgen05.make_tmem_copy(load, slabbed[None, None, 0, 0, 0]).get_slice(thread)
        tTR_acc = copy.partition_S(slabbed)[None, None, None, 0, None, None]  # (T2R, 1, 1, slabs, acc.)
        tTR_where = copy.partition_D(where)[None, None, None, 0, None]  # (T2R, 1, 1, slabs)
        frag = cute.make_rmem_tensor((1, SLAB), Float32)  # (rows, cols)
        cols = cute.make_rmem_tensor(SLAB, Int32)
        row_index = cute.make_rmem_tensor(1, Int32)

        rows, windows, tiles_per_window, group_m = runs
        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.acc_stages)
        tiles = cute.ceil_div(n_tiles, config.cluster_n)
        run = cute.arch.block_idx()[0] // config.cluster_m
        step = cute.arch.grid_dim()[0] // config.cluster_m
        while run < rows * windows:
            row, window = schedule.run_coord(run, rows, windows, group_m)
            first, end = schedule.run_tiles(window, tiles_per_window, tiles)
            row_index[0] = (row * self.cluster_tiles + coord[1]) * config.tile_m + tTR_where[0][0]
            state = self.epilogue.begin(tensors, row_index)
            for tile in cutlass.range(first, end, unroll=1):
                n_tile = tile * config.cluster_n + coord[2]
                accumulators.consumer_wait(full)
                _fence("after_thread_sync")
                for slab in cutlass.range(slabs, unroll=1):
                    _load_slab(tTR_acc[None, None, None, slab, full.index], frag)
                    if slab + 1 == slabs:
                        _fence("before_thread_sync")
                        with cute.arch.elect_one():
                            accumulators.consumer_release(full)
                    for c in cutlass.range_constexpr(SLAB):
                        cols[c] = tTR_where[c, 0, 0, slab][1]
                    self.epilogue.visit(tensors, state, frag, row_index, cols, n_tile)
                full.advance()
            self.epilogue.end(tensors, state, row_index, window * config.cluster_n + coord[2])
            run += step


def _fence(kind: str):
    """Order this thread's tcgen05 operations with what it learns from or tells others through a barrier."""
    cute.arch.inline_ptx(f"tcgen05.fence::{kind};")


def _load_slab(source: cute.Tensor, frag: cute.Tensor):
    """Read a slab of tensor memory, a warp's 32 lanes, into frag (1, SLAB), and wait until it is there.

    One instruction to the compiler: what uses the results of a tcgen05.ld has no side effects, so that the
    compiler may move it ahead of a tcgen05.wait::ld that stands by itself, and does.
    """
    count = cute.size(frag)
    results = ", ".join(f"${i}" for i in range(count))
    values = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(" + ", ".join(["f32"] * count) + ")>"),
        [source.iterator.toint().ir_value()],
        f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{results}}}, [${count}];\n"
        "tcgen05.wait::ld.sync.aligned;",
        ",".join(["=f"] * count + ["r"]),
        has_side_effects=True,
    )
    for i in range(count):
        frag[i] = Float32(llvm.extractvalue(Float32.mlir_type, values, [i]))
