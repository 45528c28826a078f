"""Two comparisons in one folder at the same time."""

from __future__ import annotations

import fcntl
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from signvote.cli.showing import run_all
from signvote.results import NAME, locked, read
from signvote.sim import Config
from signvote.sim.compare import compare
from signvote.sim.machine import Machine
from tests.ranks import PATIENCE
from tests.test_report import made_up_run
from tests.test_sim import small


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are done in this process, one after the other, and are made up."""

    class Pool:
        def submit(self, one: Any, *given: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(made_up_run("majority") | {"config": given[1].as_dict(), "rounds_done": 1})
            return future

    @contextmanager
    def pool(processes: int) -> Iterator[Any]:
        yield Pool(), queue.Queue(), threading.Event()

    monkeypatch.setattr("signvote.sim.compare._pool", pool)


def rules_in(folder: Path) -> list[str]:
    return sorted(run["config"]["rule"] for run in read(folder / NAME)["runs"])


@pytest.mark.usefixtures("here")
def test_two_comparisons_keep_each_others_runs(tmp_path: Path) -> None:
    """One starts and ends while the other is between its first and its second run."""
    seen = []

    def watch(number: int, round: int, reading: str) -> None:
        seen.append(number)
        if len(seen) == 1:
            assert rules_in(tmp_path) == ["majority"]
            compare([small("robust")], tmp_path, command="two")
            assert rules_in(tmp_path) == ["majority", "robust"]

    results = compare([small("majority"), small("weighted")], tmp_path, command="one", watch=watch)
    assert seen == [0, 1]
    assert rules_in(tmp_path) == ["majority", "robust", "weighted"]
    assert [run["config"]["rule"] for run in results["runs"]] == ["majority", "weighted", "robust"]
    assert sorted(results["command"].splitlines()) == ["one", "two"]


@pytest.mark.usefixtures("here")
def test_the_page_of_a_comparison_shows_what_another_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one ends after the last run of this one, and before its page is written."""

    def both(configs: list[Config], out: Path, **rest: Any) -> Any:
        results = compare(configs, out, **rest)
        compare([small("robust")], out, command="two")
        return results

    monkeypatch.setattr("signvote.sim.compare.compare", both)
    runs = {"a": small("majority"), "b": small("weighted")}
    run_all(runs, tmp_path, command="one", jobs=1, machine=Machine(), data_dir=None)
    assert rules_in(tmp_path) == ["majority", "robust", "weighted"]
    assert "robust" in (tmp_path / "results.csv").read_text()


def test_a_folder_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    """A second process gets the lock when the first is killed, and not before."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom signvote.results import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes)  # type: ignore[call-overload]
    assert holder.stdout.readline() == b"held\n"
    handle = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)
    holder.kill()
    holder.communicate(timeout=PATIENCE)
    with locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
