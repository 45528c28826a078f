"""Slow and obvious: Python integers and lists, one coordinate at a time. What every kernel must equal."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from signvote.kernels import Coin, Planes

MASK = 2**64 - 1


def coin_bit(coin: Coin, i: int) -> int:
    """Bit of the coordinate that position i of a plane belongs to: splitmix64, word by word."""
    word, bit = divmod(coin.first + i, 64)
    z = (coin.key + (word + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return ((z ^ (z >> 31)) >> bit) & 1


def signs_of(values: Sequence[float], coin: Coin | None) -> list[int]:
    """+1, -1 or 0 of each number, zeros by the coin if there is one."""
    return [_sign(v, i, coin) for i, v in enumerate(values)]


def _sign(value: float, i: int, coin: Coin | None) -> int:
    if value == 0:
        return 0 if coin is None else 2 * coin_bit(coin, i) - 1
    return 1 if value > 0 else -1


def vote(
    y: list[list[int]], weights: Sequence[int], coin: Coin | None
) -> tuple[list[int], list[int], list[int]]:
    """(decision, mismatches, cast) of signs y[worker][coordinate] in {-1, 0, +1}."""
    n = len(y[0])
    tallies = [sum(w * row[i] for w, row in zip(weights, y, strict=True)) for i in range(n)]
    counted = signs_of(tallies, None)  # a tie is in no count
    return signs_of(tallies, coin), *_counts(y, counted)


def _counts(y: list[list[int]], decision: list[int]) -> tuple[list[int], list[int]]:
    wrong = [sum(a * d < 0 for a, d in zip(row, decision, strict=True)) for row in y]
    cast = [sum(a * d != 0 for a, d in zip(row, decision, strict=True)) for row in y]
    return wrong, cast


def vote_by_coordinate(
    y: list[list[int]], halves: list[list[int]], rounds: Sequence[int], coin: Coin | None, symbol: bool
) -> tuple[list[int], list[list[int]]]:
    """(decision, halves after) with p = halves / (2 rounds) per worker and coordinate, eqs. (3), (4)."""
    n = len(y[0])
    tallies = [0] * n
    for row, counts, t in zip(y, halves, rounds, strict=True):
        for i in range(n):
            tallies[i] += row[i] * llr_integer(counts[i] / (2 * t))
    decision = signs_of(tallies, coin)
    after = []
    for row, counts in zip(y, halves, strict=True):
        added = []
        for a, d in zip(row, decision, strict=True):
            added.append(2 * (a != d) if symbol or (a and d) else int(a != d))
        after.append([c + plus for c, plus in zip(counts, added, strict=True)])
    return decision, after


def llr_integer(p: float) -> int:
    """round(1024 clip(log((1 - p) / p), -10, 10))."""
    if p == 0:
        return 10_240
    if p == 1:
        return -10_240
    return round(1024 * max(-10.0, min(10.0, math.log((1 - p) / p))))


def bits_of(packed: bytes, n: int) -> list[int]:
    """Bit i of byte b is coordinate 8 b + i."""
    return [packed[i // 8] >> (i % 8) & 1 for i in range(n)]


def planes_of(y: list[list[int]], *, partial: bool | None = None) -> Planes:
    """Stacked planes of signs; with a support plane if anything is 0, or if asked for."""
    partial = any(0 in row for row in y) if partial is None else partial
    signs = torch.tensor([_words([int(a > 0) for a in row]) for row in y], dtype=torch.int64)
    support = torch.tensor([_words([int(a != 0) for a in row]) for row in y], dtype=torch.int64)
    return Planes(signs, support if partial else None)


def signs_in(planes: Planes, n: int) -> list[int]:
    """The signs that a decision's planes hold."""
    return [
        (2 * positive - 1) * voted
        for positive, voted in zip(_bits(planes.signs, n), _bits(planes.support, n), strict=True)
    ]


def _words(bits: list[int]) -> list[int]:
    padded = bits + [0] * (-len(bits) % 64)
    words = [sum(b << i for i, b in enumerate(padded[w : w + 64])) for w in range(0, len(padded), 64)]
    return [struct.unpack("<q", struct.pack("<Q", word))[0] for word in words]


def _bits(plane: Tensor | None, n: int) -> list[int]:
    if plane is None:
        return [1] * n
    return [(word >> i) & 1 for word in plane.tolist() for i in range(64)][:n]
