"""The loops of the numba kernels that need no adder network: signs, weights per coordinate, pairs, steps.

Each function does what the `Backend` method of its name does, on words lo to hi of the planes, so that
threads can share the work. A plane that is missing has no elements.

Keep two things in mind when you change compiled loops. An index such as `row[at + j]` makes numba allow
for negative values and prevents vector code; slice first. And numba caches by file: after a change in
`lanes.py` or `words.py`, run `make clean` or touch this file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from signvote.kernels.lanes import (
    add_where,
    classify,
    peek,
    popcount,
    prefetch_to_write,
    put_where,
    step_where,
)
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

LOW = np.uint32(0xFFFF)  # mask of the lower of two indices
HIGH = np.uint32(16)  # shift to the upper one
GROUP = 5  # workers whose weights are looked up together


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
def vote_by_coordinate_(
    out: Words,
    decided: Words,
    votes: Words,
    support: Words,
    counters: Array,
    slots: Array,
    rows: Words,
    sizes: Array,
    key: Word,
    first: Word,
    has_coin: bool,
    end: int,
    zero_is_symbol: bool,
    lo: int,
    hi: int,
) -> tuple[Array, Array]:
    """Word by word: the weights of GROUP workers at a time are looked up and added, then counters updated.

    `rows` has, for each worker, the memory address of its table in `CoordinateWeights`.
    """
    workers = votes.shape[0]
    stride = counters.shape[1] * 64
    count = counters.reshape(-1)
    differ = np.zeros(workers, np.int64)
    cast = np.zeros(workers, np.int64)
    tally = np.empty(64, np.int32)
    index = np.zeros(64 * GROUP, np.uint16)
    pair = index.view(np.uint32)  # two indices a load: loads are what limits this loop
    for w in range(lo, hi):
        tally[:] = 0
        for m in range(0, workers, GROUP):
            group = min(GROUP, workers - m)
            for g in range(group):
                at = w * stride + slots[m + g] * 64
                size = sizes[m + g]
                ahead = np.uint64(count.ctypes.data + 2 * (at + stride))
                prefetch_to_write(ahead)
                prefetch_to_write(ahead + np.uint64(64))
                vote = votes[m + g, w]
                add_where(count, at, vote, size, index, 64 * g)
                if support.shape[0]:
                    silent = ~support[m + g, w]
                    no_vote = np.uint16(2 * size)
                    put_where(silent, no_vote, index, 64 * g)
            if group == GROUP:
                a = rows[m]
                b = rows[m + 1]
                c = rows[m + 2]
                d = rows[m + 3]
                e = rows[m + 4]
                for i in range(32):
                    p = pair[i]
                    q = pair[i + 32]
                    r = pair[i + 64]
                    s = pair[i + 96]
                    t = pair[i + 128]
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
