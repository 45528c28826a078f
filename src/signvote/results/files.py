"""Result files: `results.json` holds {"format", "command", "runs": [result, ...]}.

The result of a run is a dictionary. Its lists by round are run-length coded: `[7, 7, 7, 5]` is written
`[[7, 3], [5, 1]]` (lengths.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from signvote.atomic import write_atomically
from signvote.errors import StateError
from signvote.formats import upgraded
from signvote.results.lengths import pack, unpack
from signvote.settings import RECIPES, Settings, completed

Result = dict[str, Any]
Results = dict[str, Any]

FORMAT = 2
ALWAYS_THERE = ("task", "rule", "recipe", "batch_sizes", "seed")  # in a configuration of any format


def results_of(runs: Iterable[Result], command: str = "") -> Results:
    """Runs as `results.json` holds them."""
    return {"format": FORMAT, "command": command, "runs": list(runs)}


def write(path: Path, results: Results | Result) -> None:
    """Write a results file, or the result of one run; the old file stays until the new one is complete."""
    write_atomically(path, json.dumps(results).encode())


def read(path: Path | str) -> Results:
    """A results file of this or any earlier format; a single run's `result.json` as well."""
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise StateError(f"{path} is no results file of signvote: {error}") from None
    if not isinstance(found, dict):
        raise StateError(f"{path} is no results file of signvote")
    return current(results_of([found]) if "evaluations" in found else found, str(path))


def current(results: Results, what: str = "the results") -> Results:
    """The same in today's format, whichever it was written in."""
    written = {"format": results.get("format")}  # of a run that does not say its own
    results = upgraded(results, what, FORMAT, key="format")
    if not isinstance(results.get("runs"), list):
        raise StateError(f"{what}: 'runs' is no list; was the file edited?")
    runs = [
        upgraded(written | run, f"run {i} of {what}", FORMAT, {1: _said_in_full}, key="format")
        for i, run in enumerate(results["runs"])
    ]
    return {**results, "runs": runs}


def identity(settings: Settings) -> str:
    """A text that two configurations share if, and only if, they are equal."""
    return _text(settings.as_dict())


def identity_of(result: Result) -> str:
    """The identity of a result's configuration. Settings that did not exist yet are at their default."""
    return _text(completed(result["config"]))


def _text(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def _said_in_full(run: Result) -> Result:
    """From format 1, in which a run could lack what was not recorded yet, and settings that did not exist."""
    if not isinstance(run.get("config"), dict):
        return run
    empty: Result = {
        "versions": {},
        "machine": [],
        "seconds": {},
        "trust": {},
        "sign_error": {},
        "accuracy_by_class": [],
    }
    return empty | run | _lists_by_round(run) | {"config": _complete(run["config"])}


def _lists_by_round(run: Result) -> dict[str, list[list[int]]]:
    """Where the voters were not recorded, every worker voted in every round."""
    workers = len(run["config"].get("batch_sizes", ()))
    rounds = len(unpack(run.get("bytes_up", ())))
    found = {
        "voters": run.get("voters", [workers] * rounds),
        "bytes_up": run.get("bytes_up", ()),
        "bytes_down": run.get("bytes_down", ()),
    }
    return {name: pack(unpack(values)) for name, values in found.items()}


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    """With the settings that did not exist yet when it was written, if signvote wrote it."""
    written = all(name in config for name in ALWAYS_THERE) and config["recipe"] in RECIPES
    return completed(config) | config if written else config
