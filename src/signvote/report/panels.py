"""Which curves share a panel, in what frame: the same in the figure and on the page.

Few curves: a panel per task, recipe and attack, a colour per batch mode, as in the paper. Many: a panel per
batch mode in one common frame, a colour per rule, so that what competes lies side by side.

A run that collapses, once good and then no better than chance, would press all others into a stripe. So the
frame is then put around the levels of the others, and the fall is marked at its lower edge; how low it went
stands below the panel, where no curve is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from signvote.report.groups import Group, Run, batch_order, measured, unique
from signvote.report.marks import Marks, marks_of

MOST_CURVES = 8  # in a panel; of more, there is one per batch mode
ROOM_BELOW = 0.25  # under the lowest level, in heights of what is framed


@dataclass(frozen=True, kw_only=True)
class Fall:
    """The seeds of a group that collapsed below the frame."""

    seeds: int
    of: int
    round: int  # where the lowest was measured
    accuracy: float  # the lowest

    @property
    def text(self) -> str:
        """What is said of the mark."""
        who = f" ({self.seeds} of {self.of} seeds)" if self.of > 1 else ""
        return f"down to {100 * self.accuracy:.0f} %{who}"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves drawn together."""

    title: str
    members: list[Group]
    frame: tuple[float, float]  # lowest and highest accuracy shown
    fixed: bool  # whether the frame says more than what the members need

    def fall(self, group: Group) -> Fall | None:
        """What of a group lies below the frame because it collapsed."""
        lows = [low for low in (lowest(run, self.frame[1]) for run in group.runs) if low is not None]
        if not lows or min(lows)[0] >= self.frame[0]:
            return None
        accuracy, round = min(lows)
        return Fall(seeds=len(lows), of=len(group.runs), round=round, accuracy=accuracy)


def arranged(found: list[Group]) -> tuple[list[Panel], Marks]:
    """The panels, in order, and how each curve is drawn."""
    modes = batch_order(found)
    crowded = max(Counter(group.panel for group in found).values()) > MOST_CURVES
    if not (crowded and len(modes) > 1):
        titles = unique(group.panel for group in found)
        alone = [[group for group in found if group.panel == title] for title in titles]
        return [_panel(t, members, members) for t, members in zip(titles, alone, strict=True)], marks_of(
            found
        )
    panels = []
    for scene in unique(group.scene for group in found):
        rivals = [group for group in found if group.scene == scene]
        for mode in modes:
            members = [group for group in rivals if group.batches == mode]
            if members:
                panels.append(_panel(f"{scene} · {members[0].full_batches}", members, rivals))
    return panels, marks_of(found, by_curve=True)


def lowest(run: Run, top: float) -> tuple[float, int] | None:
    """Accuracy and round of the lowest point of a run that collapsed; None if it did not.

    It collapsed if it fell below half of what is possible once it had come above, or never came above a third.
    """
    points = [(a, r) for r, a in measured(run, "accuracy").items() if r and math.isfinite(a)]
    good = [i for i, (accuracy, _) in enumerate(points) if accuracy >= top / 2]
    if not good:
        return min(points) if points and max(points)[0] < top / 3 else None
    low = min(points[good[0] :])
    return low if low[0] < top / 2 else None


def apart(places: Sequence[float], width: float) -> list[float]:
    """Where marks of a width are drawn so that none hides another: in their places, or just right of them.

    >>> apart([500, 750, 500], 25)
    [500, 750, 525]
    """
    drawn: list[float] = []
    for place in places:
        while any(abs(place - other) < width for other in drawn):
            place += width
        drawn.append(place)
    return drawn


def _panel(title: str, members: list[Group], rivals: list[Group]) -> Panel:
    low, high = _everything(rivals)
    falls = any(lowest(run, high) for group in rivals for run in group.runs)
    if falls:
        low = max(low, _around_levels(rivals, high))
    return Panel(title=title, members=members, frame=(low, high), fixed=falls or len(rivals) > len(members))


def _everything(found: list[Group]) -> tuple[float, float]:
    """All after round 0: the untrained model would only take the room from the others."""
    curves = [group.curve("accuracy") for group in found]
    ends = [v for c in curves for r, *pair in zip(c.rounds, c.low, c.high, strict=True) if r for v in pair]
    ends = [v for v in ends if math.isfinite(v)] or [0.0, 1.0]
    margin = max(0.005, 0.05 * (max(ends) - min(ends)))
    return max(0.0, min(ends) - margin), min(1.005, max(ends) + margin)


def _around_levels(found: list[Group], top: float) -> float:
    """A lower edge that leaves the level of every run in sight, where it is not that of a collapsed one."""
    levels = [level for group in found for run in group.runs if (level := _level(run)) >= top / 2]
    return min(levels) - ROOM_BELOW * (top - min(levels)) if levels else 0.0


def _level(run: Run) -> float:
    """Where a run lives: the median of its second half."""
    values = [a for a in measured(run, "accuracy").values() if math.isfinite(a)]
    return median(values[len(values) // 2 :]) if values else 0.0
