"""What the nodes that were asked answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from flwr.app import Message, RecordDict

from signvote.engines.flower.logs import Lines
from signvote.engines.flower.progress import Progress
from signvote.engines.flower.records import applied_in

WITHOUT = "ask for the whole model"


class Answers:
    """The answers to the messages of a round.

    Args:
        progress: is told which round each node's model contains.
        asked: node ids.
        last_round: the last one decided.

    """

    def __init__(self, progress: Progress, asked: Sequence[int], last_round: int) -> None:
        self._progress = progress
        self._awaited = set(asked)
        self._last_round = last_round

    def read(self, replies: Iterable[Message], round: int) -> Iterator[tuple[int, RecordDict]]:
        """(worker, content) of each node that answers, once."""
        lines = Lines(round)
        for reply in replies:
            node = reply.metadata.src_node_id
            if node not in self._awaited:
                continue  # the SuperLink reports a message that was not answered in time
            if reply.has_error():
                lines.add("answer with an error", "error from node %d: %s", node, reply.error.reason)
                continue
            self._awaited.remove(node)
            applied = applied_in(reply.content)
            if 0 <= applied <= self._last_round:
                self._progress.set_applied(node, applied)
            else:
                lines.add(WITHOUT, "node %d asks for the whole model", node, level=logging.INFO)
                self._progress.forget_applied(node)
            yield self._progress.worker(node), reply.content
        lines.close()

    @property
    def silent(self) -> list[int]:
        """The workers that have not answered."""
        return sorted(self._progress.worker(node) for node in self._awaited)
