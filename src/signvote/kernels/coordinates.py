"""`Backend.vote_by_coordinate_`: the vote with a weight for every worker and coordinate, and its counters.

Word by word, in three steps:

    1. Curves come close to all weights, 64 at a time, and so to the tally. Most tallies are further from zero than
       the curves are off, which makes their signs certain.
    2. The others are computed again from tables: one by one, or the word as a whole if they are many.
    3. Counters get what the round adds.

So the decision is that of the tables, bit for bit. What limits lookups is that each is a load which depends on data.

Numba caches by file: after a change in `curve_lanes.py`, `lanes.py` or `words.py`, run `make clean` or touch this file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from signvote.kernels.curve_lanes import COPIES, add_curve, move_sums, within
from signvote.kernels.curves import TOGETHER, WIDTH
from signvote.kernels.lanes import add_where, classify, peek, popcount, prefetch_to_write, put_where
from signvote.kernels.words import ONE, ONES, ZERO, Array, Word, Words, coin_word, compiled, inlined, inside

LOW = np.uint32(0xFFFF)  # mask of the lower of two indices
HIGH = np.uint32(16)  # shift to the upper one
GROUP = 5  # workers whose weights are looked up together
MANY = np.uint64(16)  # of 64 tallies: looking up all is faster than one by one


@compiled
def _look_up_(
    tally: Array,
    index: Array,
    votes: Words,
    support: Words,
    count: Array,
    start: int,
    slots: Array,
    rows: Words,
    sizes: Array,
    w: int,
) -> None:
    """The tallies of a word. The weights of GROUP workers at a time are looked up and added."""
    workers = votes.shape[0]
    pair = index.view(np.uint32)  # two indices a load: loads are what limits this loop
    tally[:] = 0
    for m in range(0, workers, GROUP):
        group = min(GROUP, workers - m)
        for g in range(group):
            at = start + slots[m + g] * 64
            size = sizes[m + g]
            add_where(count, at, votes[m + g, w], size, index, 64 * g)
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


@inlined
def _look_up_some_(
    tally: Array,
    which: Word,
    votes: Words,
    support: Words,
    count: Array,
    start: int,
    slots: Array,
    rows: Words,
    sizes: Array,
    w: int,
) -> None:
    """Some tallies of a word, one by one."""
    while which != ZERO:
        bit = which & (~which + ONE)
        which ^= bit
        lane = np.int64(popcount(bit - ONE))
        exact = np.int32(0)
        for m in range(votes.shape[0]):
            if support.shape[0] == 0 or support[m, w] & bit != ZERO:
                i = np.uint32(count[start + slots[m] * 64 + lane])
                if votes[m, w] & bit != ZERO:
                    i += np.uint32(sizes[m])
                exact += peek(rows[m], i)
        tally[lane] = exact


@inlined
def _come_close_(
    tally: Array,
    sums: Array,
    votes: Words,
    support: Words,
    count: Array,
    start: int,
    stride: int,
    slots: Array,
    curves: Array,
    curve_of: Array,
    w: int,
) -> Word:
    """The tallies of a word by curves. Returns where one does not reach."""
    tally[:] = 0
    far = ZERO
    for m in range(votes.shape[0]):
        at = start + slots[m] * 64
        ahead = np.uint64(count.ctypes.data + 2 * (at + stride))
        prefetch_to_write(ahead)
        prefetch_to_write(ahead + np.uint64(64))
        curve = curve_of[m] * (WIDTH * COPIES)
        if support.shape[0]:
            far |= add_curve(count, at, votes[m, w], support[m, w], curves, curve, sums)
        else:
            far |= add_curve(count, at, votes[m, w], ONES, curves, curve, sums)
        if m % TOGETHER == TOGETHER - 1:
            move_sums(sums, tally)
    move_sums(sums, tally)
    return far


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
    curves: Array,
    curve_of: Array,
    bound: np.signedinteger[Any],
    sums: Array,
    key: Word,
    first: Word,
    has_coin: bool,
    end: int,
    zero_is_symbol: bool,
    lo: int,
    hi: int,
) -> tuple[Array, Array]:
    """Words lo to hi.

    `rows` has, for each worker, the memory address of its table in `CoordinateWeights`. `bound` is the most by
    which the curves of all workers together are off; below 0: they are of no use. `sums` is room for 64 of them.
    """
    workers = votes.shape[0]
    stride = counters.shape[1] * 64
    count = counters.reshape(-1)
    differ = np.zeros(workers, np.int64)
    cast = np.zeros(workers, np.int64)
    tally = np.empty(64, np.int32)
    index = np.zeros(64 * GROUP, np.uint16)
    for w in range(lo, hi):
        start = w * stride
        live = inside(w, 0, end)
        unsure = live
        if bound >= 0:
            unsure = _come_close_(
                tally, sums, votes, support, count, start, stride, slots, curves, curve_of, w
            )
            unsure = (unsure | within(tally, bound)) & live
        if popcount(unsure) > MANY:
            _look_up_(tally, index, votes, support, count, start, slots, rows, sizes, w)
        else:
            _look_up_some_(tally, unsure, votes, support, count, start, slots, rows, sizes, w)
        more, same, _ = classify(tally, 0, np.int32(-1))
        if has_coin:
            more |= same & coin_word(key, first, w)
            sure = live
        else:
            sure = live & ~same
            decided[w] = sure
        out[w] = more & live
        for m in range(workers):
            at = start + slots[m] * 64
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
