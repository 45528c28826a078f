"""The final table as Markdown, for a README: a row per rule, a column per batch mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from signvote.report.experiments import Experiment, batch_order, experiments_of, machines_of
from signvote.report.finals import Row, table
from signvote.report.labels import unique
from signvote.report.measures import spread_text
from signvote.results import Results

SETTINGS = ("task", "recipe", "attack", "split", "detail")  # columns, if the rows differ in them
ESCAPES = {"\\": "\\\\", "|": "\\|", "<": "&lt;", "\n": " "}  # the backslash first
Line = dict[str, Row]  # the rows of a rule, by batches


def markdown(results: Results) -> str:
    """Final accuracy, mean and spread over the seeds, and the bytes of a vote."""
    experiments = experiments_of(results)
    rows = table(results)
    modes = batch_order(experiments)
    titles = {experiment.batches: experiment.full_batches for experiment in experiments}
    settings = [name for name in SETTINGS if len({row[name] for row in rows}) > 1]
    words = ["rule", *settings]
    numbers = [*(titles[mode] for mode in modes), "bytes a vote", "fewer than float32"]
    rules = unique(experiment.rule for experiment in experiments)
    table_lines = [
        words + numbers,
        ["---"] * len(words) + ["---:"] * len(numbers),
        *(_cells(line, words, modes) for line in _lines(rows, rules)),
    ]
    return "\n".join([_caption(experiments), "", *map(_joined, table_lines), ""])


def _lines(rows: list[Row], rules: list[str]) -> Iterable[Line]:
    """The rows that differ in nothing but their batches, together; by rule."""
    lines: dict[tuple[Any, ...], Line] = {}
    for row in sorted(rows, key=lambda row: rules.index(row["rule"])):
        settings = tuple(row[name] for name in ("rule", *SETTINGS))
        line = lines.setdefault(settings, {})
        line[row["batches"]] = row
    return lines.values()


def _caption(experiments: list[Experiment]) -> str:
    tasks = unique(_plain(experiment.settings["task"]) for experiment in experiments)
    rounds = unique(str(experiment.last_round()) for experiment in experiments)
    seeds = _seeds({len(experiment.runs) for experiment in experiments})
    machines = _plain(machines_of(experiments))
    return f"{', '.join(tasks)}: test accuracy in % after {' or '.join(rounds)} rounds, {seeds}.{machines}"


def _seeds(numbers: set[int]) -> str:
    """The number of seeds, and what stands after the ± sign."""
    fewest = min(numbers)
    most = max(numbers)
    if most == 1:
        return "1 seed"
    text = f"{most} seeds" if fewest == most else f"{fewest} to {most} seeds"
    text += ", mean ± standard deviation"
    if 2 in numbers:
        text += " (of two seeds, their distance)"
    return text


def _cells(line: Line, words: list[str], modes: list[str]) -> list[str]:
    any_row = next(iter(line.values()))
    known = [row for mode in modes if (row := line.get(mode)) and row["bytes_up"] is not None]
    return [
        *(_plain(any_row[name]) for name in words),
        *(_accuracy(line.get(mode)) for mode in modes),
        _range([row["bytes_up"] for row in known], "{:,.0f}"),
        _range([row["times_fewer"] for row in known], "{:.1f}"),
    ]


def _accuracy(row: Row | None) -> str:
    if row is None:
        return ""
    text = f"{100 * row['accuracy']:.2f}{spread_text(row['spread'])}"
    if row["status"] != "done":
        text += " (interrupted)"
    return text


def _range(values: list[float], form: str) -> str:
    """One number, or from the lowest to the highest."""
    if not values:
        return ""
    ends = (min(values), max(values))
    return " to ".join(unique(form.format(end) for end in ends))


def _plain(value: object) -> str:
    """Text that can neither break the table nor become a tag."""
    text = "" if value is None else str(value)
    for character, escaped in ESCAPES.items():
        text = text.replace(character, escaped)
    return text


def _joined(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
