"""Weighted votes in Triton, 32 coordinates to a machine word; `cuda_majority` has equal weights.

The tally is a product of small matrices, for which a GPU has instructions (PTX ISA, "Matrix Fragments for
mma.m16n8k32"): bytes

    A (16 x 32), made of votes, times B (32 x 8), made of weights

spread over the 32 threads of a warp. Thread t = 0 ... 3 of quad q = 0 ... 7 has bytes 4 t to 4 t + 3, and
16 further, of rows q and q + 8 of A and of column q of B. A word of votes of which all bits but every
eighth are cleared is four such bytes as it stands: so a row is a word, and its bytes are eight workers'.
A column of B has each worker's weight in the place of one byte and else zeros: so it adds up that byte's
bits. A weight does not fit a byte: even columns take its low seven bits, odd ones the rest. In the end
thread t has the tallies of byte t of its quad's words. All tensors of this kernel are one number a thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from signvote.kernels.cuda_bits import (
    ONES,
    coin_words,
    flipped,
    four_words,
    inside,
    of_quad,
    popcount,
    product,
    turned,
    two_words,
    zeros,
)

ROWS = tl.constexpr(16)  # workers a product takes at a time: four groups of four
EVERY_EIGHTH = tl.constexpr(0x01010101)


@triton.jit
def _load(planes, at, first, workers, stride, last, thread, GROUPS, WIDE):
    """Four words from `at` on of workers t, t + 4, ... from the first on; none where there are no planes."""
    words = ()
    if planes is not None:
        for i in tl.static_range(GROUPS):
            worker = tl.minimum(first + thread % 4 + 4 * i, workers - 1)
            row = planes + worker * stride
            if WIDE:
                words = words + four_words(row + tl.minimum(at, last - 2))
            else:
                words = words + two_words(row + tl.minimum(at, last))
                words = words + two_words(row + tl.minimum(at + 2, last))
    return words


@triton.jit
def _columns(weights, first, workers, thread, GROUPS):
    """A thread's part of B for each group of four workers: minus the weights."""
    q = thread % 32 // 4
    parts = ()
    for i in tl.static_range(GROUPS):
        worker = first + thread % 4 + 4 * i
        weight = -tl.load(weights + worker, mask=worker < workers, other=0)
        half = tl.where(q % 2 == 0, weight & 127, (weight >> 7) & 255)
        by = (q // 2 * 8).to(tl.uint32)
        part = half.to(tl.uint32) << by
        parts = parts + (part,)
    return parts


@triton.jit
def _bit(word, j, SCALED):
    """Bit j of each byte, where it stands or, not SCALED, in the lowest place."""
    if SCALED:
        return word & (EVERY_EIGHTH << j)
    return (word >> j) & EVERY_EIGHTH


@triton.jit
def _add(sums, parts, y, pair, SCALED):
    """Add the products of all bits of two words of each worker: four sums for each of eight bits."""
    for i in tl.static_range(0, len(parts), 2):
        words = y[4 * i + 2 * pair :]
        for j in tl.static_range(8):
            a = (
                _bit(words[0], j, SCALED),
                _bit(words[1], j, SCALED),
                _bit(words[4], j, SCALED),
                _bit(words[5], j, SCALED),
            )
            these = sums[4 * j : 4 * j + 4]
            added = product(these, a, parts[i : i + 2])
            sums = sums[: 4 * j] + added + sums[4 * j + 4 :]
    return sums


@triton.jit
def _tally(sums, parts, y, voted, pair, SCALED):
    """Add all votes. An abstention is half for, half against: planes come twice, with ones and zeros."""
    for i in tl.static_range(len(voted)):
        zeroed = y[i] & voted[i]
        ones = y[i] | flipped(voted[i])
        y = y[:i] + (zeroed,) + y[i + 1 :] + (ones,)
    if len(voted) > 0:
        sums = _add(sums, parts, y[len(voted) :], pair, SCALED)
    return _add(sums, parts, y, pair, SCALED)


@triton.jit
def _collect(more, least, sums, half, SCALED):
    """Shift in two bytes: where half less the tally is below zero, and where it is at most zero."""
    for word in tl.static_range(1, -1, -1):
        for j in tl.static_range(7, -1, -1):
            low = sums[4 * j + 2 * word]
            high = sums[4 * j + 2 * word + 1]
            left = high * 128 + (half << j if SCALED else half) + low
            negative = left.to(tl.uint32, bitcast=True) >> 31
            more = (more << 1) | negative
            at_most_zero = (left - 1).to(tl.uint32, bitcast=True) >> 31
            least = (least << 1) | at_most_zero
    return more, least


@triton.jit(
    do_not_specialize=[
        "workers",
        "stride",
        "words",
        "key",
        "first",
        "begin",
        "end",
        "tiles_from",
        "tiles_to",
    ]
)
def vote_(
    out,
    decided,
    votes,
    support,
    counts,
    weights,
    workers,
    stride: tl.int64,
    words: tl.int64,
    key: tl.int64,
    first: tl.int64,
    begin: tl.int64,
    end: tl.int64,
    tiles_from: tl.int64,
    tiles_to: tl.int64,
    COIN: tl.constexpr,
    ALIGNED: tl.constexpr,
    ONCE: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Decide tiles of 32 words a warp by weights; with up to 16 workers, ONCE, count where each differs.

    Tallies stay below 2^31, and if they are SCALED by 2^7 too. Planes may begin at multiples of 16 bytes
    (WIDE) or of 8. Each program takes every so many tiles, and asks for the words of the next one ahead.
    A tie gets the coin, if there is one, and is in no count. `decided` gets a 0 there.
    """
    thread = tl.arange(0, 32 * WARPS)
    here = thread // 4 * 4
    last = words - 2
    number = tl.arange(0, BLOCK)
    all_weights = tl.load(weights + number, mask=number < workers, other=0)
    total = tl.sum(all_weights)
    half = total >> 1
    ties = ((total & 1) - 1).to(tl.uint32)  # an odd total has no tie
    if support is not None:
        half = total
        ties = (total * 0 - 1).to(tl.uint32)
    zero = tl.zeros([32 * WARPS], tl.uint32)
    nothing = zeros(32, 32 * WARPS)
    wrong = zeros(GROUPS, 32 * WARPS)
    cast = zeros(GROUPS, 32 * WARPS)
    sum_sure = zeros(1, 32 * WARPS)[0]
    parts = ()
    y = ()
    v = ()
    step = tl.num_programs(0).to(tl.int64)
    mine = tiles_from + tl.program_id(0)
    if ONCE:
        parts = _columns(weights, 0, workers, thread, GROUPS)
        begin_at = mine * (32 * WARPS) + here
        y = _load(votes, begin_at, 0, workers, stride, last, thread, GROUPS, WIDE)
        v = _load(support, begin_at, 0, workers, stride, last, thread, GROUPS, WIDE)
    for tile in range(mine, tiles_to, step):
        start = tile * (32 * WARPS)
        more = zero
        least = zero
        if ONCE:
            at = start + step * (32 * WARPS) + here
            next_y = _load(votes, at, 0, workers, stride, last, thread, GROUPS, WIDE)
            next_v = _load(support, at, 0, workers, stride, last, thread, GROUPS, WIDE)
            for pair in tl.static_range(1, -1, -1):
                sums = _tally(nothing, parts, y, v, pair, SCALED)
                more, least = _collect(more, least, sums, half, SCALED)
        else:
            evens = nothing
            odds = nothing
            for m in range(0, workers, ROWS):
                some = _columns(weights, m, workers, thread, GROUPS)
                signs = _load(votes, start + here, m, workers, stride, last, thread, GROUPS, WIDE)
                voted = _load(support, start + here, m, workers, stride, last, thread, GROUPS, WIDE)
                evens = _tally(evens, some, signs, voted, 0, SCALED)
                odds = _tally(odds, some, signs, voted, 1, SCALED)
            more, least = _collect(more, least, odds, half, SCALED)
            more, least = _collect(more, least, evens, half, SCALED)
        coins = (zero, zero, zero, zero)
        if COIN:
            own_coins = coin_words(key, first + start * 32, thread, ALIGNED)
            coins = of_quad(own_coins, thread)
        decision, same = _toss(turned(more, thread), turned(least, thread), ties, coins)

        low = begin - start * 32
        high = end - start * 32
        edge = (low > 0) | (high < 32 * 32 * WARPS)
        live = zero + ONES
        if edge:
            live = inside(thread, low, high)
        _write_word(out + start + thread, _own(decision, thread), live, edge)
        if decided is not None:
            sure = flipped(_own(same, thread))
            _write_word(decided + start + thread, sure, live, edge)
        if ONCE:
            wrong, cast = _count_words(wrong, cast, y, v, decision, of_quad(live, thread), same)
            if support is None:
                sum_sure += popcount(live & flipped(_own(same, thread)))
            y = next_y
            v = next_v
    if ONCE:
        everyone = tl.sum(sum_sure).to(tl.int64)
        _add_words(counts, wrong, cast, everyone, support, workers, WARPS)


@triton.jit
def _own(words, thread):
    """Of the words of a quad, the one in its own thread's place."""
    t = thread % 4
    low = tl.where(t == 0, words[0], words[1])
    high = tl.where(t == 2, words[2], words[3])
    return tl.where(t < 2, low, high)


@triton.jit
def _toss(more, least, ties, coins):
    """The decision, with the coin's where there is a tie, and the ties."""
    decision = ()
    tied = ()
    for i in tl.static_range(4):
        same = (more[i] ^ least[i]) & ties
        decided = more[i] | (same & coins[i])
        decision = decision + (decided,)
        tied = tied + (same,)
    return decision, tied


@triton.jit
def _write_word(plane, new, live, edge):
    """The new bits where they live; at an edge of the span the old ones elsewhere."""
    if edge:
        old = tl.load(plane, mask=live != 0, other=0)
        new = (new & live) | (old & flipped(live))
    tl.store(plane, new, mask=live != 0)


@triton.jit
def _count_words(wrong, cast, y, voted, decision, live, same):
    """Add the votes of each thread's workers against the decision, and those cast, where there is one."""
    for i in tl.static_range(len(y)):
        counted = live[i % 4] & flipped(same[i % 4])
        if len(voted) > 0:
            counted &= voted[i]
            more_cast = cast[i // 4] + popcount(counted)
            cast = cast[: i // 4] + (more_cast,) + cast[i // 4 + 1 :]
        differs = popcount((y[i] ^ decision[i % 4]) & counted)
        more_wrong = wrong[i // 4] + differs
        wrong = wrong[: i // 4] + (more_wrong,) + wrong[i // 4 + 1 :]
    return wrong, cast


@triton.jit
def _add_words(counts, wrong, cast, everyone, support, workers, WARPS):
    """Integers add up to the same whatever the order; without support all workers cast as many votes."""
    t = tl.arange(0, 4)
    for m in tl.static_range(len(wrong)):
        place = counts + 4 * m + t
        mask = 4 * m + t < workers
        by_quad = tl.reshape(wrong[m], [8 * WARPS, 4])
        total = tl.sum(by_quad, 0).to(tl.int64)
        tl.atomic_add(place, total, mask=mask, sem="relaxed")
        seen = tl.zeros([4], tl.int64) + everyone
        if support is not None:
            cast_by_quad = tl.reshape(cast[m], [8 * WARPS, 4])
            seen = tl.sum(cast_by_quad, 0).to(tl.int64)
        tl.atomic_add(place + workers, seen, mask=mask, sem="relaxed")
