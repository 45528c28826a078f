"""Trackers: whoever wants to hear of a run while it trains. TensorBoard is one; your own is three methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from signvote.errors import ConfigError
from signvote.sim.run import Run


class Tracker(Protocol):
    """Told of a run in plain values; `train(..., trackers=[...])` calls it in this order.

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
        """Before the first round, or when a run goes on: its configuration, and how many rounds are done."""

    def log(self, round: int, scalars: dict[str, float], trust: dict[str, list[float]]) -> None:
        """At every evaluation.

        Args:
            round: rounds done.
            scalars: accuracy, loss, voters of the round; bytes_up, bytes_down and seconds since the start.
            trust: a number per worker, NaN if it is not known: "weight" in the next vote, "crossover": the share
                of its votes that this round's decision overruled. Empty where nothing was decided by a rule.

        """

    def finish(self, result: dict[str, Any]) -> None:
        """At the end, or after Ctrl-C: what result.json holds."""


class TensorBoard:
    """Writes event files: scalars, and what is learnt about the workers as histograms.

    Args:
        folder: of the run; `tensorboard --logdir` of it, or of a folder above, shows them.

    """

    def __init__(self, folder: Path | str) -> None:
        self.checked()
        self.folder = Path(folder)
        self.writer: Any = None  # torch's SummaryWriter, between start and finish

    @classmethod
    def checked(cls) -> type[TensorBoard]:
        """The class; an error where TensorBoard is not installed."""
        if find_spec("tensorboard") is None:
            raise ConfigError("TensorBoard is not installed: pip install 'signvote[tensorboard]'")
        return cls

    def start(self, config: dict[str, Any], round: int) -> None:
        """See Tracker; what was written after the round from which a run goes on is not shown."""
        from torch.utils.tensorboard import SummaryWriter  # takes a second: only who writes waits for it

        self.writer = SummaryWriter(str(self.folder), purge_step=round + 1 if round else None)
        self.writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))

    def log(self, round: int, scalars: dict[str, float], trust: dict[str, list[float]]) -> None:
        """See Tracker."""
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, round)
        for name, values in trust.items():
            known = {worker: value for worker, value in enumerate(values) if math.isfinite(value)}
            if known:
                self.writer.add_histogram(f"trust/{name}", np.array(list(known.values())), round)
            for worker, value in known.items():
                self.writer.add_scalar(f"{name}/worker {worker}", value, round)

    def finish(self, result: dict[str, Any]) -> None:
        """See Tracker."""
        self.writer.close()


class Telling:
    """Tells trackers what is new in a run's history."""

    def __init__(self, run: Run, trackers: Sequence[Tracker]) -> None:
        self.run, self.trackers = run, trackers
        for tracker in trackers:
            tracker.start(run.config.as_dict(), run.round)
        self.told = len(run.history["evaluations"]["round"])

    def tell(self) -> None:
        """All evaluations since the last time: after the first round there are two, that of round 0 included."""
        measured = self.run.history["evaluations"]
        for i in range(self.told, len(measured["round"])):
            round, scalars = measured["round"][i], {name: measured[name][i] for name in ("accuracy", "loss")}
            for tracker in self.trackers:
                tracker.log(round, scalars | self._sums(round), self._trust(round))
        self.told = len(measured["round"])

    def finish(self, result: dict[str, Any]) -> None:
        """The run is over."""
        for tracker in self.trackers:
            tracker.finish(result)

    def _sums(self, round: int) -> dict[str, float]:
        self.run.settle()
        history, seconds = self.run.history, self.run.seconds["total"]
        sent = {name: sum(history[name][:round]) for name in ("bytes_up", "bytes_down")}
        voters = {"voters": history["voters"][round - 1]} if round else {}
        return {**voters, **sent, "seconds": seconds if round else 0.0}

    def _trust(self, round: int) -> dict[str, list[float]]:
        trust = self.run.history["trust"]
        if round not in trust["round"]:
            return {}
        i = trust["round"].index(round)
        return {
            name: [math.nan if value is None else value for value in trust[name][i]]
            for name in ("weight", "crossover")
        }
