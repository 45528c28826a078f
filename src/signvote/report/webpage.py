"""The report page: one HTML text that needs nothing else.

Every text from the results is untrusted: it is escaped, or goes into the JSON block through `embedded`.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from signvote.report import notices, trust, webtables
from signvote.report.experiments import Experiment, experiments_of, machines_of
from signvote.report.finals import BASELINE, table
from signvote.report.labels import batch_label, train_command, unique
from signvote.report.marks import Marks
from signvote.report.measures import SIGN_ERROR, Curve
from signvote.report.panels import Panel, arranged
from signvote.results import Results

DIGITS = 6  # of a point of a curve


def page(results: Results, baseline: str = BASELINE, *, live: str = "") -> str:
    """The page as text: curves to explore, final values, trust, bytes, time, configuration.

    Args:
        results: of one or many runs.
        baseline: the rule that the others are compared with.
        live: of a page that `signvote.report.live` serves, the state of its files; it then asks for changes.

    """
    experiments = experiments_of(results)
    tasks = unique(str(experiment.settings["task"]) for experiment in experiments)
    finals = table(results, baseline)
    made_with = _versions(experiments) + machines_of(experiments)
    command = results.get("command", "not recorded")
    curves = {
        "panels": _panels(experiments),
        "metrics": _names(experiments),
    }
    parts = {
        "title": escape(", ".join(tasks)),
        "summary": escape(_summary(experiments)),
        "final_title": escape(_final_title(experiments)),
        "final": webtables.finals_table(finals, baseline),
        "notices": notices.section(experiments),
        "trust": trust.section(experiments),
        "bytes": webtables.bytes_table(experiments),
        "seconds": webtables.seconds_table(experiments),
        "command": escape(str(command)),
        "versions": escape(made_with),
        "configuration": "".join(map(_configuration, experiments)),
        "data": embedded(curves),
        "css": _file("page.css"),
        "js": _file("page.js"),
        **_live_parts(live),
    }
    return Template(_file("page.html")).substitute(parts)


def waiting_page(live: str, trouble: str = "") -> str:
    """The page of a folder in which no run has been evaluated yet, or whose files cannot be read."""
    said = escape(trouble or "No run has been evaluated yet. This page reloads by itself when one has.")
    parts = {
        "said": said,
        "css": _file("page.css"),
        **_live_parts(live),
    }
    return Template(_file("waiting.html")).substitute(parts)


def _live_parts(live: str) -> dict[str, str]:
    """What a live page has and a file has not: the right to ask its server, and the script that does."""
    if not live:
        return {"connect": "", "live": ""}
    script = f"<script>\nconst SHOWN = {embedded(live)};\n{_file('live.js')}</script>"
    return {"connect": "connect-src 'self'; ", "live": script}


def embedded(data: object) -> str:
    r"""JSON for a script element: no text in it can end the element or open a comment.

    >>> print(embedded("</script>"))
    "\u003c/script>"
    """
    text = json.dumps(data, allow_nan=False)
    return text.replace("<", "\\u003c")


def _file(name: str) -> str:
    return files("signvote.report").joinpath(name).read_text("utf-8")


def _summary(experiments: list[Experiment]) -> str:
    runs = sum(len(experiment.runs) for experiment in experiments)
    left_out = sum(experiment.left_out for experiment in experiments)
    rounds = max(experiment.last_round() for experiment in experiments)
    text = f"{_runs(runs)}, up to {rounds} rounds."
    if left_out:
        text += f" {_runs(left_out)} left out, because unfinished."
    return text


def _final_title(experiments: list[Experiment]) -> str:
    names = unique(experiment.metric.name for experiment in experiments)
    return f"Final {', '.join(names)}"


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
        described = [_described(name, panel) for name in _names(panel.members)]
        data.append(
            {
                "title": panel.title,
                "frame": frame,
                "metrics": described,
                "series": series,
            }
        )
    return data


def _described(name: str, panel: Panel) -> dict[str, Any]:
    """How page.js draws a metric: as a share in percent, on a logarithmic axis, or as it is."""
    if name == SIGN_ERROR:
        return {
            "name": name,
            "label": "wrong signs in the decision (%)",
            "share": True,
            "log": False,
        }
    metric = next(metric for metric in panel.members[0].metrics if metric.name == name)
    may_be_log = not metric.is_share and not metric.more_is_better
    log = may_be_log and not _has_negative(panel, name)
    about_axis = [metric.unit] if metric.unit else []
    if log:
        about_axis.append("log scale")
    label = f"test {name}"
    if about_axis:
        label += f" ({', '.join(about_axis)})"
    return {
        "name": name,
        "label": label,
        "share": metric.is_share,
        "log": log,
    }


def _has_negative(panel: Panel, name: str) -> bool:
    return any(mean < 0 for member in panel.members for mean in member.curve(name).mean)


def _series(id: str, experiment: Experiment, panel: Panel, marks: Marks) -> dict[str, Any]:
    label = marks.name(experiment) if marks.by_curve else experiment.label
    label += experiment.mark
    sizes = batch_label(experiment.settings["batch_sizes"])
    return {
        "id": id,
        "label": label,
        "title": f"batch sizes {sizes}; seeds: {len(experiment.runs)}",
        "color": marks.color(experiment),
        "dashes": marks.dash(experiment),
        "fall": _fall(experiment, panel),
        "curves": {name: _points(experiment.curve(name)) for name in _sources(experiment)},
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


def _sources(experiment: Experiment) -> list[str]:
    """What an experiment may have measured, the most important first."""
    return [*(metric.name for metric in experiment.metrics), SIGN_ERROR]


def _names(experiments: list[Experiment]) -> list[str]:
    """What an experiment did measure."""
    sources = unique(name for experiment in experiments for name in _sources(experiment))
    measured = set()
    for experiment in experiments:
        for name in _sources(experiment):
            if experiment.curve(name).rounds:
                measured.add(name)
    return [name for name in sources if name in measured]


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
    command = escape(shlex.join(train_command(experiment.runs[0]["config"])))
    label = escape(experiment.label + experiment.mark)
    panel = escape(experiment.panel)
    return (
        f"<details><summary>{label} <small>{panel}</small></summary>"
        f'<pre class="command"><code>{command}</code></pre><pre>{text}</pre></details>'
    )
