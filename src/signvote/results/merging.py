"""Runs of several folders as one comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping

from signvote.results.files import Result, Results, current, results_of


def merged(sources: Mapping[str, Results]) -> Results:
    """Results by their source, put together.

    A run that several sources hold is kept once, a finished one rather than an interrupted one. Where they
    hold different results of one configuration, runs of that kind name their source.
    """
    runs: dict[str, dict[str, Result]] = {}  # configuration -> source -> run
    for source, results in sources.items():
        for run in current(results, source)["runs"]:
            runs.setdefault(json.dumps(run["config"], sort_keys=True), {})[source] = run
    kept = {key: _once(by_source) for key, by_source in runs.items()}
    torn = {_kind(run) for by_source in kept.values() if len(by_source) > 1 for run in by_source.values()}
    each = [
        _named(run, source) if _kind(run) in torn else run
        for by_source in kept.values()
        for source, run in by_source.items()
    ]
    commands = dict.fromkeys(line for r in sources.values() for line in r.get("command", "").splitlines())
    return results_of(each, "\n".join(commands))


def _once(by_source: dict[str, Result]) -> dict[str, Result]:
    """Without copies of the same evaluations, and without interrupted runs where one was finished."""
    done = {s: run for s, run in by_source.items() if run["status"] == "done"} or by_source
    different = {json.dumps(run["evaluations"]): source for source, run in reversed(done.items())}
    return {source: done[source] for source in reversed(different.values())}


def _kind(run: Result) -> str:
    """Its configuration but for the seed."""
    return json.dumps({k: v for k, v in run["config"].items() if k != "seed"}, sort_keys=True)


def _named(run: Result, source: str) -> Result:
    return {**run, "config": {**run["config"], "from": source}}
