"""Hopper's mainloop: TMA into a ring in shared memory, WGMMA into registers, an epilogue on these."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from cute_lce.arch import SPARE_REGISTERS, WARPGROUP, WARPGROUP_REGISTERS, WARPS, KernelConfig
from cute_lce.kernels import gemm
from cute_lce.kernels.epilogues.store import Staging, drain
from cute_lce.kernels.fragment import Fragment, opaque
from cute_lce.kernels.rows import Compacted

TURN_BARRIER = 1
BOX_BARRIER = 3


class GemmSm90(gemm.Gemm):
    """gemm.Gemm with fp32 tiles in registers, where an epilogue processes them.

    Warps of a CTA (128 (warpgroups + 1) threads, one CTA to an SM):
        warpgroup 0     warp 0 loads A and B by TMA for all consumers. Warps 1 to 3 do what is `spare`, and
                        else only give up registers.
        warpgroups 1-   MMA and epilogue: WGMMA from shared memory into registers, then epilogue.visit there.
    With config.pingpong the two consumer warpgroups take turns at whole tiles of tile_m rows; otherwise each
    has tile_m / warpgroups rows of every tile.

    Pipeline "ring" (load -> MMA), config.stages slots of a k tile of A and one of B:
        full    1 arrival (expect_tx) and (tile_m + tile_n) tile_k 2 bytes. In a cluster some of the bytes
                come from other CTAs: B is sliced along cluster_m and A along cluster_n, and each CTA
                multicasts its slice.
        empty   4 warps of each warpgroup that reads the slot (all; with pingpong the one whose turn it is),
                in each of the cluster_m + cluster_n - 1 CTAs that send or receive the slot's slices.
    Named barriers TURN_BARRIER and TURN_BARRIER + 1 (pingpong only), 256 threads: warpgroup 0 (1) may issue
    its MMAs. The other warpgroup arrives when it has issued the last MMA of a tile; at the start warpgroup 1
    arrives for warpgroup 0. BOX_BARRIER and BOX_BARRIER + 1, 128 threads: a warpgroup's boxes are empty, or
    full (epilogues.store).

    Timeline. Load runs up to `stages` k tiles ahead of the MMAs, across tiles and runs. A tile of a consumer
    is, for each k tile: wait full; WGMMAs; commit; wait until the k tile before is done; release its slot.
    At most two k tiles' MMAs are queued; the older one is waited for. The first k tile is a copy of its own
    where an epilogue has `scarce_registers`.
        shared tiles  every warpgroup:  MMA tile 0 | epilogue 0 | MMA tile 1 | epilogue 1 | ...
                      The tensor cores idle during epilogues; load fills the ring meanwhile.
        pingpong      warpgroup 0:  MMA 0      | epilogue 0 | wait | MMA 2      | epilogue 2 | ...
                      warpgroup 1:  wait       | MMA 1             | epilogue 1 | wait | MMA 3 ...
                      An epilogue costs nothing while it is shorter than a tile's MMAs. Slots are read in the
                      order of tiles, so a warpgroup skips the k tiles of the other's turn; turns continue
                      across runs, whatever their numbers of tiles.
    The last epilogue of a CTA is exposed.

    Budgets. Registers: 384 threads start with 168; then the load warpgroup drops to 24 and the two consumers
    rise to 240 (128 (24 + 2 240) = 64,512 of 65,536); to 152 and 176 with spare warps.
    With tokens along n a consumer thread holds up to 208 accumulators, 128 x 208 or 192 x 128 per warpgroup,
    and in dweight's GEMM 64 x 256, 128 x 128 or 128 x 192. What spills is named in
    tests/compiled/test_backward.py. Shared memory: (tile_m + tile_n) tile_k 2 bytes a stage, from 20 KiB for
    128 x 32 x 64 and 9 stages to 56 KiB for 256 x 192 x 64 and 3, and 16 KiB of boxes for each warpgroup
    (epilogues.store); one more stage would not fit into 227 KiB. In the widest tiles also 8 to 14 KiB for
    each warpgroup, the words that its threads have each for itself (`words` of the epilogue: 3 or 4 for each
    of 4 to 7 columns). Logits in fp32 are never in shared memory.

    Hazards, besides gemm.Gemm's. A slot may be overwritten only when every WGMMA that reads it has completed:
    it is released after the wait for its group, one k tile later, so a ring needs at least 2 stages.
    Accumulators may be read only after wait_group 0. The emulator finds the removal of each of these waits
    and arrivals (docs/emulator-mutations.md).
    """

    @staticmethod
    def fragment(config: KernelConfig) -> Fragment:
        """What an epilogue gets at once: a whole tile, or its warpgroup's rows."""
        apart = _rows_at_once(config)
        rows = tuple(block + half for block in range(0, config.tile_m, apart) for half in (0, 8))
        return Fragment(rows=rows, columns=config.tile_n, slabs=1)

    def __init__(self, config: KernelConfig, epilogue, tokens_along: str = "n", spare: Any = None):
        _check(config)
        super().__init__(config, epilogue, tokens_along, spare)
        self.threads = WARPGROUP * (config.warpgroups + 1)
        self.turns = config.turns
        self.load_registers, self.mma_registers = WARPGROUP_REGISTERS[config.warpgroups]
        if spare is not None:
            self.load_registers, self.mma_registers = SPARE_REGISTERS

    def operands(self, a: cute.Tensor, b: cute.Tensor, given: cute.Tensor | None = None):
        config, dtype = self.config, a.element_type
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
        tile_b = config.tile_n, config.tile_k
        operand_b = _operand(b, b_smem, tile_b, config.cluster_m)
        if given is not None:
            operand_b = operand_b._replace(given=_operand(given, b_smem, tile_b, config.cluster_m).tma)
        return tiled_mma, _operand(a, a_smem, (config.tile_m, config.tile_k), config.cluster_n), operand_b

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
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        if warp == 0:
            cpasync.prefetch_descriptor(a.tma)
            cpasync.prefetch_descriptor(b.tma)
            if cutlass.const_expr(b.given is not None):
                cpasync.prefetch_descriptor(b.given)

        coord = self.coordinate()
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sA, sB = a.shared(storage.a), b.shared(storage.b)  # (tile_m or tile_n, tile_k, stages)
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.ring.data_ptr(),
            num_stages=config.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, 4 * config.warpgroups // self.turns * self.peers
            ),
            tx_count=self.slot_bytes,
            cta_layout_vmnk=self.cluster_layout(),
            defer_sync=True,
        )
        pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)

        gA, gB = self.tiles(a, b)
        pipeline_init_wait(cluster_shape_mn=self.cluster)
        if cutlass.const_expr(not self.begins_at_once):
            runs = self.begin(runs, tokens)

        if group == 0:
            cute.arch.setmaxregister_decrease(self.load_registers)
            if warp == 0:
                self.load(
                    self.stream(a, gA, sA, coord, 2),
                    self.stream(b, gB, sB, coord, 1),
                    ring,
                    coord,
                    progress,
                    runs,
                    tokens,
                )
            if cutlass.const_expr(self.spare is not None):
                if warp > 0:
                    self.do_beside(beside, warp - 1, WARPS - 1)
        else:
            cute.arch.setmaxregister_increase(self.mma_registers)
            own = (group - 1) * (config.box_bytes // config.warpgroups)
            words = None
            if cutlass.const_expr(self.epilogue_words > 0):
                words = storage.words.data_ptr().toint() + (group - 1) * (4 * WARPGROUP * self.epilogue.words)
            staging = Staging(storage.boxes.data_ptr().toint() + own, BOX_BARRIER - 1 + group, words)
            self._mma(tiled_mma, sA, sB, ring, tensors, staging, group - 1, coord, runs)

    @cute.jit
    def _mma(
        self,
        tiled_mma,
        sA,
        sB,
        ring,
        tensors,
        staging: Staging,
        group,
        coord,
        runs: gemm.Runs,
    ):
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
        own_row, own_column = _rows_cols(coords)[0, 0]

        slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
        walk = self.walk(runs, coord)
        if cutlass.const_expr(turns > 1):
            if turn > 0:
                cute.arch.barrier_arrive(barrier_id=TURN_BARRIER, number_of_threads=2 * WARPGROUP)
                slot.advance(walk.depth)
        before = Int32(0)  # tiles of this CTA in the runs before this one
        for run in cutlass.range(walk.cluster, walk.runs, walk.clusters, unroll=1):
            n_tile, window, split, first, end = walk.run(run)
            column = n_tile * config.tile_n + own_column
            state = self.epilogue.begin(tensors, column, staging)
            # Which of the window's tiles are this warpgroup's, which also selects the partial that it writes.
            share = (turn + before) % turns
            for tile in cutlass.range(first + share, end, turns, unroll=1):
                slot = self._tile(tiled_mma, tCrA, tCrB, acc, ring, slot, turn, walk.depth)
                row = walk.m_tile(tile) * config.tile_m + own_row
                self.epilogue.visit(tensors, staging, state, frag, row, opaque(column), 0, split)
            partial = walk.partial(window) * turns + share
            self.epilogue.end(tensors, staging, state, opaque(column), partial)
            before += end - first
        if cutlass.const_expr(self.epilogue.stores):
            drain()

    @cute.jit
    def _tile(self, tiled_mma, tCrA, tCrB, acc, ring, slot, turn, k_tiles: Int32):
        """One tile of A B^T into acc, with one k tile's WGMMAs in flight; returns the ring's next slot."""
        done = slot.clone()
        if cutlass.const_expr(self.turns > 1):
            cute.arch.barrier(barrier_id=TURN_BARRIER + turn, number_of_threads=2 * WARPGROUP)
        # A k tile's number matters where it is 0.
        apart = self.epilogue.scarce_registers
        if cutlass.const_expr(apart):
            self._multiply(tiled_mma, tCrA, tCrB, acc, ring, slot, 0)
            slot.advance()
        for k in cutlass.range(int(apart), k_tiles, unroll=1):
            self._multiply(tiled_mma, tCrA, tCrB, acc, ring, slot, 1 if apart else k)
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

    @cute.jit
    def _multiply(self, tiled_mma, tCrA, tCrB, acc, ring, slot, k):
        """Issue the WGMMAs of a tile's k-th k tile, one group. The first overwrites acc, others add.

        Where k is a constant the compiler knows that, and has acc's registers for others from the epilogue's
        last use of each on.
        """
        ring.consumer_wait(slot)
        warpgroup.fence()
        for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            tiled_mma.set(warpgroup.Field.ACCUMULATE, k + block > 0)
            at = (None, None, block, slot.index)
            cute.gemm(tiled_mma, acc, tCrA[at], tCrB[at], acc)
        warpgroup.commit_group()


def _rows_at_once(config: KernelConfig) -> int:
    """Rows of a tile that the warpgroups which share it multiply by one WGMMA each: 64 for each of them."""
    return 64 * config.warpgroups // config.turns


def _check(config: KernelConfig) -> None:
    """Raise ValueError for a configuration that the kernel does not support."""
    if config.pingpong and config.warpgroups != 2:
        raise ValueError(f"config: got {config.warpgroups} warpgroups, want 2 with pingpong")
    rows = _rows_at_once(config)
    # Epilogues take fragments of two or four blocks of 8 rows, a forward's that keeps nothing six too. CTAs
    # that share B load whole swizzle atoms.
    heights = [rows, 2 * rows, 3 * rows] if config.pingpong else [rows, 2 * rows]
    step = 8 * config.cluster_m
    if config.tile_m not in heights or config.tile_n % step or not 0 < config.tile_n <= 256:
        want = " or ".join(map(str, heights))
        raise ValueError(
            f"config: got a tile of {config.tile_m} x {config.tile_n}, want {want} rows and up to 256"
            f" columns, a multiple of {step}"
        )
    if config.stages < 2:
        raise ValueError(
            f"config: got {config.stages} stages, want 2 or more: a slot is released a k tile later"
        )


def _operand(tensor: cute.Tensor, slots: cute.ComposedLayout, tile, multicast: int) -> gemm.Operand:
    """A matrix whose tiles TMA loads, each of `multicast` CTAs a slice."""
    op = cpasync.CopyBulkTensorTileG2SOp() if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    # The DSL cannot slice the swizzled layout where a slot is an odd number of KiB.
    slot = cute.make_composed_layout(slots.inner, 0, cute.slice_(slots.outer, (None, None, 0)))
    tma, coords = cpasync.make_tiled_tma_atom(op, tensor, slot, tile, num_multicast=multicast)
    return gemm.Operand(tma, coords, slots)


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


MAINLOOP = GemmSm90
