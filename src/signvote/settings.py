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

from signvote.recipes import recipe_of, usual_recipe

Schedule = Literal["constant", "cosine"]
Zeros = Literal["coin", "abstain"]
Decays = Literal["matrices", "all"]
Inner = Literal["adamw", "sgd"]

FROM_TASK: Any = None  # default of the recipe; a Config never holds it
FROM_RECIPE: Any = None  # default of a setting that the recipe decides; a Config never holds it
FROM_ROUNDS: Any = None  # the same, of one that the number of rounds decides
MOST_ROUNDS_UNSEEN = 50  # between two evaluations, by default
EVALUATIONS = 6  # of a short run, by default


def about(
    text: str,
    *,
    unset: str = "",
    in_name: bool = True,
    is_condition: bool = True,
    before: Any = MISSING,
) -> dict[str, Any]:
    """Metadata of a setting.

    Args:
        text: the help text of its flag.
        unset: what happens if it is not given, for a setting whose default is no value.
        in_name: whether the name of a run's folder shows it if it is unusual.
        is_condition: whether runs that differ in it must not be compared.
        before: its value in runs that were made before it existed, if that is not its default.

    """
    return {
        "text": text,
        "unset": unset,
        "in_name": in_name,
        "is_condition": is_condition,
        "before": before,
    }


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one run, as the user gives them."""

    task: str = field(
        metadata=about(
            "mnist-10k (bundled), mnist, fashion-mnist, cifar10, python-source (Python's standard library as text),"
            " or a function of yours as MODULE:FACTORY, such as mypackage.tasks:make.",
            in_name=False,
        ),
    )
    rule: str = field(
        default="weighted",
        metadata=about(
            "How votes are weighed: a rule that `signvote rules` explains,"
            " or a yardstick (oracle, sgd, median, adamw; with --local-steps diloco, sparseloco).",
            in_name=False,
            is_condition=False,
        ),
    )
    recipe: str = field(
        default=FROM_TASK,
        metadata=about(
            "Step, momentum, schedule, decay and zeros in one word."
            " paper: constant step 1e-3, no momentum, zeros abstain."
            " tuned, for images: momentum 0.9, a step of 3e-3 that rises and falls, decay 1 of matrices, one"
            " strict bit. text: the same for language models, with polar factors, and a step that rises for longer.",
            unset="the task's own",
            in_name=False,
        ),
    )
    model: str | None = field(
        default=None,
        metadata=about(
            "mnist-cnn, resnet20, resnet20-gn, resnet56, mlp, gpt-tiny or gpt-small.",
            unset="the task's own",
            in_name=False,
        ),
    )
    task_options: dict[str, Any] = field(
        default_factory=dict,
        metadata=about("Arguments of the function that makes your task, as KEY=VALUE.", unset="none"),
    )
    mode: int | None = field(
        default=None,
        metadata=about(
            "How workers share the samples of a round, as in the paper: 1 (equally) to 4 (one worker has nearly all).",
            unset="1",
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
        metadata=about(
            "Batch size of each worker, instead of a mode.",
            unset="those of the mode",
            in_name=False,
        ),
    )
    rounds: int = field(default=300, metadata=about("Number of rounds.", in_name=False))
    seed: int = field(
        default=0,
        metadata=about("Seed of all random numbers of the run.", in_name=False, is_condition=False),
    )
    step: float = field(default=FROM_RECIPE, metadata=about("Step size."))
    momentum: float = field(default=FROM_RECIPE, metadata=about("Momentum of each worker before the sign."))
    interpolation: float | None = field(
        default=None,
        metadata=about(
            "Send the signs of alpha m + (1 - alpha) g, with this alpha and the average m of earlier rounds."
            " Lion: 0.9, with --momentum 0.99.",
            unset="send those of m",
        ),
    )
    clip: float | None = field(
        default=None,
        metadata=about(
            "Scale each worker's gradient down to this norm before momentum averages it.",
            unset="never",
        ),
    )
    polar: bool = field(
        default=FROM_RECIPE,
        metadata=about(
            "Of each matrix, send the signs of the polar factor of the average instead of the average's.",
            before=False,
        ),
    )
    schedule: Schedule = field(default=FROM_RECIPE, metadata=about("How the step falls."))
    ramp: float = field(
        default=FROM_RECIPE,
        metadata=about(
            "Share of the rounds over which the step rises to its full size.",
            before=0.0,
        ),
    )
    zeros: Zeros = field(default=FROM_RECIPE, metadata=about("The vote for a gradient of exactly zero."))
    decay: float = field(
        default=FROM_RECIPE,
        metadata=about("Weight decay: x <- (1 - step * decay) x in each round."),
    )
    decays: Decays = field(
        default=FROM_RECIPE,
        metadata=about(
            "Which parameters decay: all, or matrices, so that norms, biases and embeddings do not.",
            before="all",
        ),
    )
    steps: dict[str, float] = field(
        default_factory=dict,
        metadata=about(
            "Factors of the step by patterns of names, as PATTERN=FACTOR, such as 'tokens*=0.3';"
            " the last that fits counts.",
            unset="none",
        ),
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
            "Vote only on this share of the coordinates, those with the largest magnitude; best with --zeros abstain.",
            unset="on all",
        ),
    )
    top_end: float | None = field(
        default=None,
        metadata=about(
            "Share in the last round. It falls by equal factors from --top, or from 1 without --top.",
            unset="that of --top",
        ),
    )
    local_steps: int | None = field(
        default=None,
        metadata=about(
            "Steps that a worker takes by itself before each vote, which is then on the change of its parameters."
            " A round is one vote.",
            unset="votes on gradients",
        ),
    )
    inner: Inner = field(
        default="adamw",
        metadata=about(
            "The optimizer of local steps: adamw or sgd, with the step, momentum, decay and schedule of the run."
        ),
    )
    beta2: float = field(
        default=0.99,
        metadata=about("The second beta of adamw as the optimizer of local steps."),
    )
    outer_step: float = field(
        default=0.7,
        metadata=about("With local steps: how much of the change that was voted on is applied."),
    )
    outer_momentum: float = field(
        default=0.6,
        metadata=about("With local steps: Nesterov momentum of the changes that were voted on."),
    )
    split: str = field(
        default="shared",
        metadata=about("How workers share the data: shared (each has all), iid, dirichlet:A or labels:K."),
    )
    attack: str | None = field(
        default=None,
        metadata=about(
            "NAME[=STRENGTH]:COUNT[:START]: the last COUNT workers attack, for example anti:5."
            " docs/security.md lists all attacks.",
            unset="nobody attacks",
        ),
    )
    miss: float = field(default=0.0, metadata=about("Probability that a worker misses a round."))
    absent: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "WORKER:FROM[:TO], rounds in which a worker is absent: it joins late, leaves or returns.",
            unset="nobody is",
        ),
    )
    min_voters: int = field(default=1, metadata=about("A round with fewer voters moves no parameter."))
    evaluate_every: int = field(
        default=FROM_ROUNDS,
        metadata=about(
            "Rounds between two evaluations.",
            unset=f"a sixth of --rounds, at most {MOST_ROUNDS_UNSEEN}",
            in_name=False,
            is_condition=False,
            before=MOST_ROUNDS_UNSEEN,
        ),
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
            unset="none",
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


def usual_evaluate_every(rounds: int) -> int:
    """Rounds between two evaluations, if the user did not say: a short run has some, too.

    >>> usual_evaluate_every(3000), usual_evaluate_every(100), usual_evaluate_every(2)
    (50, 16, 1)
    """
    return min(MOST_ROUNDS_UNSEEN, max(1, rounds // EVALUATIONS))


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
    rounds = settings.get("rounds", given["rounds"])
    if isinstance(rounds, int):  # in a damaged file it may be anything
        given["evaluate_every"] = usual_evaluate_every(rounds)
    given["recipe"] = usual_recipe(settings.get("task"))
    return given | recipe_of(settings)
