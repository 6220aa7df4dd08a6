"""On a GPU: the sampled loss against float64, its bits, and that it does not synchronise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_lce import reference, sampled_linear_cross_entropy
from tests.gpu.test_forward import needs_kernels, poisoned
from tests.numerics import Case, assert_close, random_case

pytestmark = [*needs_kernels, poisoned]

N, D, V, M = 1300, 776, 5003, 900


def case_of(dtype: torch.dtype) -> tuple[Case, dict[str, Any]]:
    """Ids that repeat, and are targets of some rows."""
    case = random_case(N, D, V, dtype).to("cuda")
    case.target[::7] = -100
    generator = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(V, (M,), generator=generator, device="cuda")
    ids[3:9], ids[20:60] = ids[0], case.target[1:41].clamp(min=0)
    log_q = (
        torch.rand(M, generator=generator, device="cuda"),
        torch.rand(N, generator=generator, device="cuda"),
    )
    bias = torch.randn(V, generator=generator, device="cuda").to(dtype)
    terms = {"sampled_log_q": log_q[0], "target_log_q": log_q[1], "linear_bias": bias}
    return case, {"sampled_ids": ids, "logit_scale": 0.7, **terms}


def train(call: Any, case: Case, terms: dict[str, Any]) -> list[Tensor]:
    leaves = [
        each.detach().requires_grad_() for each in (case.input, case.linear_weight, terms["linear_bias"])
    ]
    loss = call(leaves[0], leaves[1], case.target, **{**terms, "linear_bias": leaves[2]})
    return [loss.detach(), *torch.autograd.grad(loss, leaves, torch.full_like(loss, -2.5))]


def wide(case: Case, terms: dict[str, Any], dtype: torch.dtype) -> tuple[Case, dict[str, Any]]:
    cast = {k: v.to(dtype) if isinstance(v, Tensor) and k != "sampled_ids" else v for k, v in terms.items()}
    return replace(case, input=case.input.to(dtype), linear_weight=case.linear_weight.to(dtype)), cast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_values_and_gradients(window, dtype):
    case, terms = case_of(dtype)
    found = train(sampled_linear_cross_entropy, case, {**terms, "window": window})
    definition = reference.sampled_linear_cross_entropy
    expected = train(definition, *wide(case, terms, torch.float64))
    baseline = train(definition, *wide(case, terms, torch.float32))
    for i, name in enumerate(("loss", "dinput", "dweight", "dbias")):
        # In bfloat16 dlogits are rounded once.
        rounding = 2.0**-9 if i and dtype is torch.bfloat16 else 0.0
        assert_close(name, found[i], expected[i], baseline[i].to(found[i].dtype), rounding=rounding)


def test_bits_repeat_and_nothing_synchronises():
    case, terms = case_of(torch.bfloat16)
    case.target[::2] = 5
    first = train(sampled_linear_cross_entropy, case, terms)
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [train(sampled_linear_cross_entropy, case, terms) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for again in others:
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_ignored_rows_do_not_matter():
    case, terms = case_of(torch.bfloat16)
    want = train(sampled_linear_cross_entropy, case, terms)
    case.input[::7], terms["target_log_q"][::7] = torch.nan, torch.nan
    found = train(sampled_linear_cross_entropy, case, terms)
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))


def test_an_id_out_of_range_makes_losses_nan():
    case, terms = case_of(torch.bfloat16)
    terms["sampled_ids"][5] = V
    assert all(bool(each.isnan().any()) for each in train(sampled_linear_cross_entropy, case, terms))
