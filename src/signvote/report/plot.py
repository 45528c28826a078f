"""The paper's figure 1: the metric by round, with a color per batch mode and a line style per rule."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from signvote.atomic import write_atomically
from signvote.errors import ConfigError
from signvote.metrics import Metric
from signvote.report.experiments import Experiment, batch_order, experiments_of
from signvote.report.marks import Dashes, Marks
from signvote.report.panels import Fall, Panel, apart, arranged
from signvote.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

SUFFIXES = (".png", ".svg")
PIXELS_PER_INCH = 120
WIDTH_INCHES = 10  # 1200 pixels
MOST_INCHES = 500  # of height; matplotlib draws up to 2^16 pixels
LEGEND_INCHES = 1.2
WIDE_PANEL_INCHES = 4.6  # height of a panel, if there is one column
NARROW_PANEL_INCHES = 3.4  # if there are two
TRIANGLE = 0.025  # width of the mark of a collapsed run, as a share of the panel's
FALL_INCHES = 0.19  # height of a line below a panel that describes such a mark
BELOW_AXIS_INCHES = 0.45  # start of these lines: below the label of the axis
LINE_WIDTH = 1.8
GRAY = "#555555"
LONG_NAME = 30  # characters; with longer names a legend has two columns
STYLE: Any = {  # matplotlib's own type for it changes with every version
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "text.parse_math": False,  # a dollar sign in a name stays a dollar sign
    "svg.hashsalt": "signvote",  # the same results give the same file
}


def figure(results: Results, path: Path | str) -> None:
    """Draw the mean over seeds with its spread shaded, in the panels that `panels.arranged` gives.

    Args:
        results: as `signvote compare` writes them.
        path: ends in .png or .svg; its folder exists.

    """
    write_figure(path, lambda: _drawn(experiments_of(results)))


def write_figure(path: Path | str, draw: Callable[[], Figure], style: Any = STYLE) -> None:
    """Draw with settings of matplotlib, which are restored, and write the file."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"a figure cannot be written to {path.name!r}: the name must end in .png or .svg")
    from matplotlib import rc_context  # this import takes a second, so only drawing pays for it

    with rc_context(style):
        write_atomically(path, _saved(draw(), suffix[1:]))


def _drawn(experiments: list[Experiment]) -> Figure:
    from matplotlib.figure import Figure

    panels, marks = arranged(experiments)
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    height = _height(panels, rows, columns)
    if height > MOST_INCHES:
        raise ConfigError(
            f"a figure of {len(panels):,} panels is too tall to be drawn; report fewer results at a time"
        )
    sheet = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    axes = list(sheet.subplots(rows, columns, squeeze=False).flat)
    for panel, place in zip(panels, axes, strict=False):
        _draw_panel(place, panel, marks)
    for unused in axes[len(panels) :]:
        unused.set_axis_off()
    _draw_legends(sheet, experiments, marks)
    return sheet


def _height(panels: list[Panel], rows: int, columns: int) -> float:
    panel_inches = WIDE_PANEL_INCHES if columns == 1 else NARROW_PANEL_INCHES
    lines = _lines_below(panels, columns)
    return LEGEND_INCHES + panel_inches * rows + FALL_INCHES * lines


def _lines_below(panels: list[Panel], columns: int) -> int:
    """The number of lines below the panels that describe falls, summed over the rows of panels."""
    falls = [len(_falls(panel)) for panel in panels]
    lines = 0
    for start in range(0, len(falls), columns):
        lines += max(falls[start : start + columns])
    return lines


def _falls(panel: Panel) -> list[tuple[Fall, Experiment]]:
    """The experiments of a panel that collapsed to below its frame."""
    return [(fall, member) for member in panel.members if (fall := panel.fall(member))]


def _draw_panel(axes: Axes, panel: Panel, marks: Marks) -> None:
    for experiment in panel.members:
        _draw_curve(axes, experiment, marks)
    bottom, top = panel.frame
    axes.set_title(
        "\n".join([panel.title, *_unfinished(panel, marks)]),
        fontsize=11,
        loc="left",
        wrap=True,
    )
    axes.set_xlabel("round")
    axes.set_ylabel(f"test {panel.metric.title}")
    axes.set_xlim(left=0)
    if panel.is_log:
        axes.set_yscale("log")
    axes.set_ylim(*drawn_values(panel.metric, [bottom, top]))
    _mark_falls(axes, panel, marks)


def _unfinished(panel: Panel, marks: Marks) -> list[str]:
    """A line for each curve of a run that has not come to its end."""
    members = [member for member in panel.members if not member.is_done]
    return [(marks.name(member) if marks.by_curve else member.label) + member.mark for member in members]


def _draw_curve(axes: Axes, experiment: Experiment, marks: Marks) -> None:
    metric = experiment.metric
    curve = experiment.curve(metric.name)
    color = marks.color(experiment)
    axes.plot(
        curve.rounds,
        drawn_values(metric, curve.mean),
        color=color,
        linestyle=linestyle(marks.dash(experiment)),
        linewidth=LINE_WIDTH,
        marker="o" if len(curve.rounds) == 1 else None,
    )
    if len(experiment.runs) > 1:
        low = drawn_values(metric, curve.low)
        high = drawn_values(metric, curve.high)
        axes.fill_between(
            curve.rounds,
            low,
            high,
            color=color,
            alpha=0.15,
            linewidth=0,
        )


def drawn_values(metric: Metric, values: list[float]) -> list[float]:
    """A share in percent, another metric as it is."""
    return [100 * value for value in values] if metric.is_share else values


def _mark_falls(axes: Axes, panel: Panel, marks: Marks) -> None:
    """A triangle at the lower edge for each run that collapsed, and a line for each below the panel."""
    falls = _falls(panel)
    if not falls:
        return
    _, right = axes.get_xlim()
    rounds = [fall.round for fall, _ in falls]
    places = apart(rounds, TRIANGLE * right)
    for (fall, experiment), place in zip(falls, places, strict=True):
        name = marks.name(experiment) if marks.by_curve else experiment.label
        label = f"{name}: {fall.text}"
        _draw_triangle(axes, place, marks.color(experiment), label)
    _describe_triangles(axes)


def _draw_triangle(axes: Axes, place: float, color: str, label: str) -> None:
    axes.plot(
        [place],
        [0.0],
        marker="v",
        markersize=9,
        color=color,
        markeredgecolor="white",
        transform=axes.get_xaxis_transform(),
        clip_on=False,
        zorder=5,
        linestyle="",
        label=label,
    )


def _describe_triangles(axes: Axes) -> None:
    """Their labels, below the panel."""
    from matplotlib.transforms import ScaledTranslation

    down = ScaledTranslation(0, -BELOW_AXIS_INCHES, axes.figure.dpi_scale_trans)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=axes.transAxes + down,
        frameon=False,
        fontsize=9,
        handletextpad=0.2,
        borderaxespad=0.0,
        labelspacing=0.2,
    )


def _draw_legends(sheet: Figure, experiments: list[Experiment], marks: Marks) -> None:
    """Colors at the left, line styles at the right; one legend if a color stands for a name."""
    batches = batch_order(experiments)
    names = list(marks.dashes)
    titles = {experiment.batches: experiment.full_batches for experiment in experiments}
    if marks.by_curve or len(batches) == 1:
        lines = [_line(marks.colors[name], marks.dashes[name]) for name in names]
        title = "rule"
        if not marks.by_curve:
            title += f" ({titles[batches[0]]})"
        longest = max(map(len, names))
        columns = 2 if longest > LONG_NAME else 4
        _legend(sheet, lines, names, title, "outside lower center", columns)
        return
    colors = [_line(marks.colors[name], ()) for name in batches]
    sizes = [titles[name] for name in batches]
    _legend(sheet, colors, sizes, "batch sizes", "outside lower left")
    styles = [_line(GRAY, marks.dashes[name]) for name in names]
    _legend(sheet, styles, names, "rule", "outside lower right")


def _legend(
    sheet: Figure,
    lines: list[Line2D],
    names: list[str],
    title: str,
    place: Any,
    columns: int = 2,
) -> None:
    legend = sheet.legend(
        lines,
        names,
        title=title,
        loc=place,
        ncols=min(columns, len(names)),
        frameon=False,
        handlelength=3.5,
    )
    legend.set_alignment("left")


def _line(color: str, dashes: Dashes) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D(
        [],
        [],
        color=color,
        linestyle=linestyle(dashes),
        linewidth=LINE_WIDTH,
    )


def linestyle(dashes: Dashes) -> Any:
    """Dashes as matplotlib names them."""
    return (0, dashes) if dashes else "-"


def _saved(sheet: Figure, kind: str) -> bytes:
    target = io.BytesIO()
    metadata: dict[str, Any] = {}
    if kind == "svg":
        metadata["Date"] = None
    sheet.savefig(target, format=kind, dpi=PIXELS_PER_INCH, metadata=metadata)
    return target.getvalue()
