"""The final table, in a terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from signvote.report.groups import BASELINE, lead_text


def table_of(rows: list[dict[str, Any]], baseline: str = BASELINE) -> Table:
    """Final accuracy by rule and batches; other settings only where they differ between rows."""
    settings = ("task", "recipe", "attack", "split", "detail", "status")
    varying = [k for k in settings if len({row[k] for row in rows}) > 1]
    table = Table(
        title="Test accuracy at the end", title_justify="left", box=SIMPLE_HEAD,
        caption="bytes of a vote, and how many times fewer than float32", caption_justify="left",
    )  # fmt: skip
    led = [f"against {baseline}"] if any(row["lead"] is not None for row in rows) else []
    for name in (*varying, "batches", "rule", "accuracy", *led, "seeds", "bytes", "fewer"):
        wide = 12 if name in ("accuracy", *led) else None  # a number and its spread in one line
        left = name in (*varying, "batches", "rule")
        table.add_column(name, justify="left" if left else "right", min_width=wide)
    for row in rows:
        accuracy = f"{row['accuracy']:.1%}" + (f" ± {row['spread']:.1%}" if row["seeds"] > 1 else "")
        table.add_row(
            *(str(row[k]) for k in varying),
            row["batches"],
            row["rule"],
            accuracy,
            *(lead_text(row) for _ in led),
            str(row["seeds"]),
            *_sizes(row),
        )
    return table


def _sizes(row: dict[str, Any]) -> tuple[str, str]:
    if row["bytes_up"] is None:
        return "", ""
    return f"{row['bytes_up']:,.0f}", f"{row['times_fewer']:.1f} x"
