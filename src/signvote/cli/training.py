"""The commands that train and show: `train`, `compare`, `study`, `report`."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional

from signvote.cli.flags import settings_of, title, unset, with_settings
from signvote.cli.progress import progress_of
from signvote.cli.showing import run_all, served, show
from signvote.cli.stopping import Stopped
from signvote.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from signvote.sim import Config, Run, Tracker
    from signvote.sim.machine import Machine

TASK = "mnist-10k"  # bundled
Out = Annotated[Path, tyro.conf.arg(metavar="DIR")]
DataDir = Annotated[
    Path | None, tyro.conf.arg(metavar="DIR"), unset("$SIGNVOTE_DATA, then ~/.cache/signvote")
]
Off = Annotated[bool, unset("no")]
Jobs = Annotated[int | None, unset("one per core, on a GPU one")]


@dataclass(frozen=True, kw_only=True)
@with_settings("what", task=TASK)
class What:
    """What to train."""


@dataclass(frozen=True, kw_only=True)
@with_settings("who")
class Who:
    """Who takes part: the workers, their batches and data, and who is absent or hostile."""


@dataclass(frozen=True, kw_only=True)
@with_settings("how")
class How:
    """How votes are weighed, and how the model steps by the decision."""


@dataclass(frozen=True, kw_only=True)
@with_settings("what", "seed", task=TASK)
class Whats:
    """What to train."""

    seeds: tuple[int, ...] = (0,)
    """Seeds of each combination of rule and mode, one run per seed."""


@dataclass(frozen=True, kw_only=True)
@with_settings("who", "mode")
class Whos:
    """Who takes part: the workers, their batches and data, and who is absent or hostile."""

    modes: tuple[int, ...] = (1, 4)
    """Batch modes of the paper: 1 (equal batches) to 4 (one worker has nearly all samples)."""


@dataclass(frozen=True, kw_only=True)
@with_settings("how", "rule", "options")
class Hows:
    """How votes are weighed, and how the model steps by the decision."""

    rules: tuple[str, ...] = ("majority", "it-signsgd", "weighted")
    """Rules to compare, which `signvote rules` explains, or yardsticks (oracle, sgd, median, adamw)."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where to compute, and what to write."""

    device: str = "cpu"
    """Where to compute: cpu, cuda, or one of several GPUs as cuda:1."""
    precision: Literal["float32", "tf32", "bf16"] = "tf32"
    """Precision of products on a GPU, recorded in the results. float32 is exact and slowest; a CPU always uses it."""
    data_dir: DataDir = None
    """Where the data files are."""
    together: Off = False
    """Compute the gradients of all workers in one pass on a CPU too, where the model allows it. A GPU always does."""
    tensorboard: Off = False
    """Also write TensorBoard files into the folder of each run: scalars, and histograms of trust."""

    live: Off = False
    """Serve the page on this machine while runs train, and update it at each evaluation. See also `signvote watch`."""

    wandb: Off = False
    """Also log to Weights & Biases. Its environment variables configure it."""
    mlflow: Off = False
    """Also log to MLflow, at MLFLOW_TRACKING_URI."""

    def trackers(self) -> list[Callable[[Path], Tracker]]:
        """Constructors of the trackers, each called with the folder of a run. A missing package is reported at once."""
        from signvote.sim.trackers import TRACKERS

        return [kind.checked() for name, kind in TRACKERS.items() if getattr(self, name)]

    def machine(self) -> Machine:
        """The device to compute on. A missing device is reported at once."""
        from signvote.sim.machine import Machine

        together = True if self.together else None  # None: on a GPU
        return Machine(device=self.device, precision=self.precision, together=together)

    def run_all(self, runs: dict[str, Config], out: Path, command: str, jobs: int | None) -> None:
        """Run the configurations that are not finished, then show the results of all."""
        run_all(
            runs,
            out,
            command=command,
            jobs=jobs,
            machine=self.machine(),
            data_dir=self.data_dir,
            trackers=self.trackers(),
            live=self.live,
        )


@dataclass(frozen=True, kw_only=True)
@with_settings("where")
class TrainPlace(Place):
    """Where to compute, and what to measure and write."""

    out: Out = Path("runs/train")
    """Folder for the results."""
    resume: Off = False
    """Continue from the checkpoint in --out; begin if there is none. With a constant step, --rounds may be larger."""


@dataclass(frozen=True, kw_only=True)
@with_settings("where")
class ComparePlace(Place):
    """Where to compute, and what to measure and write."""

    out: Out = Path("runs/compare")
    """Folder for the results."""
    jobs: Jobs = None
    """Number of runs at a time."""


@dataclass(frozen=True, kw_only=True)
class StudyPlace(Place):
    """Where to compute, and what to write."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR"), unset("the path of the file without .toml")] = (
        None
    )
    """Folder for the results."""
    jobs: Jobs = None
    """Number of runs at a time."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train once, with any rule, task, workers and attack.

    Writes results.json and .csv, report.html, figure.png and a checkpoint into --out. Ctrl-C stops after the
    current round; --resume continues bit for bit.

    signvote train --rule robust --batch-sizes 4 4 4 64 256 --attack sleeper:1:100 --out runs/sleeper
    """

    what: Annotated[What, title("task")]
    who: Annotated[Who, title("worker")]
    how: Annotated[How, title("vote")]
    where: Annotated[TrainPlace, title("run")]

    def run(self) -> None:
        """Run the command."""
        from signvote.results import results_of
        from signvote.sim import Config, train
        from signvote.sim.trained import check_folder
        from signvote.tasks import load_task

        config = Config(**settings_of(self))
        out = self.where.out
        check_folder(out, resume=self.where.resume)
        machine = self.where.machine()
        trackers = [tracker(out) for tracker in self.where.trackers()]
        task = load_task(config.task, self.where.data_dir, config.model, config.task_options)
        with served(out, self.where.live), progress_of({config.rule: config.rounds}) as progress:

            def watch(run: Run) -> None:
                progress.show(0, run.round, run.reading())

            result = train(
                config, task, out, resume=self.where.resume, watch=watch, machine=machine, trackers=trackers
            )
        show(results_of([result], _command()), out)
        if result["status"] != "done":
            raise Stopped(f"Stopped after round {result['rounds_done']} of {config.rounds}.")


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Draw the paper's figure: train every rule in every batch mode with every seed.

    Writes results.json, .csv and .md, figure.png, figure.svg and report.html into --out. Finished
    runs are skipped. To resume after Ctrl-C, run the same command again.

    signvote compare --task mnist --rules majority weighted robust --modes 1 2 3 4 --seeds 0 1 2
    """

    what: Annotated[Whats, title("task")]
    who: Annotated[Whos, title("worker")]
    how: Annotated[Hows, title("vote")]
    where: Annotated[ComparePlace, title("run")]

    def run(self) -> None:
        """Run the command."""
        from signvote.sim import Config
        from signvote.sim.compare import name_of

        shared = settings_of(self)
        modes = (None,) if shared["batch_sizes"] else self.who.modes
        if not (self.how.rules and self.what.seeds and modes):
            raise ConfigError("nothing to compare: give at least one rule, one mode and one seed")
        each = product(modes, self.what.seeds, self.how.rules)
        configs = [Config(**shared, mode=mode, seed=seed, rule=rule) for mode, seed, rule in each]
        runs = {name_of(config): config for config in configs}
        self.where.run_all(runs, self.where.out, _command(), self.where.jobs)


@dataclass(frozen=True, kw_only=True)
class Study:
    """Run all configurations that a TOML file lists: one command reproduces a published result.

    Writes the same files as `compare` into --out. A run whose result is in results.json or results.json.gz is not run
    again, here or on another machine. Other --seeds add to them.

    signvote study paper/fig1-mnist.toml --device cuda --seeds 3 4
    """

    file: Positional[Path]
    """The study, such as paper/fig1-mnist.toml; docs/simulate.md describes the format."""
    seeds: Annotated[tuple[int, ...], unset("those of the file")] = ()
    """Seeds to use instead of the file's."""
    only: Annotated[str | None, unset("all runs")] = None
    """Only the runs with this text in their name, such as weighted or mode4."""
    where: Annotated[StudyPlace, title("run")]

    def run(self) -> None:
        """Run the command."""
        from signvote.sim.study import read_study

        every = read_study(self.file, self.seeds)
        runs = {name: config for name, config in every.items() if (self.only or "") in name}
        if not runs:
            raise ConfigError(f"no run has {self.only!r} in its name; a name is {next(iter(every))!r}")
        out = self.where.out or self.file.with_suffix("")
        self.where.run_all(runs, out, self._command(), self.where.jobs)

    def _command(self) -> str:
        """The command that repeats it on another machine: without the folders of this one."""
        seeds = ["--seeds", *map(str, self.seeds)] if self.seeds else []
        only = ["--only", self.only] if self.only else []
        place = self.where
        where = [] if place.device == "cpu" else ["--device", place.device, "--precision", place.precision]
        together = ["--together"] if place.together else []
        return shlex.join(["signvote", "study", str(self.file), *seeds, *only, *where, *together])


@dataclass(frozen=True, kw_only=True)
class Report:
    """Merge the runs of several folders into one page, figure and table, and compare them.

    A run that is in several folders counts once. If folders have different results of one configuration, the
    report shows both, with the name of the folder. Writes the same files as `compare`.

    signvote report runs/mine runs/theirs --baseline weighted
    """

    folders: Annotated[Positional[tuple[Path, ...]], tyro.conf.arg(help_behavior_hint="(at least one)")]
    """Folders that `train`, `compare` or `study` wrote, or results.json files, plain or compressed."""
    out: Out = Path("runs/report")
    """Folder for the page."""
    baseline: str = "majority"
    """Rule to compare the others with: their leads are in points, or in the unit of the metric, paired by seed."""

    def run(self) -> None:
        """Run the command."""
        from signvote.names import check_name
        from signvote.results import merged, read

        if not self.folders:
            raise ConfigError("nothing to report: give the folders of some runs, such as runs/compare")
        results = merged({str(folder): read(_results_in(folder)) for folder in self.folders})
        if self.baseline != "majority":
            check_name("rule", self.baseline, dict.fromkeys(run["config"]["rule"] for run in results["runs"]))
        self.out.mkdir(parents=True, exist_ok=True)
        try:
            show(results, self.out, self.baseline)
        except ConfigError as error:
            raise ConfigError(f"{', '.join(map(str, self.folders))}: {error}") from None


def _results_in(folder: Path) -> Path:
    """The results file of a folder, or the file itself."""
    from signvote.results import results_file

    for path in (folder, results_file(folder), folder / "result.json"):
        if path.is_file():
            return path
    raise ConfigError(
        f"{folder} holds no results.json or result.json; give a folder that train, compare or study wrote"
    )


def _command() -> str:
    return shlex.join(["signvote", *sys.argv[1:]])
