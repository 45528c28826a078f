"""Trackers receive the measurements of a run while it trains. trackers.py has three; your own needs three methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from signvote.sim.run import Run


class Tracker(Protocol):
    """Receives plain values. `train(..., trackers=[...])` calls the methods in this order.

    >>> class Printer:
    ...     def start(self, config, round):
    ...         print(config["rule"], "from round", round + 1)
    ...     def log(self, round, scalars, trust):
    ...         print(round, scalars["accuracy"])
    ...     def finish(self, result):
    ...         print(result["status"])
    >>> tracker: Tracker = Printer()

    """

    def start(self, config: dict[str, Any], round: int) -> None:
        """Called before the first round and when a run resumes.

        Args:
            config: the configuration of the run.
            round: rounds done.

        """

    def log(
        self,
        round: int,
        scalars: dict[str, float],
        trust: dict[str, list[float]],
    ) -> None:
        """Called after every evaluation.

        Args:
            round: rounds done.
            scalars: the metrics of the task, such as accuracy and loss; voters of the round; bytes_up, bytes_down and
                seconds since the start.
            trust: a number per worker, NaN if unknown. "weight": in the next vote. "overruled": the share of the
                worker's votes that this round's decision overruled. Empty if no rule made a decision.

        """

    def finish(self, result: dict[str, Any]) -> None:
        """Called at the end and after Ctrl-C, with the content of result.json."""


class Telling:
    """Passes new entries of a run's history to trackers."""

    def __init__(self, run: Run, trackers: Sequence[Tracker]) -> None:
        self.run = run
        self.trackers = trackers
        for tracker in trackers:
            tracker.start(run.config.as_dict(), run.round)
        self.told = len(run.history["evaluations"]["round"])

    def tell(self) -> bool:
        """Pass on all evaluations since the last call; False if there are none. Round 0 is evaluated in the first."""
        rounds = self.run.history["evaluations"]["round"]
        is_new = self.told < len(rounds)
        for i in range(self.told, len(rounds)):
            round = rounds[i]
            for tracker in self.trackers:
                tracker.log(round, self._scalars(i), self._trust(round))
        self.told = len(rounds)
        return is_new

    def finish(self, result: dict[str, Any]) -> None:
        """Pass on the result of the run."""
        for tracker in self.trackers:
            tracker.finish(result)

    def _scalars(self, i: int) -> dict[str, float]:
        self.run.settle()
        history = self.run.history
        evaluations = history["evaluations"]
        round = evaluations["round"][i]
        scalars = {
            **{name: values[i] for name, values in evaluations.items() if name != "round"},
            "bytes_up": sum(history["bytes_up"][:round]),
            "bytes_down": sum(history["bytes_down"][:round]),
            "seconds": 0.0,
        }
        if round:
            scalars["voters"] = history["voters"][round - 1]
            scalars["seconds"] = self.run.seconds["total"]
        return scalars

    def _trust(self, round: int) -> dict[str, list[float]]:
        trust = self.run.history["trust"]
        if round not in trust["round"]:
            return {}
        i = trust["round"].index(round)
        return {
            "weight": _with_nan(trust["weight"][i]),
            "overruled": _with_nan(trust["overruled"][i]),
        }


def _with_nan(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
