"""Words of 64 bits in compiled code: constants, coins, masks. Shared by the numba kernels.

Annotations are for readers and mypy: numba infers its own types.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from signvote.kernels import reference

Array = np.ndarray[Any, Any]
Words = np.ndarray[Any, np.dtype[np.uint64]]
Word = np.uint64

BLOCK = 128  # words a pass is wide: 1 KiB a plane, so that the planes of a vote stay in the first cache
ZERO = np.uint64(0)
ONE = np.uint64(1)
ONES = np.uint64(2**64 - 1)
SHIFT_1, FACTOR_1 = (np.uint64(n) for n in reference.MIX[0])
SHIFT_2, FACTOR_2 = (np.uint64(n) for n in reference.MIX[1])
SHIFT_3 = np.uint64(31)
WEYL = np.uint64(reference.WEYL)
SIX = np.uint64(6)
LOW_SIX = np.uint64(63)
SIXTY_FOUR = np.uint64(64)

compiled = njit(nogil=True, cache=True, error_model="numpy")
inlined = njit(nogil=True, cache=True, error_model="numpy", inline="always")


@inlined
def _hash(key: Word, index: Word) -> Word:
    z = (index + ONE) * WEYL + key
    z = (z ^ (z >> SHIFT_1)) * FACTOR_1
    z = (z ^ (z >> SHIFT_2)) * FACTOR_2
    return z ^ (z >> SHIFT_3)


@inlined
def coin_word(key: Word, first: Word, word: int) -> Word:
    """Coins of the 64 coordinates that start at first + 64 * word."""
    at = (first >> SIX) + np.uint64(word)
    by = first & LOW_SIX
    if by == ZERO:
        return _hash(key, at)  # type: ignore[no-any-return]
    low = _hash(key, at) >> by
    high = _hash(key, at + ONE) << (SIXTY_FOUR - by)
    return low | high  # type: ignore[no-any-return]


@compiled
def toss_(
    plane: Words,
    where: Words,
    key: Word,
    first: Word,
    at: int,
    n: int,
) -> None:
    """Set plane |= the coin's bits where `where` is 1; plane must be 0 there. Most often it is 1 nowhere."""
    anywhere = ZERO
    for j in range(n):
        anywhere |= where[j]
    if anywhere != ZERO:
        for j in range(n):
            coins = coin_word(key, first, at + j)
            plane[j] |= where[j] & coins


@inlined
def inside(word: int, begin: int, end: int) -> Word:
    """The bits of a word that lie in begin <= coordinate < end."""
    low = begin - word * 64
    high = end - word * 64
    if high <= 0 or low >= 64:
        return ZERO
    from_low = ONES << np.uint64(max(low, 0))
    to_high = ONES >> np.uint64(64 - min(high, 64))
    return from_low & to_high
