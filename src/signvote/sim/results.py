"""Results: what runs leave behind. Read in whatever format, put together, written as CSV.

A run's result is a dictionary; `results.json` holds {"format", "command", "runs": [result, ...]}. Lists by
round are kept short, `[7, 7, 7, 5]` as `[[7, 3], [5, 1]]` (lengths.py).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from signvote.errors import ConfigError, StateError
from signvote.formats import upgraded
from signvote.sim.config import Config
from signvote.sim.lengths import pack, unpack

Result = dict[str, Any]
Results = dict[str, Any]

FORMAT = 2
COLUMNS = (
    "task", "rule", "recipe", "mode", "batch_sizes", "attack", "split", "seed", "options", "status",
    "round", "accuracy", "loss", "sign_error", "bytes_up", "bytes_down",
)  # fmt: skip


def results_of(runs: Iterable[Result], command: str = "") -> Results:
    """Runs as `results.json` holds them."""
    return {"format": FORMAT, "command": command, "runs": list(runs)}


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


def identity(config: Config) -> str:
    """A text that two configurations share if, and only if, they are equal."""
    return json.dumps(config.as_dict(), sort_keys=True)


def identity_of(result: Result) -> str | None:
    """Of a result's configuration; None if it is no longer one."""
    try:
        return identity(Config.from_dict(result["config"]))
    except ConfigError:
        return None


def merged(sources: Mapping[str, Results]) -> Results:
    """Runs of several folders as one comparison.

    A run that several hold is taken once, a finished one rather than an interrupted one. Where they hold
    different results of one configuration, runs of that kind say where they are from.
    """
    runs: dict[str, dict[str, Result]] = {}  # configuration -> source -> run
    for source, results in sources.items():
        for run in current(results, source)["runs"]:
            runs.setdefault(json.dumps(run["config"], sort_keys=True), {})[source] = run
    kept = {key: _once(by_source) for key, by_source in runs.items()}
    torn = {_kind(run) for by_source in kept.values() if len(by_source) > 1 for run in by_source.values()}
    each = [
        {**run, "config": {**run["config"], "from": source}} if _kind(run) in torn else run
        for by_source in kept.values()
        for source, run in by_source.items()
    ]
    commands = dict.fromkeys(line for r in sources.values() for line in r.get("command", "").splitlines())
    return results_of(each, "\n".join(commands))


def to_csv(results: Results) -> str:
    """A row per evaluation of each run; bytes are those of all workers since the start."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in current(results)["runs"]:
        writer.writerows(_rows(run))
    return text.getvalue()


def _rows(run: Result) -> Iterable[dict[str, Any]]:
    config = run["config"]
    shared = {name: config.get(name) for name in COLUMNS[:9]} | {
        "batch_sizes": " ".join(map(str, config["batch_sizes"])),
        "options": json.dumps(config["options"]) if config.get("options") else "",
        "status": run["status"],
    }
    sent = {name: [0, *accumulate(unpack(run[name]))] for name in ("bytes_up", "bytes_down")}
    errors = dict(zip(*(run["sign_error"].get(key, ()) for key in ("round", "error")), strict=True))
    measured = (run["evaluations"][key] for key in ("round", "accuracy", "loss"))
    for t, accuracy, loss in zip(*measured, strict=True):
        at = {"round": t, "accuracy": accuracy, "loss": loss, "sign_error": errors.get(t)}
        yield shared | at | {name: values[min(t, len(values) - 1)] for name, values in sent.items()}


def _once(by_source: dict[str, Result]) -> dict[str, Result]:
    """Without copies of the same evaluations, and without interrupted runs where one was finished."""
    done = {s: run for s, run in by_source.items() if run["status"] == "done"} or by_source
    different = {json.dumps(run["evaluations"]): source for source, run in reversed(done.items())}
    return {source: done[source] for source in reversed(different.values())}


def _kind(run: Result) -> str:
    """Its configuration but for the seed."""
    return json.dumps({k: v for k, v in run["config"].items() if k != "seed"}, sort_keys=True)


def _said_in_full(run: Result) -> Result:
    """From format 1, in which a run could lack what was not recorded yet, and settings that did not exist."""
    if not isinstance(run.get("config"), dict):
        return run
    everybody = [len(run["config"].get("batch_sizes", ()))] * len(unpack(run.get("bytes_up", ())))
    lists = {"voters": run.get("voters", everybody)} | {k: run.get(k, ()) for k in ("bytes_up", "bytes_down")}
    empty: Result = {
        "versions": {},
        "machine": [],
        "seconds": {},
        "trust": {},
        "sign_error": {},
        "accuracy_by_class": [],
    }
    packed = {name: pack(unpack(values)) for name, values in lists.items()}
    return empty | run | packed | {"config": _complete(run["config"])}


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    """With the settings that did not exist yet when it was written, if it is still one."""
    try:
        return Config.from_dict(config).as_dict() | config
    except (ConfigError, TypeError):
        return config
