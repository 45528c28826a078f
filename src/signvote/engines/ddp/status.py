"""The numbers that a rank sends about itself in a round, after its votes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from signvote.engines.ddp.exchange import Exchange
from signvote.engines.ddp.handshake import Handshake
from signvote.engines.ddp.process_group import Group
from signvote.errors import EngineError
from signvote.kernels.reference import pack, unpack


class Status(NamedTuple):
    """One rank in one round, or one worker."""

    round: int
    votes: int  # 1: the rank votes; 0: it abstains
    reason: int  # why it abstains, of `signvote.core.ballot.REASONS`
    batch_size: int
    nanoseconds: int  # of work
    traveled: int  # nanoseconds that TURN bytes of its votes took
    digest: int  # of the parameters; 0 in a round in which they are not compared


class Statuses(NamedTuple):
    """The status of every rank."""

    ranks: list[Status]
    used: list[bool]  # which parameters have a gradient on some rank
    claims: Tensor  # (ranks, tensors) int8 of votes that are corrections; no tensors otherwise

    def of_voters(self, handshake: Handshake) -> list[Status]:
        """The status of each voter: of all ranks of its worker together."""
        return [self._of_worker(worker, handshake) for worker in handshake.ids]

    def _of_worker(self, worker: int, handshake: Handshake) -> Status:
        pairs = zip(handshake.members, self.ranks, strict=True)
        statuses = [status for member, status in pairs if member.worker == worker]
        sizes = [status.batch_size for status in statuses]
        return Status(
            round=statuses[0].round,
            votes=min(status.votes for status in statuses),
            reason=max(status.reason for status in statuses),
            batch_size=sum(sizes) if all(sizes) else 0,
            nanoseconds=max(status.nanoseconds for status in statuses),
            traveled=max(status.traveled for status in statuses),
            digest=0,  # shards are compared one by one
        )


def gathered(
    mine: Status,
    used: Sequence[bool],
    claims: Tensor,
    exchange: Exchange,
    group: Group,
) -> Statuses:
    """The status of every rank, the parameters that some rank has a gradient of, and what workers claim."""
    if group.world == 1:
        return Statuses([mine], list(used), claims[None])
    numbers = torch.tensor(mine)
    bits = pack(torch.tensor(used, dtype=torch.bool))
    sent = torch.cat([numbers, bits, _as_words(claims.cpu())])
    rows: Tensor = exchange.gather(sent, group).cpu()
    its_numbers = rows[:, : len(numbers)]
    its_bits = rows[:, len(numbers) : len(numbers) + len(bits)]
    its_claims = rows[:, len(numbers) + len(bits) :]
    ranks = [Status(*row) for row in its_numbers.tolist()]
    rounds = [status.round for status in ranks]
    if len(set(rounds)) > 1:
        raise EngineError(f"ranks are in different rounds: {rounds}")
    exchange.pace(min(status.traveled for status in ranks))
    by_rank = unpack(its_bits, len(used))
    claimed = its_claims.contiguous().view(torch.int8)[:, : len(claims)]
    return Statuses(ranks, by_rank.any(0).tolist(), claimed)


def _as_words(numbers: Tensor) -> Tensor:
    """Numbers of 8 bits in words of 64, padded with zeros."""
    missing = -len(numbers) % 8
    return torch.nn.functional.pad(numbers, (0, missing)).view(torch.int64)
