"""The ranks that take part: those that vote with this one, and the shards of its worker.

    everyone    all ranks
    voters      the ranks that hold the same coordinates as this one, one for each worker: they vote
    shards      the ranks of one worker, each of which holds other coordinates (FSDP)

Without shards a worker is one rank, and `everyone` are the voters.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from signvote.core.encoding import Encoding
from signvote.core.layout import Layout
from signvote.core.rule import Ranges, Rule
from signvote.engines.ddp.placement import Held, Placement
from signvote.engines.ddp.process_group import Alone, Group, ProcessGroup, ranks_of
from signvote.engines.ddp.torch_names import is_sharded_by_fsdp, sharding_of
from signvote.errors import ConfigError


class Team:
    """The groups of ranks that a rank votes in. Only `connect` exchanges anything.

    Args:
        voters: the ranks that hold the same coordinates.
        shards: the ranks of this worker; None: it is one rank.

    """

    def __init__(self, voters: Group, shards: ProcessGroup | None = None) -> None:
        self.voters = voters
        self.shards = shards
        self.everyone = voters

    @property
    def shard(self) -> int:
        """The place of this rank among those of its worker."""
        return 0 if self.shards is None else self.shards.rank

    @property
    def is_alone(self) -> bool:
        """Whether this rank is all there is, so that nothing travels."""
        return self.voters.world == 1 and (self.shards is None or self.shards.world == 1)

    def connect(self) -> None:
        """Make the groups. Every rank calls this at the same point."""
        self.voters.connect()
        if self.shards is None or self.everyone is not self.voters:
            return
        self.shards.connect()
        mine = torch.tensor(self.voters.ranks, device=self.shards.device)
        rows: list[list[int]] = self.shards.all_gather(mine).tolist()
        ranks = sorted(chain.from_iterable(rows))
        everyone = ProcessGroup(ranks, self.shards.device, self.shards.timeout)
        everyone.connect()
        self.everyone = everyone

    def name_stage(self, stage: str) -> None:
        """Name the round for errors."""
        for group in (self.voters, self.everyone):
            group.stage = stage
        if self.shards is not None:
            self.shards.stage = stage


def team_of(
    parameters: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    device: torch.device,
    timeout: float,
) -> Team:
    """The team of the rank that holds these parameters. Without torch.distributed it is alone.

    Args:
        parameters: of the model; shards of them as FSDP2 makes them.
        group: of the ranks that hold the same coordinates; None: all ranks.
        device: the device of the gradients.
        timeout: seconds to wait for a rank.

    """
    mesh = mesh_of(parameters)
    if not dist.is_available() or not dist.is_initialized():
        _warn_if_launched_with_others()
        return Team(Alone(device))
    voters = ProcessGroup(ranks_of(group), device, timeout)
    if mesh is None:
        return Team(Alone(device) if voters.world == 1 else voters)
    shards = ProcessGroup(dist.get_process_group_ranks(mesh.get_group()), device, timeout)
    others = set(voters.ranks) & set(shards.ranks) - {dist.get_rank()}
    if group is None or others:
        raise ConfigError(
            "the parameters are sharded; give Vote the ranks that hold the same shards on other machines:"
            ' group=mesh["replicate"].get_group()'
        )
    return Team(voters, shards)


def _warn_if_launched_with_others() -> None:
    """Warn if a launcher started several processes, and nothing connects them."""
    world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        warnings.warn(
            f"WORLD_SIZE is {world}, but torch.distributed is not initialized, so this process votes alone; call"
            " init_process_group before the first step",
            stacklevel=2,
        )


def mesh_of(parameters: Mapping[str, Tensor]) -> DeviceMesh | None:
    """The mesh over which all parameters are sharded by their first dimension; None if none is sharded."""
    found = {name: sharding_of(parameter) for name, parameter in parameters.items()}
    meshes = [sharding[0] for sharding in found.values() if sharding is not None]
    if not meshes:
        return None
    for name, sharding in found.items():
        if sharding is None:
            raise ConfigError(
                f"{name} is not sharded, and others are: call fully_shard on the whole model, or give {name} to"
                " another optimizer"
            )
        mesh, cut = sharding
        if cut == (None, 0):
            raise ConfigError(
                f"{name} lies on a mesh of two dimensions, over which FSDP2 averages gradients and leaves nothing to"
                ' vote on; use fully_shard(model, mesh=mesh["shard"]) and'
                ' Vote(..., group=mesh["replicate"].get_group())'
            )
        if cut != (0,):
            raise ConfigError(_foreign(name))
        if mesh != meshes[0]:
            raise ConfigError(f"{name} lies on another mesh than the first parameter; one mesh is supported")
    return meshes[0]


def _foreign(name: str) -> str:
    """The error for a parameter that is sharded by somebody else, or by another dimension."""
    return (
        f"{name} is not sharded by FSDP2 alone, along its first dimension: tensor parallelism and shard_placement_fn"
        ' are not supported; use only fully_shard(model, mesh=mesh["shard"])'
    )


def check_sharded(
    parameters: Mapping[str, Tensor],
    modules: Iterable[nn.Module],
    *,
    overlap: bool,
    has_balancer: bool,
) -> None:
    """Raise, before training starts, for what an optimizer of sharded parameters cannot do.

    Args:
        parameters: of the optimizer.
        modules: that hold them.
        overlap: whether gradients are to be sent during the backward pass.
        has_balancer: whether batch sizes are planned.

    """
    if mesh_of(parameters) is None:
        return
    if not any(is_sharded_by_fsdp(module) for module in modules):
        raise ConfigError(_foreign(next(iter(parameters))))
    if overlap:
        raise ConfigError("overlap=True is not supported with sharded parameters; use overlap=False")
    if has_balancer:
        raise ConfigError(
            "a balancer plans for workers of one rank, and the parameters are sharded; leave it out, and choose the"
            " batch size of each rank"
        )


def held_by(parameters: Mapping[str, Tensor], shard: int, shards: int) -> dict[str, Held]:
    """The coordinates of each parameter that a rank holds: rows are shared out as `torch.chunk` does."""
    held = {}
    for name, parameter in parameters.items():
        rows = parameter.shape[0]
        row = prod(parameter.shape[1:])
        most = -(-rows // shards)
        first = min(shard * most, rows)
        last = min(first + most, rows)
        held[name] = Held(first * row, last * row)
    return held


def own(rule: Rule, ranges: Ranges, team: Team) -> None:
    """Have a rule decide these coordinates only."""
    if team.shards is not None and type(rule).own is not Rule.own:
        raise ConfigError(
            f"rule {rule.name!r} keeps counters per coordinate, which is not supported with sharded parameters;"
            " use 'weighted'"
        )
    rule.own(ranges)


def placed(layout: Layout, parameters: Mapping[str, Tensor], team: Team, encoding: Encoding) -> Placement:
    """Where this rank's coordinates lie."""
    if team.shards is None:
        return Placement.of(layout)
    if encoding.corrects:
        raise ConfigError("rule 'mean' is not supported with sharded parameters; use 'weighted'")
    if encoding.scales:
        raise ConfigError("votes after local steps are not supported with sharded parameters; use Vote")
    if encoding.needs_whole_vector:
        raise ConfigError("feedback, top and polar need the whole vector, and the parameters are sharded")
    return Placement.of(layout, held_by(parameters, team.shard, team.shards.world))
