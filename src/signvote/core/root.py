"""The server at the top of a tree of relays: see `relay.py`."""

from __future__ import annotations

import torch

from signvote.core.joining import Messages, added, check_splits, contents, joined, split, together
from signvote.core.messages import Partial, Roll, Shown, Verdict, Weights
from signvote.core.report import RoundReport
from signvote.core.server import Server
from signvote.core.trust import Evidence
from signvote.core.vote import Voters
from signvote.core.wire import Topic


class Root:
    """One round of the server at the top of a tree. The methods are called in the order in which they stand here.

    Args:
        server: decides and learns, as it would from ballots.
        round: must be larger than that of the last decision.

    """

    def __init__(self, server: Server, round: int) -> None:
        check_splits(server.rule)
        server.begin(round)
        self.server = server
        self.faults: list[str] = []  # why messages from below were not counted
        self._topic = Topic(server.layout, server.run, round)
        self._groups = len(server.rule.groups)
        self._sources: dict[int, int] = {}
        self.decision = b""

    def weigh(self, rolls: Messages) -> list[bytes]:
        """The weights for each relay, from their rolls."""
        read = contents(rolls, lambda message: Roll.from_bytes(message, self._topic), self.faults)
        self._roll, self._sources = joined(read, self._topic.round)
        self._relays = len(rolls)
        self._voters = self._roll.voters(list(self._roll.declared))
        self._weights = self._weigh(self._voters)
        return self.weights

    def _weigh(self, voters: Voters) -> Weights:
        rule = self.server.rule
        is_known = rule.is_local or not voters.workers
        weights = None if is_known else rule.weigh(voters)
        return Weights(workers=voters.workers, weights=weights)

    @property
    def weights(self) -> list[bytes]:
        """The weights for each relay, as they are now."""
        parts = split(self._weights, self._sources, self._relays)
        return [each.to_bytes(self._topic) for each in parts]

    def decide(self, partials: Messages) -> bytes | None:
        """The verdict for the relays, from their partial tallies. None: somebody is lost, and others weigh more or
        less without them; send the relays `weights` again, and ask for new tallies.
        """
        server = self.server
        read = contents(partials, lambda m: Partial.from_bytes(m, self._topic, self._groups), self.faults)
        counted = added(read, self._topic, server.rule)
        if counted.workers != self._voters.workers and not self._goes_on_with(counted.workers):
            return None
        decision, judged = server.conclude(self._topic.round, self._voters, lambda: counted.tally)
        has_sparse_votes = any(self._roll.declared[worker].is_sparse for worker in counted.workers)
        self.decision = server.message(self._topic.round, decision, self._voters, has_sparse_votes)
        self._is_decided = judged is not None
        return Verdict(decision=self.decision, judged=judged).to_bytes(self._topic)

    def _goes_on_with(self, counted: tuple[int, ...]) -> bool:
        """Leave out the other voters. Whether the weights of these are the same without them."""
        before = self._weights
        left = set(counted)
        rows = [row for row, worker in enumerate(before.workers) if worker in left]
        self._voters = self._roll.voters(counted)
        self._weights = self._weigh(self._voters)
        if before.weights is None or self._weights.weights is None:
            return True
        return torch.equal(before.weights[rows], self._weights.weights)

    def learn(self, evidence: Messages) -> None:
        """Close the round with the evidence of the relays; `server.report` shows what happened."""
        report = RoundReport(
            round=self._topic.round,
            abstained=self._roll.abstained,
            refused=self._roll.refused,
        )
        voters = self._voters
        sizes = dict(zip(voters.workers, voters.batch_sizes, strict=True))
        seen = self._evidence(evidence) if self._is_decided else None
        self.server.finish(report, seen, sizes)

    def _evidence(self, messages: Messages) -> Evidence:
        """The evidence about all voters: nothing about those below a relay that was lost."""
        read = contents(messages, lambda m: Shown.from_bytes(m, self._topic, self._groups), self.faults)
        shown = together(read, self._groups, self._voters.workers)
        rule = self.server.rule
        return rule.compared(shown.evidence, rule.thinned(shown.sampled))
