"""Runs of several folders as one comparison."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from signvote.results.files import Result, Results, current, results_of


def merged(sources: Mapping[str, Results]) -> Results:
    """Results of several sources as one.

    A run that is in several sources is kept once; a finished run is preferred to an interrupted one. If sources
    have different results of one configuration, its runs name their source.
    """
    kept = [_once(by_source) for by_source in _by_configuration(sources)]
    ambiguous: set[str] = set()
    for by_source in kept:
        if len(by_source) > 1:
            ambiguous.update(map(_kind, by_source.values()))
    runs = []
    for by_source in kept:
        for source, run in by_source.items():
            is_ambiguous = _kind(run) in ambiguous
            runs.append(_named(run, source) if is_ambiguous else run)
    return results_of(runs, _commands(sources.values()))


def _by_configuration(sources: Mapping[str, Results]) -> list[dict[str, Result]]:
    """For each configuration, its run in each source."""
    found: dict[str, dict[str, Result]] = {}
    for source, results in sources.items():
        for run in current(results, source)["runs"]:
            configuration = json.dumps(run["config"], sort_keys=True)
            found.setdefault(configuration, {})[source] = run
    return list(found.values())


def _commands(results: Iterable[Results]) -> str:
    """All commands, each once."""
    lines: list[str] = []
    for each in results:
        lines += each.get("command", "").splitlines()
    return "\n".join(dict.fromkeys(lines))


def _once(by_source: dict[str, Result]) -> dict[str, Result]:
    """Without copies of the same evaluations, and without interrupted runs if one is finished."""
    done = {source: run for source, run in by_source.items() if run["status"] == "done"}
    candidates = done or by_source
    chosen: dict[str, tuple[str, Result]] = {}
    for source, run in candidates.items():
        evaluations = json.dumps(run["evaluations"])
        chosen.setdefault(evaluations, (source, run))
    return dict(chosen.values())


def _kind(run: Result) -> str:
    """Its configuration without the seed."""
    settings = {name: value for name, value in run["config"].items() if name != "seed"}
    return json.dumps(settings, sort_keys=True)


def _named(run: Result, source: str) -> Result:
    config = {**run["config"], "from": source}
    return {**run, "config": config}
