"""Lists that are mostly constant, kept short: `[7, 7, 7, 5]` is written `[[7, 3], [5, 1]]` in result files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby


def pack(values: Iterable[int]) -> list[list[int]]:
    """Runs of equal values as `[value, times]`.

    >>> pack([7, 7, 7, 5])
    [[7, 3], [5, 1]]
    """
    return [[value, sum(1 for _ in equal)] for value, equal in groupby(values)]


def unpack(items: Iterable[int | Sequence[int]]) -> list[int]:
    """The list that was packed; a number that is in no pair stands for itself, as in older files.

    >>> unpack([[7, 3], [5, 1]]), unpack([7, 7, 5])
    ([7, 7, 7, 5], [7, 7, 5])
    """
    pairs = ((item, 1) if isinstance(item, int) else item for item in items)
    return [value for value, times in pairs for _ in range(times)]
