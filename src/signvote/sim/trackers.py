"""Trackers for TensorBoard, Weights & Biases and MLflow. Each needs its package, which an extra installs."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from signvote.errors import ConfigError

PROJECT = "signvote"  # of Weights & Biases and of MLflow


class FolderTracker(ABC):
    """A tracker of a run in a folder. A run that resumes there is the same run for the tracker.

    Args:
        folder: folder of the run.

    """

    package: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, folder: Path | str) -> None:
        self.checked()
        self.folder = Path(folder)

    @classmethod
    def checked(cls) -> type[FolderTracker]:
        """This class, or an error if its package is not installed."""
        if find_spec(cls.package) is None:
            raise ConfigError(f"{cls.title} is not installed: pip install 'signvote[{cls.package}]'")
        return cls

    @abstractmethod
    def start(self, config: dict[str, Any], round: int) -> None:
        """See Tracker."""

    @abstractmethod
    def log(self, round: int, scalars: dict[str, float], trust: dict[str, list[float]]) -> None:
        """See Tracker."""

    @abstractmethod
    def finish(self, result: dict[str, Any]) -> None:
        """See Tracker."""

    def _earlier(self, round: int) -> str | None:
        """The name that the tracker gave to a run that resumes; None for a new run."""
        path = self._path()
        return path.read_text("utf-8") if round and path.exists() else None

    def _remember(self, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path().write_text(name, "utf-8")

    def _path(self) -> Path:
        return self.folder / f"{self.package}-run.txt"


class TensorBoard(FolderTracker):
    """Writes event files: scalars, and the trust in workers as histograms.

    Args:
        folder: folder of the run. `tensorboard --logdir` of it, or of a folder above it, shows the files.

    """

    package = "tensorboard"
    title = "TensorBoard"

    def start(self, config: dict[str, Any], round: int) -> None:
        """See Tracker. Entries of rounds that a resumed run repeats are not shown."""
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        repeated = round + 1 if round else None
        self.writer: Any = SummaryWriter(str(self.folder), purge_step=repeated)
        lines = [f"    {key}: {value}" for key, value in config.items()]
        self.writer.add_text("config", "\n".join(lines))

    def log(self, round: int, scalars: dict[str, float], trust: dict[str, list[float]]) -> None:
        """See Tracker."""
        for name, value in (scalars | by_worker(trust)).items():
            self.writer.add_scalar(name, value, round)
        for name, values in trust.items():
            known = [value for value in values if math.isfinite(value)]
            if known:
                self.writer.add_histogram(f"trust/{name}", np.array(known), round)

    def finish(self, result: dict[str, Any]) -> None:
        """See Tracker."""
        self.writer.close()


class WandB(FolderTracker):
    """Logs to Weights & Biases, project `signvote`. Its own environment variables say where: WANDB_MODE=offline, ...

    Args:
        folder: folder of the run; its name is that of the run.

    """

    package = "wandb"
    title = "Weights & Biases"

    def start(self, config: dict[str, Any], round: int) -> None:
        """See Tracker."""
        import wandb

        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=self.folder.name,
            dir=str(self.folder),
            config=config,
            id=self._earlier(round),
            resume="allow",
        )
        self._remember(self.run.id)

    def log(self, round: int, scalars: dict[str, float], trust: dict[str, list[float]]) -> None:
        """See Tracker."""
        self.run.log(scalars | by_worker(trust), step=round)

    def finish(self, result: dict[str, Any]) -> None:
        """See Tracker."""
        self.run.finish(exit_code=0 if result["status"] == "done" else 1)


class MLflow(FolderTracker):
    """Logs to MLflow, experiment `signvote`. MLFLOW_TRACKING_URI says where.

    Args:
        folder: folder of the run; its name is that of the run.

    """

    package = "mlflow"
    title = "MLflow"

    def start(self, config: dict[str, Any], round: int) -> None:
        """See Tracker."""
        from mlflow import MlflowClient

        self.client: Any = MlflowClient()
        earlier = self._earlier(round)
        if earlier is not None:
            self.run: str = earlier
            self.client.update_run(self.run, status="RUNNING")
            return
        self.run = self.client.create_run(self._experiment(), run_name=self.folder.name).info.run_id
        self._remember(self.run)
        for name, value in config.items():
            self.client.log_param(self.run, name, value)

    def log(self, round: int, scalars: dict[str, float], trust: dict[str, list[float]]) -> None:
        """See Tracker."""
        for name, value in (scalars | by_worker(trust)).items():
            self.client.log_metric(self.run, name, value, step=round)

    def finish(self, result: dict[str, Any]) -> None:
        """See Tracker."""
        self.client.set_terminated(self.run, "FINISHED" if result["status"] == "done" else "KILLED")

    def _experiment(self) -> str:
        """The id of the experiment. Another process may make it at the same time."""
        from mlflow.exceptions import MlflowException

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self.client.create_experiment(name))
            except MlflowException:
                found = self.client.get_experiment_by_name(name)
        return str(found.experiment_id)


def by_worker(trust: dict[str, list[float]]) -> dict[str, float]:
    """The known numbers of trust, each with a name of its own.

    >>> by_worker({"weight": [0.5, math.nan]})
    {'weight/worker 0': 0.5}
    """
    return {
        f"{name}/worker {worker}": value
        for name, values in trust.items()
        for worker, value in enumerate(values)
        if math.isfinite(value)
    }


TRACKERS: dict[str, type[FolderTracker]] = {kind.package: kind for kind in (TensorBoard, WandB, MLflow)}
