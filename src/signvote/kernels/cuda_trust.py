"""The paper's vote in Triton: a weight for every worker and coordinate, counters updated in the same pass.

A thread has eight coordinates: a byte of every plane, and 16 bytes of every worker's counters. All tensors
of the main kernel are one number a thread. Memory is kept busy by asking early: while a thread works on
one tile, its part of the next is on the way into shared memory, where it has places of its own. Only votes
come in words, of which each thread of a quad asks for its share and reads its byte of all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from signvote.kernels.cuda_bits import coin_words, four_words, look_up, zeros
from signvote.kernels.cuda_shared import (
    MEMBER,
    arrived,
    ask,
    ask_word,
    asked,
    member_in_memory,
    member_of,
    put,
    room_for,
    settle,
    take,
    take_byte,
)

PAIR = tl.constexpr(0x00010001)


@triton.jit(do_not_specialize=["workers", "entries", "longest"])
def prepare_(
    members,
    small,
    counts,
    slots,
    tables,
    table_of,
    sizes,
    workers,
    entries,
    longest,
    MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make tables of int16, which take half the cache, counts of zero, and the numbers about each worker.

    A weight stands entry + part * counter bytes into the tables. The part is 2. It is 0 for a worker that
    does not vote, and its entry is then a zero.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(tables + at, mask=at < entries)
    tl.store(small + at, weight.to(tl.int16), mask=at < entries)
    if tl.program_id(0) == 0:
        m = tl.arange(0, MEMBERS)
        known = tl.minimum(m, workers - 1)
        there = m < workers
        slot = tl.load(slots + m, mask=there, other=-1).to(tl.int32)
        present = slot >= 0
        size = tl.load(sizes + known)
        table = tl.load(table_of + known).to(tl.int32)
        entry = table * longest + tl.where(present, size, 2 * size)
        tl.store(members + MEMBER * m, tl.where(present, slot * 32, -1))
        tl.store(members + MEMBER * m + 1, 2 * entry)
        tl.store(members + MEMBER * m + 2, tl.where(present, 2, 0))
        tl.store(counts + m, 0, mask=there)
        tl.store(counts + workers + m, 0, mask=there)


@triton.jit
def _bit(byte, k, SCALED):
    """Bit k of each byte, where it stands or, not SCALED, in the lowest place."""
    if SCALED:
        return (byte & (1 << k)).to(tl.int32)
    return ((byte >> k) & 1).to(tl.int32)


@triton.jit
def _weighed(sums, cells, y, voted, tables, entry, part, SCALED):
    """Add a worker's weights at eight coordinates, all to the first eight sums and those for to the others."""
    for k in tl.static_range(8):
        count = (cells[k // 2] >> 16) if k % 2 else (cells[k // 2] & 0xFFFF)
        weight = look_up(tables, count * part + entry)
        everybody = weight
        those_for = weight * _bit(y, k, SCALED)
        if voted is not None:
            everybody = weight * _bit(voted, k, SCALED)
        all_votes = sums[k] + everybody
        votes_for = sums[8 + k] + those_for
        sums = sums[:k] + (all_votes,) + sums[k + 1 :]
        sums = sums[: 8 + k] + (votes_for,) + sums[9 + k :]
    return sums


@triton.jit
def _decided(sums, zero, VOTED, SCALED):
    """Bytes with a one where more votes are for than against, and where as many."""
    more = zero
    least = zero
    for k in tl.static_range(7, -1, -1):
        left = (sums[k] << k if SCALED and not VOTED else sums[k]) - 2 * sums[8 + k]
        negative = left.to(tl.uint32, bitcast=True) >> 31
        at_most_zero = (left - 1).to(tl.uint32, bitcast=True) >> 31
        more = (more << 1) | negative
        least = (least << 1) | at_most_zero
    return more, more ^ least


@triton.jit
def _spread(bits, i):
    """Bits 2 i and 2 i + 1 of a byte, which was multiplied by 0x8001, in the two halves of a word."""
    return (bits >> (2 * i)) & PAIR


@triton.jit
def _updated(words, y, voted, more, sure, live, missing_adds, SURE):
    """A worker's counters after the decision."""
    mine = live
    if voted is not None:
        mine &= voted
    against = ((y ^ more) & mine & sure) * 0x8001
    missing = (mine ^ sure) * 0x8001
    new = ()
    for i in tl.static_range(4):
        word = words[i] + _spread(against, i) * 2
        if voted is not None or not SURE:
            word += _spread(missing, i) * missing_adds
        new = new + (word,)
    return new


@triton.jit
def _write(plane, new, live):
    """The new bits where they live, the old ones elsewhere."""
    partly = (live != 0) & (live != 255)
    old = tl.load(plane, mask=partly, other=0).to(tl.uint32)
    bits = (new & live) | (old & (live ^ 255))
    tl.store(plane, bits.to(tl.uint8), mask=live != 0)


@triton.jit
def _places(counters, at, stride, last):
    """Where the counters of the first worker stand for these bytes, and the bytes, none beyond the last word."""
    word = tl.minimum(at >> 3, last)
    cells = counters + word * stride + (at & 7) * 4
    byte = tl.minimum(at, 8 * last + 7)
    return cells, byte


@triton.jit
def _member_at(base, members, m, ONCE):
    """Where a worker's counters and weights stand, and 2 if it takes part, else 0."""
    if ONCE:
        return member_of(base, members, m)
    return member_in_memory(base, members, m)


@triton.jit
def _counters(room, cells, m, ONCE):
    """A thread's 16 bytes of worker m's counters."""
    if ONCE:
        return take(room + 16 * room.shape[0] * m, cells)
    return four_words(cells)


@triton.jit
def _ask_ballots(words, byte, votes, support, workers, stride, WORKERS):
    """Ask for a word of everybody's votes; a thread of a quad asks for every fourth worker's."""
    threads: tl.constexpr = words.shape[0]
    quarter = tl.arange(0, threads) % 4
    for i in tl.static_range((WORKERS + 3) // 4):
        worker = tl.minimum(4 * i + quarter, workers - 1)
        place = worker * stride + byte
        ask_word(words + 4 * threads * i, votes + place)
        if support is not None:
            ask_word(words + 4 * threads * (4 + i), support + place)


@triton.jit
def _ballot(words, plane, m, stride, byte, ONCE):
    """A thread's byte of worker m's votes."""
    if ONCE:
        threads: tl.constexpr = words.shape[0]
        from_thread = (tl.arange(0, threads) % 4 * 3).to(tl.uint32)  # the first of the quad, byte by byte
        words += m // 4 * (4 * threads) + m % 4 * 4 - from_thread
        return take_byte(words, plane + m * stride + byte)
    return tl.load(plane + m * stride + byte).to(tl.uint32)


@triton.jit(do_not_specialize=["workers", "stride", "missing_adds", "key", "first", "n", "last", "tiles"])
def vote_by_coordinate_(
    out,
    decided,
    votes,
    support,
    counters,
    members,
    tables,
    workers,
    stride: tl.int64,
    counter_stride: tl.int64,
    missing_adds,
    key: tl.int64,
    first: tl.int64,
    n: tl.int64,
    last: tl.int64,
    tiles: tl.int64,
    COIN: tl.constexpr,
    WORKERS: tl.constexpr,
    ONCE: tl.constexpr,
    SCALED: tl.constexpr,
    UNROLL: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Decide tiles of 32 bytes a warp: first everybody's weights, then, by the decision, everybody's counters.

    If there are few workers, at most WORKERS, their counters are read ONCE, ahead: the next tile's when
    this one's are used. Each program decides every n-th tile, where n is the number of programs.
    """
    THREADS: tl.constexpr = 32 * WARPS
    VOTED: tl.constexpr = support is not None
    MEMBERS: tl.constexpr = 16 * WORKERS  # bytes of shared memory
    COUNTERS: tl.constexpr = 16 * THREADS * WORKERS
    BALLOTS: tl.constexpr = 16 * THREADS * (2 if VOTED else 1)  # twice: of this tile and of the next
    thread = tl.arange(0, THREADS)
    zero = tl.zeros([THREADS], tl.uint32)
    nothing = zeros(16, THREADS)
    step = tl.num_programs(0).to(tl.int64)
    mine = tl.program_id(0).to(tl.int64)
    base = zero
    room = zero
    words = zero
    turn = tl.program_id(0).to(tl.uint32) * 0
    if ONCE:
        base = room_for(thread, MEMBERS + COUNTERS + 2 * BALLOTS)
        room = base + MEMBERS + 16 * thread.to(tl.uint32)
        words = base + (MEMBERS + COUNTERS) + 4 * thread.to(tl.uint32)
        settle(base, members, thread, WORKERS)
        cells, byte = _places(counters, mine * THREADS + thread, counter_stride, last)
        _ask_ballots(words, byte, votes, support, workers, stride, WORKERS)
        for m in range(workers):
            place, _, _ = member_of(base, members, m)
            ask(room + 16 * THREADS * m, cells + tl.maximum(place, 0))
        asked(room)
    for tile in range(mine, tiles, step):
        at = tile * THREADS + thread
        cells, byte = _places(counters, at, counter_stride, last)
        later, later_byte = _places(counters, at + step * THREADS, counter_stride, last)
        ballots = words + turn
        if ONCE:
            arrived(room)
            turn ^= BALLOTS
            _ask_ballots(words + turn, later_byte, votes, support, workers, stride, WORKERS)
        sums = nothing
        for m in tl.range(0, workers, loop_unroll_factor=UNROLL):
            place, entry, part = _member_at(base, members, m, ONCE)
            place = tl.maximum(place, 0)
            count = _counters(room, cells + place, m, ONCE)
            y = _ballot(ballots, votes, m, stride, byte, ONCE)
            voted = None
            if VOTED:
                voted = _ballot(ballots + 16 * THREADS, support, m, stride, byte, ONCE)
                y &= voted
            sums = _weighed(sums, count, y, voted, tables, entry, part, SCALED)

        more, same = _decided(sums, zero, VOTED, SCALED)
        left = tl.minimum(tl.maximum(n - 8 * at, 0), 8)
        live = (1 << left.to(tl.uint32)).to(tl.uint32) - 1
        sure = live
        if COIN:
            coins = coin_words(key, first, at >> 2, False)
            by = (thread % 4 * 8).to(tl.uint32)
            more |= same & (coins >> by)
        else:
            sure &= same ^ 255
        _write(out + at, more, live)
        if decided is not None:
            _write(decided + at, sure, live)

        for m in tl.range(0, workers, loop_unroll_factor=UNROLL):
            place, _, _ = _member_at(base, members, m, ONCE)
            where = tl.where(place < 0, 0, live)
            place = tl.maximum(place, 0)
            count = _counters(room, cells + place, m, ONCE)
            if ONCE:
                ask(room + 16 * THREADS * m, later + place)
            y = _ballot(ballots, votes, m, stride, byte, ONCE)
            voted = None
            if VOTED:
                voted = _ballot(ballots + 16 * THREADS, support, m, stride, byte, ONCE)
            updated = _updated(count, y, voted, more, sure, live, missing_adds, COIN)
            put(cells + place, updated, where)
        if ONCE:
            asked(room)
    if ONCE:
        arrived(room)  # what nobody will use
