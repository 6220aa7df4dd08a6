"""What is prepared once for calls of one kind, and what each of them then does; no kernel runs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cute_lce import linear_cross_entropy, linear_logprob
from cute_lce.arch import Gpu
from cute_lce.arguments import GemmPlan, KeepOutputs, LossArguments, Operands, Stripe
from cute_lce.compile.frozen import freeze
from cute_lce.implementation import Request
from cute_lce.launch import KERNELS, device
from cute_lce.ops import prepared, select
from cute_lce.options import LossOptions
from cute_lce.parallel import ops as sharded
from cute_lce.plan import backward as backward_plans
from cute_lce.plan import forward as forward_plans
from cute_lce.plan.kernels import BackwardKey, Key
from cute_lce.streaming import STREAMING
from tests import passes
from tests.device import planned_for
from tests.numerics import assert_close, negated, random_case

BF16 = torch.bfloat16
STRIPE = len(Operands._fields) + 6
"""The position of a backward's stripe."""


def thawed(frozen: Any) -> Any:
    return frozen if isinstance(frozen, int) else tuple(map(thawed, frozen))


@pytest.mark.parametrize(
    "group",
    [
        LossArguments(reduction=2, ignore_index=-(1 << 62) - 1),
        KeepOutputs(kept=1 << 62, kept_scale=3 << 40, workspace=5, pitch=1 << 33, columns=7),
        GemmPlan(windows=5, tiles_per_window=3, splits=1, group=7, clusters=11, paced=1),
        Stripe(
            first=1,
            columns=2,
            is_first=0,
            is_last=1,
            logits=GemmPlan(windows=3, tiles_per_window=4, splits=5, group=6, clusters=7, paced=8),
            dhidden=GemmPlan(windows=9, tiles_per_window=10, splits=11, group=12, clusters=13, paced=14),
            dweight=GemmPlan(windows=15, tiles_per_window=16, splits=17, group=18, clusters=19, paced=20),
        ),
    ],
    ids=lambda group: type(group).__name__,
)
def test_a_frozen_group_has_the_same_numbers(group: Any):
    assert thawed(freeze(group)) == group


class Launches:
    """What stands for the compiled functions: the arguments of every launch are noted."""

    def __init__(self):
        self.forward: list[tuple] = []
        self.backward: list[tuple] = []

    def get(self, key: Key) -> Callable[..., None]:
        noted = self.backward if isinstance(key, BackwardKey) else self.forward
        return lambda *arguments: noted.append(arguments)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """An H100 that serves the CPU's bfloat16."""
    noted = Launches()
    monkeypatch.setitem(select._picked, (torch.device("cpu"), BF16), KERNELS)
    with planned_for(Gpu("sm_90a", 132), noted):
        yield noted


@contextlib.contextmanager
def lone_group() -> Iterator[dist.ProcessGroup]:
    """The group of this process alone."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def operands() -> tuple[Tensor, Tensor, Tensor]:
    case = random_case(40, 64, 1000, BF16)
    return case.input.requires_grad_(), case.linear_weight.requires_grad_(), case.target


def counted(monkeypatch: pytest.MonkeyPatch) -> tuple[Mock, Mock]:
    """What plans forwards and backwards, counting."""
    plans = Mock(wraps=forward_plans.plan), Mock(wraps=backward_plans.plan)
    for module, plan in zip((forward_plans, backward_plans), plans, strict=True):
        monkeypatch.setattr(module, "plan", plan)
    return plans


@pytest.mark.parametrize("schedule", ["recompute", "keep"])
def test_both_passes_of_a_kind_are_planned_once(schedule: str, launches: Launches, monkeypatch):
    """Whatever the loss's numbers are."""
    forward, backward = counted(monkeypatch)
    hidden, weight, target = operands()
    for ignore_index in (-100, 3, 5):
        loss = linear_cross_entropy(hidden, weight, target, schedule=schedule, ignore_index=ignore_index)
        torch.autograd.grad(loss, (hidden, weight))
        assert (forward.call_count, backward.call_count, len(prepared.cache)) == (1, 1, 1)
    for passed in (launches.forward, launches.backward):
        assert [thawed(arguments[3]) for arguments in passed] == [(2, -100), (2, 3), (2, 5)]


@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_sharded_calls_of_a_kind_are_prepared_once(sequence_dim: int | None, launches: Launches, monkeypatch):
    """The choice of a schedule takes longer than all else; and no op is dispatched to Python."""
    forward, backward = counted(monkeypatch)
    choose = Mock(wraps=KERNELS.choose)
    monkeypatch.setattr(type(KERNELS), "choose", choose)
    monkeypatch.setattr(sharded, "sharded_forward", None)
    monkeypatch.setattr(sharded, "sharded_backward", None)
    hidden, weight, target = operands()
    with lone_group() as group:
        for ignore_index in (-100, 3, 5):
            loss = linear_cross_entropy(
                *(hidden, weight, target),
                schedule="keep",
                ignore_index=ignore_index,
                tp_group=group,
                sequence_dim=sequence_dim,
            )
            torch.autograd.grad(loss, (hidden, weight))
            counts = choose.call_count, forward.call_count, backward.call_count, len(prepared.cache)
            assert counts == (1, 1, 1, 1)
    # Of Localize, as a shard's ignore_index is the same from there on.
    assert [thawed(arguments[1])[1] for arguments in launches.forward[::4]] == [-100, 3, 5]


@pytest.mark.parametrize("kept", [0, 512, 1000])
def test_the_ops_of_a_kind_are_planned_once(kept: int, launches: Launches, monkeypatch):
    """A backward's op finds what its forward's op prepared; other gradients are another backward."""
    forward, backward = counted(monkeypatch)
    hidden, weight, target = (tensor.detach() for tensor in operands())
    ops = torch.ops.cute_lce
    for _ in range(3):
        if kept:
            loss, *saved = ops.forward_keep(hidden, weight, target, "mean", -100, 1.0, 0, 0, kept)
        else:
            loss, *saved = *ops.forward(hidden, weight, target, "mean", -100, 1.0, 0, 0), None, None
        ops.backward(loss, hidden, weight, target, *saved, "mean", -100, 1.0, 0, 0, True, True)
        assert (forward.call_count, backward.call_count, len(prepared.cache)) == (1, 1, 1)
    assert len(launches.forward) == 3
    stripes = 2 if kept == 512 else 1
    assert len(launches.backward) == 3 * stripes
    for _ in range(2):
        ops.backward(loss, hidden, weight, target, *saved, "mean", -100, 1.0, 0, 0, False, True)
        assert (forward.call_count, backward.call_count, len(prepared.cache)) == (1, 2, 1)
    wanted = [tuple(address != 0 for address in arguments[6][:2]) for arguments in launches.backward]
    assert wanted == [(True, True)] * 3 * stripes + [(False, True)] * 2 * stripes


def test_stripes_are_frozen_once(launches: Launches):
    hidden, weight, target = operands()
    for _ in range(2):
        loss = linear_cross_entropy(hidden, weight, target, schedule="recompute", window=256)
        torch.autograd.grad(loss, (hidden, weight))
    stripes = [arguments[STRIPE] for arguments in launches.backward]
    assert [thawed(stripe)[:4] for stripe in stripes[:4]] == [
        (0, 256, 1, 0),
        (256, 256, 0, 0),
        (512, 256, 0, 0),
        (768, 232, 0, 1),
    ]
    for first, second in zip(stripes[:4], stripes[4:], strict=True):
        assert first is second


@pytest.mark.parametrize("which", [0, 1, 2], ids=Operands._fields)
def test_saved_operands_may_come_back_with_other_strides(which: int, launches: Launches):
    """As hooks on saved tensors give them: the kernels get copies that they can read."""
    given = operands()

    def unpack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() != given[which].data_ptr():
            return tensor
        apart = torch.stack([tensor, tensor], tensor.dim())[..., 0]
        assert apart.stride(-1) == 2
        return apart

    plain = linear_cross_entropy(*given, schedule="recompute")
    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        hooked = linear_cross_entropy(*given, schedule="recompute")
    for loss in (plain, hooked):
        torch.autograd.grad(loss, given[:2])
    assert len(launches.backward) == 2
    for launch in (*launches.forward, *launches.backward):
        for found, want in zip(launch, given, strict=False):
            assert found.stride() == want.stride()
            assert torch.equal(found, want)


@pytest.mark.parametrize("is_saved", [False, True], ids=["given", "saved"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=Operands._fields)
def test_negated_operands_are_copied(which: int, is_saved: bool, launches: Launches):
    """Behind a plain call of the same strides, for which the kernels read the operands in place: as
    arguments, or as hooks on saved tensors give them back."""
    given = [each.detach() for each in operands()]

    def changed(tensor: Tensor) -> Tensor:
        return negated(tensor) if tensor.data_ptr() == given[which].data_ptr() else tensor

    def call(tensors: list[Tensor]) -> None:
        leaves = [each.requires_grad_(each.is_floating_point()) for each in tensors]
        torch.autograd.grad(linear_cross_entropy(*leaves, schedule="recompute"), leaves[:2])

    call(given)
    if is_saved:
        with saved_tensors_hooks(lambda tensor: tensor, changed):
            call(given)
    else:
        call([changed(each.detach()) for each in given])
    assert len(launches.forward) == len(launches.backward) == 2
    for launch in (*launches.forward, *launches.backward):
        for found, want in zip(launch[:3], given, strict=True):
            assert not found.is_neg()
            assert torch.equal(found, want)


def test_the_cache_is_empty_before_the_interpreter_ends():
    """It may hold process groups, whose threads outlive modules."""
    code = """
import atexit
atexit.register(lambda: print(len(prepared.cache)))
from cute_lce.ops import prepared
prepared.cache[("key",)] = object()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "0"


def test_kept_logits_are_overwritten_and_freed(launches: Launches):
    """A second backward recomputes: its kernels are given no kept logits."""
    hidden, weight, target = operands()
    numbers = linear_logprob(hidden, weight, target, outputs=("lse", "entropy"), schedule="keep")
    outputs = [each for each in numbers if each is not None]
    for _ in range(2):
        torch.autograd.grad(outputs, (hidden, weight), [torch.ones(40)] * 2, retain_graph=True)
    first, second = launches.backward
    assert first[7].dlogits in thawed(first[3])
    assert second[7].dlogits not in thawed(second[3])
    assert len(second[3]) < len(first[3])


def test_kept_logits_that_hooks_packed_are_neither_overwritten_nor_freed(launches: Launches):
    """Hooks may give back a part of a larger storage: here one of two copies."""
    hidden, weight, target = operands()
    pairs: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        pairs.append(torch.stack([tensor.detach()] * 2))
        return pairs[-1]

    with saved_tensors_hooks(pack, lambda pair: pair[1]):
        numbers = linear_logprob(hidden, weight, target, outputs=("lse", "entropy"), schedule="keep")
    sizes = [pair.untyped_storage().nbytes() for pair in pairs]
    (kept,) = [pair[1].data_ptr() for pair in pairs if pair.dtype is torch.float16 and len(pair[1]) == 40]
    outputs = [each for each in numbers if each is not None]
    for _ in range(2):
        torch.autograd.grad(outputs, (hidden, weight), [torch.ones(40)] * 2, retain_graph=True)
    assert len(launches.backward) == 2
    for launch in launches.backward:
        assert kept in thawed(launch[3])
        assert launch[7].dlogits != kept
    assert [pair.untyped_storage().nbytes() for pair in pairs] == sizes


def addresses(launch: tuple) -> tuple:
    """Where a backward's launch finds the statistics, and what was kept with its scales."""
    source = launch[7]
    return tuple(launch[5]), (source.dlogits, source.kept_scale, source.pitch) if source.kept_scale else ()


@pytest.mark.parametrize("kept", [0, 512, 1000])
def test_what_was_packed_is_unpacked_for_the_dispatcher(kept: int, launches: Launches, monkeypatch):
    """A backward that is itself recorded goes through the op, which takes each tensor of its own."""
    monkeypatch.setattr(type(KERNELS), "choose", lambda *_, **__: ("keep" if kept else "recompute", kept))
    hidden, weight, target = operands()
    loss = linear_cross_entropy(hidden, weight, target)
    torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    stripes = len(launches.backward)
    torch.autograd.grad(loss, (hidden, weight), create_graph=True)
    packed, unpacked = launches.backward[:stripes], launches.backward[stripes:]
    assert stripes == (2 if kept == 512 else 1)
    assert [*map(addresses, packed)] == [*map(addresses, unpacked)]
    outputs = launches.forward[0][4]
    assert tuple(packed[0][5]) == (outputs.row_max, outputs.row_sum, outputs.num_valid)
    if kept:
        keep = launches.forward[0][7]
        assert addresses(packed[0])[1] == (keep.kept, keep.kept_scale, keep.pitch)


@pytest.mark.parametrize("schedule", ["recompute", "keep"])
def test_how_often_a_call_allocates(schedule: str, launches: Launches, monkeypatch):
    """Each takes some microseconds on a GPU. A forward: the loss, a workspace, and what it leaves to the
    backward; that: both gradients and a workspace."""
    hidden, weight, target = operands()

    def call() -> None:
        loss = linear_cross_entropy(hidden, weight, target, schedule=schedule)
        allocated.append(made.call_count)
        torch.autograd.grad(loss, (hidden, weight))
        allocated.append(made.call_count)

    made, allocated = Mock(wraps=torch.empty_like), []
    call()
    monkeypatch.setattr(torch, "empty_like", made)
    for name in ("empty", "zeros", "zeros_like", "full"):
        monkeypatch.setattr(torch, name, None)
    allocated.clear()
    call()
    assert allocated == [3, 6]


def test_calls_of_a_kind_may_be_interleaved():
    """What one call's phases pass on is its own."""
    cases = [random_case(20, 8, 50, torch.float32, seed=seed) for seed in (1, 2)]
    loss = LossOptions("none")
    backward = STREAMING.backward(passes.operands_of(cases[0]), loss, Request())
    dlosses = [case.upstream("none").float() for case in cases]
    saved = [passes.saved_of(case, passes.forward(STREAMING, case)) for case in cases]
    first = [backward.dinput(*given, loss) for given in zip(dlosses, saved, strict=True)]
    for case, dloss, given, gradients in zip(cases, dlosses, saved, first, strict=True):
        dinput, dweight = backward.dweight(dloss, given, loss, gradients)
        _, *expected = case.expected(dloss.double(), "none")
        _, *baseline = case.baseline(dloss.double(), "none")
        for name, found, want, plain in zip(
            ("dinput", "dweight"), (dinput, dweight), expected, baseline, strict=True
        ):
            assert found is not None
            assert_close(name, found, want, plain)


def test_copies_of_operands_are_logged_once_for_all_numbers_of_tokens(caplog: pytest.LogCaptureFixture):
    device._copied.clear()
    with caplog.at_level("WARNING", "cute_lce"):
        for tokens in (5, 7, 9):
            device.aligned_rows("input", torch.zeros((tokens, 12), dtype=BF16))
        device.aligned_rows("linear_weight", torch.zeros((30, 12), dtype=BF16))
    assert [record.args[0] for record in caplog.records] == ["input", "linear_weight"]  # pyright: ignore
