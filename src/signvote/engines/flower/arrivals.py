"""Flower's grid as a stream: messages leave and replies arrive some at a time.

`Grid.send_and_receive` returns a list of all replies when the last one is there. A round of votes has no use for the
list: a ballot is counted as it arrives, and the rest of its message is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

T = TypeVar("T")

AT_A_TIME = 500  # messages that are sent, or asked for, in one request to the SuperLink
SHORTEST, LONGEST = 0.1, 3.0  # seconds between two looks for replies; the longest is Flower's own


class Arrivals:
    """A grid whose `send_and_receive` yields each reply as it arrives. Everything else is the grid's own."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,
    ) -> Iterator[Message]:
        """Send messages, and yield replies until all are there or the time is up."""
        start = time.monotonic()
        waiting: dict[str, None] = {}  # ids of messages without a reply
        for some in _slices(messages):
            sent = self._grid.push_messages(some)
            waiting |= dict.fromkeys(name for name in sent if name)  # one that cannot be sent has none
        while waiting:
            for names in _slices(list(waiting)):
                for reply in self._pulled(names):
                    waiting.pop(reply.metadata.reply_to_message_id, None)
                    yield reply
            waited = time.monotonic() - start
            if timeout is not None and waited >= timeout:
                return
            if waiting:
                time.sleep(min(LONGEST, max(SHORTEST, waited / 20)))

    def _pulled(self, names: Iterable[str]) -> Iterator[Message]:
        """The replies that are there, each of which is dropped when the next one is asked for."""
        replies = list(self._grid.pull_messages(set(names)))[::-1]
        while replies:
            yield replies.pop()


def _slices(things: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(things)
    while some := list(islice(rest, AT_A_TIME)):
        yield some
