"""The final table: each group's accuracy at the end, which is best, and how far it leads the baseline.

Groups are compared under the same conditions only: they may differ in the rule and its options, but in no setting that
changes an accuracy (`signvote.settings.conditions`).
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from signvote.report.groups import Group, batch_order, groups, spread_of, unique
from signvote.results import Results
from signvote.settings import conditions

BASELINE = "majority"  # the rule that others are measured against
Row = dict[str, Any]


def table(results: Results, baseline: str = BASELINE) -> list[Row]:
    """One row per group: what it was, and its final accuracy, in the order people compare.

    Keys: task, recipe, attack, split, detail (what else tells two rows apart), batches, rule, status, seeds
    (how many), accuracy (mean at the last evaluation, 0 to 1), spread (`spread_of` it, None for one seed),
    bytes_up (per round and worker), times_fewer (than float32), both None where no round was run; best:
    whether it has the highest accuracy of several under the same conditions; lead and lead_spread: by how much
    it is ahead of the rule `baseline` under the same conditions, paired by seed, None where that was not run.
    """
    found = groups(results)
    panels = unique(group.panel for group in found)
    batches = batch_order(found)
    same = [conditions(group.config) for group in found]
    rows = []
    for group, mine in zip(found, same, strict=True):
        alike = zip(found, same, strict=True)
        rivals = [other for other, its in alike if other is not group and its == mine]
        row = _row(group) | {"best": _is_best(group, rivals)} | _lead(group, rivals, baseline)
        rows.append((panels.index(group.panel), batches.index(group.batches), row))
    return [row for *_, row in sorted(rows, key=lambda r: (r[0], r[1], -r[2]["accuracy"]))]


def lead_text(row: dict[str, Any]) -> str:
    """A row's lead in points.

    >>> lead_text({"lead": 0.0125, "lead_spread": 0.003}), lead_text({"lead": None, "lead_spread": None})
    ('+1.25 ± 0.30', '')
    """
    spread = "" if row["lead_spread"] is None else f" ± {100 * row['lead_spread']:.2f}"
    return "" if row["lead"] is None else f"{100 * row['lead']:+.2f}{spread}"


def _accuracy(group: Group) -> float:
    return fmean(group.final_by_seed().values())


def _is_best(group: Group, rivals: list[Group]) -> bool:
    return bool(rivals) and _accuracy(group) >= max(map(_accuracy, rivals))


def _lead(group: Group, rivals: list[Group], baseline: str) -> dict[str, float | None]:
    """Over the baseline: the difference in each seed that both have."""
    mine = group.final_by_seed()
    its = next((rival.final_by_seed() for rival in rivals if rival.rule == baseline), {})
    by_seed = [mine[seed] - its[seed] for seed in sorted(mine.keys() & its.keys())]
    return {"lead": fmean(by_seed) if by_seed else None, "lead_spread": spread_of(by_seed)}


def _row(group: Group) -> Row:
    accuracies = list(group.final_by_seed().values())
    up = group.bytes_per_worker("bytes_up")
    return {
        "task": group.config["task"],
        "recipe": group.config.get("recipe"),
        "attack": group.config.get("attack"),
        "split": group.config.get("split"),
        "detail": group.detail,
        "batches": group.batches,
        "rule": group.rule,
        "status": "interrupted" if group.interrupted else "done",
        "seeds": len(group.runs),
        "accuracy": fmean(accuracies),
        "spread": spread_of(accuracies),
        "bytes_up": up,
        "times_fewer": group.float32_bytes() / up if up else None,
    }
