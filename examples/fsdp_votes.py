"""A model that FSDP2 shards inside a node, with votes between nodes. The lines that votes add have a (*).

    torchrun --nproc-per-node 4 examples/fsdp_votes.py --save runs/fsdp
    torchrun --nproc-per-node 2 examples/fsdp_votes.py --shards 1 --resume runs/fsdp

On one machine, four ranks play two nodes of two ranks each. On a cluster, `--shards` is the number of ranks of a
machine. The data is bundled.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import signvote
from signvote.engines.ddp import load_sharded, save_sharded  # (*)
from signvote.tasks import load_task

parser = argparse.ArgumentParser(description="FSDP2 inside a node, votes between nodes")
parser.add_argument("--shards", type=int, default=2, help="ranks of a node, which share a model")
parser.add_argument("--rounds", type=int, default=200)
parser.add_argument("--resume", help="the folder of a checkpoint; its mesh may differ")
parser.add_argument("--save", help="a new folder for a checkpoint")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())
shape = (world // options.shards, options.shards)
mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

torch.manual_seed(0)  # every node starts from the same weights
task = load_task("mnist-10k", model="mlp").to(torch.device(device))
model = task.model().to(device)
for layer in model.modules():
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh["shard"])  # means of gradients inside a node
fully_shard(model, mesh=mesh["shard"])
group = mesh["replicate"].get_group()
optimizer = signvote.Vote(model.parameters(), lr=1e-3, group=group)  # (*) votes between nodes
if options.resume:
    load_sharded(options.resume, model, optimizer)  # (*)

random = torch.Generator().manual_seed(1000 + rank)  # every rank draws its own samples
for _ in range(options.rounds):
    chosen = torch.randint(len(task.train), (64,), generator=random).to(device)
    optimizer.zero_grad()
    loss = task.loss(model, task.batch(task.train, chosen))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()

with torch.no_grad():  # on every rank, because each has a part of the model
    right = model(task.prepare(task.test.inputs)).argmax(1) == task.test.labels
if rank == 0:
    accuracy = right.float().mean()
    print(f"round {optimizer.round}: {accuracy:.1%} right; samples of the nodes: {optimizer.batch_sizes}")
if options.save:
    save_sharded(options.save, model, optimizer)  # (*)
dist.destroy_process_group()
