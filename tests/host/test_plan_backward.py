"""Plans of the backward: stripes, what is kept, and what a call allocates against what it was given."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_lce import cli
from cute_lce.arch import ARCHITECTURES, Gpu, KernelConfig, architecture
from cute_lce.arguments import Operands
from cute_lce.implementation import Request, Saved
from cute_lce.launch import KERNELS
from cute_lce.ops.prepared import Prepared
from cute_lce.options import LossOptions
from cute_lce.plan import backward, candidates, cost, forward, gemm, schedule
from cute_lce.plan.backward import BackwardPlan
from cute_lce.plan.candidates import STRIPE_MULTIPLE
from cute_lce.plan.kernels import ForwardKey, Key, MultiplyKey
from cute_lce.plan.memory import DEFAULT_WORKSPACE, backward_bytes, compacts, sweeps_bytes, usable
from cute_lce.plan.problem import MIB, NO_LIMITS, Limits, Problem, ceil_div
from tests.device import planned_for

NEEDS = ((True, True), (True, False), (False, True))
TABLE = (
    (8192, 4096, 131072),
    (4096, 4096, 32768),
    (1024, 4096, 262144),
    (4096, 7168, 129280),
    (32768, 4096, 262144),
    (256, 4096, 128256),
)


class Call(NamedTuple):
    """What a plan depends on; workspace in bytes and window in columns, 0 where the caller gives none."""

    n: int
    d: int
    V: int
    workspace: int = 0
    window: int = 0
    half: bool = False
    need_dinput: bool = True
    need_dweight: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.half else torch.bfloat16

    @property
    def problem(self) -> Problem:
        return Problem(self.n, self.d, self.V, self.half, self.need_dinput, self.need_dweight)

    @property
    def limits(self) -> Limits:
        return Limits(self.window, self.workspace)


def draws(count: int, seed: int = 7) -> Iterator[Call]:
    """Calls of the usual sizes and of random ones."""
    draw = random.Random(seed)
    for i in range(count):
        if i % 3 == 0:
            n, d, V = draw.choice(TABLE)
        else:
            n, d, V = (int(2 ** draw.uniform(0, top)) for top in (16, 12, 18))
        workspace = draw.choice((0, int(2 ** draw.uniform(17, 33))))
        window = draw.choice((0, 0, draw.randint(1, V)))
        yield Call(n, 8 * ceil_div(d, 8), V, workspace, window, draw.random() < 0.3, *draw.choice(NEEDS))


def whole(arch: str) -> Gpu:
    return Gpu(arch, architecture(arch).sms)


def ask(call: Call, wanted: str, workspace: int, arch: str = "sm_90a") -> tuple[str, int]:
    return schedule.choose(whole(arch), call.problem, wanted, Limits(call.window, workspace))


def decide(call: Call, wanted: str = "keep", arch: str = "sm_90a") -> int | None:
    """Columns kept, or None where a plan refuses the workspace."""
    try:
        return ask(call, wanted, call.workspace, arch)[1]
    except ValueError as refusal:
        if not str(refusal).startswith("workspace_mb:"):
            raise
        return None


def planned(arch: str, call: Call, kept: int) -> BackwardPlan:
    return backward.plan(whole(arch), call.problem, kept, call.limits)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_stripes_end_in_full_rounds(arch: str):
    """Rounds of the weight's GEMM, of all stripes, are at most 3% more than were every round full, or as many
    as the longest stripes take; nor are there many more stripes."""
    gpu = whole(arch)
    shorter = 0
    for n, d, V in [(8192, 4096, 131072), (4096, 4096, 128256), (4096, 7168, 129280), (32768, 4096, 262144)]:
        for workspace in (300 * MIB, 700 * MIB, 1126 * MIB):
            call = Call(n, d, V, workspace)
            plan = planned(arch, call, 0)
            config = plan.dweight
            if decide(call, "recompute", arch) is None or plan.chunks or len(plan.stripes) == 1:
                continue
            # Columns of the longest stripe that the workspace holds.
            spare = usable(workspace) - backward_bytes(call.problem, 0)
            most = spare // (2 * n) // STRIPE_MULTIPLE * STRIPE_MULTIPLE
            shorter += plan.columns < most

            def rounds(lengths: list[int], d: int = d, n: int = n, config: KernelConfig = config) -> int:
                grids = [gemm.plan_dweight(gpu, config, length, d, n) for length in lengths]
                return sum(
                    -(-(chosen.windows * -(-d // config.cluster_columns)) // chosen.clusters)
                    for chosen in grids
                )

            tiles = -(-V // config.cluster_rows) * -(-d // config.cluster_columns)
            even = tiles / (gpu.sms // (config.cluster_m * config.cluster_n))
            taken = rounds([stripe.columns for stripe in plan.stripes])
            longest_ones = rounds([min(most, V - first) for first in range(0, V, most)])
            assert taken <= max(1.03 * even + 1, longest_ones), (call, plan.columns)
            assert len(plan.stripes) <= 1.3 * -(-V // most) + 1
            assert plan.columns <= most
    assert shorter > 3


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_stripes_cover_the_vocabulary_exactly_once(arch: str):
    for call in draws(300):
        kept = decide(call, arch=arch)
        if kept is None:
            continue
        plan = planned(arch, call, kept)
        if plan.chunks and not call.need_dweight:
            assert not plan.stripes
            continue
        spans = [(stripe.first, stripe.first + stripe.columns) for stripe in plan.stripes]
        assert spans[0][0] == 0
        assert spans[-1][1] == call.V
        assert all(end == following for (_, end), (following, _) in pairwise(spans))
        assert all(first < end for first, end in spans)
        assert [stripe.is_first for stripe in plan.stripes] == [1] + [0] * (len(spans) - 1)
        assert [stripe.is_last for stripe in plan.stripes] == [0] * (len(spans) - 1) + [1]
        # What was kept comes first, and whole.
        assert plan.kept == kept
        assert not kept or spans[0] == (0, kept)
        assert all(end - first <= plan.columns for first, end in spans[1 if kept else 0 :])
        # Rows of dlogits begin at multiples of 16 bytes and hold a stripe.
        assert plan.pitch % 8 == 0
        assert plan.columns <= plan.pitch < plan.columns + 8


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gemms_are_in_bounds(arch: str):
    for call in draws(150, seed=3):
        plan = planned(arch, call, 0)
        chunks = [(chunk.tokens, plan.splits, chunk.stripe) for chunk in plan.chunks]
        splits = 1 if chunks else plan.splits
        for n, splits, stripe in [*chunks, *((call.n, splits, stripe) for stripe in plan.stripes)]:
            assert all(type(number) is int for number in stripe[:4])
            gemms = (stripe.logits, stripe.dhidden, stripe.dweight)
            sizes = ((stripe.columns, n), (call.d, n), (stripe.columns, call.d))
            for chosen, config, (rows, width) in zip(gemms, plan.configs, sizes, strict=True):
                assert all(type(number) is int for number in chosen)
                columns = ceil_div(width, config.cluster_columns)
                assert chosen.windows == ceil_div(rows, config.cluster_rows)
                # Its epilogues see every tile by itself.
                assert chosen.tiles_per_window == 1
                assert chosen.splits == (splits if chosen is stripe.dhidden else 1)
                assert 1 <= chosen.group <= columns
                assert 1 <= chosen.clusters <= columns * chosen.windows * chosen.splits
                assert chosen.clusters * config.cluster_m * config.cluster_n <= architecture(arch).sms
                assert chosen.paced in (0, 1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_splits_sums_count_and_fit(arch: str):
    """dhidden's k is split where that is faster and the workspace holds a sum for each split."""
    split = 0
    for call in draws(600, seed=23):
        kept = decide(call, "auto")
        if kept is None:
            continue
        plan = planned(arch, call, kept)
        assert plan.splits >= 1
        if plan.chunks:
            continue
        stripes = len(plan.stripes)
        least = backward_bytes(call.problem, plan.columns, kept)
        if plan.splits == 1:
            assert plan.workspace == least
            continue
        split += 1
        assert not call.window, "an explicit window fixes the order of a row's additions"
        assert call.need_dinput
        # With several stripes one sum is among the least; with one dinput by compacted tokens and their
        # hidden states, which otherwise lie where dinput will be.
        compacted = compacts(call.problem, kept) * (2 + 2 * (kept < call.V))
        sums = 4 * plan.splits - (4 if stripes > 1 else compacted)
        assert plan.workspace == least + sums * call.n * call.d
        assert plan.workspace <= usable(call.workspace or DEFAULT_WORKSPACE)
        # Each has at least half of 1024 columns of the widest stripe.
        widest = max(stripe.columns for stripe in plan.stripes)
        assert widest > 1024 * (plan.splits - 1)
    assert split > 50


def test_splits_save_time():
    """On an H100, where few tiles of dhidden would leave clusters idle, and only there."""
    gpu = Gpu("sm_90a", 132)
    for n, splits in ((128, 4), (256, 2), (512, 2), (1024, 1)):
        plan = backward.plan(gpu, Problem(n, 4096, 128256), 0, NO_LIMITS)
        (stripe,) = plan.stripes
        assert plan.splits == splits
        assert stripe.dhidden.splits == splits
        dhidden = cost.Gemm(gpu, plan.dhidden, n * 4096 * 128256)
        clocks = {
            count: cost.split_clocks(dhidden, 4096, n, 128256, count) for count in (splits, 1, 2, 3, 4, 6, 8)
        }
        assert clocks[splits] <= 1.005 * min(clocks.values())
        assert splits == 1 or clocks[splits] < 0.95 * clocks[1]
    plan = backward.plan(gpu, Problem(128, 4096, 128256), 0, Limits(window=128256))
    assert (len(plan.stripes), plan.splits) == (1, 1), "the caller gave a window"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_configs_fit_the_device(arch: str):
    for config in architecture(arch).dweight_configs:
        assert config.arch == arch
        assert config.shared_memory <= architecture(arch).shared_memory
        # Operands whose rows are not along k come in slices of 64 columns, of each of which a multicast sends
        # every CTA a part of the depth, whole lines of the swizzle.
        assert config.tile_m % 64 == 0
        assert config.tile_n % 64 == 0
        assert config.tile_k % (8 * config.cluster_size) == 0


def test_what_is_kept_are_whole_tiles_or_everything():
    for call in draws(200, seed=5):
        kept = decide(call)
        assert kept is None or type(kept) is int
        for arch in ARCHITECTURES:
            for config in architecture(arch).token_configs:
                assert not kept or kept == call.V or kept % config.cluster_rows == 0


def test_everything_is_kept_where_it_fits():
    call = Call(4096, 4096, 32768)
    assert ask(call, "keep", 2 * 2 * call.n * call.V) == ("keep", call.V)
    assert 0 < ask(call, "keep", 2 * call.n * call.V)[1] < call.V
    # Room for little beside the input's rows in float32: it serves stripes better.
    assert ask(call, "keep", 6 * call.n * call.d) == ("recompute", 0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chunks_cover_the_tokens_exactly_once(arch: str):
    """Where dinput has a sweep of its own; in every chunk all columns, and in no stripe any of it."""
    found = 0
    for call in draws(600, seed=29):
        for workspace in (call.workspace, 4 * call.n * call.d):
            given = call._replace(workspace=workspace)
            if decide(given, "recompute", arch) is None:
                continue
            plan = planned(arch, given, 0)
            if not plan.chunks:
                continue
            found += 1
            assert not call.window, "an explicit window fixes the order of a row's additions"
            assert call.need_dinput
            ends = [chunk.first + chunk.tokens for chunk in plan.chunks]
            assert [chunk.first for chunk in plan.chunks] == [0, *ends[:-1]]
            assert ends[-1] == call.n
            assert bool(plan.stripes) == call.need_dweight
            for first, _, stripe in plan.chunks:
                assert (stripe.first, stripe.columns) == (0, call.V)
                assert (stripe.is_first, stripe.is_last) == (1, 1)
                # Whole tiles, and addresses of vectors that kernels read 16 bytes of at once.
                assert first % plan.tokens.cluster_columns == first % 4 == 0
            tokens = max(chunk.tokens for chunk in plan.chunks)
            assert plan.workspace >= sweeps_bytes(call.problem, tokens, plan.splits, plan.columns)
            assert plan.workspace <= usable(given.workspace or DEFAULT_WORKSPACE)
    assert found > 10


def named_least(call: Call) -> float:
    """MiB that the refusal of too small a workspace names."""
    with pytest.raises(ValueError, match=r"workspace_mb: .*") as refused:
        ask(call, "recompute", 1)
    return max(float(word) for word in str(refused.value).replace(",", " ").split() if _is_number(word))


def test_the_least_is_named_and_taken():
    for call in draws(60, seed=11):
        assert ask(call, "recompute", int(named_least(call) * MIB) + 1) == ("recompute", 0)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------
# workspace_mb is a promise: launch/ on tensors without memory, every allocation counted


class Allocations(TorchDispatchMode):
    """Bytes of the tensors alive, as torch makes and frees them, and their peak."""

    def __init__(self, *known: torch.Tensor):
        """known: tensors that are there already, of which views may be made."""
        super().__init__()
        self.bytes = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._add(tensor)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        if key not in self._alive:
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
        self._alive[key] = self._alive.get(key, 0) + 1
        weakref.finalize(tensor, self._drop, key, storage.nbytes())

    def _drop(self, key: int, nbytes: int) -> None:
        self._alive[key] -= 1
        if not self._alive[key]:
            del self._alive[key]
            self.bytes -= nbytes


def train(call: Call, kept: int, reduction: str = "mean") -> int:
    """The peak bytes of a forward and a backward beyond dinput and dweight, no kernel launched."""
    hidden, weight = (torch.empty(rows, call.d, dtype=call.dtype, device="meta") for rows in (call.n, call.V))
    operands = Operands(hidden, weight, torch.empty(call.n, dtype=torch.int64, device="meta"))
    dloss = torch.empty((call.n,) if reduction == "none" else (), device="meta")
    loss, request = LossOptions(reduction), Request(call.limits, kept, call.need_dinput, call.need_dweight)
    with Allocations(*operands) as counted:
        prepared = Prepared(KERNELS, request)
        results = prepared.forward(operands, loss)
        assert results.row_max is not None
        assert results.row_sum is not None
        assert results.num_valid is not None
        saved = Saved(
            *operands, results.row_max, results.row_sum, results.num_valid, results.kept, results.kept_scale
        )
        gradients = prepared.backward(dloss, saved, loss, (call.need_dinput, call.need_dweight))
    return counted.peak - sum(tensor.nbytes for tensor in gradients if tensor is not None)


class Asked(set[Key]):
    """What stands for the compiled functions: they do nothing, and their keys are noted."""

    def get(self, key: Key) -> Callable[..., None]:
        self.add(key)
        return lambda *arguments: None


@pytest.fixture
def no_kernels() -> Iterator[Asked]:
    """The host side of an H100 whose kernels do nothing."""
    asked = Asked()
    with planned_for(Gpu("sm_90a", 132), asked):
        yield asked


def calls_of_every_kernel(gpu: Gpu, half: bool) -> Iterator[Call]:
    """Of random calls those that are planned with configurations that none before them has: three of a
    backward, or one of the forward that keeps nothing or everything."""
    draw, seen = random.Random(2), set()
    for _ in range(12000):
        n, d, V = (int(2 ** draw.uniform(*ends)) for ends in ((0, 16), (3, 11), (7, 18.5)))
        call = Call(n, 8 * d, V, 1 << 42, 0, half, *draw.choice(NEEDS))
        found = candidates.Candidates(gpu, call.problem)
        asked = {
            *(found.gemms(kept).configs for kept in (0, V)),
            *((forward.choose_config(gpu, n, call.d, V, keeps, 0), keeps) for keeps in (False, True)),
        }
        if not asked <= seen:
            seen |= asked
            yield call


@pytest.mark.parametrize("half", [False, True])
def test_all_that_launch_asks_for_is_what_compile_compiles(half: bool, no_kernels: Asked):
    """No key more, and none less, over the architecture's GPUs."""
    for model in range(len(architecture("sm_90a").data_sheets)):
        gpu = whole("sm_90a")._replace(model=model)
        calls = [call._replace(half=half) for call in draws(60, seed=17)]
        with planned_for(gpu, no_kernels):
            for call in [*calls, *calls_of_every_kernel(gpu, half)]:
                for kept in {decide(call), decide(call, "recompute")}:
                    if kept is not None:
                        train(call, kept)
    by_launch = frozenset(no_kernels)
    no_kernels.clear()
    dtype = "float16" if half else "bfloat16"
    assert cli.main(["compile", "--jobs", "1", "--arch", "sm_90a", "--dtype", dtype]) == 0
    # The first is grad_in_forward's alone; the other is for calls whose terms want narrow tiles.
    others = {MultiplyKey("sm_90a", dtype), ForwardKey(gpu.row.configs[-1].tokens[0], dtype)}
    assert by_launch | others == no_kernels


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("schedule", ["recompute", "keep", "auto"])
def test_what_is_allocated_is_within_the_workspace(schedule: str, reduction: str, no_kernels):
    served = split = 0
    for call in draws(120, seed=13):
        kept = decide(call, schedule) if call.workspace else None
        if kept is None:
            continue
        served += 1
        split += planned("sm_90a", call, kept).splits > 1
        peak = train(call, kept, reduction)
        assert peak <= call.workspace, (
            f"{call}, kept {kept}: {peak / MIB:.2f} MiB of {call.workspace / MIB:.2f}"
        )
    assert served > 20
    assert split > 0


def test_the_least_that_is_named_is_enough(no_kernels: Asked):
    """For a window of the caller's too, whose stripes of dlogits are most of it."""
    for call in draws(90, seed=19):
        least = named_least(call)
        given = call._replace(workspace=int(least * MIB) + 1)
        assert train(given, 0) <= given.workspace, given


@pytest.mark.parametrize(("n", "d", "V"), TABLE)
def test_the_workspace_is_used(n: int, d: int, V: int, no_kernels):
    """Not only a bound: where there is more to keep than it holds, at least three quarters are filled."""
    call = Call(n, d, V, workspace=min(2 << 30, n * V))
    kept = decide(call)
    assert kept is not None
    assert 0.75 * call.workspace <= train(call, kept) <= call.workspace


def test_a_frozen_weight_has_nothing_of_its_size(no_kernels):
    call = Call(1024, 4096, 262144, workspace=200 * MIB, need_dweight=False)
    kept = decide(call, "auto")
    assert kept is not None
    assert train(call, kept) <= call.workspace < 2 * call.V * call.d


def test_nothing_that_outlives_a_call_owns_memory(no_kernels):
    """The first call may be one that a CUDA graph captures, into whose pool all that it allocates goes."""
    gc.collect()
    before = [found for found in gc.get_objects() if type(found) is torch.Tensor]
    for call in (Call(100, 64, 1000), Call(100, 64, 1000, half=True), Call(8192, 4096, 131072)):
        for reduction in ("mean", "none"):
            train(call, 0, reduction)
            train(call, 768, reduction)
    gc.collect()
    known = set(map(id, before))
    after = [found for found in gc.get_objects() if type(found) is torch.Tensor and id(found) not in known]
    assert sum(tensor.untyped_storage().nbytes() for tensor in after) == 0


@pytest.mark.parametrize(
    ("n", "V", "window", "need"), [(2048, 123010, 247, False), (5, 133818, 70, False), (558, 8192, 70, True)]
)
def test_many_narrow_windows_stay_within_the_workspace(n: int, V: int, window: int, need: bool, no_kernels):
    """The partials of the forward's windows count too."""
    call = Call(n, 16, V, window=window, need_dinput=need, need_dweight=need)
    given = call._replace(workspace=int(named_least(call) * MIB) + 1)
    hidden, weight = (torch.empty(rows, given.d, dtype=given.dtype, device="meta") for rows in (n, V))
    operands = Operands(hidden, weight, torch.empty(n, dtype=torch.int64, device="meta"))
    request = Request(given.limits, 0, need, need, statistics=need)
    with Allocations() as counted:
        Prepared(KERNELS, request).forward(operands, LossOptions())
    assert counted.peak <= given.workspace


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("n", "d", "V"),
    [(65536, 4096, 128256), (32768, 8192, 128256), (131072, 2048, 151936), (1 << 24, 4096, 99)],
)
def test_the_default_workspace_serves_many_tokens(n: int, d: int, V: int, half: bool, no_kernels):
    """Within twice its GEMMs, where an accumulator alone may exceed it; raised only if it must be."""
    call = Call(n, d, V, half=half)
    predicted = schedule.predict(whole("sm_90a"), call.problem, "auto", NO_LIMITS)
    assert predicted.seconds < 1.8 * predicted.floor or predicted.seconds < 1.2 * predicted.best
    least = int(named_least(call) * MIB) + 1
    assert (least > DEFAULT_WORKSPACE) == (n == 1 << 24)
    assert train(call, decide(call, "auto") or 0) <= max(DEFAULT_WORKSPACE, least)


def test_equal_stripes_share_their_grids():
    """Planning thousands of stripes takes milliseconds, not tens."""
    call = Call(75, 8, 481810, workspace=35759)
    grids = {id(stripe.dweight) for stripe in planned("sm_100a", call, 0).stripes}
    assert len(grids) <= 3


def test_no_more_splits_than_clusters():
    plan = backward.plan(Gpu("sm_90a", 132), Problem(1, 64, 600000), 0, Limits(workspace=1 << 33))
    assert plan.splits == 132 // 2
