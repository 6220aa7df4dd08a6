"""cute_lce.integrations.trl: TRL's own function beside ours, and steps of its trainers with each."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="trl is not installed (extra integrations)")

import tokenizers
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from cute_lce import reference
from cute_lce.integrations import trl as integration
from cute_lce.integrations.trl import HOOK, OUTPUTS, LogProb, install, uninstall
from cute_lce.ops import prepared
from tests.integrations.language_models import VOCAB, make
from tests.numerics import assert_close

WORDS = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, VOCAB))]


@pytest.fixture
def installed() -> Iterator[None]:
    install()
    yield
    uninstall()


# ----------------------------------------------------------------------------------------------------------
# The function


def operands(n: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[Any, ...]:
    """hidden, weight, bias, targets."""
    generator = torch.Generator().manual_seed(n)
    hidden, weight = (torch.randn(rows, 16, generator=generator) for rows in (n, VOCAB))
    given = [hidden, weight, torch.randn(VOCAB, generator=generator) if bias else None]
    leaves = [None if each is None else each.to(dtype).requires_grad_() for each in given]
    return *leaves, torch.randint(VOCAB, (n,), generator=generator)


def results(function: Any, given: tuple[Any, ...], *options: Any) -> tuple[list[Any], list[Tensor]]:
    """The results, and the gradients of their sum with odd weights by all leaves."""
    found = list(function.apply(*given, *options))
    upstream = torch.linspace(-1, 2, given[0].shape[0])
    total: Any = sum((upstream * each).sum() for each in found[:2] if each is not None)
    gradients = torch.autograd.grad(total, [each for each in given[:3] if each is not None])
    return found, list(gradients)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("temperature", "softcap", "scale"),
    [(1.0, None, 1.0), (0.7, 3.0, 1.0), (1.3, None, 0.4), (0.9, 2.0, 0.5)],
)
def test_every_result_and_gradient(temperature: float, softcap: float | None, scale: float, bias: bool):
    """Of all outputs, beside TRL's in the same dtype and float64."""
    given = operands(33, bias=bias)
    options = (temperature, 40, softcap, scale, tuple(OUTPUTS))
    found, gradients = results(LogProb, given, *options)
    theirs, their_gradients = results(ChunkedLogProbFunction, given, *options)
    wide: list[Any] = [
        None if each is None else each.detach().double().requires_grad_() for each in given[:3]
    ]
    stats = reference.linear_logprob(
        wide[0],
        wide[1],
        given[3],
        linear_bias=wide[2],
        temperature=temperature,
        softcap=softcap,
        logit_scale=scale,
    )
    assert stats.logprob is not None
    assert stats.entropy is not None
    upstream = torch.linspace(-1, 2, 33, dtype=torch.float64)
    total = (upstream * (stats.logprob + stats.entropy)).sum()
    exact = torch.autograd.grad(total, [each for each in wide if each is not None])
    for name, own, mine, their in zip(OUTPUTS, OUTPUTS.values(), found, theirs, strict=True):
        want = getattr(stats, own)
        if own == "is_top1":
            assert mine.dtype is torch.bool
            assert torch.equal(mine, their)
            assert torch.equal(mine, want)
        else:
            assert_close(name, mine, want.detach(), their)
    for mine, want, their in zip(gradients, exact, their_gradients, strict=True):
        assert_close("gradient", mine, want, their)


def test_the_first_maximum_is_the_top_one():
    hidden, weight = torch.ones(2, 4), torch.zeros(6, 4)
    weight[2] = weight[4] = 1
    targets = torch.tensor([2, 4])
    functions: tuple[Any, ...] = (LogProb, ChunkedLogProbFunction)
    for function in functions:
        found = function.apply(hidden, weight, None, targets, 1.0, 4, None, 1.0, ("is_top1",))
        assert found[4].tolist() == [True, False]


@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy"), ("entropy", "is_top1"), ()])
def test_only_what_is_asked_for(outputs: tuple[str, ...]):
    given: Any = (*operands(7), 1.0, 40, None, 1.0, outputs)
    mine: Any = LogProb.apply(*given)
    theirs: Any = ChunkedLogProbFunction.apply(*given)
    for name, one, other in zip(OUTPUTS, mine, theirs, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            assert torch.allclose(one.float(), other.float(), rtol=1e-5, atol=1e-5)


def test_no_token_at_all():
    """A micro-batch without a valid label: zeros that reach the parameters."""
    found, gradients = results(LogProb, operands(0), 1.0, 40, None, 1.0, tuple(OUTPUTS))
    assert [each.shape for each in found] == [(0,)] * 5
    assert all(not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_head_of_another_dtype(autocast: bool):
    """bfloat16 hidden states beside a float32 head, and autocast of both in float32."""
    hidden, weight, bias, targets = operands(33)
    given = (hidden if autocast else hidden.detach().bfloat16().requires_grad_(), weight, bias, targets)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (mine, *_), gradients = results(LogProb, given, 1.0, 40, None, 1.0, ("log_probs",))
        (theirs, *_), their_gradients = results(
            ChunkedLogProbFunction, given, 1.0, 40, None, 1.0, ("log_probs",)
        )
    rounded = [each.detach().bfloat16().double() for each in (hidden, weight, bias)]
    exact = reference.linear_logprob(rounded[0], rounded[1], targets, linear_bias=rounded[2]).logprob
    assert exact is not None
    assert mine.dtype is torch.float32
    assert_close("logprob", mine, exact, theirs)
    for one, other in zip(gradients, their_gradients, strict=True):
        assert one.dtype is other.dtype
        assert torch.allclose(one.float(), other.float(), rtol=0.05, atol=0.05)


def test_numbers_of_tokens_that_change_every_step(monkeypatch: pytest.MonkeyPatch):
    """hidden[mask]: what is prepared for a number of tokens is not kept without end, and nothing compiles."""
    monkeypatch.setattr(prepared, "MOST_CACHED", 8)
    prepared.cache.clear()
    seen, graphs = set(), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for n in range(1, 40):
        hidden, weight, _, targets = operands(n, bias=False)
        results(LogProb, (hidden, weight, None, targets), 1.0, 40, None, 1.0, ("log_probs", "entropy"))
        results(LogProb, (hidden, weight, None, targets), 1.0, 40, None, 1.0, ("log_probs",))
        seen.add(len(prepared.cache))
    assert 0 < max(seen) <= 8
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_in_one_graph():
    """Under torch_compile of a trainer's arguments."""

    def score(*given: Any) -> Any:
        return LogProb.apply(*given)[:2]

    given = (*operands(9), 0.7, 40, 3.0, 0.5, ("log_probs", "entropy"))
    found = torch.compile(score, backend="aot_eager", fullgraph=True)(*given)
    for one, other in zip(found, score(*given), strict=True):
        assert torch.allclose(one, other)


def test_float32_on_a_device_with_kernels_is_told(monkeypatch: pytest.MonkeyPatch):
    given: tuple[Any, ...] = (*operands(5), 1.0, 40)
    narrow = (*(each.detach().bfloat16() for each in given[:3]), *given[3:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration._warn_of_float32.cache_clear()
        LogProb.apply(*given)
    monkeypatch.setattr(integration, "implementation", lambda device, dtype: dtype)
    integration._warn_of_float32.cache_clear()
    with pytest.warns(UserWarning, match="cast_lm_head_to_fp32"):
        LogProb.apply(*given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LogProb.apply(*given)
        integration._warn_of_float32.cache_clear()
        LogProb.apply(*narrow)
    integration._warn_of_float32.cache_clear()


def test_what_is_refused(installed: None, monkeypatch: pytest.MonkeyPatch):
    hidden, weight, bias, targets = operands(5)
    weight.ds_id = 1
    with pytest.raises(ValueError, match=r"^weight: got one that DeepSpeed's ZeRO-3 shards"):
        LogProb.apply(hidden, weight, bias, targets, 1.0, 40)
    with pytest.raises(ValueError, match=r"^schedule: got 'grad_in_forward'"):
        install(schedule="grad_in_forward")
    uninstall()
    assert getattr(utils, HOOK) is ChunkedLogProbFunction
    with pytest.raises(ValueError, match=r"^trl: got no function of cute_lce's"):
        uninstall()
    monkeypatch.setattr(utils, HOOK, torch.autograd.Function)
    with pytest.raises(ImportError, match=r"^trl: got _ChunkedLogProbFunction with parameters"):
        install()
    monkeypatch.undo()
    install(workspace_mb=100)
    install(workspace_mb=200)
    assert LogProb.compute.workspace_mb == 200


# ----------------------------------------------------------------------------------------------------------
# The trainers


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Words of a vocabulary that is made here."""
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


COMMON: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": 2,
    "logging_steps": 1,
    "learning_rate": 0.1,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "seed": 3,
}


def sft(model: Any, tokenizer: Any, folder: Path) -> Any:
    data = [{"prompt": "w5 w6 w7", "completion": f" w{i + 9} w{i + 11}"} for i in range(8)]
    config = SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, **COMMON
    )
    return SFTTrainer(model, args=config, train_dataset=Dataset.from_list(data), processing_class=tokenizer)


def dpo(model: Any, tokenizer: Any, folder: Path) -> Any:
    data = [{"prompt": "w5 w6", "chosen": f" w{i + 9} w8", "rejected": f" w{i + 20}"} for i in range(8)]
    config = DPOConfig(output_dir=str(folder), per_device_train_batch_size=2, **COMMON)
    return DPOTrainer(
        model,
        ref_model=make("gemma2", seed=9),
        args=config,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
    )


def reward(completions: list[str], **others: Any) -> list[float | None]:
    return [sum(int(word[1:]) for word in text.split() if word[1:].isdigit()) / 50 for text in completions]


def grpo(model: Any, tokenizer: Any, folder: Path, **options: Any) -> Any:
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=5,
        temperature=0.8,
        **options,
        **COMMON,
    )
    data = Dataset.from_list([{"prompt": f"w{i + 3} w{i + 4}"} for i in range(8)])
    return GRPOTrainer(
        model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer
    )


def grpo_in_float32(model: Any, tokenizer: Any, folder: Path) -> Any:
    return grpo(model, tokenizer, folder, cast_lm_head_to_fp32=True, top_entropy_quantile=0.5)


def run(make_trainer: Callable, model: Any, tokenizer: Any, folder: Path) -> tuple[list[dict], Tensor]:
    """What two steps log, and all weights."""
    model = copy.deepcopy(model)
    trainer = make_trainer(model, tokenizer, folder)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return logged, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("make_trainer", [sft, dpo, grpo, grpo_in_float32], ids=lambda each: each.__name__)
def test_a_trainers_steps(
    make_trainer: Callable, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two steps of the real trainer: all that it logs, and the weights, are as with TRL's own function."""
    model = make("gemma2")
    want, their_weights = run(make_trainer, model, tokenizer, tmp_path)
    calls: list[tuple[str, ...]] = []
    apply = LogProb.apply
    monkeypatch.setattr(LogProb, "apply", lambda *given: (calls.append(given[8]), apply(*given))[1])
    install()
    try:
        found, weights = run(make_trainer, model, tokenizer, tmp_path)
    finally:
        uninstall()
    assert len(calls) >= 2
    times = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "step_time")
    assert len(found) == 2
    for mine, theirs in zip(found, want, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - set(times):
            assert float(mine[name]) == pytest.approx(float(theirs[name]), rel=1e-4, abs=1e-5), name
    start = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert (weights - their_weights).norm() < 1e-4 * (their_weights - start).norm()
