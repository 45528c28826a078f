"""After members have met: all of them catch up with the one furthest ahead.

Furthest ahead is the member that caught up in the latest view, and among these the one with the latest round. A round
needs all members of its view, so the members of a view differ by one round at most, and a worker that was outside never
leads those that continued. A member that knows an earlier link of the chain gets the decisions since then; any other
one gets the parameters. Trust is the same on all members, so it is copied. Momentum is a worker's own, and stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from signvote import checkpoint
from signvote.core.server import Server
from signvote.core.trust import State
from signvote.engines.ddp.past import Decided, Past
from signvote.engines.ddp.sealed_exchange import gathered_rows
from signvote.engines.ddp.view_group import Lost, ViewGroup
from signvote.errors import StateError


class Model(Protocol):
    """The parameters that votes move."""

    def apply(self, decided: Decided) -> None:
        """Step by a decision of the past."""

    def state(self) -> State:
        """All of them."""

    def load(self, state: State) -> None:
        """Overwrite them."""


class Standing(NamedTuple):
    """How far a member is."""

    settled: int  # the view in which it caught up last
    round: int
    link: bytes  # 16 of them


class Story:
    """All that is the same on every member after a round.

    Args:
        model: the parameters.
        server: trust, and the number of the round.
        past: the last rounds.

    """

    def __init__(self, model: Model, server: Server, past: Past) -> None:
        self.model = model
        self.server = server
        self.past = past
        self.counted: dict[int, int] = {}  # worker -> the last round that its vote was counted in
        self.settled = 0

    @property
    def round(self) -> int:
        """The last round decided."""
        return self.server.last_round or 0

    def catch_up(self, group: ViewGroup) -> None:
        """Become equal to the member furthest ahead. Every member calls this."""
        standings = self._standings(group)
        leader = _furthest(standings)
        letters = [b""] * group.world
        if group.rank == leader:
            letters = [self._letter(each.link) for each in standings]
        letter = group.swap(letters)[leader]
        if self.past.link != standings[leader].link:
            self._read(letter, standings[leader])
        self.settled = group.epoch

    def _standings(self, group: ViewGroup) -> list[Standing]:
        """How far every member is."""
        link = torch.frombuffer(bytearray(self.past.link), dtype=torch.int64)
        mine = torch.cat([torch.tensor([self.settled, self.round]), link])
        rows = gathered_rows(group, mine, round=0)
        found = []
        for row in rows:
            settled, round = row[:2].tolist()
            its_link = row[2:].numpy().tobytes()
            found.append(Standing(settled, round, its_link))
        return found

    def _letter(self, link: bytes) -> bytes:
        """What a member with this link lacks."""
        if link == self.past.link:
            return b""
        rounds = self.past.since(link)
        content: State = {
            "server": self.server.state_dict(),
            "counted": list(map(list, self.counted.items())),
        }
        if rounds is None:
            content["model"] = self.model.state()
        else:
            content["rounds"] = [each.to_state() for each in rounds]
        return checkpoint.to_bytes(content)

    def _read(self, letter: bytes, standing: Standing) -> None:
        """Catch up by a letter."""
        try:
            content = checkpoint.from_bytes(letter, "the letter of another worker")
        except StateError as error:
            raise Lost(str(error)) from error
        if "model" in content:
            self.model.load(content["model"])
            self.past.jump(standing.link)
        for state in content.get("rounds", ()):
            decided = Decided.of(state)
            self.model.apply(decided)
            self.past.add(decided)
        self.server.load_state_dict(content["server"])
        self.counted = dict(content["counted"])

    def count(self, workers: Mapping[int, int]) -> None:
        """Keep whose votes were counted, and in which round."""
        self.counted |= workers

    def wait_for_all(self, group: ViewGroup) -> None:
        """Wait until all members call this."""
        self._standings(group)


def _furthest(standings: Sequence[Standing]) -> int:
    """The rank of the member that is furthest; of several the first."""
    ahead = [(each.settled, each.round) for each in standings]
    return ahead.index(max(ahead))
