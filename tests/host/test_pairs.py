"""Which pairs of terms compose under which schedule: the tables of docs/losses.md are what calls do.

Each call is made as on a GPU with kernels, where those compute nothing: what is compiled for it says who
serves it, and what is kept.

`python -m tests.host.test_pairs` prints the tables.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_lce import linear_cross_entropy, linear_logprob
from cute_lce.arch import Gpu
from cute_lce.launch import KERNELS
from cute_lce.ops import select
from cute_lce.plan.kernels import ForwardKey, Key
from tests.device import planned_for
from tests.logit_terms import LogCap
from tests.numerics import random_case

LOSSES = Path(__file__).resolve().parents[2] / "docs" / "losses.md"
MARK = "<!-- called: python -m tests.host.test_pairs: {} -->"
BF16, FP16 = torch.bfloat16, torch.float16
SCHEDULES = ("recompute", "keep", "grad_in_forward")
N, D, V = 40, 64, 300

TERMS: dict[str, Callable[[torch.dtype], dict[str, Any]]] = {
    "`linear_bias`": lambda dtype: {"linear_bias": torch.ones(V, dtype=dtype, requires_grad=True)},
    "`weight`": lambda dtype: {"weight": torch.ones(V)},
    "`label_smoothing`": lambda dtype: {"label_smoothing": 0.1},
    "`logit_scale`": lambda dtype: {"logit_scale": 0.5},
    "`softcap`": lambda dtype: {"softcap": 30.0},
    "`softcap`, a `LogitTerm`": lambda dtype: {"softcap": LogCap(3.0)},
    "`z_loss`": lambda dtype: {"z_loss": 1e-4},
    "`token_weight`": lambda dtype: {"token_weight": torch.ones(N)},
    "`denominator`": lambda dtype: {"denominator": 7.0},
}
OUTPUTS: dict[str, Callable[[torch.dtype], dict[str, Any]]] = {
    "`lse`": lambda dtype: {"outputs": ("lse",)},
    "`entropy`": lambda dtype: {"outputs": ("entropy",), "entropy_grad": True},
    "`entropy`, `entropy_grad=False`": lambda dtype: {"outputs": ("entropy",), "entropy_grad": False},
    "`topk_logprob`": lambda dtype: {
        "outputs": ("topk_logprob",),
        "topk_ids": torch.zeros(N, 2, dtype=torch.int64),
    },
    "`argmax`, `is_top1`": lambda dtype: {"outputs": ("argmax", "is_top1")},
    "`log_sum_sq_probs`": lambda dtype: {"outputs": ("log_sum_sq_probs",)},
    "`mean_logit`": lambda dtype: {"outputs": ("mean_logit",)},
    "`temperature`, a number": lambda dtype: {"temperature": 0.7},
    "`temperature`, a tensor": lambda dtype: {"temperature": torch.ones(N)},
    **{
        name: TERMS[name]
        for name in ("`linear_bias`", "`logit_scale`", "`softcap`", "`softcap`, a `LogitTerm`")
    },
}
"""Each beside "logprob"."""
TABLES = {
    "terms": (linear_cross_entropy, TERMS, SCHEDULES),
    "numbers": (linear_logprob, OUTPUTS, SCHEDULES[:2]),
}


class _Asked:
    """What stands for the compiled functions, which compute nothing."""

    def __init__(self):
        self.forwards: list[ForwardKey] = []

    def get(self, key: Key) -> Callable[..., None]:
        if isinstance(key, ForwardKey):
            self.forwards.append(key)
        return lambda *_: None


@contextlib.contextmanager
def kernels() -> Iterator[_Asked]:
    asked = _Asked()
    with pytest.MonkeyPatch.context() as patch, planned_for(Gpu("sm_90a", 132), asked):
        for dtype in (BF16, FP16):
            patch.setitem(select._picked, (torch.device("cpu"), dtype), KERNELS)
        yield asked


def together(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """None: both are one argument, which has a single value."""
    if any(name in one and one[name] is not other[name] for name in set(one) & set(other) - {"outputs"}):
        return None
    outputs = dict.fromkeys((*one.get("outputs", ()), *other.get("outputs", ())))
    return {**one, **other, **({"outputs": tuple(outputs)} if outputs else {})}


def served(call: Callable[..., Any], given: dict[str, Any], schedule: str, dtype: torch.dtype) -> str:
    """A letter of docs/losses.md."""
    case = random_case(N, D, V, dtype)
    hidden, weight = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    if call is linear_logprob:
        given = {**given, "outputs": ("logprob", *given.get("outputs", ()))}
    with kernels() as asked:
        try:
            call(hidden, weight, case.target, schedule=schedule, **given)
        except ValueError as error:
            if not str(error).startswith("schedule: got 'keep' with "):
                raise
            return "-"
    if not asked.forwards:
        return "s"
    (key,) = asked.forwards
    if schedule == "recompute":
        assert not key.keeps
    if not key.keeps or schedule == "grad_in_forward":
        return "k"
    return "l" if "kept_logits" in key.terms else "e"


def cell(name: str, first: str, second: str) -> str:
    """The letters of the schedules in bfloat16 and, where they are others, in float16; of a term with itself
    what it is alone."""
    call, every, schedules = TABLES[name]
    letters = []
    for dtype in (BF16, FP16):
        one = every[first](dtype)
        given = one if first == second else together(one, every[second](dtype))
        if given is None:
            return ""
        letters.append(" ".join(served(call, given, schedule, dtype) for schedule in schedules))
    return letters[0] if letters[0] == letters[1] else f"{letters[0]}; {letters[1]}"


def table(name: str) -> list[list[str]]:
    """A row for each term, a column for each, by its number; the pairs below the diagonal are those above."""
    every = list(TABLES[name][1])
    rows = []
    for i, first in enumerate(every):
        cells = [cell(name, first, second) if j >= i else "" for j, second in enumerate(every)]
        rows.append([f"{i + 1} {first}", *cells])
    return rows


@pytest.mark.parametrize("name", TABLES)
def test_the_documented_pairs(name):
    lines = LOSSES.read_text(encoding="utf-8").splitlines()
    begin = lines.index(MARK.format(name)) + 3
    found = [
        [cell.strip() for cell in line[1:].rstrip().removesuffix("|").split("|")]
        for line in itertools.takewhile(lambda line: line.startswith("|"), lines[begin:])
    ]
    assert found == table(name)


def test_an_argument_has_one_value():
    assert together({"softcap": 30.0}, {"softcap": LogCap(3.0)}) is None
    assert together({"outputs": ("lse",)}, {"outputs": ("logprob",)}) == {"outputs": ("lse", "logprob")}


if __name__ == "__main__":
    for name in TABLES:
        rows = table(name)
        print("", MARK.format(name), f"| | {' | '.join(str(i + 1) for i in range(len(rows)))} |", sep="\n")
        print("|" + "---|" * (len(rows) + 1))
        print(*(f"| {' | '.join(row)} |" for row in rows), sep="\n")
