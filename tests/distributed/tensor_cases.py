"""Cases of tensor and sequence parallelism, for any number of ranks and for CPUs as for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from cute_lce import environment, linear_cross_entropy
from cute_lce.plan import memory
from tests.distributed.calls import check, shard_sizes, slice_of
from tests.distributed.ranks import Rank
from tests.numerics import Case, assert_close, make, random_case

REDUCTIONS = ("mean", "sum", "none")
SCHEDULES: tuple[dict, ...] = (
    {},
    {"schedule": "recompute", "window": 64},
    {"schedule": "keep", "workspace_mb": 64},
)


def ignoring(case: Case) -> Case:
    target = case.target.clone()
    target.view(-1)[1::4] = case.ignore_index
    return replace(case, target=target)


def poisoned(case: Case) -> Case:
    """Ignored rows are nan."""
    ignored = (case.target == case.ignore_index).unsqueeze(-1)
    return replace(case, input=case.input.masked_fill(ignored, torch.nan))


def shaped(case: Case, *shape: int) -> Case:
    """The same tokens in other dimensions."""
    return replace(case, input=case.input.view(*shape, -1), target=case.target.view(*shape))


def equal_shards(here: Rank) -> None:
    for dtype in here.dtypes:
        case = ignoring(random_case(41, 48, 96 * here.ranks, dtype))
        for reduction in REDUCTIONS:
            for options in SCHEDULES:
                check(here, case, reduction=reduction, **options)


def uneven_shards(here: Rank) -> None:
    for name in ("ragged", "confident", "jumps", "leading", "strided", "int32"):
        case = make(name, here.dtypes[0])
        check(here, case, sizes=shard_sizes(case.linear_weight.shape[0], here.ranks), reduction="none")
    case = replace(case, logit_scale=0.3)
    check(here, case, sizes=shard_sizes(case.linear_weight.shape[0], here.ranks), reduction="mean")
    # A rank with a single class, and padded features.
    case = random_case(33, 37, 200 + here.ranks, torch.bfloat16)
    sizes = [200 + here.ranks - (here.ranks - 1), *[1] * (here.ranks - 1)]
    for options in SCHEDULES:
        check(here, case, sizes=sizes, **options)


def losses_of_any_number_of_ranks(here: Rank) -> None:
    """With a window that divides the shards, the loss has the same bits over groups of every size."""
    window = 64
    groups: dict[int, ProcessGroup] = {here.ranks: here.group}
    for size in (1, 2):
        for first in range(0, here.ranks, size):
            group = dist.new_group(list(range(first, first + size)))
            if isinstance(group, ProcessGroup) and first <= here.rank < first + size:
                groups[size] = group
    for dtype in here.dtypes:
        case = ignoring(random_case(41, 48, 2 * window * here.ranks, dtype)).to(here.device)
        for reduction in REDUCTIONS:
            options: dict = {"schedule": "recompute", "window": window, "reduction": reduction}
            check(here, case, **options)
            losses = []
            for group in groups.values():
                weight = case.linear_weight.chunk(group.size())[group.rank()]
                losses.append(
                    linear_cross_entropy(case.input, weight, case.target, tp_group=group, **options)
                )
            for loss in losses[1:]:
                assert torch.equal(loss, losses[0])


def real_vocabularies(here: Rank) -> None:
    """Vocabularies that the ranks do not divide: the last shard is smaller; and features of a real model."""
    for V in (50257, 151936):
        size = -(-V // here.ranks)
        sizes = [*[size] * (here.ranks - 1), V - size * (here.ranks - 1)]
        case = ignoring(random_case(300, 1536, V, torch.bfloat16))
        for schedule in ("auto", "recompute", "keep"):
            check(here, case, sizes=sizes, schedule=schedule, workspace_mb=400)
        # Another number of SMs than the group's collectives take, and so many that no GEMM has one.
        for margin in (0, 64, 1000):
            check(here, case, sizes=sizes, sm_margin=margin)


def shards_in_another_order(here: Rank) -> None:
    case = random_case(20, 32, 64 * here.ranks, torch.float32).to(here.device)
    start = 64 * (here.ranks - 1 - here.rank)
    weight = case.linear_weight[start : start + 64].clone().requires_grad_()
    loss = linear_cross_entropy(case.input, weight, case.target, tp_group=here.group, vocab_start=start)
    loss.backward()
    assert weight.grad is not None
    expected, baseline = case.expected(), case.baseline()
    assert_close("loss", loss.detach(), expected[0], baseline[0])
    rows = slice(start, start + 64)
    assert_close("dweight", weight.grad, expected[2][rows], baseline[2][rows])


def ignored_rows(here: Rank) -> None:
    case = random_case(9, 32, 40 * here.ranks, torch.float32)
    everything = replace(case, target=torch.full_like(case.target, 3), ignore_index=3)
    for reduction in REDUCTIONS:
        check(here, everything, reduction=reduction)
    # A class that is ignored, of which another has the number in a later shard.
    target = case.target.clone()
    target[2], target[4] = 7, 40 + 7
    check(here, replace(case, target=target, ignore_index=7), reduction="none")
    case.input[5, 0] = torch.nan
    case.target[5] = -100
    start = 40 * here.rank
    hidden = case.input.to(here.device).requires_grad_()
    weight = case.linear_weight[start : start + 40].to(here.device).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, case.target.to(here.device), tp_group=here.group)
    loss.backward()
    assert loss.isfinite()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def compacted_tokens(here: Rank) -> None:
    """None, one, some or all rows are ignored, and those are nan; by kernels, of any size, compacted. n d is
    no multiple of three ranks, or the tokens are in slices."""
    every = slice(0), slice(1), slice(1, None, 3), slice(-1), slice(None)
    calls: tuple[tuple[int, dict], ...] = (
        (79, {"schedule": "keep", "workspace_mb": 64}),
        (79, {"schedule": "recompute", "window": 64}),
        (78 + here.ranks - 78 % here.ranks, {"sequence_dim": 0}),
    )
    with (
        mock.patch.object(memory, "LEAST_COMPACTED", 0),
        mock.patch.object(memory, "LEAST_VOCAB", 0),
    ):
        for n, options in calls:
            for ignored in every:
                case = random_case(n, 56, 144 * here.ranks, torch.bfloat16)
                case.target[ignored] = case.ignore_index
                check(here, poisoned(case), clean=case, **options)


def one_operand(here: Rank) -> None:
    case = random_case(20, 32, 64 * here.ranks, torch.float32)
    for options in SCHEDULES:
        check(here, case, need_dinput=False, **options)
        check(here, case, need_dweight=False, reduction="none", **options)
        check(here, case, need_dinput=False, need_dweight=False, **options)
    case = case.to(here.device)
    hidden = case.input.clone().requires_grad_()
    weight = slice_of(case.linear_weight, here, 0)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, case.target, tp_group=here.group)
    assert not loss.requires_grad
    assert_close("loss", loss, case.expected()[0], case.baseline()[0])


def targets_in_no_shard(here: Rank) -> None:
    case = random_case(24, 32, 64 * here.ranks, torch.float32).to(here.device)
    case.target[7] = 64 * here.ranks + 3
    hidden = case.input.clone().requires_grad_()
    weight = slice_of(case.linear_weight, here, 0).clone().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, case.target, tp_group=here.group, reduction="none")
    loss.sum().backward()
    row = torch.arange(24, device=here.device) == 7
    assert torch.equal(loss.isnan(), row)
    assert hidden.grad is not None
    assert torch.equal(hidden.grad.isnan().any(1), row)
    assert here.is_same(loss.detach())
    # Shards that are not equal, though nobody says where they begin.
    weight = case.linear_weight[: 64 - here.rank].clone()
    loss = linear_cross_entropy(case.input, weight, case.target, tp_group=here.group)
    assert loss.isnan()
    # Shards that overlap: a target in two of them.
    start = 0 if here.rank < 2 else 64 * here.rank
    weight = case.linear_weight[start : start + 64].clone()
    loss = linear_cross_entropy(
        case.input, weight, case.target, tp_group=here.group, vocab_start=start, reduction="none"
    )
    assert torch.equal(loss.isnan(), (case.target < 128) | row)


def a_shard_of_minus_infinity(here: Rank) -> None:
    case = random_case(24, 32, 64 * here.ranks, torch.float32).to(here.device)
    case.input[:, 0], case.linear_weight[:, 0] = 1, 0
    last = 64 * (here.ranks - 1)
    case.linear_weight[last:, 0] = -torch.inf
    target = case.target % last
    rest = replace(case, linear_weight=case.linear_weight[:last], target=target)
    hidden = case.input.clone().requires_grad_()
    weight = slice_of(case.linear_weight, here, 0).clone().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target, tp_group=here.group, reduction="none")
    loss.sum().backward()
    ones = torch.ones(24, dtype=torch.float64, device=here.device)
    expected, baseline = rest.expected(ones, "none"), rest.baseline(ones, "none")
    assert_close("loss", loss.detach(), expected[0], baseline[0])
    assert hidden.grad is not None
    # What 0 times -inf makes of dinput stays in feature 0, as in torch.
    assert_close("dinput", hidden.grad[:, 1:], expected[1][:, 1:], baseline[1][:, 1:])
    assert weight.grad is not None
    if here.rank == here.ranks - 1:
        assert not weight.grad.any()


def partial_gradients(here: Rank) -> None:
    for dtype in here.dtypes:
        case = ignoring(random_case(41, 48, 64 * here.ranks, dtype)).to(here.device)
        hidden = case.input.clone().requires_grad_()
        weight = slice_of(case.linear_weight, here, 0).clone().requires_grad_()
        linear_cross_entropy(
            hidden, weight, case.target, tp_group=here.group, grad_input="partial", reduction="sum"
        ).backward()
        assert hidden.grad is not None
        assert hidden.grad.dtype is dtype
        assert not here.is_same(hidden.grad)
        total = hidden.grad.double()
        dist.all_reduce(total, group=here.group)
        expected, baseline = case.expected(reduction="sum"), case.baseline(reduction="sum")
        # Each part was rounded: the parts are larger than their sum.
        parts = 2.0**-8 if dtype is torch.bfloat16 else 0.0
        assert_close("dinput", total.to(dtype), expected[1], baseline[1], rounding=parts)


def slices_of_tokens(here: Rank) -> None:
    b, s, ranks = 2, 3, here.ranks
    for dtype in here.dtypes:
        flat = ignoring(random_case(4 * ranks, 40, 72 * ranks, dtype))
        check(here, flat, sequence_dim=0, reduction="sum", schedule="keep", workspace_mb=64)
        case = ignoring(random_case(b * s * ranks, 40, 72 * ranks, dtype, seed=1))
        for whole, dim in ((shaped(case, b, s * ranks), 1), (shaped(case, b * ranks, s), 0)):
            for reduction in REDUCTIONS:
                check(here, whole, sequence_dim=dim, reduction=reduction)
                check(here, whole, sequence_dim=dim, reduction=reduction, sliced_target=True)
    case = ignoring(random_case(2 * 3 * 5 * ranks, 33, 50 * ranks, torch.bfloat16))
    check(here, shaped(case, 2, 3 * ranks, 5), sequence_dim=-2, reduction="none")
    check(here, shaped(case, 2, 3 * ranks, 5), sequence_dim=1, need_dinput=False)
    check(here, shaped(case, 2, 3 * ranks, 5), sequence_dim=1, need_dweight=False, sliced_target=True)


def retained_graphs(here: Rank) -> None:
    """A backward again, of another upstream gradient, and under activation checkpointing."""
    case = random_case(24, 32, 64 * here.ranks, torch.float32).to(here.device)
    for options in SCHEDULES:
        hidden = case.input.clone().requires_grad_()
        weight = slice_of(case.linear_weight, here, 0).clone().requires_grad_()

        def run(hidden: Tensor, weight: Tensor, options=options) -> Tensor:
            return linear_cross_entropy(hidden, weight, case.target, tp_group=here.group, **options)

        loss = run(hidden, weight)
        first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        twice = torch.autograd.grad(loss, (hidden, weight), torch.tensor(2.0, device=here.device))
        again = checkpoint(run, hidden, weight, use_reentrant=False)
        assert isinstance(again, Tensor)
        checkpointed = torch.autograd.grad(again, (hidden, weight))
        for one, two, three in zip(first, twice, checkpointed, strict=True):
            assert torch.equal(one, three)
            assert torch.allclose(2 * one, two)


def added_to_a_buffer(here: Rank) -> None:
    for dtype in here.dtypes:
        case = ignoring(random_case(24, 32, 64 * here.ranks, dtype)).to(here.device)
        expected, baseline = case.expected(), case.baseline()
        for options in SCHEDULES:
            hidden = case.input.clone().requires_grad_()
            weight = slice_of(case.linear_weight, here, 0).clone().requires_grad_()
            out = torch.zeros_like(weight, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
            out.requires_grad_(False)
            loss = linear_cross_entropy(
                hidden, weight, case.target, tp_group=here.group, grad_weight_out=out, **options
            )
            loss.backward()
            assert weight.grad is None
            assert hidden.grad is not None
            assert_close("dinput", hidden.grad, expected[1], baseline[1])
            want, plain = (slice_of(each[2], here, 0) for each in (expected, baseline))
            assert_close("dweight", out, want, plain.to(out.dtype))


def compiled_graphs(here: Rank) -> None:
    """The whole call in one graph, the group's name in the op."""

    def run(hidden, weight, target, **options):
        return linear_cross_entropy(hidden * 1.0, weight, target, tp_group=here.group, **options)

    backend = "inductor" if here.device != "cpu" else "aot_eager"
    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=False)
    case = ignoring(random_case(4 * here.ranks, 32, 64 * here.ranks, torch.float32)).to(here.device)
    for options in (
        {"reduction": "none"},
        {"schedule": "keep", "workspace_mb": 64},
        {"sequence_dim": 0},
        {"sequence_dim": 0, "reduction": "none", "sliced": True},
    ):
        sliced = bool(options.pop("sliced", False))
        hidden = slice_of(case.input, here, 0) if "sequence_dim" in options else case.input
        target = slice_of(case.target, here, 0) if sliced else case.target
        found = []
        for function in (run, compiled):
            own = hidden.clone().requires_grad_()
            weight = slice_of(case.linear_weight, here, 0).clone().requires_grad_()
            loss = function(own, weight, target, **options)
            loss.sum().backward()
            assert own.grad is not None
            assert weight.grad is not None
            found.append((loss.detach(), own.grad, weight.grad))
        for eager, graph in zip(*found, strict=True):
            assert torch.equal(eager, graph)


def autocast(here: Rank) -> None:
    case = random_case(24, 32, 64 * here.ranks, torch.float32).to(here.device)
    weight = slice_of(case.linear_weight, here, 0).clone().requires_grad_()
    with torch.autocast(here.device.partition(":")[0], torch.bfloat16):
        loss = linear_cross_entropy(case.input, weight, case.target, tp_group=here.group)
    loss.backward()
    narrow = replace(case, input=case.input.bfloat16(), linear_weight=case.linear_weight.bfloat16())
    assert loss.dtype is torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32
    assert_close("loss", loss.detach(), narrow.expected()[0], narrow.baseline()[0])


def check_replays(here: Rank, call: Callable[..., Sequence[Tensor]], *, sliced: bool = False) -> None:
    """call (hidden, weight, target) -> numbers, of which the floating ones are differentiated. A graph of it
    and of its gradients, captured once and replayed with other values, has an eager call's bits. sliced:
    whether hidden is a slice of the tokens."""
    first, second = (
        ignoring(random_case(64 * here.ranks, 64, 128 * here.ranks, torch.bfloat16, seed=seed))
        for seed in (0, 1)
    )
    hidden = (slice_of(first.input, here, 0) if sliced else first.input).to(here.device, copy=True)
    weight = slice_of(first.linear_weight, here, 0).to(here.device, copy=True)
    target = first.target.to(here.device, copy=True)
    hidden.requires_grad_()
    weight.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        numbers = call(hidden, weight, target)
        used = [each for each in numbers if each.requires_grad]
        upstream = [torch.ones_like(each) for each in used]
        return *numbers, *torch.autograd.grad(used, (hidden, weight), upstream)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # What looks for dead ranks, in a thread of its own, asks for events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = step()
    # The second first: results of the capture itself would pass for the first's.
    for case in (second, first):
        with torch.no_grad():
            hidden.copy_(slice_of(case.input, here, 0) if sliced else case.input)
            weight.copy_(slice_of(case.linear_weight, here, 0))
            target.copy_(case.target)
        graph.replay()
        torch.cuda.synchronize()
        for replayed, eager in zip(results, step(), strict=True):
            assert torch.equal(replayed.detach(), eager.detach())


def captured_graphs(here: Rank) -> None:
    """Replayed with other values, collectives included; on GPUs alone."""
    smoothed = {"label_smoothing": 0.1, "z_loss": 0.1}
    for options in (*SCHEDULES, {"sequence_dim": 0}, {**smoothed, "sequence_dim": 0}, smoothed):

        def call(*operands: Tensor, options: dict = options) -> list[Tensor]:
            return [linear_cross_entropy(*operands, tp_group=here.group, **options)]

        check_replays(here, call, sliced="sequence_dim" in options)


def refusals(here: Rank) -> None:
    case = random_case(4 * here.ranks, 16, 8 * here.ranks, torch.float32).to(here.device)
    hidden, weight = case.input, slice_of(case.linear_weight, here, 0)
    for error, name, options in (
        (ValueError, "schedule", {"schedule": "grad_in_forward"}),
        (TypeError, "tp_group", {"tp_group": "tp"}),
        (ValueError, "vocab_start", {"tp_group": None, "vocab_start": 0}),
        (ValueError, "sequence_dim", {"tp_group": None, "sequence_dim": 0}),
        (ValueError, "grad_input", {"tp_group": None, "grad_input": "partial"}),
        (ValueError, "grad_input", {"grad_input": "summed"}),
        (ValueError, "grad_input", {"grad_input": "partial", "sequence_dim": 0}),
        (ValueError, "vocab_start", {"vocab_start": -1}),
        (TypeError, "vocab_start", {"vocab_start": 0.5}),
        (ValueError, "sm_margin", {"tp_group": None, "sm_margin": 8}),
        (ValueError, "sm_margin", {"sm_margin": -1}),
        (TypeError, "sm_margin", {"sm_margin": 0.5}),
        (ValueError, "sequence_dim", {"sequence_dim": 1}),
        (TypeError, "sequence_dim", {"sequence_dim": 0.0}),
        (ValueError, "target", {"sequence_dim": 0, "target": case.target[:-1]}),
        (ValueError, "target", {"target": case.target[:-1]}),
        (ValueError, "workspace_mb", {"workspace_mb": 1e-6}),
    ):
        given = {"tp_group": here.group, "target": case.target, **options}
        with pytest.raises(error, match=f"^{name}: got"):
            linear_cross_entropy(hidden.requires_grad_(), weight, given.pop("target"), **given)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(
            linear_cross_entropy(hidden, weight, case.target, tp_group=here.group),
            hidden,
            create_graph=True,
        )


def ranks_that_differ(here: Rank) -> None:
    """CUTE_LCE_CHECK_RANKS=1: the same error on every rank."""
    case = random_case(8, 16, 8 * here.ranks, torch.float32).to(here.device)
    weight = slice_of(case.linear_weight, here, 0)
    environment.CHECK_RANKS = True
    try:
        linear_cross_entropy(case.input, weight, case.target, tp_group=here.group)
        with pytest.raises(ValueError, match="differ in target's values"):
            linear_cross_entropy(case.input, weight, (case.target + here.rank) % 8, tp_group=here.group)
        reduction = "sum" if here.rank else "mean"
        with pytest.raises(ValueError, match="differ in the loss's options"):
            linear_cross_entropy(case.input, weight, case.target, tp_group=here.group, reduction=reduction)
        with pytest.raises(ValueError, match="differ in linear_weight's rows, without vocab_start"):
            linear_cross_entropy(case.input, weight[here.rank :], case.target, tp_group=here.group)
        with pytest.raises(ValueError, match="differ in workspace_mb, beside a window"):
            linear_cross_entropy(
                *(case.input, weight, case.target),
                tp_group=here.group,
                window=4,
                workspace_mb=100 + here.rank,
            )
        if here.ranks > 1:
            with pytest.raises(ValueError, match="vocab_start: got ranks with the classes 0 to 7, 0 to 7"):
                linear_cross_entropy(case.input, weight, case.target, tp_group=here.group, vocab_start=0)
    finally:
        environment.CHECK_RANKS = False


def no_tokens(here: Rank) -> None:
    case = random_case(0, 16, 8 * here.ranks, torch.float32).to(here.device)
    for sequence_dim in (None, 0):
        hidden = case.input.clone().requires_grad_()
        weight = slice_of(case.linear_weight, here, 0).clone().requires_grad_()
        loss = linear_cross_entropy(
            hidden, weight, case.target, tp_group=here.group, sequence_dim=sequence_dim
        )
        loss.backward()
        assert loss == 0
        assert weight.grad is not None
        assert not weight.grad.any()


GPU_CASES = (real_vocabularies, captured_graphs)
CASES = (
    equal_shards,
    uneven_shards,
    losses_of_any_number_of_ranks,
    shards_in_another_order,
    ignored_rows,
    compacted_tokens,
    one_operand,
    targets_in_no_shard,
    a_shard_of_minus_infinity,
    partial_gradients,
    slices_of_tokens,
    retained_graphs,
    added_to_a_buffer,
    compiled_graphs,
    autocast,
    refusals,
    ranks_that_differ,
    no_tokens,
)
