"""Patched models in the hands of Trainer, accelerate, PEFT and FSDP2, beside the unpatched."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

pytest.importorskip("transformers", reason="transformers is not installed (extra integrations)")
pytest.importorskip("accelerate", reason="accelerate is not installed (extra integrations)")

from accelerate import Accelerator
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainingArguments

from cute_lce.integrations.transformers import patch, unpatch
from tests.distributed import ranks
from tests.integrations import sharded_cases
from tests.integrations.language_models import expected, make, own, tokens
from tests.numerics import assert_close


@pytest.fixture(scope="module")
def llama() -> Any:
    """Not to be changed."""
    return make("llama")


# ----------------------------------------------------------------------------------------------------------
# Trainer


def chats() -> list[dict[str, Tensor]]:
    """Of which micro-batches have very different numbers of labels."""
    found = []
    for seed in range(8):
        ids, labels = tokens(seed, rows=1)
        found.append(
            {"input_ids": ids[0], "labels": labels[0] if seed % 4 else labels[0].clone().fill_(-100)}
        )
        found[-1]["labels"][-1 - seed :] = ids[0, -1 - seed :]
    return found


def train(
    model: Any, folder: Path, use_cpu: bool = True, **options: Any
) -> tuple[list[float], list[float], Tensor]:
    """Losses of two steps, the evaluation's and a sum of its logits, and all weights."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=use_cpu,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        logging_steps=1,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    if arguments.device.type == "cuda":
        # More in one process would be nn.DataParallel.
        arguments._n_gpu = 1
    data: Any = chats()

    def metrics(found: Any) -> dict[str, float]:
        return {"sum": float(abs(found.predictions).sum())}

    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data[:2],
        compute_metrics=metrics,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = [trainer.evaluate()[name] for name in ("eval_loss", "eval_sum")]
    return losses, evaluated, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class Counted:
    """Counts what the head gives while training: losses, and logits."""

    def __init__(self, model: Any):
        self.losses = self.logits = 0

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if model.training:
                self.losses += output.dim() == 0
                self.logits += output.dim() > 0

        # Of a module that may have a hook on a patched head.
        hook.__module__ = "torch.distributed.fsdp"
        model.lm_head.register_forward_hook(hook)


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}], ids=str)
def test_a_trainer_that_accumulates(llama: Any, tmp_path: Path, options: dict[str, Any]):
    mine, theirs = copy.deepcopy(llama), copy.deepcopy(llama)
    patch(mine)
    seen = Counted(mine)
    found, want = train(mine, tmp_path, **options), train(theirs, tmp_path, **options)
    assert (seen.losses, seen.logits) == (4, 0)
    assert found[0] == pytest.approx(want[0], rel=1e-5)
    assert found[1] == pytest.approx(want[1], rel=1e-5)
    start = torch.cat([parameter.detach().flatten() for parameter in llama.parameters()])
    assert (want[2] - start).norm() > 1e3 * (found[2] - want[2]).norm()


def test_a_trainer_whose_loss_is_not_the_models(llama: Any, tmp_path: Path):
    """Label smoothing is Trainer's own, from logits: it withholds the labels, and so gets them."""
    mine, theirs = copy.deepcopy(llama), copy.deepcopy(llama)
    patch(mine)
    seen = Counted(mine)
    found, want = (train(each, tmp_path, label_smoothing_factor=0.3) for each in (mine, theirs))
    assert (seen.losses, seen.logits) == (0, 4)
    assert found[:2] == want[:2]
    assert torch.equal(found[2], want[2])


def test_a_trainer_in_bfloat16(llama: Any, tmp_path: Path):
    """accelerate puts autocast around forward; what it takes off again still has the loss."""
    mine = copy.deepcopy(llama)
    patch(mine)
    seen = Counted(mine)
    losses, _, _ = train(mine, tmp_path, bf16=True)
    assert (seen.losses, seen.logits) == (4, 0)
    want, _, _ = train(copy.deepcopy(llama), tmp_path)
    assert losses == pytest.approx(want, rel=2e-2)
    unpatch(mine)
    ids, labels = tokens()
    assert mine(ids, labels=labels).logits is not None


class Asking(Trainer):
    """A subclass with a prediction_step of its own."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None):
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)


@pytest.mark.parametrize("kind", [Trainer, Asking])
def test_a_trainer_that_asks_for_predictions(kind: Any, llama: Any, tmp_path: Path):
    """With train_only=False: logits for predict and metrics, none for a loss alone."""
    mine, theirs = copy.deepcopy(llama), copy.deepcopy(llama)
    patch(mine, train_only=False)
    data: Any = chats()[:4]
    shapes = []
    mine.lm_head.register_forward_hook(hook := lambda module, args, output: shapes.append(output.dim()))
    hook.__module__ = "torch.distributed.fsdp"

    def metrics(found: Any) -> dict[str, float]:
        return {"sum": float(abs(found.predictions).sum())}

    def made(model: Any, **options: Any) -> Any:
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
        return kind(model, arguments, eval_dataset=data, **options)

    found, want = (made(model).predict(data).predictions for model in (mine, theirs))
    assert found.shape == (4, 9, 96)
    assert (found == want).all()
    assert shapes == [3]
    found, want = (made(model, compute_metrics=metrics).evaluate() for model in (mine, theirs))
    assert found["eval_sum"] == pytest.approx(want["eval_sum"], rel=1e-6)
    assert shapes == [3, 3]
    losses = [made(model).evaluate()["eval_loss"] for model in (mine, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert shapes == [3, 3, 0]


def test_compiled_evaluation_without_logits(llama: Any):
    """A whole graph cannot see who asks, and says so."""
    model, (ids, labels) = copy.deepcopy(llama).eval(), tokens()
    patch(model, train_only=False)
    with pytest.raises(Unsupported, match=r"train_only: got False .* fullgraph=False"):
        torch.compile(model, backend="eager", fullgraph=True)(ids, labels=labels)


@pytest.mark.gpu
def test_a_trainer_on_a_gpu(llama: Any, tmp_path: Path):
    mine, theirs = copy.deepcopy(llama), copy.deepcopy(llama)
    patch(mine)
    seen = Counted(mine)
    found, want = (train(each, tmp_path, use_cpu=False, bf16=True) for each in (mine, theirs))
    assert (seen.losses, seen.logits) == (4, 0)
    assert found[0] == pytest.approx(want[0], rel=2e-2)
    assert found[1] == pytest.approx(want[1], rel=2e-2)


# ----------------------------------------------------------------------------------------------------------
# accelerate


@pytest.fixture
def bfloat16() -> Iterator[Accelerator]:
    # A Trainer before has set the process's.
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_unwraps_its_autocast(llama: Any, bfloat16: Accelerator):
    (ids, labels), model = tokens(), copy.deepcopy(llama)
    patch(model)
    prepared = bfloat16.prepare(model)
    assert prepared(ids, labels=labels).logits is None
    bare = bfloat16.unwrap_model(prepared, keep_fp32_wrapper=False)
    found, want = bare(ids, labels=labels), llama(ids, labels=labels)
    assert found.logits is None
    assert torch.allclose(found.loss, want.loss, rtol=1e-6)
    unpatch(bare)
    assert "forward" not in vars(bare)
    assert torch.equal(bare(ids, labels=labels).logits, want.logits)


def test_unpatch_under_accelerates_autocast(llama: Any, bfloat16: Accelerator):
    """It stays; without it the model can be patched again, as the error says."""
    (ids, labels), seen = tokens(), []
    mine, theirs = copy.deepcopy(llama), copy.deepcopy(llama)
    patch(mine)
    for model in (mine, theirs):
        model.model.norm.register_forward_hook(
            lambda module, args, output: seen.append(torch.is_autocast_enabled("cpu"))
        )
        assert bfloat16.prepare(model) is model
    assert mine(ids, labels=labels).logits is None
    unpatch(mine)
    one, other = mine(ids, labels=labels), theirs(ids, labels=labels)
    assert seen == [True] * 3
    assert torch.equal(one.loss, other.loss)
    assert torch.equal(one.logits, other.logits)
    assert one.logits.dtype is torch.float32
    with pytest.raises(ValueError, match=r"^model: got a LlamaForCausalLM whose forward was replaced.*`del"):
        patch(mine)
    del mine.forward
    patch(mine)
    assert torch.allclose(mine(ids, labels=labels).loss, llama(ids, labels=labels).loss, rtol=1e-6)
    assert seen == [True] * 3 + [False]


def test_accelerates_hooks_for_devices(llama: Any):
    """As from_pretrained(device_map=...) leaves them on a model."""
    (ids, labels), model = tokens(), copy.deepcopy(llama)
    for module in (model, model.lm_head):
        add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))
    before = dict(vars(model)), dict(vars(model.lm_head))
    patch(model)
    found = model(ids, labels=labels)
    assert found.logits is None
    assert torch.allclose(found.loss, llama(ids, labels=labels).loss, rtol=1e-6)
    unpatch(model)
    assert (dict(vars(model)), dict(vars(model.lm_head))) == before
    assert torch.equal(model(ids, labels=labels).loss, llama(ids, labels=labels).loss)


class Halving(AlignDevicesHook):
    def post_forward(self, module: Any, output: Any) -> Any:
        return output / 2


def test_a_hook_that_changes_the_logits_is_refused(llama: Any):
    model = copy.deepcopy(llama)
    add_hook_to_module(model.lm_head, AlignDevicesHook("cpu"))
    add_hook_to_module(model.lm_head, Halving("cpu"), append=True)
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM\.lm_head: got accelerate's hook Halving"):
        patch(model)


# ----------------------------------------------------------------------------------------------------------
# PEFT


def with_adapter(model: Any, **options: Any) -> Any:
    """A PEFT model whose adapter does something."""
    peft = pytest.importorskip("peft", reason="peft is not installed (extra integrations)")
    torch.manual_seed(3)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False, **options)
    return peft.get_peft_model(copy.deepcopy(model), config).train()


@pytest.mark.parametrize("first", ["patch", "adapter"])
def test_a_frozen_head_under_an_adapter(first: str):
    model, (ids, labels) = make("tied" if first == "patch" else "phi"), tokens()
    theirs = with_adapter(model, target_modules=["q_proj"])
    if first == "patch":
        patch(model)
        mine = with_adapter(model, target_modules=["q_proj"])
    else:
        mine = with_adapter(model, target_modules=["q_proj"])
        patch(mine)
    assert mine(input_ids=ids, labels=labels).logits is None
    assert mine.get_base_model().lm_head.weight.requires_grad is False
    found, want = own(mine, ids, labels), own(theirs, ids, labels)
    assert found.head.numel() == want.head.numel() == 0
    exact = expected(theirs, ids, labels)
    assert_close("loss", found.loss, exact.loss, want.loss)
    assert_close("adapters", found.others, exact.others, want.others)
    unpatch(mine)
    assert mine(input_ids=ids, labels=labels).logits is not None


# ----------------------------------------------------------------------------------------------------------
# Two processes


def check_ranks(backend: str, cases: Any) -> None:
    failed = {case: found for case, found in ranks.run(2, backend, cases).items() if found}
    assert not failed, "\n\n".join(f"{case}: {found}" for case, found in failed.items())


def test_two_ranks():
    check_ranks("gloo", (*sharded_cases.CASES, sharded_cases.units_of_accelerate))


@pytest.mark.gpu_multi
def test_two_gpus():
    check_ranks("nccl", sharded_cases.CASES)
