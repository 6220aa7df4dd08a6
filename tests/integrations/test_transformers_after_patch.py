"""What patch has proved of a model, its class and its loss is looked at again at each call."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed (extra integrations)")

import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import modeling_utils
from transformers.loss import loss_utils

from cute_lce.integrations.transformers import patch, unpatch
from tests.integrations import own_forwards
from tests.integrations.language_models import VOCAB, expected, make, own, tokens
from tests.numerics import assert_close

AGAIN = r"want unpatch\(model\), then patch\(model\)"
Llama: Any = transformers.LlamaForCausalLM
MAPPING: Any = modeling_utils.LOSS_MAPPING  # pyright: ignore[reportPrivateImportUsage]


@pytest.fixture(scope="module")
def llama() -> Any:
    """Not to be changed."""
    return make("llama")


def doubled(function: Callable) -> Callable:
    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return 2 * function(*args, **kwargs)

    return forward


def with_auxiliary_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
    output = ORIGINAL(self, *args, **kwargs)
    if output.loss is not None:
        output.loss = output.loss + 0.5
    return output


ORIGINAL = Llama.forward
CHANGES: dict[str, tuple[str, Callable[[Any, pytest.MonkeyPatch], None]]] = {
    "class forward": (
        r"LlamaForCausalLM\.forward",
        lambda model, change: change.setattr(Llama, "forward", with_auxiliary_loss),
    ),
    "decorated class forward": (
        r"LlamaForCausalLM\.forward",
        lambda model, change: change.setattr(Llama, "forward", torch.no_grad()(ORIGINAL)),
    ),
    "class": (
        r"Unrolled\.forward",
        lambda model, change: change.setattr(model, "__class__", own_forwards.Unrolled),
    ),
    "loss_type": (
        r"model\.loss_type",
        lambda model, change: change.setattr(model, "loss_type", "ForMaskedLM"),
    ),
    "mapping": (
        "LOSS_MAPPING",
        lambda model, change: change.setitem(MAPPING, "ForCausalLM", loss_utils.ForMaskedLMLoss),
    ),
    "ForCausalLMLoss": (
        "ForCausalLMLoss",
        lambda model, change: change.setattr(
            loss_utils, "ForCausalLMLoss", doubled(loss_utils.ForCausalLMLoss)
        ),
    ),
    "fixed_cross_entropy": (
        "fixed_cross_entropy",
        lambda model, change: change.setattr(
            loss_utils, "fixed_cross_entropy", doubled(loss_utils.fixed_cross_entropy)
        ),
    ),
    "cross_entropy": (
        r"torch\.nn\.functional\.cross_entropy",
        lambda model, change: change.setattr(
            nn.functional, "cross_entropy", doubled(nn.functional.cross_entropy)
        ),
    ),
    "loss_function": (
        "loss_function",
        lambda model, change: setattr(model, "loss_function", doubled(loss_utils.ForCausalLMLoss)),
    ),
    "_loss_function": (
        "loss_function",
        lambda model, change: setattr(model, "_loss_function", doubled(model._loss_function)),
    ),
    "deleted loss_function": ("loss_function", lambda model, change: delattr(model, "_loss_function")),
    "head forward": (
        "lm_head",
        lambda model, change: change.setattr(model.lm_head, "forward", doubled(model.lm_head.forward)),
    ),
    "head class forward": (
        "lm_head",
        lambda model, change: change.setattr(nn.Linear, "forward", doubled(nn.Linear.forward)),
    ),
    "head": ("lm_head", lambda model, change: setattr(model, "lm_head", nn.Linear(32, VOCAB))),
    "compiled head": (
        "lm_head",
        lambda model, change: setattr(model, "lm_head", torch.compile(model.lm_head, backend="eager")),
    ),
    "resized": (
        "lm_head",
        lambda model, change: model.resize_token_embeddings(VOCAB + 8, mean_resizing=False),
    ),
    "parametrised head": (
        r"lm_head\.weight",
        lambda model, change: setattr(
            model.lm_head, "weight", nn.Parameter(torch.zeros(VOCAB, 32, dtype=torch.int8), False)
        ),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_by_name(change: str, llama: Any, monkeypatch: pytest.MonkeyPatch):
    """And without labels the logits are those of the changed model, or an error."""
    (ids, labels), model = tokens(), copy.deepcopy(llama)
    patch(model)
    name, apply = CHANGES[change]
    apply(model, monkeypatch)
    with pytest.raises((ValueError, TypeError), match=rf"^{name}: got.*want") as raised:
        model(ids, labels=labels)
    if change != "parametrised head":
        assert "want unpatch(model), then patch(model)" in str(raised.value)


@pytest.mark.parametrize("change", ["loss_type", "mapping", "class forward"])
def test_also_in_evaluation(change: str, llama: Any, monkeypatch: pytest.MonkeyPatch):
    (ids, labels), model = tokens(), copy.deepcopy(llama).eval()
    patch(model)
    want = model(ids, labels=labels)
    CHANGES[change][1](model, monkeypatch)
    with pytest.raises(ValueError, match=rf"^{CHANGES[change][0]}: got.*{AGAIN}"):
        model(ids, labels=labels)
    monkeypatch.undo()
    assert torch.equal(model(ids, labels=labels).loss, want.loss)


def test_unpatch_and_patch_is_the_way_out(llama: Any, monkeypatch: pytest.MonkeyPatch):
    """Where the changed model is understood it is served, else refused by patch."""
    (ids, labels), model = tokens(), copy.deepcopy(llama)
    patch(model)
    model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
    unpatch(model)
    want = model(ids, labels=labels).loss
    patch(model)
    found = model(ids, labels=labels)
    assert found.logits is None
    torch.testing.assert_close(found.loss, want, rtol=1e-6, atol=0)
    monkeypatch.setattr(Llama, "forward", with_auxiliary_loss)
    unpatch(model)
    torch.testing.assert_close(model(ids, labels=labels).loss, want + 0.5, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match=r"^with_auxiliary_loss: got no labels"):
        patch(model)


def test_a_loss_function_that_was_set_before(llama: Any):
    """Then loss_type means nothing, to the unpatched model neither."""
    (ids, labels), model = tokens(), copy.deepcopy(llama)
    model.loss_function = loss_utils.ForCausalLMLoss
    patch(model)
    model.loss_type = "ForMaskedLM"
    torch.testing.assert_close(model(ids, labels=labels).loss, llama(ids, labels=labels).loss)


def test_what_is_read_at_each_call():
    """A base model, a configuration's numbers, tied weights: whatever they are at the call."""
    (ids, labels), model = tokens(), make("gemma2")
    mine = copy.deepcopy(model)
    patch(mine)
    for each in (model, mine):
        each.model = make("gemma2", seed=1).model
        each.config.final_logit_softcapping = 5.0
        each.lm_head.weight = nn.Parameter(each.lm_head.weight.detach() * 2)
    want, plain, got = expected(model, ids, labels), own(model, ids, labels), own(mine, ids, labels)
    for name, one, exact, other in zip(want._fields, got, want, plain, strict=True):
        assert_close(name, one, exact, other)


@pytest.mark.parametrize("which", ["model", "head"])
def test_a_forward_that_was_replaced_under_accelerates_hook(which: str, llama: Any):
    """Before patch or after: the hook calls what was there."""
    (ids, labels) = tokens()
    for after in (False, True):
        model = copy.deepcopy(llama)
        module = model if which == "model" else model.lm_head
        if after:
            patch(model)
        module.forward = doubled(module.forward) if which == "head" else lambda **given: None
        add_hook_to_module(module, AlignDevicesHook("cpu"))
        if not after:
            with pytest.raises(ValueError, match=r"whose forward was replaced"):
                patch(model)
        elif which == "head":
            with pytest.raises(ValueError, match=rf"^lm_head: got one whose forward was .*{AGAIN}"):
                model(ids, labels=labels)
    model = copy.deepcopy(llama)
    patch(model)
    add_hook_to_module(model.lm_head, AlignDevicesHook("cpu"))
    assert model(ids, labels=labels).logits is None
    model.lm_head.forward = doubled(model.lm_head.forward)
    with pytest.raises(ValueError, match=rf"^lm_head: got one whose forward was .*{AGAIN}"):
        model(ids, labels=labels)


def test_a_copied_head_is_not_patched(llama: Any):
    """As PEFT's modules_to_save copies it; the model is not copied with it."""
    model = copy.deepcopy(llama)
    patch(model)
    head = copy.deepcopy(model.lm_head)
    hidden = torch.randn(2, 32)
    assert torch.equal(head(hidden), llama.lm_head(hidden))
    head.weight.data.zero_()
    assert not head(hidden).any()
    other = copy.deepcopy(llama)
    other.lm_head = head
    patch(other)
    ids, labels = tokens()
    assert torch.allclose(other(ids, labels=labels).loss, torch.tensor(float(VOCAB)).log())
    unpatch(other)
    assert "forward" not in vars(other.lm_head)


def test_a_pickle_is_proved_where_it_is_loaded(llama: Any, monkeypatch: pytest.MonkeyPatch):
    """In a process whose class has another forward it is refused; a copy is refused like the model."""
    model = make("llama")
    patch(model)
    stored = pickle.dumps(model)
    monkeypatch.setattr(own_forwards.InPlace.forward, "__qualname__", "LlamaForCausalLM.forward")
    monkeypatch.setattr(Llama, "forward", own_forwards.InPlace.forward)
    with pytest.raises(ValueError, match=r"^model: got a LlamaForCausalLM that was patched with another"):
        pickle.loads(stored)
    monkeypatch.undo()
    ids, labels = tokens()
    assert pickle.loads(stored)(ids, labels=labels).logits is None
    other = copy.deepcopy(model)
    monkeypatch.setattr(Llama, "forward", with_auxiliary_loss)
    with pytest.raises(ValueError, match=rf"^LlamaForCausalLM\.forward: got .*{AGAIN}"):
        other(ids, labels=labels)


# ----------------------------------------------------------------------------------------------------------
# Counts, and scales that are learned


@pytest.mark.parametrize(
    "count", [0, 0.0, torch.tensor(0), torch.tensor([0.0]), torch.zeros((), dtype=torch.bfloat16)]
)
def test_a_count_of_zero(count: Any, llama: Any):
    """Loss and gradients are 0, with labels or without a valid one."""
    model, (ids, labels) = copy.deepcopy(llama), tokens()
    patch(model)
    for each in (labels, torch.full_like(labels, -100)):
        found = own(model, ids, each, num_items_in_batch=count)
        assert found.loss == 0
        assert found.loss.dtype is torch.float32
        assert not found.head.any()
        assert not found.others.any()


def test_a_learned_scale_is_refused_with_the_way_out(llama: Any):
    model = make("cohere")
    patch(model)
    model.logit_scale = nn.Parameter(torch.tensor(0.5))
    ids, labels = tokens()
    with pytest.raises(
        TypeError, match=r"^CohereForCausalLM\.logit_scale: .*multiply the hidden states by it"
    ):
        model(ids, labels=labels)
