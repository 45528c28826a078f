"""The report page: one HTML text that needs nothing else.

Every text from the results is untrusted: it goes through `escape`, or into the JSON block through `embedded`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from signvote.report import trust
from signvote.report.finals import BASELINE, lead_text, table
from signvote.report.groups import SOURCES, Curve, Group, batch_label, groups, unique
from signvote.report.marks import COLOURS, Marks
from signvote.report.panels import Panel, arranged
from signvote.results import Results

OPTIONAL = ("recipe", "attack", "split", "detail")  # columns shown where they tell something


def page(results: Results, baseline: str = BASELINE) -> str:
    """The page as text: curves to explore, final accuracy, trust, bytes, time, configuration."""
    found = groups(results)
    parts = {
        "title": escape(", ".join(unique(str(group.config["task"]) for group in found))),
        "summary": escape(_summary(found)),
        "accuracy": _accuracy(table(results, baseline), baseline),
        "trust": trust.section(found),
        "bytes": _bytes(found),
        "seconds": _seconds(found),
        "command": escape(str(results.get("command", "not recorded"))),
        "versions": escape(_versions(found)),
        "configuration": "".join(map(_configuration, found)),
        "data": embedded({"panels": _panels(found), "metrics": _metrics(found)}),
        "css": _file("page.css"),
        "js": _file("page.js"),
    }
    return Template(_file("page.html")).substitute(parts)


def embedded(data: object) -> str:
    r"""JSON for inside a script element: no text in it can end the element or open a comment.

    >>> print(embedded("</script>"))
    "\u003c/script>"
    """
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def _file(name: str) -> str:
    return files("signvote.report").joinpath(name).read_text("utf-8")


def _summary(found: list[Group]) -> str:
    runs = sum(len(group.runs) for group in found)
    left_out = sum(group.left_out for group in found)
    text = f"{runs} {'run' if runs == 1 else 'runs'}, up to {_reached(found)} rounds."
    return text + (f" {left_out} interrupted left out." if left_out else "")


def _reached(found: list[Group]) -> int:
    return max(group.curve("accuracy").rounds[-1] for group in found)


# The curves: drawn by page.js from this.


def _panels(found: list[Group]) -> list[dict[str, Any]]:
    panels, marks = arranged(found)
    number = {id(group): i for i, group in enumerate(found)}
    return [
        {
            "title": panel.title,
            "frame": list(panel.frame) if panel.fixed else None,
            "series": [_series(number[id(group)], group, panel, marks) for group in panel.members],
        }
        for panel in panels
    ]


def _series(i: int, group: Group, panel: Panel, marks: Marks) -> dict[str, Any]:
    fall, label = panel.fall(group), marks.name(group) if marks.by_curve else group.label
    return {
        "id": f"series-{i}",
        "label": label + (" (interrupted)" if group.interrupted else ""),
        "title": f"batch sizes {batch_label(group.config['batch_sizes'])}; seeds: {len(group.runs)}",
        "colour": marks.colour(group),
        "dashes": marks.dash(group),
        "fall": fall and {"round": fall.round, "text": fall.text},
        "curves": {metric: _points(group.curve(metric)) for metric in SOURCES},
    }


def _points(curve: Curve) -> dict[str, list[Any]]:
    return {
        "round": list(curve.rounds),
        "mean": _finite(curve.mean),
        "low": _finite(curve.low),
        "high": _finite(curve.high),
    }


def _finite(values: Iterable[float]) -> list[float | None]:
    return [round(value, 6) if math.isfinite(value) else None for value in values]


def _metrics(found: list[Group]) -> list[str]:
    return [metric for metric in SOURCES if any(group.curve(metric).rounds for group in found)]


# The tables.


def _accuracy(rows: list[dict[str, Any]], baseline: str) -> str:
    usual = {None, "", "shared"}
    told = [key for key in OPTIONAL if any(row[key] not in usual for row in rows)]
    keys = ["task", *told, "batches", "rule"]
    led = any(row["lead"] is not None for row in rows)
    body = "".join(
        _tr([_td(row[key], key) for key in keys] + _accuracy_cells(row, led), best=row["best"])
        for row in rows
    )
    heads = [
        *keys,
        "#accuracy",
        *[f"#against {baseline}"] * led,
        "#seeds",
        "#bytes up",
        "#fewer than float32",
    ]
    note = "Bold: the highest mean under the same conditions; within the spread it may be chance."
    note += f" Against {baseline} under the same conditions: in points, paired by seed." if led else ""
    return f'{_table(heads, body)}<p class="note">{escape(note)}</p>'


def _accuracy_cells(row: dict[str, Any], led: bool) -> list[str]:
    spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.2f}"
    state = " <small>interrupted</small>" if row["status"] == "interrupted" else ""
    return [
        _td(f"{100 * row['accuracy']:.2f}{spread} %", "number accuracy", state),
        *[_td(lead_text(row), "number")] * led,
        _td(row["seeds"], "number"),
        _td(_count(row["bytes_up"]), "number"),
        _td("" if row["times_fewer"] is None else f"{row['times_fewer']:.1f} times", "number"),
    ]


def _bytes(found: list[Group]) -> str:
    """One row for all groups that sent the same."""
    same: dict[tuple[float, float, int], list[Group]] = {}
    for group in found:
        up, down = group.bytes_per_worker("bytes_up"), group.bytes_per_worker("bytes_down")
        if up and down:
            same.setdefault((round(up), round(down), group.float32_bytes()), []).append(group)
    body = "".join(_bytes_row(members, *sent) for sent, members in same.items())
    return (
        _table(["who", "=signvote, and below it float32", "#bytes", ""], body, "wide") if same else _nothing()
    )


def _bytes_row(members: list[Group], up: float, down: float, plain: int) -> str:
    who = f"{', '.join(unique(g.rule for g in members))}; {', '.join(unique(g.batches for g in members))}"
    width = f"{50 * (up + down) / plain:.2f}%"
    bars = f'<span class="bar" style="width:{width}"></span><span class="bar plain"></span>'
    numbers = f"{_count(up)} up, {_count(down)} down<br>{_count(plain)} each way"
    fewer = 2 * plain / (up + down)
    times = f'<span class="times">{f"{fewer:.1f} times fewer" if fewer > 1.05 else "the same"}</span>'
    return _tr(
        [_td(who, "who"), f"<td>{bars}</td>", f'<td class="number">{numbers}</td>', f"<td>{times}</td>"]
    )


def _seconds(found: list[Group]) -> str:
    by_group = [(group, group.seconds_per_round()) for group in found]
    phases = unique(phase for _, seconds in by_group for phase in seconds)
    longest = max((sum(seconds.values()) for _, seconds in by_group), default=0.0)
    if not longest > 0:
        return _nothing()
    several = len({group.panel for group in found}) > 1
    body = "".join(_seconds_row(g, seconds, phases, longest, several) for g, seconds in by_group if seconds)
    heads = ["who", "=", *(f"#{phase}" for phase in phases), "#total"]
    return _table(heads, body, "wide", phases)


def _seconds_row(
    group: Group, seconds: dict[str, float], phases: list[str], longest: float, several: bool
) -> str:
    times = [seconds.get(phase, 0.0) for phase in phases]
    bars = "".join(
        f'<span style="width:{100 * t / longest:.2f}%;background:{COLOURS[i % len(COLOURS)]}"></span>'
        for i, t in enumerate(times)
    )
    small = f" <small>{escape(group.panel)}</small>" if several else ""
    cells = [_td(group.label, "who", small), f'<td><span class="stack">{bars}</span></td>']
    return _tr(cells + [_td(f"{1000 * t:.1f}", "number") for t in (*times, sum(times))])


# The configuration.


def _versions(found: list[Group]) -> str:
    texts = unique(
        ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items())
        for group in found
        for run in group.runs
    )
    machines = unique(text for group in found if (text := group.machine()))
    ran = f" Ran on {'; '.join(machines)}." if machines else ""
    return ("Made with " + "; ".join(texts) + "." if any(texts) else "Versions were not recorded.") + ran


def _configuration(group: Group) -> str:
    seeds = ", ".join(str(run["config"]["seed"]) for run in group.runs)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in group.config.items()]
    lines += [f'"seeds": [{seeds}]', f'"coordinates": {json.dumps(group.runs[0]["coordinates"])}']
    lines += [f'"ran on": {json.dumps(group.machine())}'] if group.machine() else []
    return (
        f"<details><summary>{escape(group.label)} <small>{escape(group.panel)}</small></summary>"
        f"<pre>{escape(chr(10).join(lines))}</pre></details>"
    )


# Small pieces of HTML.


def _table(heads: Sequence[str], body: str, kind: str = "", phases: Sequence[str] = ()) -> str:
    """A head that starts with # is a column of numbers, one that starts with = a column of bars."""
    kinds = {"#": ' class="number"', "=": ' class="bars"'}
    cells = "".join(
        f'<th scope="col"{kinds.get(head[:1], "")}>{_swatch(head, phases)}{escape(head.lstrip("#="))}</th>'
        for head in heads
    )
    inside = f"<thead><tr>{cells}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="{kind}">{inside}</table></div>'


def _swatch(head: str, phases: Sequence[str]) -> str:
    if head[1:] not in phases:
        return ""
    colour = COLOURS[phases.index(head[1:]) % len(COLOURS)]
    return f'<span class="phase" style="background:{colour}"></span>'


def _tr(cells: list[str], *, best: bool = False) -> str:
    return f'<tr class="{"best" if best else ""}">{"".join(cells)}</tr>'


def _td(value: object, kind: str = "", after: str = "") -> str:
    """A cell; `after` is HTML and stays as it is."""
    text = "" if value is None else escape(str(value))
    return f'<td class="{kind}">{text}{after}</td>'


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _nothing() -> str:
    return "<p>Not recorded.</p>"
