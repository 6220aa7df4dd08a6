"""The emulator's results against those of an H100, recorded by tests/emulator/hardware/record.py."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import emulator
from tests.emulator.hardware.cases import CASES, to_numpy

RECORDED = Path(emulator.__file__).parent / "hardware" / "recorded"
SEEDS = (0, 1, 2)


@pytest.mark.skipif(
    not RECORDED.exists(), reason="nothing is recorded yet: see tests/emulator/hardware/record.py"
)
def test_every_case_is_recorded_and_small():
    assert {p.stem for p in RECORDED.glob("*.npz")} == {c.name for c in CASES}
    assert sum(p.stat().st_size for p in RECORDED.iterdir()) < 1_000_000


@pytest.mark.skipif(
    not RECORDED.exists(), reason="nothing is recorded yet: see tests/emulator/hardware/record.py"
)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_agrees_with_an_h100(case, tmp_path):
    recorded = np.load(RECORDED / f"{case.name}.npz")
    compiled = emulator.build(case.compile(str(tmp_path)))
    for seed in SEEDS:
        tensors = [_as_tensor(recorded[f"input_{i}"], like) for i, like in enumerate(case.inputs())]
        with emulator.known_allocations():
            case.call(functools.partial(emulator.run, compiled, seed=seed), tensors)
        assert not case.compare(tensors, to_numpy(tensors[-1]), recorded["output"])


def _as_tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """The recorded values with the dtype and strides of `like`."""
    values = (
        torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if like.dtype == torch.bfloat16
        else torch.from_numpy(array)
    )
    out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return out.copy_(values)


def test_comparison_can_fail():
    """Each comparison refuses zeros and a single wrong value."""
    for case in CASES:
        inputs = case.inputs()
        right = (
            np.abs(to_numpy(inputs[-1]).copy())
            if "int" in str(inputs[-1].dtype)
            else np.ones(inputs[-1].shape, np.float32)
        )
        if case.compare.__name__ == "accumulation_order":
            right = (inputs[0].double() @ inputs[1].double().T).float().numpy()
        assert not case.compare(inputs, right.copy(), right), case.name
        wrong = right.copy()
        wrong.reshape(-1)[3] += 1
        assert case.compare(inputs, wrong, right), case.name
        nan = right.astype(np.float32)
        nan.reshape(-1)[3] = np.nan
        assert case.compare(inputs, nan, right.astype(np.float32)), case.name
