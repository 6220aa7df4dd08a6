"""Hopper's mainloop: TMA into a ring of shared memory, WGMMA into registers, an epilogue on the registers."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from cute_lce.kernels import schedule
from cute_lce.plan import KernelConfig

WARPGROUP = 128
SMEM_ALIGN = 1024  # the 128-byte swizzle repeats every 1024 bytes
TURN_BARRIER = 1
PATIENCE = 256  # looks at the others' progress before a cluster gives up waiting
SLACK = 4  # clusters in SLACK may be one step behind
EVICT_FIRST = 0x12F0000000000000  # L2 policy of TMA loads: what streams past leaves first


class GemmSm90:
    """A (m, k) times B (n, k) transposed, persistent, its fp32 tiles given to an epilogue in registers.

    A and B are bf16 or fp16 and may be major along k or along m and n. A run is a row of clusters and a
    window (schedule.py); a cluster takes runs cluster_id, cluster_id + clusters, ... and a run's tiles in
    order.

    Warps of a CTA (128 (warpgroups + 1) threads, one CTA to an SM):
        warpgroup 0     warp 0 loads: TMA of A and B, for all consumers. Warps 1 to 3 only give up registers.
        warpgroups 1-   MMA and epilogue: WGMMA from shared memory into registers, then epilogue.visit there.
    With config.pingpong the two consumer warpgroups take turns at whole tiles of tile_m rows; otherwise each
    has tile_m / warpgroups rows of every tile.

    Pipeline "ring" (load -> MMA), config.stages slots of a k tile of A and one of B:
        full    1 arrival (expect_tx) and (tile_m + tile_n) tile_k 2 bytes. With a cluster some of the bytes
                come from its other CTAs: B is sliced along cluster_m and A along cluster_n, and each CTA
                multicasts its slice.
        empty   4 warps of each warpgroup that reads the slot (all; with pingpong the one whose turn it is),
                in each of the cluster_m + cluster_n - 1 CTAs that the slot's slices go to or come from.
    Named barriers TURN_BARRIER and TURN_BARRIER + 1 (pingpong only), 256 threads: "warpgroup 0 (1) may
    issue its MMAs". The other warpgroup arrives when it has issued a tile's last MMA; at the start
    warpgroup 1 arrives for warpgroup 0.

    Timeline. Load runs up to `stages` k tiles ahead of the MMAs, across tiles and runs. A tile of a consumer
    is, for each k tile: wait full; WGMMAs; commit; wait until the k tile before is done; release its slot.
    Two k tiles' MMAs are queued at most, one while it is waited for.
        shared tiles  every warpgroup:  MMA tile 0 | epilogue 0 | MMA tile 1 | epilogue 1 | ...
                      The tensor cores idle during epilogues; load fills the ring meanwhile.
        pingpong      warpgroup 0:  MMA 0      | epilogue 0 | wait | MMA 2      | epilogue 2 | ...
                      warpgroup 1:  wait       | MMA 1             | epilogue 1 | wait | MMA 3 ...
                      An epilogue costs nothing while it is shorter than a tile's MMAs. Slots are read in the
                      order of tiles, so a warpgroup skips the k tiles of the other's turn; turns go on across
                      runs, whatever their numbers of tiles.
    The last epilogue of a CTA is exposed.

    Budgets. Registers: 384 threads are launched with 168; then the load warpgroup drops to 24 and two
    consumers rise to 240 (128 (24 + 2 240) = 64,512 of 65,536). A consumer thread holds 192 accumulators in
    each of the configurations of plan.py: 128 x 192 a warpgroup. Nothing is spilled and no local memory
    used (tests/test_compiled_sm90.py). Shared memory: (tile_m + tile_n) tile_k 2 bytes a stage, 40 KiB for
    128 x 192 x 64 and 5 stages, 56 KiB for 256 x 192 x 64 and 4; one stage more would not fit 227 KiB. All
    of it is the ring: logits have no place in it.

    Pacing (config.pace > 0 and `paced`). Clusters that read the same tiles find them in L2 only while they
    are close together. Every `pace` k tiles a cluster counts a step in `progress` and, if it is ahead,
    looks again until all clusters together have made as many as if each had made its own number but one in
    SLACK of them one step fewer. At its end a cluster counts the steps of the runs and tiles that it did
    not have, so that no one waits for it. Only the load warp of the cluster's first CTA does so; the others
    follow through the ring. It changes speed alone: who has looked PATIENCE times in vain never waits
    again, so that nothing depends on all clusters being resident.

    Hazards. A slot may be overwritten only when every WGMMA that reads it has completed: it is released after
    the wait for its group, which is a k tile later, so that a ring needs 2 stages. Accumulators may be read
    only behind wait_group 0. A CTA must not end while others of its cluster may still signal its barriers:
    the load warp's producer_tail waits for the last releases. TMA fills what lies outside A and B with
    zeros; the epilogue masks columns beyond n and does not write rows beyond m. Each of these waits and
    arrivals, removed, is found by the emulator (docs/emulator-mutations.md).
    """

    threads_per_row = 4

    @staticmethod
    def fragment_columns(config: KernelConfig) -> int:
        """Columns of a tile that one visit of the epilogue sees, over all threads that share a row."""
        return config.tile_n

    def __init__(self, config: KernelConfig, epilogue):
        _check(config)
        self.config = config
        self.epilogue = epilogue
        self.tile = (config.tile_m, config.tile_n, config.tile_k)
        self.cluster = (config.cluster_m, config.cluster_n)
        self.threads = WARPGROUP * (config.warpgroups + 1)
        self.turns = config.turns
        self.load_registers = {1: 56, 2: 24, 3: 32}[config.warpgroups]
        self.mma_registers = {1: 256, 2: 240, 3: 160}[config.warpgroups]

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (m, k)
        b: cute.Tensor,  # (n, k)
        tensors,
        progress: cute.Tensor,  # (1,) int32, zero before the launch
        windows: Int32,
        tiles_per_window: Int32,
        group_m: Int32,
        clusters: Int32,
        paced: Int32,
        stream: cuda.CUstream,
    ):
        """Launch on `clusters` clusters; a window has tiles_per_window tiles of cluster_n tile_n columns.

        tensors: what the epilogue reads and writes. group_m: rows of clusters that share L2 (schedule.py).
        paced: 0 or 1.
        """
        config = self.config
        dtype = a.element_type
        a_layout, b_layout = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        tiled_mma = hopper_helpers.make_trivial_tiled_mma(
            dtype,
            dtype,
            a_layout.sm90_mma_major_mode(),
            b_layout.sm90_mma_major_mode(),
            Float32,
            (config.warpgroups // self.turns, 1, 1),
            (64, config.tile_n),
        )
        # ((8, tile / 8), (64, 1), stages) with the 128-byte swizzle
        a_smem = hopper_helpers.make_smem_layout_a(a_layout, self.tile, dtype, config.stages)
        b_smem = hopper_helpers.make_smem_layout_b(b_layout, self.tile, dtype, config.stages)
        tma_a, mA = _tma_load(a, a_smem, (config.tile_m, config.tile_k), config.cluster_n)
        tma_b, mB = _tma_load(b, b_smem, (config.tile_n, config.tile_k), config.cluster_m)

        @cute.struct
        class SharedStorage:
            ring: cute.struct.MemRange[cutlass.Int64, config.stages * 2]
            a: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(a_smem)], SMEM_ALIGN]
            b: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(b_smem)], SMEM_ALIGN]

        self.storage = SharedStorage
        rows = cute.ceil_div(cute.size(a, mode=[0]), config.tile_m * config.cluster_m)
        self.kernel(
            tma_a,
            mA,
            tma_b,
            mB,
            tensors,
            tiled_mma,
            a_smem,
            b_smem,
            progress,
            (rows, windows, tiles_per_window, group_m, paced),
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
        progress: cute.Tensor,
        runs,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        if warp == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)

        cluster_layout = cute.make_layout((*self.cluster, 1))
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        coord = cluster_layout.get_flat_coord(rank)

        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sA = storage.a.get_tensor(a_smem.outer, swizzle=a_smem.inner)  # (tile_m, tile_k, stages)
        sB = storage.b.get_tensor(b_smem.outer, swizzle=b_smem.inner)  # (tile_n, tile_k, stages)
        peers = config.cluster_m + config.cluster_n - 1
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.ring.data_ptr(),
            num_stages=config.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, 4 * config.warpgroups // self.turns * peers
            ),
            tx_count=(config.tile_m + config.tile_n) * config.tile_k * (sA.element_type.width // 8),
            cta_layout_vmnk=cute.make_layout((1, *cluster_layout.shape)),
            defer_sync=True,
        )
        pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)

        # (tile_m, tile_k, m tiles, k tiles) and (tile_n, tile_k, n tiles, k tiles)
        gA = cute.local_tile(mA, (config.tile_m, config.tile_k), (None, None))
        gB = cute.local_tile(mB, (config.tile_n, config.tile_k), (None, None))
        k_tiles = cute.size(gA, mode=[3])
        pipeline_init_wait(cluster_shape_mn=self.cluster)

        if group == 0:
            cute.arch.setmaxregister_decrease(self.load_registers)
            if warp == 0:
                self._load(tma_a, gA, sA, tma_b, gB, sB, ring, coord, progress, runs, k_tiles)
        else:
            cute.arch.setmaxregister_increase(self.mma_registers)
            self._mma(
                tiled_mma, sA, sB, ring, tensors, group - 1, coord, runs, cute.size(gB, mode=[2]), k_tiles
            )

    @cute.jit
    def _load(self, tma_a, gA, sA, tma_b, gB, sB, ring, coord, progress, runs, k_tiles: Int32):
        """Load warp: for every tile of every run, its k tiles of A and B into the ring."""
        config = self.config
        # ((tile bytes), stages) and ((tile bytes), tiles, k tiles)
        tAsA, tAgA = cpasync.tma_partition(
            tma_a,
            coord[1],
            cute.make_layout(config.cluster_n),
            cute.group_modes(sA, 0, 2),
            cute.group_modes(gA, 0, 2),
        )
        tBsB, tBgB = cpasync.tma_partition(
            tma_b,
            coord[0],
            cute.make_layout(config.cluster_m),
            cute.group_modes(sB, 0, 2),
            cute.group_modes(gB, 0, 2),
        )
        cluster_layout = cute.make_layout((*self.cluster, 1))
        a_mask = cute.make_layout_image_mask(cluster_layout, coord, mode=1) if config.cluster_n > 1 else None
        b_mask = cute.make_layout_image_mask(cluster_layout, coord, mode=0) if config.cluster_m > 1 else None
        rows, windows, tiles_per_window, group_m, paced = runs
        slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
        tiles = cute.ceil_div(cute.size(gB, mode=[2]), config.cluster_n)
        run = cute.arch.block_idx()[0] // config.cluster_m
        step = cute.arch.grid_dim()[0] // config.cluster_m
        counts = paced != 0 and coord[0] + coord[1] == 0 and cute.arch.lane_idx() == 0
        steps, patience = Int32(0), Int32(PATIENCE)
        while run < rows * windows:
            row, window = schedule.run_coord(run, rows, windows, group_m)
            first, end = schedule.run_tiles(window, tiles_per_window, tiles)
            m_tile = row * config.cluster_m + coord[0]
            for tile in cutlass.range(first, end, unroll=1):
                n_tile = tile * config.cluster_n + coord[1]
                for k in cutlass.range(k_tiles, unroll=1):
                    if cutlass.const_expr(config.pace > 0):
                        if k % config.pace == 0:
                            steps += 1
                            if counts:
                                patience = _keep_pace(progress, steps * step - step // SLACK, patience)
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
                        cache_policy=cutlass.Int64(EVICT_FIRST),
                    )
                    slot.advance()
            run += step
        if cutlass.const_expr(config.pace > 0):
            if counts:
                most = cute.ceil_div(rows * windows, step) * (
                    tiles_per_window * cute.ceil_div(k_tiles, config.pace)
                )
                cute.arch.red(
                    progress.iterator, most - steps, op="add", dtype="s32", sem="relaxed", scope="gpu"
                )
        ring.producer_tail(slot)

    @cute.jit
    def _mma(self, tiled_mma, sA, sB, ring, tensors, group, coord, runs, n_tiles: Int32, k_tiles: Int32):
        """Consumer warpgroups: a tile's WGMMAs, then the epilogue on the accumulators."""
        config = self.config
        turns = self.turns
        turn = group % turns
        thread = cute.arch.thread_idx()[0] - WARPGROUP * (1 + turn)
        shared = tiled_mma.get_slice((group - turn) * WARPGROUP)
        tCrA = tiled_mma.make_fragment_A(shared.partition_A(sA))  # (MMA, MMA_M, MMA_K, stages)
        tCrB = tiled_mma.make_fragment_B(shared.partition_B(sB))  # (MMA, MMA_N, MMA_K, stages)
        # ((2, 2, tile_n / 8), MMA_M, 1): column pair, row pair, column blocks
        coords = tiled_mma.get_slice(thread).partition_C(
            cute.make_identity_tensor((config.tile_m, config.tile_n))
        )
        acc = cute.make_rmem_tensor(coords.shape, Float32)
        frag = _rows_cols(acc)  # (rows, cols)
        where = _rows_cols(coords)
        rows_in_tile = cute.size(frag, mode=[0])
        cols = cute.make_rmem_tensor(cute.size(frag, mode=[1]), Int32)
        for c in cutlass.range_constexpr(cute.size(cols)):
            cols[c] = where[0, c][1]
        row_index = cute.make_rmem_tensor(rows_in_tile, Int32)

        rows, windows, tiles_per_window, group_m, _ = runs
        slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
        if cutlass.const_expr(turns > 1):
            if turn > 0:
                cute.arch.barrier_arrive(barrier_id=TURN_BARRIER, number_of_threads=2 * WARPGROUP)
                slot.advance(k_tiles)
        tiles = cute.ceil_div(n_tiles, config.cluster_n)
        run = cute.arch.block_idx()[0] // config.cluster_m
        step = cute.arch.grid_dim()[0] // config.cluster_m
        before = Int32(0)  # tiles of this CTA in the runs before this one
        while run < rows * windows:
            row, window = schedule.run_coord(run, rows, windows, group_m)
            first, end = schedule.run_tiles(window, tiles_per_window, tiles)
            for r in cutlass.range_constexpr(rows_in_tile):
                row_index[r] = (row * config.cluster_m + coord[0]) * config.tile_m + where[r, 0][0]
            state = self.epilogue.begin(tensors, row_index)
            # Which of the window's tiles are this warpgroup's: its partial is theirs, whoever had the turn.
            share = (turn + before) % turns
            for tile in cutlass.range(first + share, end, turns, unroll=1):
                slot = self._tile(tiled_mma, tCrA, tCrB, acc, ring, slot, turn, k_tiles)
                self.epilogue.visit(tensors, state, frag, row_index, cols, tile * config.cluster_n + coord[1])
            self.epilogue.end(
                tensors, state, row_index, (window * config.cluster_n + coord[1]) * turns + share
            )
            before += end - first
            run += step

    @cute.jit
    def _tile(self, tiled_mma, tCrA, tCrB, acc, ring, slot, turn, k_tiles: Int32):
        """One tile of A B^T into acc, with one k tile's WGMMAs in flight; returns the ring's next slot."""
        done = slot.clone()
        if cutlass.const_expr(self.turns > 1):
            cute.arch.barrier(barrier_id=TURN_BARRIER + turn, number_of_threads=2 * WARPGROUP)
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
        if cutlass.const_expr(self.turns > 1):
            cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - turn, number_of_threads=2 * WARPGROUP)
            slot.advance(k_tiles)
        warpgroup.wait_group(0)
        ring.consumer_release(done)
        return slot


def _check(config: KernelConfig) -> None:
    """Raise ValueError for a configuration that the kernel does not have."""
    if config.warpgroups not in (1, 2, 3) or (config.pingpong and config.warpgroups != 2):
        raise ValueError(f"config: got {config.warpgroups} warpgroups, want 1 to 3, and 2 with pingpong")
    rows = 64 * config.warpgroups // config.turns
    if config.tile_m <= 0 or config.tile_m % rows or config.tile_n % 32 or not 0 < config.tile_n <= 256:
        raise ValueError(
            f"config: got a tile of {config.tile_m} x {config.tile_n}, want a multiple of {rows} rows and"
            " up to 256 columns, a multiple of 32"
        )
    if config.stages < 2:
        raise ValueError(
            f"config: got {config.stages} stages, want 2 or more: a slot is released a k tile later"
        )


@cute.jit
def _keep_pace(progress: cute.Tensor, enough: Int32, patience: Int32) -> Int32:
    """Count one step of this cluster; look up to `patience` times whether all together have made `enough`.

    Clusters that read the same tiles find them in L2 only while they stay close together; those ahead wait a
    little for the rest. Nothing but speed depends on it: a cluster that has waited in vain, as when some are
    not resident because another kernel holds their SMs, never waits again. Returns the patience that is left.
    """
    cute.arch.red(progress.iterator, Int32(1), op="add", dtype="s32", sem="relaxed", scope="gpu")
    seen = cute.arch.load(progress.iterator, Int32, sem="relaxed", scope="gpu")
    looks = Int32(0)
    while seen < enough and looks < patience:
        seen = cute.arch.load(progress.iterator, Int32, sem="relaxed", scope="gpu")
        looks += 1
    return Int32(cutlass.select_(looks < patience, patience, Int32(0)))


def _tma_load(tensor, smem_layout, tile, multicast):
    """(copy atom, tensor of coordinates) of a TMA load of `tile`, a slice by each of `multicast` CTAs."""
    op = cpasync.CopyBulkTensorTileG2SOp() if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    return cpasync.make_tiled_tma_atom(
        op, tensor, cute.slice_(smem_layout, (None, None, 0)), tile, num_multicast=multicast
    )


def _rows_cols(acc: cute.Tensor) -> cute.Tensor:
    """View of an accumulator ((2, 2, tile_n / 8), MMA_M, MMA_N) as (rows, cols)."""
    (pair, row, block), m, n = acc.layout.shape
    (pair_stride, row_stride, block_stride), m_stride, n_stride = acc.layout.stride
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(
            ((row, m), (pair, block, n)),
            stride=((row_stride, m_stride), (pair_stride, block_stride, n_stride)),
        ),
    )
