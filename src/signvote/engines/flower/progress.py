"""What each node's model contains, and which decisions it lacks.

Workers are numbered in the order in which their nodes first appear (within a round, by node id). The list of nodes is
part of the checkpoint: trust belongs to a node id, but ballots, coins and logs carry small numbers, the same as in
the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Decision(NamedTuple):
    """A decision as nodes apply it."""

    step: float
    message: bytes


class Progress:
    """The worker number of each node, the last round in its model, and the recent decisions."""

    def __init__(self, nodes: Iterable[int] = ()) -> None:
        self.nodes: list[int] = []  # worker -> node id
        self.decisions: dict[int, Decision] = {}  # by round; older ones are dropped
        self._workers: dict[int, int] = {}  # node id -> worker
        self._applied: dict[int, int] = {}  # node id -> last round in its model, as the node reports it
        self.register(nodes)

    def register(self, nodes: Iterable[int]) -> None:
        """Give each new node the next worker number."""
        for node in nodes:
            if node not in self._workers:
                self._workers[node] = len(self.nodes)
                self.nodes.append(node)

    def worker(self, node: int) -> int:
        """The worker number of a registered node."""
        return self._workers[node]

    def set_applied(self, node: int, round: int) -> None:
        """The node's model contains all decisions up to this round."""
        self._applied[node] = round

    def forget_applied(self, node: int) -> None:
        """The node needs the whole model."""
        self._applied.pop(node, None)

    def lacking(self, node: int, last_round: int) -> dict[int, Decision] | None:
        """The decisions up to `last_round` that a node's model lacks; None: the node needs the whole model."""
        if node not in self._applied:
            return None
        rounds = range(self._applied[node] + 1, last_round + 1)
        if any(t not in self.decisions for t in rounds):
            return None
        return {t: self.decisions[t] for t in rounds}

    def add(self, round: int, decision: Decision, *, limit_bytes: int) -> None:
        """Keep a decision, and drop the oldest ones above a limit for all of them together.

        A node that lacks more bytes of decisions than the model has is sent the model instead.
        """
        self.decisions[round] = decision
        total = sum(len(kept.message) for kept in self.decisions.values())
        while total > limit_bytes:
            oldest = min(self.decisions)
            dropped = self.decisions.pop(oldest)
            total -= len(dropped.message)
