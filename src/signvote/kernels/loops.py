"""The loops of the numba kernels that need neither an adder network nor curves: signs, pairs, steps.

Each function does what the `Backend` method of its name does, on words lo to hi of the planes, so that
threads can share the work. A plane that is missing has no elements.

Keep two things in mind when you change compiled loops. An index such as `row[at + j]` makes numba allow
for negative values and prevents vector code; slice first. And numba caches by file: after a change in
`lanes.py` or `words.py`, run `make clean` or touch this file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from signvote.kernels.lanes import classify, popcount, step_where
from signvote.kernels.words import (
    BLOCK,
    ONES,
    SIXTY_FOUR,
    ZERO,
    Array,
    Word,
    Words,
    compiled,
    inlined,
    toss_,
)


@compiled
def sign_planes(
    integers: Array,
    exponent: np.signedinteger[Any],
    key: Word,
    first: Word,
    has_coin: bool,
    signs: Words,
    support: Words,
    lo: int,
    hi: int,
) -> bool:
    """Fill the planes, support only without a coin. Returns whether all is finite. Floats are seen as integers."""
    broken = ZERO
    zeros = np.empty(BLOCK, np.uint64)
    for at in range(lo, hi, BLOCK):
        n = min(BLOCK, hi - at)
        for j in range(n):
            positive, zero, nonfinite = classify(integers, (at + j) * 64, exponent)
            signs[at + j] = positive
            zeros[j] = zero
            broken |= nonfinite
        if has_coin:
            block = signs[at : at + n]
            toss_(block, zeros, key, first, at, n)
        else:
            for j in range(n):
                support[at + j] = ~zeros[j]
    return broken == ZERO  # type: ignore[no-any-return]


@compiled
def disagreements(votes: Words, support: Words, end: int, lo: int, hi: int) -> tuple[Array, Array]:
    """Pairs a <= b only; a block of words of all workers stays in the cache. Padding must be zero."""
    workers = votes.shape[0]
    differ = np.zeros((workers, workers), np.int64)
    both = np.zeros((workers, workers), np.int64)
    for at in range(lo, hi, BLOCK):
        n = min(BLOCK, hi - at)
        for a in range(workers):
            for b in range(a, workers):
                row_a = votes[a, at : at + n]
                row_b = votes[b, at : at + n]
                wrong = ZERO
                common = ZERO
                if support.shape[0]:
                    voted_a = support[a, at : at + n]
                    voted_b = support[b, at : at + n]
                    for j in range(n):
                        voted = voted_a[j] & voted_b[j]
                        wrong += popcount((row_a[j] ^ row_b[j]) & voted)
                        common += popcount(voted)
                else:
                    for j in range(n):
                        wrong += popcount(row_a[j] ^ row_b[j])
                    last = min(end, (at + n) * 64)
                    common = np.uint64(last - at * 64)
                differ[a, b] += np.int64(wrong)
                both[a, b] += np.int64(common)
    return differ, both


@compiled
def disagreements_with(
    votes: Words, support: Words, others: Words, other_support: Words, end: int, lo: int, hi: int
) -> tuple[Array, Array]:
    """Pairs of each worker with each of the others; all have a support, or none. Padding must be zero."""
    differ = np.zeros((votes.shape[0], others.shape[0]), np.int64)
    both = np.zeros((votes.shape[0], others.shape[0]), np.int64)
    for at in range(lo, hi, BLOCK):
        n = min(BLOCK, hi - at)
        for a in range(votes.shape[0]):
            for b in range(others.shape[0]):
                row_a = votes[a, at : at + n]
                row_b = others[b, at : at + n]
                wrong = ZERO
                common = ZERO
                if support.shape[0]:
                    voted_a = support[a, at : at + n]
                    voted_b = other_support[b, at : at + n]
                    for j in range(n):
                        voted = voted_a[j] & voted_b[j]
                        wrong += popcount((row_a[j] ^ row_b[j]) & voted)
                        common += popcount(voted)
                else:
                    for j in range(n):
                        wrong += popcount(row_a[j] ^ row_b[j])
                    last = min(end, (at + n) * 64)
                    common = np.uint64(last - at * 64)
                differ[a, b] += np.int64(wrong)
                both[a, b] += np.int64(common)
    return differ, both


@inlined
def _word_at(plane: Words, bit: int) -> Word:
    """The 64 bits of a plane that start anywhere; zeros beyond its end."""
    w = bit // 64
    by = np.uint64(bit % 64)
    word = plane[w] >> by
    if by != ZERO and w + 1 < plane.size:
        word |= plane[w + 1] << (SIXTY_FOUR - by)
    return word  # type: ignore[no-any-return]


@compiled
def step_(
    x: Array,
    signs: Words,
    support: Words,
    begin: int,
    step: np.floating[Any],
    keep: np.floating[Any],
    lo: int,
    hi: int,
) -> None:
    """Words lo to hi of x, 64 coordinates each: the decision's bits are shifted to where they are used."""
    for w in range(lo, hi):
        positive = _word_at(signs, begin + w * 64)
        voted = _word_at(support, begin + w * 64) if support.size else ONES
        for q in range(8):
            by = np.uint64(8 * q)
            up = np.uint8(positive >> by)
            moves = np.uint8(voted >> by)
            step_where(x, w * 64 + 8 * q, up, moves, step, keep)


@compiled
def tally(total: Array, signs: Words, weights: Array, lo: int, hi: int) -> None:
    """Add weights where a sign is set, and subtract them where it is not."""
    for at in range(lo, hi):
        sums = total[at * 64 : at * 64 + 64]
        for m in range(len(weights)):
            word = signs[m, at]
            weight = weights[m]
            for lane in range(64):
                is_set = np.int32((word >> np.uint64(lane)) & np.uint64(1))
                sums[lane] += weight * (2 * is_set - np.int32(1))
