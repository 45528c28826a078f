"""Small pieces of HTML: tables, rows and cells. All text is escaped, except where an argument is named `markup`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

NOT_RECORDED = "<p>Not recorded.</p>"


@dataclass(frozen=True)
class Head:
    """The head of a column."""

    text: str
    kind: str = ""  # "number" aligns right, "bars" makes room for bars
    color: str = ""  # of a swatch before the text


def table(heads: Sequence[Head], rows: Iterable[str], kind: str = "") -> str:
    """A table that scrolls by itself if the window is narrow."""
    cells = "".join(map(_head, heads))
    body = "".join(rows)
    inside = f"<thead><tr>{cells}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="{kind}">{inside}</table></div>'


def row(cells: Iterable[str], *, best: bool = False) -> str:
    """A row of a table."""
    kind = "best" if best else ""
    inside = "".join(cells)
    return f'<tr class="{kind}">{inside}</tr>'


def cell(value: object, kind: str = "", markup: str = "") -> str:
    """A cell. `markup` is HTML that follows the value; it is not escaped."""
    text = "" if value is None else escape(str(value))
    return f'<td class="{kind}">{text}{markup}</td>'


def bar(percent: float, color: str) -> str:
    """A colored bar, its width in percent."""
    return f'<span style="width:{percent:.2f}%;background:{color}"></span>'


def count(value: float | None) -> str:
    """A whole number with commas; empty if there is none.

    >>> count(72812.0), count(None)
    ('72,812', '')
    """
    if value is None:
        return ""
    return f"{value:,.0f}"


def _head(head: Head) -> str:
    kind = f' class="{head.kind}"' if head.kind else ""
    swatch = ""
    if head.color:
        swatch = f'<span class="phase" style="background:{head.color}"></span>'
    text = escape(head.text)
    return f'<th scope="col"{kind}>{swatch}{text}</th>'
