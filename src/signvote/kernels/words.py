"""Words of 64 bits in compiled code: constants, coins, masks. Shared by the numba kernels.

Types are for people and mypy: numba finds its own.
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
ZERO, ONES, ONE = np.uint64(0), np.uint64(2**64 - 1), np.uint64(1)
SHIFT_1, FACTOR_1 = (np.uint64(n) for n in reference.MIX[0])
SHIFT_2, FACTOR_2 = (np.uint64(n) for n in reference.MIX[1])
WEYL, SHIFT_3 = np.uint64(reference.WEYL), np.uint64(31)
SIX, LOW_SIX, SIXTY_FOUR = np.uint64(6), np.uint64(63), np.uint64(64)

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
    return (_hash(key, at) >> by) | (_hash(key, at + ONE) << (SIXTY_FOUR - by))  # type: ignore[no-any-return]


@compiled
def toss_(plane: Words, where: Words, key: Word, first: Word, at: int, n: int) -> None:
    """Set plane |= the coin's bits where `where` is 1; plane must be 0 there. Most often nowhere is."""
    anywhere = ZERO
    for j in range(n):
        anywhere |= where[j]
    if anywhere != ZERO:
        for j in range(n):
            plane[j] |= where[j] & coin_word(key, first, at + j)


@inlined
def inside(word: int, begin: int, end: int) -> Word:
    """The bits of a word that lie in begin <= coordinate < end."""
    low, high = begin - word * 64, end - word * 64
    if high <= 0 or low >= 64:
        return ZERO
    mask = ONES << np.uint64(max(low, 0))
    return mask & (ONES >> np.uint64(64 - min(high, 64)))
