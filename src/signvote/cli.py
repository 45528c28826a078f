"""The command line: `signvote COMMAND`. Parses, shows progress, prints tables; the work is done elsewhere."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import Progress, TaskID
from tyro.conf import Positional, subcommand

from signvote import __version__
from signvote.errors import ConfigError, SignVoteError
from signvote.showing import progress_bars, run_all, show

if TYPE_CHECKING:
    from signvote.sim import Config
    from signvote.sim.machine import Machine

Out = Annotated[Path, tyro.conf.arg(metavar="DIR")]
DataDir = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]


@dataclass(frozen=True, kw_only=True)
class Where:
    """What to compute on, and with what data: shared by `train`, `compare` and `study`."""

    device: str = "cpu"
    """Where to compute: cpu, cuda, or one of several GPUs as cuda:1."""
    precision: Literal["float32", "tf32", "bf16"] = "tf32"
    """How a GPU multiplies; results say it. float32 is exact and slowest; a CPU always does that."""
    data_dir: DataDir = None
    """Where the data files are; default: $SIGNVOTE_DATA, then ~/.cache/signvote."""

    def machine(self) -> Machine:
        """Checked here: a device that is missing is better said at once."""
        from signvote.sim.machine import Machine

        return Machine(device=self.device, precision=self.precision)

    def run_all(self, runs: dict[str, Config], out: Path, command: str, jobs: int | None) -> None:
        """Run what is not done yet, here, and show the results of all."""
        here: dict[str, Any] = {"machine": self.machine(), "data_dir": self.data_dir}
        run_all(runs, out, command=command, jobs=jobs, **here)


@dataclass(frozen=True, kw_only=True)
class Common(Where):
    """What `train` and `compare` share."""

    task: str = "mnist-10k"
    """mnist-10k (bundled), mnist, fashion-mnist or cifar10."""
    model: str | None = None
    """mnist-cnn, resnet20, resnet56 or mlp; default: the task's own."""
    recipe: str = "tuned"
    """paper: step 1e-3, no momentum, zeros abstain. tuned: momentum 0.9, cosine step, one strict bit."""
    rounds: int = 300
    """Rounds of voting."""
    workers: int = 15
    """Number of workers, in a batch mode."""
    total: int = 960
    """Samples a round, in a batch mode."""
    batch_sizes: tuple[int, ...] = ()
    """Batch size of each worker, instead of a mode."""
    split: str = "shared"
    """Who owns which data: shared (the paper), iid, dirichlet:A or labels:K."""
    attack: str | None = None
    """NAME[=STRENGTH]:COUNT[:START]: the last COUNT workers attack, such as anti:5; docs/security.md has all."""
    miss: float = 0.0
    """Probability that a worker misses a round."""
    absent: tuple[str, ...] = ()
    """WORKER:FROM[:TO], rounds in which a worker is away: it joins late, leaves or returns."""
    zeros: Literal["coin", "abstain"] | None = None
    """What a zero gradient votes; default: the recipe's."""
    step: float | None = None
    """Step size; default: the recipe's."""
    decay: float = 0.0
    """Weight decay."""
    feedback: bool = False
    """Error feedback: add to the next vote what this one's signs left unsaid."""
    top: float | None = None
    """Vote on this share of the coordinates only, those of largest magnitude; best with --zeros abstain."""
    momentum: float | None = None
    """Momentum of each worker before the sign; default: the recipe's."""
    schedule: Literal["constant", "cosine"] | None = None
    """How the step changes; default: the recipe's."""
    evaluate_every: int = 50
    """Rounds between two tests."""
    test_batch: int = 64
    """Samples per test batch; matters for batch norm without running statistics."""
    sign_error: bool = False
    """Also compare decisions with the gradient of all training data (slow)."""

    def config(self, **run: Any) -> Config:
        """The configuration of one run."""
        from signvote.sim import Config

        mine = [f.name for f in fields(Common)[len(fields(Where)) :]]
        return Config(**{name: getattr(self, name) for name in mine}, **run)


@dataclass(frozen=True, kw_only=True)
class Train(Common):
    """Train once: any rule, task, population, attack.

    Writes result.json, report.html, figure.png and a checkpoint into --out. Ctrl-C stops after the
    round; --resume goes on bit for bit.
    """

    rule: str = "pooled"
    """One of those that `signvote rules` explains, or the yardsticks oracle, sgd and median."""
    mode: int | None = None
    """Batch mode of the paper, 1 (all alike) to 4 (one strong worker); default 1."""
    seed: int = 0
    """Decides everything random."""
    out: Out = Path("runs/train")
    """Where results go."""
    resume: bool = False
    """Go on from the checkpoint in --out."""
    options: tuple[str, ...] = ()
    """KEY=VALUE of the rule, such as forgetting=0.98, per=tensor, warmup=50."""

    def run(self) -> None:
        """Do it."""
        from signvote.sim import Run, train
        from signvote.tasks import load_task

        options = dict(_option(text) for text in self.options)
        config = self.config(rule=self.rule, mode=self.mode, seed=self.seed, options=options)
        if (self.out / "checkpoint.safetensors").exists() and not self.resume:
            raise ConfigError(
                f"{self.out} holds a run already; add --resume to go on, or choose another --out"
            )
        machine = self.machine()
        task = load_task(config.task, self.data_dir, config.model)
        with progress_bars() as progress:
            bar = progress.add_task(self.rule, total=config.rounds, accuracy="")

            def watch(run: Run) -> None:
                accuracy = f"{run.history['evaluations']['accuracy'][-1]:.1%}"
                progress.update(bar, completed=run.round, accuracy=accuracy)

            result = train(config, task, self.out, resume=self.resume, watch=watch, machine=machine)
        show({"format": 1, "command": _command(), "runs": [result]}, self.out)
        if result["status"] == "interrupted":
            Console().print(f"Stopped after round {result['rounds_done']}; go on with --resume.")


@dataclass(frozen=True, kw_only=True)
class Compare(Common):
    """The paper's figure: rules x batch modes x seeds.

    Writes results.json, results.md, figure.png, figure.svg and report.html into --out. What is done already is
    skipped, so an interrupted comparison goes on where it was.
    """

    rules: tuple[str, ...] = ("majority", "it-signsgd", "pooled")
    """Rules to compare; see train --rule."""
    modes: tuple[int, ...] = (1, 4)
    """Batch modes of the paper."""
    seeds: tuple[int, ...] = (0,)
    """One run for each."""
    out: Out = Path("runs/compare")
    """Where results go."""
    jobs: int | None = None
    """Runs at a time; default: one per core, on a GPU one."""

    def run(self) -> None:
        """Do it."""
        from signvote.sim.compare import name_of

        if not (self.rules and self.seeds and (self.modes or self.batch_sizes)):
            raise ConfigError("nothing to compare: give at least one rule, one mode and one seed")
        modes = (None,) if self.batch_sizes else self.modes
        configs = [
            self.config(rule=rule, mode=mode, seed=seed)
            for mode in modes for seed in self.seeds for rule in self.rules
        ]  # fmt: skip
        self.run_all({name_of(c): c for c in configs}, self.out, _command(), self.jobs)


@dataclass(frozen=True, kw_only=True)
class Study(Where):
    """Run what a TOML file lists: one command repeats a published result.

    Writes results.json, results.md, figure.png, figure.svg and report.html into --out. A run that
    results.json holds is not run again, here or on another machine; --seeds adds to them.
    """

    file: Positional[Path]
    """The study, such as paper/fig1-mnist.toml; docs/simulate.md says what is in it."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where results go; default: the folder of the file's name beside it."""
    seeds: tuple[int, ...] = ()
    """Instead of the file's."""
    only: str | None = None
    """Only the runs with this text in their name, such as pooled or mode4."""
    jobs: int | None = None
    """Runs at a time; default: one per core, on a GPU one."""

    def run(self) -> None:
        """Do it."""
        from signvote.sim.study import read_study

        every = read_study(self.file, self.seeds)
        runs = {name: config for name, config in every.items() if (self.only or "") in name}
        if not runs:
            raise ConfigError(f"no run has {self.only!r} in its name; a name is {next(iter(every))!r}")
        self.run_all(runs, self.out or self.file.with_suffix(""), self._command(), self.jobs)

    def _command(self) -> str:
        """What repeats it elsewhere: without the folders of this machine."""
        seeds = ["--seeds", *map(str, self.seeds)] if self.seeds else []
        only = ["--only", self.only] if self.only else []
        where = [] if self.device == "cpu" else ["--device", self.device, "--precision", self.precision]
        return shlex.join(["signvote", "study", str(self.file), *seeds, *only, *where])


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Fetch data sets with checksums, or verify those that are there."""

    names: Positional[tuple[str, ...]] = ("mnist",)
    """mnist, fashion-mnist, cifar10."""
    data_dir: DataDir = None
    """Where to; default: $SIGNVOTE_DATA, then ~/.cache/signvote."""
    verify: bool = False
    """Only say what is there."""

    def run(self) -> None:
        """Do it."""
        from signvote.tasks.download import fetch, verify
        from signvote.tasks.files import data_folder

        folder = data_folder(self.data_dir)
        for name in self.names:
            if not self.verify:
                with Progress(transient=True) as progress:
                    fetch(name, folder, progress=partial(_watch_file, progress, {}))
            files = verify(name, folder)
            if not files:
                Console().print(f"{name} comes with signvote; there is nothing to fetch.")
            for file, state in files.items():
                Console().print(f"{folder / file}: {state}", soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time every kernel as a ratio to copying the float32 vector in the same run.

    Prints a table and writes JSON: pack, votes, trust, steps, beside the textbook way in torch;
    one thread and all, several numbers of workers, and at growing sizes to show that cost is linear.
    """

    what: Positional[Literal["kernels"]] = "kernels"
    """What to time."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What to time; cuda: bandwidth as a share of a copy's."""
    coordinates: int | None = None
    """N, the length of the vector; default: 25 million, on a GPU 100 million."""
    workers: tuple[int, ...] | None = None
    """M, the numbers of workers; default: 15, 50 and 100, on a GPU 15."""
    threads: tuple[int, ...] = ()
    """Numbers of threads; default: 1 and all."""
    repeats: int = 5
    """Runs of each; the fastest counts."""
    out: Path = Path("bench.json")
    """Where the JSON goes."""

    def run(self) -> None:
        """Do it."""
        from signvote import bench, bench_cuda

        gpu = self.device == "cuda"
        n = (100_000_000 if gpu else 25_000_000) if self.coordinates is None else self.coordinates
        workers = ((15,) if gpu else (15, 50, 100)) if self.workers is None else self.workers
        if gpu:
            bench_cuda.kernels(n, workers, self.repeats, self.out)
        else:
            bench.kernels(n, workers, self.threads, self.repeats, self.out)


@dataclass(frozen=True, kw_only=True)
class FlowerApp:
    """Write a Flower app that trains by votes, to run with `flwr run` and to change."""

    folder: Positional[Path]
    """A new or empty folder."""

    def run(self) -> None:
        """Do it."""
        from signvote.engines.flower_app import write_app

        for path in write_app(self.folder):
            Console().print(path, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What each rule does, and when to take it."""

    def run(self) -> None:
        """Do it."""
        from signvote.core.rules import RULES, summary

        for name in RULES:
            Console().print(name, *summary(name), sep="\n  ", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Version:
    """Print the version."""

    def run(self) -> None:
        """Do it."""
        Console().print(__version__, highlight=False)


Command = (
    Annotated[Compare, subcommand("compare")]
    | Annotated[Train, subcommand("train")]
    | Annotated[Study, subcommand("study")]
    | Annotated[Rules, subcommand("rules")]
    | Annotated[Bench, subcommand("bench")]
    | Annotated[Fetch, subcommand("data")]
    | Annotated[FlowerApp, subcommand("flower-app")]
    | Annotated[Version, subcommand("version")]
)


def main() -> None:
    """Parse the command line and run the command; our errors are one sentence and exit code 2."""
    command = tyro.cli(Command, prog="signvote", description="One-bit training on unequal machines.")
    try:
        command.run()
    except SignVoteError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _option(text: str) -> tuple[str, Any]:
    """KEY=VALUE, the value as JSON if it is any, else as text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"option {text!r} has no value; wanted KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _fail(sentence: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"signvote: {sentence}", markup=False, highlight=False)
    sys.exit(2)


def _command() -> str:
    return shlex.join(["signvote", *sys.argv[1:]])


def _watch_file(progress: Progress, bars: dict[str, TaskID], file: str, done: int, total: int) -> None:
    if file not in bars:
        bars[file] = progress.add_task(file)
    progress.update(bars[file], completed=done, total=total or None)
