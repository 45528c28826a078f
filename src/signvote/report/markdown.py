"""The final table as Markdown, for a README: a row per rule, a column per batch mode."""

from __future__ import annotations

from typing import Any

from signvote.report.finals import table
from signvote.report.groups import Group, batch_order, groups, unique
from signvote.results import Results

SETTINGS = ("task", "recipe", "attack", "split", "detail")  # of a row; shown where they differ
Row = dict[str, Any]


def markdown(results: Results) -> str:
    """Final accuracy, mean and spread over the seeds, and what a vote cost."""
    found, rows = groups(results), table(results)
    modes = batch_order(found)
    told = ["rule", *(name for name in SETTINGS if len({row[name] for row in rows}) > 1)]
    lines: dict[tuple[Any, ...], dict[str, Row]] = {}
    order = unique(group.rule for group in found)
    for row in sorted(rows, key=lambda row: order.index(row["rule"])):
        lines.setdefault(tuple(row[name] for name in ("rule", *SETTINGS)), {})[row["batches"]] = row
    full = {group.batches: group.full_batches for group in found}
    heads = [*told, *(full[mode] for mode in modes), "bytes a vote", "fewer than float32"]
    body = [_line(next(iter(by_mode.values())), told, [by_mode.get(mode) for mode in modes])
            for by_mode in lines.values()]  # fmt: skip
    rule = ["---"] * len(told) + ["---:"] * (len(heads) - len(told))
    return "\n".join([_caption(found), "", *map(_joined, (heads, rule, *body)), ""])


def _caption(found: list[Group]) -> str:
    rounds = unique(str(group.curve("accuracy").rounds[-1]) for group in found)
    seeds = sorted({len(group.runs) for group in found})
    many = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seed{'s' * (seeds[0] > 1)}"
    spread = ", mean ± standard deviation" if seeds[-1] > 1 else ""
    spread += " (of two seeds, their distance)" if 2 in seeds else ""
    machines = unique(text for group in found if (text := group.machine()))
    ran = f" Ran on {'; '.join(machines)}." if machines else ""
    tasks = ", ".join(unique(_plain(group.config["task"]) for group in found))
    return f"{tasks}: test accuracy in % after {' or '.join(rounds)} rounds, {many}{spread}.{_plain(ran)}"


def _line(row: Row, told: list[str], cells: list[Row | None]) -> list[str]:
    known = [cell for cell in cells if cell is not None and cell["bytes_up"] is not None]
    sizes = _range([cell["bytes_up"] for cell in known], "{:,.0f}")
    fewer = _range([cell["times_fewer"] for cell in known], "{:.1f}")
    return [*(_plain(row[name]) for name in told), *map(_accuracy, cells), sizes, fewer]


def _accuracy(row: Row | None) -> str:
    if row is None:
        return ""
    spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.2f}"
    return f"{100 * row['accuracy']:.2f}{spread}" + (" (interrupted)" if row["status"] != "done" else "")


def _range(values: list[float], form: str) -> str:
    """One number, or from the lowest to the highest."""
    return " to ".join(unique(form.format(v) for v in (min(values), max(values)))) if values else ""


def _plain(value: object) -> str:
    """Text that cannot break the table, nor become a tag."""
    text = "" if value is None else str(value)
    for character, instead in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("\n", " ")):
        text = text.replace(character, instead)
    return text


def _joined(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
