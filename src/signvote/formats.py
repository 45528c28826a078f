"""Formats of what is kept: states and results of an earlier signvote are upgraded, those of a later one refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from signvote.errors import StateError

Kept = dict[str, Any]
Upgrade = Callable[[Kept], Kept]


def upgraded(
    kept: Kept, what: str, newest: int, upgrades: Mapping[int, Upgrade] | None = None, *, key: str = "version"
) -> Kept:
    """The same in the newest format, one step at a time; what was given stays as it is.

    Args:
        kept: what was read.
        what: its name, for people.
        newest: the format written today.
        upgrades: format -> what makes it the next one; a format without one has nothing to change.
        key: under which the format's number stands.

    >>> old = {"version": 1, "metres": 2}
    >>> upgraded(old, "the map", 2, {1: lambda map: {"feet": 3.28 * map["metres"]}})
    {'feet': 6.56, 'version': 2}
    >>> upgraded({"version": 3}, "the map", 2)
    Traceback (most recent call last):
        ...
    signvote.errors.StateError: the map: format 3 is a later signvote's; this one reads up to 2: install a later ...

    """
    found = kept.get(key)
    if not isinstance(found, int) or found < 1:
        raise StateError(f"{what}: {key} is {found!r}, which signvote never wrote")
    if found > newest:
        raise StateError(
            f"{what}: format {found} is a later signvote's; this one reads up to {newest}: "
            "install a later one (pip install --upgrade signvote)"
        )
    for step in range(found, newest):
        kept = (upgrades or {}).get(step, dict)(kept)
    return {**kept, key: newest}


def check_state(state: Kept, **wanted: object) -> None:
    """Raise unless the state has these values, naming both."""
    for what, value in wanted.items():
        if state.get(what) != value:
            raise StateError(f"state has {what} {state.get(what)!r}; wanted {value!r}")
