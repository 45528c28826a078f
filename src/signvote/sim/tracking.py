"""Trackers receive the measurements of a run while it trains. TensorBoard is one; your own needs three methods."""

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


class TensorBoard:
    """Writes event files: scalars, and the trust in workers as histograms.

    Args:
        folder: folder of the run. `tensorboard --logdir` of it, or of a folder above it, shows the files.

    """

    def __init__(self, folder: Path | str) -> None:
        self.checked()
        self.folder = Path(folder)
        self.writer: Any = None  # torch's SummaryWriter, between start and finish

    @classmethod
    def checked(cls) -> type[TensorBoard]:
        """This class, or an error if TensorBoard is not installed."""
        if find_spec("tensorboard") is None:
            raise ConfigError("TensorBoard is not installed: pip install 'signvote[tensorboard]'")
        return cls

    def start(self, config: dict[str, Any], round: int) -> None:
        """See Tracker. Entries of rounds that a resumed run repeats are not shown."""
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        repeated = round + 1 if round else None
        self.writer = SummaryWriter(str(self.folder), purge_step=repeated)
        lines = [f"    {key}: {value}" for key, value in config.items()]
        self.writer.add_text("config", "\n".join(lines))

    def log(
        self,
        round: int,
        scalars: dict[str, float],
        trust: dict[str, list[float]],
    ) -> None:
        """See Tracker."""
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, round)
        for name, values in trust.items():
            self._log_trust(round, name, values)

    def _log_trust(self, round: int, name: str, values: list[float]) -> None:
        known = []
        for worker, value in enumerate(values):
            if math.isfinite(value):
                known.append(value)
                self.writer.add_scalar(f"{name}/worker {worker}", value, round)
        if known:
            self.writer.add_histogram(f"trust/{name}", np.array(known), round)

    def finish(self, result: dict[str, Any]) -> None:
        """See Tracker."""
        self.writer.close()


class Telling:
    """Passes new entries of a run's history to trackers."""

    def __init__(self, run: Run, trackers: Sequence[Tracker]) -> None:
        self.run = run
        self.trackers = trackers
        for tracker in trackers:
            tracker.start(run.config.as_dict(), run.round)
        self.told = len(run.history["evaluations"]["round"])

    def tell(self) -> None:
        """Pass on all evaluations since the last call. The first round has two: round 0 is evaluated too."""
        rounds = self.run.history["evaluations"]["round"]
        for i in range(self.told, len(rounds)):
            round = rounds[i]
            for tracker in self.trackers:
                tracker.log(round, self._scalars(i), self._trust(round))
        self.told = len(rounds)

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
