"""Cases of DTensors with what a loss takes besides its operands, and of linear_logprob's, for CPUs as for
GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import cute_lce
import cute_lce.reference
from cute_lce import LinearCrossEntropy
from cute_lce.parallel import VocabParallelLoss
from tests.distributed import number_cases
from tests.distributed.dtensor_cases import mesh_of, whole
from tests.distributed.number_cases import DIFFERENTIABLE, INTEGERS, NUMBERS, SHAPE, TOKENS, D
from tests.distributed.ranks import Rank
from tests.numerics import assert_close

linear_cross_entropy: Any = cute_lce.linear_cross_entropy
linear_logprob: Any = cute_lce.linear_logprob
reference: Any = cute_lce.reference
Form = Sequence[Placement] | None
"""Placements, or None for an ordinary tensor of all."""
OF_CLASSES = ("linear_bias", "weight")


def operands(here: Rank, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Of the whole, whose classes are no multiple of the ranks."""
    V = 40 * here.ranks - 3
    factors = {"token_weight": torch.linspace(0, 2, TOKENS).view(SHAPE), "weight": torch.linspace(0.1, 3, V)}
    factors = {name: each.to(here.device) for name, each in factors.items()}
    return {**number_cases.operands(here, dtype, V), **factors}


def place(tensor: Tensor, mesh: DeviceMesh, form: Form) -> Tensor:
    return tensor.clone() if form is None else distribute_tensor(tensor, mesh, form)


def compare(
    here: Rank,
    mesh: DeviceMesh,
    forms: dict[str, Form],
    reduction: str,
    *,
    numbers: dict[str, Any],
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Of tensors that forms names, by linear_cross_entropy's names: the loss and gradients, whole, with
    float64's of an upstream gradient of 1. Returns the loss and the leaves."""
    given = operands(here)
    placed = {name: place(given[name], mesh, form) for name, form in forms.items()}
    leaves = {name: placed[name] for name in ("input", "linear_weight", "linear_bias") if name in placed}
    for leaf in leaves.values():
        leaf.requires_grad_()
    loss = linear_cross_entropy(**placed, reduction=reduction, **numbers, **options)
    (loss.sum() if reduction == "none" else loss).backward()

    def by_the_reference(kind: torch.dtype) -> tuple[Tensor, ...]:
        wide = {
            name: given[name].to(kind) if given[name].is_floating_point() else given[name] for name in forms
        }
        return reference.gradients(**wide, reduction=reduction, **numbers)

    found = [loss.detach(), *(leaf.grad for leaf in leaves.values())]
    exact, plain = by_the_reference(torch.float64), by_the_reference(torch.float32)
    for name, got, want, other in zip(("loss", *leaves), found, exact, plain, strict=True):
        assert_close(name, whole(got), want, other)
    return loss, leaves


EVERY = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 8.0, "logit_scale": 0.7}


def terms_beside_a_sharded_weight(here: Rank) -> None:
    """Of each class and of each token, in every form."""
    mesh = mesh_of(here)
    rows, everywhere, sliced = [Shard(0)], [Replicate()], [Shard(1)]
    for of_classes, inputs, targets, reduction in (
        (None, None, None, "mean"),
        (everywhere, everywhere, None, "sum"),
        (rows, everywhere, everywhere, "none"),
        (rows, sliced, everywhere, "none"),
        (None, sliced, sliced, "none"),
        (everywhere, sliced, sliced, "mean"),
    ):
        forms: dict[str, Form] = {
            "input": inputs,
            "linear_weight": rows,
            "target": targets,
            "token_weight": targets,
            **dict.fromkeys(OF_CLASSES, of_classes),
        }
        loss, leaves = compare(here, mesh, forms, reduction, numbers=EVERY)
        assert isinstance(loss, DTensor) == (inputs is not None)
        bias = leaves["linear_bias"]
        assert isinstance(bias.grad, DTensor) == (of_classes is not None)
        if of_classes is not None and isinstance(bias.grad, DTensor):
            assert bias.grad.placements == tuple(of_classes)
    # The kernels', where there are any, and a factor of rows.
    forms = {"input": None, "linear_weight": rows, "target": None, "token_weight": everywhere, "weight": rows}
    compare(here, mesh, forms, "mean", numbers={})


def denominators_of_sharded_tokens(here: Rank) -> None:
    """The vocabulary whole on every rank, whose losses are parts of "mean"."""
    mesh = mesh_of(here, names=("dp",))
    tokens, everywhere = [Shard(1)], [Replicate()]
    forms: dict[str, Form] = {"input": tokens, "linear_weight": everywhere, "target": tokens}
    denominator = torch.tensor(33.0, device=here.device)
    for each in (33.0, denominator, distribute_tensor(denominator, mesh, everywhere)):
        given = operands(here)
        placed = {name: place(given[name], mesh, form) for name, form in forms.items()}
        loss = linear_cross_entropy(*placed.values(), denominator=each)
        assert isinstance(loss, DTensor)
        assert loss.placements == (Partial(),)
        alone = reference.linear_cross_entropy(
            given["input"], given["linear_weight"], given["target"], denominator=33.0
        )
        torch.testing.assert_close(whole(loss), alone)
    for of_classes in (None, everywhere):
        more = {**forms, "token_weight": tokens, **dict.fromkeys(OF_CLASSES, of_classes)}
        compare(here, mesh, more, "mean", numbers={**EVERY, "denominator": 33.0})
        compare(here, mesh, more, "none", numbers=EVERY)


def terms_on_two_dimensions(here: Rank) -> None:
    """Tokens sharded over one, the vocabulary over the other, and slices over both."""
    for dp in {1, 2, here.ranks}:
        mesh = mesh_of(here, dp, here.ranks // dp, names=("dp", "tp"))
        weight, everywhere = [Replicate(), Shard(0)], [Replicate(), Replicate()]
        for tokens, of_classes in (
            ([Shard(0), Replicate()], None),
            ([Shard(0), Shard(1)], everywhere),
            ([Shard(1), Replicate()], weight),
        ):
            if SHAPE[0] % dp:
                continue
            forms: dict[str, Form] = {
                "input": tokens,
                "linear_weight": weight,
                "target": tokens,
                "token_weight": tokens,
                **dict.fromkeys(OF_CLASSES, of_classes),
            }
            compare(here, mesh, forms, "mean", numbers={**EVERY, "denominator": 20.0})


def numbers_of_dtensors(here: Rank) -> None:
    """linear_logprob's, of tokens on every rank, in slices, and sharded over a second dimension."""
    given = operands(here)
    names = "temperature", "topk_ids"
    for dp, weight, tokens, of_classes in (
        (1, [Replicate(), Shard(0)], None, None),
        (1, [Replicate(), Shard(0)], [Replicate(), Shard(1)], [Replicate(), Shard(0)]),
        (here.ranks, [Replicate(), Replicate()], [Shard(1), Replicate()], None),
        (2, [Replicate(), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Replicate()]),
    ):
        mesh = mesh_of(here, dp, here.ranks // dp, names=("dp", "tp"))
        leaves = [
            place(given[name], mesh, form).requires_grad_()
            for name, form in (("input", tokens), ("linear_weight", weight), ("linear_bias", of_classes))
        ]
        target, temperature, ids = (place(given[name], mesh, tokens) for name in ("target", *names))
        found = linear_logprob(
            *leaves[:2],
            target,
            temperature=temperature,
            topk_ids=ids,
            linear_bias=leaves[2],
            outputs=NUMBERS,
        )
        sums = [getattr(found, name).sum() for name in DIFFERENTIABLE]
        torch.stack(sums).sum().backward()
        upstream = {
            name: torch.ones_like(given["topk_ids" if name == "topk_logprob" else "target"]).double()
            for name in DIFFERENTIABLE
        }
        of_whole = {name: each for name, each in given.items() if name not in ("token_weight", "weight")}
        (expected, exact), (baseline, plain) = (
            number_cases.whole(of_whole, kind, NUMBERS, {}, upstream)
            for kind in (torch.float64, torch.float32)
        )
        for name in NUMBERS:
            got = getattr(found, name)
            assert isinstance(got, DTensor) == (tokens is not None)
            if isinstance(got, DTensor) and tokens is not None:
                assert got.placements == tuple(tokens)
            got = whole(got).detach()
            if name in INTEGERS:
                assert torch.equal(got, expected[name])
            else:
                assert_close(name, got, expected[name], baseline[name])
        for leaf, want, other in zip(leaves, exact, plain, strict=True):
            assert_close("gradient", whole(leaf.grad), want, other)


def parts_and_buffers(here: Rank) -> None:
    """grad_input="partial" is a Partial gradient; grad_weight_out is this rank's rows, or as the gradient."""
    mesh, given = mesh_of(here), operands(here)
    names = "input", "linear_weight", "target"
    for inputs in (None, [Replicate()]):
        hidden, weight, target = (
            place(given[name], mesh, form)
            for name, form in zip(names, (inputs, [Shard(0)], None), strict=True)
        )
        hidden.requires_grad_()
        weight.requires_grad_()
        assert isinstance(weight, DTensor)
        out = torch.zeros_like(weight.to_local(), requires_grad=False)
        if inputs is not None:
            out = DTensor.from_local(out, mesh, [Shard(0)], shape=weight.shape, stride=weight.stride())
        loss = linear_cross_entropy(hidden, weight, target, grad_input="partial", grad_weight_out=out)
        loss.backward()
        assert weight.grad is None
        assert hidden.grad is not None
        part = hidden.grad
        if inputs is None:
            part = DTensor.from_local(part, mesh, [Partial()])
        assert isinstance(part, DTensor)
        assert part.placements == (Partial(),)
        own = (
            out
            if isinstance(out, DTensor)
            else DTensor.from_local(out, mesh, [Shard(0)], shape=weight.shape, stride=weight.stride())
        )
        exact, plain = (
            reference.gradients(given["input"].to(kind), given["linear_weight"].to(kind), given["target"])
            for kind in (torch.float64, torch.float32)
        )
        assert_close("dinput", whole(part), exact[1], plain[1])
        assert_close("dweight", whole(own), exact[2], plain[2])


def a_module_with_terms(here: Rank) -> None:
    """Its bias is sharded as its weight."""
    mesh, given = mesh_of(here), operands(here)
    V = given["linear_weight"].shape[0]
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 8.0}
    for layout in (Replicate(), Shard(1)):
        head = LinearCrossEntropy(D, V, bias=True, device=here.device, **options)
        with torch.no_grad():
            head.weight.copy_(given["linear_weight"])
            head.bias.copy_(given["linear_bias"])
        parallelize_module(head, mesh, VocabParallelLoss(input_layouts=layout))
        hidden = given["input"].chunk(here.ranks, 1)[here.rank] if layout.is_shard() else given["input"]
        loss = head(
            hidden.contiguous(), given["target"], token_weight=given["token_weight"], weight=given["weight"]
        )
        loss.backward()
        tensors = {name: given[name] for name in ("linear_bias", "weight", "token_weight")}
        exact, plain = (
            reference.gradients(
                *(given[name].to(kind) for name in ("input", "linear_weight")),
                given["target"],
                **{name: each.to(kind) for name, each in tensors.items()},
                **options,
            )
            for kind in (torch.float64, torch.float32)
        )
        assert_close("loss", loss.detach(), exact[0], plain[0])
        assert_close("dweight", whole(head.weight.grad), exact[2], plain[2])
        assert_close("dbias", whole(head.bias.grad), exact[3], plain[3])


def dtensors_in_one_graph(here: Rank) -> None:
    """What changes no number of a token but its factor."""
    mesh, given = mesh_of(here), operands(here)
    tokens = {name: place(given[name], mesh, [Shard(1)]) for name in ("input", "target", "token_weight")}
    weight = place(given["linear_weight"], mesh, [Shard(0)]).requires_grad_()
    backend = "inductor" if here.device != "cpu" else "aot_eager"
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=backend, dynamic=False)
    for factors in ({}, {"token_weight": tokens["token_weight"], "denominator": 20.0}):
        found = []
        for function in (linear_cross_entropy, compiled):
            loss = function(tokens["input"], weight, tokens["target"], **factors)
            found.append((loss.detach(), *torch.autograd.grad(loss, weight)))
        for eager, graph in zip(*found, strict=True):
            torch.testing.assert_close(whole(graph), whole(eager))


# torch 2.11 fails to look up what an earlier process has cached of DTensors with symbolic sizes.
@inductor.patch(fx_graph_cache=False)
def dtensors_of_symbolic_sizes_in_one_graph(here: Rank) -> None:
    """A loss and numbers of each token, where the first class of a rank's shard is symbolic too."""
    mesh, given = mesh_of(here), operands(here)
    tokens = [place(given[name], mesh, [Shard(1)]) for name in ("input", "target", "temperature", "topk_ids")]
    rows = [
        place(given[name], mesh, [Shard(0)]).requires_grad_() for name in ("linear_weight", "linear_bias")
    ]

    def loss(input: Tensor, weight: Tensor, bias: Tensor, target: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        return (linear_cross_entropy(input, weight, target, linear_bias=bias, reduction="none"),)

    def numbers(
        input: Tensor, weight: Tensor, bias: Tensor, target: Tensor, temperature: Tensor, ids: Tensor
    ) -> tuple[Tensor, ...]:
        names = "logprob", "entropy", "topk_logprob", "argmax"
        options = {"linear_bias": bias, "temperature": temperature, "topk_ids": ids, "outputs": names}
        found = linear_logprob(input, weight, target, **options)
        return tuple(each for each in found if each is not None)

    backend = "inductor" if here.device != "cpu" else "aot_eager"
    for function in (loss, numbers):
        both = []
        for call in (function, torch.compile(function, fullgraph=True, backend=backend, dynamic=True)):
            results = call(tokens[0], *rows, *tokens[1:])
            total: Any = sum(whole(each).sum() for each in results if each.requires_grad)
            both.append((*(each.detach() for each in results), *torch.autograd.grad(total, rows)))
        for eager, graph in zip(*both, strict=True):
            torch.testing.assert_close(whole(graph), whole(eager))


def terms_whose_placements_are_refused(here: Rank) -> None:
    mesh, given = mesh_of(here), operands(here)
    rows, everywhere, sliced = [Shard(0)], [Replicate()], [Shard(1)]

    def spread(name: str, form: Form) -> Tensor:
        return place(given[name], mesh, form)

    part = DTensor.from_local(given["linear_bias"], mesh, [Partial()])
    count = DTensor.from_local(torch.ones((), device=here.device), mesh, [Partial()])
    weight, hidden, target = spread("linear_weight", rows), spread("input", sliced), spread("target", sliced)
    for name, options in (
        ("linear_bias", {"linear_bias": part}),
        ("linear_bias", {"linear_bias": given["linear_bias"][1:]}),
        ("weight", {"weight": part}),
        ("token_weight", {"token_weight": given["token_weight"]}),
        ("token_weight", {"token_weight": spread("token_weight", rows)}),
        ("denominator", {"denominator": count}),
        ("grad_weight_out", {"grad_weight_out": spread("linear_weight", everywhere)}),
        ("grad_input", {"grad_input": "partial"}),
        ("sequence_dim", {"sequence_dim": 0}),
        ("vocab_start", {"vocab_start": 0}),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            linear_cross_entropy(hidden, weight.requires_grad_(), target, **options)
    for name, options in (
        ("temperature", {"temperature": given["temperature"]}),
        ("topk_ids", {"topk_ids": spread("topk_ids", rows), "outputs": ("topk_logprob",)}),
        ("linear_bias", {"linear_bias": part}),
        ("tp_group", {"tp_group": here.group}),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            linear_logprob(hidden, weight, target, **options)
    for name in ("linear_bias", "token_weight"):
        with pytest.raises(ValueError, match=f"^{name}: got a DTensor beside ordinary operands"):
            linear_cross_entropy(
                given["input"], given["linear_weight"], given["target"], **{name: spread(name, everywhere)}
            )


CASES = (
    terms_beside_a_sharded_weight,
    denominators_of_sharded_tokens,
    terms_on_two_dimensions,
    numbers_of_dtensors,
    parts_and_buffers,
    a_module_with_terms,
    dtensors_in_one_graph,
    dtensors_of_symbolic_sizes_in_one_graph,
    terms_whose_placements_are_refused,
)
