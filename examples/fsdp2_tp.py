"""Train a small decoder under FSDP2, its output layer's vocabulary sharded over a tensor parallel group.

Ranks are --tp wide groups of tensor parallelism, times data parallelism. Two lines are cute_lce's:

    head = cute_lce.LinearCrossEntropy(d, vocab_size)                 # forward(hidden, target) is the loss
    parallelize_module(head, mesh["tp"], VocabParallelLoss())         # its weight becomes a shard

The data are made up: each token decides the next but for some noise. All is float32. Each rank also trains
the whole model on the whole batch, with torch's loss, and the program ends with status 1 when the losses
differ by more than --tolerance.

    torchrun --nproc-per-node 4 -m examples.fsdp2_tp              # on GPUs, else on CPUs (gloo)
    torchrun --nproc-per-node 8 -m examples.fsdp2_tp --tp 4 --hidden 2048 --heads 16 --vocab-size 131072
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import cute_lce
from cute_lce.commands.terminal import mebibytes, positive
from cute_lce.parallel import VocabParallelLoss
from examples.language_model import CanonicalHead, LanguageModel


def parallel_model(args: argparse.Namespace, mesh: DeviceMesh) -> LanguageModel:
    """The model, sharded: the head's classes over "tp", and every unit's parameters over "dp"."""
    head = cute_lce.LinearCrossEntropy(args.hidden, args.vocab_size, workspace_mb=args.workspace_mb)
    model = LanguageModel(args.vocab_size, args.hidden, args.layers, args.heads, args.length, head)
    model.initialise(args.seed)
    model.to(args.device)
    parallelize_module(model.head, mesh["tp"], VocabParallelLoss())
    for unit in (*model.blocks, model.head, model):
        fully_shard(unit, mesh=mesh["dp"])
    return model


def whole_model(args: argparse.Namespace) -> LanguageModel:
    """The same weights on each rank, and torch's loss by way of the logits."""
    head = CanonicalHead(args.hidden, args.vocab_size, torch.float32)
    model = LanguageModel(args.vocab_size, args.hidden, args.layers, args.heads, args.length, head)
    model.initialise(args.seed)
    return model.to(args.device)


def batch(args: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """(tokens, next tokens) of the whole batch, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * args.seed + step)
    text = torch.randint(args.vocab_size, (args.batch, args.length + 1), generator=generator)
    for place in range(args.length):
        noise = torch.rand(args.batch, generator=generator) < 0.1
        text[:, place + 1] = torch.where(
            noise, text[:, place + 1], (text[:, place] * 5 + 1) % args.vocab_size
        )
    return text[:, :-1].to(args.device), text[:, 1:].to(args.device)


def train(model: LanguageModel, args: argparse.Namespace, dp: DeviceMesh | None) -> list[float]:
    """The losses of the steps. dp: over whose ranks the batch is divided; None: over none."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)
    losses = []
    for step in range(args.steps):
        tokens, target = batch(args, step)
        if dp is not None:
            tokens, target = (each.chunk(dp.size())[dp.get_local_rank()] for each in (tokens, target))
        loss = model(tokens, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = loss.detach().clone()
        if dp is not None:
            dist.all_reduce(found, group=dp.get_group())
            found /= dp.size()
        losses.append(found.item())
    return losses


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.fsdp2_tp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tp", type=positive, default=2, help="ranks in a tensor parallel group (%(default)s)")
    add("--steps", type=positive, default=20, help="training steps (%(default)s)")
    add("--batch", type=positive, default=8, help="sequences in a step, over all ranks (%(default)s)")
    add("--length", type=positive, default=64, help="tokens in a sequence (%(default)s)")
    add("--hidden", type=positive, default=64, help="hidden size (%(default)s)")
    add("--layers", type=positive, default=2, help="decoder layers (%(default)s)")
    add("--heads", type=positive, default=4, help="attention heads (%(default)s)")
    add("--vocab-size", type=positive, default=512, help="classes (%(default)s)")
    add("--workspace-mb", type=mebibytes, default=None, help="workspace_mb of the loss (its default)")
    add("--lr", type=float, default=3e-3, help="learning rate (%(default)s)")
    add("--seed", type=int, default=0, help="seed of the weights and of the data (%(default)s)")
    add(
        "--tolerance",
        type=float,
        default=1e-3,
        help="largest relative difference of the losses (%(default)s)",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cuda", "cpu"), default=device, help="(%(default)s)")
    args = parser.parse_args(argv)
    if args.hidden % (2 * args.heads):
        parser.error(f"--hidden: got {args.hidden}, want a multiple of twice --heads, {args.heads}")
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit("examples.fsdp2_tp: no WORLD_SIZE, want torchrun to start it (see --help)")
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks % args.tp:
        parser.error(f"--tp: got {args.tp}, want a divisor of the number of ranks, {ranks}")
    if args.batch % (ranks // args.tp):
        # The mean of unequal parts' means is another than the whole's.
        parser.error(f"--batch: got {args.batch}, want a multiple of ranks / --tp, {ranks // args.tp}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    mesh = init_device_mesh(
        args.device, (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp")
    )
    found = train(parallel_model(args, mesh), args, mesh["dp"])
    wanted = train(whole_model(args), args, None)
    apart = max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True))
    if dist.get_rank() == 0:
        sizes = f"{mesh['dp'].size()} x {args.tp} ranks"
        print(f"{sizes}: loss {found[0]:.4f} -> {found[-1]:.4f}, at most {apart:.1e} from one model's")
    dist.destroy_process_group()
    return int(not apart <= args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
