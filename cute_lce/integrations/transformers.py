"""Hugging Face's causal language models: patch(model) makes their training loss without the logits.

Two methods of the model and one of its head are replaced, on these instances alone: `forward` remembers the
labels, the head's `forward` returns the loss of its input if there are labels, and `loss_function` passes
that loss on. The head still runs as a module, so that FSDP's units and hooks see its input and its output.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss import loss_utils

from ..functional import linear_cross_entropy
from ..options import IGNORE_INDEX, ComputeOptions
from ..symbolic import holds
from .forward_source import Tail, read, value_of, written
from .hooks import check_hooks

PATCH = "_cute_lce_patch"
"""The attribute of a patched model that holds its _Patch."""
REPLICATE = "_replicate_for_data_parallel"
"""The method of nn.Module by which nn.DataParallel copies one: to copies, the methods of the original's."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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
    """`function` of a _Patch in place of `original`, with its signature; copied and pickled with it.

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
        return self.function(self.patch, *args, **kwargs)


class _Replaced(NamedTuple):
    """A method of an instance: the attribute that holds it, what was there, and what is there instead."""

    module: nn.Module
    slot: str
    original: Callable
    own: _Own

    def is_inside(self, found: Any) -> bool:
        """Whether found is own, or a wrapper of it that says so by __wrapped__, as accelerate's do."""
        while found is not None and found is not self.own:
            found = found.__func__ if isinstance(found, MethodType) else getattr(found, "__wrapped__", None)
        return found is not None


class _Patch:
    """A patched model's methods, and the calls of it that run."""

    def __init__(self, model: PreTrainedModel, tail: Tail, train_only: bool, compute: ComputeOptions):
        self.model, self.tail, self.train_only, self.compute = model, tail, train_only, compute
        self.head: nn.Linear = getattr(model, tail.head)
        self.forward = self._replaced(model, _forward)
        self.head_forward = self._replaced(self.head, _head_forward)
        self.own_loss: Callable = model.loss_function
        self.own_loss_was_set = "_loss_function" in vars(model)
        self.loss_function = _Own(_loss_function, self, self.own_loss)
        self.state = _State()

    def _replaced(self, module: nn.Module, function: Callable) -> _Replaced:
        slot = _slot(module)
        original = getattr(module, slot)
        return _Replaced(module, slot, original, _Own(function, self, original))

    def apply(self) -> None:
        for each in (self.forward, self.head_forward):
            setattr(each.module, each.slot, each.own)
        self.model.loss_function = self.loss_function
        setattr(self.model, PATCH, self)
        setattr(self.model, REPLICATE, _refuse_replicas)

    def remove(self) -> None:
        both = self.forward, self.head_forward
        for each in both:
            found = vars(each.module).get(each.slot)
            if found is not None and not each.is_inside(found):
                raise ValueError(
                    f"model: got {type(each.module).__name__}.{each.slot} that was wrapped or replaced since "
                    "patch, want that undone first"
                )
        for each in both:
            found = vars(each.module).get(each.slot)
            if each.slot != "forward":
                setattr(each.module, each.slot, each.original)
            elif found is each.own or (isinstance(found, MethodType) and found.__func__ is each.own):
                delattr(each.module, each.slot)
        for own in (self.forward.own, self.head_forward.own, self.loss_function):
            own.patch = None
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
    bits the logits are not rounded. If every label is ignored the loss is 0, where the model's own is nan.

    Args:
        model: a transformers.PreTrainedModel, or a PEFT model around one, whose head is an nn.Linear without
            an adapter. It may be under FSDP2 (fully_shard) already, or come under it, DDP or torch.compile
            later. What its forward does between head and loss is read from its source.
        train_only: whether calls in evaluation mode stay unchanged and have logits. False: calls with labels
            have no logits in evaluation either.
        schedule, workspace_mb: as in cute_lce.linear_cross_entropy, for every call.

    A call with labels then has no logits: a mapping has no key `logits`, a tuple has None there. A call
    without labels, such as generate's, is unchanged.

    Raises:
        TypeError: another model, a head that is not a plain nn.Linear (an adapter, a quantised layer), or a
            train_only that is not a bool.
        ValueError: a model that is patched already, whose loss is not ForCausalLMLoss, or whose forward was
            replaced or does something unknown with the logits; the message names it. A later call raises it
            if head or loss were replaced after patch.
    """
    if not isinstance(train_only, bool):
        raise TypeError(f"train_only: got {type(train_only).__name__}, want a bool")
    compute = ComputeOptions(schedule, workspace_mb)
    inner = _inner(model)
    name = type(inner).__name__
    if PATCH in vars(inner):
        raise ValueError(f"model: got a {name} that is patched, want unpatch(model) first")
    if "forward" in vars(inner) and _slot(inner) == "forward":
        raise ValueError(
            f"model: got a {name} whose forward was replaced, want patch before that (before Trainer and "
            "accelerator.prepare, whose wrapper `del model.forward` takes off)"
        )
    _check_loss_function(inner)
    tail = read(type(inner).forward)
    _check_head(getattr(inner, tail.head), f"{name}.{tail.head}")
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
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def _check_loss_function(model: PreTrainedModel) -> None:
    """Raise ValueError unless the loss is ForCausalLMLoss, which does what `_head_forward` does."""
    found = model.loss_function
    if found is not loss_utils.ForCausalLMLoss:
        name = getattr(found, "__qualname__", repr(found))
        raise ValueError(f"loss_function: got {name}, want transformers' ForCausalLMLoss")
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
            expected = found(logits, vocab_size=5, **call._asdict())
            own = _loss(logits, torch.eye(5, **options), call)
        if not torch.allclose(own, expected):
            raise ValueError(f"loss_function: got one that gives {expected}, want ForCausalLMLoss, {own}")


def _check_head(head: Any, name: str) -> None:
    """Raise TypeError or ValueError unless calling the head is linear(input, head.weight, head.bias)."""
    kind = type(head)
    if not isinstance(head, nn.Linear) or kind.forward is not nn.Linear.forward:
        raise TypeError(f"{name}: got {kind.__module__}.{kind.__qualname__}, want an nn.Linear")
    replaced = vars(head).get("forward")
    if replaced is not None and not hasattr(head, "_hf_hook"):
        raise ValueError(f"{name}: got one whose forward was replaced, want nn.Linear's")
    moved = getattr(head, "_hf_hook", None)
    for hook in [] if moved is None else getattr(moved, "hooks", [moved]):
        if type(hook).__module__ != "accelerate.hooks":
            raise ValueError(f"{name}: got accelerate's hook {type(hook).__qualname__}, want one of its own")
    weight = head.weight
    plain = type(weight) in (Tensor, nn.Parameter) or hasattr(weight, "device_mesh")
    if not plain or weight.dtype not in DTYPES:
        got = f"{type(weight).__name__} of {weight.dtype}"
        raise TypeError(f"{name}.weight: got {got}, want an ordinary one of {', '.join(map(str, DTYPES))}")
    check_hooks(head, name)


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
        raise TypeError(f"{type(model).__name__}.{written(path)}: got {type(value).__name__}, want a number")
    return float(value)


def _forward(patch: _Patch, *args: Any, **kwargs: Any) -> Any:
    """The model's forward."""
    model, state = patch.model, patch.state
    place = patch.tail.labels
    labels = args[place] if len(args) > place else kwargs.get("labels")
    if labels is None or (patch.train_only and not model.training):
        call = None
    else:
        _check_parts(patch)
        count = _count(kwargs.get("num_items_in_batch"))
        call = _Call(labels, kwargs.get("shift_labels"), count, kwargs.get("ignore_index", IGNORE_INDEX))
    around, running = state.running, _Running(call)
    state.running = running
    try:
        output = patch.forward.original(*args, **kwargs)
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


def _count(given: Any) -> Tensor | float | None:
    """num_items_in_batch, of which a tensor's value is not looked at."""
    if given is None:
        return None
    if isinstance(given, Tensor):
        if given.numel() != 1:
            raise ValueError(f"num_items_in_batch: got shape {tuple(given.shape)}, want one element")
        return given if given.is_floating_point() else given.long()
    if isinstance(given, str | bytes):
        raise TypeError(f"num_items_in_batch: got {type(given).__name__}, want a number or a tensor")
    try:
        count = float(given)
    except (TypeError, ValueError):
        got = type(given).__name__
        raise TypeError(f"num_items_in_batch: got {got}, want a number or a tensor") from None
    if not 0 < count < float("inf"):
        raise ValueError(f"num_items_in_batch: got {given}, want a finite number of more than 0")
    return count


def _check_parts(patch: _Patch) -> None:
    """Raise ValueError where head or loss are others than patch found."""
    model, name = patch.model, patch.tail.head
    head = getattr(model, name)
    if head is not patch.head:
        raise ValueError(
            f"{name}: got {type(head).__module__}.{type(head).__qualname__} in place of what was patched, "
            "want unpatch(model) before it is replaced"
        )
    if model.loss_function is not patch.loss_function:
        raise ValueError("loss_function: got one that was set after patch, want unpatch(model) before that")
    check_hooks(head, name)


def _head_forward(patch: _Patch, input: Tensor) -> Tensor:
    """The head's forward: input's (..., d) loss where the model was called with labels, else its logits."""
    running = patch.state.running
    if running is None or running.call is None:
        return patch.head_forward.original(input)
    if running.done is not None:
        raise RuntimeError(f"{patch.tail.head}: got a second call in one of the model, want one")
    head = patch.head
    scale, softcap = _terms(patch.model, patch.tail)
    terms = {"linear_bias": head.bias, "logit_scale": scale, "softcap": softcap}
    loss = _loss(input, head.weight, running.call, **terms, **patch.compute._asdict())
    # A copy, for what the model does with its logits in place.
    running.done = _Loss(loss.clone(), head.weight.shape[0])
    return loss


def _loss(input: Tensor, weight: Tensor, call: _Call, **options: Any) -> Tensor:
    """ForCausalLMLoss of the logits of input."""
    target, count = call.shift_labels, call.num_items_in_batch
    if target is None:
        target = F.pad(call.labels, (0, 1), value=call.ignore_index)[..., 1:]
    hidden, target = input.flatten(0, -2), target.reshape(-1).to(input.device)
    if not holds(hidden.shape[0] == target.shape[0]):
        raise ValueError(
            f"labels: got {target.shape[0]} beside {hidden.shape[0]} hidden states at the head, want as many "
            "(logits_to_keep leaves some out)"
        )
    if isinstance(count, Tensor):
        count = count.to(input.device).reshape(())
    ignore_index = call.ignore_index
    return linear_cross_entropy(
        hidden, weight, target, denominator=count, ignore_index=ignore_index, **options
    )


def _loss_function(patch: _Patch, logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """The model's loss_function: the loss that the head has computed, if it has."""
    running, model = patch.state.running, patch.model
    if running is None and patch.forward.slot not in vars(model) and (model.training or not patch.train_only):
        raise RuntimeError(
            f"{type(model).__name__}: got a model of which patch's forward was deleted, want unpatch(model) "
            "and patch(model)"
        )
    if running is None or running.done is None:
        return patch.own_loss(logits, labels, vocab_size, **kwargs)
    running.logits = logits
    classes = running.done.classes
    if vocab_size != classes:
        raise ValueError(f"vocab_size: got {vocab_size}, want the head's {classes} classes")
    return running.done.loss
