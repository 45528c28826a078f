"""The cells of the tables: runs by row and column, and how their values are shown."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

from signvote.results import Result

Key = Callable[[Result], Hashable | None]
Value = Callable[[Result], float]
Cells = dict[Any, dict[Any, list[float]]]  # row -> column -> the values of the seeds


def mode_of(run: Result) -> Any:
    """The batch mode, or 'none'."""
    return run["config"].get("mode") or "none"


def variant(run: Result) -> str:
    """The rule and its options."""
    name = str(run["config"]["rule"])
    for key, value in run["config"]["options"].items():
        if key != "zero_is_symbol":
            name += f", {key} {value}"
    return name


def last(run: Result) -> float:
    """The last accuracy in %."""
    accuracies = run["evaluations"]["accuracy"]
    return 100 * float(accuracies[-1])


def attackers(run: Result) -> int:
    """The number of attackers."""
    attack = run["config"]["attack"]
    if not attack:
        return 0
    return int(attack.split(":")[1])


def attack_name(run: Result) -> str:
    """The name of the attack, or 'clean'."""
    attack = run["config"]["attack"]
    if not attack:
        return "clean"
    return str(attack.split(":")[0])


def shown(values: Sequence[float], digits: int = 1) -> str:
    """Mean and standard deviation."""
    if not values:
        return ""
    text = f"{fmean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {stdev(values):.{digits}f}"
    return text


def pivot(runs: Iterable[Result], row: Key, column: Key, value: Value = last) -> Cells:
    """Values of runs by row and column."""
    cells: Cells = {}
    for run in runs:
        columns = cells.setdefault(row(run), {})
        values = columns.setdefault(column(run), [])
        values.append(value(run))
    return cells
