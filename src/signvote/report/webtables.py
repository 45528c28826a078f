"""The tables of the page: final metric, bytes and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from signvote.metrics import Metric
from signvote.report.experiments import Experiment
from signvote.report.finals import Row, by_metric, lead_text, value_text
from signvote.report.labels import unique
from signvote.report.marks import color_of
from signvote.report.markup import NOT_RECORDED, Head, bar, cell, count, row, table

OPTIONAL = ("recipe", "attack", "split", "detail")  # columns shown if a row has an unusual value
USUAL = {None, "", "shared"}
COUNTS = {  # the last columns; a phone has the bytes only in their own section
    "seeds": "number",
    "bytes a vote": "number bytes",
    "fewer than float32": "number bytes",
}
ABOUT_BOLD = (
    "Bold: the {} mean under the same conditions. A difference within the spread may be due to chance."
)
CLEARLY_FEWER = 1.05  # a smaller ratio is shown as the same number of bytes


def finals_table(rows: list[Row], baseline: str) -> str:
    """The final metric of each experiment, and its lead over the baseline if there is one. A table for each metric."""
    tables = [_finals_table(members, metric, baseline) for metric, members in by_metric(rows)]
    return "".join(tables)


def _finals_table(rows: list[Row], metric: Metric, baseline: str) -> str:
    may_vary = ["task", *_unusual(rows)]
    keys = [*_varied(rows, may_vary), "batches", "rule"]
    has_leads = any(row["lead"] is not None for row in rows)
    heads = [Head(key) for key in keys]
    heads.append(Head(metric.name, "number"))
    if has_leads:
        heads.append(Head(f"against {baseline}", "number"))
    counts = [_counts(row) for row in rows]
    varied = _varied(counts, list(counts[0]))
    heads += [Head(key, COUNTS[key]) for key in varied]
    body = []
    for found, texts in zip(rows, counts, strict=True):
        last = [cell(texts[key], COUNTS[key]) for key in varied]
        body.append(_finals_row(found, keys, last, has_leads))
    alike = {key: text for key, text in counts[0].items() if text and key not in varied}
    sentences = [_in_every_row(alike)] if alike else []
    if any(found["best"] for found in rows):
        sentences.append(ABOUT_BOLD.format("highest" if metric.more_is_better else "lowest"))
    if has_leads:
        sentences += _about_leads(metric, baseline)
    note = " ".join(sentences)
    html = table(heads, body, "finals")
    return f'{html}<p class="note">{escape(note)}</p>'


def _in_every_row(texts: Mapping[str, str]) -> str:
    """What would be the same in each row of a column.

    >>> _in_every_row({"seeds": "1", "bytes a vote": "6,426"})
    'In every row: 1 seed, 6,426 bytes a vote.'
    """
    parts = [f"{text} {key if text != '1' else key.removesuffix('s')}" for key, text in texts.items()]
    return f"In every row: {', '.join(parts)}."


def _about_leads(metric: Metric, baseline: str) -> list[str]:
    """How to read leads, in sentences."""
    unit = " in points" if metric.is_share else ""
    sentences = [f"Against {baseline}: the lead under the same conditions{unit}, paired by seed."]
    if not metric.more_is_better:
        sentences.append("Less is better, so a lead is below 0.")
    return sentences


def bytes_table(experiments: list[Experiment]) -> str:
    """Bytes of a worker and round, beside float32; one row for all experiments that sent the same."""
    by_traffic: dict[Traffic, list[Experiment]] = {}
    for experiment in experiments:
        up = round(experiment.bytes_per_worker("bytes_up") or 0)
        down = round(experiment.bytes_per_worker("bytes_down") or 0)
        if up and down:
            traffic = Traffic(
                up=up,
                down=down,
                plain=experiment.float32_bytes(),
            )
            by_traffic.setdefault(traffic, []).append(experiment)
    if not by_traffic:
        return NOT_RECORDED
    heads = [
        Head("rules and batches"),
        Head("signvote above, float32 below", "bars"),
        Head("bytes", "number"),
        Head(""),
    ]
    body = [_bytes_row(members, traffic) for traffic, members in by_traffic.items()]
    return table(heads, body, "wide")


def seconds_table(experiments: list[Experiment]) -> str:
    """Milliseconds of a round by phase."""
    timed = [(experiment, experiment.seconds_per_round()) for experiment in experiments]
    phases = unique(phase for _, seconds in timed for phase in seconds)
    totals = [sum(seconds.values()) for _, seconds in timed]
    longest = max(totals, default=0.0)
    if not longest > 0:
        return NOT_RECORDED
    several_panels = len({experiment.panel for experiment in experiments}) > 1
    body = []
    for experiment, seconds in timed:
        if seconds:
            times = [seconds.get(phase, 0.0) for phase in phases]
            panel = experiment.panel if several_panels else ""
            label = experiment.label + experiment.mark
            body.append(_seconds_row(label, panel, times, longest))
    heads = [Head("rule and batches"), Head("", "bars")]
    for i, phase in enumerate(phases):
        heads.append(Head(phase, "number", color_of(i)))
    heads.append(Head("total", "number"))
    return table(heads, body, "wide")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of a worker and round."""

    up: int
    down: int
    plain: int  # each way, as float32

    @property
    def times_fewer(self) -> float:
        """How many times fewer bytes a vote has than the gradient in float32."""
        return self.plain / self.up


def _unusual(rows: list[Row]) -> list[str]:
    """The optional columns in which a row has an unusual value."""
    unusual = []
    for key in OPTIONAL:
        values = [row[key] for row in rows]
        if any(value not in USUAL for value in values):
            unusual.append(key)
    return unusual


def _varied(rows: Sequence[Mapping[str, object]], keys: list[str]) -> list[str]:
    """The columns in which rows differ: the others, which the headings above name, would push values off a phone."""
    varied = []
    for key in keys:
        values = {row[key] for row in rows}
        if len(values) > 1:
            varied.append(key)
    return varied


def _counts(found: Row) -> dict[str, str]:
    """The texts of the last columns. One that is the same in every row stands in the note below: it would take room."""
    fewer = ""
    if found["times_fewer"] is not None:
        fewer = f"{found['times_fewer']:.1f} times"
    texts = (str(found["seeds"]), count(found["bytes_up"]), fewer)
    return dict(zip(COUNTS, texts, strict=True))


def _finals_row(found: Row, keys: list[str], last: list[str], has_leads: bool) -> str:
    value = f"{value_text(found)} {found['metric'].unit}".rstrip()
    status = f" <small>{escape(found['status'])}</small>" if found["status"] != "done" else ""
    cells = [cell(found[key], key) for key in keys]
    cells.append(cell(value, "number value", status))
    if has_leads:
        cells.append(cell(lead_text(found), "number"))
    return row([*cells, *last], best=found["best"])


def _bytes_row(members: list[Experiment], traffic: Traffic) -> str:
    rules = ", ".join(unique(member.rule for member in members))
    batches = ", ".join(unique(member.batches for member in members))
    width = 100 / traffic.times_fewer
    bars = f'<span class="bar" style="width:{width:.2f}%"></span><span class="bar plain"></span>'
    up = count(traffic.up)
    down = count(traffic.down)
    signvote = f"{up} a vote, {down} a decision"
    float32 = f"{count(traffic.plain)} a gradient"
    fewer = "the same"
    if traffic.times_fewer > CLEARLY_FEWER:
        fewer = f"{traffic.times_fewer:.1f} times fewer"
    cells = [
        cell(f"{rules}; {batches}", "who"),
        cell("", markup=bars),
        cell("", "number", f"{signvote}<br>{float32}"),
        cell("", markup=f'<span class="times">{fewer}</span>'),
    ]
    return row(cells)


def _seconds_row(label: str, panel: str, times: list[float], longest: float) -> str:
    bars = ""
    for i, seconds in enumerate(times):
        percent = 100 * seconds / longest
        bars += bar(percent, color_of(i))
    small = f" <small>{escape(panel)}</small>" if panel else ""
    cells = [
        cell(label, "who", small),
        cell("", markup=f'<span class="stack">{bars}</span>'),
    ]
    for seconds in (*times, sum(times)):
        milliseconds = f"{1000 * seconds:.1f}"
        cells.append(cell(milliseconds, "number"))
    return row(cells)
