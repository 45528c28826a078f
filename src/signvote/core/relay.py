"""A tree of servers that decides and learns bit for bit as one server would.

    workers    ballots                                                  decision
                  |                                                         ^
    relays     roll ->          -> weights   partial ->       -> verdict     evidence ->
                       |      |                        |     |                           |
    root               weigh -                         decide                            learn

A relay takes in ballots, from workers, and messages of the same forms, from relays below it, and passes their sums
on. It sends the planes of a tally instead of ballots, so that the bytes above it do not grow with its workers. The
weights of a round depend on all voters; therefore the roll is called first. What a transport does is to carry the
messages: None stands for one that did not arrive, or in time. The workers below a relay that is lost before its
partial tally arrived are absent. If it is lost later, its votes count, and nothing is learned about its workers.

    Relay     one server between workers and root
    Branch    one round of it
"""

from __future__ import annotations

import torch
from torch import Tensor

from signvote.core.ballot import Ballot
from signvote.core.chunks import in_chunks, judgments
from signvote.core.header import Kind
from signvote.core.joining import Messages, added, check_splits, contents, joined, split, together
from signvote.core.messages import Declared, Partial, Roll, Shown, Verdict, Weights
from signvote.core.report import RoundReport
from signvote.core.rounds import BATCH, Receipt, Round
from signvote.core.server import Server
from signvote.core.tally import Tally
from signvote.core.trust import total
from signvote.core.vote import LARGEST, in_a_row
from signvote.core.wire import Topic
from signvote.kernels import Planes


class Relay:
    """A server that decides nothing itself: it stands for its workers, and for the relays below it.

    Args:
        server: with the layout, rule, options, run and zeros of the root. Trust is at the root, except for the
            counters of `it-signsgd`, which stay here: a worker that changes its relay starts anew.

    """

    def __init__(self, server: Server) -> None:
        check_splits(server.rule)
        self.server = server

    def open(self, round: int) -> Branch:
        """Begin a round: `add` takes ballots, as that of `Server.open` does."""
        return Branch(self.server, self.server.open(round, stream=False))


class Branch:
    """One round of a relay. The methods are called in the order in which they stand here.

    `add` may be called from several threads. What comes after `roll` is late.
    """

    def __init__(self, server: Server, round: Round) -> None:
        self.server = server
        self.faults: list[str] = []  # why messages from below were not counted
        self._topic = Topic(server.layout, server.run, round.number)
        self._groups = len(server.rule.groups)
        self._round = round
        self._ballots: list[Ballot] = []
        self._weights = Weights(workers=(), weights=None)
        self._sources: dict[int, int] = {}  # worker -> 0 for this relay, 1 + i for relay i below
        self._counted: list[Ballot] = []

    def add(self, worker: int, message: bytes) -> Receipt:
        """Take in a ballot: see `Round.add`."""
        return self._round.add(worker, message)

    def roll(self, below: Messages = ()) -> bytes:
        """The roll of all workers below, from the rolls of the relays below."""
        self._round.stop()
        self._ballots = self._round.voters
        own = Roll(
            declared={ballot.worker: _declared(ballot) for ballot in self._ballots},
            abstained=self._round.abstained,
            refused=tuple(self._round.refused),
        )
        rolls = contents(below, lambda message: Roll.from_bytes(message, self._topic), self.faults)
        whole, self._sources = joined([own, *rolls], self._topic.round)
        self._parts = 1 + len(rolls)
        return whole.to_bytes(self._topic)

    def weigh(self, message: bytes) -> list[bytes]:
        """Take in the weights; those for each relay below. They come again if another relay was lost."""
        self._weights = Weights.from_bytes(message, self._topic, self._groups)
        parts = split(self._weights, self._sources, self._parts)
        return [each.to_bytes(self._topic) for each in parts[1:]]

    def partial(self, below: Messages = ()) -> bytes:
        """The tally of all ballots below, from those of the relays below."""
        own = split(self._weights, self._sources, self._parts)[0]
        by_worker = {ballot.worker: ballot for ballot in self._ballots}
        self._counted = [by_worker[worker] for worker in own.workers]
        mine = Partial(workers=own.workers, tally=self._tally(own.weights))
        others = contents(below, lambda m: Partial.from_bytes(m, self._topic, self._groups), self.faults)
        return added([mine, *others], self._topic, self.server.rule).to_bytes(self._topic)

    def _tally(self, weights: Tensor | None) -> Tally:
        rule = self.server.rule
        tally = Tally(**self._topic._asdict(), groups=len(rule.groups))
        if rule.is_local and self._counted:
            chunks = in_chunks(self._counted, self.server.layout.size)
            values = torch.cat([rule.tally(votes) for _, votes in chunks])
            tally.add_values(values, LARGEST * len(self._counted))
        if weights is not None:
            for start in range(0, len(self._counted), BATCH):
                some = slice(start, start + BATCH)
                tally.add_all(self._counted[some], weights[some])
        return tally

    def decide(self, message: bytes) -> bytes:
        """The decision, for the workers of this relay. Relays below get the verdict as it is."""
        self._verdict = Verdict.from_bytes(message, self._topic)
        return self._verdict.decision

    def evidence(self, below: Messages = ()) -> bytes:
        """The evidence about all workers below, from that of the relays below. Ends the round."""
        judged = self._verdict.judged
        own = None if judged is None or not self._counted else self._judged(judged)
        learned = own.evidence if own is not None and self.server.rule.is_local else None
        report = RoundReport(round=self._topic.round)
        sizes = {ballot.worker: ballot.batch_size for ballot in self._counted}
        self.server.finish(report, learned, sizes)
        others = contents(below, lambda m: Shown.from_bytes(m, self._topic, self._groups), self.faults)
        return together([own, *others], self._groups).to_bytes(self._topic)

    def _judged(self, judged: Planes) -> Shown:
        seen, samples = zip(*judgments(self.server.rule, judged, self._counted), strict=True)
        return Shown(evidence=total(seen), sampled=in_a_row(samples))


def _declared(ballot: Ballot) -> Declared:
    claims = () if ballot.claims is None else tuple(ballot.claims.tolist())
    return Declared(ballot.batch_size, ballot.kind is Kind.SPARSE, claims)
