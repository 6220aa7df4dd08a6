"""Forwards of users: those that do something that a loss without logits would miss, and those that do not."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

Llama: Any = transformers.LlamaForCausalLM


class Biased(Llama):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        logits = logits + self.my_bias
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return {"loss": loss, "logits": logits}


class Penalised(Llama):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
            loss = loss + logits.square().mean()
        return {"loss": loss}


class Twice(Llama):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any):
        hidden = self.model(input_ids).last_hidden_state
        hidden = hidden + self.lm_head(hidden).mean()
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


class Conditional(Llama):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        if kwargs.get("temperature") is not None:
            logits = logits / self.config.temperature
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


class CappedThenScaled(Llama):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        logits = torch.tanh(logits / self.config.cap) * self.config.cap
        logits = logits * self.config.scale
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


class TwoCaps(Llama):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        logits = torch.tanh(logits / self.config.cap) * self.config.other_cap
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


class Relabelled(Llama):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any):
        labels = None if labels is None else labels.clamp(max=50)
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


class RelabelledInPlace(Llama):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = None
        if labels is not None:
            labels[labels == 7] = -100
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


class RelabelledBefore(Llama):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        self.relabel(labels)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


class Renamed(Llama):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        other = logits
        other /= 2
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


class Shared(Llama):
    """Its loss is understood, but another module calls the head too."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any):
        hidden = self.other(self.model(input_ids).last_hidden_state)
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


class Popped(Llama):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any):
        kwargs.pop("num_items_in_batch", None)
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


class Uncounted(Llama):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


class Delegating(Llama):
    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any):
        return super().forward(*args, labels=labels, **kwargs)


class InPlace(Llama):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        logits *= self.config.my_scale
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


class Unrolled(Llama):
    """Every form that is understood, in one."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any):
        scale = getattr(self.config, "my_scale", None)
        logits = self.my_factor * self.lm_head(self.model(input_ids).last_hidden_state).contiguous()
        if scale is not None:
            logits *= scale
        if (cap := self.config.my_cap) is not None:
            logits = torch.tanh(logits / cap)
            logits = logits * cap
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)
