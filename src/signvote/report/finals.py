"""The final table: the metric of each experiment at the end, the best, and the lead over the baseline.

Experiments are compared under the same conditions only: they may differ in the rule and its options, but in no
setting that changes a metric (`signvote.settings.conditions`).
"""

from __future__ import annotations

import math
from typing import Any

from signvote.metrics import Metric
from signvote.report.experiments import Experiment, batch_order, experiments_of
from signvote.report.labels import unique
from signvote.report.measures import mean_of, mean_text, spread_of
from signvote.results import Results
from signvote.settings import conditions

BASELINE = "majority"  # the rule that the others are compared with
SETTINGS = ("task", "recipe", "attack", "split", "detail")  # of a row, other than rule and batches
Row = dict[str, Any]


def table(results: Results, baseline: str = BASELINE) -> list[Row]:
    """One row per experiment: its settings and its final metric, by panel, batch mode and metric, the best first.

    Keys: task, recipe, attack, split, detail (other settings that distinguish two rows), batches, rule, status
    (done, or how far its one run came), seeds (their number), metric (a `Metric`: name, unit, whether more is
    better), value (its mean at the last evaluation; a share is 0 to 1), spread
    (`spread_of` it, None for one seed), bytes_up (per round and worker), times_fewer (than float32), both None if
    nothing was sent; best: whether it has the best value of several under the same conditions; lead and lead_spread:
    its value minus that of the rule `baseline` under the same conditions, paired by seed, None if there is no such
    run. Unfinished runs are never best, and have and give no lead.
    """
    experiments = experiments_of(results)
    panels = unique(experiment.panel for experiment in experiments)
    batches = batch_order(experiments)
    by_conditions = [(conditions(experiment.settings), experiment) for experiment in experiments]
    keyed = []
    for mine, experiment in by_conditions:
        same = [other for its, other in by_conditions if its == mine]
        rivals = [other for other in same if other is not experiment and other.is_done]
        row = _row(experiment)
        row["best"] = _is_best(experiment, rivals)
        row |= _lead(experiment, rivals, baseline)
        panel = panels.index(experiment.panel)
        mode = batches.index(experiment.batches)
        place = (panel, mode, experiment.metric.rank(row["value"]))
        keyed.append((place, row))
    keyed.sort(key=lambda pair: pair[0])
    return [row for _, row in keyed]


def lead_text(row: Row) -> str:
    """A row's lead, of a share in points.

    >>> from signvote.metrics import ACCURACY
    >>> row = {"metric": ACCURACY, "lead": 0.0125, "lead_spread": 0.003}
    >>> lead_text(row), lead_text(row | {"lead": None})
    ('+1.25 ± 0.30', '')
    """
    if row["lead"] is None:
        return ""
    return mean_text(row["metric"], row["lead"], row["lead_spread"], sign="+")


def varying_settings(rows: list[Row]) -> list[str]:
    """The settings, other than rule and batches, in which the rows differ."""
    varying = []
    for name in SETTINGS:
        values = {row[name] for row in rows}
        if len(values) > 1:
            varying.append(name)
    return varying


def value_text(row: Row) -> str:
    """A row's value and its spread, of a share in percent."""
    return mean_text(row["metric"], row["value"], row["spread"])


def by_metric(rows: list[Row]) -> list[tuple[Metric, list[Row]]]:
    """The rows of each metric: tables have one metric each."""
    metrics = dict.fromkeys(row["metric"] for row in rows)
    return [(metric, [row for row in rows if row["metric"] == metric]) for metric in metrics]


def _rank(experiment: Experiment) -> float:
    return experiment.metric.rank(mean_of(list(experiment.final_by_seed().values())))


def _is_best(experiment: Experiment, rivals: list[Experiment]) -> bool:
    if not (rivals and experiment.is_done):
        return False
    return math.inf > _rank(experiment) <= min(map(_rank, rivals))


def _lead(experiment: Experiment, rivals: list[Experiment], baseline: str) -> dict[str, float | None]:
    """The lead over the baseline: the mean difference over the seeds that both have."""
    same_rule = [rival for rival in rivals if rival.rule == baseline]
    if not (same_rule and experiment.is_done):
        return {"lead": None, "lead_spread": None}
    mine = experiment.final_by_seed()
    its = same_rule[0].final_by_seed()
    shared_seeds = sorted(mine.keys() & its.keys())
    differences = [mine[seed] - its[seed] for seed in shared_seeds]
    return {
        "lead": mean_of(differences) if differences else None,
        "lead_spread": spread_of(differences),
    }


def _row(experiment: Experiment) -> Row:
    settings = experiment.settings
    values = list(experiment.final_by_seed().values())
    bytes_up = experiment.bytes_per_worker("bytes_up") or None  # 0: nothing was sent
    return {
        "task": settings["task"],
        "recipe": settings.get("recipe"),
        "attack": settings.get("attack"),
        "split": settings.get("split"),
        "detail": experiment.detail,
        "batches": experiment.batches,
        "rule": experiment.rule,
        "status": experiment.status,
        "seeds": len(experiment.runs),
        "metric": experiment.metric,
        "value": mean_of(values),
        "spread": spread_of(values),
        "bytes_up": bytes_up,
        "times_fewer": experiment.float32_bytes() / bytes_up if bytes_up else None,
    }
