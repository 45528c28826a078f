"""Names that a user types: the error for an unknown name suggests the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from signvote.errors import ConfigError


def check_name(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise an error that suggests the nearest known name, if the name is unknown.

    >>> check_name("task", "mnits", ["mnist", "cifar10"])
    Traceback (most recent call last):
        ...
    signvote.errors.ConfigError: there is no task 'mnits'; did you mean 'mnist'? All: mnist, cifar10
    """
    known = list(known)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"there is no {kind} {name!r}{hint} All: {', '.join(known)}")
