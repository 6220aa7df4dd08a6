"""cute_lce.integrations.transformers on real models: their loss and gradients, and what is refused."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers", reason="transformers is not installed (extra integrations)")

import transformers
from transformers.loss import loss_utils

from cute_lce import reference
from cute_lce.integrations import transformers as integration
from cute_lce.integrations.forward_source import Factor, Softcap, Unproven, read
from cute_lce.integrations.transformers import patch, unpatch
from tests.integrations import own_forwards
from tests.integrations.language_models import MODELS, VOCAB, Found, expected, make, own, tokens
from tests.numerics import assert_close


def compare(actual: Found, want: Found, baseline: Found) -> None:
    """All three against float64, beside what the unpatched model gives in the same dtype."""
    for name, got, exact, plain in zip(Found._fields, actual, want, baseline, strict=True):
        assert_close(name, got, exact, plain)


def patched(model: Any, **options: Any) -> Any:
    found = copy.deepcopy(model)
    patch(found, **options)
    return found


@pytest.fixture(scope="module")
def llama() -> Any:
    """Not to be changed."""
    return make("llama")


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients(name: str):
    """Of each architecture: float32 beside the model's own, and float64."""
    model, (ids, labels) = make(name), tokens()
    count = 5.0 if name in ("gemma2", "granite") else None
    given = {} if count is None else {"num_items_in_batch": torch.tensor(count)}
    want = expected(model, ids, labels, count)
    compare(own(patched(model), ids, labels, **given), want, own(model, ids, labels, **given))
    wide = patched(copy.deepcopy(model).double())
    found = wide(input_ids=ids, labels=labels, **given)
    assert found.logits is None
    assert found.loss.dtype is torch.float64
    compare(own(wide, ids, labels, **given), want, want)


def test_what_a_call_may_give(llama: Any):
    """Every way to give labels and counts, beside the unpatched model."""
    model, (ids, labels) = patched(llama), tokens()
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    other = torch.where(labels == -100, 7, labels)
    for given in (
        {"labels": labels},
        {"labels": labels, "num_items_in_batch": 5},
        {"labels": labels, "num_items_in_batch": torch.tensor(5)},
        {"labels": labels, "num_items_in_batch": torch.tensor(5.0)},
        {"labels": labels, "num_items_in_batch": torch.tensor([5])},
        {"labels": labels, "num_items_in_batch": np.int64(5)},
        {"labels": labels, "num_items_in_batch": np.float32(5)},
        {"labels": labels, "shift_labels": shifted.flip(0)},
        {"labels": other, "ignore_index": 7},
        {"labels": labels.flatten()},
        {"labels": labels[:, -3:], "logits_to_keep": 3},
        {"labels": labels, "attention_mask": torch.ones_like(ids)},
    ):
        mine, theirs = model(ids, **given), llama(ids, **given)
        assert torch.allclose(mine.loss, theirs.loss.reshape(()), rtol=1e-6), given
        assert "logits" not in mine
    place = list(inspect.signature(model.forward).parameters).index("labels")
    positional = (ids, *[None] * (place - 1), labels)
    assert torch.allclose(model(*positional).loss, llama(*positional).loss, rtol=1e-6)


def test_the_output_while_training(llama: Any):
    """No logits; all else is as it was."""
    model, (ids, labels) = patched(llama), tokens()
    mine = model(ids, labels=labels, output_hidden_states=True, use_cache=False)
    theirs = llama(ids, labels=labels, output_hidden_states=True, use_cache=False)
    assert type(mine) is type(theirs)
    assert mine.logits is None
    assert [*theirs] == ["loss", "logits", "hidden_states"]
    assert [*mine] == ["loss", "hidden_states"]
    for one, other in zip(mine.hidden_states, theirs.hidden_states, strict=True):
        assert torch.equal(one, other)
    loss, logits, *rest = model(ids, labels=labels, return_dict=False, use_cache=False)
    assert torch.allclose(loss, theirs.loss, rtol=1e-6)
    assert logits is None
    assert not rest


def test_other_calls_are_unchanged(llama: Any):
    model, (ids, labels) = patched(llama), tokens()
    assert torch.equal(model(ids).logits, llama(ids).logits)
    before = copy.deepcopy(llama).eval()
    model.eval()
    mine, theirs = model(ids, labels=labels), before(ids, labels=labels)
    assert torch.equal(mine.loss, theirs.loss)
    assert torch.equal(mine.logits, theirs.logits)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), before.generate(ids, **options))
    assert inspect.signature(model.forward) == inspect.signature(before.forward)
    everywhere = patched(before, train_only=False)
    found = everywhere(ids, labels=labels)
    assert torch.allclose(found.loss, theirs.loss, rtol=1e-6)
    assert found.logits is None
    assert torch.equal(everywhere.generate(ids, **options), before.generate(ids, **options))


def test_autocast_and_no_grad(llama: Any):
    model, (ids, labels) = patched(llama), tokens()
    with torch.no_grad():
        assert torch.allclose(model(ids, labels=labels).loss, llama(ids, labels=labels).loss, rtol=1e-6)
    want = expected(llama, ids, labels)
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = own(model, ids, labels), own(llama, ids, labels)
    assert mine.loss.dtype is torch.float32
    assert_close("others", mine.others, want.others, theirs.others)


def test_a_model_without_memory(llama: Any):
    """On the meta device, as FSDP's loaders make models first; in a context that makes all tensors there."""
    ids, labels = tokens()
    with torch.device("meta"):
        model = type(llama)(llama.config).train()
        patch(model)
    assert model.lm_head.weight.is_meta
    model.to_empty(device="cpu")
    model.load_state_dict(llama.state_dict())
    model.model.rotary_emb = copy.deepcopy(llama.model.rotary_emb)
    assert torch.allclose(model(ids, labels=labels).loss, llama(ids, labels=labels).loss, rtol=1e-6)


def test_all_labels_ignored(llama: Any):
    model, (ids, labels) = patched(llama), tokens()
    found = own(model, ids, torch.full_like(labels, -100))
    assert found.loss == 0
    assert not found.head.any()
    assert not found.others.any()


# ----------------------------------------------------------------------------------------------------------
# What is done to a model, and undone


def everything(model: Any) -> list[dict[str, Any]]:
    return [dict(vars(module)) for module in model.modules()]


@pytest.mark.parametrize("was_set", [False, True])
def test_unpatch_restores_everything(was_set: bool):
    model, (ids, labels) = make("gemma2"), tokens()
    if was_set:
        model.loss_function = loss_utils.ForCausalLMLoss
    before, logits = everything(model), model(ids, labels=labels).logits
    patch(model)
    assert model(ids, labels=labels).logits is None
    with pytest.raises(ValueError, match=r"^model: got a Gemma2ForCausalLM that is patched"):
        patch(model)
    unpatch(model)
    after = everything(model)
    assert [[*each] for each in before] == [[*each] for each in after]
    for one, other in zip(before, after, strict=True):
        assert all(one[name] is other[name] for name in one)
    assert torch.equal(model(ids, labels=labels).logits, logits)
    with pytest.raises(ValueError, match=r"^model: got a Gemma2ForCausalLM that is not patched"):
        unpatch(model)


def test_copies_and_files(tmp_path: Any):
    """A copy and a pickled one are patched on their own; a saved one is as before."""
    # A model that once gave hidden states cannot be pickled, patched or not.
    model, (ids, labels) = make("llama"), tokens()
    before, want = [each.detach().clone() for each in model.parameters()], model(ids, labels=labels).loss
    patch(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.lm_head.weight.data.zero_()
        assert other(ids, labels=labels).logits is None
        assert torch.allclose(other(ids, labels=labels).loss, torch.tensor(float(VOCAB)).log())
        unpatch(other)
        assert other(ids, labels=labels).logits is not None
    found = model(ids, labels=labels)
    assert torch.allclose(found.loss, want, rtol=1e-6)
    assert found.logits is None
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    for one, other in zip(loaded.parameters(), before, strict=True):
        assert torch.equal(one, other)


def in_a_thread(function: Callable[[], Any]) -> Any:
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("run", [in_a_thread, lambda function: function()], ids=["thread", "same"])
def test_calls_within_a_training_call(run: Callable, llama: Any):
    """Each has what it asked for: logits, or a loss of its own labels."""
    model, (ids, labels) = patched(llama), tokens()
    other, others = tokens(1)
    found = []

    def hook(module: nn.Module, args: Any) -> None:
        if not found:
            found.append(None)
            found[0] = run(lambda: (model(other).logits, model(other, labels=others)))

    model.model.norm.register_forward_pre_hook(hook)
    mine = own(model, ids, labels)
    compare(mine, expected(llama, ids, labels), own(llama, ids, labels))
    logits, trained = found[0]
    assert torch.equal(logits, llama(other).logits)
    assert torch.allclose(trained.loss, llama(other, labels=others).loss, rtol=1e-6)
    assert trained.logits is None


def test_training_in_two_threads(llama: Any):
    """Both are in their call when either's head is."""
    model, given = patched(llama), [tokens(seed) for seed in (0, 1)]
    together = threading.Barrier(2, timeout=60)
    model.model.norm.register_forward_pre_hook(lambda module, args: (together.wait(), None)[1])
    found: list[Any] = [None, None]

    def train(place: int) -> None:
        found[place] = model(given[place][0], labels=given[place][1]).loss

    threads = [threading.Thread(target=train, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for loss, (ids, labels) in zip(found, given, strict=True):
        assert torch.allclose(loss, llama(ids, labels=labels).loss, rtol=1e-6)


def test_a_call_that_failed_leaves_nothing(llama: Any):
    model, (ids, labels) = patched(llama), tokens()
    with pytest.raises(ValueError, match=r"^labels: got 18 beside 6"):
        model(ids, labels=labels, logits_to_keep=3)
    assert torch.equal(model(ids).logits, llama(ids).logits)
    assert model.lm_head(torch.zeros(2, 32)).shape == (2, VOCAB)


def test_a_forward_that_was_deleted(llama: Any):
    """As advised to take a wrapper off: no silent logits."""
    model, (ids, labels) = patched(llama), tokens()
    del model.forward
    with pytest.raises(RuntimeError, match=r"^LlamaForCausalLM: got .* deleted, want unpatch\(model\)"):
        model(ids, labels=labels)
    assert torch.equal(model(ids).logits, llama(ids).logits)
    unpatch(model)
    assert torch.equal(model(ids, labels=labels).loss, llama(ids, labels=labels).loss)
    patch(model)
    assert model(ids, labels=labels).logits is None


def test_unpatched_models_need_no_garbage_collection(llama: Any):
    model = patched(llama)
    gone = weakref.ref(model)
    unpatch(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_torch_compile():
    model, (ids, labels) = make("gemma2"), tokens()
    mine = patched(model)
    compiled = torch.compile(mine, backend="aot_eager", fullgraph=True)
    compiled(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(5)).loss.backward()
    found = mine.lm_head.weight.grad
    want = expected(model, ids, labels, 5.0)
    assert found is not None
    assert_close("head", found.flatten(), want.head, own(model, ids, labels, num_items_in_batch=5).head)
    want_logits = model(ids).logits
    for run in (in_a_thread, lambda function: function()):
        assert torch.allclose(run(lambda: compiled(input_ids=ids).logits), want_logits, atol=1e-5)
    again = in_a_thread(lambda: compiled(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(5)))
    assert torch.allclose(again.loss, want.loss.float(), rtol=1e-5)
    assert again.logits is None
    assert torch.equal(mine.eval()(ids).logits, model.eval()(ids).logits)


# ----------------------------------------------------------------------------------------------------------
# What is refused


def test_the_supported_are_read():
    tails = {name: read(type(make(name)).forward) for name in MODELS}
    cap = ("config", "final_logit_softcapping")
    for name, tail in tails.items():
        assert tail.head == "lm_head"
        assert tail.softcap == (Softcap(cap, cap) if name.startswith("gemma") else None)
    assert tails["granite"].factors == (Factor(("config", "logits_scaling"), True, None),)
    assert tails["cohere"].factors == (Factor(("logit_scale",), False, None),)
    assert not any(tail.factors for name, tail in tails.items() if name not in ("granite", "cohere"))


@pytest.mark.parametrize(
    ("kind", "factors", "softcap"),
    [
        ("FalconH1ForCausalLM", (Factor(("model", "lm_head_multiplier"), False, None),), None),
        ("HyperCLOVAXForCausalLM", (Factor(("config", "logits_scaling"), False, None),), None),
        ("NemotronHForCausalLM", (), None),
        ("RecurrentGemmaForCausalLM", (), Softcap(("config", "logits_soft_cap"), None)),
    ],
)
def test_other_forms_are_read(kind: str, factors: tuple, softcap: Softcap | None):
    tail = read(getattr(transformers, kind).forward)
    assert (tail.factors, tail.softcap) == (factors, softcap)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("BambaForCausalLM", "z_loss"),
        ("ChameleonForConditionalGeneration", "image_tokens"),
        ("XGLMForCausalLM", "pad_token_id"),
        ("T5ForConditionalGeneration", "labels gets another value"),
        ("xLSTMForCausalLM", "max_inference_chunksize"),
    ],
)
def test_real_models_that_do_more_are_refused_by_name(kind: str, names: str):
    with pytest.raises(Unproven, match=names):
        read(getattr(transformers, kind).forward)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (own_forwards.Biased, "self.my_bias"),
        (own_forwards.Penalised, "logits.square"),
        (own_forwards.Twice, r"2 calls of self\.lm_head"),
        (own_forwards.Conditional, "kwargs.get"),
        (own_forwards.CappedThenScaled, "a softcap"),
        (own_forwards.TwoCaps, "a softcap"),
        (own_forwards.Relabelled, "labels gets another value"),
        (own_forwards.RelabelledInPlace, "labels may change"),
        (own_forwards.RelabelledBefore, "self.relabel"),
        (own_forwards.Renamed, "other = logits"),
        (own_forwards.Popped, "kwargs may change"),
        (own_forwards.Uncounted, "loss_function"),
        (own_forwards.Delegating, "labels"),
    ],
)
def test_forwards_with_more_are_refused_by_name(kind: type, names: str):
    with pytest.raises(Unproven, match=names):
        read(kind.forward)


@pytest.mark.parametrize(("scale", "cap"), [(None, None), (3.0, None), (None, 1.5), (0.5, 2.5)])
def test_scales_and_caps_are_read_when_called(scale: float | None, cap: float | None, llama: Any):
    model, (ids, labels) = copy.deepcopy(llama), tokens()
    model.__class__, model.my_factor = own_forwards.Unrolled, 0.5
    model.config.my_scale, model.config.my_cap = 7.0, 1.0
    mine = patched(model)
    for each in (model, mine):
        each.config.my_scale, each.config.my_cap = scale, cap
    want = expected(model, ids, labels)
    compare(own(mine, ids, labels), want, own(model, ids, labels))
    mine.config.my_cap = torch.tensor(2.0)
    with pytest.raises(TypeError, match=r"^Unrolled\.config\.my_cap: got Tensor, want a number"):
        mine(ids, labels=labels)


def test_logits_that_are_scaled_in_place(llama: Any):
    model, (ids, labels) = copy.deepcopy(llama), tokens()
    model.__class__, model.config.my_scale = own_forwards.InPlace, 0.25
    compare(own(patched(model), ids, labels), expected(model, ids, labels), own(model, ids, labels))


def test_patched_under_autocast(llama: Any):
    """What patch compares the loss function with is not what autocast would make of it."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        unpatch(patched(llama))


def test_exported_without_labels(llama: Any):
    mine, (ids, _) = patched(llama).eval(), tokens()
    mine.config.use_cache = False
    exported = torch.export.export(mine, (ids,), strict=False).module()
    torch.testing.assert_close(exported(ids).logits, llama(ids).logits)


def test_a_head_that_is_called_twice(llama: Any):
    (ids, labels), model = tokens(), copy.deepcopy(llama)
    model.__class__ = own_forwards.Shared
    model.other = lambda hidden: hidden + model.lm_head(hidden).mean()
    patch(model)
    with pytest.raises(RuntimeError, match=r"^lm_head: got a second call in one of the model"):
        model(ids, labels=labels)
    assert model(ids).logits.shape == (2, 9, VOCAB)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.float32])
def test_counts_of_every_dtype(dtype: torch.dtype, llama: Any):
    (ids, labels), count = tokens(), torch.tensor(5, dtype=dtype)
    got = patched(llama)(ids, labels=labels, num_items_in_batch=count).loss
    torch.testing.assert_close(got, llama(ids, labels=labels, num_items_in_batch=5).loss)


def test_counts_that_are_refused(llama: Any):
    model, (ids, labels) = patched(llama), tokens()
    for count, error in (
        (-1.5, ValueError),
        (float("nan"), ValueError),
        (torch.tensor([5, 5]), ValueError),
        ("7", TypeError),
        (float("inf"), ValueError),
        ([5], TypeError),
    ):
        with pytest.raises(error, match=r"^num_items_in_batch: got"):
            model(ids, labels=labels, num_items_in_batch=count)


class Called(nn.Linear):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) / 2


HOOKS = {
    "forward hook": lambda head, hook: head.register_forward_hook(hook),
    "backward hook": lambda head, hook: head.register_full_backward_hook(hook),
    "backward pre-hook": lambda head, hook: head.register_full_backward_pre_hook(hook),
    "global forward hook": lambda head, hook: modules.register_module_forward_hook(hook),
    "global backward hook": lambda head, hook: modules.register_module_full_backward_hook(hook),
    "global backward pre-hook": lambda head, hook: modules.register_module_full_backward_pre_hook(hook),
}


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
@pytest.mark.parametrize("what", HOOKS)
def test_what_sees_the_heads_output_is_refused(what: str, llama: Any):
    """At patch, and at a call with labels; not at others."""
    (ids, labels), model, bare = tokens(), patched(llama), copy.deepcopy(llama)
    for each, name, call in (
        (bare, r"LlamaForCausalLM\.lm_head", patch),
        (model, "lm_head", lambda each: each(ids, labels=labels)),
    ):
        handle = HOOKS[what](each.lm_head, lambda *args: None)
        try:
            with pytest.raises(ValueError, match=rf"^{name}: got a {what}"):
                call(each)
            assert torch.equal(model(ids).logits, llama(ids).logits)
        finally:
            handle.remove()
    assert model(ids, labels=labels).logits is None


def test_a_head_with_its_own_call_is_refused(llama: Any):
    (ids, labels), model, bare = tokens(), patched(llama), copy.deepcopy(llama)
    model.lm_head.__class__ = bare.lm_head.__class__ = Called
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM\.lm_head: got Called, which has its own"):
        patch(bare)
    with pytest.raises(ValueError, match=r"^lm_head: got Called, which has its own __call__"):
        model(ids, labels=labels)


def test_flops_may_be_counted(llama: Any):
    """By torch's own hooks on all modules."""
    model, (ids, labels) = patched(llama), tokens()
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=labels).loss.backward()
    assert counter.get_total_flops() > 0


class Eightbit(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).round()


def test_heads_and_losses_that_are_refused(llama: Any):
    model = copy.deepcopy(llama)
    with pytest.raises(TypeError, match=r"^model: got Linear, want a transformers\.PreTrainedModel"):
        patch(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"^train_only: got str, want a bool"):
        patch(model, train_only=cast(bool, "no"))
    with pytest.raises(TypeError, match=r"^model: got OptimizedModule"):
        patch(cast(nn.Module, torch.compile(model, backend="aot_eager")))
    model.lm_head = Eightbit(32, VOCAB)
    with pytest.raises(TypeError, match=r"^LlamaForCausalLM\.lm_head: got .*Eightbit, want an nn.Linear"):
        patch(model)
    model.lm_head = nn.Linear(32, VOCAB, bias=False)
    model.lm_head.weight = nn.Parameter(torch.zeros(VOCAB, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match=r"^LlamaForCausalLM\.lm_head\.weight: got Parameter of torch.int8"):
        patch(model)
    model.lm_head.weight = nn.Parameter(TwoTensor(torch.zeros(VOCAB, 32), torch.zeros(VOCAB, 32)))
    with pytest.raises(TypeError, match=r"^LlamaForCausalLM\.lm_head\.weight: got TwoTensor"):
        patch(model)
    model = copy.deepcopy(llama)
    handle = model.lm_head.register_forward_hook(lambda module, args, output: output / 2)
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM\.lm_head: got a forward hook"):
        patch(model)
    handle.remove()
    model.lm_head.forward = lambda input: input
    with pytest.raises(
        ValueError, match=r"^LlamaForCausalLM\.lm_head: got a Linear whose forward was replaced"
    ):
        patch(model)
    del model.lm_head.forward
    model.forward = model.forward
    with pytest.raises(ValueError, match=r"^model: got a LlamaForCausalLM whose forward was replaced"):
        patch(model)
    del model.forward
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.mean()
    with pytest.raises(ValueError, match=r"^loss_function: got .*lambda"):
        patch(model)
    assert integration.PATCH not in vars(model)


def test_a_loss_that_transformers_changed(llama: Any, monkeypatch: pytest.MonkeyPatch):
    """A future or a replaced fixed_cross_entropy that gives other values."""
    theirs = loss_utils.fixed_cross_entropy
    monkeypatch.setattr(
        loss_utils,
        "fixed_cross_entropy",
        lambda *args, **kwargs: 2 * theirs(*args, **kwargs),
    )
    with pytest.raises(ValueError, match=r"^loss_function: got one that gives"):
        patch(copy.deepcopy(llama))


def test_changes_after_patch_are_refused(llama: Any):
    """Where the loss would be another one's; evaluation goes on."""
    (ids, labels), model = tokens(), patched(llama)
    with pytest.raises(
        ValueError, match=r"^labels: got 18 beside 6 hidden states at the head.*logits_to_keep"
    ):
        model(ids, labels=labels, logits_to_keep=3)
    model.config.vocab_size = VOCAB - 1
    with pytest.raises(ValueError, match=r"^vocab_size: got 95, want the head's 96"):
        model(ids, labels=labels)
    model.config.vocab_size = VOCAB
    handle = model.lm_head.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(ValueError, match=r"^lm_head: got a forward hook"):
        model(ids, labels=labels)
    handle.remove()
    head, model.lm_head = model.lm_head, nn.Linear(32, VOCAB)
    with pytest.raises(ValueError, match=r"^lm_head: got torch.nn.*Linear in place of"):
        model(ids, labels=labels)
    model.lm_head = head
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.mean()
    with pytest.raises(ValueError, match=r"^loss_function: got one that was set after patch"):
        model(ids, labels=labels)
    assert torch.equal(model.eval()(ids, labels=labels).loss, llama(ids).logits.mean())
    unpatch(model)
    assert model.loss_function.__name__ == "<lambda>"
    with pytest.raises(RuntimeError, match=r"^model: got nn\.DataParallel around a patched model"):
        patched(llama)._replicate_for_data_parallel()
    model = patched(llama)
    model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
    with pytest.raises(ValueError, match=r"^lm_head: got torch.nn.*Linear in place of"):
        model(ids, labels=labels)
    model = patched(llama)
    model.forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match=r"^model: got LlamaForCausalLM\.forward that was wrapped"):
        unpatch(model)


# ----------------------------------------------------------------------------------------------------------
# bfloat16, on a CPU and on a GPU


def narrow_model(name: str, device: str) -> Any:
    """Of sizes that the kernels take."""
    return make(name, vocab_size=1000, hidden_size=64, intermediate_size=128).bfloat16().to(device)


def check_bfloat16(name: str, device: str) -> None:
    """Beside the model's own loss, whose logits are rounded: loss and head against float64 of the same hidden
    states, the others against float64 of all."""
    model = narrow_model(name, device)
    ids, labels = (each.to(device) for each in tokens(rows=4, length=40, vocab=1000))
    count = torch.tensor(70.0, device=device)
    want = expected(copy.deepcopy(model).cpu(), ids.cpu(), labels.cpu(), 70.0)
    mine = own(patched(model), ids, labels, num_items_in_batch=count)
    theirs = own(model, ids, labels, num_items_in_batch=count)
    head = model.get_output_embeddings()
    bias = None if head.bias is None else head.bias.double()
    softcap = getattr(model.config, "final_logit_softcapping", None)
    scale = getattr(model, "logit_scale", 1 / getattr(model.config, "logits_scaling", 1.0))
    loss, _, *gradients = reference.gradients(
        model.model(ids).last_hidden_state.double(),
        head.weight.double(),
        nn.functional.pad(labels, (0, 1), value=-100)[:, 1:],
        linear_bias=bias,
        softcap=softcap,
        logit_scale=scale,
        denominator=count,
    )
    of_experts = getattr(model(ids), "aux_loss", None)
    if of_experts is not None:
        loss = loss + model.router_aux_loss_coef * of_experts.detach().double()
    assert mine.loss.dtype is torch.float32
    assert_close("loss", mine.loss, loss, theirs.loss)
    if not model.config.tie_word_embeddings:
        assert_close("head", mine.head, torch.cat([each.flatten() for each in gradients]), theirs.head)
    for one, other, exact in ((mine.head, theirs.head, want.head), (mine.others, theirs.others, want.others)):
        assert_close("gradients", one.cpu(), exact, other.cpu(), rounding=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16(name: str):
    check_bfloat16(name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_on_a_gpu(name: str):
    kind = f"{MODELS[name][0]}ForCausalLM"
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    check_bfloat16(name, "cuda")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_torch_compile_on_a_gpu():
    model = narrow_model("llama", "cuda")
    ids, labels = (each.cuda() for each in tokens(rows=4, length=40, vocab=1000))
    mine = patched(model)
    found = torch.compile(mine, fullgraph=True)(input_ids=ids, labels=labels)
    found.loss.backward()
    want = own(model, ids, labels)
    assert torch.allclose(found.loss, want.loss, rtol=1e-2)
    gradient = mine.lm_head.weight.grad
    assert gradient is not None
    assert (gradient.flatten() - want.head).norm() < 0.05 * want.head.norm()
