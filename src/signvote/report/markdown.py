"""The final table as Markdown, for a README: a row per rule, a column per batch mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from signvote.metrics import Metric
from signvote.report.experiments import Experiment, batch_order, experiments_of, machines_of
from signvote.report.finals import SETTINGS, Row, by_metric, table, value_text, varying_settings
from signvote.report.labels import unique
from signvote.report.notices import noticed
from signvote.results import Results

ESCAPES = {
    "\\": "\\\\",
    "|": "\\|",
    "<": "&lt;",
    "\n": " ",
}  # the backslash first
Line = dict[str, Row]  # the rows of a rule, by batches


def markdown(results: Results) -> str:
    """The final metric, mean and spread over the seeds, and the bytes of a vote; a table for each metric."""
    experiments = experiments_of(results)
    text: list[str] = []
    for metric, rows in by_metric(table(results)):
        members = [experiment for experiment in experiments if experiment.metric == metric]
        text += [*_table(members, rows, metric), ""]
    text[-1:] = [*_notices(experiments), ""]
    return "\n".join(text)


def _table(experiments: list[Experiment], rows: list[Row], metric: Metric) -> Iterable[str]:
    modes = batch_order(experiments)
    titles = {experiment.batches: experiment.full_batches for experiment in experiments}
    words = ["rule", *varying_settings(rows)]
    numbers = [titles[mode] for mode in modes]
    numbers.append("bytes a vote")
    numbers.append("fewer than float32")
    left = ["---"] * len(words)
    right = ["---:"] * len(numbers)
    yield _caption(experiments, metric)
    yield ""
    yield _joined(words + numbers)
    yield _joined(left + right)
    rules = unique(experiment.rule for experiment in experiments)
    for line in _lines(rows, rules):
        yield _joined(_cells(line, words, modes))


def _notices(experiments: list[Experiment]) -> Iterable[str]:
    """A line for each run in which something was noticed about workers: the first notice, and how many follow."""
    runs = noticed(experiments)
    if runs:
        yield "\nNotices:\n"
    for run in runs:
        first, *others = run.texts
        name = _plain(run.run)
        conditions = _plain(run.conditions)
        more = f" (and {len(others)} more)" if others else ""
        yield f"- {name} ({conditions}): {_plain(first)}{more}"


def _lines(rows: list[Row], rules: list[str]) -> Iterable[Line]:
    """The rows that differ in nothing but their batches, together; by rule."""
    lines: dict[tuple[Any, ...], Line] = {}
    by_rule = sorted(rows, key=lambda row: rules.index(row["rule"]))
    for row in by_rule:
        settings = [row[name] for name in SETTINGS]
        which = (row["rule"], *settings)
        line = lines.setdefault(which, {})
        line[row["batches"]] = row
    return lines.values()


def _caption(experiments: list[Experiment], metric: Metric) -> str:
    task_names = [_plain(experiment.settings["task"]) for experiment in experiments]
    last_rounds = [str(experiment.last_round()) for experiment in experiments]
    tasks = ", ".join(unique(task_names))
    rounds = " or ".join(unique(last_rounds))
    seeds = _seeds({len(experiment.runs) for experiment in experiments})
    machines = _plain(machines_of(experiments))
    measured = _plain(metric.name)
    if metric.unit:
        measured += f" in {_plain(metric.unit)}"
    if not metric.more_is_better:
        measured += f" ({metric.direction})"
    return f"{tasks}: test {measured} after {rounds} rounds, {seeds}.{machines}"


def _seeds(numbers: set[int]) -> str:
    """The number of seeds, and what stands after the ± sign."""
    fewest = min(numbers)
    most = max(numbers)
    if most == 1:
        return "1 seed"
    text = f"{most} seeds"
    if fewest < most:
        text = f"{fewest} to {text}"
    text += ", mean ± standard deviation"
    if 2 in numbers:
        text += " (of two seeds, their distance)"
    return text


def _cells(line: Line, words: list[str], modes: list[str]) -> list[str]:
    any_row = next(iter(line.values()))
    known = [row for row in line.values() if row["bytes_up"] is not None]
    sizes = [row["bytes_up"] for row in known]
    ratios = [row["times_fewer"] for row in known]
    cells = [_plain(any_row[name]) for name in words]
    cells += [_value(line.get(mode)) for mode in modes]
    cells.append(_range(sizes, "{:,.0f}"))
    cells.append(_range(ratios, "{:.1f}"))
    return cells


def _value(row: Row | None) -> str:
    if row is None:
        return ""
    text = value_text(row)
    status = row["status"]
    return text if status == "done" else f"{text} ({status})"


def _range(values: list[float], form: str) -> str:
    """One number, or from the lowest to the highest."""
    if not values:
        return ""
    lowest = form.format(min(values))
    highest = form.format(max(values))
    return " to ".join(unique([lowest, highest]))


def _plain(value: object) -> str:
    """Text that can neither break the table nor become a tag."""
    text = "" if value is None else str(value)
    for character, escaped in ESCAPES.items():
        text = text.replace(character, escaped)
    return text


def _joined(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
