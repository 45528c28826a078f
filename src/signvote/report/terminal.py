"""The final table, in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from signvote.report.finals import BASELINE, lead_text

SETTINGS = ("task", "recipe", "attack", "split", "detail")
Row = dict[str, Any]


def tables_of(rows: list[Row], baseline: str = BASELINE) -> Iterator[Table]:
    """Final accuracy by rule and batches; a table for each of the other settings where they differ."""
    varying = [name for name in SETTINGS if len({row[name] for row in rows}) > 1]
    told = ((", ".join(str(row[name]) for name in varying if row[name]), row) for row in rows)
    for settings, group in groupby(told, key=lambda pair: pair[0]):
        title = "Test accuracy at the end" + (f": {settings}" if settings else "")
        yield _table([row for _, row in group], title, baseline)


def _table(rows: list[Row], title: str, baseline: str) -> Table:
    caption = "bytes of a vote, and how many times fewer than float32"
    left: Any = "left"
    table = Table(title=title, title_justify=left, caption=caption, caption_justify=left, box=SIMPLE_HEAD)
    led = [f"against {baseline}"] if any(row["lead"] is not None for row in rows) else []
    for name in ("batches", "rule", "accuracy", *led, "seeds", "bytes", "fewer"):
        wide = 12 if name in ("accuracy", *led) else None  # a number and its spread in one line
        table.add_column(name, justify="left" if name in ("batches", "rule") else "right", min_width=wide)
    for row in rows:
        leads = [lead_text(row) for _ in led]
        table.add_row(row["batches"], row["rule"], _accuracy(row), *leads, str(row["seeds"]), *_sizes(row))
    return table


def _accuracy(row: Row) -> str:
    text = f"{row['accuracy']:.1%}" + (f" ± {row['spread']:.1%}" if row["seeds"] > 1 else "")
    return text if row["status"] == "done" else f"{text} ({row['status']})"


def _sizes(row: Row) -> tuple[str, str]:
    if row["bytes_up"] is None:
        return "", ""
    return f"{row['bytes_up']:,.0f}", f"{row['times_fewer']:.1f} x"
