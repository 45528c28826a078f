"""Weights per coordinate without looking them up: a curve through a table, and how far it is off at most.

A rule's table has the weight of each value c of a counter, 0 to 2 R. A log-likelihood ratio depends on c - R alone,
but for a constant, and is odd. So a polynomial in 16-bit integers comes close to it, 64 coordinates at a time:

    d = c - R        u = d * factor        v = 8 u^2 - 1        4 w ~ base + u (a4 + v (a3 + v (a2 + v (a1 + v a0))))

A product of two numbers of 16 bits is the upper half of their product, so u is a number in (-1/2, 1/2) and v one in
(-1, 1), and coefficients double with each power. Near its ends, where p is below 0.1 or above 0.9, the table is too
steep for this: counters that are further from R than `reach` are `far`.

Nothing is left to chance: `error` is the largest difference to the table at all other values of a counter. Where a
tally is further from zero than the errors of all its curves together, its sign is that of the exact tally.
`curve_lanes.py` has the same in compiled code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from signvote.kernels.words import Array

UNIT = 4  # of a curve, in those of a table: quarters
DEGREE = 4
REACH = 0.8  # of R
FIELDS = ("center", "factor", "reach", "span", "base")  # of a curve in memory, then its coefficients
WIDTH = len(FIELDS) + DEGREE + 1
TOGETHER = 3  # curves whose sum fits 16 bits
LARGEST = 2**15 // TOGETHER - 1
WORST = 32 * UNIT  # error of a curve that is of no use
NODES = 64  # counters that a curve is fitted to


class Curves(NamedTuple):
    """The curves of all tables."""

    curves: Array  # (tables, WIDTH) int16
    error: Array  # (tables,): in quarters


def curves(tables: Array, sizes: Sequence[int]) -> Curves:
    """The curve of each table, from its weights of votes for +1."""
    found = [_curve(row[size : 2 * size].tobytes()) for row, size in zip(tables, sizes, strict=True)]
    rows, errors = zip(*found, strict=True)
    return Curves(np.stack(rows), np.array(errors))


@lru_cache(maxsize=64)
def _curve(table: bytes) -> tuple[Array, int]:
    """A curve and its error; with an error above WORST it is of no use."""
    weights: Array = np.frombuffer(table, np.int32).astype(np.int64) * UNIT
    center = len(weights) // 2
    base = int(weights[center])
    reach = center
    if (weights != base).any():
        reach = int(REACH * center)
    factor = (2**15 - 1) // max(1, reach)
    curve = np.zeros(WIDTH, np.int16)
    curve[: len(FIELDS)] = np.array([center, factor, reach, 2 * reach, base]).astype(np.uint16).view(np.int16)
    coefficients = _fitted(weights[center + 1 : center + reach + 1] - base, factor)
    if max(np.abs(coefficients).max(), abs(base)) >= 2**15:
        return curve, WORST + 1
    curve[len(FIELDS) :] = coefficients
    near = np.arange(center - reach, center + reach + 1)
    approximate = values(curve, near)
    error = np.abs(approximate - weights[near]).max()
    fits = np.abs(approximate).max() <= LARGEST
    return curve, int(error) if fits else WORST + 1


def _fitted(weights: Array, factor: int) -> Array:
    """The coefficients, highest power first, for the weights at d = 1, 2, ..., less the base."""
    if not weights.any():
        return np.zeros(DEGREE + 1)
    last = len(weights)
    d = np.unique(np.linspace(1, last, min(last, NODES)).astype(np.int64))
    u = d * factor / 2**16
    v = 8 * u**2 - 1
    powers = u[:, None] * (v / 2)[:, None] ** np.arange(DEGREE + 1)
    found = np.linalg.lstsq(powers, weights[d - 1], rcond=None)[0]
    coefficients: Array = np.rint(found[::-1])
    return coefficients


def values(curve: Array, counters: Array) -> Array:
    """What `curve_lanes.add_curve` adds for votes for +1, as int64: the same integers."""
    center, factor, _, _, base, *coefficients = curve.astype(np.int64).tolist()
    u = (counters - center) * factor
    v = (-(2**13) - (u * -u >> 16)) * 4
    total = np.full_like(u, coefficients[0])
    for coefficient in coefficients[1:]:
        total = (total * v >> 16) + coefficient
    return (u * total >> 16) + base  # type: ignore[no-any-return]
