"""The paper's figure 1: accuracy against rounds, a colour per batch mode, a line style per rule."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from signvote.atomic import write_atomically
from signvote.errors import ConfigError
from signvote.report.groups import Group, batch_order, groups
from signvote.report.marks import Marks
from signvote.report.panels import Panel, apart, arranged
from signvote.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

SUFFIXES = (".png", ".svg")
PIXELS_PER_INCH = 120  # 10 inches are 1200 pixels
TRIANGLE = 0.025  # how wide the mark of a fall is, in widths of a panel
FALL_INCHES = 0.19  # the line below a panel that tells of one
BELOW_AXIS_INCHES = 0.45  # where those lines begin: below the axis' own words
STYLE: Any = {  # of matplotlib, whose own type for it changes with every version
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.hashsalt": "signvote",  # the same results give the same file
}


def figure(results: Results, path: Path) -> None:
    """Draw the mean over seeds with its spread shaded, in the panels that `panels.arranged` gives.

    Args:
        results: what `signvote compare` writes.
        path: ends in .png or .svg; the folder exists.

    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"a figure cannot be written to {path.name!r}: the name must end in .png or .svg")
    found = groups(results)
    from matplotlib import rc_context  # takes a second: only who draws waits for it

    with rc_context(STYLE):
        write_atomically(path, _saved(_drawn(found), path.suffix.lower()[1:]))


def _drawn(found: list[Group]) -> Figure:
    from matplotlib.figure import Figure

    panels, marks = arranged(found)
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    height = 1.2 + (4.6 if columns == 1 else 3.4) * rows + FALL_INCHES * _lines_below(panels, columns)
    sheet = Figure(figsize=(10, height), layout="constrained")
    axes = list(sheet.subplots(rows, columns, squeeze=False).flat)
    for panel, where in zip(panels, axes, strict=False):
        _draw_panel(where, panel, marks)
    for unused in axes[len(panels) :]:
        unused.set_axis_off()
    _draw_legends(sheet, found, marks)
    return sheet


def _lines_below(panels: list[Panel], columns: int) -> int:
    """How many lines the falls of all rows of panels take."""
    falls = [sum(panel.fall(group) is not None for group in panel.members) for panel in panels]
    return sum(max(falls[i : i + columns]) for i in range(0, len(falls), columns))


def _draw_panel(axes: Axes, panel: Panel, marks: Marks) -> None:
    for group in panel.members:
        curve, colour = group.curve("accuracy"), marks.colour(group)
        low, mean, high = (
            [100 * value for value in values] for values in (curve.low, curve.mean, curve.high)
        )
        axes.plot(curve.rounds, mean, color=colour, linestyle=_linestyle(marks.dash(group)), linewidth=1.8,
                  marker="o" if len(curve.rounds) == 1 else None)  # fmt: skip
        if len(group.runs) > 1:
            axes.fill_between(curve.rounds, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_title(panel.title, fontsize=11, loc="left", wrap=True)
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy (%)")
    axes.set_xlim(left=0)
    axes.set_ylim(100 * panel.frame[0], 100 * panel.frame[1])
    _mark_falls(axes, panel, marks)


def _mark_falls(axes: Axes, panel: Panel, marks: Marks) -> None:
    """A triangle at the lower edge where a run lies lowest; who that is and how low, below the panel."""
    from matplotlib.transforms import ScaledTranslation

    falls = [(fall, group) for group in panel.members if (fall := panel.fall(group))]
    if not falls:
        return
    width = TRIANGLE * axes.get_xlim()[1]
    places = apart([fall.round for fall, _ in falls], width)
    for (fall, group), place in zip(falls, places, strict=True):
        name = marks.name(group) if marks.by_curve else group.label
        axes.plot([place], [0.0], marker="v", markersize=9, color=marks.colour(group), markeredgecolor="white",
                  transform=axes.get_xaxis_transform(), clip_on=False, zorder=5, linestyle="",
                  label=f"{name}: {fall.text}")  # fmt: skip
    below = axes.transAxes + ScaledTranslation(0, -BELOW_AXIS_INCHES, axes.figure.dpi_scale_trans)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below, frameon=False, fontsize=9,
                handletextpad=0.2, borderaxespad=0.0, labelspacing=0.2)  # fmt: skip


def _draw_legends(sheet: Figure, found: list[Group], marks: Marks) -> None:
    """Colours at the left, line styles at the right; one legend will do where colours tell the names."""
    batches, names = batch_order(found), list(marks.dashes)
    full = {group.batches: group.full_batches for group in found}
    if marks.by_curve or len(batches) == 1:
        lines = [_line(marks.colours[name], _linestyle(marks.dashes[name])) for name in names]
        title = "rule" if marks.by_curve else f"rule ({full[batches[0]]})"
        _legend(sheet, lines, names, title, "outside lower center")
        return
    lines = [_line(marks.colours[name], "-") for name in batches]
    _legend(sheet, lines, [full[name] for name in batches], "batch sizes", "outside lower left")
    lines = [_line("#555555", _linestyle(marks.dashes[name])) for name in names]
    _legend(sheet, lines, names, "rule", "outside lower right")


def _legend(sheet: Figure, lines: list[Line2D], names: list[str], title: str, where: Any) -> None:
    columns = min(2 if where != "outside lower center" or max(map(len, names)) > 30 else 4, len(names))
    legend = sheet.legend(
        lines, names, title=title, loc=where, ncols=columns, frameon=False, handlelength=3.5
    )
    legend.set_alignment("left")


def _line(colour: str, style: Any) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linestyle=style, linewidth=1.8)


def _linestyle(dashes: tuple[float, ...]) -> Any:
    return (0, dashes) if dashes else "-"


def _saved(sheet: Figure, kind: str) -> bytes:
    target = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
    sheet.savefig(target, format=kind, dpi=PIXELS_PER_INCH, metadata=metadata)
    return target.getvalue()
