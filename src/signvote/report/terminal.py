"""The final table, in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from signvote.metrics import Metric
from signvote.report.finals import BASELINE, Row, lead_text, value_text, varying_settings

WORDS = ("batches", "rule")  # columns of text; the others are numbers
BYTES = "bytes of a vote, and how many times fewer than float32"
LEAD_WIDTH = 12  # characters: a number and its spread on one line


def tables_of(rows: list[Row], baseline: str = BASELINE) -> Iterator[Table]:
    """The final metric by rule and batches, with a table for each combination of the other settings."""
    varying = varying_settings(rows)

    def settings(row: Row) -> tuple[str, Metric]:
        values = [row[name] for name in varying]
        return ", ".join(str(value) for value in values if value), row["metric"]

    for (words, metric), members in groupby(rows, key=settings):
        title = f"Test {escape(metric.name)} at the end"
        if not metric.more_is_better:
            title += f", {metric.direction}"
        if words:
            title += f": {words}"
        yield _table(list(members), title, baseline)


def _table(rows: list[Row], title: str, baseline: str) -> Table:
    left: Any = "left"
    table = Table(
        title=title,
        title_justify=left,
        caption="\n".join([BYTES, *_unfinished(rows)]),
        caption_justify=left,
        box=SIMPLE_HEAD,
    )
    metric: Metric = rows[0]["metric"]
    value = escape(metric.name if metric.is_share else metric.title)
    has_leads = any(row["lead"] is not None for row in rows)
    _add_columns(table, value, [f"against {baseline}"] if has_leads else [])
    for row in rows:
        leads = [lead_text(row)] if has_leads else []
        table.add_row(
            row["batches"],
            row["rule"],
            _value(row),
            *leads,
            str(row["seeds"]),
            *_sizes(row),
        )
    return table


def _add_columns(table: Table, value: str, leads: list[str]) -> None:
    with_spread = (value, *leads)
    for name in (*WORDS, *with_spread, "seeds", "bytes", "fewer"):
        table.add_column(
            name,
            justify="left" if name in WORDS else "right",
            min_width=LEAD_WIDTH if name in with_spread else None,
        )


def _unfinished(rows: list[Row]) -> list[str]:
    """A line for each row whose value is marked, because no run came to its end."""
    return [f"* {row['rule']}, {row['batches']}: {row['status']}" for row in rows if row["status"] != "done"]


def _value(row: Row) -> str:
    text = value_text(row)
    if row["metric"].is_share:
        spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.1f}"
        text = f"{100 * row['value']:.1f}{spread} %"
    if row["status"] != "done":
        text += " *"
    return text


def _sizes(row: Row) -> tuple[str, str]:
    if row["bytes_up"] is None:
        return "", ""
    size = f"{row['bytes_up']:,.0f}"
    fewer = f"{row['times_fewer']:.1f} x"
    return size, fewer
