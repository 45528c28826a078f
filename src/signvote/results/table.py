"""Results as CSV, for spreadsheets: a column for each setting of a run, then one for each measured value."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from signvote.results.files import Result, Results, current
from signvote.results.lengths import unpack
from signvote.settings import SETTINGS

SUMS = ("bytes_up", "bytes_down")  # summed over all workers and rounds
MEASURED = ("status", "round", "accuracy", "loss", "sign_error", *SUMS)
GIVEN = tuple(name for name in SETTINGS if name not in MEASURED)
COLUMNS = (*GIVEN, *MEASURED)


def to_csv(results: Results) -> str:
    """A row per evaluation of each run; bytes are summed over all workers and all rounds so far."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in current(results)["runs"]:
        writer.writerows(_rows(run))
    return text.getvalue()


def _rows(run: Result) -> Iterator[dict[str, Any]]:
    shared = {name: _cell(run["config"].get(name)) for name in GIVEN}
    shared["status"] = run["status"]
    sums = {name: [0, *accumulate(unpack(run[name]))] for name in SUMS}
    errors = _sign_errors(run["sign_error"])
    found = run["evaluations"]
    for t, accuracy, loss in zip(found["round"], found["accuracy"], found["loss"], strict=True):
        row = {"round": t, "accuracy": accuracy, "loss": loss, "sign_error": errors.get(t)}
        for name, by_round in sums.items():
            row[name] = by_round[min(t, len(by_round) - 1)]
        yield shared | row


def _sign_errors(measured: dict[str, list[Any]]) -> dict[int, float]:
    """Sign errors by round; empty if they were not measured."""
    rounds = measured.get("round", [])
    errors = measured.get("error", [])
    return dict(zip(rounds, errors, strict=True))


def _cell(value: Any) -> Any:
    """A setting in one cell.

    >>> _cell([4, 4, 8]), _cell({"cap": 2.0}), _cell({})
    ('4 4 8', '{"cap": 2.0}', '')
    """
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, dict):
        return json.dumps(value) if value else ""
    return value
