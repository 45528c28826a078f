"""The loops of the numba kernels that need no adder network: signs, weights per coordinate, pairs, steps.

Each does what `Backend` says of its name, on words lo to hi of the planes, so that threads share them out.
A plane that is missing has no elements.

Mind two things when changing compiled loops. An index such as `row[at + j]` makes numba allow for
negative values and costs the vector code; slice first. And numba caches by file: after a change in
`lanes.py` or `words.py`, `make clean` or touch this file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from signvote.kernels.lanes import add_where, classify, peek, popcount, prefetch, put_where, step_where
from signvote.kernels.words import (
    BLOCK,
    ONES,
    SIXTY_FOUR,
    ZERO,
    Array,
    Word,
    Words,
    coin_word,
    compiled,
    inlined,
    inside,
    toss_,
)

LOW, HIGH = np.uint32(0xFFFF), np.uint32(16)
GROUP = 5  # workers whose weights are looked up together


@compiled
def sign_planes(
    integers: Array, exponent: np.signedinteger[Any], key: Word, first: Word, has_coin: bool, signs: Words,
    support: Words, lo: int, hi: int,
) -> bool:  # fmt: skip
    """Fill the planes, support only without a coin; whether all is finite. Floats are seen as integers."""
    broken = ZERO
    zeros = np.empty(BLOCK, np.uint64)
    for at in range(lo, hi, BLOCK):
        n = min(BLOCK, hi - at)
        for j in range(n):
            signs[at + j], zeros[j], nonfinite = classify(integers, (at + j) * 64, exponent)
            broken |= nonfinite
        if has_coin:
            toss_(signs[at : at + n], zeros, key, first, at, n)
        else:
            for j in range(n):
                support[at + j] = ~zeros[j]
    return broken == ZERO  # type: ignore[no-any-return]


@compiled
def vote_by_coordinate_(
    out: Words, decided: Words, votes: Words, support: Words, counters: Array, slots: Array, rows: Words,
    sizes: Array, key: Word, first: Word, has_coin: bool, end: int, zero_is_symbol: bool, lo: int, hi: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Word by word: the weights of GROUP workers at a time are looked up and added, then counters updated.

    `rows` has, for each worker, the memory address of its table in `CoordinateWeights`.
    """
    workers, stride = votes.shape[0], counters.shape[1] * 64
    count = counters.reshape(-1)
    differ, cast = np.zeros(workers, np.int64), np.zeros(workers, np.int64)
    tally, index = np.empty(64, np.int32), np.zeros(64 * GROUP, np.uint16)
    pair = index.view(np.uint32)  # two indices a load: loads are what limits this loop
    for w in range(lo, hi):
        tally[:] = 0
        for m in range(0, workers, GROUP):
            group = min(GROUP, workers - m)
            for g in range(group):
                at, size = w * stride + slots[m + g] * 64, sizes[m + g]
                prefetch(count, at + stride)
                prefetch(count, at + stride + 32)
                add_where(count, at, votes[m + g, w], size, index, 64 * g)
                if support.shape[0]:
                    put_where(~support[m + g, w], np.uint16(2 * size), index, 64 * g)
            if group == GROUP:
                a, b, c, d, e = rows[m], rows[m + 1], rows[m + 2], rows[m + 3], rows[m + 4]
                for i in range(32):
                    p, q, r, s, t = pair[i], pair[i + 32], pair[i + 64], pair[i + 96], pair[i + 128]
                    even = peek(a, p & LOW) + peek(b, q & LOW) + peek(c, r & LOW)
                    odd = peek(a, p >> HIGH) + peek(b, q >> HIGH) + peek(c, r >> HIGH)
                    tally[2 * i] += even + peek(d, s & LOW) + peek(e, t & LOW)
                    tally[2 * i + 1] += odd + peek(d, s >> HIGH) + peek(e, t >> HIGH)
            else:
                for g in range(group):
                    a = rows[m + g]
                    for i in range(64):
                        tally[i] += peek(a, index[i + 64 * g])
        more, same, _ = classify(tally, 0, np.int32(-1))
        live = inside(w, 0, end)
        if has_coin:
            more |= same & coin_word(key, first, w)
            sure = live
        else:
            sure = live & ~same
            decided[w] = sure
        out[w] = more & live
        for m in range(workers):
            at = w * stride + slots[m] * 64
            voted = support[m, w] if support.shape[0] else ONES
            both = voted & sure
            wrong = (votes[m, w] ^ more) & both
            differ[m] += np.int64(popcount(wrong))
            cast[m] += np.int64(popcount(both))
            missing = (voted ^ sure) & live
            if zero_is_symbol:
                wrong |= missing
            elif missing != ZERO:
                add_where(count, at, missing, np.uint16(1), count, at)
            add_where(count, at, wrong, np.uint16(2), count, at)
    return differ, cast


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
                row_a, row_b = votes[a, at : at + n], votes[b, at : at + n]
                wrong, common = ZERO, ZERO
                if support.shape[0]:
                    voted_a, voted_b = support[a, at : at + n], support[b, at : at + n]
                    for j in range(n):
                        wrong += popcount((row_a[j] ^ row_b[j]) & voted_a[j] & voted_b[j])
                        common += popcount(voted_a[j] & voted_b[j])
                else:
                    for j in range(n):
                        wrong += popcount(row_a[j] ^ row_b[j])
                    common = np.uint64(min(end, (at + n) * 64) - at * 64)
                differ[a, b] += np.int64(wrong)
                both[a, b] += np.int64(common)
    return differ, both


@inlined
def _word_at(plane: Words, bit: int) -> Word:
    """The 64 bits of a plane that start anywhere; zeros beyond its end."""
    w, by = bit // 64, np.uint64(bit % 64)
    word = plane[w] >> by
    if by != ZERO and w + 1 < plane.size:
        word |= plane[w + 1] << (SIXTY_FOUR - by)
    return word  # type: ignore[no-any-return]


@compiled
def step_(
    x: Array, signs: Words, support: Words, begin: int, step: np.floating[Any], lo: int, hi: int
) -> None:
    """Words lo to hi of x, 64 coordinates each: the decision's bits are shifted to where they are used."""
    for w in range(lo, hi):
        positive = _word_at(signs, begin + w * 64)
        voted = _word_at(support, begin + w * 64) if support.size else ONES
        for q in range(8):
            by = np.uint64(8 * q)
            step_where(x, w * 64 + 8 * q, np.uint8(positive >> by), np.uint8(voted >> by), step)
