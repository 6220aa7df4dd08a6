"""wgmma: asynchronous matrix multiply of a warpgroup (PTX ISA 9.7.15), kinds f16 and bf16 with f32
accumulators.

A wgmma claims its operands when it is issued: granules of shared memory as being read, accumulators (and
A's registers) as owned. It is executed by the wgmma.wait_group that retires its group, the latest moment
there is. All four warps of the warpgroup must have issued it by then.
"""

from __future__ import annotations

import re

import numpy as np

from .. import ptx
from ..descriptors import decode_matrix_descriptor, read_tile, tile_granules, to_float32
from ..faults import Fault, UnsupportedInstruction
from ..program import COLLECTIVE, instruction
from ..warp import FULL, Blocked
from . import exit_checks


class WarpState:
    """One warp's wgmma instructions: those not yet committed, and the committed groups."""

    def __init__(self, warp):
        self.agent = warp.cta.cluster.ordering.warp_agent(warp.id, "wgmma")
        self.open: list[Issued] = []
        self.groups: list[tuple[int, list[Issued]]] = []  # (epoch, instructions)
        self.issued = 0
        self.fenced = False

    def in_flight(self):
        for _, group in self.groups:
            yield from group
        yield from self.open


class Issued:
    """One warp's share of one wgmma in flight: rows 16 q .. 16 q + 15 of D, q being the warp's place in
    its warpgroup."""

    __slots__ = ("a", "b", "d", "form", "negate_a", "negate_b", "number", "scale_d")

    def __init__(self, number, form, d, a, b, scale_d, negate_a, negate_b):
        self.number, self.form, self.d, self.a, self.b, self.scale_d = number, form, d, a, b, scale_d
        self.negate_a, self.negate_b = negate_a, negate_b


class Form:
    """What the opcode and immediates fix."""

    def __init__(self, n, k, element, a_k_major, b_k_major):
        self.n, self.k, self.element, self.a_k_major, self.b_k_major = n, k, element, a_k_major, b_k_major


def state_of(warp) -> WarpState:
    if "wgmma" not in warp.state:
        warp.state["wgmma"] = WarpState(warp)
    return warp.state["wgmma"]


@instruction("wgmma")
def _wgmma(d):
    form = d.mods.need("fence", "mma_async", "commit_group", "wait_group")
    d.mods.need("sync")
    d.mods.need("aligned")
    return {
        "fence": _fence,
        "mma_async": _mma_async,
        "commit_group": _commit_group,
        "wait_group": _wait_group,
    }[form](d)


def _fence(d):
    """wgmma.fence orders earlier register accesses before later wgmma (9.7.15)."""

    def run(warp, lanes):
        state_of(warp).fenced = True
        warp.state.pop("accumulators read", None)

    return d.done(run, COLLECTIVE)


def _mma_async(d):
    if d.mods.take("sp"):
        raise UnsupportedInstruction("sparse wgmma")
    shape = re.fullmatch(r"m64n(\d+)k16", d.mods.left[0])
    if not shape:
        raise UnsupportedInstruction(f"wgmma shape {d.mods.left[0]}")
    d.mods.left.pop(0)
    n = int(shape[1])
    if n % 8 or not 8 <= n <= 256:
        raise UnsupportedInstruction(f"wgmma with N {n}: multiples of 8 up to 256 exist")
    if d.mods.left[:1] != ["f32"] or d.mods.left[1:] not in (["f16", "f16"], ["bf16", "bf16"]):
        raise UnsupportedInstruction(f"wgmma types {d.mods.left}")
    element = d.mods.left[1]
    d.mods.left.clear()
    from_registers = isinstance(d.operands[1], ptx.Vector)
    d.count(7 if from_registers else 8)
    accumulators = d.dests(d.operands[0], "f32", checked=False)
    if len(accumulators) != n // 2:
        raise UnsupportedInstruction(f"{len(accumulators)} accumulators for n{n}")
    if from_registers:
        a_rows = d.sources(d.operands[1], "b32", checked=False)
        a_desc = -1
    else:
        a_rows, a_desc = [], d.source(d.operands[1], "u64")
    b_desc = d.source(d.operands[2], "u64")
    scale = d.source(d.operands[3], "pred")
    immediates = [x.value for x in d.operands[4:]]
    if any(v not in (-1, 1) for v in immediates[:2]) or any(v not in (0, 1) for v in immediates[2:]):
        raise UnsupportedInstruction(f"wgmma immediates {immediates}")
    transposed = immediates[2:]
    form = Form(n, 16, element, from_registers or not transposed[0], not transposed[-1])
    d.program.wgmma_registers.update(accumulators)
    negate_a, negate_b = immediates[0] < 0, immediates[1] < 0

    def run(warp, lanes):
        if not warp.full_warp:
            raise Fault("divergence", "wgmma needs all 32 lanes")
        state = state_of(warp)
        if not state.fenced:
            raise Fault("wgmma-fence", "the warp's first wgmma comes without wgmma.fence")
        read = warp.state.get("accumulators read")
        if read and not read.isdisjoint(accumulators):
            name = warp.register_name(next(iter(read.intersection(accumulators))))
            raise Fault("wgmma-fence", f"accumulator {name} was read after the last wgmma.fence")
        scale_d = bool(warp.uniform("pred", scale, FULL, "scale-d"))
        what = f"wgmma.m64n{n}k16"
        code = "register-in-flight"
        _check_registers(warp, state, accumulators, a_rows, scale_d)
        shared, epoch = warp.cta.shared, int(warp.cta.cluster.ordering.epochs[state.agent]) + 1
        if a_desc >= 0:
            desc = decode_matrix_descriptor(warp.uniform("u64", a_desc, FULL, "the descriptor of A"), False)
            a = tile_granules(desc, 16, 16, form.a_k_major, 16 * (warp.index % 4))
            _check_granules(shared, a)
            shared.async_read(warp.clock, state.agent, epoch, a, f"{what}, operand A,")
        else:
            a = a_rows
        desc = decode_matrix_descriptor(warp.uniform("u64", b_desc, FULL, "the descriptor of B"), False)
        b = tile_granules(desc, n, 16, form.b_k_major)
        _check_granules(shared, b)
        shared.async_read(warp.clock, state.agent, epoch, b, f"{what}, operand B,")
        state.open.append(Issued(state.issued, form, accumulators, a, b, scale_d, negate_a, negate_b))
        state.issued += 1
        warp.own(
            accumulators, code, "it is an accumulator of a wgmma that wgmma.wait_group has not waited for"
        )
        warp.own(a_rows, code, "it is operand A of a wgmma that wgmma.wait_group has not waited for")
        warp.cta.cluster.device.counters["wgmma"] += 1

    op = d.done(run, COLLECTIVE)
    own = set(accumulators) | set(a_rows)
    op.touches = tuple(r for r in op.touches if r not in own)
    return op


def _check_granules(shared, granules: np.ndarray) -> None:
    low, high = int(granules.min()), int(granules.max())
    if low < 0 or high * 16 + 16 > shared.size:
        shared.check(low * 16, (high - low + 1) * 16)


def _check_registers(warp, state, accumulators, a_rows, scale_d) -> None:
    """Accumulators must hold values if they are added to, or belong to an earlier wgmma; A's registers
    must hold values."""
    owned = warp.owned
    for r in a_rows:
        if warp.valid[r] != FULL:
            warp.undefined(r, FULL)
        if r in owned and "accumulator" in owned[r][1]:
            raise Fault(
                owned[r][0], f"register {warp.register_name(r)} is used as operand A while {owned[r][1]}"
            )
    if scale_d:
        for r in accumulators:
            if r in owned:
                if "operand A" in owned[r][1]:
                    raise Fault(
                        owned[r][0], f"register {warp.register_name(r)} is an accumulator while {owned[r][1]}"
                    )
            elif warp.valid[r] != FULL:
                warp.undefined(r, FULL)


def _commit_group(d):
    def run(warp, lanes):
        state = state_of(warp)
        epoch = warp.cta.cluster.ordering.advance(state.agent)
        state.groups.append((epoch, state.open))
        state.open = []

    return d.done(run, COLLECTIVE)


def _wait_group(d):
    d.count(1)
    n = d.operands[0].value

    def run(warp, lanes):
        state = state_of(warp)
        retiring = state.groups[: len(state.groups) - n] if n else state.groups
        last = max((i.number for _, group in retiring for i in group), default=-1)
        others = warp.cta.warps[warp.index // 4 * 4 : warp.index // 4 * 4 + 4]

        def all_issued():
            return all(state_of(w).issued > last for w in others)

        if not all_issued():
            late = [w.index for w in others if state_of(w).issued <= last]
            return Blocked(
                lambda: f"waits for wgmma that warps {late} of its warpgroup have not issued", all_issued
            )
        for epoch, group in retiring:
            _execute(warp, group)
            warp.clock[0, state.agent] = epoch
        state.groups = state.groups[len(retiring) :]
        done = {
            r for _, group in retiring for i in group for r in (*i.d, *(i.a if isinstance(i.a, list) else ()))
        }
        for i in state.in_flight():
            done.difference_update(i.d)
            if isinstance(i.a, list):
                done.difference_update(i.a)
        warp.disown(done)
        return None

    return d.done(run, COLLECTIVE)


def _execute(warp, group: list[Issued]) -> None:
    """D = A B (+ D), in float32. Consecutive instructions on the same accumulators are one product over a
    longer k."""
    i = 0
    while i < len(group):
        j = i + 1
        while j < len(group) and group[j].d is group[i].d and group[j].scale_d:
            j += 1
        a = np.concatenate([_operand_a(warp, x) for x in group[i:j]], axis=1)
        b = np.concatenate([_operand_b(warp, x) for x in group[i:j]], axis=1)
        product = multiplied(a, b)  # (16, n)
        values = fragment(product)
        rows = [warp.program.row_in_file[r] for r in group[i].d]
        registers = warp.files[4].view(np.float32)
        registers[rows] = registers[rows] + values if group[i].scale_d else values
        for r in group[i].d:
            warp.valid[r] = FULL
        i = j


def multiplied(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a b^T of float32 numbers, rounded once: equal rows have equal results, as on a GPU. BLAS adds float32
    numbers in an order that depends on a row's place."""
    return (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.float32)


def fragment(tile: np.ndarray) -> np.ndarray:
    """A (16, n) tile of 32-bit elements as a warp's registers hold it, (n / 2, 32): register 4 j + 2 h + e of
    lane l is row l / 4 + 8 h, column 8 j + 2 (l % 4) + e (9.7.15, fragments of D)."""
    n = tile.shape[1]
    return tile.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(n // 2, 32)


def _operand_a(warp, x: Issued) -> np.ndarray:
    """This warp's 16 rows of A, (16, 16)."""
    if not isinstance(x.a, list):
        a = to_float32(read_tile(warp.cta.shared, x.a, x.form.a_k_major), x.form.element)
    else:
        # Register 2 c + h of lane l holds row l / 4 + 8 h, columns 8 c + 2 (l % 4) + {0, 1} (9.7.15).
        raw = np.stack([warp.views["u32"][r] for r in x.a]).view(np.uint16).reshape(2, 2, 8, 4, 2)
        a = to_float32(raw.transpose(1, 2, 0, 3, 4).reshape(16, 16), x.form.element)
    return -a if x.negate_a else a


def _operand_b(warp, x: Issued) -> np.ndarray:
    """B as (n, 16), read once for the four warps of a warpgroup."""
    cache = warp.cta.warpgroups.setdefault(warp.index // 4, {})
    entry = cache.get(x.number)
    if entry is None:
        b = to_float32(read_tile(warp.cta.shared, x.b, x.form.b_k_major), x.form.element)
        entry = cache[x.number] = [-b if x.negate_b else b, x.b, 0]
    if entry[1] is not x.b and not np.array_equal(entry[1], x.b):
        raise Fault("mismatch", "the warps of a warpgroup gave different descriptors of B")
    entry[2] += 1
    if entry[2] == 4:
        del cache[x.number]
    return entry[0]


def _check_exit(warp) -> None:
    if "wgmma" in warp.state and any(True for _ in warp.state["wgmma"].in_flight()):
        raise Fault("pending-at-exit", f"warp {warp.index} exits with wgmma that it has not waited for")


exit_checks.append(_check_exit)
