"""The exchange among the members of a view: every row that travels has a header, see `sealed.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from signvote.engines.ddp.exchange import Exchange
from signvote.engines.ddp.process_group import Group
from signvote.engines.ddp.sealed import FAULTS, WORDS, Seal, fault_of, sealed
from signvote.engines.ddp.view_group import Lost, ViewGroup

VOTES = 1
NUMBERS = 2


class SealedExchange(Exchange):
    """Votes with a wrong header cost their worker its vote; after other damage the round is tried again."""

    faults: list[int]  # of the votes of each rank in this round, as keys of FAULTS

    @property
    def _view_group(self) -> ViewGroup:
        assert isinstance(self.group, ViewGroup)
        return self.group

    def _travel(self, numbers: range) -> None:
        """Bring all votes to the ranks that decide them. They travel together."""
        group = self._view_group
        assert len(numbers) == self.shares.chunks
        by_rank = self._sent.transpose(0, 1)
        rows = torch.stack([sealed(self._seal(VOTES, group.rank), row) for row in by_rank])
        arrived = torch.empty_like(rows)
        group.all_to_all(arrived, rows)
        self._bytes += (group.world - 1) * rows[0].nbytes
        self.faults = [fault_of(row, self._seal(VOTES, rank)) for rank, row in enumerate(arrived)]
        content = arrived[:, WORDS:].view(by_rank.shape)
        self._received = content.transpose(0, 1)

    def gather(self, mine: Tensor, group: Group | None = None) -> Tensor:
        """The tensors of all members, stacked by rank."""
        own = self._view_group
        self._bytes += (own.world - 1) * (mine.nbytes + 8 * WORDS)
        return gathered_rows(own, mine, self.round)

    def _seal(self, kind: int, rank: int) -> Seal:
        return _seal(kind, self._view_group, self.round, rank)


def _seal(kind: int, group: ViewGroup, round: int, rank: int) -> Seal:
    return Seal(kind, group.epoch, round, group.ranks[rank])


def gathered_rows(group: ViewGroup, mine: Tensor, round: int) -> Tensor:
    """The words of all members, stacked by rank. After any damage the members have to meet again."""
    rows = group.all_gather(sealed(_seal(NUMBERS, group, round, group.rank), mine))
    for rank, row in enumerate(rows):
        fault = fault_of(row, _seal(NUMBERS, group, round, rank))
        if fault:
            group.end()
            raise Lost(f"the numbers of worker {group.ranks[rank]} are {FAULTS[fault]}")
    return rows[:, WORDS:]
