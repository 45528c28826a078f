"""Results as CSV, for spreadsheets: a column for each setting of a run, then one for each measured value."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

from signvote.results.files import Result, Results, current
from signvote.results.lengths import running_totals
from signvote.settings import SETTINGS

SUMS = ("bytes_up", "bytes_down")  # summed over all workers and rounds
MEASURED = ("status", "round", "accuracy", "loss", "sign_error", *SUMS)
GIVEN = tuple(name for name in SETTINGS if name not in MEASURED)
FORMULA = ("=", "+", "-", "@")  # the start of a text that a spreadsheet would compute
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
    shared["status"] = _cell(run["status"])
    errors = _sign_errors(run.get("sign_error", {}))
    found = run["evaluations"]
    if not found:
        return
    sums = {name: running_totals(run[name], found["round"]) for name in SUMS}
    columns = (found["round"], found["accuracy"], found["loss"])
    for i, (t, accuracy, loss) in enumerate(zip(*columns, strict=True)):
        row = {"round": t, "accuracy": accuracy, "loss": loss, "sign_error": errors.get(t)}
        row |= {name: by_round[i] for name, by_round in sums.items()}
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
    return f"'{text}" if text.startswith(FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
