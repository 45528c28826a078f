"""The settings of a run, declared once: a field of `Settings` has a type, a default and a text.

Everything that lists settings follows from these fields:

    sim/config.py     Config: the same fields, complete and checked
    cli/flags.py      a flag for each, with its text as help
    sim/compare.py    the name of a run's folder
    results/table.py  the columns of results.csv
    report/finals.py  which experiments may be compared with each other

This module imports no torch, so that results can be read without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any, Literal

Schedule = Literal["constant", "cosine"]
Zeros = Literal["coin", "abstain"]

RECIPES: dict[str, dict[str, Any]] = {
    "paper": {
        "step": 1e-3,
        "momentum": 0.0,
        "schedule": "constant",
        "ramp": 0.0,
        "decay": 0.0,
        "zeros": "abstain",
    },
    "tuned": {
        "step": 3e-3,
        "momentum": 0.9,
        "schedule": "cosine",
        "ramp": 0.05,
        "decay": 1.0,
        "zeros": "coin",
    },
}
FLOATS: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {"sgd": {"step": 0.1}, "median": {"step": 0.1}, "adamw": {"step": 1e-3}},
    "tuned": {
        "sgd": {"step": 1.0, "decay": 1e-3},
        "median": {"step": 1.0, "decay": 1e-3},
        "adamw": {"step": 8e-3, "decay": 0.5},
    },
}  # what a recipe means for rules that step by gradients instead of signs: their steps have another scale
FROM_RECIPE: Any = None  # default of a setting that the recipe decides; a Config never holds it


def about(
    text: str, *, in_name: bool = True, is_condition: bool = True, before: Any = MISSING
) -> dict[str, Any]:
    """Metadata of a setting.

    Args:
        text: the help text of its flag.
        in_name: whether the name of a run's folder shows it if it is unusual.
        is_condition: whether runs that differ in it must not be compared.
        before: its value in runs that were made before it existed, if that is not its default.

    """
    return {"text": text, "in_name": in_name, "is_condition": is_condition, "before": before}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one run, as the user gives them."""

    task: str = field(
        metadata=about(
            "mnist-10k (bundled), mnist, fashion-mnist, cifar10, python-source (text that Python brings),"
            " or a function of yours as MODULE:FACTORY, such as mypackage.tasks:make.",
            in_name=False,
        ),
    )
    rule: str = field(
        metadata=about(
            "A rule that `signvote rules` explains, or a yardstick: oracle, sgd, median or adamw.",
            in_name=False,
            is_condition=False,
        ),
    )
    recipe: str = field(
        default="tuned",
        metadata=about(
            "paper: constant step 1e-3, no momentum, zeros abstain."
            " tuned: momentum 0.9, a step of 3e-3 that rises and falls, decay 1, one strict bit.",
            in_name=False,
        ),
    )
    model: str | None = field(
        default=None,
        metadata=about(
            "mnist-cnn, resnet20, resnet56, mlp, gpt-tiny or gpt-small; default: the task's own.",
            in_name=False,
        ),
    )
    task_options: dict[str, Any] = field(
        default_factory=dict,
        metadata=about("Arguments of the function that makes your task, as KEY=VALUE."),
    )
    mode: int | None = field(
        default=None,
        metadata=about(
            "Batch mode of the paper, 1 (equal batches) to 4 (one strong worker); default: 1.",
            in_name=False,
            is_condition=False,  # batch_sizes is
        ),
    )
    workers: int = field(
        default=15,
        metadata=about("Number of workers, in a batch mode.", in_name=False, is_condition=False),
    )
    total: int = field(
        default=960,
        metadata=about("Samples per round, in a batch mode.", in_name=False, is_condition=False),
    )
    batch_sizes: tuple[int, ...] = field(
        default=(),
        metadata=about("Batch size of each worker, instead of a mode.", in_name=False),
    )
    rounds: int = field(
        default=300,
        metadata=about("Number of rounds.", in_name=False),
    )
    seed: int = field(
        default=0,
        metadata=about("Seed of all random numbers of the run.", in_name=False, is_condition=False),
    )
    step: float = field(
        default=FROM_RECIPE,
        metadata=about("Step size; default: the recipe's."),
    )
    momentum: float = field(
        default=FROM_RECIPE,
        metadata=about("Momentum of each worker before the sign; default: the recipe's."),
    )
    schedule: Schedule = field(
        default=FROM_RECIPE,
        metadata=about("How the step falls; default: the recipe's."),
    )
    ramp: float = field(
        default=FROM_RECIPE,
        metadata=about(
            "Share of the rounds over which the step rises to its full size; default: the recipe's.",
            before=0.0,
        ),
    )
    zeros: Zeros = field(
        default=FROM_RECIPE,
        metadata=about("What a zero gradient votes; default: the recipe's."),
    )
    decay: float = field(
        default=FROM_RECIPE,
        metadata=about("Weight decay: x <- (1 - step * decay) x in each round; default: the recipe's."),
    )
    feedback: bool = field(
        default=False,
        metadata=about(
            "Error feedback: add to the next gradient the residual that the signs of this vote leave out."
        ),
    )
    top: float | None = field(
        default=None,
        metadata=about(
            "Vote only on this share of the coordinates, those with the largest magnitude; best with --zeros abstain."
        ),
    )
    split: str = field(
        default="shared",
        metadata=about("How workers share the data: shared (each has all), iid, dirichlet:A or labels:K."),
    )
    attack: str | None = field(
        default=None,
        metadata=about(
            "NAME[=STRENGTH]:COUNT[:START]: the last COUNT workers attack, for example anti:5;"
            " docs/security.md lists all attacks."
        ),
    )
    miss: float = field(
        default=0.0,
        metadata=about("Probability that a worker misses a round."),
    )
    absent: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "WORKER:FROM[:TO], rounds in which a worker is absent: it joins late, leaves or returns."
        ),
    )
    min_voters: int = field(
        default=1,
        metadata=about("A round with fewer voters moves no parameter."),
    )
    evaluate_every: int = field(
        default=50,
        metadata=about("Rounds between two evaluations.", in_name=False, is_condition=False),
    )
    test_batch: int = field(
        default=64,
        metadata=about(
            "Samples per test batch; matters for batch norm without running statistics.",
            in_name=False,
        ),
    )
    sign_error: bool = field(
        default=False,
        metadata=about(
            "Also compare decisions with the gradient of all training data (slow).",
            in_name=False,
            is_condition=False,
        ),
    )
    options: dict[str, Any] = field(
        default_factory=dict,
        metadata=about(
            "Options of the rule as KEY=VALUE, such as forgetting=0.98, per=tensor, warmup=50.",
            is_condition=False,
        ),
    )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as results.json holds them."""
        return {name: plain(value) for name, value in asdict(self).items()}


SETTINGS: dict[str, Field[Any]] = {setting.name: setting for setting in fields(Settings)}


def plain(value: Any) -> Any:
    """A value of a setting as JSON stores it."""
    return list(value) if isinstance(value, tuple) else value


def default_of(setting: Field[Any]) -> Any:
    """The default of a setting as JSON stores it; MISSING if it has none."""
    if setting.default_factory is not MISSING:
        return setting.default_factory()
    return plain(setting.default)


def recipe_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the recipe of a run decides; empty if the recipe is unknown.

    >>> recipe_of({"recipe": "paper", "rule": "sgd"})["step"]
    0.1
    """
    name = settings.get("recipe", "tuned")
    if name not in RECIPES:
        return {}
    recipe = dict(RECIPES[name])
    for rule, scale in FLOATS[name].items():
        if rule == settings.get("rule"):  # of a damaged file it may be anything
            recipe |= scale
    return recipe


def completed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a run that was made: those that it does not have did not exist yet."""
    given = _usual(settings) | _before() | dict(settings)
    return {name: given.get(name) for name in SETTINGS}


def unusual(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ from the recipe and from their default; those that a recipe decides come last.

    >>> unusual({"task": "mnist", "step": 0.01, "momentum": 0.9, "miss": 0.1})
    {'task': 'mnist', 'miss': 0.1, 'step': 0.01}
    """
    usual = _usual(settings)
    found = {name: value for name, value in settings.items() if value != usual.get(name, MISSING)}
    last = recipe_of(settings).keys() & found.keys()
    first = {name: value for name, value in found.items() if name not in last}
    return first | {name: found[name] for name in found if name in last}


def conditions(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that two runs must share to be compared.

    These are all settings except the rule, its options, the seed and those that change no accuracy. Only unusual
    values count, because the usual step of `sgd` differs from that of a vote. Settings that this version does not
    know count as well.

    >>> conditions({"task": "mnist", "recipe": "paper", "rule": "sgd", "seed": 3, "step": 0.1, "miss": 0.1})
    {'task': 'mnist', 'recipe': 'paper', 'miss': 0.1}
    """
    free = {name for name, setting in SETTINGS.items() if not setting.metadata["is_condition"]}
    return {name: value for name, value in unusual(settings).items() if name not in free}


def _before() -> dict[str, Any]:
    """The settings that runs made before they existed had at another value than their default."""
    values = {name: setting.metadata["before"] for name, setting in SETTINGS.items()}
    return {name: value for name, value in values.items() if value is not MISSING}


def _usual(settings: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {name: default_of(setting) for name, setting in SETTINGS.items()}
    given = {name: value for name, value in defaults.items() if value is not MISSING}
    return given | recipe_of(settings)
