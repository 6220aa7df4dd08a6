"""Tiny models of transformers, made from their configurations, and the float64 of their loss."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

VOCAB = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 0,
    "num_key_value_heads": 4,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "output_router_logits": True}
        | EXPERTS,
    ),
    "gpt_oss": ("GptOss", {"head_dim": 8, "num_local_experts": 4} | EXPERTS),
    "gemma2": ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {"head_dim": 8, "final_logit_softcapping": 3.0}),
    "granite": ("Granite", {"logits_scaling": 4.0}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "phi": ("Phi", {}),
    "deepseek_v3": ("DeepseekV3", LATENT | EXPERTS),
}
"""Name -> the beginning of its classes' names, and what its configuration has besides SIZES."""


def make(name: str, seed: int = 0, **sizes: int) -> Any:
    """A model in training mode, float32, whose logits are of the size of a trained one's."""
    kind, own = MODELS[name]
    config_kind = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, config_kind)(**{**SIZES, **own, **sizes}, attn_implementation="eager")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.train()


def tokens(seed: int = 1, rows: int = 2, length: int = 9, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """input_ids and labels, (rows, length), of which the first row's first four are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


class Found(NamedTuple):
    """A loss, the gradient of the head's parameters, and that of all others, each as one vector."""

    loss: Tensor
    head: Tensor
    others: Tensor


def gradients(model: Any, loss: Tensor) -> Found:
    model.zero_grad(set_to_none=True)
    loss.backward()
    own = {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.grad is not None:
            parts[id(parameter) in own].append(parameter.grad.flatten())
    empty = loss.new_zeros(0)
    return Found(loss.detach(), *(torch.cat([*parts[which], empty]) for which in (True, False)))


def own(model: Any, ids: Tensor, labels: Tensor, **given: Any) -> Found:
    """What a model's own call gives."""
    return gradients(model, model(input_ids=ids, labels=labels, **given).loss)


def expected(model: Any, ids: Tensor, labels: Tensor, count: float | None = None) -> Found:
    """The same in float64, from the logits that the unpatched model gives without labels."""
    wide = copy.deepcopy(model).double()
    found = wide(input_ids=ids)
    assert found.logits.dtype is torch.float64
    nll = F.cross_entropy(
        found.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
    )
    loss = nll / (int((labels[:, 1:] != -100).sum()) if count is None else count)
    if getattr(found, "aux_loss", None) is not None:
        loss = loss + wide.router_aux_loss_coef * found.aux_loss
    return gradients(wide, loss)
