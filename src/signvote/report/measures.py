"""What a run measured, by round, and how the seeds of an experiment are summarized: mean, spread, band."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from signvote.results import Result

SOURCES = {  # metric -> where a result keeps it
    "accuracy": ("evaluations", "accuracy"),
    "loss": ("evaluations", "loss"),
    "sign error": ("sign_error", "error"),
}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric by round: the mean over the seeds, and the band around it."""

    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def number(value: float | None) -> float:
    """A number from JSON, where None stands for nan."""
    if value is None:
        return math.nan
    return float(value)


def measured(run: Result, metric: str) -> dict[int, float]:
    """A metric of a run by round. A value that is not a number is nan."""
    source, key = SOURCES[metric]
    found = run.get(source, {})
    rounds = found.get("round", ())
    values = found.get(key, ())
    return {t: number(value) for t, value in zip(rounds, values, strict=False)}


def finite_accuracies(run: Result) -> list[float]:
    """The accuracies of a run, in the order of the rounds, without nan."""
    values = measured(run, "accuracy").values()
    return [value for value in values if math.isfinite(value)]


def curve_of(runs: Sequence[Result], metric: str) -> Curve:
    """The curve of several seeds, at the rounds that all of them measured."""
    by_run = [measured(run, metric) for run in runs]
    shared = set.intersection(*(set(values) for values in by_run))
    rounds = sorted(shared)
    points = [[values[t] for values in by_run] for t in rounds]
    bands = [band(values) for values in points]
    return Curve(
        rounds=rounds,
        mean=[fmean(values) for values in points],
        low=[low for low, _ in bands],
        high=[high for _, high in bands],
    )


def spread_of(values: Sequence[float]) -> float | None:
    """Sample standard deviation. The spread of two values is their distance; one value has none.

    >>> spread_of([0.5]), spread_of([1.0, 3.0]), spread_of([1.0, 2.0, 3.0])
    (None, 2.0, 1.0)
    """
    if len(values) < 2:
        return None
    if len(values) == 2:
        return max(values) - min(values)
    return stdev(values)


def band(values: Sequence[float]) -> tuple[float, float]:
    """The shaded range: mean -+ sample standard deviation, cut at the lowest and the highest value."""
    low = min(values)
    high = max(values)
    are_numbers = all(map(math.isfinite, values))
    if len(values) < 3 or not are_numbers:
        return low, high
    mean = fmean(values)
    deviation = stdev(values)
    below = max(low, mean - deviation)
    above = min(high, mean + deviation)
    return below, above


def mean_text(mean: float, spread: float | None, sign: str = "") -> str:
    """A mean and its spread in percent or points.

    >>> mean_text(0.9251, 0.003), mean_text(0.0125, None, sign="+")
    ('92.51 ± 0.30', '+1.25')
    """
    percent = 100 * mean
    return f"{percent:{sign}.2f}{_spread_text(spread)}"


def _spread_text(spread: float | None) -> str:
    if spread is None:
        return ""
    percent = 100 * spread
    return f" ± {percent:.2f}"
