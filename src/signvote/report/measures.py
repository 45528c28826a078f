"""What a run measured, by round, and how the seeds of an experiment are summarized: mean, spread, band."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from signvote.metrics import Metric
from signvote.results import Result

SIGN_ERROR = "sign error"  # the share of wrong signs in a decision, which is no metric of a task


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


def measured(run: Result, name: str) -> dict[int, float]:
    """A metric of a run, or its sign error, by round. A value that is not a number is nan."""
    found = run["evaluations"]
    values = found.get(name, ())
    if name == SIGN_ERROR:
        found = run.get("sign_error", {})
        values = found.get("error", ())
    rounds = found.get("round", ())
    pairs = zip(rounds, values, strict=False)
    return {t: number(value) for t, value in pairs}


def finite(run: Result, name: str) -> list[float]:
    """The values of a metric of a run, in the order of the rounds, without those that are no numbers."""
    values = measured(run, name).values()
    return [value for value in values if math.isfinite(value)]


def mean_of(values: Sequence[float]) -> float:
    """The mean. It is no number if one of the values is none.

    >>> mean_of([1.0, 2.0]), mean_of([1.0, math.inf])
    (1.5, nan)
    """
    return fmean(values) if all(map(math.isfinite, values)) else math.nan


def curve_of(runs: Sequence[Result], metric: str) -> Curve:
    """The curve of several seeds, at the rounds that all of them measured."""
    by_run = [measured(run, metric) for run in runs]
    shared = set.intersection(*(set(values) for values in by_run))
    rounds = sorted(shared)
    points = [[values[t] for values in by_run] for t in rounds]
    bands = [band(values) for values in points]
    return Curve(
        rounds=rounds,
        mean=[mean_of(values) for values in points],
        low=[low for low, _ in bands],
        high=[high for _, high in bands],
    )


def spread_of(values: Sequence[float]) -> float | None:
    """Sample standard deviation. The spread of two values is their distance; one value has none.

    >>> spread_of([0.5]), spread_of([1.0, 3.0]), spread_of([1.0, 2.0, 3.0])
    (None, 2.0, 1.0)
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
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


def mean_text(metric: Metric, mean: float, spread: float | None, sign: str = "") -> str:
    """A mean and its spread: in percent or points for a share, else in the unit of the metric, which is not written.

    >>> from signvote.metrics import ACCURACY, LOSS
    >>> mean_text(ACCURACY, 0.9251, 0.003), mean_text(ACCURACY, 0.0125, None, sign="+")
    ('92.51 ± 0.30', '+1.25')
    >>> mean_text(LOSS, 1.0214, 0.003), mean_text(LOSS, -0.366, None, sign="+")
    ('1.021 ± 0.003', '-0.366')
    """
    if metric.is_share:
        text = f"{100 * mean:{sign}.2f}"
        return text if spread is None else f"{text} ± {100 * spread:.2f}"
    digits = 3 if sign else 4  # significant ones: a difference is known less well
    text = f"{mean:{sign}.{digits}g}"
    return text if spread is None else f"{text} ± {spread:.2g}"
