"""Cases of megatron-core's output layer on two ranks, with its own layer, loss and postprocessing.

Most are of a model without a decoder that runs GPTModel's _postprocess; one is of GPTModel itself, under its
DistributedDataParallel.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from cute_lce.integrations import megatron
from tests.distributed.calls import slice_of
from tests.distributed.ranks import Rank
from tests.numerics import assert_close

S, B, H = 12, 2, 32
V = 96
FACTORS = (1.0, 0.15, 0.15)
"""What the main head's and two MTP heads' losses are weighted with: mtp_loss_scaling_factor / heads."""


def quiet() -> None:
    """Without megatron-core's warnings, of what is not installed and what it deprecates."""
    warnings.filterwarnings("ignore", module="megatron")


def core() -> Any:
    """What makes models on this rank's groups, which are of all ranks."""
    quiet()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.core.transformer.transformer_config import TransformerConfig

    # What it recommends, with a warning.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(torch.distributed.get_world_size())

    class Toy(LanguageModule):
        """The end of a GPTModel: its output layer, the heads' losses, and their sum for a backward."""

        _postprocess = GPTModel._postprocess
        shared_embedding_or_output_weight = GPTModel.shared_embedding_or_output_weight

        def __init__(self, config: Any, tied: bool):
            super().__init__(config=config)
            self.pre_process, self.post_process, self.mtp_process = tied, True, False
            self.share_embeddings_and_output_weights = tied
            if tied:
                self.embedding = nn.Module()
                self.embedding.word_embeddings = tensor_parallel.VocabParallelEmbedding(
                    V, H, init_method=nn.init.normal_, config=config, tp_group=self.pg_collection.tp
                )
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                H,
                V,
                config=config,
                init_method=nn.init.normal_,
                bias=False,
                skip_weight_param_allocation=tied,
                tp_group=self.pg_collection.tp,
            )

        @property
        def head(self) -> Any:
            return self.shared_embedding_or_output_weight()

        def forward(self, hidden: Tensor, labels: Any = None, loss_mask: Any = None) -> Tensor:
            rest = ("input_ids", "position_ids", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
            return self._postprocess(
                hidden_states=hidden, labels=labels, loss_mask=loss_mask, **dict.fromkeys(rest)
            )

    def make(here: Rank, weight: Tensor, *, tied: bool = False, **options: Any) -> Any:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=H,
            num_attention_heads=2,
            use_cpu_initialization=True,
            tensor_model_parallel_size=here.ranks,
            params_dtype=weight.dtype,
            **options,
        )
        # It would be made on a GPU.
        MTPLossLoggingHelper.tracker["values"] = torch.zeros(2, device=here.device)
        model = Toy(config, tied).to(here.device)
        with torch.no_grad():
            model.head.copy_(slice_of(weight, here, 0))
        return model.train()

    return make


def takes_processor() -> bool:
    """Whether it is megatron-core from 0.18 on, whose GPTModel takes an output_processor."""
    quiet()
    from megatron.core.models.gpt.gpt_model import GPTModel

    return "output_processor" in inspect.signature(GPTModel.forward).parameters


def heads() -> int:
    """With how many heads a model is fused: later megatron-cores read the logits of MTP's."""
    return 1 if takes_processor() else 3


def batch(here: Rank, dtype: torch.dtype, count: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden [count s, b, h], weight (V, h), labels, loss_mask [b, s])."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(count, S, B, H, generator=generator)
    weight = torch.randn(V, H, generator=generator) / H**0.5
    labels = torch.randint(V, (B, S), generator=generator)
    mask = torch.ones(B, S)
    mask[0, 3:6] = mask[1, 0] = 0
    tensors = hidden.flatten(0, 1).to(dtype), weight.to(dtype), labels, mask
    return tuple(each.to(here.device) for each in tensors)  # pyright: ignore[reportReturnType]


def logits_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Losses [b, s] by torch, 0 where the label is -100."""
    logits = (hidden @ weight.T).permute(1, 2, 0)
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def expected(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, dtype: torch.dtype):
    """(losses of the main head, dhidden, dweight) of the sum over the mask, MTP's heads as megatron-core adds
    them: each of its own labels and mask, rolled, over the number of its tokens."""
    leaves = [each.to(dtype, copy=True).requires_grad_() for each in (hidden, weight)]
    heads = leaves[0].unflatten(0, (-1, S))
    losses = logits_of(heads[0], leaves[1], labels.masked_fill(mask == 0, -100))
    total = (losses * mask).sum()
    for depth in range(1, heads.shape[0]):
        labels, mask = labels.roll(-1, -1), mask.roll(-1, -1)
        labels[:, -1] = mask[:, -1] = 0
        own = logits_of(heads[depth], leaves[1], labels) * mask
        total = total + FACTORS[depth] * own.sum() / mask.sum()
    return losses.detach(), *torch.autograd.grad(total, leaves)


def compare(here: Rank, dtype: torch.dtype, count: int, sequence_parallel: bool, tied: bool) -> None:
    """count: of heads."""
    make = core()
    hidden, weight, labels, mask = batch(here, dtype, count)
    options = {"mtp_num_layers": count - 1, "mtp_loss_scaling_factor": 0.3} if count > 1 else {}
    model = make(here, weight, tied=tied, sequence_parallel=sequence_parallel, **options)
    megatron.fuse_output_layer(model)
    megatron.fuse_output_layer(model)
    parts = hidden.unflatten(0, (count, S))

    def own(each: Tensor) -> Tensor:
        return slice_of(each.unflatten(0, (count, S)), here, 1).flatten(0, 1) if sequence_parallel else each

    assert parts.shape == (count, S, B, H)
    leaf = own(hidden).clone().requires_grad_()
    given = labels.clone()
    losses = model(leaf, given, mask)
    assert torch.equal(given, labels)
    (losses * mask).sum().backward()
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    want, plain = (expected(hidden, weight, labels, mask, kind) for kind in (torch.float64, wide))
    assert losses.dtype is wide
    assert losses.shape == (B, S)
    assert_close("losses", losses.detach(), want[0], plain[0])
    assert leaf.grad is not None
    assert_close("dhidden", leaf.grad, own(want[1]), own(plain[1]).to(dtype))
    rows = slice_of(want[2], here, 0), slice_of(plain[2], here, 0)
    # Each head's gradient is rounded before they are added.
    rounding = 2.0**-8 if count > 1 and dtype is torch.bfloat16 else 0.0
    assert_close("dweight", model.head.grad, rows[0], rows[1].to(dtype), rounding=rounding)


def heads_and_slices(here: Rank) -> None:
    """Tensor and sequence parallel, MTP's heads, tied weights."""
    for dtype in here.dtypes:
        compare(here, dtype, heads(), sequence_parallel=False, tied=False)
        compare(here, dtype, 1, sequence_parallel=True, tied=True)
    compare(here, torch.float32, heads(), sequence_parallel=True, tied=True)


def megatrons_own(here: Rank) -> None:
    """The same losses and gradients as vocab_parallel_cross_entropy of the layer's logits."""
    make = core()
    hidden, weight, labels, mask = batch(here, torch.float32)
    found = []
    for fuse in (False, True):
        model = make(here, weight)
        if fuse:
            megatron.fuse_output_layer(model)
        leaf = hidden.clone().requires_grad_()
        losses = model(leaf, labels, mask) * mask
        losses.sum().backward()
        found.append((losses.detach(), leaf.grad, model.head.grad))
    for one, other in zip(*found, strict=True):
        assert one.any()
        torch.testing.assert_close(one, other)


def evaluation(here: Rank) -> None:
    """Losses without a gradient, and logits without labels."""
    hidden, weight, labels, mask = batch(here, torch.float32)
    model = core()(here, weight)
    megatron.fuse_output_layer(model)
    with torch.no_grad():
        losses, logits = model(hidden, labels, mask), model(hidden)
    assert_close("losses", losses, *(expected(hidden, weight, labels, mask, kind)[0] for kind in KINDS))
    assert logits.shape == (B, S, V // here.ranks)
    torch.testing.assert_close(logits, (hidden @ model.head.detach().T).transpose(0, 1))


KINDS = (torch.float64, torch.float32)


def a_model_without_postprocessing(here: Rank) -> None:
    """MambaModel's own forward, whose labels are given in any way, of a decoder that does nothing."""
    make = core()
    from megatron.core.models.mamba import MambaModel

    hidden, weight, labels, mask = batch(here, torch.float32)
    model = make(here, weight)
    kind = type(model)
    kind = type("Mamba", (kind.__mro__[1],), {"forward": MambaModel.forward})
    model.__class__, model.position_embedding_type = kind, "none"
    model.decoder = lambda hidden_states, **_: hidden_states
    megatron.fuse_output_layer(model)
    ignoring = labels.masked_fill(mask == 0, -100)
    for args, named in (((hidden, labels), {}), ((hidden,), {"labels": ignoring})):
        losses = model(None, None, None, *args, **named).detach()
        masked = mask if named else torch.ones_like(mask)
        want = (expected(hidden, weight, labels, masked, kind)[0] for kind in KINDS)
        assert_close("losses", losses, *want)
    logits = model(None, None, None, hidden)
    torch.testing.assert_close(logits, (hidden @ model.output_layer.weight.T).transpose(0, 1))


def main_grad(here: Rank) -> None:
    """Two micro-batches under what megatron-core's DistributedDataParallel does after each backward, of an
    untied weight and of a tied one, whose embedding has a gradient of its own."""
    make = core()
    hidden, weight, labels, mask = batch(here, torch.bfloat16, heads())
    exact, plain = (expected(hidden, weight, labels, mask, kind)[2] for kind in KINDS)
    options = {"mtp_num_layers": heads() - 1, "mtp_loss_scaling_factor": 0.3} if heads() > 1 else {}
    for tied in (False, True):
        model = make(here, weight, tied=tied, **options)
        megatron.fuse_output_layer(model)
        model.output_layer.gradient_accumulation_fusion = True
        head = model.head
        head.main_grad = torch.zeros(head.shape, device=here.device)
        head.grad_added_to_main_grad = False
        head.zero_out_wgrad = tied
        seen = []

        def after_accumulation(*_: Any, head: Any = head, seen: list = seen) -> None:
            # DistributedDataParallel._make_backward_post_hook, with overlap_grad_reduce.
            assert head.grad is not None
            seen.append(head.grad_added_to_main_grad)
            if not head.grad_added_to_main_grad or head.zero_out_wgrad:
                head.main_grad.add_(head.grad)
            head.grad = None

        head.register_post_accumulate_grad_hook(after_accumulation)
        embedded = torch.zeros((), device=here.device)
        for _ in range(2):
            head.grad_added_to_main_grad = False
            if tied:
                embedded = (head * torch.arange(H, device=here.device)).sum()
            loss = (model(hidden.clone().requires_grad_(), labels, mask) * mask).sum()
            assert not head.grad_added_to_main_grad
            (loss + embedded).backward()
        assert seen == [True, True]
        own = torch.arange(H, device=here.device, dtype=torch.float64) if tied else 0.0
        want, other = (slice_of(2 * (each + own), here, 0) for each in (exact, plain))
        assert_close("main_grad", head.main_grad, want, other.float())


def gpt_model(here: Rank) -> None:
    """GPTModel with an MTP head under DistributedDataParallel, which overlaps both of its collectives with
    the passes: the same losses and main_grads as without us, of two micro-batches. A later megatron-core
    overlaps on streams, which CPUs do not have, and its own MTP head needs its extension for main_grad."""
    core()
    overlaps = not (takes_processor() and here.device == "cpu")
    hooks = {
        "overlap_grad_reduce": overlaps,
        "overlap_param_gather": overlaps,
        "use_distributed_optimizer": True,
    }
    with on_cpu() if here.device == "cpu" else nullcontext():
        for tied in (False, True):
            found = []
            for fuse in (False, True):
                model, wrapped = gpt(here, tied, hooks)
                options: dict[str, Any] = {}
                if fuse and takes_processor():
                    options["output_processor"] = megatron.output_processor
                elif fuse:
                    megatron.fuse_output_layer(wrapped)
                    # Not without us, since its extension is not there.
                    model.output_layer.gradient_accumulation_fusion = True
                wrapped.zero_grad_buffer()
                if overlaps:
                    wrapped.start_param_sync()
                losses = []
                for seed in range(2):
                    tokens, labels, mask = texts(here, seed)
                    places = torch.arange(S, device=here.device).expand(B, S)
                    future = torch.ones(1, 1, S, S, dtype=torch.bool, device=here.device).triu(1)
                    with wrapped.no_sync() if seed == 0 else nullcontext():
                        given = {"labels": labels, "loss_mask": mask, **options}
                        loss = wrapped(tokens, places, future, **given) * mask
                        loss.sum().backward()
                    losses.append(loss.detach())
                wrapped.finish_grad_sync()
                found.append([*losses, *(each.main_grad.clone() for each in model.parameters())])
                assert fuse == isinstance(model.output_layer.forward, megatron._Forward)
            assert len(found[0]) > 10
            for one, other in zip(*found, strict=True):
                assert one.any()
                torch.testing.assert_close(one, other)


def gpt(here: Rank, tied: bool, hooks: dict) -> tuple[Any, Any]:
    """(a small GPTModel, the same wrapped), always with the same weights."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    if here.device != "cpu":
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    MTPLossLoggingHelper.tracker["values"] = torch.zeros(1, device=here.device)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=here.ranks,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mtp_num_layers=1,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    heads: Any = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = GPTModel(
        config,
        spec,
        vocab_size=V,
        max_sequence_length=S,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        mtp_block_spec=heads,
    ).to(here.device)
    return model, DistributedDataParallel(config, DistributedDataParallelConfig(**hooks), model)


def texts(here: Rank, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, labels, loss_mask), [b, s]."""
    generator = torch.Generator().manual_seed(seed)
    tokens, mask = torch.randint(V, (B, S), generator=generator), torch.ones(B, S)
    mask[:, -1] = mask[0, : 3 + seed] = 0
    return tuple(each.to(here.device) for each in (tokens, tokens.roll(-1, 1), mask))  # pyright: ignore[reportReturnType]


@contextmanager
def on_cpu() -> Iterator[None]:
    """What megatron-core asks a GPU for, answered by a CPU: a device for its buffers, and random states."""
    from megatron.core.tensor_parallel import random

    with (
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        mock.patch.object(random.CudaRNGStatesTracker, "fork", return_value=nullcontext()),
    ):
        yield


def hooks_run(here: Rank) -> None:
    """overlap_param_gather fills the weight in a hook that runs before the layer's forward."""
    hidden, weight, labels, mask = batch(here, torch.float32)
    for use in (fused_losses, processed_losses):
        model = core()(here, weight)
        own = model.head.detach().clone()
        with torch.no_grad():
            model.head.fill_(torch.nan)

        def gather(module: Any, *_: Any, own: Tensor = own) -> None:
            with torch.no_grad():
                module.weight.copy_(own)

        model.output_layer.register_forward_pre_hook(gather)
        found = use(model, hidden, labels, mask).detach()
        assert_close("losses", found, *(expected(hidden, weight, labels, mask, kind)[0] for kind in KINDS))


def fused_losses(model: Any, hidden: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    megatron.fuse_output_layer(model)
    return model(hidden, labels, mask)


def processed_losses(
    model: Any, hidden: Tensor, labels: Any, mask: Any, weight: Any = None, **options: Any
) -> Tensor:
    """As GPTModel of megatron-core 0.19 calls it."""
    names = ("input_ids", "position_ids", "attention_mask", "decoder_input", "inference_context")
    given = {
        **dict.fromkeys((*names, "packed_seq_params", "runtime_gather_output")),
        "hidden_states": hidden,
        "output_layer": model.output_layer,
        "output_weight": weight,
        "labels": labels,
        "loss_mask": mask,
        "context": {"of": "the caller"},
        "compute_language_model_loss": model.compute_language_model_loss,
        "scale_logits": lambda logits: logits,
        "config": model.config,
    }
    return megatron.output_processor(**{**given, **options})


def processed(here: Rank) -> None:
    """By its documented arguments; MuP's factor, a detached weight, slices, and no labels."""
    make = core()
    hidden, weight, labels, mask = batch(here, torch.float32)
    for sequence_parallel in (False, True):
        model = make(here, weight, sequence_parallel=sequence_parallel)
        leaf = (slice_of(hidden, here, 0) if sequence_parallel else hidden).clone().requires_grad_()
        losses = processed_losses(model, leaf, labels, mask)
        (losses * mask).sum().backward()
        want, plain = (expected(hidden, weight, labels, mask, kind) for kind in KINDS)
        assert_close("losses", losses.detach(), want[0], plain[0])
        assert leaf.grad is not None
        sliced = [slice_of(each[1], here, 0) if sequence_parallel else each[1] for each in (want, plain)]
        assert_close("dhidden", leaf.grad, *sliced)
        assert_close("dweight", model.head.grad, *(slice_of(each[2], here, 0) for each in (want, plain)))
    model = make(here, weight)
    scaled = processed_losses(model, hidden, labels, mask, scale_logits=lambda logits: logits * 0.25)
    assert_close(
        "losses", scaled.detach(), *(expected(hidden, weight / 4, labels, mask, kind)[0] for kind in KINDS)
    )
    detached = processed_losses(model, hidden, labels, mask, weight=model.head.detach())
    assert not detached.requires_grad
    logits = processed_losses(model, hidden, None, None)
    assert logits.shape == (B, S, V // here.ranks)
    torch.testing.assert_close(logits, (hidden @ model.head.T).transpose(0, 1))


def refusals(here: Rank) -> None:
    make = core()
    hidden, weight, labels, mask = batch(here, torch.float32)

    def refuses(name: str, change: Any) -> None:
        model = make(here, weight)
        change(model)
        with pytest.raises(ValueError, match=f"^{name}: got"):
            megatron.fuse_output_layer(model)
        assert not isinstance(model._postprocess, megatron._Labelled)
        if name != "model":
            with pytest.raises(ValueError, match=f"^{name}: got"):
                processed_losses(model, hidden, labels, mask)

    def capped(model: Any) -> None:
        # A subclass that does more to the logits.
        kind = type(model.output_layer)
        model.output_layer.__class__ = type("Capped", (kind,), {"forward": lambda self, x: x})

    class Later(nn.Module):
        def forward(self, hidden: Tensor, output_processor: Any = None) -> Tensor:
            return hidden

    refuses("bias", lambda model: setattr(model.output_layer, "bias", nn.Parameter(torch.zeros(V))))
    refuses(
        "defer_embedding_wgrad_compute", lambda m: setattr(m.config, "defer_embedding_wgrad_compute", True)
    )
    refuses("label_smoothing", lambda model: setattr(model.config, "label_smoothing", 0.1))
    refuses("output_layer", capped)
    refuses("output_layer", lambda model: setattr(model.output_layer, "forward", capped))
    refuses("compute_language_model_loss", lambda m: setattr(m, "compute_language_model_loss", capped))
    refuses("model", lambda model: setattr(model, "forward", Later().forward))
    with pytest.raises(TypeError, match=r"^model: got Linear, want a language"):
        megatron.fuse_output_layer(nn.Linear(2, 2))
    model = make(here, weight)
    with pytest.raises(ValueError, match=r"^loss_mask: got"):
        processed_losses(model, hidden, labels, mask[:, 1:])
    with pytest.raises(ValueError, match=r"^inference_context: got"):
        processed_losses(model, hidden, labels, mask, inference_context=1)
    with pytest.raises(AttributeError, match=r"^logits: got a use of their 'float'"):
        processed_losses(model, hidden, labels, mask, scale_logits=lambda logits: logits.float())
    # What was proved once changes afterwards.
    for name, owner, attribute, value in (
        ("label_smoothing", lambda model: model.config, "label_smoothing", 0.1),
        ("output_layer", lambda model: type(model.output_layer), "forward", lambda self, x: x),
        ("compute_language_model_loss", type, "compute_language_model_loss", lambda self, x, y: y),
        ("model", type, "_postprocess", lambda self, x: x),
    ):
        model = make(here, weight)
        megatron.fuse_output_layer(model)
        with pytest.MonkeyPatch.context() as change:
            change.setattr(owner(model), attribute, value, raising=False)
            with pytest.raises(ValueError, match=f"^{name}: got"):
                model(hidden, labels, mask)
        assert model(hidden, labels, mask).isfinite().all()
    # Another stage of a pipeline, and one wrapped twice.
    stage: Any = nn.Module()
    stage.post_process = False
    megatron.fuse_output_layer(stage)
    wrapped, inner = nn.Module(), nn.Module()
    wrapped.module, inner.module = inner, model
    megatron.fuse_output_layer(wrapped)
    assert isinstance(model._postprocess, megatron._Labelled)
    model.output_layer.gradient_accumulation_fusion = True
    model.head.__fsdp_param__ = True
    with pytest.raises(ValueError, match=r"^gradient_accumulation_fusion: got"):
        model(hidden, labels, mask)


CASES = (
    heads_and_slices,
    megatrons_own,
    evaluation,
    a_model_without_postprocessing,
    main_grad,
    gpt_model,
    hooks_run,
    processed,
    refusals,
)
