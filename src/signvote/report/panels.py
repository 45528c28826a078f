"""Which curves share a panel, and the range of values it shows: the same in the figure and on the page.

Few curves: a panel per task, recipe and attack, with a color per batch mode, as in the paper. Many curves: a
panel per batch mode, all with the same range, with a color per rule, so that rivals are side by side.

A run collapses if its accuracy is good at first and then drops to chance. Its curve would compress all others
into a stripe. So the range then covers the usual accuracies of the other runs, and a mark at its lower edge shows
the collapse. A line below the panel, where no curve is, states the lowest accuracy. This needs a metric that is a share
and of which more is better; the range of another metric covers all curves, on a logarithmic axis if they span decades.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from statistics import median

from signvote.metrics import Metric, metrics_of
from signvote.report.experiments import Experiment, batch_order
from signvote.report.labels import unique
from signvote.report.marks import Marks, marks_of
from signvote.report.measures import Curve, finite, measured
from signvote.results import Result

MOST_CURVES = 8  # in a panel; with more, there is a panel per batch mode
ROOM_BELOW = 0.25  # below the lowest usual accuracy, as a share of the height above it
LEAST_MARGIN = 0.005  # above and below the curves, in accuracy
MARGIN = 0.05  # the same, as a share of the height; the only margin of a metric that is no share
DECADES = 20.0  # a metric whose highest value is so many times its lowest has a logarithmic axis


@dataclass(frozen=True, kw_only=True)
class Fall:
    """The seeds of an experiment that collapsed to an accuracy below the frame."""

    seeds: int
    of: int
    round: int  # of the lowest accuracy
    accuracy: float  # the lowest

    @property
    def text(self) -> str:
        """The label of the mark."""
        percent = 100 * self.accuracy
        text = f"down to {percent:.0f} %"
        if self.of > 1:
            text += f" ({self.seeds} of {self.of} seeds)"
        return text


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves drawn together."""

    title: str
    members: list[Experiment]
    frame: tuple[float, float]  # lowest and highest value shown
    fixed: bool  # whether the frame is not simply the range of the members' curves

    @property
    def metric(self) -> Metric:
        """The metric of the frame."""
        return self.members[0].metric

    @property
    def is_log(self) -> bool:
        """Whether the axis is logarithmic."""
        bottom, top = self.frame
        return not self.metric.is_share and 0 < bottom * DECADES < top

    def fall(self, experiment: Experiment) -> Fall | None:
        """The collapse of an experiment to below the frame; None if there is none."""
        if not can_fall(self.metric):
            return None
        bottom, top = self.frame
        lows = [lowest(run, top) for run in experiment.runs]
        collapsed = [low for low in lows if low is not None]
        if not collapsed:
            return None
        accuracy, round = min(collapsed)
        if accuracy >= bottom:
            return None
        return Fall(
            seeds=len(collapsed),
            of=len(experiment.runs),
            round=round,
            accuracy=accuracy,
        )


def arranged(experiments: list[Experiment]) -> tuple[list[Panel], Marks]:
    """The panels, in order, and how each curve is drawn."""
    modes = batch_order(experiments)
    curves = Counter(experiment.panel for experiment in experiments)
    crowded = max(curves.values()) > MOST_CURVES
    if crowded and len(modes) > 1:
        return arranged_by_mode(experiments)
    return _panels_by_title(experiments), marks_of(experiments)


def arranged_by_mode(experiments: list[Experiment]) -> tuple[list[Panel], Marks]:
    """A panel per batch mode, and a color per rule."""
    modes = batch_order(experiments)
    return _panels_by_mode(experiments, modes), marks_of(experiments, by_curve=True)


def can_fall(metric: Metric) -> bool:
    """Whether a run can collapse: its metric is a share, and more is better."""
    return metric.is_share and metric.more_is_better


def lowest(run: Result, top: float) -> tuple[float, int] | None:
    """Value and round of the lowest point of a run that collapsed; None if it did not.

    A run collapsed if it reached half of `top` and later fell below it, or if it never reached a third of it.
    """
    points = []
    for t, accuracy in measured(run, metrics_of(run)[0].name).items():
        if t and math.isfinite(accuracy):
            points.append((accuracy, t))
    if not points:
        return None
    half = top / 2
    since_good = list(dropwhile(lambda point: point[0] < half, points))
    if not since_good:
        highest, _ = max(points)
        return min(points) if highest < top / 3 else None
    low = min(since_good)
    return low if low[0] < half else None


def apart(places: Sequence[float], width: float) -> list[float]:
    """Places for marks of a width, moved to the right if one would hide another.

    >>> apart([500, 750, 500], 25)
    [500, 750, 525]
    """
    drawn: list[float] = []
    for place in places:
        while any(abs(place - other) < width for other in drawn):
            place += width
        drawn.append(place)
    return drawn


def _panels_by_title(experiments: list[Experiment]) -> list[Panel]:
    panels = []
    for title in unique(experiment.panel for experiment in experiments):
        members = [experiment for experiment in experiments if experiment.panel == title]
        panels.append(_panel(title, members, members))
    return panels


def _panels_by_mode(experiments: list[Experiment], modes: list[str]) -> list[Panel]:
    panels = []
    for scene in unique(experiment.scene for experiment in experiments):
        rivals = [experiment for experiment in experiments if experiment.scene == scene]
        for mode in modes:
            members = [experiment for experiment in rivals if experiment.batches == mode]
            if members:
                title = f"{scene} · {members[0].full_batches}"
                panels.append(_panel(title, members, rivals))
    return panels


def _panel(title: str, members: list[Experiment], rivals: list[Experiment]) -> Panel:
    """A panel in the frame of all rivals."""
    low, high = _range(rivals)
    runs = [run for experiment in rivals for run in experiment.runs]
    collapsed = can_fall(members[0].metric) and any(lowest(run, high) for run in runs)
    if collapsed:
        low, high = _without_collapsed(runs, low, high)
    shared = len(rivals) > len(members)
    return Panel(
        title=title,
        members=members,
        frame=(low, high),
        fixed=collapsed or shared,
    )


def _range(experiments: list[Experiment]) -> tuple[float, float]:
    """All bands after round 0, with a margin: the untrained model would only waste room."""
    metric = experiments[0].metric
    values: list[float] = []
    for experiment in experiments:
        values += _trained(experiment.curve(metric.name))
    if not values:
        values = [0.0, 1.0]
    bottom = min(values)
    top = max(values)
    if metric.is_share:
        margin = max(LEAST_MARGIN, MARGIN * (top - bottom))
        low = max(min(0.0, bottom), bottom - margin)
        return low, min(max(1.0, top) + LEAST_MARGIN, top + margin)
    if 0 < bottom * DECADES < top:
        return bottom / (1 + MARGIN), top * (1 + MARGIN)
    margin = MARGIN * ((top - bottom) or abs(top) or 1.0)
    return bottom - margin, top + margin


def _trained(curve: Curve) -> list[float]:
    """The ends of the band after round 0 that are numbers."""
    ends: list[float] = []
    for t, low, high in zip(curve.rounds, curve.low, curve.high, strict=True):
        if t:
            ends += (low, high)
    return [end for end in ends if math.isfinite(end)]


def _without_collapsed(runs: list[Result], low: float, high: float) -> tuple[float, float]:
    """The range of the second halves of the runs that have not collapsed, with room below, up to the best value."""
    levels = [_level(run, high) for run in runs]
    good = [level for level in levels if level >= high / 2]
    best = max(max(_values(run), default=0.0) for run in runs)
    worst = min(good, default=0.0)
    bottom = max(low, worst - ROOM_BELOW * (best - worst))
    margin = max(LEAST_MARGIN, MARGIN * (best - bottom))
    return bottom, min(high, best + margin)


def _level(run: Result, top: float) -> float:
    """The lowest accuracy in the second half of a run; of one that collapsed the usual one there."""
    values = _values(run)
    if not values:
        return 0.0
    half = values[len(values) // 2 :]
    return median(half) if lowest(run, top) else min(half)


def _values(run: Result) -> list[float]:
    return finite(run, metrics_of(run)[0].name)
