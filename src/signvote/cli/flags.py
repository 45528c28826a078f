"""Flags of the commands that train: one for each setting of a run that `signvote.settings` declares."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import Field
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import tyro

from signvote.errors import ConfigError
from signvote.settings import SETTINGS, Settings

T = TypeVar("T")
HINTS: dict[str, Any] = get_type_hints(Settings)
TABLES = {name for name, hint in HINTS.items() if get_origin(hint) is dict}  # settings given as KEY=VALUE


def with_settings(*left_out: str, **defaults: str) -> Callable[[type[T]], type[T]]:
    """Give a class, before it becomes a dataclass, a field for each setting of a run.

    Args:
        left_out: settings that the command has no flag for.
        defaults: values for the settings that have no default.

    """

    def extended(kind: type[T]) -> type[T]:
        added = {name: setting for name, setting in SETTINGS.items() if name not in left_out}
        for name, setting in added.items():
            setattr(kind, name, defaults.get(name, _default(setting)))
        hints = {name: _hint(setting) for name, setting in added.items()}
        kind.__annotations__ = hints | kind.__annotations__
        return kind

    return extended


def settings_of(command: object) -> dict[str, Any]:
    """The settings that a command has flags for, as the user gave them."""
    given = {name: getattr(command, name) for name in SETTINGS if hasattr(command, name)}
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


def _default(setting: Field[Any]) -> Any:
    """The default of a flag. A setting that is a dictionary is given as texts."""
    return () if setting.name in TABLES else setting.default


def _hint(setting: Field[Any]) -> Any:
    """The type of a flag, with its help text."""
    hint = HINTS[setting.name]
    if setting.name in TABLES:
        hint = tuple[str, ...]
    elif setting.default is None:
        hint = hint | None
    return Annotated[hint, tyro.conf.arg(help=setting.metadata["text"])]
