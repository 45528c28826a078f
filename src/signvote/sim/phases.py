"""The time of a run, by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("gradients", "encode", "server", "apply", "evaluate", "total")  # on a GPU: to launch them


class Phases:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Forget what the block takes."""
        before = dict(self.seconds)
        yield
        self.seconds.update(before)

    @contextmanager
    def twice(self) -> Iterator[None]:
        """Count what the block takes for another one that was not timed, too."""
        before = dict(self.seconds)
        yield
        for phase, seconds in before.items():
            self.seconds[phase] += self.seconds[phase] - seconds

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start
