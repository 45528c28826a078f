"""The numbers that a rank sends about itself in a round, after its votes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from signvote.engines.ddp.exchange import Exchange
from signvote.errors import EngineError


class Status(NamedTuple):
    """One rank in one round."""

    round: int
    finite: int  # 1: the rank votes; 0: it abstains
    batch_size: int
    nanoseconds: int  # of work
    digest: int  # of the parameters; 0 in a round in which they are not compared


def gathered(mine: Status, exchange: Exchange) -> list[Status]:
    """The status of every rank, by rank."""
    sent = torch.tensor(mine)
    rows: list[list[int]] = exchange.gather(sent).tolist()
    statuses = [Status(*row) for row in rows]
    rounds = [status.round for status in statuses]
    if len(set(rounds)) > 1:
        raise EngineError(f"ranks are in different rounds: {rounds}")
    return statuses
