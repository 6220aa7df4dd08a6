"""Numbers of each token and terms of a loss over a group, by emulated kernels, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_lce import reference
from cute_lce.arguments import Operands
from cute_lce.implementation import StatsOperands
from cute_lce.launch import choose
from cute_lce.ops import Destination, TermTensors
from cute_lce.ops.logprob import Wanted
from cute_lce.options import ComputeOptions, LossOptions, TermOptions
from cute_lce.parallel import tensor
from cute_lce.parallel.call import Spread
from cute_lce.parallel.logprob import linear_logprob
from cute_lce.parallel.numbers import numbers_of
from cute_lce.parallel.terms import linear_cross_entropy
from cute_lce.plan import memory, overlap
from cute_lce.plan.problem import Problem
from tests.emulated import token_stats
from tests.emulated.forward import ignoring
from tests.emulated.ranks import ranks
from tests.emulated.token_stats import PLAIN, Numbers, repeating
from tests.logit_terms import LogCap, Tanh
from tests.numerics import CAPS, Case, assert_close, check_near_a_cap, jumping, near_a_cap, random_case

BF16, FP16 = torch.bfloat16, torch.float16
full = pytest.mark.emulator_full
pytestmark = pytest.mark.usefixtures("poisoned_empty", "narrow")


def run(
    numbers: Numbers,
    arch: str,
    sizes: list[int],
    *,
    compute: ComputeOptions | None = None,
    grad_input: str = "reduced",
    equal: bool = False,
    sm_margin: int | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """(the numbers, which all ranks have, the gradients of the whole, kernels launched) of a vocabulary in
    shards of these sizes. A number that is differentiated has the upstream gradient of `numbers`."""
    whole, upstream, options = numbers.operands, numbers.upstream, numbers.options
    loss = LossOptions("none", options.ignore_index)
    compute = compute or ComputeOptions("recompute")

    def on(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        start = sum(sizes[:rank])
        rows = slice(start, start + sizes[rank])
        leaves = {
            name: each[where].clone().requires_grad_()
            for name, each, where in (
                ("dinput", whole.hidden, slice(None)),
                ("dweight", whole.weight, rows),
                ("dbias", whole.linear_bias, rows),
            )
            if each is not None
        }
        own = StatsOperands(
            leaves["dinput"],
            leaves["dweight"],
            whole.target.clone(),
            leaves.get("dbias"),
            None if whole.class_weight is None else whole.class_weight[rows].clone(),
            None if whole.temperature is None else whole.temperature.clone(),
            None if whole.topk_ids is None else whole.topk_ids.clone(),
        )
        spread = Spread(group, None if equal else start, None, grad_input, sm_margin)  # pyright: ignore
        found = numbers_of(own, options, loss, compute, spread)
        values = {name: getattr(found.stats, name) for name in options.outputs}
        # To the last bit, nan included.
        every = group.gather(torch.cat([each.detach().float().flatten() for each in values.values()]))
        assert all(torch.equal(each.view(torch.int32), every[0].view(torch.int32)) for each in every)
        differentiated = [values[name] for name in upstream]
        given = torch.autograd.grad(differentiated, [*leaves.values()], [*upstream.values()])
        if grad_input == "reduced":
            assert torch.equal(group.gather(given[0])[0].view(torch.int16), given[0].view(torch.int16))
        return {name: each.detach() for name, each in values.items()}, dict(zip(leaves, given, strict=True))

    with ranks(arch, len(sizes)) as (group, counts):
        found = group.run(on)
    values, gradients = found[0]
    if grad_input == "partial":
        gradients["dinput"] = torch.stack([each["dinput"] for _, each in found]).float().sum(0).to(BF16)
    for name in ("dweight", "dbias"):
        if name in gradients:
            gradients[name] = torch.cat([each[name] for _, each in found])
    return values, gradients, counts.launched


def check(numbers: Numbers, arch: str, sizes: list[int], **options: Any) -> list[str]:
    values, gradients, launched = run(numbers, arch, sizes, **options)
    exact = token_stats.by_torch(numbers, torch.float64, rounded=False)
    plain = token_stats.by_torch(numbers, torch.float32, rounded=True)
    for name, got in values.items():
        token_stats.agree(name, got, exact[0][name], plain[0][name])
    parts = 2.0**-8 if options.get("grad_input") == "partial" else 0.0
    for name, got in gradients.items():
        assert got.dtype is numbers.case.input.dtype
        rounding = parts if name == "dinput" else 0.0
        assert_close(name, got, exact[1][name], plain[1][name].to(got.dtype), rounding=rounding)
    return launched


def each_of(*short: tuple[str, torch.dtype]) -> pytest.MarkDecorator:
    """Each architecture with each dtype; those that are not named in the long sweep."""
    every = [(arch, dtype) for arch in ("sm_90a", "sm_100a") for dtype in (BF16, FP16)]
    return pytest.mark.parametrize(
        ("arch", "dtype"), [pytest.param(*each, marks=[] if each in short else [full]) for each in every]
    )


RL = ("logprob", "entropy", "lse")
NAMES_OF_SHARDS = (*RL, "total_nll")


@each_of()
def test_numbers_of_shards_without_a_gradient(arch, dtype):
    """Ties between shards too."""
    case = ignoring(repeating(random_case(21, 72, 140, dtype, scale=4.0)))
    numbers = Numbers(case, ("logprob", *PLAIN), temperature=torch.linspace(0.3, 3, 21))
    check(numbers, arch, [60, 80])


@each_of(("sm_90a", BF16))
def test_numbers_of_two_shards(arch, dtype):
    """Of rows with a temperature each, one of them confident in a class of the second shard."""
    case = ignoring(random_case(21, 72, 137, dtype, scale=4.0))
    numbers = Numbers(case, RL, RL, temperature=torch.linspace(0.3, 3, 21))
    launched = check(numbers, arch, [70, 67])
    # Logits and two gradients in the backward: the sum begins before the last.
    assert sum("Gemm" in name for name in launched) == 2 * (1 + 3)


@full
@each_of()
@pytest.mark.parametrize("sizes", [[60, 60, 17], [128, 128], [1, 200]])
def test_every_number_of_shards(arch, dtype, sizes):
    """A bias, a softcap, several windows and stripes; and what smoothing adds, with class weights."""
    V = sum(sizes)
    case = ignoring(random_case(40, 72, V, dtype, scale=4.0))
    numbers = Numbers(
        case,
        NAMES_OF_SHARDS,
        NAMES_OF_SHARDS,
        linear_bias=torch.linspace(-1, 1, V).to(dtype),
        class_weight=torch.linspace(0.1, 2, V),
        softcap=8.0,
        logit_scale=0.8,
        temperature=0.7,
    )
    check(numbers, arch, sizes, compute=ComputeOptions("recompute", None, 64))


@full
@each_of()
def test_kept_rows_of_shards(arch, dtype):
    """A row's columns and its sum lie far above what a shard that lacks its target takes as reference."""
    case = jumping(random_case(40, 64, 263, dtype), {20: 50.0, 100: 100.0, 262: 300.0})
    numbers = Numbers(
        case, linear_bias=torch.linspace(-1, 1, 263).to(dtype), temperature=torch.linspace(0.5, 2, 40)
    )
    launched = check(numbers, arch, [128, 128, 7], compute=ComputeOptions("keep", 64))
    assert sum("Gemm" in name for name in launched) == 3 * (1 + 2)


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=full)])
@pytest.mark.parametrize("kept", ["all", pytest.param("some", marks=full)])
def test_kept_logits_of_shards(arch, kept, monkeypatch):
    """Nothing is finished after the merge; with stripes that were kept and one that is recomputed."""
    if kept == "some":
        monkeypatch.setattr(choose, "choose", lambda *_: ("keep", 128))
    case = ignoring(random_case(24, 64, 470, BF16, scale=4.0))
    numbers = Numbers(case, (*RL, *PLAIN), RL, temperature=torch.linspace(0.5, 2, 24))
    sizes = [200, 140, 130] if kept == "some" else [256, 207, 7]
    grad_input = "partial" if kept == "some" else "reduced"
    launched = check(numbers, arch, sizes, compute=ComputeOptions("keep", 64), grad_input=grad_input)
    assert sum("DlogitsOfKept" in name for name in launched) == 3
    assert sum("Gemm" in name for name in launched) == 3 * (1 + 2 + 3 * (kept == "some"))


@full
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("sm_margin", [0, 1])
def test_ids_of_shards(arch, sm_margin):
    """Of kept logits; a shard has some of the ids and targets."""
    case = ignoring(random_case(24, 64, 263, BF16, scale=4.0))
    ids = torch.arange(72).view(24, 3) * 11 % 270
    ids[:, 1] = case.target
    names = ("logprob", "topk_logprob")
    numbers = Numbers(case, names, names, topk_ids=ids, temperature=torch.linspace(0.5, 2, 24))
    compute = ComputeOptions("keep", 64)
    launched = check(numbers, arch, [128, 128, 7], compute=compute, sm_margin=sm_margin or None)
    assert sum("DlogitsOfKept" in name for name in launched) == 3


@full
@each_of()
@pytest.mark.parametrize("softcap", [5.0, LogCap(2.0).key], ids=["softcap", "own"])
def test_a_cap_of_shards(arch, dtype, softcap):
    """Kept times its slope; of a target Finish knows it by the logit that another shard may have."""
    case = ignoring(random_case(24, 64, 200, dtype, scale=6.0))
    numbers = Numbers(case, softcap=softcap, temperature=torch.linspace(0.5, 2, 24))
    keeps = softcap > 0 or dtype is BF16
    launched = check(numbers, arch, [128, 72], compute=ComputeOptions("keep" if keeps else "auto", 64))
    assert sum("Finish" in name for name in launched) == 2 * keeps


@each_of(("sm_90a", BF16))
@pytest.mark.parametrize("own", [False, pytest.param(True, marks=full)], ids=["softcap", "own"])
def test_the_slope_near_a_small_cap_of_shards(arch, dtype, own):
    """The logit that the shards have exchanged, which is but a few ulp of lse."""
    for cap in CAPS:
        case = near_a_cap(cap, dtype)
        numbers = Numbers(case, softcap=Tanh(cap).key if own else cap)
        _, gradients, _ = run(numbers, arch, [70, 67])
        _, exact = token_stats.by_torch(numbers, torch.float64, rounded=False)
        check_near_a_cap(case, gradients["dweight"], exact["dweight"], numbers.upstream["logprob"])


@full
@each_of()
@pytest.mark.parametrize("schedule", ["recompute", "keep"])
def test_dweight_beside_the_sum(arch, dtype, schedule, monkeypatch):
    """The last stripe's, in two launches where its dlogits are there: the bias's gradient is not added to
    anew, and no number of the forward is taken twice."""
    monkeypatch.setattr(overlap, "START_CLOCKS", 0)
    monkeypatch.setattr(overlap, "LAUNCH_CLOCKS", 0)
    monkeypatch.setattr(tensor, "sum_seconds", lambda *_, **__: 8e-8)
    case = ignoring(random_case(40, 72, 670, dtype))
    outputs = (*RL, "total_nll") if schedule == "recompute" else ("logprob",)
    numbers = Numbers(case, outputs, outputs, linear_bias=torch.linspace(-1, 1, 670).to(dtype))
    gemms = []
    for margin in (0, 2):
        options = {"compute": ComputeOptions(schedule, 64), "sm_margin": margin}
        launched = check(numbers, arch, [600, 70], **options)
        gemms.append(sum("Gemm" in name for name in launched))
    # Of float16's recomputed stripe there is none.
    assert gemms[1] - gemms[0] == (dtype is BF16 or schedule == "keep")


@full
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_parts_by_input(arch):
    case = ignoring(random_case(40, 72, 200, BF16, scale=4.0))
    check(Numbers(case, RL, RL), arch, [130, 70], grad_input="partial")


@full
@each_of()
@pytest.mark.parametrize("schedule", ["recompute", "keep"])
def test_ignored_rows_are_not_read(arch, dtype, schedule, monkeypatch):
    monkeypatch.setattr(memory, "LEAST_COMPACTED", 0)
    monkeypatch.setattr(memory, "LEAST_VOCAB", 0)
    clean = ignoring(random_case(100, 72, 200, dtype))
    ignored = clean.target == clean.ignore_index
    clean = replace(clean, input=clean.input.masked_fill(ignored[:, None], 0))
    case = replace(clean, input=clean.input.masked_fill(ignored[:, None], torch.nan))
    outputs = RL if schedule == "recompute" else ("logprob",)
    temperature = torch.linspace(0.5, 2, 100).masked_fill(ignored, torch.nan)
    numbers = Numbers(clean, outputs, outputs, temperature=temperature)
    compute = ComputeOptions(schedule, 64)
    values, gradients, launched = run(replace(numbers, case=case), arch, [130, 70], compute=compute)
    assert any("Gather" in name for name in launched)
    exact = token_stats.by_torch(numbers, torch.float64, rounded=False)
    plain = token_stats.by_torch(numbers, torch.float32, rounded=True)
    for name, got in (values | gradients).items():
        want, base = ({**each[0], **each[1]}[name] for each in (exact, plain))
        assert_close(name, got, want, base.to(got.dtype))


@full
@pytest.mark.parametrize("equal", [False, True])
def test_targets_in_no_shard(equal):
    """Or shards that are said to be equal, and are not: nan."""
    case = random_case(20, 64, 140, BF16)
    case.target[5] = 139
    numbers = Numbers(case, RL, RL)
    values, gradients, _ = run(numbers, "sm_90a", [70, 60], equal=equal)
    sick = torch.ones(20, dtype=torch.bool) if equal else case.target >= 130
    for name in RL:
        assert torch.equal(values[name].isnan(), sick)
    assert torch.equal(gradients["dinput"].isnan().all(1), sick)
    assert gradients["dweight"].isnan().all()


@each_of(("sm_90a", BF16))
@pytest.mark.parametrize("sliced_target", [True, pytest.param(False, marks=full)])
def test_slices_of_tokens(arch, dtype, sliced_target):
    """linear_logprob: of targets and temperatures that are slices, or whole."""
    case = ignoring(random_case(24, 72, 137, dtype, scale=4.0))
    numbers = Numbers(case, RL, RL, temperature=torch.linspace(0.3, 3, 24))
    whole = numbers.operands

    def on(rank: int) -> list[Tensor]:
        tokens, rows = slice(12 * rank, 12 * rank + 12), slice(70 * rank, 70 * rank + 70)

        def own(each: Tensor) -> Tensor:
            return (each[tokens] if sliced_target else each).clone()

        leaves = [whole.hidden[tokens].clone().requires_grad_(), whole.weight[rows].clone().requires_grad_()]
        assert whole.temperature is not None
        temperature = own(whole.temperature)
        given = StatsOperands(leaves[0], leaves[1], own(whole.target), temperature=temperature)
        found = linear_logprob(
            given,
            Wanted(RL, True, 1.0),
            LossOptions("none", case.ignore_index),
            TermOptions(),
            ComputeOptions("recompute"),
            Spread(group, 70 * rank, 0),  # pyright: ignore
        )
        upstream = [own(each) for each in numbers.upstream.values()]
        return [*(each.detach() for each in found), *torch.autograd.grad(found, leaves, upstream)]

    with ranks(arch, 2) as (group, counts):
        first, second = group.run(on)
    assert sum("Gemm" in name for name in counts.launched) == 2 * (1 + 3)
    exact = token_stats.by_torch(numbers, torch.float64, rounded=False)
    plain = token_stats.by_torch(numbers, torch.float32, rounded=True)
    for index, name in enumerate((*RL, "dinput", "dweight")):
        joins = sliced_target or index >= len(RL)
        got = torch.cat([first[index], second[index]]) if joins else first[index]
        want, base = ({**each[0], **each[1]}[name] for each in (exact, plain))
        assert_close(name, got, want, base.to(got.dtype))


@each_of(("sm_90a", BF16))
def test_topk_of_shards(arch, dtype):
    """Beside sums that the kernels merge; each shard has some of the ids, and one row's are all of one."""
    case = ignoring(random_case(20, 64, 140, dtype, scale=4.0))
    ids = torch.arange(60).view(20, 3) * 5 % 150
    ids[:, 1], ids[7] = case.target, 3
    names = "logprob", "topk_logprob"
    numbers = Numbers(case, (*names, *token_stats.PLAIN), names, softcap=6.0, topk_ids=ids)
    launched = check(numbers, arch, [50, 90])
    assert [name for name in launched if "Merge" in name]


# ----------------------------------------------------------------------------------------------------------
# Terms of a loss


def train(
    case: Case,
    arch: str,
    sizes: list[int],
    given: dict[str, Any],
    compute: ComputeOptions,
    *,
    reduction: str,
    sequence_dim: int | None = None,
    adds: bool = False,
) -> tuple[list[Tensor], list[str]]:
    """(loss, dinput, dweight, dbias of the whole, kernels launched). given: linear_cross_entropy's arguments
    of the whole. adds: dweight, to zeros."""
    tensors, numbers = TermTensors(**_named(TermTensors, given)), TermOptions(**_named(TermOptions, given))
    loss = LossOptions(reduction, case.ignore_index)
    upstream = case.upstream(reduction).float()

    def on(rank: int) -> list[Tensor]:
        start = sum(sizes[:rank])
        rows = slice(start, start + sizes[rank])
        spread = Spread(group, start, sequence_dim)  # pyright: ignore

        def of_classes(each: Tensor | None) -> Tensor | None:
            return None if each is None else each[rows].clone()

        hidden = case.input if sequence_dim is None else case.input.chunk(len(sizes))[rank]
        own = tensors._replace(linear_bias=of_classes(tensors.linear_bias), weight=of_classes(tensors.weight))
        operands = Operands(hidden.clone(), case.linear_weight[rows].clone(), case.target.clone())
        leaves = [operands.hidden, operands.weight]
        leaves += [] if own.linear_bias is None else [own.linear_bias]
        for each in leaves:
            each.requires_grad_()
        destination = None
        if adds:
            destination = Destination(torch.zeros_like(leaves[1], requires_grad=False), dummy=False)
        found = linear_cross_entropy(operands, own, loss, numbers, compute, spread, destination)
        gradients = torch.autograd.grad(found, leaves, upstream, allow_unused=adds)
        total = found.detach()
        assert torch.equal(group.gather(total)[0], total)
        if destination is not None:
            assert gradients[1] is None
            gradients = gradients[0], destination.out, *gradients[2:]
        return [total, *gradients]

    with ranks(arch, len(sizes)) as (group, counts):
        found = group.run(on)
    total, dinput, *others = found[0]
    if sequence_dim is not None:
        dinput = torch.cat([each[1] for each in found])
    joined = [torch.cat([each[2 + i] for each in found]) for i in range(len(others))]
    return [total, dinput, *joined], counts.launched


def _named(group: type, given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in group._fields if name in given}  # pyright: ignore


def check_loss(case: Case, arch: str, sizes: list[int], given: dict, compute: ComputeOptions, **how: Any):
    reduction = how["reduction"]
    found, launched = train(case, arch, sizes, given, compute, **how)

    def by_the_reference(kind: torch.dtype) -> tuple[Tensor, ...]:
        terms = {name: each.to(kind) if isinstance(each, Tensor) else each for name, each in given.items()}
        operands = case.input.to(kind), case.linear_weight.to(kind), case.target
        upstream = case.upstream(reduction).to(kind)
        return reference.gradients(
            *operands, upstream, reduction=reduction, ignore_index=case.ignore_index, **terms
        )

    exact, plain = by_the_reference(torch.float64), by_the_reference(torch.float32)
    names = ("loss", "dinput", "dweight", "dbias")
    for name, got, want, base in zip(names[: len(exact)], found, exact, plain, strict=True):
        # dlogits are rounded.
        rounding = 0.0 if name in ("loss", "dbias") else torch.finfo(case.input.dtype).eps
        assert_close(name, got, want, base.to(got.dtype), rounding=rounding)
    return launched


@each_of(("sm_90a", BF16))
@pytest.mark.parametrize("z_loss", [0.1, pytest.param(-0.05, marks=full)])
def test_a_kept_z_loss(arch, dtype, z_loss):
    """The onehot's share depends on lse, of all shards, wherever the target is."""
    case = ignoring(random_case(24, 64, 200, dtype, scale=4.0))
    given = {"z_loss": z_loss, "linear_bias": torch.linspace(-1, 1, 200).to(dtype)}
    launched = check_loss(case, arch, [128, 72], given, ComputeOptions("keep", 64), reduction="mean")
    assert sum("Gemm" in name for name in launched) == 2 * (1 + 2)


SMOOTHED = {"z_loss": 0.05, "label_smoothing": 0.9}
WEIGHED = {"z_loss": -0.02, "weight": torch.linspace(0.1, 3, 330)}


OF_KEPT = [
    pytest.param(arch, dtype, terms, id=f"{arch}-{dtype}-{name}", marks=[] if name in often else [full])
    for arch, dtype, often in (
        *(("sm_90a", BF16, ("smoothed", "weighed")), ("sm_100a", BF16, ())),
        *(("sm_90a", FP16, ()), ("sm_100a", FP16, ())),
    )
    for name, terms in (("plain", {"z_loss": 0.1}), ("smoothed", SMOOTHED), ("weighed", WEIGHED))
    # The kernels keep nothing of float16's smoothed loss.
    if name != "smoothed" or dtype is BF16
]


@pytest.mark.parametrize(("arch", "dtype", "terms"), OF_KEPT)
def test_kept_smoothing_and_class_weights(arch, dtype, terms):
    """The onehot's share depends on the class weight of a target that one shard has; smoothing adds to each
    kept class."""
    case = ignoring(random_case(24, 64, 330, dtype, scale=4.0))
    given = {**terms, "linear_bias": torch.linspace(-1, 1, 330).to(dtype)}
    compute = ComputeOptions("keep", 64)
    launched = check_loss(case, arch, [200, 130], given, compute, reduction="mean", sequence_dim=0)
    assert sum("Gemm" in name for name in launched) == 2 * (1 + 2)


@full
@pytest.mark.parametrize(("arch", "dtype", "terms"), OF_KEPT)
def test_some_columns_are_kept(arch, dtype, terms, monkeypatch):
    """A kept stripe, and a recomputed one whose dweight waits. A shard's memory is planned as such."""

    def keeps_some(problem: Problem, *_) -> tuple[str, int]:
        assert problem.shard
        return "keep", 128

    monkeypatch.setattr(choose, "choose", keeps_some)
    case = ignoring(random_case(24, 64, 330, dtype, scale=4.0))
    given = {**terms, "linear_bias": torch.linspace(-1, 1, 330).to(dtype)}
    launched = check_loss(case, arch, [200, 130], given, ComputeOptions("keep", 64), reduction="none")
    assert sum("Gemm" in name for name in launched) == 2 * (1 + 2 + 3)


@each_of(("sm_90a", BF16))
@pytest.mark.parametrize("schedule", ["auto", pytest.param("recompute", marks=full)])
def test_smoothing_and_class_weights(arch, dtype, schedule):
    """Of slices of the tokens, with a cap: nothing is kept."""
    case = ignoring(random_case(24, 64, 200, dtype, scale=4.0))
    given = {
        "label_smoothing": 0.2,
        "weight": torch.linspace(0.1, 3, 200),
        "z_loss": 0.1,
        "softcap": 9.0,
        "linear_bias": torch.linspace(-1, 1, 200).to(dtype),
        "token_weight": torch.linspace(0, 2, 24),
    }
    launched = check_loss(
        *(case, arch, [130, 70], given, ComputeOptions(schedule)), reduction="mean", sequence_dim=0
    )
    assert not any("Finish" in name for name in launched)


@full
@each_of()
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_terms_of_shards(arch, dtype, reduction, smoothing):
    """By whatever schedule."""
    case = ignoring(random_case(40, 72, 263, dtype, scale=4.0))
    given = {
        "label_smoothing": smoothing,
        "z_loss": 0.1,
        "linear_bias": torch.linspace(-1, 1, 263).to(dtype),
        "denominator": torch.tensor(7.0),
    }
    for compute in (ComputeOptions("auto", 64), ComputeOptions("recompute", None, 64)):
        check_loss(case, arch, [128, 128, 7], given, compute, reduction=reduction, adds=dtype is BF16)
