"""Now and then ranks compare digests of their parameters: those with the same shard must have the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from signvote.engines.ddp import drift
from signvote.engines.ddp.team import Team
from signvote.engines.ddp.torch_names import local_of


class Comparison:
    """This rank's side of the comparisons.

    Args:
        parameters: by name; shards of them as FSDP2 makes them.
        every: rounds between two comparisons; 0: never.

    """

    def __init__(self, parameters: Mapping[str, Tensor], every: int) -> None:
        self.parameters = parameters
        self.every = every

    def is_due(self, round: int, team: Team) -> bool:
        """Whether ranks compare their parameters in a round."""
        if not self.every or team.is_alone:
            return False
        return round % self.every == 0

    def digest(self) -> int:
        """Of the parameters, or the shards of them, on this rank."""
        return drift.digest(local_of(parameter) for parameter in self.parameters.values())

    def of_voters(self, team: Team) -> list[int]:
        """The digest of every voter. Every rank calls this."""
        team.connect()
        group = team.voters
        mine = torch.tensor([self.digest()], device=group.device)
        by_rank: list[int] = group.all_gather(mine)[:, 0].tolist()
        return by_rank

    def of_everyone(self, team: Team) -> tuple[list[int], list[int]]:
        """The digest and the shard of every rank. Every rank calls this."""
        team.connect()
        group = team.everyone
        mine = torch.tensor([self.digest(), team.shard], device=group.device)
        digests, shards = group.all_gather(mine).T.tolist()
        return digests, shards


def check(digests: Sequence[int], shards: Sequence[int], team: Team, stage: str) -> None:
    """Raise the same error on all ranks if ranks with the same shard have different parameters."""
    names = team.everyone.ranks
    for shard in sorted(set(shards)):
        places = [place for place, its_shard in enumerate(shards) if its_shard == shard]
        alike = [digests[place] for place in places]
        drift.check(alike, [names[place] for place in places], stage)
