"""A study: a TOML file that says which runs make up a published result.

    task = "mnist"                       # what all runs share: any setting of a run
    rounds = 3000
    seeds = [0, 1, 2]

    [[grid]]                             # rules x modes x attacks x seeds; as many grids as one likes
    rules = ["majority", "it-signsgd"]
    modes = [1, 2, 3, 4]
    attacks = ["none", "invert:7"]
    recipe = "paper"

A grid's settings go before the shared ones. A run that is in several grids is run once.
"""

from __future__ import annotations

import tomllib
import types
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from signvote.core.layout import Layout
from signvote.core.rules import RULES, make_rule
from signvote.errors import ConfigError
from signvote.names import check_name
from signvote.results import identity
from signvote.results.shape import fits
from signvote.settings import SETTINGS
from signvote.sim.compare import names_of
from signvote.sim.config import Config

LISTS = {
    "rules": "rule",
    "modes": "mode",
    "attacks": "attack",
    "seeds": "seed",
}  # what a grid multiplies -> setting of a run
NOBODY = "none"  # attacks
HINTS: dict[str, Any] = get_type_hints(Config)
KNOWN = [*LISTS, *(name for name in SETTINGS if name not in LISTS.values())]


def read_study(path: Path | str, seeds: Sequence[int] = ()) -> dict[str, Config]:
    """The runs of a study by name, in the order of the file.

    Args:
        path: the TOML file.
        seeds: if any, instead of the file's.

    """
    path = Path(path)
    try:
        written = tomllib.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    shared = {name: value for name, value in written.items() if name != "grid"}
    grids = written.get("grid", [])
    if not (isinstance(grids, list) and grids and all(isinstance(grid, dict) for grid in grids)):
        raise ConfigError(f"{path} asks for no runs; wanted at least one [[grid]] with rules = [...]")
    runs: dict[str, Config] = {}
    for number, grid in enumerate(grids, 1):
        try:
            runs |= {identity(config): config for config in _runs(shared, grid, seeds)}
        except ConfigError as error:
            raise ConfigError(f"{path}, grid {number}: {error}") from None
    configs = list(runs.values())
    return dict(zip(names_of(configs), configs, strict=True))


def _runs(shared: dict[str, Any], grid: dict[str, Any], seeds: Sequence[int]) -> list[Config]:
    settings = shared | grid
    for name, value in settings.items():
        check_name("setting", name, KNOWN)
        _check_value(name, value)
    for name, example in (("task", "'mnist'"), ("rules", "['majority', 'weighted']")):
        if name not in settings:
            raise ConfigError(f"{name} is missing; give one, such as {name} = {example}")
    rules = settings.pop("rules")
    modes = settings.pop("modes", [None])
    names = settings.pop("attacks", [NOBODY])
    attacks = [None if name == NOBODY else name for name in names]
    seeds_here = settings.pop("seeds", [0])
    values: dict[str, Any] = {name: _ready(name, value) for name, value in settings.items()}
    configs = [
        Config(
            mode=mode,
            attack=attack,
            seed=seed,
            rule=rule,
            **values,
        )
        for mode, attack, seed, rule in product(modes, attacks, seeds or seeds_here, rules)
    ]
    _check_options(rules, settings.get("options", {}))
    return configs


def _check_options(rules: list[str], options: dict[str, Any]) -> None:
    """Raise for wrong options now, not when the run begins."""
    layout = Layout([("any", (64,))])
    for rule in set(rules) & set(RULES):
        make_rule(rule, layout, **options)


def _ready(name: str, value: Any) -> Any:
    """The value as a run has it: a tuple for a list, and 1.0 for 1 where a fraction is allowed."""
    if isinstance(value, list):
        return tuple(value)
    hint = HINTS[name]
    is_choice = get_origin(hint) in (Union, types.UnionType)
    takes_fractions = hint is float or (is_choice and float in get_args(hint))
    return float(value) if takes_fractions else value


def _check_value(name: str, value: Any) -> None:
    is_list = name in LISTS
    if is_list:
        hint: Any = types.GenericAlias(list, (HINTS[LISTS[name]],))
    else:
        hint = HINTS[name]
    is_empty = is_list and not value
    if is_empty or not fits(value, hint):
        raise ConfigError(f"{name} is {value!r}; wanted {_in_words(hint)}")


def _in_words(hint: Any) -> str:
    """A type as a user would say it.

    >>> _in_words(int | None), _in_words(list[str])
    ('a whole number', 'a list, each a text')
    """
    words = {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "true or false",
    }
    origin = get_origin(hint)
    inside = get_args(hint)
    if origin in (Union, types.UnionType):
        choices = [choice for choice in inside if choice is not types.NoneType]
        return " or ".join(_in_words(choice) for choice in choices)
    if origin is Literal:
        return " or ".join(map(repr, inside))
    if origin in (list, tuple):
        return f"a list, each {_in_words(inside[0])}"
    return words.get(hint, "a table")
