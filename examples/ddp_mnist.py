"""Ordinary DDP training of a CNN on MNIST, with one bit per parameter each way. The changed lines have a (*).

    torchrun --nproc-per-node 2 examples/ddp_mnist.py
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or ranks that restart may look for those that died
    torchrun --nproc-per-node 4 --max-restarts 3 examples/ddp_mnist.py --checkpoints runs/ddp

With a folder for checkpoints, ranks that died are started again by torchrun and continue where the last
checkpoint is, also if fewer come back. Batch sizes follow the ranks' speed. The data is bundled.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import signvote  # (*)
from signvote.engines.ddp import Balancer, UnequalSampler, load, save
from signvote.tasks import load_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--step", type=float, default=1e-3)
    parser.add_argument("--total", type=int, default=256, help="samples a round, of all ranks together")
    parser.add_argument("--rule", default="weighted")
    parser.add_argument("--model", default="mnist-cnn")
    parser.add_argument("--fixed", action="store_true", help="equal batches, whatever the ranks' speed")
    parser.add_argument("--checkpoints", type=Path, help="a folder that all ranks see")
    parser.add_argument("--save-every", type=int, default=50, help="rounds")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    task = load_task("mnist-10k", model=options.model).to(device)

    model = DistributedDataParallel(task.model().to(device))
    balancer = Balancer(options.total, world, every=0 if options.fixed else 10)
    optimizer = signvote.Vote(  # (*)
        model.parameters(), lr=options.step, momentum=0.9, rule=options.rule, balancer=balancer
    )
    sampler = UnequalSampler(len(task.train), balancer, rank)

    if options.checkpoints and (found := load(options.checkpoints, optimizer)):
        shared, _ = found
        model.module.load_state_dict(shared["model"])
        balancer.load_state_dict(shared["balancer"])
    for t in range(optimizer.round, options.rounds):
        chosen = torch.tensor(sampler.batch(t), device=device)
        batch = task.batch(task.train, chosen)
        optimizer.param_groups[0]["lr"] = options.step * (1 + math.cos(math.pi * t / options.rounds)) / 2
        optimizer.zero_grad()
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if rank == 0 and (t + 1) % 50 == 0:
            print(f"round {t + 1}: {accuracy(task, model.module):.1%} right, batches {balancer.sizes(t)}")
        if options.checkpoints and (t + 1) % options.save_every == 0:
            shared = {"model": model.module.state_dict(), "balancer": balancer.state_dict()}
            save(options.checkpoints, optimizer, shared)
    dist.destroy_process_group()


@torch.no_grad()
def accuracy(task, model: torch.nn.Module) -> float:  # type: ignore[no-untyped-def]
    right = model(task.prepare(task.test.inputs)).argmax(1) == task.test.labels
    return float(right.float().mean())


if __name__ == "__main__":
    main()
