"""Flags of the commands that train: one for each setting of a run that `signvote.settings` declares, in groups."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import Field
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import tyro

from signvote.errors import ConfigError
from signvote.recipes import FLOATS, RECIPES
from signvote.settings import FROM_RECIPE, SETTINGS, Settings

T = TypeVar("T")
HINTS: dict[str, Any] = get_type_hints(Settings)
TABLES = {name for name, hint in HINTS.items() if get_origin(hint) is dict}  # settings given as KEY=VALUE
GROUPS: dict[str, tuple[str, ...]] = {
    "what": ("task", "task_options", "model", "rounds", "seed"),
    "who": (
        *("mode", "workers", "total", "batch_sizes", "split"),
        *("miss", "absent", "min_voters", "attack"),
    ),
    "how": (
        *(
            "rule",
            "options",
            "recipe",
            "step",
            "schedule",
            "ramp",
            "momentum",
            "interpolation",
            "clip",
            "polar",
        ),
        *("decay", "decays", "steps", "zeros", "feedback", "top", "top_end"),
        *("local_steps", "inner", "beta2", "outer_step", "outer_momentum"),
    ),
    "where": ("evaluate_every", "test_batch", "sign_error"),
}  # of the help; a test checks that each setting is in one


def with_settings(group: str, *left_out: str, **defaults: str) -> Callable[[type[T]], type[T]]:
    """Give a class, before it becomes a dataclass, a field for each setting of a group.

    Args:
        group: a key of GROUPS.
        left_out: settings that the command has no flag for.
        defaults: values for the settings that have no default.

    """

    def extended(kind: type[T]) -> type[T]:
        added = [SETTINGS[name] for name in GROUPS[group] if name not in left_out]
        for setting in added:
            setattr(kind, setting.name, defaults.get(setting.name, _default(setting)))
        hints = {setting.name: _hint(setting) for setting in added}
        kind.__annotations__ = hints | kind.__annotations__
        return kind

    return extended


def settings_of(command: object) -> dict[str, Any]:
    """The settings that the groups of a command have flags for, as the user gave them."""
    groups = [getattr(command, group) for group in GROUPS]
    given = {name: getattr(group, name) for name in SETTINGS for group in groups if hasattr(group, name)}
    for name in given.keys() & TABLES:
        given[name] = dict(map(option, given[name]))
    return given


def option(text: str) -> tuple[str, Any]:
    """KEY=VALUE as a pair. The value is parsed as JSON; if that fails, it is a text.

    >>> option("per=tensor"), option("forgetting=0.98")
    (('per', 'tensor'), ('forgetting', 0.98))
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"option {text!r} has no value; wanted KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def unset(text: str) -> Any:
    """What the help says about the default of a flag whose default is no value."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {text})")


def title(name: str) -> Any:
    """The name of a group in the help: its title is `NAME options`."""
    return tyro.conf.arg(name=name)


def _default(setting: Field[Any]) -> Any:
    """The default of a flag. A setting that is a dictionary is given as texts."""
    return () if setting.name in TABLES else setting.default


def _hint(setting: Field[Any]) -> Any:
    """The type of a flag, with its help text and its default in words."""
    hint = HINTS[setting.name]
    if setting.name in TABLES:
        hint = tuple[str, ...]
    elif setting.default is None:
        hint = Annotated[
            hint | None, tyro.conf.FlagConversionOff
        ]  # a recipe may have it on: it can be turned off
    words = _default_in_words(setting)
    shown = f"(default: {words})" if words else None
    help = setting.metadata["text"]
    return Annotated[hint, tyro.conf.arg(help=help, help_behavior_hint=shown)]


def _default_in_words(setting: Field[Any]) -> str:
    """What a run gets that does not give the setting; empty if the default itself says it."""
    name = setting.name
    if name in RECIPES["paper"] and setting.default is FROM_RECIPE:
        values = ", ".join(f"{recipe} {RECIPES[recipe][name]}" for recipe in reversed(RECIPES))
        others = [rule for rule, floats in FLOATS["tuned"].items() if name in floats]
        return f"{values}; {', '.join(others)}: another" if others else values
    if setting.default is False:
        return "no"
    return str(setting.metadata["unset"])
