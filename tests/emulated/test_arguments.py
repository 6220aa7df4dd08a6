"""Each field of the groups of cute_lce.arguments arrives under its name, and a group of another size nowhere.

Fields of one type that changed places would be taken without a word, by TVM-FFI and by the kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
import torch

from cute_lce import arguments as declarations
from cute_lce.arch import KernelConfig, architecture
from cute_lce.arguments import (
    Counters,
    ForwardOutputs,
    GemmPlan,
    GradientOperands,
    Gradients,
    KeepOutputs,
    LossArguments,
    Operands,
    Products,
    RankStatistics,
    Rows,
    ShardTargets,
    Statistics,
    Stripe,
    Upstream,
)
from cute_lce.compile.frozen import freeze
from cute_lce.plan.kernels import BackwardKey, ForwardKey, Key
from tests import emulator
from tests.emulated import read_back
from tests.emulated.forward import emulated

GROUPS = [
    LossArguments,
    GemmPlan,
    ForwardOutputs,
    KeepOutputs,
    Upstream,
    Statistics,
    Gradients,
    GradientOperands,
    Stripe,
    Counters,
    ShardTargets,
    RankStatistics,
    Rows,
    Products,
]


def numbers(group: Any) -> Iterator[tuple[str, int]]:
    """(path, bits) of a group's numbers, those of groups in it as "logits.windows"."""
    for name, hint in get_type_hints(group, include_extras=True).items():
        width = get_args(hint)[1:]
        if width:
            yield name, width[0]
        else:
            yield from ((f"{name}.{inner}", bits) for inner, bits in numbers(hint))


def built(group: Any, values: Iterator[int]) -> Any:
    """A group of the values, in the order of `numbers`."""
    fields = {
        name: next(values) if get_args(hint) else built(hint, values)
        for name, hint in get_type_hints(group, include_extras=True).items()
    }
    return group(**fields)


def test_every_group_is_read_back():
    declared = [each for each in vars(declarations).values() if hasattr(each, "_fields")]
    assert set(declared) == {Operands, *GROUPS}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_fields_arrive_under_their_names(group: Any, tmp_path):
    """As it is and frozen. Values that differ, and fill more than 32 bits where the field has 64."""
    paths, widths = zip(*numbers(group), strict=True)
    values = [(1 << width - 2) + 1000 + i for i, width in enumerate(widths)]
    # Read in another order than that of the fields.
    compiled = read_back.compile_numbers(group, list(reversed(paths)), str(tmp_path))
    passed = built(group, iter(values))
    for form in (passed, freeze(passed)):
        out = torch.full((len(values),), -1)
        emulator.run(compiled, form, out)
        assert dict(zip(reversed(paths), out.tolist(), strict=True)) == dict(zip(paths, values, strict=True))


def test_operands_arrive_under_their_names(tmp_path):
    operands = Operands(
        hidden=torch.full((3, 8), 5.0, dtype=torch.bfloat16),
        weight=torch.full((4, 8), 6.0, dtype=torch.bfloat16),
        target=torch.full((3,), 7),
    )
    out = torch.full((3,), -1)
    emulator.run(read_back.compile_firsts(str(tmp_path)), *operands, out)
    assert out.tolist() == [5, 6, 7]


# ----------------------------------------------------------------------------------------------------------
# The kernels' own host functions


def _narrow(config: KernelConfig) -> KernelConfig:
    return replace(config, tile_n=64, stages=2)


HOPPER = architecture("sm_90a")
TOKENS = _narrow(HOPPER.token_configs[0])
FORWARD = ForwardKey(TOKENS, keeps=True)
BACKWARD = BackwardKey(TOKENS, TOKENS, HOPPER.dweight_configs[0])
# The groups that they take behind the operands, in this order.
TAKEN = {
    FORWARD: (LossArguments, ForwardOutputs, Rows, GemmPlan, KeepOutputs),
    BACKWARD: (LossArguments, Upstream, Statistics, Gradients, GradientOperands, Rows, Stripe, Counters),
}
FIRST_GROUP = len(Operands._fields)
ARGUMENTS = [(key, FIRST_GROUP + i) for key, taken in TAKEN.items() for i in range(len(taken))]


def _arguments(key: Key) -> list[Any]:
    hidden, weight = torch.zeros(2, 4, 8, dtype=torch.bfloat16)
    operands = Operands(hidden=hidden, weight=weight, target=torch.zeros(4, dtype=torch.int64))
    return [*operands, *(built(group, itertools.repeat(0)) for group in TAKEN[key])]


@pytest.mark.parametrize("form", [tuple, freeze])
@pytest.mark.parametrize("change", [-1, 1], ids=["one too few", "one too many"])
@pytest.mark.parametrize(
    ("key", "position"), ARGUMENTS, ids=lambda each: each if isinstance(each, int) else type(each).__name__
)
def test_a_group_of_another_size_is_refused(key: Key, position: int, change: int, form):
    """By TVM-FFI, which names the argument, before anything is launched."""
    arguments = _arguments(key)
    right = tuple(arguments[position])
    arguments[position] = form(right[:-1] if change < 0 else (*right, right[-1]))
    size = rf"argument #{position} .*expected tuple size={len(right)}$"
    with pytest.raises(ValueError, match=f"Mismatched tuple size on {size}"):
        emulated(key).capture(*arguments)


@pytest.mark.parametrize(("key", "position"), ARGUMENTS[-2:-1], ids=["BackwardKey"])
def test_a_group_inside_a_group_of_another_size_is_refused(key: Key, position: int):
    arguments = _arguments(key)
    arguments[position] = arguments[position]._replace(dhidden=(0, 0, 0))
    with pytest.raises(ValueError, match=rf"Mismatched tuple size on stripe\[5\] in argument #{position} "):
        emulated(key).capture(*arguments)
