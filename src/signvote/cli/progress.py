"""The progress of runs: bars in a terminal, and lines where there is none, such as in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 10  # of a run, at least
SECONDS_BETWEEN_LINES = 30.0  # at most


class Watching(Protocol):
    """Shows how far each run has come."""

    def show(self, number: int, round: int, reading: str) -> None:
        """The run of this number, from 0, has done a round; `reading` is its metric as text."""


@contextmanager
def progress_of(runs: Mapping[str, int]) -> Iterator[Watching]:
    """Bars or lines on standard error for runs, given as name -> rounds. The bars disappear at the end."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(runs, lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True))
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[reading]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, transient=True, console=console) as progress:
        yield Bars(runs, progress)


class Bars:
    """A bar for each run that has begun and has not ended, and one for several together."""

    def __init__(self, runs: Mapping[str, int], progress: Progress) -> None:
        self.progress = progress
        self.rounds = list(runs.values())
        self.done = [0] * len(runs)
        several = len(runs) > 1
        self.whole = progress.add_task("all runs", total=sum(self.rounds), reading="", visible=several)
        self.bars = [
            progress.add_task(name, total=rounds, reading="", visible=not several)
            for name, rounds in runs.items()
        ]

    def show(self, number: int, round: int, reading: str) -> None:
        """See Watching."""
        has_ended = round >= self.rounds[number]
        self.done[number] = round
        self.progress.update(self.bars[number], completed=round, reading=reading, visible=not has_ended)
        self.progress.update(self.whole, completed=sum(self.done))


class Lines:
    """A line whenever a tenth of a run is done, or 30 seconds have passed since its last line.

    Args:
        runs: name -> rounds.
        write: prints a line.
        clock: seconds.

    """

    def __init__(
        self,
        runs: Mapping[str, int],
        write: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.names = list(runs)
        self.rounds = list(runs.values())
        self.write = write
        self.clock = clock
        self.tenths = [0] * len(runs)  # of each run, at its last line
        self.times = [clock()] * len(runs)  # of its last line

    def show(self, number: int, round: int, reading: str) -> None:
        """See Watching."""
        rounds = self.rounds[number]
        tenths = LINES * round // rounds
        waited = self.clock() - self.times[number]
        if tenths == self.tenths[number] and waited < SECONDS_BETWEEN_LINES:
            return
        self.tenths[number] = tenths
        self.times[number] = self.clock()
        place = f"[{number + 1}/{len(self.names)}] " if len(self.names) > 1 else ""
        value = f", {reading}" if reading else ""
        self.write(f"{place}{self.names[number]}: {round} of {rounds} rounds{value}")
