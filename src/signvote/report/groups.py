"""Results as people compare them: runs that differ by their seed only are one group."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from signvote.errors import ConfigError
from signvote.results import Results, current, unpack

Config = dict[str, Any]
Run = dict[str, Any]

FLOAT32_BYTES = 4
RUN_KEYS = (
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
CONFIG_KEYS = ("task", "rule", "batch_sizes", "seed")
SOURCES = {  # metric -> where a run keeps it
    "accuracy": ("evaluations", "accuracy"),
    "loss": ("evaluations", "loss"),
    "sign error": ("sign_error", "error"),
}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric by round: mean over the seeds, and the spread around it."""

    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ by nothing but their seed.

    Runs that were interrupted are left out, unless the group has no other.
    """

    config: Config  # without the seed
    runs: tuple[Run, ...]  # one per seed
    left_out: int = 0
    detail: str = ""  # what tells this group from another of the same rule and batches

    @property
    def rule(self) -> str:
        """The rule's name."""
        return str(self.config["rule"])

    @property
    def batches(self) -> str:
        """The batch mode, or the batch sizes where they follow no mode."""
        mode = self.config.get("mode")
        return batch_label(self.config["batch_sizes"]) if mode is None else f"mode {mode}"

    @property
    def full_batches(self) -> str:
        """The batch mode and what it stands for."""
        sizes = batch_label(self.config["batch_sizes"])
        return sizes if self.batches == sizes else f"{self.batches}: {sizes}"

    @property
    def label(self) -> str:
        """Short name inside a panel."""
        return f"{self.rule}, {self.batches}"

    @property
    def panel(self) -> str:
        """Title of the panel: everything but rule and batches that makes a comparison fair."""
        return self._joined("task", "recipe", "attack", "split", "detail")

    @property
    def scene(self) -> str:
        """What rules of any recipe have in common: title of a panel that compares them all."""
        return self._joined("task", "attack", "split")

    def name(self, *, recipe: bool) -> str:
        """The rule, and what else tells its curve from others of the same batches."""
        told = self._joined("recipe", "detail") if recipe else self._joined("detail")
        return f"{self.rule}, {told}" if told else self.rule

    def machine(self) -> str:
        """What its runs were computed on, where they say so."""
        return "; ".join(unique(text for run in self.runs if (text := _stretches(run["machine"]))))

    @property
    def interrupted(self) -> bool:
        """Whether no run of the group was finished."""
        return bool(self.runs[0]["status"] != "done")

    def curve(self, metric: str) -> Curve:
        """The rounds at which every seed was measured; empty where the metric was not asked for."""
        by_round = [measured(run, metric) for run in self.runs]
        rounds = sorted(set.intersection(*(set(values) for values in by_round)))
        points = [[values[r] for values in by_round] for r in rounds]
        mean = [fmean(values) for values in points]
        bands = [band(values) for values in points]
        return Curve(rounds=rounds, mean=mean, low=[b[0] for b in bands], high=[b[1] for b in bands])

    def final_by_seed(self) -> dict[int, float]:
        """Accuracy of each seed at the last round that all of them reached."""
        last = self.curve("accuracy").rounds[-1]
        return {run["config"]["seed"]: measured(run, "accuracy")[last] for run in self.runs}

    def bytes_per_worker(self, key: str) -> float | None:
        """Mean bytes per worker and round it took part in, of `bytes_up` or `bytes_down` of all together."""
        sent, messages = (sum(sum(unpack(run[name])) for run in self.runs) for name in (key, "voters"))
        return sent / messages if messages else None

    def float32_bytes(self) -> int:
        """What a worker would send in a round without compression."""
        return FLOAT32_BYTES * int(self.runs[0]["coordinates"])

    def seconds_per_round(self) -> dict[str, float]:
        """Mean seconds of a round by phase, and the rest of the total where runs recorded one."""
        rounds = sum(len(unpack(run["bytes_up"])) for run in self.runs)
        total: dict[str, float] = defaultdict(float)
        for run in self.runs:
            for phase, seconds in run["seconds"].items():
                total[phase] += seconds
        if "total" in total:
            whole = total.pop("total")
            total["rest"] = max(0.0, whole - sum(total.values()))
        return {phase: seconds / rounds for phase, seconds in total.items()} if rounds else {}

    def _joined(self, *names: str) -> str:
        """Settings in words, those left out that say nothing."""
        split = self.config.get("split", "shared")
        words = {
            "task": str(self.config["task"]),
            "recipe": self._named("recipe", "{} recipe"),
            "attack": self._named("attack", "attack {}"),
            "split": "" if split == "shared" else f"split {split}",
            "detail": self.detail,
        }
        return " · ".join(words[name] for name in names if words[name])

    def _named(self, key: str, text: str) -> str:
        value = self.config.get(key)
        return "" if value is None else text.format(value)


def groups(results: Results) -> list[Group]:
    """All groups, in the order of the runs, each with at least one measured run."""
    runs = [run for run in _checked(results) if run["evaluations"].get("round")]
    if not runs:
        raise ConfigError(
            "the results hold no measured run; run `signvote compare` or `signvote train` first"
        )
    same: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        same[json.dumps(_without_seed(run["config"]), sort_keys=True)].append(run)
    return _told_apart([_group(members) for members in same.values()])


def spread_of(values: Sequence[float]) -> float | None:
    """Sample standard deviation; of two values their distance; of one nothing.

    >>> spread_of([0.5]), spread_of([1.0, 3.0]), spread_of([1.0, 2.0, 3.0])
    (None, 2.0, 1.0)
    """
    if len(values) < 2:
        return None
    return max(values) - min(values) if len(values) == 2 else stdev(values)


def band(values: Sequence[float]) -> tuple[float, float]:
    """What is shaded: mean -+ sample standard deviation, but never beyond the lowest and the highest."""
    low, high = min(values), max(values)
    if len(values) < 3 or not all(map(math.isfinite, values)):
        return low, high
    return max(low, fmean(values) - stdev(values)), min(high, fmean(values) + stdev(values))


def batch_label(sizes: Sequence[int]) -> str:
    """Batch sizes in a few words.

    >>> batch_label([904, 4, 4]), batch_label([1, 2, 3, 4])
    ('2 x 4 + 1 x 904', '4 workers, batch 1 to 4')
    """
    counts = sorted(Counter(sizes).items())
    if len(counts) > 3:
        return f"{len(sizes)} workers, batch {counts[0][0]} to {counts[-1][0]}"
    return " + ".join(f"{count} x {size}" for size, count in counts)


def batch_order(found: Iterable[Group]) -> list[str]:
    """The batch labels: modes by number, then explicit sizes."""
    keys = {(g.config.get("mode") is None, g.config.get("mode") or 0, g.batches) for g in found}
    return [label for *_, label in sorted(keys)]


def unique(items: Iterable[str]) -> list[str]:
    """The different items, in order of appearance."""
    return list(dict.fromkeys(items))


def number(value: float | None) -> float:
    """A number from JSON, where None stands for one that is none."""
    return math.nan if value is None else float(value)


def measured(run: Run, metric: str) -> dict[int, float]:
    """A metric by round; what is no number is nan."""
    source, key = SOURCES[metric]
    values = run.get(source, {})
    return {r: number(v) for r, v in zip(values.get("round", ()), values.get(key, ()), strict=False)}


def _checked(results: Results) -> list[Run]:
    runs: list[Run] = current(results)["runs"]
    for i, run in enumerate(runs):
        missing = [key for key in RUN_KEYS if key not in run]
        missing += [f"config.{key}" for key in CONFIG_KEYS if key not in run.get("config", {})]
        if missing:
            raise ConfigError(f"run {i} of the results lacks {', '.join(missing)}; was the file edited?")
        lengths = {name: len(values) for name, values in run["evaluations"].items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"run {i} of the results has evaluations of unequal lengths: {lengths}")
    return runs


def _stretches(machine: list[dict[str, Any]]) -> str:
    """A run that moved has one entry for each machine.

    >>> _stretches([{"from_round": 1, "device": "cpu"}, {"from_round": 9, "device": "cuda", "precision": "tf32"}])
    'cpu, from round 9 cuda tf32'
    """
    texts = [" ".join(str(m[k]) for k in ("device", "precision") if m.get(k)) for m in machine]
    later = (
        f"from round {m.get('from_round')} {text}" for m, text in zip(machine[1:], texts[1:], strict=True)
    )
    return ", ".join((*texts[:1], *later))


def _without_seed(config: Config) -> Config:
    return {key: value for key, value in config.items() if key != "seed"}


def _group(runs: list[Run]) -> Group:
    done = [run for run in runs if run["status"] == "done"]
    by_seed = {run["config"]["seed"]: run for run in done or runs}
    config = _without_seed(runs[0]["config"])
    chosen = tuple(by_seed[seed] for seed in sorted(by_seed))
    group = Group(config=config, runs=chosen, left_out=len(runs) - len(done) if done else 0)
    if not group.curve("accuracy").rounds:
        raise ConfigError(f"the seeds of {group.label} share no evaluated round; give them the same rounds")
    return group


def _told_apart(found: list[Group]) -> list[Group]:
    """Give groups that would carry the same name the settings in which they differ."""
    namesakes: dict[tuple[str, str], list[Group]] = defaultdict(list)
    for group in found:
        namesakes[group.panel, group.label].append(group)
    return [_with_detail(group, namesakes[group.panel, group.label]) for group in found]


def _with_detail(group: Group, namesakes: list[Group]) -> Group:
    keys = unique(key for other in namesakes for key in other.config)
    differing = [
        key for key in keys if any(other.config.get(key) != group.config.get(key) for other in namesakes)
    ]
    told = [_told(key, group.config.get(key)) for key in differing if key != "workers"]  # batch sizes say it
    detail = ", ".join(text for text in told if text)
    return Group(config=group.config, runs=group.runs, left_out=group.left_out, detail=detail)


def _told(key: str, value: Any) -> str:
    """A setting in words; nothing if it is not there.

    >>> _told("options", {"cap": 2.0, "per": "tensor"}), _told("feedback", True), _told("top", None)
    ('cap 2.0, per tensor', 'feedback', '')
    """
    if key == "batch_sizes":
        return batch_label(value)
    if isinstance(value, dict):
        return ", ".join(_told(name, inner) for name, inner in value.items())
    if value is None or value is False:
        return ""
    return key if value is True else f"{key} {value}"
