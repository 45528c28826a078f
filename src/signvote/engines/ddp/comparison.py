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
        team: the ranks.
        every: rounds between two comparisons; 0: never.

    """

    def __init__(self, parameters: Mapping[str, Tensor], team: Team, every: int) -> None:
        self.parameters = parameters
        self.team = team
        self.every = every

    def is_due(self, round: int) -> bool:
        """Whether ranks compare their parameters in a round."""
        if not self.every or self.team.is_alone:
            return False
        return round % self.every == 0

    def digest(self) -> int:
        """Of the parameters, or the shards of them, on this rank."""
        return drift.digest(local_of(parameter) for parameter in self.parameters.values())

    def of_voters(self) -> list[int]:
        """The digest of every voter. Every rank calls this."""
        self.team.connect()
        group = self.team.voters
        mine = torch.tensor([self.digest()], device=group.device)
        by_rank: list[int] = group.all_gather(mine)[:, 0].tolist()
        return by_rank

    def of_everyone(self) -> tuple[list[int], list[int]]:
        """The digest and the shard of every rank. Every rank calls this."""
        self.team.connect()
        group = self.team.everyone
        mine = torch.tensor([self.digest(), self.team.shard], device=group.device)
        digests, shards = group.all_gather(mine).T.tolist()
        return digests, shards

    def check(self, digests: Sequence[int], shards: Sequence[int], stage: str) -> None:
        """Raise the same error on all ranks if ranks with the same shard have different parameters."""
        names = self.team.everyone.ranks
        for shard in sorted(set(shards)):
            places = [place for place, its_shard in enumerate(shards) if its_shard == shard]
            alike = [digests[place] for place in places]
            drift.check(alike, [names[place] for place in places], stage)
