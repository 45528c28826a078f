"""The report page: one HTML text that needs nothing else.

Every text from the results is untrusted: it is escaped, or goes into the JSON block through `embedded`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from signvote.report import notices, trust, webtables
from signvote.report.experiments import Experiment, experiments_of, machines_of
from signvote.report.finals import BASELINE, table
from signvote.report.labels import batch_label, unique
from signvote.report.marks import Marks
from signvote.report.measures import SOURCES, Curve
from signvote.report.panels import Panel, arranged
from signvote.results import Results

DIGITS = 6  # of a point of a curve


def page(results: Results, baseline: str = BASELINE) -> str:
    """The page as text: curves to explore, final accuracy, trust, bytes, time, configuration."""
    experiments = experiments_of(results)
    tasks = unique(str(experiment.settings["task"]) for experiment in experiments)
    curves = {"panels": _panels(experiments), "metrics": _metrics(experiments)}
    parts = {
        "title": escape(", ".join(tasks)),
        "summary": escape(_summary(experiments)),
        "accuracy": webtables.accuracy_table(table(results, baseline), baseline),
        "notices": notices.section(experiments),
        "trust": trust.section(experiments),
        "bytes": webtables.bytes_table(experiments),
        "seconds": webtables.seconds_table(experiments),
        "command": escape(str(results.get("command", "not recorded"))),
        "versions": escape(_versions(experiments) + machines_of(experiments)),
        "configuration": "".join(map(_configuration, experiments)),
        "data": embedded(curves),
        "css": _file("page.css"),
        "js": _file("page.js"),
    }
    return Template(_file("page.html")).substitute(parts)


def embedded(data: object) -> str:
    r"""JSON for a script element: no text in it can end the element or open a comment.

    >>> print(embedded("</script>"))
    "\u003c/script>"
    """
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def _file(name: str) -> str:
    return files("signvote.report").joinpath(name).read_text("utf-8")


def _summary(experiments: list[Experiment]) -> str:
    runs = sum(len(experiment.runs) for experiment in experiments)
    left_out = sum(experiment.left_out for experiment in experiments)
    rounds = max(experiment.last_round() for experiment in experiments)
    text = f"{_runs(runs)}, up to {rounds} rounds."
    if left_out:
        text += f" {_runs(left_out)} left out, because interrupted."
    return text


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


# The curves: page.js draws them from this.


def _panels(experiments: list[Experiment]) -> list[dict[str, Any]]:
    panels, marks = arranged(experiments)
    names = {id(experiment): f"series-{i}" for i, experiment in enumerate(experiments)}
    data = []
    for panel in panels:
        series = []
        for member in panel.members:
            name = names[id(member)]
            series.append(_series(name, member, panel, marks))
        frame = list(panel.frame) if panel.fixed else None
        data.append({"title": panel.title, "frame": frame, "series": series})
    return data


def _series(name: str, experiment: Experiment, panel: Panel, marks: Marks) -> dict[str, Any]:
    label = marks.name(experiment) if marks.by_curve else experiment.label
    if experiment.interrupted:
        label += " (interrupted)"
    sizes = batch_label(experiment.settings["batch_sizes"])
    return {
        "id": name,
        "label": label,
        "title": f"batch sizes {sizes}; seeds: {len(experiment.runs)}",
        "color": marks.color(experiment),
        "dashes": marks.dash(experiment),
        "fall": _fall(experiment, panel),
        "curves": {metric: _points(experiment.curve(metric)) for metric in SOURCES},
    }


def _fall(experiment: Experiment, panel: Panel) -> dict[str, Any] | None:
    fall = panel.fall(experiment)
    if fall is None:
        return None
    return {"round": fall.round, "text": fall.text}


def _points(curve: Curve) -> dict[str, list[Any]]:
    return {
        "round": list(curve.rounds),
        "mean": _finite(curve.mean),
        "low": _finite(curve.low),
        "high": _finite(curve.high),
    }


def _finite(values: Iterable[float]) -> list[float | None]:
    points: list[float | None] = []
    for value in values:
        is_number = math.isfinite(value)
        points.append(round(value, DIGITS) if is_number else None)
    return points


def _metrics(experiments: list[Experiment]) -> list[str]:
    """The metrics that an experiment measured."""

    def is_measured(metric: str) -> bool:
        return any(experiment.curve(metric).rounds for experiment in experiments)

    return list(filter(is_measured, SOURCES))


# The configuration.


def _versions(experiments: list[Experiment]) -> str:
    runs = [run for experiment in experiments for run in experiment.runs]
    texts = unique(_packages(run.get("versions", {})) for run in runs)
    if not any(texts):
        return "Versions were not recorded."
    return f"Made with {'; '.join(texts)}."


def _packages(versions: dict[str, str]) -> str:
    texts = [f"{name} {version}" for name, version in versions.items()]
    return ", ".join(texts)


def _configuration(experiment: Experiment) -> str:
    described: dict[str, Any] = dict(experiment.settings)
    described["seeds"] = [run["config"]["seed"] for run in experiment.runs]
    described["coordinates"] = experiment.runs[0]["coordinates"]
    machine = experiment.machine()
    if machine:
        described["ran on"] = machine
    lines = []
    for key, value in described.items():
        name = json.dumps(key)
        lines.append(f"{name}: {json.dumps(value)}")
    text = escape("\n".join(lines))
    label = escape(experiment.label)
    panel = escape(experiment.panel)
    return f"<details><summary>{label} <small>{panel}</small></summary><pre>{text}</pre></details>"
