"""What a launch by programmatic dependent launch may do before its griddepcontrol.wait, while the launch
before may still run."""

from __future__ import annotations

import re

import pytest
import torch

from tests import emulator
from tests.emulator.host import bytes_of
from tests.emulator.launches import Words
from tests.emulator.memory import Region
from tests.emulator.test_faults import BULK_LOAD, BULK_STORE, HEADER, INIT, OUT, REGISTERS, SMEM, WAIT

READY = "griddepcontrol.wait; griddepcontrol.launch_dependents;"


def run(*bodies: str, out: torch.Tensor | None = None, pdl=True, threads=64, seed=0) -> torch.Tensor:
    """Launch kernels; thread t has the address of word t of `out` in d0, of word 0 in d1."""
    out = torch.zeros(256, dtype=torch.int32) if out is None else out
    entries = "".join(
        f".visible .entry k{i}(.param .u64 out)\n{{\n{REGISTERS}{OUT}{body}\nret;\n}}\n"
        for i, body in enumerate(bodies)
    )
    emulator.run_ptx(f"{HEADER}{SMEM}\n{entries}", out, block=(threads, 1, 1), pdl=pdl, seed=seed)
    return out


def fault(*bodies: str, kernel: int, why: str, **options) -> None:
    with pytest.raises(emulator.Fault, match=re.escape(why)) as error:
        run(*bodies, **options)
    assert error.value.code == "launch-order"
    assert f"kernel k{kernel}," in error.value.where


LOAD = "ld.global.u32 %r1, [%d0{}];"
STORE = "st.global.u32 [%d0{}], %r0;"
ADD = "red.global.add.u32 [%d0{}], %r0;"
HALF = "cvt.u16.u32 %h1, %r0; st.global.u16 [%d0{}], %h1;"
WIDE = "setp.eq.u32 %p2, %r0, 0; @%p2 st.global.v4.b32 [%d1{}], {{%r0, %r0, %r0, %r0}};"
BULK_IN = INIT.format(count=1) + BULK_LOAD + WAIT
BULK_OUT = INIT.format(count=1) + BULK_STORE


@pytest.mark.parametrize(
    "first",
    [STORE.format(""), ADD.format(""), HALF.format(""), BULK_OUT],
    ids=["store", "add", "half", "bulk"],
)
@pytest.mark.parametrize(
    "early", [LOAD, STORE, ADD, HALF, WIDE], ids=["load", "store", "add", "half", "wide"]
)
def test_nothing_touches_what_the_launch_before_writes(first, early):
    # Each of them writes word 0.
    wait = "griddepcontrol.wait;"
    fault(READY + first, early.format("") + wait, kernel=1, why="writes it")
    run(READY + first, early.format("+256") + wait)
    run(READY + first, wait + early.format(""))
    run(READY + first, early.format("") + wait, pdl=False)


@pytest.mark.parametrize("first", [LOAD.format(""), BULK_IN], ids=["load", "bulk"])
def test_what_the_launch_before_reads_is_read_and_not_written(first):
    wait = "griddepcontrol.wait;"
    run(READY + first, LOAD.format("") + wait)
    for early in (STORE, ADD, HALF, WIDE):
        fault(READY + first, early.format("") + wait, kernel=1, why="reads it")
        run(READY + first, early.format("+256") + wait)


def test_a_bulk_copy_covers_its_own_bytes_only():
    four = "setp.ge.u32 %p2, %r0, 4; @%p2 "
    run(READY + BULK_OUT, four + LOAD.format("") + "griddepcontrol.wait;")
    run(READY + BULK_IN, four + STORE.format("") + "griddepcontrol.wait;")


def test_cp_async_reads():
    copy = """mov.b32 %r1, buffer; mad.lo.u32 %r2, %r0, 4, %r1; cp.async.ca.shared.global [%r2+64], [%d0], 4;
    setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r1], 64; bar.sync 0;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];"""
    fault(READY + copy + WAIT, STORE.format("") + "griddepcontrol.wait;", kernel=1, why="reads it")
    run(READY + copy + WAIT, LOAD.format("") + "griddepcontrol.wait;")
    fault(READY, copy + WAIT + READY, kernel=1, why="cp.async before griddepcontrol.wait")


@pytest.mark.parametrize("early", [BULK_IN, BULK_OUT], ids=["load", "store"])
def test_bulk_copies_wait_even_for_a_launch_that_touches_nothing(early):
    fault(READY, early + READY, kernel=1, why="a bulk copy before griddepcontrol.wait")
    run(READY, READY + early)


def test_launches_before_the_one_before_have_ended():
    first, wait = READY + STORE.format(""), "griddepcontrol.wait;"
    run(first, READY, LOAD.format("") + wait)
    # What the one before did before its own wait counts, too.
    second = STORE.format("+256") + wait
    fault(first, second, LOAD.format("+256") + wait, kernel=2, why="writes it")


@pytest.mark.parametrize("access", [LOAD, STORE, ADD], ids=["load", "store", "add"])
def test_what_ran_before_a_first_launch_is_unknown(access):
    fault(access.format("") + READY, READY, kernel=0, why="in the first launch")


def test_the_next_launch_must_not_begin_beside_the_one_before():
    fault(READY, "griddepcontrol.launch_dependents; griddepcontrol.wait;", kernel=1, why="the next launch")
    # Another warp's wait is not this one's.
    one = "setp.lt.u32 %p1, %r0, 32; @%p1 griddepcontrol.wait; bar.sync 0; griddepcontrol.launch_dependents;"
    fault(READY, one, kernel=1, why="the next launch")
    run(READY, READY)
    run("griddepcontrol.launch_dependents; griddepcontrol.wait;", pdl=False)


@pytest.mark.parametrize("seed", range(6, 12))
@pytest.mark.parametrize("threads", [64, 40])
def test_a_warp_whose_lanes_have_met_again_waits(seed, threads):
    """A warp whose lanes diverged and met again waits as a whole, also with fewer than 32 lanes."""
    alone = "add.u32 %r2, %r0, 1;" * 30
    apart = f"and.b32 %r3, %r0, 8; setp.eq.u32 %p2, %r3, 0; @%p2 bra some; {alone} some: add.u32 %r3, %r0, 2;"
    run(READY, "ld.global.u32 %r1, [%d0];" + apart + READY, seed=seed, threads=threads)


def test_every_launch_waits():
    fault(READY + STORE.format(""), LOAD.format("+256"), kernel=1, why="has no griddepcontrol.wait")


def test_the_word_and_its_tensor_are_named():
    out = torch.zeros(256, dtype=torch.int32)
    one = "setp.eq.u32 %p2, %r0, 5; @%p2 " + STORE.format("")
    where = f"the word at {out.data_ptr() + 20:#x} (argument 0 at {out.data_ptr():#x})"
    fault(READY + one, LOAD.format("") + "griddepcontrol.wait;", kernel=1, why=where, out=out)


@pytest.mark.parametrize("skip", [0, 1, 2, 6, 16, 18])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32])
def test_tensors_that_share_memory(skip, size):
    """An access through one is found through the other, wherever they begin."""
    data = bytes_of(torch.zeros(512, dtype=torch.int32))
    region, base = Region("view", data[skip : -skip or None]), data.ctypes.data
    words = Words()
    address = base + 64 - base % 32 + size
    words.add(region, torch.tensor([address - region.start]).numpy(), size)

    def touched(words: Words) -> list[int]:
        addresses = torch.arange(base - base % 4, base + 2048, 4).numpy()
        return [a for a in addresses.tolist() if words.among(addresses[addresses == a], 4)]

    wanted = list(range(address - address % 4, address + size, 4))
    assert touched(words) == wanted
    by_range, by_box = Words(), Words()
    by_range.add_range(region, address, size)
    assert touched(by_range) == wanted
    by_box.add_box(region, address, [3, size], [128, 1])
    assert touched(by_box) == [a + row for row in (0, 128, 256) for a in wanted]
