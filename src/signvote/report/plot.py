"""The paper's figure 1: accuracy against rounds, a colour per batch mode, a line style per rule."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from signvote.checkpoint import write_atomically
from signvote.errors import ConfigError
from signvote.report.groups import Group, Results, batch_label, batch_order, groups, unique
from signvote.report.marks import Marks, marks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

SUFFIXES = (".png", ".svg")
PIXELS_PER_INCH = 120  # 10 inches are 1200 pixels
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
    """Draw the mean over seeds with its spread shaded, one panel per task, recipe and attack.

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

    titles, marks = unique(group.panel for group in found), marks_of(found)
    columns = min(2, len(titles))
    rows = math.ceil(len(titles) / columns)
    sheet = Figure(figsize=(10, 1.2 + (4.6 if columns == 1 else 3.4) * rows), layout="constrained")
    axes = list(sheet.subplots(rows, columns, squeeze=False).flat)
    for title, panel in zip(titles, axes, strict=False):
        _draw_panel(panel, title, [group for group in found if group.panel == title], marks)
    for unused in axes[len(titles) :]:
        unused.set_axis_off()
    _draw_legends(sheet, found, marks)
    return sheet


def _draw_panel(panel: Axes, title: str, members: list[Group], marks: Marks) -> None:
    for group in members:
        curve, colour = group.curve("accuracy"), marks.colour(group)
        low, mean, high = (
            [100 * value for value in values] for values in (curve.low, curve.mean, curve.high)
        )
        panel.plot(curve.rounds, mean, color=colour, linestyle=_linestyle(marks, group.rule), linewidth=1.8,
                   marker="o" if len(curve.rounds) == 1 else None)  # fmt: skip
        if len(group.runs) > 1:
            panel.fill_between(curve.rounds, low, high, color=colour, alpha=0.15, linewidth=0)
    panel.set_title(title, fontsize=11, loc="left", wrap=True)
    panel.set_xlabel("round")
    panel.set_ylabel("test accuracy (%)")
    panel.set_xlim(left=0)
    panel.set_ylim(_limits(members))


def _limits(members: list[Group]) -> tuple[float, float]:
    """Everything after round 0: the untrained model would only take the room from the others."""
    curves = [group.curve("accuracy") for group in members]
    ends = [v for c in curves for r, *pair in zip(c.rounds, c.low, c.high, strict=True) if r for v in pair]
    ends = [100 * v for v in ends if math.isfinite(v)] or [0.0, 100.0]
    margin = max(0.5, 0.05 * (max(ends) - min(ends)))
    return max(0.0, min(ends) - margin), min(100.5, max(ends) + margin)


def _draw_legends(sheet: Figure, found: list[Group], marks: Marks) -> None:
    """Colours at the left, line styles at the right; one legend will do where colours tell the rules."""
    sizes = {group.batches: batch_label(group.config["batch_sizes"]) for group in found}
    batches, rules = batch_order(found), list(marks.dashes)
    if len(batches) == 1:
        lines = [_line(marks.colours[rule], _linestyle(marks, rule)) for rule in rules]
        _legend(sheet, lines, rules, f"rule ({_full(batches[0], sizes)})", "outside lower center")
        return
    lines = [_line(marks.colours[name], "-") for name in batches]
    _legend(sheet, lines, [_full(name, sizes) for name in batches], "batch sizes", "outside lower left")
    lines = [_line("#555555", _linestyle(marks, rule)) for rule in rules]
    _legend(sheet, lines, rules, "rule", "outside lower right")


def _legend(sheet: Figure, lines: list[Line2D], names: list[str], title: str, where: Any) -> None:
    columns = min(2 if where != "outside lower center" else 5, len(names))
    legend = sheet.legend(
        lines, names, title=title, loc=where, ncols=columns, frameon=False, handlelength=3.5
    )
    legend.set_alignment("left")


def _full(batches: str, sizes: dict[str, str]) -> str:
    return batches if batches == sizes[batches] else f"{batches}: {sizes[batches]}"


def _line(colour: str, style: Any) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linestyle=style, linewidth=1.8)


def _linestyle(marks: Marks, rule: str) -> Any:
    return (0, marks.dashes[rule]) if marks.dashes[rule] else "-"


def _saved(sheet: Figure, kind: str) -> bytes:
    target = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
    sheet.savefig(target, format=kind, dpi=PIXELS_PER_INCH, metadata=metadata)
    return target.getvalue()
