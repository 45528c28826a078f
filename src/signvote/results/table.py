"""Results as CSV, for spreadsheets: a column for each setting of a run, then one for each measured value."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

from signvote.metrics import USUAL, metrics_of
from signvote.results.files import Result, Results, current
from signvote.results.lengths import running_totals
from signvote.settings import SETTINGS

SUMS = ("bytes_up", "bytes_down")  # summed over all workers and rounds
BEFORE = ("status", "round")  # the metrics
AFTER = ("sign_error", *SUMS)
GIVEN = tuple(name for name in SETTINGS if name not in (*BEFORE, *AFTER))
FORMULA = ("=", "+", "-", "@")  # the start of a text that a spreadsheet would compute
COLUMNS = (*GIVEN, *BEFORE, *(metric.name for metric in USUAL), *AFTER)  # of results of classifiers


def to_csv(results: Results) -> str:
    """A row per evaluation of each run; bytes are summed over all workers and all rounds so far.

    Each metric is a column. A metric called like a setting has "measured" before its name.
    """
    runs = current(results)["runs"]
    measured = [metric for run in runs for metric in metrics_of(run)]
    metrics = dict.fromkeys(_column(metric.name) for metric in measured)
    columns = (*GIVEN, *BEFORE, *metrics, *AFTER)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writerow({name: _text(name) for name in columns})
    for run in runs:
        writer.writerows(_rows(run))
    return text.getvalue()


def _column(metric: str) -> str:
    return f"measured {metric}" if metric in GIVEN else metric


def _rows(run: Result) -> Iterator[dict[str, Any]]:
    shared = {name: _cell(run["config"].get(name)) for name in GIVEN}
    shared["status"] = _cell(run["status"])
    errors = _sign_errors(run.get("sign_error", {}))
    found = run["evaluations"]
    if not found:
        return
    rounds = found["round"]
    columns = {_column(metric.name): found[metric.name] for metric in metrics_of(run)}
    for name in SUMS:
        columns[name] = running_totals(run[name], rounds)
    for i, t in enumerate(rounds):
        row = {"round": t, "sign_error": errors.get(t)}
        for name, values in columns.items():
            row[name] = values[i]
        yield shared | row


def _sign_errors(measured: dict[str, list[Any]]) -> dict[int, float]:
    """Sign errors by round; empty if they were not measured."""
    rounds = measured.get("round", [])
    errors = measured.get("error", [])
    return dict(zip(rounds, errors, strict=True))


def _cell(value: Any) -> Any:
    """A setting in one cell.

    A spreadsheet computes a text that begins like a formula. An apostrophe before it makes it a text again.

    >>> _cell([4, 4, 8]), _cell({"cap": 2.0}), _cell({}), _cell(-1.5), _cell("=1+1")
    ('4 4 8', '{"cap": 2.0}', '', -1.5, "'=1+1")
    """
    if isinstance(value, list):
        return _text(" ".join(map(str, value)))
    if isinstance(value, dict):
        return json.dumps(value) if value else ""
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    is_formula = text.startswith(FORMULA) and not _is_number(text)
    return f"'{text}" if is_formula else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
