"""Compact numbers for result files: `[7, 7, 7, 5]` is written `[[7, 3], [5, 1]]`, and numbers have 6 digits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any


def pack(values: Iterable[int]) -> list[list[int]]:
    """Runs of equal values as `[value, times]`.

    >>> pack([7, 7, 7, 5])
    [[7, 3], [5, 1]]
    """
    return [[value, sum(1 for _ in equal)] for value, equal in groupby(values)]


def unpack(pairs: Iterable[Sequence[int]]) -> list[int]:
    """The list that was packed.

    >>> unpack([[7, 3], [5, 1]])
    [7, 7, 7, 5]
    """
    return [value for value, times in pairs for _ in range(times)]


def short(values: dict[str, Any]) -> dict[str, Any]:
    """The same values with 6 significant digits."""
    return {name: json.loads(json.dumps(value), parse_float=_six) for name, value in values.items()}


def _six(number: str) -> float:
    return float(f"{float(number):.6g}")
