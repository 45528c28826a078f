"""Compact numbers for result files: `[7, 7, 7, 5]` is written `[[7, 3], [5, 1]]`, and numbers have 6 digits."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from typing import Any


def pack(values: Iterable[int]) -> list[list[int]]:
    """Runs of equal values as `[value, times]`.

    >>> pack([7, 7, 7, 5])
    [[7, 3], [5, 1]]
    """
    pairs = []
    for value, equal in groupby(values):
        times = len(list(equal))
        pairs.append([value, times])
    return pairs


def unpack(pairs: Iterable[Sequence[int]]) -> list[int]:
    """The list that was packed. A short file may name a long one: do not unpack what others wrote.

    >>> unpack([[7, 3], [5, 1]])
    [7, 7, 7, 5]
    """
    values: list[int] = []
    for value, times in pairs:
        values += [value] * times
    return values


def length(pairs: Iterable[Sequence[int]]) -> int:
    """The length of the list that was packed, without unpacking it.

    >>> length([[7, 3], [5, 1]])
    4
    """
    return sum(times for _, times in pairs)


def total(pairs: Iterable[Sequence[int]]) -> int:
    """The sum of the list that was packed.

    >>> total([[7, 3], [5, 1]])
    26
    """
    return sum(value * times for value, times in pairs)


def running_totals(pairs: Sequence[Sequence[int]], ends: Iterable[int]) -> list[int]:
    """The sum of the first `end` values of the list that was packed, for each end.

    >>> running_totals([[7, 3], [5, 1]], [0, 2, 4, 9])
    [0, 14, 26, 26]
    """
    starts = [0, *accumulate(times for _, times in pairs)]
    sums = [0, *accumulate(value * times for value, times in pairs)]
    values = [value for value, _ in pairs] + [0]
    found = []
    for end in ends:
        i = bisect_right(starts, end) - 1
        of_this_run = end - starts[i]
        found.append(sums[i] + values[i] * of_this_run)
    return found


def short(values: dict[str, Any]) -> dict[str, Any]:
    """The same values with 6 significant digits."""
    rounded = {}
    for name, value in values.items():
        text = json.dumps(value)
        rounded[name] = json.loads(text, parse_float=_six)
    return rounded


def _six(number: str) -> float:
    return float(f"{float(number):.6g}")
