"""Runs added to a results file that other processes add to as well."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from signvote.results.files import Result, Results, identity_of, read, results_of, write


def add(path: Path | str, runs: Sequence[Result], command: str = "") -> Results:
    """Put runs into a results file, and return all that it holds now: these runs, then the others.

    A run replaces the one of the same configuration, unless only that one is finished. Two processes may add to
    one file: each keeps the runs of the other.

    Args:
        path: the file; its folder exists.
        runs: results, each of another configuration.
        command: the user's command line. It replaces those of earlier runs if none of these is left.

    """
    path = Path(path)
    with locked(path.parent):
        earlier = read(path) if path.exists() else results_of([])
        results = _together(runs, earlier, command)
        write(path, results)
    return results


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder: another process that asks for it waits. The lock ends with the process, however that ends.

    The lock is on the folder itself, so no file is left behind. A file system without locks is used without.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _together(runs: Sequence[Result], earlier: Results, command: str) -> Results:
    finished = {identity_of(run): run for run in earlier["runs"] if run["status"] == "done"}
    mine = []
    for run in runs:
        is_done = run["status"] == "done"
        mine.append(run if is_done else finished.get(identity_of(run), run))
    given = {identity_of(run) for run in mine}
    others = [run for run in earlier["runs"] if identity_of(run) not in given]
    commands = [command]
    if others:
        commands = [*earlier.get("command", "").splitlines(), command]
    unique = dict.fromkeys(commands)
    return results_of([*mine, *others], "\n".join(unique))
