"""Runs shown in a terminal: their progress, then the table, the page and the figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from signvote.cli.progress import progress_of
from signvote.cli.stopping import Stopped
from signvote.errors import ConfigError

if TYPE_CHECKING:
    from signvote.sim import Config, Tracker
    from signvote.sim.machine import Machine


def run_all(
    runs: dict[str, Config],
    out: Path,
    *,
    command: str,
    jobs: int | None,
    machine: Machine,
    data_dir: Path | None,
    trackers: Sequence[Callable[[Path], Tracker]] = (),
    live: bool = False,
) -> None:
    """Run the configurations that are not finished, show their progress, then write and print all results."""
    from signvote import report
    from signvote.results import identity, identity_of, locked, read, results_file
    from signvote.sim.compare import compare

    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs is {jobs}; it must be 1 or more")
    configs = list(runs.values())
    out.mkdir(parents=True, exist_ok=True)
    lengths = {name: config.rounds for name, config in runs.items()}
    with served(out, live), progress_of(lengths) as progress:
        results = compare(
            configs,
            out,
            names=list(runs),
            command=command,
            data_dir=data_dir,
            machine=machine,
            jobs=jobs,
            watch=progress.show,
            trackers=trackers,
        )
    if any(run["evaluations"]["round"] for run in results["runs"]):
        with locked(out):  # another comparison may add runs
            results = read(results_file(out))
            report.write_views(results, out)
        tell(results, out)
    done = {identity_of(run) for run in results["runs"] if run["status"] == "done"}
    left = sum(identity(config) not in done for config in configs)
    if left:
        raise Stopped(f"Stopped; {left} of {len(configs)} runs are unfinished.")


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
    console.print(Text("The page: ") + path_text(out / "report.html"), soft_wrap=True)


@contextmanager
def served(folder: Path, live: bool) -> Iterator[None]:
    """Serve the page of a folder during the block, and print its address; only if `live` is set."""
    if not live:
        yield
        return
    from signvote.report.live import Live

    with Live(folder).serving() as url:
        tell_address(url)
        yield


def tell_address(url: str) -> None:
    """Print the address of a live page."""
    Console(stderr=True).print(Text("The live page: ") + Text(url, Style(link=url)), soft_wrap=True)


def path_text(path: Path) -> Text:
    """A path as a link that a terminal can open; where there is no terminal, the path alone."""
    whole = path.resolve()
    here = Path.cwd()
    shown = whole.relative_to(here) if whole.is_relative_to(here) else whole
    return Text(str(shown), Style(link=whole.as_uri()))
