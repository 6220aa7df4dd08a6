"""Hugging Face's causal language models: patch(model) makes their training loss without the logits.

Two methods of the model and one of its head are replaced, on these instances alone: `forward` remembers the
labels, the head's `forward` returns the loss of its input if there are labels, and `loss_function` passes
that loss on. The head still runs as a module, so that FSDP's units and hooks see its input and its output.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_utils
from transformers.loss import loss_utils

from ..functional import linear_cross_entropy
from ..options import IGNORE_INDEX, ComputeOptions
from ..symbolic import holds
from . import heads
from .counts import checked_count, divided
from .forward_source import Tail, read, value_of, written

PATCH = "_cute_lce_patch"
"""The attribute of a patched model that holds its _Patch."""
REPLICATE = "_replicate_for_data_parallel"
"""The method of nn.Module by which nn.DataParallel copies one: to copies, the methods of the original's."""
AGAIN = "want unpatch(model), then patch(model)"


class _Call(NamedTuple):
    """What a call of the model gave for its loss."""

    labels: Tensor
    shift_labels: Tensor | None
    num_items_in_batch: Tensor | float | None
    ignore_index: int


class _Loss(NamedTuple):
    """What the head computed, and of how many classes."""

    loss: Tensor
    classes: int


class _Running:
    """A call of the model that runs: what its loss is of, None where logits are wanted; what came of it."""

    def __init__(self, call: _Call | None):
        self.call = call
        self.done: _Loss | None = None
        self.logits: Tensor | None = None


class _State(threading.local):
    """The innermost call of the model in this thread. A copy has none."""

    def __init__(self) -> None:
        self.running: _Running | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _State, ()


class _Own:
    """`function` of a _Patch and of `original`, in place of original, with its signature; copied with them.

    Without a patch, which remove() takes away, it is `original` to whoever still holds it.
    """

    def __init__(self, function: Callable, patch: _Patch, original: Callable):
        functools.update_wrapper(self, original)
        self.function, self.original = function, original
        self.patch: _Patch | None = patch

    @property
    def __code__(self) -> Any:
        """torch.export reads the arguments' names from it."""
        return self.original.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # accelerate's unwrap_model makes a method of it.
        if args and args[0] is getattr(self.original, "__self__", None):
            args = args[1:]
        if self.patch is None:
            return self.original(*args, **kwargs)
        return self.function(self.patch, self.original, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Own:
        """Of a head that is copied without its model, as PEFT does, one without a patch."""
        copied = memo[id(self)] = _Own.__new__(_Own)
        alone = self.patch is not None and id(self.patch.model) not in memo
        for name, value in vars(self).items():
            vars(copied)[name] = None if alone and name == "patch" else copy.deepcopy(value, memo)
        return copied


class _Replaced(NamedTuple):
    """A method of an instance: the attribute that holds it, what was there, its class's, and what is there
    instead."""

    module: nn.Module
    slot: str
    original: Callable
    of_class: Callable
    own: _Own

    def is_inside(self, held: Any) -> bool:
        """Whether held is own, or a wrapper of it that says so by __wrapped__, as accelerate's do."""
        while held is not None and held is not self.own:
            held = held.__func__ if isinstance(held, MethodType) else getattr(held, "__wrapped__", None)
        return held is not None

    def is_in_place(self) -> bool:
        """Whether own is what calling the module runs, perhaps inside accelerate's hooks for devices."""
        attributes = vars(self.module)
        held = attributes.get(_slot(self.module))
        if isinstance(held, MethodType):
            held = held.__func__
        return held is self.own and ("_hf_hook" not in attributes or _is_accelerates(attributes["forward"]))


class _Patch:
    """A patched model's methods, and the calls of it that run."""

    def __init__(self, model: PreTrainedModel, tail: Tail, train_only: bool, compute: ComputeOptions):
        self.model, self.tail, self.train_only, self.compute = model, tail, train_only, compute
        self.head: nn.Module = getattr(model, tail.head)
        self.head_of_class = type(self.head).forward
        self.forward = self._replaced(model, _forward, "model")
        self.heads = tuple(
            self._replaced(module, _head_forward, f"{type(model).__name__}.{tail.head}")
            for module in heads.modules(self.head)
        )
        self.own_loss: Callable = model.loss_function
        self.own_loss_was_set = "_loss_function" in vars(model)
        self.loss_parts = _loss_parts(model, self.own_loss_was_set)
        self.loss_function = _Own(_loss_function, self, self.own_loss)
        self.state = _State()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, or of a pickled one, whose process may have another class or another loss."""
        vars(self).update(state)
        if read(type(self.model).forward) != self.tail:
            raise ValueError(
                f"model: got a {type(self.model).__name__} that was patched with another forward, want "
                "unpatch(model) before it is pickled"
            )
        _check_loss_values(self.own_loss)

    def _replaced(self, module: nn.Module, function: Callable, name: str) -> _Replaced:
        slot, of_class = _slot(module), type(module).forward
        held = vars(module).get("forward")
        if isinstance(held, _Own) and held.patch is None:
            # Of a head that was copied.
            del module.forward
        original, held = getattr(module, slot), vars(module).get("forward")
        as_it_was = held is None if slot == "forward" else _is_accelerates(held)
        if not as_it_was or getattr(original, "__func__", None) is not of_class:
            raise ValueError(
                f"{name}: got a {type(module).__name__} whose forward was replaced, want patch before that "
                "(and before Trainer and accelerator.prepare, whose wrapper `del model.forward` takes off)"
            )
        return _Replaced(module, slot, original, of_class, _Own(function, self, original))

    def apply(self) -> None:
        for replaced in (self.forward, *self.heads):
            setattr(replaced.module, replaced.slot, replaced.own)
        self.model.loss_function = self.loss_function
        setattr(self.model, PATCH, self)
        setattr(self.model, REPLICATE, _refuse_replicas)

    def remove(self) -> None:
        methods = self.forward, *self.heads
        for replaced in methods:
            held = vars(replaced.module).get(replaced.slot)
            if held is not None and not replaced.is_inside(held):
                raise ValueError(
                    f"model: got {type(replaced.module).__name__}.{replaced.slot} that was wrapped or "
                    "replaced since patch, want that undone first"
                )
        for replaced in methods:
            held = vars(replaced.module).get(replaced.slot)
            if replaced.slot != "forward":
                setattr(replaced.module, replaced.slot, replaced.original)
            elif held is replaced.own or (isinstance(held, MethodType) and held.__func__ is replaced.own):
                delattr(replaced.module, replaced.slot)
            replaced.own.patch = None
        self.loss_function.patch = None
        if vars(self.model).get("_loss_function") is self.loss_function:
            if self.own_loss_was_set:
                self.model.loss_function = self.own_loss
            else:
                delattr(self.model, "_loss_function")
        delattr(self.model, PATCH)
        delattr(self.model, REPLICATE)


def patch(
    model: nn.Module,
    train_only: bool = True,
    *,
    schedule: str = "auto",
    workspace_mb: float | None = None,
) -> None:
    """Make a causal language model of transformers compute its loss without logits, in place.

    Loss and gradients equal those of the model's own loss, ForCausalLMLoss, including the head's bias, scales
    and soft cap of the logits, `num_items_in_batch`, `shift_labels` and `ignore_index`, except that in 16
    bits the logits are not rounded. If every label is ignored, or the count is 0, loss and gradients are 0,
    where the model's own are nan or inf.

    Args:
        model: a transformers.PreTrainedModel, or a PEFT model around one, whose head is an nn.Linear, or
            PEFT's LoRA, modules_to_save or trainable_token_indices of one. It may be under FSDP2
            (fully_shard) already, or come under it, DDP or torch.compile later. What its forward does between
            head and loss is read from its source.
        train_only: whether calls in evaluation mode stay unchanged and have logits. False: calls with labels
            have no logits in evaluation either, unless a Trainer's prediction_step asks for predictions.
        schedule, workspace_mb: as in cute_lce.linear_cross_entropy, for every call.

    A call with labels then has no logits: a mapping has no key `logits`, a tuple has None there. A call
    without labels, such as generate's, is unchanged.

    Raises:
        TypeError: another model, another head (a quantised layer, another kind of adapter), or a train_only
            that is not a bool.
        ValueError: a model that is patched already, whose loss is not ForCausalLMLoss, or whose forward was
            replaced or does something unknown with the logits; a workspace_mb too small for the copy of the
            weight that an adapter at the head needs; the message names it. A later call raises it if the
            class's forward, the head or the loss were replaced after patch: unpatch, and patch again.
    """
    if not isinstance(train_only, bool):
        raise TypeError(f"train_only: got {type(train_only).__name__}, want a bool")
    compute = ComputeOptions(schedule, workspace_mb)
    inner = _inner(model)
    name = type(inner).__name__
    if PATCH in vars(inner):
        raise ValueError(f"model: got a {name} that is patched, want unpatch(model) first")
    _check_loss_function(inner)
    tail = read(type(inner).forward)
    heads.check(getattr(inner, tail.head), f"{name}.{tail.head}", compute)
    _terms(inner, tail)
    _Patch(inner, tail, train_only, compute).apply()


def unpatch(model: nn.Module) -> None:
    """Undo patch: restore every attribute.

    A wrapper that was put around forward since then stays, now around the model's own forward, if it has
    `__wrapped__`, as accelerate's mixed precision and functools.wraps do.

    Raises TypeError for anything but a transformers model, ValueError for one that is not patched, or
    whose forward was replaced since then.
    """
    inner = _inner(model)
    found = vars(inner).get(PATCH)
    if found is None:
        raise ValueError(f"model: got a {type(inner).__name__} that is not patched, want a patched one")
    found.remove()


def _refuse_replicas() -> None:
    raise RuntimeError("model: got nn.DataParallel around a patched model, want DistributedDataParallel")


def _inner(model: nn.Module) -> PreTrainedModel:
    """The transformers model, which may be inside a PEFT model."""
    inner = model
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        inner = model.get_base_model()  # pyright: ignore[reportCallIssue]
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(
            f"model: got {type(model).__name__}, want a transformers.PreTrainedModel or a PEFT model of one, "
            "before it is compiled or wrapped"
        )
    return inner


def _slot(module: nn.Module) -> str:
    """The attribute that holds a module's own forward: accelerate's hooks for devices move it."""
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


def _is_accelerates(forward: Any) -> bool:
    """Whether it is what accelerate's hooks for devices put in place of a forward."""
    return getattr(getattr(forward, "func", None), "__module__", None) == "accelerate.hooks"


def _check_loss_function(model: PreTrainedModel) -> None:
    """Raise ValueError unless the loss is ForCausalLMLoss, which does what `_head_forward` does."""
    if model.loss_function is not loss_utils.ForCausalLMLoss:
        name = getattr(model.loss_function, "__qualname__", repr(model.loss_function))
        raise ValueError(f"loss_function: got {name}, want transformers' ForCausalLMLoss")
    _check_loss_values(model.loss_function)


def _check_loss_values(loss: Callable) -> None:
    """Raise ValueError for one that gives other values than `_loss`."""
    options = {"dtype": torch.float32, "device": "cpu"}
    logits = torch.linspace(-1, 2, 30, **options).square().view(2, 3, 5)
    labels = torch.tensor([[4, 1, -100], [0, 3, 2]], device="cpu")
    count = torch.tensor(7, device="cpu")
    for call in (
        _Call(labels, None, None, IGNORE_INDEX),
        _Call(labels, None, count, IGNORE_INDEX),
        _Call(labels, labels.clamp(min=0), 3, 4),
    ):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            expected = loss(logits, vocab_size=5, **call._asdict())
            own = _loss(heads.Product(logits, torch.eye(5, **options), None), call)
        if not torch.allclose(own, expected):
            raise ValueError(f"loss_function: got one that gives {expected}, want ForCausalLMLoss, {own}")


def _loss_parts(model: PreTrainedModel, was_set: bool) -> tuple[Any, ...]:
    """What the loss of an unpatched call depends on; was_set: the model has a loss_function of its own."""
    kind = None if was_set else getattr(model, "loss_type", None)
    mapping = modeling_utils.LOSS_MAPPING  # pyright: ignore[reportPrivateImportUsage]
    return (
        kind,
        mapping[kind if kind in mapping else "ForCausalLM"],
        loss_utils.ForCausalLMLoss,
        loss_utils.fixed_cross_entropy,
        F.cross_entropy,
    )


LOSS_PARTS = (
    "model.loss_type",
    "LOSS_MAPPING",
    "ForCausalLMLoss",
    "fixed_cross_entropy",
    "torch.nn.functional.cross_entropy",
)
"""The names of _loss_parts."""


def _terms(model: PreTrainedModel, tail: Tail) -> tuple[float, float | None]:
    """logit_scale and softcap of a call. Raises TypeError for what is no number."""
    scale = 1.0
    for factor in tail.factors:
        if factor.guard is None or value_of(model, factor.guard) is not None:
            value = _number(model, factor.path)
            scale = scale / value if factor.inverse else scale * value
    if tail.softcap is None or (tail.softcap.guard and value_of(model, tail.softcap.guard) is None):
        return scale, None
    return scale, _number(model, tail.softcap.path)


def _number(model: PreTrainedModel, path: tuple[str, ...]) -> float:
    value = value_of(model, path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{type(model).__name__}.{written(path)}: got {type(value).__name__}, want a number; to learn a "
            "scale, multiply the hidden states by it"
        )
    return float(value)


def _forward(patch: _Patch, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """The model's forward."""
    model, state = patch.model, patch.state
    if type(model).forward is not patch.forward.of_class:
        raise ValueError(f"{type(model).__name__}.forward: got one that was replaced after patch, {AGAIN}")
    place = patch.tail.labels
    labels = args[place] if len(args) > place else kwargs.get("labels")
    if labels is None or not (model.training or (not patch.train_only and not _wants_predictions())):
        call = None
    else:
        _check_parts(patch)
        count = kwargs.get("num_items_in_batch")
        count = None if count is None else checked_count("num_items_in_batch", count)
        call = _Call(labels, kwargs.get("shift_labels"), count, kwargs.get("ignore_index", IGNORE_INDEX))
    around, running = state.running, _Running(call)
    state.running = running
    try:
        output = original(*args, **kwargs)
    finally:
        state.running = around
    if call is None:
        return output
    logits = running.logits
    if logits is None:
        raise RuntimeError(f"{type(model).__name__}: got no call of loss_function after the head's, want one")
    if isinstance(output, tuple):
        return *output[:1], *(None if each is logits else each for each in output[1:])
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})


@torch.compiler.disable(reason="train_only: got False in evaluation, want True there, or fullgraph=False")
def _wants_predictions() -> bool:
    """Whether this call is made by a Trainer's prediction_step that wants more than the loss."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "prediction_step" and "prediction_loss_only" in frame.f_locals:
            return not frame.f_locals["prediction_loss_only"]
        frame = frame.f_back
    return False


def _check_parts(patch: _Patch) -> None:
    """Raise ValueError where head or loss are others than patch found."""
    model, name = patch.model, patch.tail.head
    head = getattr(model, name)
    if head is not patch.head:
        kind = type(head)
        raise ValueError(
            f"{name}: got {kind.__module__}.{kind.__qualname__} in place of what was patched, {AGAIN}"
        )
    if model.loss_function is not patch.loss_function:
        raise ValueError(f"loss_function: got one that was set after patch, {AGAIN}")
    _check_loss_parts(patch)
    of_class = type(head).forward is patch.head_of_class
    if not of_class or not all(replaced.is_in_place() for replaced in patch.heads):
        raise ValueError(f"{name}: got one whose forward was replaced after patch, {AGAIN}")
    if not any(replaced.module is heads.active(head) for replaced in patch.heads):
        raise ValueError(f"{name}: got an adapter that was added after patch, {AGAIN}")
    heads.check(head, name, patch.compute)


def _check_loss_parts(patch: _Patch) -> None:
    """Raise ValueError where what was read of transformers' loss has changed since."""
    parts = _loss_parts(patch.model, patch.own_loss_was_set)
    for name, now, then in zip(LOSS_PARTS, parts, patch.loss_parts, strict=True):
        if now != then:
            raise ValueError(f"{name}: got another than when the model was patched, {AGAIN}")


def _head_forward(patch: _Patch, original: Any, input: Tensor, **others: Any) -> Tensor:
    """The head's forward: input's (..., d) loss where the model was called with labels, else its logits."""
    running = patch.state.running
    if running is None or running.call is None:
        return original(input, **others)
    if others:
        names = ", ".join(others)
        raise ValueError(f"{patch.tail.head}: got {names} with labels, want a call without labels")
    if running.done is not None:
        raise RuntimeError(f"{patch.tail.head}: got a second call in one of the model, want one")
    product = heads.product(original.__self__, input)
    scale, softcap = _terms(patch.model, patch.tail)
    loss = _loss(product, running.call, logit_scale=scale, softcap=softcap, **patch.compute._asdict())
    # A copy, for what the model does with its logits in place.
    running.done = _Loss(loss.clone(), product.weight.shape[0])
    return loss


def _loss(product: heads.Product, call: _Call, **options: Any) -> Tensor:
    """ForCausalLMLoss of the logits of a product."""
    target, count = call.shift_labels, call.num_items_in_batch
    if target is None:
        target = F.pad(call.labels, (0, 1), value=call.ignore_index)[..., 1:]
    hidden = product.input.flatten(0, -2)
    target = target.reshape(-1).to(hidden.device)
    if not holds(hidden.shape[0] == target.shape[0]):
        raise ValueError(
            f"labels: got {target.shape[0]} beside {hidden.shape[0]} hidden states at the head, want as many "
            "(logits_to_keep leaves some out)"
        )
    loss = linear_cross_entropy(
        hidden,
        product.weight,
        target,
        linear_bias=product.bias,
        reduction="mean" if count is None else "sum",
        ignore_index=call.ignore_index,
        **options,
    )
    return loss if count is None else divided(loss, count)


def _loss_function(
    patch: _Patch, original: Callable, logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any
) -> Tensor:
    """The model's loss_function: the loss that the head has computed, if it has."""
    running, model = patch.state.running, patch.model
    if running is None and patch.forward.slot not in vars(model) and (model.training or not patch.train_only):
        raise RuntimeError(
            f"{type(model).__name__}: got a model of which patch's forward was deleted, want unpatch(model) "
            "and patch(model)"
        )
    if running is None or running.done is None:
        _check_loss_parts(patch)
        return original(logits, labels, vocab_size, **kwargs)
    running.logits = logits
    classes = running.done.classes
    if vocab_size != classes:
        raise ValueError(f"vocab_size: got {vocab_size}, want the head's {classes} classes")
    return running.done.loss
