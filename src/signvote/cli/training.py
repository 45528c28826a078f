"""The commands that train and show: `train`, `compare`, `study`, `report`."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from tyro.conf import Positional

from signvote.cli.flags import settings_of, with_settings
from signvote.cli.showing import progress_bars, run_all, show
from signvote.errors import ConfigError

if TYPE_CHECKING:
    from signvote.sim import Config, TensorBoard
    from signvote.sim.machine import Machine

TASK = "mnist-10k"  # bundled
Out = Annotated[Path, tyro.conf.arg(metavar="DIR")]
DataDir = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]


@dataclass(frozen=True, kw_only=True)
class Where:
    """The device, the data and the trackers: flags that `train`, `compare` and `study` share."""

    device: str = "cpu"
    """Where to compute: cpu, cuda, or one of several GPUs as cuda:1."""
    precision: Literal["float32", "tf32", "bf16"] = "tf32"
    """Precision of products on a GPU, recorded in the results. float32 is exact and slowest; a CPU always uses it."""
    data_dir: DataDir = None
    """Where the data files are; default: $SIGNVOTE_DATA, then ~/.cache/signvote."""
    together: tyro.conf.FlagCreatePairsOff[bool] = False
    """Compute the gradients of all workers in one pass on a CPU too, where the model allows it. A GPU always does."""
    tensorboard: bool = False
    """Also write TensorBoard files into the folder of each run: scalars, and histograms of trust."""

    def trackers(self) -> list[type[TensorBoard]]:
        """Constructors of the trackers, each called with the folder of a run. A missing package is reported at once."""
        from signvote.sim import TensorBoard

        return [TensorBoard.checked()] if self.tensorboard else []

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
        )


@dataclass(frozen=True, kw_only=True)
@with_settings(task=TASK, rule="weighted")
class Train(Where):
    """Train once, with any rule, task, workers and attack.

    Writes results.json and .csv, report.html, figure.png and a checkpoint into --out. Ctrl-C stops after the
    current round; --resume continues bit for bit.

    signvote train --rule robust --batch-sizes 4 4 4 64 256 --attack sleeper:1:100 --out runs/sleeper
    """

    out: Out = Path("runs/train")
    """Folder for the results."""
    resume: bool = False
    """Continue from the checkpoint in --out."""

    def run(self) -> None:
        """Run the command."""
        from signvote.results import results_of
        from signvote.sim import Config, Run, train
        from signvote.sim.trained import check_folder
        from signvote.tasks import load_task

        config = Config(**settings_of(self))
        check_folder(self.out, resume=self.resume)
        machine = self.machine()
        trackers = [tracker(self.out) for tracker in self.trackers()]
        task = load_task(config.task, self.data_dir, config.model, config.task_options)
        with progress_bars() as progress:
            bar = progress.add_task(config.rule, total=config.rounds, reading="")

            def watch(run: Run) -> None:
                progress.update(bar, completed=run.round, reading=run.reading())

            result = train(
                config, task, self.out, resume=self.resume, watch=watch, machine=machine, trackers=trackers
            )
        show(results_of([result], _command()), self.out)
        if result["status"] == "interrupted":
            Console().print(f"Stopped after round {result['rounds_done']}; continue with --resume.")


@dataclass(frozen=True, kw_only=True)
@with_settings("rule", "mode", "seed", "options", task=TASK)
class Compare(Where):
    """Draw the paper's figure: train every rule in every batch mode with every seed.

    Writes results.json, .csv and .md, figure.png, figure.svg and report.html into --out. Finished
    runs are skipped. To resume after Ctrl-C, run the same command again.

    signvote compare --task mnist --rules majority weighted robust --modes 1 2 3 4 --seeds 0 1 2
    """

    rules: tuple[str, ...] = ("majority", "it-signsgd", "weighted")
    """Rules to compare; see train --rule."""
    modes: tuple[int, ...] = (1, 4)
    """Batch modes of the paper."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of each combination of rule and mode, one run per seed."""
    out: Out = Path("runs/compare")
    """Folder for the results."""
    jobs: int | None = None
    """Number of runs at a time; default: one per core, on a GPU one."""

    def run(self) -> None:
        """Run the command."""
        from signvote.sim import Config
        from signvote.sim.compare import name_of

        shared = settings_of(self)
        modes = (None,) if shared["batch_sizes"] else self.modes
        if not (self.rules and self.seeds and modes):
            raise ConfigError("nothing to compare: give at least one rule, one mode and one seed")
        each = product(modes, self.seeds, self.rules)
        configs = [Config(**shared, mode=mode, seed=seed, rule=rule) for mode, seed, rule in each]
        self.run_all({name_of(config): config for config in configs}, self.out, _command(), self.jobs)


@dataclass(frozen=True, kw_only=True)
class Study(Where):
    """Run all configurations that a TOML file lists: one command reproduces a published result.

    Writes the same files as `compare` into --out. A run whose result is in results.json or results.json.gz is not run
    again, here or on another machine. Other --seeds add to them.

    signvote study paper/fig1-mnist.toml --device cuda --seeds 3 4
    """

    file: Positional[Path]
    """The study, such as paper/fig1-mnist.toml; docs/simulate.md describes the format."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder for the results; default: the path of the file without .toml."""
    seeds: tuple[int, ...] = ()
    """Seeds to use instead of the file's."""
    only: str | None = None
    """Only the runs with this text in their name, such as weighted or mode4."""
    jobs: int | None = None
    """Number of runs at a time; default: one per core, on a GPU one."""

    def run(self) -> None:
        """Run the command."""
        from signvote.sim.study import read_study

        every = read_study(self.file, self.seeds)
        runs = {name: config for name, config in every.items() if (self.only or "") in name}
        if not runs:
            raise ConfigError(f"no run has {self.only!r} in its name; a name is {next(iter(every))!r}")
        self.run_all(runs, self.out or self.file.with_suffix(""), self._command(), self.jobs)

    def _command(self) -> str:
        """The command that repeats it on another machine: without the folders of this one."""
        seeds = ["--seeds", *map(str, self.seeds)] if self.seeds else []
        only = ["--only", self.only] if self.only else []
        where = [] if self.device == "cpu" else ["--device", self.device, "--precision", self.precision]
        together = ["--together"] if self.together else []
        return shlex.join(["signvote", "study", str(self.file), *seeds, *only, *where, *together])


@dataclass(frozen=True, kw_only=True)
class Report:
    """Merge the runs of several folders into one page, figure and table, and compare them.

    A run that is in several folders counts once. If folders have different results of one configuration, the
    report shows both, with the name of the folder. Writes the same files as `compare`.

    signvote report runs/mine runs/theirs --baseline weighted
    """

    folders: Positional[tuple[Path, ...]]
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
