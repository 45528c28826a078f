"""The commands around training: `data`, `rules`, `bench`, `doctor`, `watch`, `flower-app`, `completion`, `version`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.text import Text
from tyro.conf import Positional

from signvote import __version__
from signvote.cli.flags import unset
from signvote.cli.showing import path_text, tell_address
from signvote.cli.training import DataDir, Off


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Download data sets and check their checksums, or only verify the files that are there."""

    names: Annotated[Positional[tuple[str, ...]], unset("mnist")] = ("mnist",)
    """mnist, fashion-mnist or cifar10."""
    data_dir: DataDir = None
    """Folder for the data files."""
    verify: Off = False
    """Only check the files that are there."""

    def run(self) -> None:
        """Run the command."""
        from signvote.tasks.download import fetch, verify
        from signvote.tasks.files import data_folder

        folder = data_folder(self.data_dir)
        for name in self.names:
            if not self.verify:
                with Progress(transient=True) as progress:
                    fetch(name, folder, progress=partial(_watch_file, progress, {}))
            files = verify(name, folder)
            if not files:
                Console().print(f"{name} needs no download.")
            for file, state in files.items():
                Console().print(path_text(folder / file) + Text(f": {state}"), soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time every kernel as a ratio to copying the float32 vector in the same run.

    Prints a table and writes JSON. The kernels that pack, vote, count and step are timed beside plain torch
    code, with one thread and with all, for several numbers of workers, and at growing sizes to show that the cost
    is linear.
    """

    what: Positional[Literal["kernels"]] = "kernels"
    """What to time."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to time. For cuda, the table shows bandwidth as a share of a copy's."""
    coordinates: Annotated[int | None, unset("25 million, on a GPU 100 million")] = None
    """N, the length of the vector."""
    workers: Annotated[tuple[int, ...] | None, unset("15 50 100, on a GPU 15")] = None
    """M, the numbers of workers."""
    threads: Annotated[tuple[int, ...], unset("1 and all")] = ()
    """Numbers of threads."""
    repeats: int = 5
    """Number of timed runs of each kernel; the fastest counts."""
    out: Path = Path("bench.json")
    """File for the JSON."""

    def run(self) -> None:
        """Run the command."""
        from signvote import bench, bench_cuda

        gpu = self.device == "cuda"
        n = self.coordinates
        if n is None:
            n = 100_000_000 if gpu else 25_000_000
        workers = self.workers
        if workers is None:
            workers = (15,) if gpu else (15, 50, 100)
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
        """Run the command."""
        from signvote.engines.flower_app import write_app

        for path in write_app(self.folder):
            Console().print(path_text(path), soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Serve the page of a folder on this machine, and update it at each evaluation of its runs.

    The address is 127.0.0.1, so other machines cannot open it. Ctrl-C ends it.

    signvote watch runs/compare
    """

    folder: Positional[Path]
    """The folder that `train`, `compare` or `study` writes into."""
    port: int = 8000
    """Port of the address; 0 chooses a free one."""

    def run(self) -> None:
        """Run the command."""
        from signvote.report.live import Live

        with Live(self.folder, self.port) as live:
            tell_address(live.url)
            if not self.folder.is_dir():
                text = f"There is no folder {self.folder} yet; the page waits for it."
                Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
            live.serve_forever()


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Explain what each rule does and when to use it."""

    def run(self) -> None:
        """Run the command."""
        from signvote.cli import explained

        for name, summary in explained.rules().items():
            Console().print(name, *summary, sep="\n  ", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script that completes commands and flags in your shell.

    bash: signvote completion bash > ~/.local/share/bash-completion/completions/signvote
    """

    shell: Positional[Literal["bash", "zsh"]]
    """The shell that should use it."""

    def run(self) -> None:
        """Run the command."""
        from signvote.cli.commands import parse

        parse(["--tyro-print-completion", self.shell])  # prints it and exits


@dataclass(frozen=True, kw_only=True)
class Version:
    """Print the version."""

    def run(self) -> None:
        """Run the command."""
        Console().print(__version__, highlight=False)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Show what is installed, which kernels run here, how fast they are and what is missing."""

    data_dir: DataDir = None
    """Folder of the data files."""

    def run(self) -> None:
        """Run the command."""
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
