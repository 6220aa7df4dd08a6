"""Heads that PEFT wraps: LoRA, modules_to_save and trained tokens, beside the unpatched model and float64."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra integrations)")
pytest.importorskip("peft", reason="peft is not installed (extra integrations)")

import peft
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor
from torch.nn import functional as F

from cute_lce.integrations.transformers import patch, unpatch
from tests.integrations.language_models import Found, make, tokens
from tests.numerics import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
LORA: dict[str, Any] = {"target_modules": ["q_proj", "lm_head"]}
SAVED: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
TOKENS: dict[str, Any] = {"target_modules": ["q_proj"], "trainable_token_indices": [5, 90, 7]}


def with_adapter(name: str, options: dict[str, Any], *more: dict[str, Any]) -> Any:
    """A PEFT model, each of whose adapters does something: the numbers of its parameters are all random."""
    model = make(name)
    for index, each in enumerate((options, *more)):
        config = peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 3, "lora_alpha": 4, **each})
        if index:
            model.add_adapter(f"adapter{index}", config)
        else:
            model = peft.get_peft_model(model, config)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.train()


def run(model: Any, exact: bool = False) -> Found:
    """The loss, the gradients of the parameters in the head, and those of all others; exact: from logits in
    the model's dtype, which transformers' own loss casts to float32."""
    ids, labels = tokens()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    if exact:
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    else:
        loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    head = {id(each) for each in model.get_base_model().lm_head.parameters()}
    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.grad is not None:
            parts[id(parameter) in head].append(parameter.grad.flatten())
    return Found(loss.detach(), *(torch.cat([*parts[which], torch.zeros(0)]) for which in (True, False)))


def check(model: Any) -> None:
    """A patched copy beside the model, and no logits."""
    ids, labels = tokens()
    mine = copy.deepcopy(model)
    patch(mine)
    assert mine(input_ids=ids, labels=labels).logits is None
    want, plain, got = run(copy.deepcopy(model).double(), exact=True), run(model), run(mine)
    for name, one, exact, other in zip(Found._fields, got, want, plain, strict=True):
        assert one.shape == other.shape
        assert_close(name, one, exact, other)
    unpatch(mine)
    assert mine(input_ids=ids, labels=labels).logits is not None


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", LORA),
        ("phi", LORA | {"lora_bias": True, "use_rslora": True, "r": 5}),
        ("gemma2", LORA | {"lora_dropout": 0.4}),
        ("phi", SAVED),
        ("granite", {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [5, 90]}}),
        ("tied", TOKENS),
    ],
)
def test_values_and_gradients(name: str, options: dict[str, Any]):
    """With dropout the same masks are drawn."""
    check(with_adapter(name, options))


def test_bfloat16_with_adapters_in_float32():
    model = with_adapter("llama", LORA)
    for name, parameter in model.named_parameters():
        if "lora" not in name:
            parameter.data = parameter.data.bfloat16()
    want, plain = run(copy.deepcopy(model).double(), exact=True), run(model)
    patch(model)
    got = run(model)
    for name, one, exact, other in zip(Found._fields, got, want, plain, strict=True):
        assert_close(name, one, exact, other, rounding=2.0**-8)


@pytest.mark.parametrize("options", [LORA, SAVED, TOKENS], ids=["lora", "saved", "tokens"])
def test_the_adapters_that_are_active(options: dict[str, Any]):
    """They may change between calls."""
    tied = "tied" if options is TOKENS else "llama"
    second = options | ({"trainable_token_indices": [11]} if options is TOKENS else {"r": 4})
    theirs, (ids, labels) = with_adapter(tied, options, second), tokens()
    mine = copy.deepcopy(theirs)
    patch(mine)
    losses = []

    def compare() -> None:
        want, got = (model(input_ids=ids, labels=labels) for model in (theirs, mine))
        assert got.logits is None
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=0)
        losses.append(got.loss.item())

    for name in ("default", "adapter1"):
        for model in (theirs, mine):
            model.set_adapter(name)
        compare()
    if options is LORA:
        for model in (theirs, mine):
            model.base_model.set_adapter(["default", "adapter1"])
        compare()
    with theirs.disable_adapter(), mine.disable_adapter():
        compare()
    for model in (theirs, mine):
        model.base_model.set_adapter("default")
        if options is not SAVED:
            model.merge_adapter()
    compare()
    with theirs.disable_adapter(), mine.disable_adapter():
        compare()
    compare()
    assert len(set(losses)) >= 3


@pytest.mark.parametrize("options", [LORA, SAVED, TOKENS], ids=["lora", "saved", "tokens"])
def test_an_adapter_that_comes_or_goes_after_patch(options: dict[str, Any]):
    """At the head it is refused, and then served as the error says."""
    ids, labels = tokens()
    model = make("tied" if options is TOKENS else "llama")
    patch(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)).train()
    again = r"want unpatch\(model\), then patch\(model\)"
    with pytest.raises(ValueError, match=rf"^lm_head: got peft\..* in place of what was patched, {again}"):
        wrapped(input_ids=ids, labels=labels)
    unpatch(wrapped)
    want = wrapped(input_ids=ids, labels=labels).loss
    patch(wrapped)
    torch.testing.assert_close(wrapped(input_ids=ids, labels=labels).loss, want, rtol=1e-5, atol=0)
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        found = other(input_ids=ids, labels=labels)
        assert found.logits is None
        torch.testing.assert_close(found.loss, want, rtol=1e-5, atol=0)
    merged = wrapped.merge_and_unload()
    with pytest.raises(ValueError, match=rf"^lm_head: got torch.nn.*Linear in place of .*, {again}"):
        merged(input_ids=ids, labels=labels)
    unpatch(merged)
    want = merged(input_ids=ids, labels=labels).loss
    patch(merged)
    torch.testing.assert_close(merged(input_ids=ids, labels=labels).loss, want, rtol=1e-5, atol=0)


def test_a_second_saved_head_after_patch():
    model, (ids, labels) = with_adapter("llama", SAVED), tokens()
    patch(model)
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", **SAVED))
    assert model(input_ids=ids, labels=labels).logits is None
    model.set_adapter("other")
    with pytest.raises(
        ValueError, match=r"^lm_head: got an adapter that was added after patch, want unpatch"
    ):
        model(input_ids=ids, labels=labels)
    unpatch(model)
    want = model(input_ids=ids, labels=labels).loss
    patch(model)
    found = model(input_ids=ids, labels=labels)
    assert found.logits is None
    torch.testing.assert_close(found.loss, want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("options", [LORA, TOKENS], ids=["lora", "tokens"])
def test_the_copy_fits_the_workspace(options: dict[str, Any]):
    model, (ids, labels) = with_adapter("tied" if options is TOKENS else "llama", options), tokens()
    head = "LlamaForCausalLM.lm_head"
    with pytest.raises(
        ValueError, match=rf"^workspace_mb: got 0\.01, want at least 1 for the copy of {head}"
    ):
        patch(model, workspace_mb=0.01)
    with model.disable_adapter():
        patch(model, workspace_mb=0.011)
    with pytest.raises(ValueError, match=r"^workspace_mb: got 0\.011, .*an adapter that leaves the head out"):
        model(input_ids=ids, labels=labels)
    unpatch(model)
    patch(model, workspace_mb=1)
    assert model(input_ids=ids, labels=labels).logits is None


def test_refused():
    """By name, with the way out."""
    for options, error, message in (
        (LORA | {"use_dora": True}, ValueError, r"the adapter 'default' with PEFT's DoraLinearVariant"),
        (None, TypeError, r"got peft\.tuners\.ia3\.layer\.Linear, want an nn.Linear"),
    ):
        if options is None:
            config = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["lm_head"], feedforward_modules=[])
            model = peft.get_peft_model(make("llama"), config)
        else:
            model = with_adapter("llama", options)
        with pytest.raises(error, match=rf"^LlamaForCausalLM\.lm_head: .*{message}.* leaves the head out"):
            patch(model)
    ids, labels = tokens()
    for options, places in (
        (LORA, ("base_layer", "lora_B.default")),
        (SAVED, ("modules_to_save.default",)),
        (TOKENS, ("token_adapter.base_layer", "token_adapter")),
    ):
        model = with_adapter("tied" if options is TOKENS else "llama", options)
        patch(model)
        head = model.get_base_model().lm_head
        for place in places:
            module = head.get_submodule(place)
            handle = module.register_forward_hook(lambda module, args, output: output / 2)
            with pytest.raises(ValueError, match=r"^lm_head.*: got a (forward )?hook"):
                model(input_ids=ids, labels=labels)
            handle.remove()
            before = vars(module).get("forward")
            module.forward = lambda *args: args[0]
            with pytest.raises(ValueError, match=r"^lm_head.*: got one whose forward was replaced"):
                model(input_ids=ids, labels=labels)
            del module.forward
            if before is not None:
                module.forward = before
        assert model(input_ids=ids, labels=labels).logits is None
    model = with_adapter("llama", LORA).eval()
    patch(model, train_only=False)
    with pytest.raises(ValueError, match=r"^lm_head: got adapter_names with labels"):
        model(input_ids=ids, labels=labels, adapter_names=["default", "__base__"])


def test_accelerates_hooks_on_a_saved_head():
    model, (ids, labels) = with_adapter("llama", SAVED), tokens()
    add_hook_to_module(model.get_base_model().lm_head.modules_to_save["default"], AlignDevicesHook("cpu"))
    want = model(input_ids=ids, labels=labels).loss
    patch(model)
    found = model(input_ids=ids, labels=labels)
    assert found.logits is None
    torch.testing.assert_close(found.loss, want, rtol=1e-5, atol=0)
