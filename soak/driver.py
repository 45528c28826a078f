"""Plays scenarios in turn. Each has its share of the time, and a seed decides everything that is random."""

from __future__ import annotations

import random
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class Skipped(Exception):
    """Why this machine cannot play a scenario."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What an episode is given."""

    chance: random.Random  # the only source of randomness: the same seed injects the same faults
    folder: Path  # empty, and removed afterwards
    seconds: float  # an episode that can choose its length takes about so long


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What happened in one episode."""

    injected: int  # faults
    survived: int  # faults after which the result was right, bit for bit, or the documented error came
    lost: int | None = None  # rounds that were computed again
    rounds: int = 0  # of a long run
    slope: float | None = None  # of a long run: KiB of memory for each 1,000 rounds


@dataclass(frozen=True)
class Scenario:
    """One kind of fault in one engine."""

    name: str
    engine: str
    fault: str
    share: int  # of the time, relative to the other scenarios
    play: Callable[[Stage], Episode]


@dataclass(kw_only=True)
class Outcome:
    """All episodes of a scenario."""

    scenario: Scenario
    episodes: list[Episode] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # commands that repeat an episode that failed
    skipped: str = ""  # why

    @property
    def injected(self) -> int:
        """Faults."""
        return sum(episode.injected for episode in self.episodes)

    @property
    def survived(self) -> int:
        """Faults after which everything was as it should be."""
        return sum(episode.survived for episode in self.episodes)

    @property
    def lost(self) -> int | None:
        """Rounds that were computed again; None: the scenario does not count them."""
        counted = [episode.lost for episode in self.episodes if episode.lost is not None]
        return sum(counted) if counted else None

    @property
    def rounds(self) -> int:
        """Rounds of the long runs."""
        return sum(episode.rounds for episode in self.episodes)

    @property
    def slope(self) -> float | None:
        """The steepest growth of memory, in KiB for each 1,000 rounds."""
        slopes = [episode.slope for episode in self.episodes if episode.slope is not None]
        return max(slopes, default=None)

    @property
    def is_good(self) -> bool:
        """Whether every fault was survived."""
        return self.injected == self.survived


def play_all(scenarios: Sequence[Scenario], *, seed: int, seconds: float) -> list[Outcome]:
    """Play scenarios in turn. Time that one leaves goes to those after it."""
    end = time.monotonic() + seconds
    outcomes = []
    for i, scenario in enumerate(scenarios):
        shares = sum(each.share for each in scenarios[i:])
        left = max(0.0, end - time.monotonic())
        outcome = play_for(scenario, seed=seed, seconds=left * scenario.share / shares)
        outcomes.append(outcome)
    return outcomes


def play_for(scenario: Scenario, *, seed: int, seconds: float) -> Outcome:
    """Play episodes as long as another one fits into the time; at least one."""
    outcome = Outcome(scenario=scenario)
    start = time.monotonic()
    end = start + seconds
    longest = 0.0
    number = 0
    while number == 0 or time.monotonic() + longest <= end:
        began = time.monotonic()
        play_once(outcome, seed=seed, number=number, seconds=seconds)
        longest = max(longest, time.monotonic() - began)
        number += 1
        if outcome.skipped:
            break
    print(f"{told(outcome)}  ({number} episodes, {time.monotonic() - start:.0f} s)", flush=True)
    return outcome


def play_once(outcome: Outcome, *, seed: int, number: int, seconds: float) -> None:
    """Play one episode and note how it went. One that fails prints the command that repeats it."""
    scenario = outcome.scenario
    chance = random.Random(f"{seed}/{scenario.name}/{number}")
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        stage = Stage(chance=chance, folder=Path(folder), seconds=seconds)
        try:
            episode = scenario.play(stage)
        except Skipped as error:
            outcome.skipped = str(error)
            return
        except Exception:
            print(traceback.format_exc(), flush=True)
            episode = Episode(injected=1, survived=0)
    outcome.episodes.append(episode)
    if episode.survived < episode.injected:
        minutes = seconds / 60
        command = (
            f"python -m soak --only {scenario.name} --seed {seed} --episode {number} --minutes {minutes:.1f}"
        )
        outcome.failures.append(command)
        print(f"FAILED. To repeat it: {command}", flush=True)


def told(outcome: Outcome) -> str:
    """An outcome in one line."""
    name = outcome.scenario.name
    if outcome.skipped:
        return f"{name}: skipped, {outcome.skipped}"
    memory = "" if outcome.slope is None else f", {outcome.slope:+.0f} KiB for each 1,000 rounds"
    return f"{name}: {outcome.survived} of {outcome.injected} faults survived{memory}"
