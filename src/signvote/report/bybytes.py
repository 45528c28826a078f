"""The metric by the bytes that a worker has sent: what a rule reaches for its bytes.

Bytes are per parameter, on a logarithmic axis: a vote sends an eighth of a byte in a round, a float32 gradient 4. There
is a panel per batch mode, one below the other. Every curve has its name and its last value at its end. So the figure
is readable on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from signvote.report.experiments import Experiment, experiments_of
from signvote.report.marks import Marks
from signvote.report.measures import mean_text
from signvote.report.panels import Panel, arranged_by_mode
from signvote.report.plot import LINE_WIDTH, STYLE, drawn_values, linestyle, write_figure
from signvote.results import Results
from signvote.results.lengths import running_totals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLEARLY_FEWER = 2.0  # times: results whose rules send about the same bytes need no figure by bytes
MOST_PANELS = 50
WIDTH_INCHES = 6
PANEL_INCHES = 3.2
MARGIN_INCHES = 0.6
CHARACTER_INCHES = 0.115  # width, about
LINE_INCHES = 0.2
GAP_POINTS = 5  # between a curve and its label
MOST_ROOM = 0.5  # for labels, of the width
OUTLINE_POINTS = 3  # white, around a label
START = 0.25  # of a curve, which may lie outside the frame
MARGIN = 0.05  # above and below the curves
PHONE = STYLE | {"font.size": 12}


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve by bytes: the mean over the seeds, and the band around it, where they are numbers."""

    sent: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def differ(results: Results) -> bool:
    """Whether some rules of a task sent clearly fewer bytes than others, in a figure that is not too tall."""
    by_task: dict[str, list[float]] = {}
    found = experiments_of(results)
    panels, _ = arranged_by_mode(found)
    if len(panels) > MOST_PANELS:
        return False
    for experiment in found:
        line = line_of(experiment)
        if line.sent:
            task = str(experiment.settings["task"])
            by_round = line.sent[-1] / experiment.last_round()
            by_task.setdefault(task, []).append(by_round)
    return any(_differ_clearly(sent) for sent in by_task.values())


def _differ_clearly(sent: Sequence[float]) -> bool:
    return max(sent) > CLEARLY_FEWER * min(sent)


def figure(results: Results, path: Path | str) -> None:
    """Draw the first metric by bytes sent, the mean over seeds with its spread shaded.

    Args:
        results: as `signvote compare` writes them.
        path: ends in .png or .svg; its folder exists.

    """
    write_figure(path, lambda: _drawn(experiments_of(results)), PHONE)


def line_of(experiment: Experiment) -> Line:
    """The first metric by the bytes that a worker has sent per parameter, without the untrained model."""
    curve = experiment.curve(experiment.metric.name)
    by_run = []
    for run in experiment.runs:
        workers = len(run["config"]["batch_sizes"])
        parts = run["coordinates"] * workers
        totals = running_totals(run["bytes_up"], curve.rounds)
        by_run.append([total / parts for total in totals])
    sent = [fmean(values) for values in zip(*by_run, strict=True)]
    points = zip(sent, curve.mean, curve.low, curve.high, strict=True)
    shown = [point for point in points if point[0] and all(map(math.isfinite, point))]
    return Line(
        sent=[sent for sent, _, _, _ in shown],
        mean=[mean for _, mean, _, _ in shown],
        low=[low for _, _, low, _ in shown],
        high=[high for _, _, _, high in shown],
    )


def spread_out(places: Sequence[float], gap: float) -> list[float]:
    """Places that keep their order and are at least a gap apart, as near to the given ones as possible.

    >>> spread_out([1.0, 9.0, 1.5], 1.0)
    [0.75, 9.0, 1.75]
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    blocks: list[list[float]] = []  # of places without their gaps; each block becomes its mean
    for rank, i in enumerate(order):
        block = [places[i] - rank * gap]
        while blocks and fmean(blocks[-1]) > fmean(block):
            block = blocks.pop() + block
        blocks.append(block)
    means = [fmean(block) for block in blocks for _ in block]
    found = list(places)
    for rank, i in enumerate(order):
        found[i] = means[rank] + rank * gap
    return found


def frame_of(panels: list[Panel]) -> list[float]:
    """The lowest and the highest value shown: the start of training, the first quarter of a curve, may lie outside."""
    low, high = panels[0].frame
    lines = [line_of(member) for panel in panels for member in panel.members]
    ends: list[float] = []
    for line in lines:
        for sent, lower, upper in zip(line.sent, line.low, line.high, strict=True):
            has_started = sent >= START * line.sent[-1]
            if has_started:
                ends += [lower, upper]
    lowest = min(ends, default=low)
    highest = max(ends, default=high)
    margin = MARGIN * (highest - lowest)
    return [
        max(low, lowest - margin),
        min(high, highest + margin),
    ]


# ---- drawing ---------------------------------------------------------------------------------------


def _drawn(experiments: list[Experiment]) -> Figure:
    from matplotlib.figure import Figure

    panels, marks = arranged_by_mode(experiments)
    panels.sort(key=lambda panel: len(set(panel.members[0].settings["batch_sizes"])))  # equal workers first
    height = MARGIN_INCHES + PANEL_INCHES * len(panels)
    sheet = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    column = sheet.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for axes, panel in zip(column, panels, strict=True):
        rivals = [other for other in panels if other.frame == panel.frame]
        _draw_panel(axes, panel, marks)
        axes.set_ylim(*drawn_values(panel.metric, frame_of(rivals)))
    _draw_bytes_axis(column[-1], panels, marks)
    sheet.draw_without_rendering()  # places of labels are known once the axes have theirs
    for axes, panel in zip(column, panels, strict=True):
        _label_ends(axes, panel, marks)
    return sheet


def _draw_panel(axes: Axes, panel: Panel, marks: Marks) -> None:
    for member in panel.members:
        line = line_of(member)
        color = marks.color(member)
        dashes = linestyle(marks.dash(member))
        mean = drawn_values(panel.metric, line.mean)
        axes.plot(
            line.sent,
            mean,
            color=color,
            linestyle=dashes,
            linewidth=LINE_WIDTH,
        )
        axes.plot(line.sent[-1:], mean[-1:], color=color, marker="o", markersize=4)
        low = drawn_values(panel.metric, line.low)
        high = drawn_values(panel.metric, line.high)
        axes.fill_between(
            line.sent,
            low,
            high,
            color=color,
            alpha=0.15,
            linewidth=0,
        )
    axes.set_title(panel.title, fontsize=12, loc="left", wrap=True)
    axes.set_ylabel(f"test {panel.metric.title}")
    if panel.is_log:
        axes.set_yscale("log")


def _draw_bytes_axis(axes: Axes, panels: list[Panel], marks: Marks) -> None:
    """The axis of all panels, with room for the longest label at the right."""
    from matplotlib.ticker import FuncFormatter

    members = [member for panel in panels for member in panel.members]
    sent = [place for member in members for place in line_of(member).sent]
    axes.set_xlabel("bytes sent by a worker per parameter (log scale)")
    if sent:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        longest = max(len(_label(member, marks)) for member in members)
        room = min(MOST_ROOM, longest * CHARACTER_INCHES / WIDTH_INCHES)
        fewest = min(sent)
        most = max(sent)
        decades = math.log10(most / fewest) or 1.0
        decades_of_room = decades * room / (1 - room)
        axes.set_xlim(fewest / 1.2, most * 10**decades_of_room)


def _label_ends(axes: Axes, panel: Panel, marks: Marks) -> None:
    """The name of each curve at its end. Labels of curves that end at the same bytes are kept apart."""
    by_end: dict[int, list[tuple[Experiment, float, float]]] = {}
    for member in panel.members:
        line = line_of(member)
        if line.sent:
            end = drawn_values(panel.metric, line.mean)[-1]
            x, y = axes.transData.transform((line.sent[-1], end))
            column = round(x / LINE_INCHES / axes.figure.dpi)
            by_end.setdefault(column, []).append((member, x, y))
    for ends in by_end.values():
        heights = _heights(axes, [y for _, _, y in ends])
        for (member, x, _), y in zip(ends, heights, strict=True):
            _write(axes, _label(member, marks), marks.color(member), x, y)


def _heights(axes: Axes, ends: list[float]) -> list[float]:
    """The heights of labels, in pixels: near the ends of their curves, apart, and above the axis."""
    gap = LINE_INCHES * axes.figure.dpi
    heights = spread_out(ends, gap)
    missing = axes.bbox.y0 + gap / 2 - min(heights)
    return [height + max(0.0, missing) for height in heights]


def _write(
    axes: Axes,
    label: str,
    color: str,
    x: float,
    y: float,
) -> None:
    """A label at the right of a place in pixels, readable across a curve."""
    from matplotlib.patheffects import withStroke

    place = axes.transData.inverted().transform((x, y))
    text = axes.annotate(
        label,
        tuple(place),
        xytext=(GAP_POINTS, 0),
        textcoords="offset points",
        color=color,
        va="center",
        annotation_clip=False,
        path_effects=[withStroke(linewidth=OUTLINE_POINTS, foreground="white")],
    )
    text.set_in_layout(False)


def _label(experiment: Experiment, marks: Marks) -> str:
    line = line_of(experiment)
    last = mean_text(experiment.metric, line.mean[-1], None) if line.mean else ""
    state = "" if experiment.is_done else " unfinished"
    return f"{marks.name(experiment)} {last}{state}"
