"""Logits that a forward keeps, and dlogits of them: for gradients in which the share of a row's softmax is
not known before the backward, such as the entropy's (arguments.TERMS).

A unit (Fragment.unit), 32 classes of a token, has a note, its largest logit rounded to fp16, and of each of
its logits z what is kept is note - z, in fp16 too. So the error of z is at most 2^-11 of its distance from
the unit's largest, and that of its exponential, which falls faster than the distance rises, at most 2e-4 of
the unit's largest one; rounding to bf16 is an error of up to 2^-9 of a number itself. Where |z| is beyond
2^14 a note is off by up to 16, and so z by up to 2^-8. 2 bytes a logit, 2 a unit.

A row whose largest logit is beyond +-65504 nats becomes nan.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64

from cute_lce import maths
from cute_lce.arguments import TOPK_CLASSES, TOPK_TOKENS, LossArguments, units
from cute_lce.kernels import pdl
from cute_lce.kernels.adjacent import adjacent
from cute_lce.kernels.epilogues.ids import integers, starts_of
from cute_lce.kernels.epilogues.store import Output
from cute_lce.kernels.fragment import Fragment
from cute_lce.kernels.logits import has_slope, numbers, of_operands, slope_at
from cute_lce.kernels.row_stats import fma
from cute_lce.kernels.rows import Compacted, computed

WARPS = 4  # of a block
ELEMENTS = 8  # adjacent ones of a thread in a row, which one access moves
CHUNKS = 2  # of them, of one unit
CLASSES = 32 * CHUNKS * ELEMENTS  # of a patch
ROWS = TOPK_TOKENS  # of a patch: 16, whose notes of a unit are 32 consecutive bytes
AT_ONCE, SCARCE_AT_ONCE = 4, 2  # rows of a patch whose loads are in flight together, a round
IN_A_ROW = 4  # patches of a warp, unless there are few
FEW_BLOCKS = 512
LARGEST = 65504.0  # of fp16
NO_ENTRY = -1
NOWHERE, IGNORED = -(2**30), -(2**31)  # places of targets that are not in a stripe, and of ignored ones


class Notes(NamedTuple):
    """Where a forward stores what it keeps: the matrix, notes (units, n) fp16, and how many columns are kept:
    whole tiles, or all."""

    out: Output
    notes: cute.Tensor
    columns: Int32


def notes_of(address: Int64, columns: Int32, n: Int32) -> cute.Tensor:
    """The notes of so many columns."""
    pointer = cute.make_ptr(Float16, address, cute.AddressSpace.gmem, assumed_align=2)
    return cute.make_tensor(pointer, cute.make_layout((units(columns), n), stride=(Int64(n), 1)))


def note(highest: Float32) -> Float32:
    """Of a unit's largest logit, which may be -inf."""
    return cute.arch.fmax(highest, Float32(-LARGEST)).to(Float16).to(Float32)


class KeptTensors(NamedTuple):
    """Global memory of a launch of the backward, and its numbers.

    target (n,) int32 or int64. row_max, row_sum, dloss (n,) fp32: as DlogitsTensors', with the term
    "coefficients". kept (n, columns), notes (units, n) fp16: what the forward kept. dlogits (n, columns)
    16-bit: written. Rows of both matrices begin at multiples of 16 bytes. loss: its numbers. first: the
    stripe's first class. rows: which tokens these are.
    """

    target: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    dloss: cute.Tensor
    kept: cute.Tensor
    notes: cute.Tensor
    dlogits: cute.Tensor
    loss: LossArguments
    first: Int32
    rows: Compacted


class Token(NamedTuple):
    """The numbers of a token: at, its target's place in the stripe, NOWHERE or IGNORED; factor, of its
    softmax; gap and uniform, None where there is none."""

    at: Int32
    row_max: Float32
    factor: Float32
    gap: Any
    uniform: Any

    def of(self, lane: Int32) -> "Token":
        """That of another lane."""
        return Token(*(None if each is None else cute.arch.shuffle_sync(each, lane) for each in self))


class Place(NamedTuple):
    """Of a patch: a thread's first column, its first row, and where those that are computed end."""

    column: Int32
    begin: Int32
    end: Int32


class Loads(NamedTuple):
    """What a round reads: below (8, 2, rows) and notes (rows,) fp16, and the patch's Token, in registers."""

    below: cute.Tensor
    notes: cute.Tensor
    at: cute.Tensor
    numbers: cute.Tensor

    @classmethod
    def empty(cls, rows: int) -> "Loads":
        shapes = ((ELEMENTS, CHUNKS, rows), Float16), (rows, Float16), (1, Int32), (4, Float32)
        found = cls(*(cute.make_rmem_tensor(*each) for each in shapes))
        for each in found:
            each.fill(0)
        return found

    def take(self, other: "Loads"):
        """The elements and notes of another."""
        for own, others in ((self.below, other.below), (self.notes, other.notes)):
            own.store(others.load())

    def set_token(self, token: Token):
        self.at[0] = token.at
        for i, each in enumerate(token[1:]):
            if each is not None:
                self.numbers[i] = each

    def token(self) -> Token:
        return Token(self.at[0], *(self.numbers[i] for i in range(4)))


class Entries(NamedTuple):
    """Given ids that are left: the number of the first and behind the last, and the first (arguments.TERMS),
    NO_ENTRY if there is none, loaded ahead of the token that it is of."""

    first: Int32
    last: Int32
    entry: Int32


class DlogitsOfKept:
    """dlogits of a stripe that was kept, rounded once; 0 in ignored rows. Moves 4 bytes an element.

    A warp takes patches of 16 tokens and 512 classes, a lane two times 8 adjacent classes of a unit of each
    token, whose loads of 16 bytes are in flight for AT_ONCE tokens together. No shared memory. It is a kernel
    of blocks of WARPS, or what spare warps of a GEMM do beside it (gemm.Gemm).
    """

    def __init__(self, fragment: Fragment, terms: tuple[str, ...]):
        """fragment: of the logits' GEMM, whose units are the forward's, whatever the width of tiles.
        terms: of the loss; with ids and numbers of classes rounds are shorter, so that nothing spills."""
        self.fragment = fragment
        self.at_once = SCARCE_AT_ONCE if {"uniform", "topk"} <= {*terms} else AT_ONCE
        self.apart = fragment.rows[2]  # chunks of a unit

    @cute.jit
    def __call__(self, tensors: KeptTensors, stream: cuda.CUstream):
        _, patches = self._patches(tensors)
        few = cutlass.min(cute.ceil_div(patches, WARPS), FEW_BLOCKS)
        self.kernel(tensors).launch(
            grid=(cutlass.max(cute.ceil_div(patches, WARPS * IN_A_ROW), few), 1, 1),
            block=(32 * WARPS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, tensors: KeptTensors):
        pdl.begin()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        self.beside(tensors, block * WARPS + warp, blocks * WARPS)

    @cute.jit
    def beside(self, tensors: KeptTensors, first: Int32, step: Int32):
        """Of a warp, a GEMM's or the kernel's: the patches first, first + step, ..., in rounds of rows, whose
        loads are a round ahead."""
        wide, patches = self._patches(tensors)
        if first < patches:
            now, ahead = (Loads.empty(self.at_once) for _ in range(2))
            behind = self._place(tensors, first, wide)
            self._load(tensors, ahead, behind, behind.begin)
            self._load_token(tensors, ahead, behind)
            for patch in cutlass.range(first, patches, step, unroll=1):
                place = self._place(tensors, patch, wide)
                # Behind the last the last one again, which nobody reads: another warp may be writing there.
                behind = self._place(tensors, cutlass.min(patch + step, patches - 1), wide)
                own = ahead.token()
                left = self._entries(tensors, place.column, place.begin)
                for row in cutlass.range(place.begin, place.begin + ROWS, self.at_once, unroll=1):
                    now.take(ahead)
                    if row + self.at_once < place.begin + ROWS:
                        self._load(tensors, ahead, place, row + self.at_once)
                    else:
                        self._load(tensors, ahead, behind, behind.begin)
                        self._load_token(tensors, ahead, behind)
                    # Read again for every round: registers are scarcer than loads.
                    weight = self._class_weights(tensors, place.column)
                    for i in cutlass.range_constexpr(self.at_once):
                        if row + i < place.end:
                            token = own.of(row + i - place.begin)
                            found = self._gradients(
                                tensors,
                                now.below[None, None, i],
                                now.notes[i].to(Float32),
                                token,
                                row + i,
                                weight,
                            )
                            left = self._row(tensors, found, token, row + i, place.column, left)

    def _patches(self, tensors: KeptTensors):
        """(patches of the same tokens, which come one after another, all patches)."""
        n, columns = tensors.dlogits.shape
        wide = cute.ceil_div(columns, CLASSES)
        return wide, wide * cute.ceil_div(n, ROWS)

    def _place(self, tensors: KeptTensors, patch: Int32, wide: Int32) -> "Place":
        abreast = self.apart // ELEMENTS  # lanes of a unit's chunk
        pair = patch % wide * 32 + cute.arch.lane_idx()
        column = (pair // abreast * CHUNKS * abreast + pair % abreast) * ELEMENTS
        begin = patch // wide * ROWS
        end = cutlass.min(begin + ROWS, computed(tensors.rows))
        return Place(column, begin, end)

    @cute.jit
    def _load(self, tensors: KeptTensors, ahead: "Loads", place: "Place", row: Int32):
        """A thread's elements of the rows of a patch from `row` on, and its unit's notes. They come before
        the stores of the rows before: the compiler cannot know that these do not overlap."""
        columns, unit = cute.size(tensors.kept, mode=[1]), self.fragment.unit(place.column)
        for i in cutlass.range_constexpr(self.at_once):
            at = cutlass.max(cutlass.min(row + i, place.end - 1), 0)
            if place.column < columns:
                ahead.notes[i] = tensors.notes[unit, at]
            for chunk in cutlass.range_constexpr(CHUNKS):
                first = place.column + chunk * self.apart
                if first < columns:
                    source = adjacent(tensors.kept, at, first, ELEMENTS)
                    cute.autovec_copy(source, ahead.below[None, chunk, i])

    def _load_token(self, tensors: KeptTensors, ahead: "Loads", place: "Place"):
        """A patch's token that is the lane's."""
        last = cutlass.max(place.end - 1, 0)
        ahead.set_token(self._token(tensors, cutlass.min(place.begin + cute.arch.lane_idx() % ROWS, last)))

    def _token(self, tensors: KeptTensors, row: Int32) -> Token:
        """A token's numbers."""
        loss, n = tensors.loss, cute.size(tensors.target)
        token, index, row_max = (
            of_operands(tensors.rows, row),
            Int64(tensors.target[row]),
            tensors.row_max[row],
        )
        fits = cute.math.absf(row_max) <= Float32(LARGEST)
        at = index - tensors.first
        at = cutlass.select_((at >= 0) & (at < cute.size(tensors.kept, mode=[1])), at, Int64(NOWHERE))
        at = Int32(cutlass.select_(index != loss.ignore_index, at, Int64(IGNORED)))
        return Token(
            at=at,
            row_max=row_max,
            factor=Float32(cutlass.select_(fits, tensors.row_sum[row], Float32(float("nan")))),
            gap=numbers(loss.gap, n)[token] if "gap" in loss.terms else None,
            uniform=numbers(loss.uniform, n)[token] if "uniform" in loss.terms else None,
        )

    def _classes(self, column: Int32) -> list:
        """A thread's classes in a stripe, by its elements. column: of the first."""
        chunks = range(0, CHUNKS * self.apart, self.apart)
        return [column + chunk + i for chunk in chunks for i in range(ELEMENTS)]

    def _class_weights(self, tensors: KeptTensors, column: Int32) -> Any:
        """Of a thread's classes; None where there are none."""
        loss = tensors.loss
        if "uniform" not in loss.terms or "class_weight" not in loss.terms:
            return None
        last = tensors.first + cute.size(tensors.kept, mode=[1]) - 1
        given = numbers(loss.class_weight, last + 1)
        return [given[cutlass.min(tensors.first + each, last)] for each in self._classes(column)]

    @cute.jit
    def _entries(self, tensors: KeptTensors, column: Int32, begin: Int32) -> "Entries":
        """Of the given ids of a patch's tokens those in a thread's unit of TOPK_CLASSES, by rising tokens."""
        entry, last, next_one = Int32(0), Int32(0), Int32(NO_ENTRY)
        if cutlass.const_expr("topk" in tensors.loss.terms):
            block = (tensors.rows.first + begin) // TOPK_TOKENS
            at = (tensors.first + column) // TOPK_CLASSES * tensors.loss.topk_blocks + block
            if column < cute.size(tensors.kept, mode=[1]):
                starts = starts_of(tensors.loss)
                entry, last = starts[at], starts[at + 1]
                if entry < last:
                    next_one = integers(tensors.loss.topk_entries, last)[entry]
        return Entries(entry, last, next_one)

    @cute.jit
    def _row(
        self,
        tensors: KeptTensors,
        found: cute.Tensor,  # (8, 2) fp32
        token: Token,
        row: Int32,
        column: Int32,
        left: "Entries",
    ) -> "Entries":
        """Store a thread's elements of a row, of which `found` are all but the onehot and the given ids, the
        first of those that are left; returns the others."""
        kind, columns = tensors.dlogits.element_type, cute.size(tensors.kept, mode=[1])
        result = cute.make_rmem_tensor((ELEMENTS, CHUNKS), kind)
        result.fill(0.0)
        if token.at != IGNORED:
            at = token.at - column
            if at >= 0 and at < self.apart + ELEMENTS:
                onehot, classes = tensors.dloss[row], self._classes(Int32(0))
                for i in cutlass.range_constexpr(len(classes)):
                    if at == classes[i]:
                        found[i] = maths.dlogits(found[i], onehot)
            if cutlass.const_expr("topk" in tensors.loss.terms):
                left = self._add_ids(tensors, found, row, column, left)
            result.store(found.load().to(kind))
        for chunk in cutlass.range_constexpr(CHUNKS):
            first = column + chunk * self.apart
            if first < columns:
                cute.autovec_copy(result[None, chunk], adjacent(tensors.dlogits, row, first, ELEMENTS))
        return left

    @cute.jit
    def _add_ids(
        self, tensors: KeptTensors, found: cute.Tensor, row: Int32, column: Int32, left: "Entries"
    ) -> "Entries":
        """Add the gradients of a row's given ids, the first of those that are left."""
        loss, token = tensors.loss, tensors.rows.first + row
        entry, last, each = left
        entries, values = integers(loss.topk_entries, last), numbers(loss.topk_values, last)
        own = (tensors.first + column) % TOPK_CLASSES
        more = each // TOPK_CLASSES == token
        while more:
            at, classes = each % TOPK_CLASSES - own, self._classes(Int32(0))
            if at >= 0 and at < self.apart + ELEMENTS:
                value = values[entry]
                for i in cutlass.range_constexpr(len(classes)):
                    found[i] = found[i] + Float32(cutlass.select_(at == classes[i], value, Float32(0.0)))
            entry += 1
            each = Int32(NO_ENTRY)
            if entry < last:
                each = entries[entry]
            more = each // TOPK_CLASSES == token
        return Entries(entry, last, each)

    def _gradients(
        self,
        tensors: KeptTensors,
        below: cute.Tensor,  # (8, 2) fp16
        highest: Float32,
        token: Token,
        row: Int32,
        weight: Any,
    ) -> cute.Tensor:
        """By products, but for the onehot. highest: the unit's note."""
        terms, slope_of = tensors.loss.terms, None
        gap = token.gap if "gap" in terms else None
        if has_slope(tensors.loss):
            slope_of = slope_at(tensors.loss, of_operands(tensors.rows, row))
        found = cute.make_rmem_tensor((ELEMENTS, CHUNKS), Float32)
        shift = highest - token.row_max
        exponent = shift * Float32(maths.LOG2_E)
        share = token.factor if gap is None else fma(shift, gap, token.factor)
        for i in range(ELEMENTS * CHUNKS):
            distance = below[i].to(Float32)
            each = share
            if gap is not None:
                # 0 times -inf is 0 here.
                each = fma(cute.arch.fmin(distance, Float32(LARGEST)), -gap, share)
            one = each * cute.math.exp2(fma(distance, -maths.LOG2_E, exponent), fastmath=True)
            if "uniform" in terms:
                one = one + (token.uniform if weight is None else token.uniform * weight[i])
            found[i] = one if slope_of is None else one * slope_of(highest - distance)
        return found
