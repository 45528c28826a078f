"""The commands around training: `data`, `rules`, `bench`, `doctor`, `flower-app`, `completion`, `version`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from tyro.conf import Positional

from signvote import __version__
from signvote.cli.training import DataDir


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
        from signvote.cli import explained

        for name, summary in explained.rules().items():
            Console().print(name, *summary, sep="\n  ", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script that completes commands and flags in your shell.

    bash: signvote completion bash > ~/.local/share/bash-completion/completions/signvote
    """

    shell: Positional[Literal["bash", "zsh"]]
    """Which shell."""

    def run(self) -> None:
        """Do it."""
        from signvote.cli import parse

        parse(["--tyro-print-completion", self.shell])  # prints it and exits


@dataclass(frozen=True, kw_only=True)
class Version:
    """Print the version."""

    def run(self) -> None:
        """Do it."""
        Console().print(__version__, highlight=False)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say what is installed, which kernels run here and how fast, and what is missing."""

    data_dir: DataDir = None
    """Where to look for data files; default: $SIGNVOTE_DATA, then ~/.cache/signvote."""

    def run(self) -> None:
        """Do it."""
        from signvote.doctor import findings

        for finding in findings(self.data_dir):
            mark = {True: "[green]ok[/]     ", False: "[red]missing[/]", None: "       "}[finding.good]
            Console(highlight=False).print(
                f"{mark} {escape(finding.what)}: {escape(finding.text)}", soft_wrap=True
            )


def _watch_file(progress: Progress, bars: dict[str, TaskID], file: str, done: int, total: int) -> None:
    if file not in bars:
        bars[file] = progress.add_task(file)
    progress.update(bars[file], completed=done, total=total or None)
