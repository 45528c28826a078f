"""The tables of a study of language models: the first metric by rule and population, and the settings of each rule.

A population is the batch sizes of the workers and how they share the data. The best mean of a population is bold,
whichever rule has it. Of a rule with several settings, the best comes first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paper.claims import table as markdown

from signvote.report.experiments import Experiment, experiments_of
from signvote.report.labels import unique
from signvote.report.measures import mean_of, mean_text, spread_of
from signvote.results import Result, results_of

SETTINGS = ("step", "momentum", "decay")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A rule, with settings if it has several, in each population."""

    name: str
    cells: dict[str, Experiment]  # by population

    @property
    def any(self) -> Experiment:
        """One of its experiments."""
        return next(iter(self.cells.values()))

    def rank(self, population: str) -> float:
        """By what rows are compared: the lower, the better."""
        if population not in self.cells:
            return math.inf
        experiment = self.cells[population]
        return experiment.metric.rank(mean_of(_values(experiment)))

    def text(self, population: str) -> str:
        """Mean and spread of the seeds, or how many of them have no number."""
        if population not in self.cells:
            return ""
        experiment = self.cells[population]
        values = _values(experiment)
        lost = sum(not math.isfinite(value) for value in values)
        if lost:
            return f"{lost} of {len(values)} diverged"
        return mean_text(experiment.metric, mean_of(values), spread_of(values))

    def settings(self, population: str) -> str:
        """Its step, momentum and decay, and whether it sends the signs of polar factors."""
        if population not in self.cells:
            return ""
        settings = self.cells[population].settings
        numbers = [f"{settings[name]:g}" for name in SETTINGS]
        return ", ".join([*numbers, "polar"] if settings["polar"] else numbers)

    def bytes_up(self) -> str:
        """What a worker sends in a round, in bytes per parameter."""
        sent = self.any.bytes_per_worker("bytes_up") or 0.0
        return f"{sent / self.any.runs[0]['coordinates']:.3f}"


def language(runs: list[Result]) -> str:
    """Both tables."""
    found = experiments_of(results_of(runs))
    populations = _populations(found)
    rows = _rows(found, populations)
    metric = found[0].metric
    best = {name: min(row.rank(name) for row in rows) for name in populations}
    lines = []
    for row in rows:
        cells = [_marked(row, name, best[name]) for name in populations]
        lines.append([row.name, *cells, row.bytes_up()])
    settings = [[row.name, *map(row.settings, populations)] for row in rows]
    heads = [f"test {metric.title}, {metric.direction}", *populations, "bytes up per parameter and round"]
    return f"{markdown(heads, lines)}\n\n{markdown([', '.join(SETTINGS), *populations], settings)}"


def _rows(found: list[Experiment], populations: list[str]) -> list[Row]:
    """Rules in the order of the study, and of each rule the best settings first."""
    by_name: dict[str, dict[str, Experiment]] = {}
    for experiment in found:
        cells = by_name.setdefault(experiment.name(recipe=False), {})
        cells[_population(experiment)] = experiment
    rows = [Row(name=name, cells=cells) for name, cells in by_name.items()]
    rules = unique(row.any.rule for row in rows)
    return sorted(rows, key=lambda row: (rules.index(row.any.rule), *map(row.rank, populations)))


def _populations(found: list[Experiment]) -> list[str]:
    """Batch sizes as the study has them, then the batch modes."""
    ordered = sorted(found, key=lambda experiment: experiment.settings.get("mode") or 0)
    return unique(map(_population, ordered))


def _population(experiment: Experiment) -> str:
    split = experiment.settings.get("split", "shared")
    return experiment.full_batches if split == "shared" else f"{experiment.full_batches}, {split}"


def _marked(row: Row, population: str, best: float) -> str:
    text = row.text(population)
    return f"**{text}**" if text and row.rank(population) == best < math.inf else text


def _values(experiment: Experiment) -> list[float]:
    return list(experiment.final_by_seed().values())
