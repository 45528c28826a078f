"""The final table, in a terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Final accuracy by rule and batches; other settings only where they differ between rows."""
    settings = ("task", "recipe", "attack", "split", "detail", "status")
    varying = [k for k in settings if len({row[k] for row in rows}) > 1]
    table = Table(title="Test accuracy at the end")
    for name in (*varying, "batches", "rule", "accuracy", "seeds", "bytes a vote", "fewer than float32"):
        table.add_column(name, justify="left" if name in (*varying, "batches", "rule") else "right")
    for row in rows:
        accuracy = f"{row['accuracy']:.1%}" + (f" ± {row['spread']:.1%}" if row["seeds"] > 1 else "")
        table.add_row(
            *(str(row[k]) for k in varying),
            row["batches"],
            row["rule"],
            accuracy,
            str(row["seeds"]),
            *_sizes(row),
        )
    return table


def _sizes(row: dict[str, Any]) -> tuple[str, str]:
    if row["bytes_up"] is None:
        return "", ""
    return f"{row['bytes_up']:,.0f}", f"{row['times_fewer']:.1f} x"
