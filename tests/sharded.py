"""A model that FSDP2 shards inside a node, and its twin without shards, for the tests of sharded models.

A node is a replica of the model: the ranks of one row of a mesh (replicate, shard).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from signvote import Vote
from signvote.checkpoint import State
from signvote.engines.ddp.torch_names import local_of

Array = np.ndarray[Any, Any]
CHUNK = 128
SAMPLES = 3  # of rank 0 in a step; others have more


class Net(nn.Module):
    """Rows that no mesh divides, fewer rows than ranks, tied weights, a frozen layer, one that is seldom used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.gain = nn.Parameter(torch.ones(1))
        self.first = nn.Linear(5, 9)
        self.frozen = nn.Linear(9, 5).requires_grad_(False)
        self.norm = nn.LayerNorm(5)
        self.rare = nn.Linear(5, 5)
        self.out = nn.Linear(5, 7)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor, rarely: bool = False) -> Tensor:
        x = self.first(self.table(tokens).mean(1))
        x = self.norm(self.frozen(torch.tanh(x))) * self.gain
        outputs: Tensor = self.out(self.rare(x) if rarely else x)
        return outputs


def plain(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def sharded(
    mesh: DeviceMesh, dtype: torch.dtype = torch.float32, *, keep: bool = False, mixed: bool = False
) -> Net:
    """Layers by themselves, then the rest.

    Args:
        mesh: of nodes and shards.
        dtype: of the parameters.
        keep: the whole parameters between forward and backward.
        mixed: compute in bfloat16.

    """
    model = plain(dtype)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    for layer in (model.first, model.rare, model):
        fully_shard(layer, mesh=mesh["shard"], reshard_after_forward=not keep, mp_policy=policy)
    return model


def vote_of(model: nn.Module, mesh: DeviceMesh, **more: Any) -> Vote:
    settings: dict[str, Any] = {"lr": 1e-2, "chunk": CHUNK, "check_every": 1}
    return Vote(model.parameters(), group=mesh["replicate"].get_group(), **{**settings, **more})


def samples(rank: int) -> int:
    return SAMPLES + rank


def loss(model: nn.Module, rank: int, t: int, *, rarely: bool = False) -> Tensor:
    random = torch.Generator().manual_seed(100 * t + rank)
    tokens = torch.randint(7, (samples(rank), 4), generator=random)
    labels = torch.randint(7, (samples(rank),), generator=random)
    return nn.functional.cross_entropy(model(tokens, rarely).float(), labels)


def backward(model: nn.Module, t: int, *, rarely: bool = False) -> None:
    model.zero_grad()
    loss(model, dist.get_rank(), t, rarely=rarely).backward()  # type: ignore[no-untyped-call]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank of its mesh."""
    full = getattr(tensor, "full_tensor", None)
    found: Tensor = tensor if full is None else full()
    return found.detach()


def gradients(model: nn.Module) -> list[Tensor | None]:
    """What this rank's node wants to vote for."""
    return [None if p.grad is None else whole(p.grad).clone() for p in model.parameters()]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([whole(tensor).reshape(-1).float() for tensor in tensors])


def spoil_one_shard(model: nn.Module, rank: int) -> None:
    """One number of one rank's shard is not a number."""
    if dist.get_rank() == rank:
        gradient = next(p.grad for p in model.parameters() if p.grad is not None)
        local_of(gradient).view(-1)[0] = torch.nan


def trust_of(optimizer: Vote) -> State:
    return optimizer.poll.server.state_dict()


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, tensors bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def error_of(act: Callable[[], object]) -> str:
    """The error that a call raises, as text."""
    try:
        act()
    except Exception as error:  # its text is compared
        return f"{type(error).__name__}: {error}"
    return "no error"
