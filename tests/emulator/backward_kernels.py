"""The backward's GEMMs and the forward that keeps, on both architectures, as subjects of mutations.

Of synchronisation what is right is what the unchanged kernels give, which is compared with float64 first:
equal bits, since they promise the same bits in every schedule. Of arithmetic it is what the tests let pass.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from cute_lce.arch import ARCHITECTURES
from cute_lce.arguments import COMPUTED_ROWS
from cute_lce.implementation import Results
from cute_lce.launch import KERNELS, backward
from cute_lce.plan.kernels import Key, MultiplyKey
from tests import passes
from tests.numerics import Case, assert_close, jumping, random_case, with_bad_ignored_rows

from .host import Emulated
from .mutate import ARITHMETIC, COUNTING, Mutation, entry_of
from .mutation_kernels import GLOBAL_FENCE, LOOP_FENCE, RELINQUISH, TAIL, TWO_FENCES, Subject

# n, d, V, columns of a stripe. Two or more tiles and three or more k tiles of each GEMM for the only cluster,
# so that rings wrap and turns come again, and of dweight's two for the first warpgroup, so that boxes are
# written again; two stripes, of which the second adds to the first's dinput.
SIZES = {"sm_90a": (140, 136, 390, 260), "sm_100a": (280, 136, 520, 260)}
KEPT = 384
"""Those from 256 on are rescaled by another warp than the one that writes the target's entry."""
SMS = 2
GEMMS = ("dlogits", "dinput", "dweight")
ADDING = "dweight that adds"
COUNTED = "dinput that counts its tokens"
HALF_BOXES = "keeps in tiles that end with half a box"
NUMBERS = {"dlogits": 2, "dinput": 4, "dweight": 5, ADDING: 5, COUNTED: 4}
"""The numbers of a backward's kernels: Gather, clear, the logits, ScaleRows, dinput, dweight, three of
Reduce."""

NONE_IGNORED = (
    r"setp\.lt\.s32|selp\.b32 .*, 0, ",
    "or equal|swapped",
    "Concerns ignored tokens, of which these calls have none (tests/emulated/test_rows.py has some).",
)
SAME_LANES = (
    r"setp\.ne\.b32 \S+ %r\d+, 0",
    "reversed",
    "Selects the lane that writes; all lanes have the same number.",
)
AFTER_COUNTERS = (
    r"setp\.(?:ge|lt)\.s32",
    "equal",
    "The number after the counters is zeroed as well; it is padding.",
)
ONLY_FLOAT16 = (
    r"mul\.f32 .*, 0f38000000",
    "factor dropped",
    "Concerns what is not kept but recomputed, which only float16 scales.",
)
MINUS_ONE = (
    r"st\.global\.b32 \[%rd\d+\], 0$",
    "store removed",
    "The largest raise then starts at memory that nobody wrote, which is -1 here and counts as 0 does.",
)
CLASS_0 = (r"setp\.lt\.s64", "or equal", "A target that is not a class uses class 0 as well.")
EITHER_INTEGER = (r"cvt\.rmi", "rounds up", "Either integer next to the target's logit is a valid reference.")

ONE_LARGE_TERM = (
    r"sub\.f32 \S+ %r\d+, %r\d+$",
    "adds",
    "bf16 holds the sum of a row whose largest term does not exceed the headroom; in float16 this is found.",
)
EITHER_ONE = (
    r"setp\.le\.f32 \S+ %r\d+, 0f3F800000",
    "not equal",
    "For two equal numbers either one is the maximum.",
)
FIRST_OF_VALID = (
    r"setp\.eq\.b32 \S+ %r\d+, 0$|selp\.b32 \S+ 1, 0|sub\.s32",
    "reversed|swapped|adds",
    "Matters only if a launch begins after token 0 or has no valid token; these calls do neither.",
)
ROUNDED_UP = (
    r"shr\.(?:s32 .*, 31|u32 .*, 26)$|add\.s32 \S+ %r\d+, %r\d+$|setp\.gt\.s32 \S+ %r\d+, -1",
    "not shifted|subtracts|or equal",
    "Part of a division that rounds up; the tokens fill whole tiles, so nothing is added to the quotient.",
)
SLOWER_THAN_A_PEER = (
    r"mbarrier\.try_wait",
    "always succeeds",
    "A wait of the producer's tail. The last one keeps the CTA alive until its peer has released the slot;"
    " in 60 schedules that was never later than the reads and writes of the CTA's own last tile.",
)
ONE_PAST = (
    r"setp\.(?:le|lt|ge)\.s32 \S+ %r\d+, %r\d+$",
    "equal",
    "A lane goes on to the part behind the row's last one: its loads give zeros, and it stores nothing.",
)
LAST_BOXES = (
    r"bar\.sync 2, 128",
    "barrier removed",
    "Behind their last loads from TMEM the warps meet at the barrier of their last boxes, too.",
)
SEVERAL_SPLITS = (
    r"setp\.lt\.s32 \S+ %r\d+, 1$",
    "or equal",
    "Concerns a single split; these calls have two or more.",
)


def case(arch: str, keeps: bool) -> Case:
    """Ignored rows; for what keeps also rows that rise above their reference in some columns, some of them
    with a target near the last that are kept."""
    from tests.emulated.forward import ignoring

    found = random_case(*SIZES[arch][:3], torch.bfloat16)
    if keeps:
        found = jumping(found, {20: 100.0, 200: 300.0}, slice(0, None, 8))
        found.target[8::16] = KEPT - 20
    return ignoring(found)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty and its relatives give nan, and integers their largest."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def _emulating(arch: str, seed: int, compacts: bool = False, tile_n: int = 0) -> Iterator:
    """launch/ runs the emulator, with narrow tiles, and what nobody writes is nan.

    compacts: whether backwards compact tokens, which then have two tiles of three on Hopper, three of five on
    Blackwell. tile_n: of forwards, see `half_boxes`; 0: the others'.
    """
    from tests.device import forget_plans
    from tests.emulated.backward import device, half_boxes, narrow_plans

    with pytest.MonkeyPatch.context() as patch, poisoned():
        narrow_plans(patch)
        if tile_n:
            half_boxes(patch, tile_n)
        # Of all tokens, the last stripe's dinput goes through boxes, not to the sum.
        patch.setattr(backward, "compacts", lambda *_: compacts)
        with device(arch, SMS, seed) as counts:
            yield counts
    forget_plans()


def _keep(arch: str, seed: int, tile_n: int = 0) -> tuple[Key, list[Tensor]]:
    """(key, results) of a forward that keeps: the statistics, what is kept, and the rows' factors."""
    this = case(arch, True)
    with _emulating(arch, seed, tile_n=tile_n) as counts:
        results = passes.forward(KERNELS, this, kept_columns=KEPT)
    *statistics, kept, kept_scale = (tensor for tensor in results if tensor is not None)
    # Of compacted tokens, in whole k tiles.
    count = len(_compacted(this))
    return counts.keys[0], [*statistics, kept[:count, :KEPT], kept_scale[:count]]


def _compacted(case: Case) -> Tensor:
    """The tokens that are computed, in their order there."""
    valid = case.target != case.ignore_index
    order = torch.cat((valid.nonzero()[:, 0], (~valid).nonzero()[:, 0]))
    return order[: -(-int(valid.sum()) // COMPUTED_ROWS) * COMPUTED_ROWS]


@functools.cache
def _statistics(arch: str) -> Results:
    """Of the case's forward, of which the mutated backward starts."""
    with _emulating(arch, 0):
        return passes.forward(KERNELS, case(arch, False))


def _counted(arch: str, seed: int) -> tuple[Key, list[Tensor]]:
    """(key, results) of a backward in two stripes whose GEMMs read a count of tokens; the last: MMAs."""
    counts, gradients = _stripes(arch, seed, compacts=True)
    return counts.keys[0], [*gradients, torch.tensor(counts.products)]


def _backward(arch: str, seed: int) -> tuple[Key, list[Tensor]]:
    """(key, results) of a backward in two stripes."""
    counts, gradients = _stripes(arch, seed)
    return counts.keys[0], gradients


def _stripes(arch: str, seed: int, compacts: bool = False):
    """(what the emulator counted, gradients) of a backward in two stripes."""
    this = case(arch, False)
    statistics = _statistics(arch)
    with _emulating(arch, seed, compacts) as counts:
        saved = statistics._make(None if tensor is None else tensor.clone() for tensor in statistics)
        dloss = this.upstream("none").float()
        gradients = passes.backward(KERNELS, this, dloss, saved, window=SIZES[arch][3])
    return counts, [g for g in gradients if g is not None]


def _adding(arch: str, seed: int) -> tuple[Key, list[Tensor]]:
    """(key, results) of the same backward, whose dweight is added to ones in fp32."""
    this = case(arch, False)
    statistics = _statistics(arch)
    with _emulating(arch, seed) as counts:
        saved = statistics._make(None if tensor is None else tensor.clone() for tensor in statistics)
        dloss, out = this.upstream("none").float(), torch.ones(this.linear_weight.shape)
        dinput, _ = passes.backward(KERNELS, this, dloss, saved, window=SIZES[arch][3], out=out)
    assert dinput is not None
    return counts.keys[0], [dinput, out]


def _check_adding(arch: str, results: list[Tensor]) -> None:
    dinput, total = results
    _check_backward(arch, [dinput, (total - 1).bfloat16()])


def _check_keep(arch: str, results: list[Tensor]) -> None:
    """What is kept, times the rows' factors, is softmax - onehot, 0 in ignored rows."""
    this = case(arch, True)
    valid = this.target != this.ignore_index
    kept, scale = results[-2:]
    dlogits = (this.input.double() @ this.linear_weight.double().T).softmax(1)
    dlogits[torch.arange(len(valid)), this.target.where(valid, 0)] -= 1
    wanted = dlogits[:, :KEPT].where(valid.unsqueeze(1), 0)[_compacted(this)]
    assert_close("kept", kept.float() * scale.unsqueeze(1), wanted, wanted.bfloat16())


def _check_backward(arch: str, results: list[Tensor]) -> None:
    this = case(arch, False)
    dloss = this.upstream("none")
    _, *wanted = this.expected(dloss, "none")
    _, *plain = this.baseline(dloss, "none", rounded_dlogits=True)
    for name, mine, want, base in zip(("dinput", "dweight"), results, wanted, plain, strict=True):
        assert_close(name, mine, want, base)


def _same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


RUNS: dict[
    str, tuple[Callable[[str, int], tuple[Key, list[Tensor]]], Callable[[str, list[Tensor]], None]]
] = {
    "keeps": (_keep, _check_keep),
    HALF_BOXES: (functools.partial(_keep, tile_n=40), _check_keep),
    ADDING: (_adding, _check_adding),
    COUNTED: (_counted, lambda arch, results: _check_backward(arch, results[:2])),
    **dict.fromkeys(GEMMS, (_backward, _check_backward)),
}


@functools.cache
def _expected(
    arch: str,
    run: Callable[[str, int], tuple[Key, list[Tensor]]],
    right: Callable[[str, list[Tensor]], None],
) -> tuple[Key, list[Tensor]]:
    """Of the kernels as they are: `build` calls it before any mutation."""
    key, results = run(arch, 0)
    right(arch, results)
    return key, results


@dataclass(frozen=True)
class CountingSubject(Subject):
    """A GEMM that reads how many tokens there are: what it computes of the count."""

    rules: list[tuple[str, str, str | None]] = field(default_factory=lambda: [*ARITHMETIC, *COUNTING])

    def mutates(self, ptx: str) -> Callable[[Mutation], bool]:
        lines = _lines_of_counts(ptx)
        return lambda mutation: mutation.line in lines and self.entries(entry_of(ptx, mutation.line))


def _lines_of_counts(ptx: str) -> set[int]:
    """Where kernels compute from a count: from the first load of each to the next label."""
    found, state = set(), ""
    for number, line in enumerate(ptx.split("\n"), 1):
        if ".visible .entry" in line:
            state = "before"
        elif state == "before" and "ld.global.b32" in line:
            state = "in"
        elif state == "in" and line.startswith("$L"):
            state = ""
        if state == "in":
            found.add(number)
    return found


def _subject(arch: str, which: str, **options) -> Subject:
    """which: of RUNS."""
    run, right = RUNS[which]

    def build(folder: str) -> Emulated:
        from tests.emulated.forward import emulated

        return emulated(_expected(arch, run, right)[0])

    def check(program: Emulated, seed: int) -> bool:
        return _same(run(arch, seed)[1], _expected(arch, run, right)[1])

    def mine(entry: str) -> bool:
        if which == HALF_BOXES:
            return "Gemm" in entry
        if which == "keeps":
            return "Gemm" in entry or "Finish" in entry
        return re.search(rf"Gemm.*_{NUMBERS[which]}$", entry) is not None

    name = f"the forward that {which}" if "keeps" in which else f"the backward's GEMM of {which}"
    place = "Blackwell" if arch.startswith("sm_10") else "Hopper"
    kind, seeds = (CountingSubject, range(1)) if which == COUNTED else (Subject, range(6))
    return kind(f"{name}, {place}", build, check, seeds, entries=mine, **options)


@contextlib.contextmanager
def narrow_tiles(splits: int = 0) -> Iterator[None]:
    """While active, plans have narrow tiles and pace, and what nobody writes is nan. One choice of tiles for
    calls of any size, so that all of them run the mutated kernels. splits: see narrow_plans."""
    from tests.device import forget_plans
    from tests.emulated.backward import narrow_plans

    with pytest.MonkeyPatch.context() as patch, poisoned():
        narrow_plans(patch, splits=splits, paced=True)
        row = ARCHITECTURES["sm_90a"]
        one = replace(row.tilings[0], dweight=row.tilings[0].dweight[:1])
        patch.setitem(ARCHITECTURES, row.name, replace(row, tilings=(one,)))
        yield
    forget_plans()


def _rows_at_the_bound_of_references() -> Case:
    """Every other row has logits of about 2.9 million, whose references in base 2 lie at KeptRange.far."""
    case = random_case(24, 64, 64, torch.bfloat16, scale=4.0)
    # Multiples of 1/4, which fp32 holds at that height.
    hidden, weight = (case.input * 2).round() / 2, (case.linear_weight * 2).round() / 2
    hidden[:, :3], weight[:, :3] = torch.tensor([2899968.0, 7296.0, 24.0]), 1
    hidden[1::2, :3] = 0
    return replace(case, input=hidden, linear_weight=weight)


def _all_ignored(case: Case) -> Case:
    return replace(case, target=torch.full_like(case.target, case.ignore_index))


def _rows_of_large_sums() -> Case:
    """Every other row's sum exceeds the headroom and no term of it does. Each of the others has a fifth of
    its probability in its first element, which comes after the last one of such a row."""
    case = random_case(11, 64, 1024, torch.bfloat16, scale=0.1)
    case.target[::2] = 1000
    case.input[:, :2], case.linear_weight[:, :2] = 0, 0
    case.input[::2, 0], case.linear_weight[:, 0], case.linear_weight[1000, 0] = 1, 42, 0
    case.input[1::2, 1], case.linear_weight[0, 1] = 1, 5.5
    return case


def _shares_of_either_sign() -> list[Case]:
    """Rows with features that cancel in the logits. Of the first a lane has all AT_ONCE parts: without one of
    each 8 that a warp has at once a reference is too high for bf16's range, in one case or the other. Of the
    others some lanes have one more part, which cancels their first."""
    found = []
    for features in (1000, 1160):
        case = random_case(20, features, 200, torch.bfloat16, scale=0.5)
        share = torch.tensor([0.5, -0.5]).repeat(features // 2).bfloat16()
        if features > 1024:
            share[: features - 1024], share[1024:] = 0.5, -0.5
        hidden, weight = case.input / 4 + 8, case.linear_weight
        found += [replace(case, input=hidden, linear_weight=weight + each) for each in (share, -share)]
    return found


def _right_by_the_tests(seed: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    """What tests/emulated/test_backward.py asks of what is kept, the rare branches first."""
    from tests.emulated import test_backward as asks
    from tests.emulated.backward import check, train
    from tests.emulated.forward import ignoring

    quiet = random_case(40, 64, 200, dtype, scale=0.1)
    plain = random_case(37, 64, 200, dtype)
    plain.target[2], plain.target[31] = 0, 127
    narrow = random_case(40, 64, 64, dtype)
    # 1024 columns are what a block's threads rescale at once.
    if dtype is torch.float16:
        heights = asks.FP16_NEIGHBOURS
        own = [(asks.misleading(), 1000), (asks.misleading(1024), 1024)]
    else:
        heights = asks.NEIGHBOURS
        own = [(_rows_of_large_sums(), 1024), (_rows_at_the_bound_of_references(), 64)]
        own += [(each, 200) for each in _shares_of_either_sign()]
    cases = [
        *((jumping(quiet, each, slice(0, None, 2)), 200) for each in heights),
        *own,
        (jumping(plain, {150: 50.0}, slice(0, None, 8)), 128),
        (jumping(plain, {150: 300.0}, slice(0, None, 8)), 128),
        (jumping(narrow, {20: 50.0}, slice(0, None, 2)), 64),
        (asks.all_features(dtype), 200),
        (ignoring(plain), 128),
        # More than COMPUTED_ROWS valid tokens, and none.
        (random_case(70, 64, 200, dtype), 128),
        (_all_ignored(plain), 128),
        (plain, 200),
    ]
    with narrow_tiles():
        try:
            for case, kept in cases:
                dloss = torch.linspace(1, 2, len(case.target)).double()
                run = train(case, "sm_90a", kept_columns=kept, dloss=dloss, sms=SMS, seed=seed)
                check(case, run, dloss=dloss)
            run = train(ignoring(plain), "sm_90a", kept_columns=128, reduction="mean", sms=SMS, seed=seed)
            check(ignoring(plain), run, reduction="mean")
            nans, zeros = with_bad_ignored_rows(narrow)
            run = train(nans, "sm_90a", kept_columns=64, sms=SMS, seed=seed)
            check(zeros, run)
            sick = torch.zeros(37, dtype=torch.bool)
            sick[[0, 3, 36]] = True
            target = plain.target.clone()
            target[sick] = torch.tensor([200, 2**40, -1])
            bad = replace(plain, target=target)
            run = train(bad, "sm_90a", kept_columns=128, dloss=(~sick).float(), sms=SMS, seed=seed)
            assert run.dinput is not None
            assert torch.equal(run.dinput.isnan().all(1), sick)
            assert torch.equal(run.dinput.isnan().any(1), sick)
            several, one = (random_case(tokens, 72, 330, dtype) for tokens in (70, 1))
            for case, kept, window in (
                (several, 128, 130),
                (several, 330, 0),
                (one, 330, 0),
                (_all_ignored(several), 128, 130),
            ):
                asks.check_counters("sm_90a", case, kept, window)
        except AssertionError:
            return False
    return True


def _key(dtype: torch.dtype, which: int) -> Key:
    """The forward's (0) or the backward's (1) in what `_right_by_the_tests` and `_sum_of_splits_is_right`
    run."""
    from tests.emulated.backward import train

    with narrow_tiles():
        case = random_case(37, 64, 200, dtype)
        return train(case, "sm_90a", kept_columns=128, sms=SMS).emulator.keys[which]


def _right_in_float16(seed: int) -> bool:
    return _right_by_the_tests(seed, torch.float16)


def _sum_of_splits_is_right(seed: int) -> bool:
    """What tests/emulated/test_backward.py asks of dhidden in splits of k."""
    from tests.emulated.backward import check, train

    case = random_case(17, 72, 300, torch.bfloat16)
    # The loop over splits is unrolled by 4; five k tiles, so that none of five splits is zeros.
    for splits in (5, 4):
        with narrow_tiles(splits):
            try:
                check(case, train(case, "sm_90a", need_dweight=False, sms=SMS, seed=seed))
            except AssertionError:
                return False
    return True


def _products_are_right() -> bool:
    """What tests/emulated/test_multiply.py asks."""
    from tests.emulated import test_multiply as asks

    try:
        asks.test_both_gradients_of_a_mean("sm_90a", torch.bfloat16, 72)
        asks.test_both_gradients_of_a_mean("sm_90a", torch.bfloat16, 4360)
        for d in (1096, 2120, 3144):
            asks.test_ends_of_rows(d)
        asks.test_one_gradient_of_a_sum("dinput")
        asks.test_a_number_for_each_row(3)
        asks.test_rows_of_tokens_in_another_order("sm_90a", 72)
        for dtype in (torch.int64, torch.int32):
            asks.test_what_flows_into_ignored_rows_does_not_matter("sm_90a", float("nan"), 2, dtype)
        for reduction in ("mean", "sum"):
            asks.test_no_valid_rows(reduction, float("nan"))
    except AssertionError:
        return False
    return True


def _arithmetic(
    kernel: str,
    least_mutations: int,
    missed: int,
    reasons: list,
    is_right: Callable[[int], bool] = _right_by_the_tests,
    dtype: torch.dtype = torch.bfloat16,
) -> Subject:
    """One of the small kernels, which both architectures share, by the rules of arithmetic."""

    def build(folder: str) -> Emulated:
        from tests.emulated.forward import emulated

        return emulated(_key(dtype, 0 if kernel in ("References", "Finish") else 1))

    return Subject(
        f"arithmetic of {kernel}" + (" in float16" if dtype is torch.float16 else ""),
        build,
        lambda program, seed: is_right(seed),
        range(1),
        least_mutations,
        missed,
        reasons,
        # Of the three of Reduce the one that rounds sums, which these calls launch.
        entries=lambda entry: kernel in entry and (kernel != "Reduce" or entry.endswith("_6")),
        rules=ARITHMETIC,
    )


def _multiply() -> Subject:
    """The kernel of grad_in_forward's backward, by the rules of arithmetic."""

    def build(folder: str) -> Emulated:
        from tests.emulated.forward import emulated

        return emulated(MultiplyKey("sm_90a"))

    return Subject(
        "arithmetic of Multiply",
        build,
        lambda program, seed: _products_are_right(),
        range(1),
        100,
        2,
        [EITHER_ONE],
        rules=ARITHMETIC,
    )


def subjects() -> list[Subject]:
    found = [
        _subject(arch, COUNTED, least_mutations=15, missed=8, reasons=[FIRST_OF_VALID, ROUNDED_UP])
        for arch in ("sm_90a", "sm_100a")
    ]
    reasons = [TAIL, GLOBAL_FENCE, LOOP_FENCE]
    found.append(_subject("sm_90a", HALF_BOXES, least_mutations=20, missed=3, reasons=reasons))
    for which in (name for name in RUNS if name not in (COUNTED, HALF_BOXES)):
        tail, missed = (SLOWER_THAN_A_PEER, 3) if which == ADDING else (TAIL, 2)
        reasons = [tail, GLOBAL_FENCE]
        if which in ("keeps", "dlogits"):
            reasons, missed = [*reasons, LOOP_FENCE], 3
        elif which == "dweight":
            missed = 3
        found.append(_subject("sm_90a", which, least_mutations=20, missed=missed, reasons=reasons))
        boxes = [LAST_BOXES] if which == "dlogits" else []
        found.append(
            _subject(
                "sm_100a",
                which,
                least_mutations=30,
                missed=7 + len(boxes),
                reasons=[TAIL, RELINQUISH, TWO_FENCES, *boxes],
            )
        )
    found += [
        _arithmetic("References", 80, 7, [SAME_LANES, CLASS_0, EITHER_INTEGER, MINUS_ONE, ONE_PAST]),
        _arithmetic("Finish", 40, 1, [ONE_LARGE_TERM]),
        _arithmetic("Finish", 40, 0, [], _right_in_float16, torch.float16),
        _arithmetic("ScaleRows", 60, 8, [SAME_LANES, AFTER_COUNTERS, ONLY_FLOAT16, ONE_PAST]),
        _arithmetic("Reduce", 40, 3, [SEVERAL_SPLITS, NONE_IGNORED], _sum_of_splits_is_right),
        _multiply(),
    ]
    return found
