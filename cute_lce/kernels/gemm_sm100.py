"""Blackwell's mainloop: TMA into a ring in shared memory, tcgen05 into TMEM, an epilogue on its slabs."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers

from cute_lce.arch import ACCUMULATOR_STAGES, SLABS, KernelConfig
from cute_lce.kernels import gemm
from cute_lce.kernels.epilogues.store import Staging, drain
from cute_lce.kernels.fragment import Fragment, opaque
from cute_lce.kernels.rows import Compacted

WARP = 32
EPILOGUE_WARPS = 4  # one per quarter of the lanes of tensor memory, and one per scheduler of the SM
MMA_WARP = 4
LOAD_WARP = 5
SPARE_WARPS = 4  # 320 threads have 168 registers
TMEM_BARRIER = 1  # named barriers: the epilogue and MMA warps know where tensor memory is;
DONE_BARRIER = 2  # the epilogue warps have finished reading it
BOX_BARRIER = 3  # epilogues.store
HALF = 16 << 16  # from the first 16 of a warp's lanes of tensor memory to the others


class GemmSm100(gemm.Gemm):
    """gemm.Gemm with fp32 tiles in tensor memory, from which an epilogue reads them.

    Two forms, by config.tile_m. 256: a pair of CTAs on neighbouring SMs computes a tile with one MMA
    (cta_group::2); each loads and holds 128 rows of A and of the accumulator, and half of the rows of B. 128:
    each CTA computes a tile.

    Warps of a CTA (192 threads, with spare warps 320, one CTA to an SM):
        0-3  epilogue: warp w has rows 32 w to 32 w + 31 of the CTA's 128, which are its lanes of TMEM; it
             reads them in slabs of 64 or 32 columns, each by two tcgen05.ld.16x256b of 16 lanes, and gets the
             fragment of m16n8 MMAs (kernels.fragment)
        4    MMA: issues for the pair in its first CTA, idle in its second
        5    load: TMA of this CTA's parts of A and B
        6-9  if `spare` is given: they do that

    Pipelines (producer -> consumer, slots):
        ring          load -> MMA, config.stages. full, in the pair's first CTA: 1 arrival and the bytes of
                      both CTAs' A and B. empty: a multicast tcgen05.commit of every MMA in the cluster that
                      reads the slot.
        accumulators  MMA -> epilogue, 2. full: a tcgen05.commit, multicast to the pair. empty, in the pair's
                      first CTA: 4 warps of each CTA, after their last tcgen05.wait::ld.

    Timeline: load runs up to `stages` k tiles ahead of MMA, across tiles and runs. MMA fills one accumulator
    while the epilogue reads the other, so an epilogue costs nothing as long as it is shorter than a tile's
    MMAs: the forward's is, from a d between 256 and 630 upwards (docs/kernels.md has the cycles). The last
    epilogue of a CTA is exposed.

    Partials: CTAs of a pair have rows of their own, and a partial for every window.

    Budgets: registers up to 255 a thread in forwards, 153 for dlogits, 249 for dhidden
    and 160 for dweight, without spills; 192 and 256 threads could have 255, and 320 have 168, so setmaxnreg
    is not needed. The loop over slabs is unrolled, since an epilogue's numbers of a column are in registers.
    Shared memory: (tile_m + tile_n) * tile_k * 2 / pair bytes a stage, which is 32 KiB for 256 x 256 x 64 (6
    stages in 227 KiB), 20 KiB for 256 x 64 x 64 (10 stages) and 48 KiB for 128 x 256 x 64 (4 stages), and 16
    KiB of boxes (epilogues.store). TMEM: two accumulators of tile_n columns, all 512 columns at 256; a power
    of two is allocated.

    Four epilogue warps, one for each of the SM's schedulers: the exponentials are the limit, 16 a clock and
    SM, and four warps keep enough of them in flight. Eight would not make them fewer.

    Hazards, besides gemm.Gemm's. tcgen05 operations issued by one CTA are ordered among themselves, but not
    with other threads. An accumulator may be overwritten only when all its rows have been read, so each
    epilogue warp releases it after its last tcgen05.wait::ld. The values of a tcgen05.ld may be used only
    after that wait, which `_load_slab` emits with the load. Tensor memory may be deallocated only when both
    CTAs of a pair have finished reading it: DONE_BARRIER, then the allocator's handshake of the pair. A
    barrier alone does not order tcgen05 operations of different threads: tcgen05.fence::after_thread_sync
    follows each wait for an accumulator, and before_thread_sync precedes its release; tcgen05.commit implies
    the latter. The emulator finds the removal of each of these (docs/kernels.md).

    The schedule is static, schedule.py's as on Hopper: runs are equally long, and their order serves L2.
    Cluster launch control would balance clusters of unequal speed, but hands out work in grid order and needs
    a warp and a pipeline to distribute it; its gain has not been measured.

    Multicast: a cluster_m above the pair's shares B between pairs, cluster_n shares A. A lone pair of 256 x
    256 needs 64 bytes a clock and SM from L2 at the full rate, 4 x 1 CTAs need 48. But clusters of 4 leave
    SMs idle in a GPC whose number of SMs is not a multiple of 4, so the default is the pair alone; neither
    has been measured.
    """

    threads = WARP * (EPILOGUE_WARPS + 2)

    @staticmethod
    def fragment(config: KernelConfig) -> Fragment:
        """What an epilogue gets at once: a slab of columns of its warp's 32 rows."""
        columns = next((slab for slab in SLABS if config.tile_n % slab == 0), SLABS[-1])
        return Fragment(
            rows=(0, 8, 16, 24),
            columns=columns,
            slabs=config.tile_n // columns,
        )

    def __init__(self, config: KernelConfig, epilogue, tokens_along: str = "n", spare: Any = None):
        if config.tile_m not in (128, 256) or config.tile_n % SLABS[-1] or not 0 < config.tile_n <= 256:
            raise ValueError(
                f"config: got a tile of {config.tile_m} x {config.tile_n}, want 128 or 256 rows and"
                f" up to 256 columns, a multiple of {SLABS[-1]}"
            )
        if config.cluster_m % config.pair:
            raise ValueError(f"config: got cluster_m {config.cluster_m}, want an even one for tile_m 256")
        super().__init__(config, epilogue, tokens_along, spare)
        if spare is not None:
            self.threads += WARP * SPARE_WARPS
        self.acc_stages = ACCUMULATOR_STAGES
        self.barriers = {
            "accumulators": cute.struct.MemRange[cutlass.Int64, self.acc_stages * 2],
            "tmem_freed": cutlass.Int64,
            "tmem": cutlass.Int32,
        }

    def operands(self, a: cute.Tensor, b: cute.Tensor, given: cute.Tensor | None = None):
        config, dtype = self.config, a.element_type
        tiled_mma = blackwell_helpers.make_trivial_tiled_mma(
            dtype,
            dtype,
            LayoutEnum.from_tensor(a).mma_major_mode(),
            LayoutEnum.from_tensor(b).mma_major_mode(),
            Float32,
            tcgen05.CtaGroup.TWO if config.pair == 2 else tcgen05.CtaGroup.ONE,
            self.tile[:2],
        )
        # (MMA, MMA_M or MMA_N, MMA_K, stages) with the 128-byte swizzle: this CTA's part
        a_smem = blackwell_helpers.make_smem_layout_a(tiled_mma, self.tile, dtype, config.stages)
        b_smem = blackwell_helpers.make_smem_layout_b(tiled_mma, self.tile, dtype, config.stages)
        tma_a, mA = cute.nvgpu.make_tiled_tma_atom_A(
            blackwell_helpers.cluster_shape_to_tma_atom_A(self.cluster, tiled_mma.thr_id),
            a,
            cute.slice_(a_smem, (None, None, None, 0)),
            self.tile,
            tiled_mma,
            self.cluster_layout().shape,
        )
        (tma_b, mB), *others = (
            cute.nvgpu.make_tiled_tma_atom_B(
                blackwell_helpers.cluster_shape_to_tma_atom_B(self.cluster, tiled_mma.thr_id),
                matrix,
                cute.slice_(b_smem, (None, None, None, 0)),
                self.tile,
                tiled_mma,
                self.cluster_layout().shape,
            )
            for matrix in (b, given)
            if matrix is not None
        )
        operand_b = gemm.Operand(tma_b, mB, b_smem, others[0][0] if others else None)
        return tiled_mma, gemm.Operand(tma_a, mA, a_smem), operand_b

    @cute.kernel
    def kernel(
        self,
        a: gemm.Operand,
        b: gemm.Operand,
        tensors,
        tiled_mma: cute.TiledMma,
        progress: cute.Tensor,
        runs: gemm.Runs,
        tokens: Compacted,
        beside,
    ):
        config = self.config
        if cutlass.const_expr(self.begins_at_once):
            runs = self.begin(runs, tokens)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(a.tma)
            cpasync.prefetch_descriptor(b.tma)
            if cutlass.const_expr(b.given is not None):
                cpasync.prefetch_descriptor(b.given)

        cluster_vmnk, coord = self.cluster_layout(), self.coordinate()
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sA, sB = a.shared(storage.a), b.shared(storage.b)  # (MMA, MMA_M or MMA_N, MMA_K, stages)
        ring = pipeline.PipelineTmaUmma.create(
            barrier_storage=storage.ring.data_ptr(),
            num_stages=config.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.peers),
            tx_count=self.slot_bytes,
            cta_layout_vmnk=cluster_vmnk,
            defer_sync=True,
        )
        accumulators = pipeline.PipelineUmmaAsync.create(
            barrier_storage=storage.accumulators.data_ptr(),
            num_stages=self.acc_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_WARPS * config.pair),
            cta_layout_vmnk=cluster_vmnk,
            defer_sync=True,
        )
        tmem = cutlass.memory.TmemAllocator(
            storage.tmem.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(TMEM_BARRIER, WARP * (EPILOGUE_WARPS + 1)),
            is_two_cta=config.pair == 2,
            two_cta_tmem_dealloc_mbar_ptr=storage.tmem_freed.ptr,
        )
        pipeline_init_arrive(cluster_shape_mn=cluster_vmnk, is_relaxed=True)

        tiled = tiled_mma.get_slice(coord[0])
        gA, gB = self.tiles(a, b)
        # (MMA, MMA_M, MMA_N, accumulators)
        acc_shape = cute.append(tiled_mma.partition_shape_C(self.tile[:2]), self.acc_stages)
        acc_layout = tiled_mma.make_fragment_C(acc_shape).layout
        pipeline_init_wait(cluster_shape_mn=cluster_vmnk)
        if cutlass.const_expr(not self.begins_at_once):
            runs = self.begin(runs, tokens)

        if warp == LOAD_WARP:
            # (MMA, MMA_M, MMA_K, m tiles, k tiles) and (MMA, MMA_N, MMA_K, n tiles, k tiles)
            self.load(
                self.stream(a, tiled.partition_A(gA), sA, coord, 2),
                self.stream(b, tiled.partition_B(gB), sB, coord, 1),
                ring,
                coord,
                progress,
                runs,
                tokens,
            )
        if warp == MMA_WARP:
            tmem.wait_for_alloc()
            acc = cute.make_tensor(tmem.retrieve_ptr(Float32), acc_layout)
            if coord[0] == 0:
                self._mma(tiled_mma, sA, sB, acc, ring, accumulators, coord, runs)
        if warp < EPILOGUE_WARPS:
            tmem.allocate(config.tmem_columns)
            tmem.wait_for_alloc()
            base = tmem.retrieve_ptr(Float32)
            acc = cute.make_tensor(base, acc_layout)
            staging = Staging(storage.boxes.data_ptr().toint(), BOX_BARRIER)
            self._epilogue(acc, accumulators, tensors, staging, coord, runs)
            tmem.relinquish_alloc_permit()
            cute.arch.barrier(barrier_id=DONE_BARRIER, number_of_threads=WARP * EPILOGUE_WARPS)
            tmem.free(base)
        if cutlass.const_expr(self.spare is not None):
            if warp > LOAD_WARP:
                self.do_beside(beside, warp - (LOAD_WARP + 1), SPARE_WARPS)

    @cute.jit
    def _mma(
        self,
        tiled_mma,
        sA,
        sB,
        acc,
        ring,
        accumulators,
        coord,
        runs: gemm.Runs,
    ):
        """MMA warp of the pair's first CTA: every tile of every run into the next free accumulator."""
        config = self.config
        tCrA = tiled_mma.make_fragment_A(sA)  # (MMA, MMA_M, MMA_K, stages)
        tCrB = tiled_mma.make_fragment_B(sB)  # (MMA, MMA_N, MMA_K, stages)
        slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
        free = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.acc_stages)
        walk = self.walk(runs, coord)
        for run in cutlass.range(walk.cluster, walk.runs, walk.clusters, unroll=1):
            _, _, _, first, end = walk.run(run)
            for _ in cutlass.range(first, end, unroll=1):
                accumulators.producer_acquire(free)
                _fence("after_thread_sync")
                tile = acc[None, None, None, free.index]
                for k in cutlass.range(walk.depth, unroll=1):
                    ring.consumer_wait(slot)
                    for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                        tiled_mma.set(tcgen05.Field.ACCUMULATE, k + block > 0)
                        at = (None, None, block, slot.index)
                        cute.gemm(tiled_mma, tile, tCrA[at], tCrB[at], tile)
                    ring.consumer_release(slot)
                    slot.advance()
                accumulators.producer_commit(free)
                free.advance()
        accumulators.producer_tail(free)

    @cute.jit
    def _epilogue(self, acc, accumulators, tensors, staging: Staging, coord, runs: gemm.Runs):
        """Epilogue warps: every tile's 128 rows of this CTA, 32 to a warp, slab by slab."""
        config, fragment = self.config, self.fragment(self.config)
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        own_row, own_column = coord[0] * 128 + warp * WARP + (lane >> 2), 2 * (lane & 3)
        frag = cute.make_rmem_tensor((len(fragment.rows), fragment.count), Float32)  # (rows, cols)

        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.acc_stages)
        walk = self.walk(runs, coord)
        for run in cutlass.range(walk.cluster, walk.runs, walk.clusters, unroll=1):
            n_tile, window, split, first, end = walk.run(run)
            column = n_tile * config.tile_n + own_column
            state = self.epilogue.begin(tensors, column, staging)
            for tile in cutlass.range(first, end, unroll=1):
                row = walk.m_tile(tile) * config.tile_m + own_row
                own = opaque(column)
                accumulators.consumer_wait(full)
                _fence("after_thread_sync")
                # Lanes in the upper 16 bits, columns in the lower.
                address = acc[None, None, None, full.index].iterator.toint() + (warp * WARP << 16)
                for slab in cutlass.range_constexpr(fragment.slabs):
                    _load_slab(address + slab * fragment.columns, frag)
                    if cutlass.const_expr(slab + 1 == fragment.slabs):
                        _fence("before_thread_sync")
                        with cute.arch.elect_one():
                            accumulators.consumer_release(full)
                    self.epilogue.visit(tensors, staging, state, frag, row, own, slab, split)
                full.advance()
            # Each CTA of a pair has rows, and therefore partials, of its own.
            partial = walk.partial(window) * config.pair + coord[0]
            self.epilogue.end(tensors, staging, state, column, partial)
        if cutlass.const_expr(self.epilogue.stores):
            drain()


def _fence(kind: str):
    """Order this thread's tcgen05 operations with its waits and arrivals on barriers."""
    cute.arch.inline_ptx(f"tcgen05.fence::{kind};")


def _load_slab(address: Int32, frag: cute.Tensor):
    """Read a slab of tensor memory, a warp's 32 lanes, into frag (4, columns / 4), and wait for it.

    tcgen05.ld.16x256b gives 16 lanes of tensor memory as the fragment of m16n8 MMAs: of every 8 columns a
    thread has two in lane l // 4, then the same two 8 lanes below. Both loads and the wait are one inline
    assembly statement: nothing tells the compiler that the results of a tcgen05.ld depend on a separate
    tcgen05.wait::ld, so it moves their uses ahead of it.
    """
    count = cute.size(frag)
    half = count // 2
    loads = [
        f"tcgen05.ld.sync.aligned.16x256b.x{half // 4}.b32 {{{registers}}}, [${count + i}];\n"
        for i in range(2)
        for registers in [", ".join(f"${half * i + j}" for j in range(half))]
    ]
    values = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(" + ", ".join(["f32"] * count) + ")>"),
        [Int32(address).ir_value(), Int32(address + HALF).ir_value()],
        "".join(loads) + "tcgen05.wait::ld.sync.aligned;",
        ",".join(["=f"] * count + ["r"] * 2),
        has_side_effects=True,
    )
    for i in range(count):
        upper, block, lower, pair = i // half, i % half // 4, i % 4 // 2, i % 2
        frag[2 * upper + lower, 2 * block + pair] = Float32(llvm.extractvalue(Float32.mlir_type, values, [i]))


MAINLOOP = GemmSm100
