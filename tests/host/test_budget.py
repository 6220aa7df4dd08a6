"""What a workspace costs: predicted times, the least that is accepted, and what is said of a slow one.

python -m tests.host.test_budget        prints the table of docs/tuning.md
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from cute_lce import LinearCrossEntropy, environment, linear_cross_entropy
from cute_lce.arch import ARCHITECTURES, Gpu
from cute_lce.launch import KERNELS, choose
from cute_lce.ops.select import implementation
from cute_lce.plan import backward, candidates, cost, forward, grad_in_forward, schedule
from cute_lce.plan.memory import (
    DEFAULT_WORKSPACE,
    SmallWorkspace,
    forward_bytes,
    forward_compaction_bytes,
    keeping_bytes,
    usable,
    workspace_for,
)
from cute_lce.plan.problem import KIB, MIB, NO_LIMITS, Limits, Problem
from tests.device import forget_plans, planned_for

H200 = Gpu("sm_90a", 132)
CROWDED = Problem(20480, 3584, 128256)
"""Its fp32 sum of dinput takes 280 MiB."""
NEEDS = ((True, True), (True, False), (False, True))
SCHEDULES = ("auto", "recompute", "keep")


def gpus() -> list[Gpu]:
    return [
        Gpu(name, row.sms, model=model)
        for name, row in ARCHITECTURES.items()
        for model in range(len(row.data_sheets))
    ]


def named(gpu: Gpu) -> str:
    return gpu.sheet.gpu


def problems(count: int, seed: int) -> Iterator[Problem]:
    draw = random.Random(seed)
    for i in range(count):
        n, d, V = (int(2 ** draw.uniform(*ends)) for ends in ((0, 16), (0, 10), (5, 18)))
        needs = draw.choice((*NEEDS, (True, True), (False, False)))
        kind = {"keeps_logits": i % 5 in (1, 2), "overwrites": i % 5 == 2}
        yield Problem(n, 8 * d, V, i % 5 == 4, *needs, **kind, need_dbias=i % 3 == 1 and any(needs))


def budgets(draw: random.Random, least: int) -> list[int]:
    """Bytes from the least accepted to more than any plan takes, and pairs that differ by one."""
    some = [int(least * 2 ** draw.uniform(0, 14)) for _ in range(12)]
    return sorted({least, *some, *(budget + 1 for budget in some), 1 << 42})


def within(gpu: Gpu, problem: Problem, wanted: str, workspace: int) -> schedule.Prediction:
    return schedule.predict(gpu, problem, wanted, Limits(workspace=workspace))


# ----------------------------------------------------------------------------------------------------------
# More is never slower


@pytest.mark.parametrize("gpu", gpus(), ids=named)
@pytest.mark.parametrize("wanted", ["auto", "recompute"])
def test_predicted_time_never_rises_with_the_workspace(gpu: Gpu, wanted: str):
    draw = random.Random(3)
    fell = 0
    table = [
        Problem(*sizes, half, *needs)
        for sizes in SHAPES
        for half, needs in ((False, NEEDS[0]), (True, NEEDS[1]))
    ]
    for problem in (CROWDED, *table, *problems(50, seed=1)):
        least = schedule.least_workspace(gpu, problem, wanted, NO_LIMITS)
        found = [within(gpu, problem, wanted, budget).seconds for budget in budgets(draw, least)]
        assert found == sorted(found, reverse=True), problem
        assert found[-1] == within(gpu, problem, wanted, least).best
        fell += found[0] > 1.2 * found[-1]
    assert fell > 5


# Of each kind of problem two; the long sweep has six more.
@pytest.mark.parametrize(
    "some", [slice(11), pytest.param(slice(11, None), marks=pytest.mark.emulator_full)], ids=["few", "many"]
)
@pytest.mark.parametrize("gpu", gpus(), ids=named)
def test_what_is_predicted_is_what_is_launched(gpu: Gpu, some: slice):
    """The plans of launch/, measured by the cost model, take what the choice between them was made by, and no
    more memory than they were given."""
    draw = random.Random(4)
    for problem in (CROWDED, *problems(40, seed=2))[some]:
        for wanted in SCHEDULES:
            least = schedule.least_workspace(gpu, problem, wanted, NO_LIMITS)
            for budget in (0, *budgets(draw, least)):
                limits = Limits(workspace=budget)
                _, kept = schedule.choose(gpu, problem, wanted, limits)
                reserved = forward_compaction_bytes(problem, kept)
                sizes = problem.n, problem.d, problem.vocab
                first = forward.plan(gpu, *sizes, limits, kept=kept, reserved=reserved)
                seconds = cost.forward_seconds(gpu, problem, first)
                if problem.wants_gradient:
                    second = backward.plan(gpu, problem, kept, limits)
                    seconds += cost.backward_seconds(gpu, problem, second)
                    assert second.workspace <= usable(budget or max(DEFAULT_WORKSPACE, least))
                predicted = schedule.predict(gpu, problem, wanted, limits).seconds
                assert seconds == pytest.approx(predicted, rel=1e-12)


def test_the_default_is_raised_to_what_auto_accepts():
    raised = 0
    for gpu in gpus():
        for sizes in ((65536, 512, 50257), (100000, 640, 262208)):
            problem = Problem(*sizes, need_dweight=False)
            default = schedule.predict(gpu, problem, "auto", NO_LIMITS)
            assert default.seconds <= max(1.8 * default.floor, 1.5 * default.best)
            raised += schedule.least_workspace(gpu, problem, "auto", NO_LIMITS) > DEFAULT_WORKSPACE
    assert raised


def test_keep_keeps_what_auto_finds_too_little_to_gain_from():
    for problem in (Problem(100, 64, 5000), Problem(1, 512, 5000)):
        assert schedule.choose(H200, problem, "auto", NO_LIMITS) == ("recompute", 0)
        assert schedule.choose(H200, problem, "keep", NO_LIMITS) == ("keep", 5000)
    assert schedule.choose(H200, Problem(64, 4096, 128256), "auto", NO_LIMITS) == ("keep", 128256)


@pytest.mark.parametrize("gpu", gpus(), ids=named)
@pytest.mark.parametrize("window", [0, 1000])
def test_no_candidate_is_below_the_bound_that_spares_looking_at_it(gpu: Gpu, window: int):
    # Kept logits of the last two take the fewest bytes in one stripe, or in one narrower than the window.
    few = Problem(4096, 4096, 4096, keeps_logits=True), Problem(333, 512, 1111, keeps_logits=True)
    for problem in (*problems(40, seed=5), *few):
        if not problem.wants_gradient:
            continue
        some = candidates.Candidates(gpu, problem, window)
        for kept in some.kept[1:]:
            clocks, nbytes = some.least(kept)
            for candidate in some.keeping(kept):
                assert candidate.clocks >= clocks
                assert candidate.bytes >= nbytes


def test_two_sweeps_serve_where_the_sum_of_dinput_leaves_no_room():
    """At 340 MiB the sum leaves stripes of 1024 columns; two sweeps take five GEMMs instead of three."""
    for mb, sweeps, most in ((300, 2, 1.78), (340, 2, 1.78), (400, 1, 1.63), (1400, 1, 1.4)):
        limits = Limits(workspace=mb * MIB)
        plan = backward.plan(H200, CROWDED, 0, limits)
        assert (len(plan.chunks) > 0) == (sweeps == 2)
        predicted = schedule.predict(H200, CROWDED, "recompute", limits)
        assert 4 / 3 < predicted.seconds / predicted.floor < most
    # A window orders a row's additions: stripes it is, as many as it takes.
    assert not backward.plan(H200, CROWDED, 0, Limits(512, 340 * MIB)).chunks


def test_planning_is_cheap():
    """Few thousand GEMMs are compared for a new number of tokens, some microseconds each."""
    counted = 0
    clocks = cost.Gemm.clocks

    def counting(self, *sizes):
        nonlocal counted
        counted += 1
        return clocks(self, *sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost.Gemm, "clocks", counting)
        for problem in (CROWDED, Problem(300, 2880, 201088), Problem(32768, 4096, 262144)):
            for limits in (NO_LIMITS, Limits(workspace=500 * MIB)):
                forget_plans()
                counted = 0
                _, kept = schedule.choose(H200, problem, "auto", limits)
                backward.plan(H200, problem, kept, limits)
                assert 100 < counted < 4000


# ----------------------------------------------------------------------------------------------------------
# The least that is accepted


@pytest.mark.parametrize("gpu", gpus(), ids=named)
def test_the_least_is_accepted_and_less_is_refused(gpu: Gpu):
    """It is the least that is predicted within 1.8 times the GEMMs, or 1.5 times the best where none is."""
    near = 0
    for problem in (CROWDED, *problems(60, seed=6)):
        for wanted in SCHEDULES:
            least = schedule.least_workspace(gpu, problem, wanted, NO_LIMITS)
            schedule.choose(gpu, problem, wanted, Limits(workspace=least))
            # "keep" may be slower than "auto", and takes the same workspace.
            fastest = "auto" if wanted == "keep" else wanted
            predicted = within(gpu, problem, fastest, least)
            most = 1.8 * predicted.floor
            if predicted.best > most:
                most = 1.5 * predicted.best
                near += 1
            assert predicted.seconds <= most
            if least > smallest(problem, wanted):
                assert within(gpu, problem, fastest, least - 1).seconds > most
            for less in (least - 1, int(0.9 * least), 1):
                with pytest.raises(ValueError, match="workspace_mb: got") as refused:
                    schedule.choose(gpu, problem, wanted, Limits(workspace=less))
            named = float(str(refused.value).split("at least ")[1].split()[0])
            assert least <= named * MIB <= 1.00001 * least + 1
    assert near > 5


def smallest(problem: Problem, wanted: str) -> int:
    """Bytes below which no call runs, however slow: of the forward, and of the narrowest stripes or, where
    all columns are kept, of none."""
    call = schedule._call(H200, problem, 0)
    return min(
        max(
            schedule.forward_bytes(problem, kept) + schedule.keeping_bytes(problem.n, kept),
            workspace_for(call._backwards(kept)[0].bytes),
        )
        for kept in {0, call.kept(wanted)[-1]}
    )


def test_it_is_lower_where_the_sum_crowds_and_higher_where_stripes_would_be_tiny():
    assert schedule.least_workspace(H200, CROWDED, "auto", NO_LIMITS) < 4 * CROWDED.n * CROWDED.d
    few = Problem(4096, 4096, 128256, need_dinput=False)
    # 64 columns at once would take a launch for each.
    assert schedule.least_workspace(H200, few, "auto", NO_LIMITS) > 3 * 2 * few.n * 64


def test_an_explicit_window_is_exempt():
    problem = Problem(8192, 4096, 131072)
    schedule.choose(H200, problem, "recompute", Limits(64, 200 * MIB))
    with pytest.raises(ValueError, match=r"workspace_mb: got 100, want at least 129\.694"):
        schedule.choose(H200, problem, "recompute", Limits(64, 100 * MIB))


# n, d, V, whether the weight needs a gradient, MiB, reduction -> what "auto" is in an eager call.
ACCUMULATING = [
    (32768, 4096, 262144, True, 5837, "mean", "grad_in_forward"),
    (32768, 4096, 262144, True, 5837, "none", "keep"),
    (8192, 4096, 131072, False, 358, "none", "grad_in_forward"),
    (8192, 4096, 131072, True, 2304, "mean", "keep"),
    (8192, 4096, 131072, True, 358, "mean", "recompute"),
    (1024, 1024, 32768, True, 0, "mean", "keep"),
]


@pytest.mark.parametrize(("n", "d", "V", "trains_weight", "mb", "reduction", "wanted"), ACCUMULATING)
def test_auto_accumulates_where_that_is_faster(n, d, V, trains_weight, mb, reduction, wanted):
    problem, limits = Problem(n, d, V, need_dweight=trains_weight), Limits(workspace=mb * MIB)
    call = problem, torch.bfloat16, torch.device("cuda"), "auto", reduction
    with planned_for(H200):
        assert KERNELS.choose(*call, limits, may_accumulate=True)[0] == wanted
        assert KERNELS.choose(*call, limits)[0] != "grad_in_forward"
        windowed = limits._replace(window=4096)
        assert KERNELS.choose(*call, windowed, may_accumulate=True)[0] != "grad_in_forward"


# ----------------------------------------------------------------------------------------------------------
# Symbolic sizes


def symbol(env: ShapeEnv, value: int) -> torch.SymInt:
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(f"n{value}")
    made = env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
    found = env.create_symintnode(made, hint=value, source=source)
    assert isinstance(found, torch.SymInt)
    return found


@pytest.mark.parametrize("keeps_logits", [False, True])
@pytest.mark.parametrize("workspace", [0, 700 * MIB, 2200 * MIB])
def test_a_graph_keeps_what_fits_for_other_numbers_of_tokens(workspace: int, keeps_logits: bool):
    """With a symbolic n: the plan's choice for the n of the trace, and no guard on that n."""
    limits, device = Limits(workspace=workspace), torch.device("cuda")
    for n in (1000, 8192, 20480):
        env = ShapeEnv()
        with planned_for(H200):
            sizes: Any = symbol(env, n), 4096, 131072
            problem = Problem(*sizes, keeps_logits=keeps_logits)
            found, kept = KERNELS.choose(problem, torch.bfloat16, device, "auto", "mean", limits)
            wanted = KERNELS.choose(problem._replace(n=n), torch.bfloat16, device, "auto", "mean", limits)
        assert found == wanted[0]
        columns = kept.node.hint if isinstance(kept, torch.SymInt) else kept
        # A plan has steps; a graph has what fits beside the plan's stripes.
        assert wanted[1] - 256 * keeps_logits <= columns <= wanted[1] + 131072 // candidates.KEPT_STEPS + 256
        assert all("Eq(" not in str(guard.expr) for guard in env.guards), "made for one n alone"


@pytest.mark.parametrize("window", [0, 64, 256, 1000, 300000])
def test_a_graph_accepts_what_a_call_of_its_sizes_does(window: int):
    draw = random.Random(4)
    for _ in range(40):
        problem = some_problem(draw)
        least = schedule.least_workspace(H200, problem, "recompute", Limits(window))
        assert schedule.kept_of_any(H200, problem, problem, 0, Limits(window, least)) == 0
        with pytest.raises(SmallWorkspace, match="workspace_mb"):
            schedule.kept_of_any(H200, problem, problem, 0, Limits(window, KIB))


def some_problem(draw: random.Random) -> Problem:
    d, vocab = draw.choice((128, 256, 768, 2880, 4096)), draw.choice((4000, 32768, 50257, 131072))
    needs = draw.choice(((True, True), (True, True), (True, False), (False, True)))
    kinds = {"keeps_logits": draw.random() < 0.3, "shard": draw.random() < 0.2}
    kinds["need_dbias"] = draw.random() < 0.2
    return Problem(int(2 ** draw.uniform(6, 15)), d, vocab, draw.random() < 0.3, *needs, **kinds)


@pytest.mark.parametrize("windowed", [False, True])
def test_what_a_graph_keeps_fits_for_other_numbers_of_tokens(windowed: bool):
    """In both passes, if the workspace holds what recomputes."""
    draw, kept_some = random.Random(3), 0
    for _ in range(120):
        problem = some_problem(draw)
        window = draw.choice((64, 256, 1000, 5120)) if windowed else 0
        least = schedule.least_workspace(H200, problem, "auto", Limits(window))
        limits = Limits(window, int(least * draw.uniform(1.02, 4)))
        found, kept = schedule.choose(H200, problem, "auto", limits)
        if found != "keep" or not kept:
            continue
        for _ in range(4):
            other = problem._replace(n=int(problem.n * draw.uniform(0.2, 3)) + 1)
            try:
                columns = schedule.kept_of_any(H200, problem, other, kept, limits)
            except ValueError:
                continue
            if columns:
                kept_some += 1
                what = problem, limits, other.n, columns
                room = usable(limits.workspace)
                assert candidates.candidates(H200, other, window).best(columns, room).bytes <= room, what
                taken = keeping_bytes(other.n, columns) + forward_bytes(other, columns)
                assert taken <= limits.workspace, what
    assert kept_some > 40


# ----------------------------------------------------------------------------------------------------------
# What is said


def test_a_slow_workspace_is_logged_once_with_one_that_helps(caplog: pytest.LogCaptureFixture, monkeypatch):
    monkeypatch.setattr(choose, "_logged", set())
    caplog.set_level(logging.INFO, "cute_lce")

    def ask(n: int, mb: int) -> list[logging.LogRecord]:
        caplog.clear()
        problem, limits = CROWDED._replace(n=n), Limits(workspace=mb * MIB)
        with planned_for(H200):
            KERNELS.choose(problem, torch.bfloat16, torch.device("cuda"), "auto", "mean", limits)
        return caplog.records

    (said,) = ask(20480, 300)
    assert said.levelno == logging.WARNING
    message = said.getMessage()
    assert "n 20480, d 3584, V 128256: with workspace_mb=300 a call" in message
    helpful = int(message.split("workspace_mb=")[2].split()[0])
    assert not within(H200, CROWDED, "auto", helpful * MIB).is_slow
    assert within(H200, CROWDED, "auto", 300 * MIB).is_slow
    # Other numbers of tokens are of the same kind, and a workspace that holds everything is none.
    assert not ask(20480, 300)
    assert not ask(20000, 300)
    assert not ask(20480, 6000)
    assert ask(20480, 400)
    # The default is documented.
    (said,) = ask(40960, 0)
    assert said.levelno == logging.INFO


@pytest.mark.parametrize(
    ("gpu", "problem", "mb", "wanted", "found"),
    [
        (H200, Problem(1877, 752, 50257), 203, "auto", "keep"),
        (H200, Problem(14526, 768, 50257), 200, "auto", "grad_in_forward"),
        (H200, Problem(12959, 512, 128256), 350, "grad_in_forward", "grad_in_forward"),
    ],
    ids=["all is kept", "auto's grad_in_forward", "grad_in_forward"],
)
def test_whatever_the_schedule_a_slow_call_is_logged(caplog, monkeypatch, gpu, problem, mb, wanted, found):
    monkeypatch.setattr(choose, "_logged", set())
    caplog.set_level(logging.INFO, "cute_lce")

    def ask(workspace_mb: int) -> str:
        limits = Limits(workspace=workspace_mb * MIB)
        with planned_for(gpu):
            call = problem, torch.bfloat16, torch.device("cuda"), wanted, "mean", limits
            return KERNELS.choose(*call, may_accumulate=True)[0]

    assert ask(mb) == found
    (said,) = caplog.records
    helpful = int(said.getMessage().split("workspace_mb=")[2].split()[0])
    assert helpful > mb
    caplog.clear()
    ask(helpful)
    assert not caplog.records


# ----------------------------------------------------------------------------------------------------------
# CUTE_LCE_WORKSPACE_MB


@pytest.fixture
def seen(monkeypatch) -> list[Limits]:
    """The limits of every call."""
    limits: list[Limits] = []
    streaming = implementation(torch.device("cpu"), torch.float32)
    wrapped = streaming.choose

    def choosing(*arguments, **options):
        limits.append(arguments[-1])
        return wrapped(*arguments, **options)

    monkeypatch.setattr(type(streaming), "choose", staticmethod(choosing))
    return limits


def test_it_is_the_default_of_calls_that_give_none(monkeypatch, seen: list[Limits]):
    monkeypatch.setattr(environment, "WORKSPACE_MB", 7.0)
    input, weight, target = torch.randn(5, 16), torch.randn(33, 16), torch.arange(5)
    linear_cross_entropy(input, weight, target)
    linear_cross_entropy(input, weight, target, workspace_mb=3)
    module = LinearCrossEntropy(16, 33)
    module(input, target)
    module.workspace_mb = 4  # pyright: ignore[reportArgumentType]
    module(input, target)
    assert [limits.workspace // MIB for limits in seen] == [7, 3, 7, 4]


def test_it_enters_a_compiled_graph_as_the_ops_argument(monkeypatch):
    monkeypatch.setattr(environment, "WORKSPACE_MB", 7.0)
    found: list[object] = []

    def backend(graph, inputs):
        found.extend(
            node.kwargs.get("workspace_mb")
            for node in graph.graph.nodes
            if "fused_linear_cross_entropy" in str(node.target)
        )
        return graph.forward

    input, weight, target = torch.randn(5, 16), torch.randn(33, 16), torch.arange(5)
    torch.compile(linear_cross_entropy, fullgraph=True, backend=backend)(input, weight, target)
    module = LinearCrossEntropy(16, 33)
    torch.compile(module, fullgraph=True, backend=backend)(input, target)
    assert found == [7.0, 7.0]


# ----------------------------------------------------------------------------------------------------------
# What docs/tuning.md says

SHAPES = (
    (1024, 4096, 128256),
    (4096, 4096, 128256),
    (8192, 2048, 151936),
    (8192, 4096, 128256),
    (8192, 8192, 128256),
    (8192, 3840, 262144),
    (20480, 3584, 152064),
    (32768, 4096, 128256),
    (65536, 4096, 128256),
)
BUDGETS_MB = (150, 300, 600, 1024, 2304, 4608)


def table() -> list[str]:
    """Rows of what each budget costs."""
    lines = []
    for sizes in SHAPES:
        problem = Problem(*sizes)
        least = schedule.least_workspace(H200, problem, "auto", NO_LIMITS)
        cells = [", ".join(map(str, sizes)), f"{least / MIB:.0f}"]
        for mb in BUDGETS_MB:
            found = within(H200, problem, "auto", mb * MIB)
            cell = f"{found.seconds / found.floor:.2f}" if mb * MIB >= least else "-"
            instead = grad_in_forward.predict_auto(H200, problem, Limits(workspace=mb * MIB))
            cells.append(cell if instead is None else f"{cell}, {instead.seconds / found.floor:.2f}")
        found = within(H200, problem, "auto", 1 << 42)
        everything = workspace_for(candidates.Candidates(H200, problem).keeping(problem.vocab)[0].bytes)
        lines.append(
            f"| {' | '.join([*cells, f'{found.best / found.floor:.2f}', f'{everything / MIB:.0f}'])} |"
        )
    return lines


def test_the_documented_costs():
    text = Path(__file__).parents[2].joinpath("docs", "tuning.md").read_text(encoding="utf-8")
    for line in table():
        assert text.count(line) == 1, f"docs/tuning.md: python -m tests.host.test_budget prints {line}"


if __name__ == "__main__":
    print("\n".join(table()))
