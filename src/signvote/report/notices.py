"""What was noticed about the workers of a run: rounds that moved nothing, and the notices of its server."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from signvote.report.experiments import Experiment
from signvote.results import Result

FEW = 5  # notices of a run; more are folded up


class Noticed(NamedTuple):
    """A run with something to notice."""

    run: str  # its rule and batches
    conditions: str  # and seed
    texts: list[str]


def noticed(experiments: list[Experiment]) -> list[Noticed]:
    """The runs with something to notice."""
    found = []
    for experiment in experiments:
        for run in experiment.runs:
            texts = _texts(run)
            if texts:
                conditions = f"{experiment.panel}, seed {run['config']['seed']}"
                found.append(Noticed(experiment.label + experiment.mark, conditions, texts))
    return found


def section(experiments: list[Experiment]) -> str:
    """The part of the page; empty if there is nothing to notice."""
    runs = noticed(experiments)
    if not runs:
        return ""
    lists = "".join(map(_list, runs))
    return f'<section id="notices">\n<h2>Notices</h2>\n{lists}\n</section>'


def _list(run: Noticed) -> str:
    entries = "".join(f"<li>{escape(text)}</li>" for text in run.texts)
    name = f"{escape(run.run)} <small>{escape(run.conditions)}</small>"
    if len(run.texts) <= FEW:
        return f"<p>{name}</p><ul>{entries}</ul>"
    return f"<details><summary>{name}: {len(run.texts)} notices</summary><ul>{entries}</ul></details>"


def _texts(run: Result) -> list[str]:
    texts = list(run.get("notices", []))
    undecided = run.get("undecided", 0)
    if undecided:
        texts.insert(0, f"rounds in which too few voted and no parameter moved: {undecided:,}")
    return texts
