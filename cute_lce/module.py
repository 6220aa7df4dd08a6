"""The loss as a module that owns the projection's weight."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from . import functional
from .arguments import Operands
from .functional import call_with_terms, check_types, check_types_besides, is_any_given
from .logit_term import term_of
from .ops import is_distributed, is_plain_eager, linear_cross_entropy
from .options import (
    NO_TERMS,
    CallOptions,
    LossOptions,
    TermOptions,
    defaults,
    split_options,
    with_default_workspace,
)
from .reference import logits
from .scalars import python_number


class LinearCrossEntropy(nn.Linear):
    """An nn.Linear whose forward is the cross entropy of its output: the logits are never stored.

    Its parameter `weight` (num_classes, in_features) is initialised, named and saved as nn.Linear's, so that
    it can be tied to an embedding or loaded from an lm_head. `forward(input, target)` is linear_cross_entropy
    with the options given here; see there for shapes, dtypes, errors and memory.

    Args:
        in_features: d, the hidden size.
        num_classes: V, the vocabulary.
        bias: whether there is also a parameter `bias` (num_classes,), the call's linear_bias.
        num_heads: K, for several heads: weight is (K, num_classes, in_features), bias (K, num_classes),
            target (..., K), and the logits are (..., K, V). None: one head, without that dimension.
        device, dtype: those of the parameters.
        options: reduction, ignore_index, label_smoothing, logit_scale, softcap, z_loss, schedule,
            workspace_mb, window, as in linear_cross_entropy.
    """

    num_heads: int | None = None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        num_heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[CallOptions],
    ):
        loss, terms, compute = split_options(options)
        num_heads = python_number(num_heads)
        if num_heads is not None and (type(num_heads) is not int or num_heads < 1):
            raise ValueError(f"num_heads: got {num_heads!r}, want at least 1 or None")
        super().__init__(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.options, self.terms, self.compute = loss, terms, compute
        if num_heads is not None:
            self.num_heads = num_heads
            for name, parameter in list(self.named_parameters(recurse=False)):
                shape = (num_heads, *parameter.shape)
                self.register_parameter(name, nn.Parameter(parameter.new_empty(shape)))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters as nn.Linear's, those of each head."""
        if self.num_heads is None:
            return super().reset_parameters()
        bound = self.in_features**-0.5
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)
        return None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input: Tensor,
        target: Tensor | None = None,
        *,
        weight: Tensor | None = None,
        token_weight: Tensor | None = None,
        denominator: Tensor | float | None = None,
    ) -> Tensor:
        """The loss of input (..., d) for target (...); without a target the logits (..., V).

        weight: class weights (V,), not the projection's weight. With several heads target is (..., K), weight
        (K, V), and without a target input is (..., d), which the heads share, and the logits are (..., K, V).
        """
        if target is None:
            return self._logits(input)
        if self.num_heads is not None:
            return self._by_name(input, target, weight, token_weight, denominator)
        check_types(input, self.weight, target)
        plain = is_plain_eager(input, self.weight, target)
        compute = with_default_workspace(self.compute)
        tensors = self.bias, weight, token_weight, denominator
        if plain and self.terms == NO_TERMS and not is_any_given(tensors):
            return linear_cross_entropy(input, self.weight, target, self.options, compute, watched=False)
        check_types_besides(weight=weight, token_weight=token_weight)
        if not plain and is_distributed(input, self.weight, target):
            return self._by_name(input, target, *tensors[1:])
        operands = Operands(input, self.weight, target)
        return call_with_terms(operands, tensors, self.options, self.terms, compute, plain)

    def _by_name(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        token_weight: Tensor | None,
        denominator: Tensor | float | None,
    ) -> Tensor:
        options = {**self.options._asdict(), **self.terms._asdict(), **self.compute._asdict()}
        tensors = {"linear_bias": self.bias, "weight": weight, "token_weight": token_weight}
        return functional.linear_cross_entropy(
            input, self.weight, target, **tensors, denominator=denominator, **options
        )

    def _logits(self, input: Tensor) -> Tensor:
        check_types(input, self.weight, input)
        if self.num_heads is not None:
            # As one head of all their classes.
            weight, bias = self.weight.flatten(0, 1), None if self.bias is None else self.bias.flatten()
        else:
            weight, bias = self.weight, self.bias
        if self.terms == NO_TERMS and not self.options.terms:
            found = F.linear(input, weight, bias)
        else:
            scale, softcap = self.options.logit_scale, self.terms.softcap
            found = logits(input, weight, bias, logit_scale=scale, softcap=softcap)
        return found if self.num_heads is None else found.unflatten(-1, (self.num_heads, self.out_features))

    def extra_repr(self) -> str:
        terms = {n: v for n, v in self.terms._asdict().items() if v != getattr(NO_TERMS, n)}
        options = {**self.options._asdict(), **terms, "schedule": self.compute.schedule}
        bias = "" if self.bias is None else ", bias=True"
        heads = "" if self.num_heads is None else f", num_heads={self.num_heads}"
        return ", ".join(
            [
                f"in_features={self.in_features}, num_classes={self.out_features}{bias}{heads}",
                *(f"{name}={_shown(name, value)!r}" for name, value in options.items()),
            ]
        )


def _shown(name: str, value: object) -> object:
    """An option as it was given."""
    return (term_of(value) if name == "softcap" else None) or value


def _signature() -> inspect.Signature:
    """Of the constructor, with every option by its name and default, for help() and editors."""
    given = inspect.signature(LinearCrossEntropy.__init__)
    kept = [p for p in list(given.parameters.values())[1:] if p.kind is not inspect.Parameter.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [inspect.Parameter(name, keyword, default=value) for name, value in defaults().items()]
    return given.replace(parameters=[*kept, *options])


def _option(name: str) -> property:
    """An option as an attribute of the module, to be read and set."""
    holder = (
        "options" if name in LossOptions._fields else "terms" if name in TermOptions._fields else "compute"
    )

    def read(module: LinearCrossEntropy) -> Any:
        return _shown(name, getattr(getattr(module, holder), name))

    def write(module: LinearCrossEntropy, value: Any) -> None:
        setattr(module, holder, getattr(module, holder)._replace(**{name: value}))

    return property(read, write)


for _name in defaults():
    setattr(LinearCrossEntropy, _name, _option(_name))
LinearCrossEntropy.__signature__ = _signature()  # pyright: ignore[reportAttributeAccessIssue]
