"""What each node's model contains, and which decisions it lacks.

Workers are numbered in the order in which their nodes are first asked (within a round, by node id). The list of nodes
is part of the checkpoint: trust belongs to a node id, but ballots, coins and logs carry small numbers, the same as in
the simulator. A node that was not asked for long is forgotten; if it returns, it has another number. No number is used
twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from signvote.core.recent import Recent


class Decision(NamedTuple):
    """A decision as nodes apply it."""

    step: float
    message: bytes


class Progress:
    """The worker number of each node, the last round in its model, and the recent decisions.

    Args:
        limit: about how many nodes are known; those asked in this round always are.
        state: of `state_dict`: the same nodes have the same numbers. What their models contain is not known.

    """

    def __init__(self, limit: int, state: Mapping[str, Any] | None = None) -> None:
        self.limit = limit
        self.nodes: dict[int, int] = {}  # worker -> node id
        self.decisions: dict[int, Decision] = {}  # by round; older ones are dropped
        self._decision_bytes = 0
        self._workers: dict[int, int] = {}  # node id -> worker
        self._applied: dict[int, int] = {}  # node id -> last round in its model, as the node reports it
        self._recent = Recent(limit)
        self._next = 0  # number of the next worker
        if state is not None:
            self.nodes = dict(zip(state["workers"], state["nodes"], strict=True))
            self._workers = {node: worker for worker, node in self.nodes.items()}
            self._recent = Recent(limit, self.nodes)
            self._next = state["next_worker"]

    def register(self, nodes: Sequence[int]) -> list[int]:
        """Give each new node the next worker number. Returns the workers that are forgotten instead."""
        for node in nodes:
            if node not in self._workers:
                self._workers[node] = self._next
                self.nodes[self._next] = node
                self._next += 1
        gone = self._recent.see(self._workers[node] for node in nodes)
        for worker in gone:
            node = self.nodes.pop(worker)
            del self._workers[node]
            self.forget_applied(node)
        self._recent.forget(*gone)
        return gone

    def worker(self, node: int) -> int:
        """The worker number of a registered node."""
        return self._workers[node]

    def set_applied(self, node: int, round: int) -> None:
        """The node's model contains all decisions up to this round."""
        self._applied[node] = round

    def forget_applied(self, node: int) -> None:
        """The node needs the whole model."""
        self._applied.pop(node, None)

    def applied(self, node: int, last_round: int) -> int | None:
        """The last round in the node's model; None: it needs the whole model to get to `last_round`."""
        applied = self._applied.get(node)
        oldest = next(iter(self.decisions), last_round + 1)
        return None if applied is None or applied + 1 < oldest else applied

    def after(self, round: int) -> dict[int, Decision]:
        """The decisions that were made after a round."""
        return {t: decision for t, decision in self.decisions.items() if t > round}

    def add(self, round: int, decision: Decision, *, limit_bytes: int) -> None:
        """Keep a decision, and drop the oldest ones above a limit for all of them together.

        A node that lacks more bytes of decisions than the model has is sent the model instead.
        """
        self.decisions[round] = decision
        self._decision_bytes += len(decision.message)
        while self._decision_bytes > limit_bytes:
            oldest = next(iter(self.decisions))
            dropped = self.decisions.pop(oldest)
            self._decision_bytes -= len(dropped.message)

    def state_dict(self) -> dict[str, Any]:
        """The nodes, those asked last at the end."""
        workers = list(self._recent.workers)
        return {
            "workers": workers,
            "nodes": [self.nodes[worker] for worker in workers],
            "next_worker": self._next,
        }
