"""Processes of a group: one spawn runs all cases of a number of ranks, and a test reads its case's outcome.

A case is a function of a Rank that every rank calls. After one that failed the group is in no known state,
and the others are not run.
"""

from __future__ import annotations

import datetime
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import ProcessGroup

TIMEOUT_S = 60
QUIET = {
    # No multicast over NVLink: what is switched off on the machines that test stays off.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}


@dataclass(frozen=True)
class Rank:
    """A process of a group of all processes. device: "cpu", or its GPU."""

    group: ProcessGroup
    device: str
    dtypes: tuple[torch.dtype, ...]

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def ranks(self) -> int:
        return self.group.size()

    def is_same(self, tensor: Tensor) -> bool:
        """Whether every rank has the same bits."""
        every = [torch.empty_like(tensor) for _ in range(self.ranks)]
        dist.all_gather(every, tensor.contiguous(), group=self.group)
        return all(torch.equal(_bits(each), _bits(tensor)) for each in every)

    def join(self, shard: Tensor) -> Tensor:
        """Every rank's rows, of any number."""
        every: list[Any] = [None] * self.ranks
        dist.all_gather_object(every, shard.detach().cpu(), group=self.group)
        return torch.cat(every).to(shard.device)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


Case = Callable[[Rank], None]


def begin(rank: int, ranks: int, meeting: str, backend: str, timeout_s: float = TIMEOUT_S) -> Rank:
    """Make this process a rank of the default group. meeting: the file by which its processes meet."""
    torch.set_num_threads(1)
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=torch.device(device) if backend == "nccl" else None,
    )
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    group = dist.group.WORLD
    assert group is not None
    return Rank(group, device, dtypes)


def _run(rank: int, ranks: int, backend: str, cases: Sequence[Case], folder: str) -> None:
    warnings.simplefilter("error")
    for package in ("torch", "cuda", "cutlass"):
        warnings.filterwarnings("default", module=package)
    here = begin(rank, ranks, str(Path(folder, "meeting")), backend)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for case in cases:
        begun = time.monotonic()
        try:
            case(here)
        except BaseException:
            Path(folder, f"{case.__name__}.{rank}").write_text(traceback.format_exc())
            os._exit(1)
        Path(folder, f"{case.__name__}.{rank}").write_text("")
        if rank == 0:
            print(f"{case.__name__}: {time.monotonic() - begun:.1f} s", flush=True)
    dist.destroy_process_group()


def run(ranks: int, backend: str, cases: Sequence[Case]) -> dict[str, str]:
    """Case -> "", or what the ranks have raised in it."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        before = {name: os.environ.get(name) for name in QUIET}
        os.environ.update(QUIET)
        arguments = ranks, backend, cases, folder
        processes = [context.Process(target=_run, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        return {case.__name__: _outcome(Path(folder), case.__name__, ranks) for case in cases}


def _outcome(folder: Path, case: str, ranks: int) -> str:
    found = [folder / f"{case}.{rank}" for rank in range(ranks)]
    unfinished = "did not finish: an earlier case failed"
    texts = [path.read_text() if path.exists() else unfinished for path in found]
    return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
