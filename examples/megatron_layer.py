"""megatron-core's ColumnParallelLinear as an output layer whose loss needs no logits, and its main_grad.

The ranks are one tensor parallel group; each has a slice of the vocabulary and, with --sequence-parallel, of
the tokens. The layer is megatron-core's own. One line is cute_lce's: `output_processor`, called here as
GPTModel of megatron-core >= 0.18 calls it, gives the losses [b, s]. With an earlier one it is
`cute_lce.integrations.megatron.fuse_output_layer(model)` before training.

Two micro-batches are added to main_grad in float32. The program ends with status 1 when the losses, the
gradient by the hidden states or main_grad differ from torch's of the whole by more than --tolerance.

    torchrun --nproc-per-node 2 -m examples.megatron_layer        # on GPUs, else on CPUs (gloo)
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cute_lce.commands.terminal import positive
from cute_lce.integrations import megatron


def output_layer(args: argparse.Namespace) -> Any:
    """The layer of this rank's slice, with a main_grad as DistributedDataParallel makes one."""
    # Of what is not installed, and of what it deprecates itself.
    warnings.filterwarnings("ignore")
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear

    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    config = ModelParallelConfig(
        tensor_model_parallel_size=ranks,
        sequence_parallel=args.sequence_parallel and ranks > 1,
        use_cpu_initialization=True,
        params_dtype=getattr(torch, args.dtype),
    )
    layer: Any = ColumnParallelLinear(
        args.hidden, args.vocab_size, config=config, init_method=torch.nn.init.xavier_normal_, bias=False
    ).to(args.device)
    layer.gradient_accumulation_fusion = True
    layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    layer.weight.grad_added_to_main_grad = False
    return layer


def losses_of(layer: Any, hidden: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
    """[b, s], of this rank's hidden states [s, b, h]."""
    return megatron.output_processor(
        hidden_states=hidden,
        output_layer=layer,
        output_weight=None,
        labels=labels,
        loss_mask=loss_mask,
        config=layer.config,
    )


def gathered(tensor: Tensor) -> Tensor:
    """Every rank's rows."""
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.detach().contiguous())
    return torch.cat(every)


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def run(args: argparse.Namespace) -> list[float]:
    """The largest distances of losses, of the gradients by hidden states, and of main_grad."""
    layer, rank, ranks = output_layer(args), dist.get_rank(), dist.get_world_size()
    whole = gathered(layer.weight).float().requires_grad_()
    apart = [0.0, 0.0, 0.0]
    for micro_batch in range(2):
        generator = torch.Generator().manual_seed(micro_batch)
        every = torch.randn(args.length, args.batch, args.hidden, generator=generator).to(layer.weight)
        labels = torch.randint(args.vocab_size, (args.batch, args.length), generator=generator)
        labels = labels.to(args.device)
        loss_mask = torch.ones(args.batch, args.length, device=args.device)
        loss_mask[:, : args.length // 4] = 0

        def own(tensor: Tensor) -> Tensor:
            return tensor.chunk(ranks)[rank] if layer.sequence_parallel else tensor

        hidden = own(every).clone().requires_grad_()
        losses = losses_of(layer, hidden, labels, loss_mask)
        (losses * loss_mask).sum().backward()
        assert hidden.grad is not None
        assert layer.weight.grad_added_to_main_grad
        # What DistributedDataParallel does with the zeros that autograd got.
        layer.weight.grad = None

        leaf = every.float().requires_grad_()
        logits = (leaf @ whole.T).permute(1, 2, 0)
        wanted = F.cross_entropy(logits, labels, reduction="none") * loss_mask
        wanted.sum().backward()
        assert leaf.grad is not None
        apart[0] = max(apart[0], distance(losses, wanted))
        apart[1] = max(apart[1], distance(hidden.grad, own(leaf.grad)))
    assert whole.grad is not None
    apart[2] = distance(layer.weight.main_grad, whole.grad.chunk(ranks)[rank])
    return apart


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.megatron_layer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--batch", type=positive, default=2, help="sequences in a micro-batch (%(default)s)")
    add("--length", type=positive, default=128, help="tokens in a sequence (%(default)s)")
    add("--hidden", type=positive, default=256, help="hidden size (%(default)s)")
    add("--vocab-size", type=positive, default=4096, help="classes (%(default)s)")
    add("--sequence-parallel", action="store_true", help="each rank has a slice of the tokens")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="(%(default)s)")
    add(
        "--tolerance", type=float, default=1e-2, help="largest relative difference from torch's (%(default)s)"
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cuda", "cpu"), default=device, help="(%(default)s)")
    args = parser.parse_args(argv)
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit("examples.megatron_layer: no WORLD_SIZE, want torchrun to start it (see --help)")
    ranks = int(os.environ["WORLD_SIZE"])
    if args.vocab_size % ranks:
        parser.error(f"--vocab-size: got {args.vocab_size}, want a multiple of the number of ranks, {ranks}")
    if args.sequence_parallel and args.length % ranks:
        parser.error(f"--length: got {args.length}, want a multiple of the number of ranks, {ranks}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    apart = run(args)
    if dist.get_rank() == 0:
        print(
            "from torch's: losses {:.1e}, gradient by hidden states {:.1e}, main_grad {:.1e}".format(*apart)
        )
    dist.destroy_process_group()
    return int(not max(apart) <= args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
