"""The server's messages of one round to its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from signvote.engines.flower.progress import Progress
from signvote.engines.flower.records import CONFIG, DECISIONS, INSTRUCTION, MODEL, to_array


class Update(NamedTuple):
    """What brings a node's model up to date. Nodes that lack the same share one, so that it is hashed once."""

    records: dict[str, ArrayRecord]
    decided: list[int]  # rounds
    steps: list[float]


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Makes the messages of a round."""

    progress: Progress
    round: int  # the last one decided
    model: ArrayRecord  # after that round
    config: ConfigRecord  # the user's own settings
    settings: Mapping[str, Any]  # the same for all nodes
    ttl: float | None  # seconds
    _updates: dict[int | None, Update] = field(default_factory=dict)

    def to(self, node: int, kind: str) -> Message:
        """A message to a node: its worker number, the settings, and what its model lacks."""
        update = self._update(self.progress.applied(node, self.round))
        content = RecordDict()
        for name, record in update.records.items():
            content[name] = record
        instruction = {
            **self.settings,
            "round": self.round + 1,
            "worker": self.progress.worker(node),
            "model_round": self.round,
            "decided": update.decided,
            "steps": update.steps,
        }
        content[INSTRUCTION] = ConfigRecord(instruction)
        content[CONFIG] = self.config
        return Message(content, node, kind, group_id=str(self.round + 1), ttl=self.ttl)

    def _update(self, applied: int | None) -> Update:
        if applied not in self._updates:
            self._updates[applied] = self._made(applied)
        return self._updates[applied]

    def _made(self, applied: int | None) -> Update:
        """For nodes whose model contains the rounds up to this one; None: they need the model."""
        if applied is None:
            return Update({MODEL: self.model}, [], [])
        lacking = self.progress.after(applied)
        packed = {str(t): to_array(decision.message) for t, decision in lacking.items()}
        records = {DECISIONS: ArrayRecord(packed)} if packed else {}
        return Update(records, list(lacking), [decision.step for decision in lacking.values()])
