"""Runs shown in a terminal: progress bars while they run, then the table, the page and the figure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from signvote.errors import ConfigError

if TYPE_CHECKING:
    from signvote.sim import Config, Tracker
    from signvote.sim.machine import Machine


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """A bar for each run, with its metric. All bars disappear at the end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[reading]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, transient=True) as progress:
        yield progress


def run_all(
    runs: dict[str, Config],
    out: Path,
    *,
    command: str,
    jobs: int | None,
    machine: Machine,
    data_dir: Path | None,
    trackers: Sequence[Callable[[Path], Tracker]] = (),
) -> None:
    """Run the configurations that are not finished, show their progress, then write and print all results."""
    from signvote import report
    from signvote.results import identity, identity_of, locked, read, results_file
    from signvote.sim.compare import compare

    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs is {jobs}; it must be 1 or more")
    configs = list(runs.values())
    out.mkdir(parents=True, exist_ok=True)
    with progress_bars() as progress:
        rounds = sum(config.rounds for config in configs)
        whole = progress.add_task("all runs", total=rounds, reading="")
        bars = []
        for name, config in runs.items():
            bar = progress.add_task(name, total=config.rounds, reading="", visible=False)
            bars.append(bar)

        def watch(number: int, round: int, reading: str) -> None:
            progress.update(
                bars[number],
                completed=round,
                reading=reading,
                visible=round < configs[number].rounds,
            )
            completed = sum(bar.completed for bar in progress.tasks if bar.id != whole)
            progress.update(whole, completed=completed)

        results = compare(
            configs,
            out,
            names=list(runs),
            command=command,
            data_dir=data_dir,
            machine=machine,
            jobs=jobs,
            watch=watch,
            trackers=trackers,
        )
    if results["runs"]:
        with locked(out):  # another comparison may add runs
            results = read(results_file(out))
            report.write_views(results, out)
        tell(results, out)
    done = {identity_of(run) for run in results["runs"] if run["status"] == "done"}
    left = sum(identity(config) not in done for config in configs)
    if left:
        Console().print(
            f"{left} of {len(configs)} runs are not finished. To resume, run the same command again."
        )


def show(results: dict[str, Any], out: Path, baseline: str = "majority") -> None:
    """Write the report, and print its table."""
    from signvote import report

    report.write(results, out, baseline)
    tell(results, out, baseline)


def tell(results: dict[str, Any], out: Path, baseline: str = "majority") -> None:
    """Print the table of a report, and where its page is."""
    from signvote import report
    from signvote.report import terminal

    console = Console()
    for table in terminal.tables_of(report.table(results, baseline), baseline):
        console.print(table)
    console.print(f"The page: {os.path.relpath(out / 'report.html')}", highlight=False, soft_wrap=True)
