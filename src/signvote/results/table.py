"""Results as CSV, for spreadsheets: a column for each setting of a run, then what was measured."""

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

SUMS = ("bytes_up", "bytes_down")  # of all workers since the start
MEASURED = ("status", "round", "accuracy", "loss", "sign_error", *SUMS)
GIVEN = tuple(name for name in SETTINGS if name not in MEASURED)
COLUMNS = (*GIVEN, *MEASURED)


def to_csv(results: Results) -> str:
    """A row per evaluation of each run; bytes are those of all workers since the start."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in current(results)["runs"]:
        writer.writerows(_rows(run))
    return text.getvalue()


def _rows(run: Result) -> Iterator[dict[str, Any]]:
    shared = {name: _cell(run["config"].get(name)) for name in GIVEN}
    shared["status"] = run["status"]
    sent = {name: [0, *accumulate(unpack(run[name]))] for name in SUMS}
    errors = dict(zip(*(run["sign_error"].get(key, ()) for key in ("round", "error")), strict=True))
    measured = (run["evaluations"][key] for key in ("round", "accuracy", "loss"))
    for t, accuracy, loss in zip(*measured, strict=True):
        at = {"round": t, "accuracy": accuracy, "loss": loss, "sign_error": errors.get(t)}
        yield shared | at | {name: values[min(t, len(values) - 1)] for name, values in sent.items()}


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
