"""What both mainloops share: the launch, loading operands into shared memory, the pacing of clusters."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from cute_lce.arch import EVICT_FIRST, WARPGROUP, KernelConfig
from cute_lce.arguments import COMPUTED_ROWS, GemmPlan
from cute_lce.kernels import pdl, schedule
from cute_lce.kernels.rows import Compacted, computed, is_whole

SMEM_ALIGN = 1024  # the 128-byte swizzle repeats every 1024 bytes
PATIENCE = 256  # failed polls of `progress` after which a cluster stops waiting
SLACK = 8  # one in SLACK clusters may be a step behind
LOOKED = 3  # k tiles of one tile, at most, that a cluster loads between a look at `progress` and a wait


class Operand(NamedTuple):
    """A or B, as the launch passes it to the kernel.

    tma: the copy of a tile. coords: the matrix, (m or n, k), as TMA's coordinates. slots: the layout of the
    ring's slots in shared memory; its last mode is the stages. given: the copy of a tile of another matrix of
    its size, which is read instead if no token is ignored; None: there is none.
    """

    tma: cute.CopyAtom
    coords: cute.Tensor
    slots: cute.ComposedLayout
    given: Any = None

    def shared(self, field) -> cute.Tensor:
        """The slots in their field of the kernel's storage."""
        return field.get_tensor(self.slots.outer, swizzle=self.slots.inner)


class Stream(NamedTuple):
    """A or B, as the load warp sees it.

    tiles: ((tile bytes), tiles, k tiles) in global memory. slots: ((tile bytes), stages) in shared memory.
    mask: the CTAs that receive what this one loads; None without multicast. given: Operand's.
    """

    tma: cute.CopyAtom
    tiles: cute.Tensor
    slots: cute.Tensor
    mask: Any
    given: Any


class Runs(NamedTuple):
    """The order of a launch's runs (schedule.py): columns of tiles, windows of rows, tiles of a window, all
    tiles of a column, splits of k and k tiles of each, columns in a group, and whether clusters pace (0 or
    1)."""

    columns: Int32
    windows: Int32
    tiles_per_window: Int32
    tiles: Int32
    splits: Int32
    depth: Int32
    group: Int32
    paced: Int32


class Gemm:
    """Persistent GEMM: A (m, k) times B (n, k) transposed, whose fp32 tiles an epilogue processes.

    A and B are bf16 or fp16 and may be major along k or along m and n. A run is a column of tiles, a window
    of its rows and a split of k (schedule.py); a cluster takes runs cluster_id, cluster_id + clusters, ...
    and a run's tiles in order. One warp of each CTA loads: for every tile of every run the k tiles of A and
    B, by TMA into a ring of config.stages slots. A streams past B: it has the L2 policy evict-first where the
    epilogue says so (`streams`); beside an epilogue's plain stores its lines would leave before all clusters
    that share them have read them. In a cluster a tile of B is sliced along m and one of A along n, and each
    CTA multicasts its slice.

    Where tokens are rows of an operand they are B's: an MMA's n is any multiple of 8 or 16, so that tiles can
    be as narrow as tokens are few. A is then the weight, whose rows (classes or features) are many.

    Pacing (config.pace > 0 and `paced`). Clusters that read the same tiles find them in L2 only while they
    are close together. Every `pace` k tiles a cluster adds one step to `progress` and looks at it. LOOKED k
    tiles later, or at the end of its tile, when the answer is there, it goes on if the total was what it
    would be if all clusters were here, less a step for one in SLACK of them, or polls until it is; MMAs go on
    with what is in the ring. At its end a cluster adds the steps of the runs and tiles that it did not have,
    so that others do not wait for it. Only the load warp of a cluster's first CTA does this; the other CTAs
    follow through the ring. It affects speed alone, in part by the power that DRAM takes from the MMAs: after
    PATIENCE failed polls a cluster stops waiting, so nothing depends on all clusters being resident.

    Hazards. A CTA must not end while others of its cluster may still signal its barriers: the load warp's
    producer_tail waits for the last releases. TMA fills what lies outside A and B with zeros; epilogues
    mask what they add up of rows beyond m, and write neither these nor columns beyond n.

    Spare warps do other work of the launch (`spare`), on which nothing in it waits.

    A mainloop is a subclass that defines the movement of data: the operands' layouts in shared memory, the
    pipelines, the other warp roles. It has `threads`, the threads of a CTA, and defines
        operands(a, b, given)  (tiled MMA, Operand of A, Operand of B); given: as in __call__
        barriers        its shared memory besides the ring's barriers and slots, field -> type
        kernel(...)     the kernel, one of whose warps runs `load`
    """

    threads: int
    barriers: Mapping[str, Any] = {}

    def __init__(self, config: KernelConfig, epilogue, tokens_along: str = "n", spare: Any = None):
        """tokens_along: "n" where tokens are B's rows, "k" where they are the depth. spare: what warps
        without another role do, spare.beside(tensors, first, step) of a warp; None: nothing."""
        if tokens_along == "k" and COMPUTED_ROWS % config.tile_k:
            raise ValueError(f"config: got k tiles of {config.tile_k}, want a divisor of {COMPUTED_ROWS}")
        self.config = config
        self.tokens_along = tokens_along
        # With the count read behind the barriers dweight's GEMM of two k tiles takes 12% longer, for reasons
        # unknown (docs/measurements.md).
        self.begins_at_once = tokens_along == "k"
        self.epilogue = epilogue
        self.spare = spare
        # Of shared memory: those of the epilogue's threads.
        self.epilogue_words = epilogue.words * WARPGROUP * config.warpgroups
        used, most = config.shared_memory + 4 * self.epilogue_words, config.row.shared_memory
        if used > most:
            raise ValueError(f"config: got {used} bytes of shared memory, want at most {most}: {config}")
        self.tile = (config.tile_m, config.tile_n, config.tile_k)
        self.cluster = (config.cluster_m, config.cluster_n)
        # Tiles that a cluster computes at once, along m and n.
        self.cluster_tiles = (config.cluster_m // config.pair, config.cluster_n)
        self.peers = sum(self.cluster_tiles) - 1  # tiles that read slices of what a CTA loads
        self.slot_bytes = (config.tile_m + config.tile_n) * config.tile_k * 2

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (m, k)
        b: cute.Tensor,  # (n, k)
        tensors,
        progress: cute.Tensor,  # (1,) int32, zero before the launch
        grid: GemmPlan,
        tokens: Compacted,
        stream: cuda.CUstream,
        early: Boolean | bool = True,
        given: cute.Tensor | None = None,  # (n, k)
        beside=None,
    ):
        """Launch grid.clusters clusters. tensors: what the epilogue reads and writes. early: by programmatic
        dependent launch: CTAs take SMs as those of the launch before leave them. given: B in the order of the
        operands' tokens, where b is in compacted order: what is read if no token is ignored, since then
        nobody has copied it to b. beside: the tensors of `spare`."""
        config = self.config
        tiled_mma, operand_a, operand_b = self.operands(a, b, given)
        self.storage = self.storage_of(a.element_type, operand_a.slots.outer, operand_b.slots.outer)
        depth = cute.ceil_div(cute.size(a, mode=[1]), config.tile_k)
        self.kernel(
            operand_a,
            operand_b,
            tensors,
            tiled_mma,
            progress,
            Runs(
                columns=cute.ceil_div(cute.size(b, mode=[0]), config.cluster_columns),
                windows=grid.windows,
                tiles_per_window=grid.tiles_per_window,
                tiles=cute.ceil_div(cute.size(a, mode=[0]), config.cluster_rows),
                splits=grid.splits,
                depth=cute.ceil_div(depth, grid.splits),
                group=grid.group,
                paced=grid.paced,
            ),
            tokens,
            beside,
        ).launch(
            grid=(grid.clusters * config.cluster_m, config.cluster_n, 1),
            block=(self.threads, 1, 1),
            cluster=(*self.cluster, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=Int32(early),
        )

    @cute.jit
    def begin(self, runs: Runs, tokens: Compacted) -> Runs:
        """Before global memory is accessed. Returns the runs that have tokens; without any along k, of one
        split, none."""
        config = self.config
        pdl.begin()
        columns, depth = runs.columns, runs.depth
        if tokens.count.iterator.toint() != 0:
            count = computed(tokens)
            if cutlass.const_expr(self.tokens_along == "n"):
                columns = cute.ceil_div(count, config.cluster_columns)
            else:
                depth = cute.ceil_div(count, config.tile_k)
                columns = columns * cutlass.min(depth, Int32(1))
        return runs._replace(
            columns=cute.arch.make_warp_uniform(columns), depth=cute.arch.make_warp_uniform(depth)
        )

    def storage_of(self, dtype, a_slots: cute.Layout, b_slots: cute.Layout):
        """The struct of shared memory: the ring's barriers, mainloop's, slots of A and B, boxes, words."""
        fields: dict[str, Any] = {
            "ring": cute.struct.MemRange[cutlass.Int64, self.config.stages * 2],
            **self.barriers,
        }
        for name, slots in (("a", a_slots), ("b", b_slots)):
            matrix = cute.struct.MemRange[dtype, cute.cosize(slots)]
            fields[name] = cute.struct.Align[matrix, SMEM_ALIGN]
        boxes = cute.struct.MemRange[cutlass.Uint8, self.config.box_bytes]
        fields["boxes"] = cute.struct.Align[boxes, SMEM_ALIGN]
        if self.epilogue_words:
            fields["words"] = cute.struct.MemRange[Int32, self.epilogue_words]
        return cute.struct(type("SharedStorage", (), {"__annotations__": fields}))

    def cluster_layout(self):
        """(CTA of a pair, tile along m, tile along n, 1) -> rank in the cluster."""
        return cute.tiled_divide(cute.make_layout((*self.cluster, 1)), (self.config.pair,))

    def coordinate(self):
        """This CTA's coordinate in cluster_layout."""
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        return self.cluster_layout().get_flat_coord(rank)

    def tiles(self, a: Operand, b: Operand):
        """(tile_m, tile_k, m tiles, k tiles) and (tile_n, tile_k, n tiles, k tiles)."""
        tile_m, tile_n, tile_k = self.tile
        return (
            cute.local_tile(a.coords, (tile_m, tile_k), (None, None)),
            cute.local_tile(b.coords, (tile_n, tile_k), (None, None)),
        )

    def walk(self, runs: Runs, coord) -> schedule.Walk:
        """This CTA's runs and tiles; coord: its coordinate in cluster_layout."""
        config = self.config
        return schedule.Walk(
            columns=runs.columns,
            windows=runs.windows,
            tiles_per_window=runs.tiles_per_window,
            group=runs.group,
            tiles=runs.tiles,
            splits=runs.splits,
            depth=runs.depth,
            cluster=cute.arch.block_idx()[0] // config.cluster_m,
            clusters=cute.arch.grid_dim()[0] // config.cluster_m,
            tiles_m=self.cluster_tiles[0],
            tiles_n=self.cluster_tiles[1],
            m=coord[1],
            n=coord[2],
        )

    def stream(self, operand: Operand, tiles, slots, coord, along: int) -> Stream:
        """An operand whose tiles CTAs along mode `along` of cluster_layout share, each loading a slice."""
        parts = self.cluster_tiles[along - 1]
        modes = cute.rank(slots) - 1
        shared, source = cpasync.tma_partition(
            operand.tma,
            coord[along],
            cute.make_layout(parts),
            cute.group_modes(slots, 0, modes),
            cute.group_modes(tiles, 0, modes),
        )
        mask = cute.make_layout_image_mask(self.cluster_layout(), coord, mode=along) if parts > 1 else None
        return Stream(operand.tma, source, shared, mask, operand.given)

    @cute.jit
    def do_beside(self, tensors, warp: Int32, warps: cutlass.Constexpr[int]):
        """A spare warp, one of so many of a CTA: its share of what `spare` does."""
        x, y, _ = cute.arch.block_idx()
        width, height, _ = cute.arch.grid_dim()
        self.spare.beside(tensors, (x * height + y) * warps + warp, width * height * warps)

    @cute.jit
    def load(self, a: Stream, b: Stream, ring, coord, progress, runs: Runs, tokens: Compacted):
        """Load warp: this CTA's part of the k tiles of A and B of every tile of every run, into the ring."""
        config = self.config
        whole = cute.arch.make_warp_uniform(Int32(is_whole(tokens)))
        slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
        walk = self.walk(runs, coord)
        paces = runs.paced != 0 and coord[0] + coord[1] + coord[2] == 0
        steps, seen, due, patience = Int32(0), Int32(0), Int32(0), Int32(PATIENCE)
        for run in cutlass.range(walk.cluster, walk.runs, walk.clusters, unroll=1):
            n_tile, _, split, first, end = walk.run(run)
            shallowest = split * walk.depth
            for tile in cutlass.range(first, end, unroll=1):
                m_tile = walk.m_tile(tile)
                for k in cutlass.range(walk.depth, unroll=1):
                    if cutlass.const_expr(config.pace > 0):
                        if k % config.pace == 0:
                            steps += 1
                            due = cutlass.min(k + min(LOOKED, config.pace), walk.depth) - 1
                            if paces:
                                _add_steps(progress, Int32(1))
                                seen = _look(progress)
                    ring.producer_acquire(slot)
                    full = ring.producer_get_barrier(slot)
                    _copy(a.tma, a, m_tile, shallowest + k, slot.index, full, self.epilogue.streams)
                    if cutlass.const_expr(b.given is None):
                        _copy(b.tma, b, n_tile, shallowest + k, slot.index, full, False)
                    elif whole != 0:
                        _copy(b.given, b, n_tile, shallowest + k, slot.index, full, False)
                    else:
                        _copy(b.tma, b, n_tile, shallowest + k, slot.index, full, False)
                    slot.advance()
                    if cutlass.const_expr(config.pace > 0):
                        if paces and k == due:
                            enough = steps * walk.clusters - walk.clusters // SLACK
                            patience = _keep_pace(progress, enough, seen, patience)
        if cutlass.const_expr(config.pace > 0):
            if paces:
                most = cute.ceil_div(walk.runs, walk.clusters) * (
                    walk.tiles_per_window * cute.ceil_div(walk.depth, config.pace)
                )
                _add_steps(progress, most - steps)
        ring.producer_tail(slot)


@cute.jit
def _copy(tma, operand: Stream, tile: Int32, k: Int32, slot: Int32, full, streams: cutlass.Constexpr[bool]):
    """Start the copy `tma` of an operand's k tile to its slot. streams: with the L2 policy evict-first."""
    source, target = operand.tiles[None, tile, k], operand.slots[None, slot]
    if cutlass.const_expr(streams):
        cute.copy(
            *(tma, source, target),
            tma_bar_ptr=full,
            mcast_mask=operand.mask,
            cache_policy=cutlass.Int64(EVICT_FIRST),
        )
    else:
        cute.copy(tma, source, target, tma_bar_ptr=full, mcast_mask=operand.mask)


@cute.jit
def _add_steps(progress: cute.Tensor, steps: Int32):
    """Add steps of this cluster to `progress`, once a warp."""
    with cute.arch.elect_one():
        cute.arch.red(progress.iterator, steps, op="add", dtype="s32", sem="relaxed", scope="gpu")


@cute.jit
def _look(progress: cute.Tensor) -> Int32:
    """The steps counted so far. The load is started here, and the warp waits for it where it is used."""
    return cute.arch.load(progress.iterator, Int32, sem="relaxed", scope="gpu")


@cute.jit
def _keep_pace(progress: cute.Tensor, enough: Int32, seen: Int32, patience: Int32) -> Int32:
    """Wait until `progress` is at least `enough`. seen: what an earlier look found.

    It is polled up to `patience` times. Returns `patience`, or 0 if all polls failed, for instance because
    another kernel holds SMs and not all clusters are resident: this cluster then stops waiting.
    """
    looks = Int32(0)
    while seen < enough and looks < patience:
        seen = _look(progress)
        looks += 1
    return Int32(cutlass.select_(looks < patience, patience, Int32(0)))
