"""Results as people compare them: an experiment is all runs that differ in nothing but their seed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from signvote.errors import ConfigError
from signvote.metrics import Metric, metrics_of
from signvote.report.labels import batch_label, machine_label, setting_label, unique
from signvote.report.measures import Curve, curve_of, measured
from signvote.results import Result, Results, current, length, total

FLOAT32_BYTES = 4
RESULT_KEYS = (
    "config",
    "status",
    "coordinates",
    "evaluations",
    "machine",
    "seconds",
    "voters",
    "bytes_up",
    "bytes_down",
)
SETTING_KEYS = ("task", "rule", "batch_sizes", "seed")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Runs that differ in nothing but their seed.

    Unfinished runs are left out. If no run is finished, the one that came furthest stands alone, marked as unfinished.
    """

    settings: dict[str, Any]  # as results.json has them, without the seed
    runs: tuple[Result, ...]  # one per seed
    left_out: int = 0
    detail: str = ""  # settings that distinguish it from another experiment with the same rule and batches

    @property
    def rule(self) -> str:
        """The rule's name."""
        return str(self.settings["rule"])

    @property
    def batches(self) -> str:
        """The batch mode, or the batch sizes if they follow no mode."""
        mode = self.settings.get("mode")
        if mode is None:
            return batch_label(self.settings["batch_sizes"])
        return f"mode {mode}"

    @property
    def full_batches(self) -> str:
        """The batch mode and its batch sizes."""
        sizes = batch_label(self.settings["batch_sizes"])
        if self.batches == sizes:
            return sizes
        return f"{self.batches}: {sizes}"

    @property
    def label(self) -> str:
        """Short name inside a panel."""
        return f"{self.rule}, {self.batches}"

    @property
    def panel(self) -> str:
        """Title of its panel: the settings, other than rule and batches, that a fair comparison shares."""
        return self._joined("task", "recipe", "attack", "split", "detail")

    @property
    def scene(self) -> str:
        """The settings that rules of all recipes share: title of a panel that compares them."""
        return self._joined("task", "attack", "split")

    @property
    def is_done(self) -> bool:
        """Whether its runs are finished."""
        return bool(self.runs[0]["status"] == "done")

    @property
    def status(self) -> str:
        """Done, or how far its run came."""
        if self.is_done:
            return "done"
        done = rounds_done(self.runs[0])
        rounds = self.settings.get("rounds")
        return f"{done} of {rounds} rounds, unfinished" if rounds else "unfinished"

    @property
    def mark(self) -> str:
        """What follows its name if its run is not finished."""
        return "" if self.is_done else f" ({self.status})"

    def name(self, *, recipe: bool) -> str:
        """The rule, with the settings that distinguish its curve from others with the same batches."""
        keys = ("recipe", "detail") if recipe else ("detail",)
        words = self._joined(*keys)
        if not words:
            return self.rule
        return f"{self.rule}, {words}"

    def machine(self) -> str:
        """The machines that computed its runs; empty if the runs did not record it."""
        labels = [machine_label(run["machine"]) for run in self.runs]
        return "; ".join(unique(filter(None, labels)))

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What its runs measured, the most important first."""
        return metrics_of(self.runs[0])

    @property
    def metric(self) -> Metric:
        """The metric that figure, tables and leads show."""
        return self.metrics[0]

    def curve(self, metric: str) -> Curve:
        """The metric at the rounds that every seed measured; empty if it was not recorded."""
        return curve_of(self.runs, metric)

    def last_round(self) -> int:
        """The last evaluated round that all seeds reached."""
        return self.curve(self.metric.name).rounds[-1]

    def final_by_seed(self) -> dict[int, float]:
        """The metric of each seed at the last round that all of them reached."""
        last = self.last_round()
        values = {}
        for run in self.runs:
            seed = run["config"]["seed"]
            by_round = measured(run, self.metric.name)
            values[seed] = by_round[last]
        return values

    def bytes_per_worker(self, key: str) -> float | None:
        """Mean bytes per worker and round in which it voted, or None; `key` is `bytes_up` or `bytes_down`."""
        sent = self._total(key)
        messages = self._total("voters")
        if not sent or not messages:
            return None
        return sent / messages

    def float32_bytes(self) -> int:
        """Bytes that a worker would send in a round without compression."""
        return FLOAT32_BYTES * int(self.runs[0]["coordinates"])

    def seconds_per_round(self) -> dict[str, float]:
        """Mean seconds of a round by phase. If the runs recorded a total, `rest` is what no phase covers."""
        rounds = 0
        by_phase: dict[str, float] = defaultdict(float)
        for run in self.runs:
            rounds += length(run["bytes_up"])
            for phase, seconds in run["seconds"].items():
                by_phase[phase] += seconds
        if not rounds:
            return {}
        if "total" in by_phase:
            whole = by_phase.pop("total")
            known = sum(by_phase.values())
            by_phase["rest"] = max(0.0, whole - known)
        return {phase: seconds / rounds for phase, seconds in by_phase.items()}

    def _total(self, key: str) -> int:
        """Sum over all rounds of all runs."""
        return sum(total(run[key]) for run in self.runs)

    def _joined(self, *names: str) -> str:
        """These settings in words, without those at their default."""
        split = self.settings.get("split", "shared")
        words = {
            "task": str(self.settings["task"]),
            "recipe": self._filled_in("recipe", "{} recipe"),
            "attack": self._filled_in("attack", "attack {}"),
            "split": "" if split == "shared" else f"split {split}",
            "detail": self.detail,
        }
        asked_for = [words[name] for name in names]
        return " · ".join(filter(None, asked_for))

    def _filled_in(self, key: str, text: str) -> str:
        value = self.settings.get(key)
        if value is None:
            return ""
        return text.format(value)


def experiments_of(results: Results) -> list[Experiment]:
    """All experiments that have an evaluated run, in the order of the runs."""
    all_runs = _checked(results)
    runs = [run for run in all_runs if run["evaluations"].get("round")]
    if not runs:
        raise ConfigError(
            "the results hold no measured run; run `signvote compare` or `signvote train` first"
        )
    _check_metrics(runs)
    by_settings: dict[str, list[Result]] = defaultdict(list)
    for run in map(_with_data, runs):
        key = json.dumps(_without_seed(run["config"]), sort_keys=True)
        by_settings[key].append(run)
    experiments = [_experiment(same) for same in by_settings.values()]
    return _with_details(experiments)


def rounds_done(run: Result) -> int:
    """How many rounds a run has done."""
    return int(run.get("rounds_done", run["evaluations"]["round"][-1]))


def batch_order(experiments: Iterable[Experiment]) -> list[str]:
    """The batch labels: modes by number, then explicit sizes."""
    keys = set()
    for experiment in experiments:
        mode = experiment.settings.get("mode")
        if mode is None:
            keys.add((1, 0, experiment.batches))
        else:
            keys.add((0, mode, experiment.batches))
    return [label for *_, label in sorted(keys)]


def machines_of(experiments: Iterable[Experiment]) -> str:
    """A sentence that names the machines of all experiments; empty if none was recorded."""
    machines = [experiment.machine() for experiment in experiments]
    known = "; ".join(unique(filter(None, machines)))
    if not known:
        return ""
    return f" Ran on {known}."


def _checked(results: Results) -> list[Result]:
    runs: list[Result] = current(results)["runs"]
    for i, run in enumerate(runs):
        _check(i, run)
    return runs


def _check(i: int, run: Result) -> None:
    settings = run.get("config", {})
    missing = [key for key in RESULT_KEYS if key not in run]
    missing += [f"config.{key}" for key in SETTING_KEYS if key not in settings]
    if missing:
        names = ", ".join(missing)
        raise ConfigError(f"run {i} of the results lacks {names}; was the file edited?")
    lengths = {name: len(values) for name, values in run["evaluations"].items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"run {i} of the results has evaluations of unequal lengths: {lengths}")


def _check_metrics(runs: list[Result]) -> None:
    """Raise if runs of one task measured different things: they cannot share a panel or a table."""
    by_task: dict[str, tuple[Metric, ...]] = {}
    for run in runs:
        task = str(run["config"]["task"])
        mine = metrics_of(run)
        its = by_task.setdefault(task, mine)
        if mine != its:
            raise ConfigError(
                f"some runs of task {task!r} measured {_titles(its)}, others {_titles(mine)}; report them separately"
            )


def _titles(metrics: tuple[Metric, ...]) -> str:
    return " and ".join(f"{metric.title} ({metric.direction})" for metric in metrics)


def _with_data(run: Result) -> Result:
    """The description of its data as if it were a setting: runs on other data are another experiment."""
    data = run.get("data")
    if not data:
        return run
    text = ", ".join(data.values())
    return {**run, "config": {**run["config"], "data": text}}


def _without_seed(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "seed"}


def _experiment(runs: list[Result]) -> Experiment:
    done = [run for run in runs if run["status"] == "done"]
    chosen = done or [max(runs, key=rounds_done)]
    by_seed = {run["config"]["seed"]: run for run in chosen}
    experiment = Experiment(
        settings=_without_seed(runs[0]["config"]),
        runs=tuple(by_seed[seed] for seed in sorted(by_seed)),
        left_out=len(runs) - len(chosen),
    )
    if not experiment.curve(experiment.metric.name).rounds:
        label = experiment.label
        raise ConfigError(f"the seeds of {label} share no evaluated round; give them the same rounds")
    return experiment


def _with_details(experiments: list[Experiment]) -> list[Experiment]:
    """Add to experiments with the same name the settings in which they differ."""
    by_name: dict[tuple[str, str], list[Experiment]] = defaultdict(list)
    for experiment in experiments:
        by_name[experiment.panel, experiment.label].append(experiment)
    detailed = []
    for experiment in experiments:
        namesakes = by_name[experiment.panel, experiment.label]
        detailed.append(replace(experiment, detail=_detail(experiment, namesakes)))
    return detailed


def _detail(experiment: Experiment, namesakes: list[Experiment]) -> str:
    keys = unique(key for other in namesakes for key in other.settings)
    labels = []
    for key in keys:
        mine = experiment.settings.get(key)
        values = [other.settings.get(key) for other in namesakes]
        differs = any(value != mine for value in values)
        if differs and key != "workers":  # the batch sizes show their number
            labels.append(setting_label(key, mine))
    return ", ".join(filter(None, labels))
