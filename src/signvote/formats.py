"""Versions of stored formats.

A state or result of an older signvote is upgraded if there is a step for each format on the way. Otherwise, and
if a newer signvote wrote it, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from signvote.errors import StateError

Stored = dict[str, Any]
Upgrade = Callable[[Stored], Stored]


def upgraded(
    stored: Stored,
    what: str,
    newest: int,
    upgrades: Mapping[int, Upgrade] | None = None,
    *,
    key: str = "version",
) -> Stored:
    """A copy in the newest format, upgraded one step at a time.

    Args:
        stored: a state or result in any format.
        what: its name, for error messages.
        newest: the current format.
        upgrades: format -> function that returns the next format. A format without one is no longer read.
        key: name of the entry with the number of the format.

    >>> old = {"version": 1, "metres": 2}
    >>> upgraded(old, "the map", 2, {1: lambda map: {"feet": 3.28 * map["metres"]}})
    {'feet': 6.56, 'version': 2}
    >>> upgraded({"version": 3}, "the map", 2)
    Traceback (most recent call last):
        ...
    signvote.errors.StateError: the map: format 3 is a later signvote's; this one reads up to 2: install a later ...
    >>> upgraded({"version": 1}, "the map", 2)
    Traceback (most recent call last):
        ...
    signvote.errors.StateError: the map: format 1 is an earlier signvote's; this one reads from 2 on: run it again, ...

    """
    upgrades = upgrades or {}
    oldest = newest
    while oldest - 1 in upgrades:
        oldest -= 1
    found = stored.get(key)
    if type(found) is not int or found < 1:
        raise StateError(f"{what}: {key} is {found!r}, which signvote never wrote")
    if found > newest:
        raise StateError(
            f"{what}: format {found} is a later signvote's; this one reads up to {newest}: "
            "install a later one (pip install --upgrade signvote)"
        )
    if found < oldest:
        raise StateError(
            f"{what}: format {found} is an earlier signvote's; this one reads from {oldest} on: "
            "run it again, or install the earlier one"
        )
    for number in range(found, newest):
        stored = upgrades[number](stored)
    return {**stored, key: newest}


def check_state(state: Stored, **wanted: object) -> None:
    """Raise an error that names both values unless the state has the wanted ones."""
    for key, value in wanted.items():
        found = state.get(key)
        if found != value:
            raise StateError(f"state has {key} {found!r}; wanted {value!r}")
