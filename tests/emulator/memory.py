"""Global and shared memory: bounds, alignment, validity of each byte, and the ordering of accesses
(ordering.py)."""

from __future__ import annotations

import numpy as np

from .faults import Fault
from .launches import Touched
from .ordering import NEVER, Ordering, async_view

SHARED_LIMIT = (
    227 * 1024 + 1024
)  # most dynamic shared memory of a CTA on sm_90 and sm_100, and the driver's 1 KiB


def elements(data: np.ndarray, size: int) -> np.ndarray:
    """Bytes as (count, size), without those after the last whole element."""
    return data[: data.size // size * size].reshape(-1, size)


class Region:
    """A registered tensor: its bytes and where they lie."""

    def __init__(self, name: str, data: np.ndarray):
        self.name, self.data = name, data
        self.start = data.ctypes.data
        self.end = self.start + data.size

    def at(self, offsets: np.ndarray, size: int) -> tuple[np.ndarray, object]:
        """What to index, and by what, for the bytes (lanes, size) at aligned addresses."""
        if self.start % size:
            return self.data, offsets[:, None] + np.arange(size)
        return elements(self.data, size), offsets // size


class GlobalMemory:
    """The registered tensors' own bytes, at their own addresses. Everything else is out of bounds."""

    def __init__(self):
        self.regions: list[Region] = []
        self.touched = Touched()  # by this launch
        self.touched_before: Touched | None = None  # by the launch before, if one is known
        self.launches = 0

    def begin_launch(self) -> None:
        """Only the launch before may still run, so older ones are forgotten."""
        self.touched_before = self.touched if self.launches else None
        self.touched = Touched()
        self.launches += 1

    def add(self, name: str, data: np.ndarray) -> Region:
        """Register bytes. `data` is a C-contiguous uint8 view of the tensor's whole storage."""
        for r in self.regions:
            if r.start == data.ctypes.data and r.end == data.ctypes.data + data.size:
                return r
        region = Region(name, data)
        self.regions.append(region)
        return region

    def find(self, first: int, last: int) -> Region:
        """The region that holds bytes first..last-1."""
        for r in self.regions:
            if r.start <= first and last <= r.end:
                self._make_first(r)
                return r
        near = min(self.regions, key=lambda r: min(abs(first - r.start), abs(first - r.end)), default=None)
        hint = (
            f"; nearest is {near.name} at {near.start:#x}..{near.end:#x}"
            if near
            else "; no tensor is registered"
        )
        raise Fault("global-bounds", f"bytes {first:#x}..{last:#x} lie outside every tensor{hint}")

    def _make_first(self, region: Region) -> None:
        """The regions used last are looked at first."""
        if self.regions[0] is not region:
            self.regions.remove(region)
            self.regions.insert(0, region)

    def locate(self, addresses: np.ndarray, size: int) -> list[tuple]:
        """Active lanes' addresses -> [(region, lane indices, offsets)]."""
        if int(np.bitwise_or.reduce(addresses)) & (size - 1):
            bad = int(addresses[(addresses % size).nonzero()[0][0]])
            raise Fault("misaligned", f"global address {bad:#x} is not aligned to {size} bytes")
        low, high = int(addresses.min()), int(addresses.max()) + size
        for r in self.regions:
            if r.start <= low and high <= r.end:
                self._make_first(r)
                return [(r, slice(None), addresses - r.start)]
        found: dict[int, list[int]] = {}
        for i, a in enumerate(addresses.tolist()):
            found.setdefault(id(self.find(a, a + size)), []).append(i)
        by_id = {id(r): r for r in self.regions}
        return [(by_id[k], np.array(v), addresses[v] - by_id[k].start) for k, v in found.items()]


class SharedMemory:
    """One CTA's shared memory.

    Bookkeeping: a validity bit per byte; per 4-byte word, and per 16-byte granule for the asynchronous
      engines, the agent and epoch of the last write; per granule and reading agent the epoch of its last
      read.
    """

    def __init__(self, size: int, ordering: Ordering, rank: int, device):
        self.size = -(-size // 16) * 16
        self.rank, self.ordering, self.device = rank, ordering, device
        self.data = np.full(self.size, 0xCD, np.uint8)
        self.granules = self.data.reshape(-1, 16)
        self.valid = np.zeros(self.size, bool)
        self.word_writer = np.zeros(self.size // 4, np.int16)
        self.word_epoch = np.zeros(self.size // 4, np.int32)
        self.writer = np.zeros(self.size // 16, np.int16)
        self.epoch = np.full(self.size // 16, NEVER, np.int32)
        self.readers: list[int] = []
        self._reader_row: dict[int, int] = {}
        self.read_epoch = np.zeros((0, self.size // 16), np.int32)
        self.word_reads: dict[int, np.ndarray] = {}  # warp id -> epochs of its generic reads, per word
        self.mbarrier_words = np.zeros(self.size // 4, bool)

    # ---- addresses

    def check(self, offset: int, size: int) -> None:
        if offset < 0 or offset + size > self.size:
            raise Fault(
                "shared-bounds",
                f"shared bytes {offset:#x}..{offset + size:#x}, the CTA (rank {self.rank}) has"
                f" {self.size:#x}",
            )

    def check_all(self, offsets: np.ndarray, size: int, align: int) -> None:
        low, high = int(offsets.min()), int(offsets.max())
        if low < 0 or high + size > self.size:
            self.check(low if low < 0 else high, size)
        if int(np.bitwise_or.reduce(offsets)) & (align - 1):
            raise Fault(
                "misaligned",
                f"shared address {int(offsets[(offsets & (align - 1)).nonzero()[0][0]]):#x} is not aligned to"
                f" {align}",
            )

    # ---- generic proxy: warps' own loads and stores

    def load(self, warp, offsets: np.ndarray, size: int) -> np.ndarray:
        """Bytes (lanes, size) at `offsets` of the active lanes."""
        self.check_all(offsets, size, size)
        index = offsets // size
        if not elements(self.valid, size)[index].all():
            wanted = offsets[:, None] + np.arange(size)
            bad = wanted[~self.valid[wanted]]
            raise Fault(
                "uninit-shared", f"shared byte {int(bad[0]):#x} of CTA rank {self.rank} was never written"
            )
        words = offsets >> 2 if size <= 4 else (offsets[:, None] + np.arange(0, size, 4)).reshape(-1) >> 2
        writer, epoch = self.word_writer[words], self.word_epoch[words]
        late = epoch > warp.clock[0][writer]
        if late.any():
            k = int(late.nonzero()[0][0])
            raise Fault(
                "stale-read",
                f"shared word {int(words[k]) * 4:#x} of CTA rank {self.rank} is read, and nothing orders the"
                f" read after its write"
                f" by {self.ordering.name(int(writer[k]))}",
            )
        epoch = int(warp.clock[0, warp.id])
        self._note_read(warp.id, epoch, offsets >> 4)
        if warp.id not in self.word_reads:
            self.word_reads[warp.id] = np.zeros(self.size // 4, np.int32)
        self.word_reads[warp.id][words] = epoch
        return elements(self.data, size)[index]

    def store(
        self, warp, offsets: np.ndarray, values: np.ndarray, writer: tuple[int, int] | None = None
    ) -> None:
        """Write bytes `values` (lanes, size) at `offsets`. writer: (agent, epoch) other than the warp's."""
        size = values.shape[1]
        self.check_all(offsets, size, size)
        granules = offsets >> 4
        epoch = int(warp.clock[0, warp.id])
        # A store narrower than a granule may share it with words that other warps read, so warps' reads are
        # looked up by word; asynchronous engines read whole granules.
        self._check_not_read(warp.clock[0], granules, "a generic store", every_agent=False)
        if size >= 4:
            words = (offsets[:, None] + np.arange(0, size, 4)).reshape(-1) >> 2
            before = self.word_writer[words]
            late = self.word_epoch[words] > warp.clock[0][before]
            if late.any():
                k = int(late.nonzero()[0][0])
                raise Fault(
                    "stale-read",
                    f"shared word {int(words[k]) * 4:#x} of CTA rank {self.rank} is overwritten, and nothing"
                    f" orders the store after"
                    f" the write by {self.ordering.name(int(before[k]))}",
                )
            for reader, epochs in self.word_reads.items():
                if (epochs[words] > warp.clock[0, reader]).any():
                    word = int(words[(epochs[words] > warp.clock[0, reader]).nonzero()[0][0]])
                    raise Fault(
                        "stale-read",
                        f"shared word {word * 4:#x} of CTA rank {self.rank} is overwritten, and nothing"
                        f" orders the store after the read by {self.ordering.name(reader)}",
                    )
        else:
            words = offsets >> 2
        if self.mbarrier_words[words].any():
            raise Fault("mbarrier-overwritten", f"a generic store to an mbarrier of CTA rank {self.rank}")
        index = offsets // size
        elements(self.data, size)[index] = values
        elements(self.valid, size)[index] = True
        agent, epoch = writer or (warp.id, epoch)
        self.word_writer[words] = agent
        self.word_epoch[words] = epoch
        self.writer[granules] = agent
        self.epoch[granules] = epoch

    # ---- async proxy: TMA, wgmma, tcgen05

    def async_read(self, clock: np.ndarray, agent: int, epoch: int, granules: np.ndarray, what: str) -> None:
        """An asynchronous engine, started by the owner of `clock`, will read these granules until `epoch`
        of `agent`."""
        view = async_view(clock, self.ordering.warps)
        writer = self.writer[granules]
        late = self.epoch[granules] > view[writer]
        if late.any():
            k = int(np.atleast_1d(late).reshape(-1).nonzero()[0][0])
            granule = int(np.asarray(granules).reshape(-1)[k])
            self._refuse_async_read(clock, granule, what)
        generic = writer < self.ordering.warps
        if generic.any():
            check = np.asarray(granules)[generic]
            valid = self.valid.reshape(-1, 16)[check]
            if not valid.all():
                bad = int(check.reshape(-1)[(~valid.all(axis=-1)).nonzero()[0][0]])
                raise Fault(
                    "uninit-shared",
                    f"{what} reads shared granule {bad * 16:#x} of CTA rank {self.rank}, not all of it"
                    f" written",
                )
        self._note_read(agent, epoch, granules)

    def _refuse_async_read(self, clock: np.ndarray, granule: int, what: str):
        where = f"shared bytes {granule * 16:#x}..{granule * 16 + 16:#x} of CTA rank {self.rank}"
        writer, epoch = int(self.writer[granule]), int(self.epoch[granule])
        if epoch == NEVER:
            raise Fault("uninit-shared", f"{what} reads {where}, which nobody wrote")
        name = self.ordering.name(writer)
        if writer < self.ordering.warps and epoch <= clock[0, writer]:
            raise Fault(
                "missing-proxy-fence",
                f"{what} reads {where}, written by {name} with no fence.proxy.async in between",
            )
        if writer >= self.ordering.warps:
            raise Fault(
                "async-overlap", f"{what} reads {where} before waiting for the copy of {name} that writes it"
            )
        raise Fault("stale-read", f"{what} reads {where}, and nothing orders it after the write by {name}")

    def async_write(
        self, clock: np.ndarray, agent: int, epoch: int, first: int, size: int, what: str
    ) -> None:
        """An asynchronous engine, started by the owner of `clock`, will write bytes first.. until `epoch`
        of `agent`."""
        g = slice(first >> 4, (first + size) >> 4)
        self._check_not_read(clock[0], g, what)
        writer = self.writer[g]
        late = (self.epoch[g] > clock[0][writer]) & (self.epoch[g] != NEVER) & (writer != agent)
        if late.any():
            k = int(late.nonzero()[0][0])
            raise Fault(
                "async-overlap",
                f"{what} overwrites shared bytes {(g.start + k) * 16:#x}.. of CTA rank {self.rank}, and"
                f" nothing orders it after the"
                f" write by {self.ordering.name(int(writer[k]))}",
            )
        self.writer[g] = agent
        self.epoch[g] = epoch
        words = slice(first >> 2, (first + size) >> 2)
        if self.mbarrier_words[words].any():
            raise Fault("mbarrier-overwritten", f"{what} covers an mbarrier of CTA rank {self.rank}")
        self.word_writer[words] = agent
        self.word_epoch[words] = epoch
        self.valid[first : first + size] = True

    # ---- reads that a later write must wait for

    def _note_read(self, agent: int, epoch: int, granules) -> None:
        row = self._reader_row.get(agent)
        if row is None:
            row = self._reader_row[agent] = len(self.readers)
            self.readers.append(agent)
            if row >= len(self.read_epoch):
                grown = np.zeros((max(8, 2 * row), self.read_epoch.shape[1]), np.int32)
                grown[:row] = self.read_epoch
                self.read_epoch = grown
        self.read_epoch[row][granules] = epoch

    def _check_not_read(self, clock: np.ndarray, granules, what: str, every_agent: bool = True) -> None:
        n = len(self.readers)
        if not n:
            return
        agents = np.array(self.readers)
        late = self.read_epoch[:n, granules].max(axis=1) > clock[agents]
        if not every_agent:
            late &= agents >= self.ordering.warps
        if late.any():
            agent = self.readers[int(late.nonzero()[0][0])]
            hit = int((self.read_epoch[self._reader_row[agent], granules] > clock[agent]).nonzero()[0][0])
            granule = granules.start + hit if isinstance(granules, slice) else int(granules[hit])
            raise Fault(
                "async-overlap",
                f"{what} writes shared bytes {granule * 16:#x}.. of CTA rank {self.rank}, and nothing orders"
                f" it after the"
                f" read by {self.ordering.name(agent)}",
            )
