"""Cases of DTensors, VocabParallelLoss and fully_shard, for CPUs as for GPUs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from cute_lce import LinearCrossEntropy, LinearLogprob, linear_cross_entropy, linear_logprob
from cute_lce.parallel import VocabParallelLoss, gathered_weight
from tests.distributed.ranks import Rank
from tests.distributed.tensor_cases import ignoring, shaped
from tests.numerics import Case, assert_close, random_case


def mesh_of(here: Rank, *sizes: int, names: tuple[str, ...] = ("tp",)) -> DeviceMesh:
    return init_device_mesh(here.device.partition(":")[0], sizes or (here.ranks,), mesh_dim_names=names)


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(case: Case, loss: Tensor, dinput: Tensor | None, dweight: Tensor | None, reduction: str) -> None:
    """Whole results with float64's of an upstream gradient of 1."""
    ones = torch.ones(case.target.shape if reduction == "none" else (), dtype=torch.float64)
    ones = ones.to(case.input.device)
    expected, baseline = case.expected(ones, reduction), case.baseline(ones, reduction)
    for name, got, want, plain in zip(
        ("loss", "dinput", "dweight"), (loss, dinput, dweight), expected, baseline, strict=True
    ):
        assert_close(name, whole(got).detach(), want, plain)


def a_sharded_weight(here: Rank) -> None:
    """Uneven shards, whose start the placement says; input and target in every form."""
    mesh, ranks = mesh_of(here), here.ranks
    flat = ignoring(random_case(6 * ranks, 40, 64 * ranks - 3, torch.float32)).to(here.device)
    case = shaped(flat, 2, 3 * ranks)
    sliced, everywhere = [Shard(1)], [Replicate()]
    for inputs, targets, reduction in (
        (None, None, "mean"),
        (None, None, "none"),
        (everywhere, None, "sum"),
        (everywhere, everywhere, "none"),
        (sliced, None, "mean"),
        (sliced, everywhere, "none"),
        (sliced, sliced, "none"),
        (sliced, sliced, "mean"),
    ):
        weight = distribute_tensor(case.linear_weight, mesh, [Shard(0)]).requires_grad_()
        hidden = case.input.clone() if inputs is None else distribute_tensor(case.input, mesh, inputs)
        hidden = hidden.detach().requires_grad_()
        target = case.target if targets is None else distribute_tensor(case.target, mesh, targets)
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction)
        assert isinstance(loss, DTensor) == (inputs is not None)
        if reduction == "none" and isinstance(loss, DTensor):
            assert loss.placements == tuple(targets or everywhere)
        loss.sum().backward()
        assert isinstance(weight.grad, DTensor)
        assert weight.grad.placements == (Shard(0),)
        assert hidden.grad is not None
        assert isinstance(hidden.grad, DTensor) == (inputs is not None)
        compare(case, loss, hidden.grad, weight.grad, reduction)
    # A slice in an ordinary tensor.
    hidden = distribute_tensor(case.input, mesh, sliced).requires_grad_()
    weight = distribute_tensor(case.linear_weight, mesh, [Shard(0)]).requires_grad_()
    target = case.target.chunk(ranks, 1)[here.rank].contiguous()
    loss = linear_cross_entropy(hidden, weight, target, reduction="none")
    assert isinstance(loss, DTensor)
    assert loss.placements == (Shard(1),)
    loss.sum().backward()
    compare(case, loss, hidden.grad, weight.grad, "none")


def sharded_tokens(here: Rank) -> None:
    """The vocabulary whole on every rank: sums are Partial."""
    mesh = mesh_of(here, names=("dp",))
    case = ignoring(random_case(4 * here.ranks + 1, 40, 70, torch.float32)).to(here.device)
    for reduction in ("sum", "none"):
        weight = distribute_tensor(case.linear_weight, mesh, [Replicate()]).requires_grad_()
        hidden = distribute_tensor(case.input, mesh, [Shard(0)]).requires_grad_()
        target = distribute_tensor(case.target, mesh, [Shard(0)])
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction)
        assert isinstance(loss, DTensor)
        assert loss.placements == ((Shard(0),) if reduction == "none" else (Partial(),))
        (loss if reduction == "sum" else loss.sum()).backward()
        assert isinstance(weight.grad, DTensor)
        compare(case, loss, hidden.grad, weight.grad, reduction)


def ops_of_sharded_tokens(here: Rank) -> None:
    """The public ops, by what is registered of placements; another layout is redistributed, and what is kept,
    of valid tokens alone, is not."""
    mesh = mesh_of(here, names=("dp",))
    op = torch.ops.cute_lce.fused_linear_cross_entropy
    tokens, everywhere, rows, features = Shard(0), Replicate(), Shard(0), Shard(1)
    layouts = ((tokens, tokens, everywhere), (everywhere, tokens, rows), (features, everywhere, features))
    # Of bfloat16 a GPU's kernels.
    dtypes = (torch.float32, torch.bfloat16) if here.device != "cpu" else (torch.float32,)
    for dtype in dtypes:
        case = ignoring(random_case(4 * here.ranks + 1, 40, 70, dtype)).to(here.device)
        for reduction, schedule in (("sum", "keep"), ("none", "auto"), ("mean", "auto"), ("mean", "keep")):
            for inputs, targets, weights in layouts:
                weight = distribute_tensor(case.linear_weight, mesh, [weights]).requires_grad_()
                hidden = distribute_tensor(case.input, mesh, [inputs]).requires_grad_()
                target = distribute_tensor(case.target, mesh, [targets])
                loss = op(hidden, weight, target, reduction=reduction, schedule=schedule)
                assert isinstance(loss, DTensor)
                loss.sum().backward()
                if inputs == targets and weights == everywhere:
                    assert isinstance(weight.grad, DTensor)
                    assert weight.grad.placements == (Partial(),)
                compare(case, loss, hidden.grad, weight.grad, reduction)
    operands = hidden.detach(), weight.detach(), target
    found = torch.ops.cute_lce.fused_linear_logprob(*operands, outputs=["logprob", "argmax"])
    logits = case.input.double() @ case.linear_weight.double().mT
    want = logits.argmax(1).masked_fill(case.target == case.ignore_index, 0)
    assert torch.equal(whole(found[1]), want)


def ops_on_two_dimensions(here: Rank) -> None:
    """What is kept, of valid tokens alone, stays where it is, whatever the upstream gradient's placements."""
    mesh = mesh_of(here, here.ranks // 2, 2, names=("dp", "cp"))
    op = torch.ops.cute_lce.fused_linear_cross_entropy
    dtypes = (torch.float32, torch.bfloat16) if here.device != "cpu" else (torch.float32,)
    for dtype, given in itertools.product(dtypes, ([Shard(0), Shard(0)], [Replicate(), Shard(0)])):
        case = ignoring(random_case(4 * here.ranks, 40, 70, dtype)).to(here.device)
        weight = distribute_tensor(case.linear_weight, mesh, [Replicate(), Replicate()]).requires_grad_()
        hidden = distribute_tensor(case.input, mesh, [Shard(0), Replicate()]).requires_grad_()
        target = distribute_tensor(case.target, mesh, [Shard(0), Replicate()])
        loss = op(hidden, weight, target, reduction="none", schedule="keep")
        loss.backward(distribute_tensor(torch.ones(whole(loss).shape, device=here.device), mesh, given))
        compare(case, loss, hidden.grad, weight.grad, "none")


def placements_that_are_refused(here: Rank) -> None:
    mesh, ranks = mesh_of(here), here.ranks
    case = random_case(4 * ranks, 8 * ranks, 6 * ranks, torch.float32).to(here.device)

    def spread(tensor: Tensor, placement) -> DTensor:
        return distribute_tensor(tensor, mesh, [placement])

    hidden, weight, target = case.input, case.linear_weight, case.target
    rows, tokens, all_of = spread(weight, Shard(0)), spread(hidden, Shard(0)), spread(weight, Replicate())
    for name, operands, options in (
        ("linear_weight", (hidden, spread(weight, Shard(1)), target), {}),
        ("linear_weight", (hidden, DTensor.from_local(weight, mesh, [Partial()]), target), {}),
        ("linear_weight", (spread(hidden, Replicate()), weight, target), {}),
        ("linear_weight", (hidden, spread(weight[: ranks - 1], Shard(0)), target), {}),
        ("input", (spread(hidden, Shard(1)), rows, target), {}),
        ("input", (DTensor.from_local(hidden, mesh, [Partial()]), rows, target), {}),
        ("input", (spread(hidden[1:], Shard(0)), rows, target[1:]), {}),
        ("target", (tokens, all_of, target), {"reduction": "sum"}),
        ("target", (tokens, rows, DTensor.from_local(target, mesh, [Partial()])), {}),
        ("target", (spread(hidden, Replicate()), rows, spread(target, Shard(0))), {}),
        ("reduction", (tokens, all_of, spread(target, Shard(0))), {}),
        ("tp_group", (hidden, rows, target), {"tp_group": here.group}),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            linear_cross_entropy(*operands, **options)  # pyright: ignore


class Model(nn.Module):
    """A layer, a norm, and the loss as the last module."""

    def __init__(self, d: int, V: int, **options):
        super().__init__()
        self.body, self.norm = nn.Linear(d, d), nn.LayerNorm(d)
        self.head = LinearCrossEntropy(d, V, **options)

    def forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        return self.head(self.norm(self.body(input)), target)


def model_and_data(here: Rank, V: int, dp: int) -> tuple[Model, Tensor, Tensor]:
    """The same on every rank; data for `dp` replicas."""
    torch.manual_seed(3)
    model = Model(16, V).to(here.device)
    input = torch.randn(dp, 2, 4 * here.ranks, 16).to(here.device)
    target = torch.randint(V, (dp, 2, 4 * here.ranks)).to(here.device)
    target[:, 0, 1] = -100
    return model, input, target


def gradients_of_one_process(model: Model, input: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The gradients of the replicas' mean."""
    alone = copy.deepcopy(model)
    torch.stack([alone(x, y) for x, y in zip(input, target, strict=True)]).mean().backward()
    return {
        name: parameter.grad for name, parameter in alone.named_parameters() if parameter.grad is not None
    }


def check_gradients(model: nn.Module, want: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    got = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert gradient.abs().max() > 0
        error = (got[name] - gradient).norm() / gradient.norm()
        assert error < tolerance, f"{name}: {error:.3g}"


def a_parallel_style(here: Rank) -> None:
    mesh, V = mesh_of(here), 50 * here.ranks - 1
    model, input, target = model_and_data(here, V, 1)
    want = gradients_of_one_process(model, input, target)
    for layout in (Replicate(), Shard(1)):
        own = copy.deepcopy(model)
        parallelize_module(own, mesh, {"head": VocabParallelLoss(input_layouts=layout)})
        hidden = own.norm(own.body(input[0]))
        if layout.is_shard():
            hidden = hidden.chunk(here.ranks, 1)[here.rank].contiguous()
        loss = own.head(hidden, target[0])
        assert not isinstance(loss, DTensor)
        assert here.is_same(loss.detach())
        loss.backward()
        assert isinstance(own.head.weight.grad, DTensor)
        check_gradients(own.head, {"weight": want["head.weight"]})
        assert torch.equal(own.head(input=hidden, target=target[0]), loss)
        logits = own.head(input=hidden)
        assert logits.shape == (*target[0].shape, V)
        if layout.is_replicate():
            check_gradients(own, want)
            assert torch.allclose(own(input[0]), model(input[0]), atol=1e-5)
            assert torch.equal(own(input[0], target=target[0]), loss)
    style = VocabParallelLoss(input_layouts=Shard(1))
    numbers = LinearLogprob(input.shape[-1], V, device=here.device)
    parallelize_module(numbers, mesh, style)
    hidden = input[0].chunk(here.ranks, 1)[here.rank].contiguous()
    found = numbers(hidden, target[0])
    assert not isinstance(found.logprob, DTensor)
    want = linear_logprob(input[0], whole(numbers.weight), target[0])
    assert torch.allclose(whole(found.logprob), whole(want.logprob), atol=1e-5)
    assert found.entropy is None
    with pytest.raises(TypeError, match=r"^module: got Linear"):
        parallelize_module(copy.deepcopy(model), mesh, {"body": VocabParallelLoss()})


def fully_sharded_units(here: Rank) -> None:
    """The module as its own unit, in a group with the norm, and in the root's."""
    mesh = mesh_of(here, names=("dp",))
    model, input, target = model_and_data(here, 70, here.ranks)
    want = gradients_of_one_process(model, input, target)
    for units in ((["head"],), (["norm", "head"],), ()):
        own = copy.deepcopy(model)
        for unit in units:
            fully_shard([getattr(own, name) for name in unit], mesh=mesh)
        fully_shard(own, mesh=mesh)
        loss = own(input[here.rank], target[here.rank])
        loss.backward()
        check_gradients(own, want)
        logits = own(input[here.rank])
        assert torch.allclose(logits, model(input[here.rank]), atol=1e-5)
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    own = copy.deepcopy(model)
    fully_shard(own.head, mesh=mesh, mp_policy=narrow)
    fully_shard(own, mesh=mesh, mp_policy=narrow)
    loss = own(input[here.rank], target[here.rank])
    assert loss.dtype is torch.float32
    loss.backward()
    check_gradients(own, want, 0.05)


def a_weight_outside_its_unit(here: Rank) -> None:
    mesh = mesh_of(here, names=("dp",))
    model, input, target = model_and_data(here, 70, here.ranks)
    want = gradients_of_one_process(model, input, target)
    own = copy.deepcopy(model)
    fully_shard(own.head, mesh=mesh)
    hidden = own.norm(own.body(input[here.rank]))
    group = mesh.get_group()
    linear_cross_entropy(hidden, gathered_weight(own.head.weight, group), target[here.rank]).backward()
    check_gradients(own.head, {"weight": want["head.weight"]})
    with pytest.raises(TypeError, match=r"^weight: got"):
        gathered_weight(model.head.weight, group)
    with pytest.raises(ValueError, match=r"^weight: got placements"):
        gathered_weight(distribute_tensor(model.head.weight.detach(), mesh, [Replicate()]), group)


def fully_sharded_and_tensor_parallel(here: Rank) -> None:
    """Data parallel x tensor parallel, of every shape that these ranks have."""
    for dp in range(1, here.ranks + 1):
        if here.ranks % dp:
            continue
        tp = here.ranks // dp
        mesh = mesh_of(here, dp, tp, names=("dp", "tp"))
        model, input, target = model_and_data(here, 50 * here.ranks, dp)
        want = gradients_of_one_process(model, input, target)
        own = copy.deepcopy(model)
        parallelize_module(own, mesh["tp"], {"head": VocabParallelLoss()})
        fully_shard(own.head, mesh=mesh["dp"])
        replica = mesh["dp"].get_local_rank()
        hidden = own.norm(own.body(input[replica]))
        loss = own.head(hidden, target[replica])
        loss.backward()
        check_gradients(own.head, {"weight": want["head.weight"]})
        # Outside the unit's forward its rows are strided.
        if dp > 1:
            with pytest.raises(ValueError, match=r"^linear_weight: got placements"):
                linear_cross_entropy(hidden, own.head.weight, target[replica])


def tokens_and_vocabulary_sharded(here: Rank) -> None:
    """A mesh of two dimensions without fully_shard: sums are Partial over the replicas."""
    if here.ranks % 2:
        return
    mesh = mesh_of(here, 2, here.ranks // 2, names=("dp", "tp"))
    case = random_case(4 * here.ranks, 24, 32 * here.ranks, torch.float32)
    case = replace(shaped(case, 4, here.ranks)).to(here.device)
    for inner, reduction in ((Replicate(), "sum"), (Shard(1), "none"), (Shard(1), "sum")):
        weight = distribute_tensor(case.linear_weight, mesh, [Replicate(), Shard(0)]).requires_grad_()
        hidden = distribute_tensor(case.input, mesh, [Shard(0), inner]).requires_grad_()
        target = distribute_tensor(case.target, mesh, [Shard(0), inner])
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction)
        assert isinstance(loss, DTensor)
        (loss if reduction == "sum" else loss.sum()).backward()
        compare(case, loss, hidden.grad, weight.grad, reduction)


def one_dimension_split_twice(here: Rank) -> None:
    """Tokens over both dimensions of a mesh. Refused on every rank: what the first leaves unequal to the
    second, and a whole target where the last splits its tokens again."""
    if here.ranks % 2:
        return
    replicas, shards = (2, "dp", Replicate()), (here.ranks // 2, "tp", Shard(0))
    case = random_case(4 * here.ranks, 24, 32 * here.ranks, torch.float32).to(here.device)
    few = replace(case, input=case.input[:2], target=case.target[:2])
    sliced: list[Placement] = [Shard(0), Shard(0)]
    for order in ((replicas, shards), (shards, replicas)):
        sizes, names, form = zip(*order, strict=True)
        mesh = mesh_of(here, *sizes, names=names)
        compare(case, *summed(case, mesh, form, sliced), "sum")
        whole_there = [Replicate() if name == "tp" else Shard(0) for name in names]
        if names[0] == "dp":
            compare(case, *summed(case, mesh, form, whole_there), "sum")
            if mesh.size(1) > 1:
                with pytest.raises(
                    ValueError, match=r"^input: got shape \(2, \d+\), whose dimension 0 is over 4 ranks"
                ):
                    summed(few, mesh, form, sliced)
        else:
            with pytest.raises(ValueError, match=r"^target: got placements"):
                summed(case, mesh, form, whole_there)


def summed(
    case: Case, mesh: DeviceMesh, form: Sequence[Placement], targets: Sequence[Placement]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sum of the losses and its gradients, of tokens that are sharded over all of a mesh. form: of the
    weight."""
    weight = distribute_tensor(case.linear_weight, mesh, form).requires_grad_()
    hidden = distribute_tensor(case.input, mesh, [Shard(0)] * mesh.ndim).requires_grad_()
    loss = linear_cross_entropy(
        hidden, weight, distribute_tensor(case.target, mesh, targets), reduction="sum"
    )
    loss.backward()
    return loss, hidden.grad, weight.grad


CASES = (
    a_sharded_weight,
    sharded_tokens,
    placements_that_are_refused,
    a_parallel_style,
    fully_sharded_units,
    a_weight_outside_its_unit,
    fully_sharded_and_tensor_parallel,
    tokens_and_vocabulary_sharded,
    one_dimension_split_twice,
)
LAST_CASES = (ops_of_sharded_tokens, ops_on_two_dimensions)
