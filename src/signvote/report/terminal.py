"""The final table, in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from signvote.report.finals import BASELINE, Row, lead_text, varying_settings

WORDS = ("batches", "rule")  # columns of text; the others are numbers
LEAD_WIDTH = 12  # characters: a number and its spread on one line


def tables_of(rows: list[Row], baseline: str = BASELINE) -> Iterator[Table]:
    """Final accuracy by rule and batches, with a table for each combination of the other settings."""
    varying = varying_settings(rows)

    def settings(row: Row) -> str:
        values = [row[name] for name in varying]
        return ", ".join(str(value) for value in values if value)

    for words, members in groupby(rows, key=settings):
        title = "Test accuracy at the end"
        if words:
            title += f": {words}"
        yield _table(list(members), title, baseline)


def _table(rows: list[Row], title: str, baseline: str) -> Table:
    left: Any = "left"
    table = Table(
        title=title,
        title_justify=left,
        caption="bytes of a vote, and how many times fewer than float32",
        caption_justify=left,
        box=SIMPLE_HEAD,
    )
    has_leads = any(row["lead"] is not None for row in rows)
    _add_columns(table, [f"against {baseline}"] if has_leads else [])
    for row in rows:
        leads = [lead_text(row)] if has_leads else []
        table.add_row(
            row["batches"],
            row["rule"],
            _accuracy(row),
            *leads,
            str(row["seeds"]),
            *_sizes(row),
        )
    return table


def _add_columns(table: Table, leads: list[str]) -> None:
    with_spread = ("accuracy", *leads)
    for name in (*WORDS, *with_spread, "seeds", "bytes", "fewer"):
        table.add_column(
            name,
            justify="left" if name in WORDS else "right",
            min_width=LEAD_WIDTH if name in with_spread else None,
        )


def _accuracy(row: Row) -> str:
    text = f"{row['accuracy']:.1%}"
    if row["seeds"] > 1:
        text += f" ± {row['spread']:.1%}"
    if row["status"] != "done":
        text += f" ({row['status']})"
    return text


def _sizes(row: Row) -> tuple[str, str]:
    if row["bytes_up"] is None:
        return "", ""
    size = f"{row['bytes_up']:,.0f}"
    fewer = f"{row['times_fewer']:.1f} x"
    return size, fewer
